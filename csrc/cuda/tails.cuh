// The small kernels around the passes: merging of split rows, per-row statistics, edge tensors.
#pragma once

#include "backward.cuh"

namespace dfgnn::cuda {

inline constexpr int kMergeWarps = 8;

// One 16-byte column group of a split row per lane; the warps of a block share its slots.
// grid (num_splits, ceil(H D / (32 VA))).
template <typename A>
struct MergePlace {
  static constexpr int VA = 16 / sizeof(A);
  int lane, warp, column, width, head;
  bool ok;
  __device__ __forceinline__ MergePlace(const Shape& s, int dim)
      : lane(threadIdx.x & 31), warp(threadIdx.x >> 5), width(s.heads * dim) {
    column = (blockIdx.y * 32 + lane) * VA;
    ok = column < width;
    head = ok ? column / dim : 0;
  }
  __device__ __forceinline__ void load(const void* partial, int slot, A (&x)[VA]) const {
    Pack<A>::unpack(load_raw(static_cast<const A*>(partial) + int64_t(slot) * width + column), x);
  }
  template <typename T>
  __device__ __forceinline__ void store(void* rows, int row, const A (&x)[VA], A factor) const {
    T* out = static_cast<T*>(rows) + int64_t(row) * width + column;
#pragma unroll
    for (int k = 0; k < VA; ++k) out[k] = T(x[k] * factor);
  }
};

// out = sum_s exp(max_s - max) partial_s / sum_s exp(max_s - max) mass_s: the exact merge of online softmax.
template <typename T>
__global__ void merge_forward_kernel(const ForwardParams p) {
  using A = Acc<T>;
  constexpr int VA = MergePlace<A>::VA;
  __shared__ A shared[kMergeWarps][3 + 2 * VA][32];
  const MergePlace<A> me(p.shape, p.shape.value_dim);
  const Split split = p.csr.splits[blockIdx.x];
  if (split.slot_begin == split.slot_end) return;  // a place that the plan did not need
  A top = -infinity<A>(), mass = 0, mass_positive = 0, acc[VA] = {}, acc_positive[VA] = {};

  const auto add = [&](A other_top, A other_mass, A other_positive, const A(&x)[VA],
                       const A(&x_positive)[VA]) {
    const A risen = max(top, other_top);
    const A mine = top == risen ? A(1) : exponential(top - risen);
    const A theirs = other_top == risen ? A(1) : exponential(other_top - risen);
    top = risen;
    mass = mass * mine + other_mass * theirs;
    mass_positive = mass_positive * mine + other_positive * theirs;
#pragma unroll
    for (int k = 0; k < VA; ++k) {
      acc[k] = acc[k] * mine + x[k] * theirs;
      acc_positive[k] = acc_positive[k] * mine + x_positive[k] * theirs;
    }
  };

  if (me.ok) {
    for (int slot = split.slot_begin + me.warp * split.stride; slot < split.slot_end;
         slot += kMergeWarps * split.stride) {
      const A* stats = static_cast<const A*>(p.partial_stats) + (int64_t(slot) * p.shape.heads + me.head) * 3;
      A x[VA], x_positive[VA] = {};
      me.load(p.partial_out, slot, x);
      if (p.positive) me.load(p.partial_positive, slot, x_positive);
      add(stats[0], stats[1], stats[2], x, x_positive);
    }
  }
  A(*mine)[32] = shared[me.warp];
  mine[0][me.lane] = top, mine[1][me.lane] = mass, mine[2][me.lane] = mass_positive;
#pragma unroll
  for (int k = 0; k < VA; ++k) mine[3 + k][me.lane] = acc[k], mine[3 + VA + k][me.lane] = acc_positive[k];
  __syncthreads();
  if (me.warp || !me.ok) return;
  for (int w = 1; w < kMergeWarps; ++w) {
    A x[VA], x_positive[VA];
#pragma unroll
    for (int k = 0; k < VA; ++k)
      x[k] = shared[w][3 + k][me.lane], x_positive[k] = shared[w][3 + VA + k][me.lane];
    add(shared[w][0][me.lane], shared[w][1][me.lane], shared[w][2][me.lane], x, x_positive);
  }
  const A norm = mass == 0 ? A(0) : A(1) / mass;
  me.template store<T>(p.out, split.row, acc, norm);
  if (p.positive) me.template store<T>(p.positive, split.row, acc_positive, norm);
  if (me.column % p.shape.value_dim == 0) {
    const int64_t at = int64_t(split.row) * p.shape.heads + me.head;
    static_cast<A*>(p.lse)[at] = mass == 0 ? infinity<A>() : top + logarithm(mass);
    if (p.positive) static_cast<A*>(p.positive_mass)[at] = mass_positive * norm;
  }
}

// rows[row] = factor * sum of the row's slots, in a fixed order.
template <typename T>
__global__ void merge_rows_kernel(const Csr csr, const Shape shape, int dim, const void* partial, void* rows,
                                  double factor) {
  using A = Acc<T>;
  constexpr int VA = MergePlace<A>::VA;
  __shared__ A shared[kMergeWarps][VA][32];
  const MergePlace<A> me(shape, dim);
  const Split split = csr.splits[blockIdx.x];
  if (split.slot_begin == split.slot_end) return;
  A acc[VA] = {};
  if (me.ok) {
#pragma unroll 4
    for (int slot = split.slot_begin + me.warp * split.stride; slot < split.slot_end;
         slot += kMergeWarps * split.stride) {
      A x[VA];
      me.load(partial, slot, x);
#pragma unroll
      for (int k = 0; k < VA; ++k) acc[k] += x[k];
    }
  }
#pragma unroll
  for (int k = 0; k < VA; ++k) shared[me.warp][k][me.lane] = acc[k];
  __syncthreads();
  if (me.warp || !me.ok) return;
  for (int w = 1; w < kMergeWarps; ++w) {
#pragma unroll
    for (int k = 0; k < VA; ++k) acc[k] += shared[w][k][me.lane];
  }
  me.template store<T>(rows, split.row, acc, A(factor));
}

// out[row, h] = sum of partial[slot, h]; a warp per (split, head).
template <typename A>
__global__ void merge_scalars_kernel(const Csr csr, int heads, const A* partial, A* out) {
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

// delta = g . (out - out_bias) (+ row_sums), the stats that the pass over sources reads, and
// grad_alpha_dst = (1 - slope) (g . positive - delta positive_mass). LPH lanes per (row, head), kPairs of
// them at a time, so that enough loads are in flight.
inline constexpr int kPairs = 2;

template <typename T, int LPH>
__global__ void __launch_bounds__(kThreads) prepare_additive_kernel(const BackwardParams p) {
  using A = Acc<T>;
  const int64_t total = p.shape.num_dst * p.shape.heads;
  const int64_t group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / LPH;
  const int64_t groups = int64_t(gridDim.x) * kThreads / LPH;
  const int dim = p.shape.value_dim, hl = threadIdx.x % LPH;
  A delta[kPairs] = {}, dot_positive[kPairs] = {};
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t pair = group + k * groups;
    for (int column = hl * kVec<T>; pair < total && column < dim; column += LPH * kVec<T>) {
      const int64_t at = pair * dim + column;
      A g[kVec<T>];
      Pack<T>::unpack(load_raw(static_cast<const T*>(p.grad_out) + at), g);
      A out[kVec<T>], bias[kVec<T>] = {};
      Pack<T>::unpack(load_raw(static_cast<const T*>(p.out) + at), out);
      if (p.out_bias)
        Pack<T>::unpack(load_raw(static_cast<const T*>(p.out_bias) + pair % p.shape.heads * dim + column),
                        bias);
#pragma unroll
      for (int c = 0; c < kVec<T>; ++c) delta[k] += g[c] * (out[c] - bias[c]);
      if (p.positive)
        dot_positive[k] = dot<T>(g, load_raw(static_cast<const T*>(p.positive) + at), dot_positive[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t pair = group + k * groups;
    delta[k] = reduce_sum<LPH>(delta[k]);
    dot_positive[k] = reduce_sum<LPH>(dot_positive[k]);
    if (pair >= total || hl) continue;
    if (p.grad_attention) delta[k] += static_cast<const A*>(p.row_sums)[pair];
    static_cast<NodeStats<A>*>(p.node_stats)[pair] = {
        p.alpha_dst ? static_cast<const A*>(p.alpha_dst)[pair] : A(0), static_cast<const A*>(p.lse)[pair],
        delta[k], A(0)};
    if (p.positive)
      static_cast<A*>(p.grad_alpha_dst)[pair] =
          (1 - A(p.negative_slope)) *
          (dot_positive[k] - delta[k] * static_cast<const A*>(p.positive_mass)[pair]);
  }
}

// sums[k, column] = sum of parts[i, column] over the k-th run of consecutive parts. grid (kAttnSums,
// columns).
template <typename A>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const A* parts, int64_t num_parts, int width, A* sums) {
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= width) return;
  const int64_t first = num_parts * blockIdx.x / kAttnSums, last = num_parts * (blockIdx.x + 1) / kAttnSums;
  A sum = 0;
#pragma unroll 8
  for (int64_t part = first; part < last; ++part) sum += parts[part * width + column];
  sums[int64_t(blockIdx.x) * width + column] = sum;
}

// out[row, h] = sum over the row's edges of x[eid, h] * y[eid, h] (y null: 1). A warp per item.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const Csr csr, int heads, const A* x, const A* y, A* out, A* partial) {
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
    if (lane == 0)
      (item.slot < 0 ? out + int64_t(item.row) * heads : partial + int64_t(item.slot) * heads)[head] = sum;
  }
}

// Raw scores in p.attention -> w m exp(score - lse). A warp per item.
template <typename T>
__global__ void __launch_bounds__(kThreads) attention_kernel(const ForwardParams p) {
  using A = Acc<T>;
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
    *a = exponential(*a - static_cast<const A*>(p.lse)[int64_t(item.row) * heads + head]) * edge.weight(eid) *
         edge.mask(eid);
  }
}

}  // namespace dfgnn::cuda
