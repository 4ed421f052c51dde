// The small kernels before and after the passes: they merge the partial results of split rows, add up edge
// tensors over the edges of each row, compute returned attention, and add up the partial sums of grad_attn.
#pragma once

#include "lanes.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

inline constexpr int kMergeWarps = 16;  // the most warps of a block that merges

// The place of a thread in a kernel that merges the partial results of split rows, [num_slots, H, D] of type
// A. A lane takes 16 bytes, VA columns, of a split row; the warps of a block share the row's slots. grid:
// (num_splits, ceil(H D / (32 VA))).
template <typename A>
struct MergePlace {
  static constexpr int VA = 16 / sizeof(A);  // columns of a lane
  int lane, warp, warps, column, width, head;
  bool ok;
  __device__ __forceinline__ MergePlace(const Shape& s, int dim)
      : lane(threadIdx.x & 31), warp(threadIdx.x >> 5), warps(blockDim.x >> 5), width(s.heads * dim) {
    column = (blockIdx.y * 32 + lane) * VA;
    ok = column < width;
    head = ok ? column / dim : 0;
  }
  // x = this lane's columns of a slot of `partial`.
  __device__ __forceinline__ void load(const void* partial, int slot, A (&x)[VA]) const {
    Pack<A>::unpack(load_raw(static_cast<const A*>(partial) + int64_t(slot) * width + column), x);
  }
  // Stores factor x in this lane's columns of row `row` of `rows` [N, H, D] T.
  template <typename T>
  __device__ __forceinline__ void store(void* rows, int row, const A (&x)[VA], A factor) const {
    T* out = static_cast<T*>(rows) + int64_t(row) * width + column;
    repeat<VA>([&](int k) { out[k] = T(x[k] * factor); });
  }
  // Adds up over the warps, in a tree: the upper half of the warps stores `numbers` values per lane in shared
  // memory (store(to): the k-th at to[32 k]), and the lower half adds them to its own (add(from)), until the
  // first warp has the total.
  template <class Store, class Add>
  __device__ __forceinline__ void by_halves(int numbers, Store store, Add add) const {
    extern __shared__ int4 merge_slots[];
    for (int half = warps / 2; half; half /= 2) {
      A* const slot = reinterpret_cast<A*>(merge_slots) + (warp & (half - 1)) * numbers * 32 + lane;
      if (warp >= half && warp < 2 * half) store(slot);
      __syncthreads();
      if (warp < half) add(slot);
      if (half > 1) __syncthreads();
    }
  }
};
// How many values per lane by_halves moves in merge_forward_kernel: top, mass, positive, and one or two sums.
template <typename A>
__host__ __device__ constexpr int merge_numbers(bool positive) {
  return 3 + MergePlace<A>::VA * (positive ? 2 : 1);
}

// Merges the split rows of forward. Over a row's slots s, out = sum_s exp(max_s - max) partial_out_s / sum_s
// exp(max_s - max) mass_s (+ out_bias), where max_s and mass_s are those of the slot's softmax and max is the
// largest max_s: the exact merge of online softmax. Also writes `positive` and statistics.
template <typename T>
__global__ void merge_forward_kernel(const ForwardParams p) {
  using A = Acc<T>;
  using State = Softmax<A, true>;
  constexpr int VA = MergePlace<A>::VA;
  follow();
  const MergePlace<A> me(p.shape, p.shape.value_dim);
  const Split split = p.csr.splits[blockIdx.x];
  if (split.slot_begin == split.slot_end) return;  // the plan did not need this split
  State softmax;
  A acc[VA] = {}, acc_positive[VA] = {};
  const auto add = [&](const State& other, const A(&x)[VA], const A(&x_positive)[VA]) {
    A theirs;
    const A ours = softmax.merge(other, theirs);
    repeat<VA>([&](int k) {
      acc[k] = acc[k] * ours + x[k] * theirs;
      acc_positive[k] = acc_positive[k] * ours + x_positive[k] * theirs;
    });
  };

  // Each warp merges some of the slots.
  if (me.ok) {
    for (int slot = split.slot_begin + me.warp * split.stride; slot < split.slot_end;
         slot += me.warps * split.stride) {
      A x[VA], x_positive[VA] = {};
      me.load(p.partial_out, slot, x);
      if (p.positive) me.load(p.partial_positive, slot, x_positive);
      add(static_cast<const State*>(p.partial_stats)[int64_t(slot) * p.shape.heads + me.head], x, x_positive);
    }
  }

  me.by_halves(
      merge_numbers<A>(p.positive),
      [&](A* to) {
        to[0] = softmax.top, to[32] = softmax.mass, to[64] = softmax.positive;
        repeat<VA>([&](int k) { to[(3 + k) * 32] = acc[k]; });
        if (p.positive) repeat<VA>([&](int k) { to[(3 + VA + k) * 32] = acc_positive[k]; });
      },
      [&](const A* from) {
        A x[VA], x_positive[VA] = {};
        repeat<VA>([&](int k) { x[k] = from[(3 + k) * 32]; });
        if (p.positive) repeat<VA>([&](int k) { x_positive[k] = from[(3 + VA + k) * 32]; });
        add({from[0], from[32], from[64]}, x, x_positive);
      });
  if (me.warp || !me.ok) return;
  const A norm = softmax.norm();
  repeat<VA>([&](int k) {
    acc[k] *= norm;
    if (p.out_bias) acc[k] += A(static_cast<const T*>(p.out_bias)[me.column + k]);
  });
  me.template store<T>(p.out, split.row, acc, A(1));
  if (p.positive) me.template store<T>(p.positive, split.row, acc_positive, norm);
  if (me.column % p.shape.value_dim == 0) {
    const int64_t at = int64_t(split.row) * p.shape.heads + me.head;
    static_cast<RowStats<A>*>(p.stats)[at] = softmax.stats();
    if (p.positive) static_cast<A*>(p.positive_mass)[at] = softmax.positive * norm;
  }
}

// rows[row] = factor * sum of the slots of `partial` that the row has, in a fixed order.
template <typename T>
__global__ void merge_rows_kernel(const Csr csr, const Shape shape, int dim, const void* partial, void* rows,
                                  double factor) {
  using A = Acc<T>;
  constexpr int VA = MergePlace<A>::VA;
  follow();
  const MergePlace<A> me(shape, dim);
  const Split split = csr.splits[blockIdx.x];
  if (split.slot_begin == split.slot_end) return;
  A acc[VA] = {};
  if (me.ok) {
#pragma unroll 4
    for (int slot = split.slot_begin + me.warp * split.stride; slot < split.slot_end;
         slot += me.warps * split.stride) {
      A x[VA];
      me.load(partial, slot, x);
      repeat<VA>([&](int k) { acc[k] += x[k]; });
    }
  }
  me.by_halves(
      VA, [&](A* to) { repeat<VA>([&](int k) { to[k * 32] = acc[k]; }); },
      [&](const A* from) { repeat<VA>([&](int k) { acc[k] += from[k * 32]; }); });
  if (me.warp || !me.ok) return;
  me.template store<T>(rows, split.row, acc, A(factor));
}

// out[row, h] = sum of partial[slot, h] over the slots of the row. A warp takes a split row and a head.
template <typename A>
__global__ void merge_scalars_kernel(const Csr csr, int heads, const A* partial, A* out) {
  follow();
  const int64_t pair = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (pair >= csr.num_splits * heads) return;
  const Split split = csr.splits[pair / heads];
  if (split.slot_begin == split.slot_end) return;
  const int head = int(pair % heads);
  A sum = 0;
  for (int slot = split.slot_begin + int(threadIdx.x & 31) * split.stride; slot < split.slot_end;
       slot += 32 * split.stride)
    sum += partial[int64_t(slot) * heads + head];
  sum = reduce_sum<32>(sum);
  if ((threadIdx.x & 31) == 0) out[int64_t(split.row) * heads + head] = sum;
}

// out[row, h] = sum over the row's edges of x[eid, h] * y[eid, h], or of x[eid, h] if y is null. The sum of a
// row chunk goes to partial[slot, h]. A warp takes a work item.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const Csr csr, int heads, const A* x, const A* y, A* out, A* partial) {
  follow();
  const int64_t index = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (index >= csr.num_items) return;
  const int4 raw = __ldg(reinterpret_cast<const int4*>(csr.items) + index);
  const Item item = {raw.x, raw.y, raw.z, raw.w};
  if (item.row < 0) return;
  const int lane = threadIdx.x & 31;
  for (int head = 0; head < heads; ++head) {
    A sum = 0;
    for (int k = item.begin + lane; k < item.end; k += 32) {
      const int64_t at = int64_t(edge_id(csr, k)) * heads + head;
      sum += y ? x[at] * y[at] : x[at];
    }
    sum = reduce_sum<32>(sum);
    if (lane == 0) {
      A& total =
          (item.slot < 0 ? out + int64_t(item.row) * heads : partial + int64_t(item.slot) * heads)[head];
      total = item.slot == kJoins ? read_number(&total) + sum : sum;
    }
  }
}

// Replaces the scores in p.attention by w m alpha (ForwardParams in params.h). A warp takes a work item.
template <typename T>
__global__ void __launch_bounds__(kThreads) attention_kernel(const ForwardParams p) {
  using A = Acc<T>;
  follow();
  const int64_t index = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (index >= p.csr.num_items) return;
  const int4 raw = __ldg(reinterpret_cast<const int4*>(p.csr.items) + index);
  const Item item = {raw.x, raw.y, raw.z, raw.w};
  if (item.row < 0) return;
  const int heads = p.shape.heads;
  const int64_t work = int64_t(item.end - item.begin) * heads;
  for (int64_t k = threadIdx.x & 31; k < work; k += 32) {
    const int head = int(k % heads), eid = edge_id(p.csr, item.begin + int(k / heads));
    const EdgeReader<T> edge(p.edge, heads, head);
    A* a = static_cast<A*>(p.attention) + int64_t(eid) * heads + head;
    const RowStats<A> row =
        load_stats(static_cast<const RowStats<A>*>(p.stats) + int64_t(item.row) * heads + head);
    *a = row.alpha(*a) * edge.weight(eid) * edge.mask(eid);
  }
}

// sums[k, column] = sum of parts[i, column] over the parts i of the k-th range: the parts are divided into
// gridDim.x equal ranges. grid: (ranges, ceil(columns / 32)), block: (32, kSumRows).
inline constexpr int kSumRows = 32;
template <typename A>
__global__ void __launch_bounds__(32 * kSumRows)
    sum_parts_kernel(const A* parts, int64_t num_parts, int width, A* sums) {
  follow();
  const int column = blockIdx.y * 32 + threadIdx.x;
  const int64_t first = num_parts * blockIdx.x / gridDim.x, last = num_parts * (blockIdx.x + 1) / gridDim.x;
  A sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t part = first + threadIdx.y; part < last; part += kSumRows)
      sum += parts[part * width + column];
  }
  __shared__ A rows[kSumRows][32];
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= width) return;
  repeat<kSumRows - 1>([&](int k) { sum += rows[k + 1][threadIdx.x]; });
  sums[int64_t(blockIdx.x) * width + column] = sum;
}

}  // namespace dfgnn::cuda
