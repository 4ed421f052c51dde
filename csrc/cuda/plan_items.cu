// Items and splits, on the device: what dfgnn/schedule does with tensors on the CPU. Where atomics decide
// places, these are places of items, splits and slots in memory.
#include "scan.cuh"

namespace dfgnn::cuda {
namespace {

// Lengths are alike within a quarter of an octave.
constexpr int kBuckets = kPlanBuckets;
static_assert(kBuckets <= kPlanThreads);
__device__ __forceinline__ int bucket_of(int length) {
  const int log2 = 31 - __clz(max(length, 1));
  const int quarter = log2 >= 2 ? (length >> (log2 - 2)) & 3 : 0;
  return 4 * log2 + quarter;
}

// Pieces of a row's edges [begin, end).
struct Pieces {
  int64_t begin = 0, end = 0;
  int count = 0, length = 0;
  Pieces() = default;
  // always: a piece even where there is no edge
  __device__ __forceinline__ Pieces(int64_t begin, int64_t end, int max_edges, bool always)
      : begin(begin), end(end) {
    const int edges = int(end - begin);
    count = edges ? (edges - 1) / max_edges + 1 : always;
    length = count ? (edges - 1) / count + 1 : 0;
  }
  __device__ __forceinline__ Item item(int row, int k, int slot) const {
    const int64_t from = min(begin + int64_t(k) * length, end);
    return {row, int(from), int(min(from + length, end)), slot};
  }
};

// The parts of a row, one after the other: the neighbours of a row that is cut by its sources rise.
struct Cursor {
  int64_t begin, end;
  bool empty;
  __device__ __forceinline__ Cursor(const PlanParams& p, int64_t row)
      : begin(p.indptr[row]), end(p.indptr[row + 1]), empty(begin == end) {}
  __device__ __forceinline__ Pieces next(const PlanParams& p, int part) {
    const int64_t from = begin;
    begin = end;
    if (part + 1 < p.parts) {
      const int64_t bound = (p.num_cols * (part + 1) + p.parts - 1) / p.parts;
      int64_t low = from;
      while (low < begin) {
        const int64_t middle = (low + begin) / 2;
        if (p.indices[middle] < bound)
          low = middle + 1;
        else
          begin = middle;
      }
    }
    return Pieces(from, begin, p.max_edges, empty && part == 0);
  }
};

// Per part: how many items each bucket has, and how many of their places are taken.
__device__ __forceinline__ int32_t* bucket_counts(const PlanParams& p, int part) {
  return p.counts + 3 + int64_t(part) * 2 * kBuckets;
}

__global__ void __launch_bounds__(kPlanThreads) lengths_kernel(const PlanParams p) {
  __shared__ int buckets[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  Cursor cursor(p, ok ? row : 0);
  for (int part = 0; part < p.parts; ++part) {
    if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
    __syncthreads();
    const Pieces pieces = cursor.next(p, part);
    if (ok && pieces.count) atomicAdd(&buckets[p.by_length ? bucket_of(pieces.length) : 0], pieces.count);
    __syncthreads();
    if (threadIdx.x < kBuckets && buckets[threadIdx.x])
      atomicAdd(&bucket_counts(p, part)[threadIdx.x], buckets[threadIdx.x]);
    __syncthreads();
  }
}

// Slots and the split of a row of several pieces: the first slot, -1 for one piece.
__device__ __forceinline__ int split(const PlanParams& p, int row, int pieces) {
  if (pieces == 1) return -1;
  atomicAdd(&p.counts[0], pieces - 1);
  const int slot = atomicAdd(&p.counts[1], pieces);
  Split* splits = p.splits + int64_t(atomicAdd(&p.counts[2], 1)) * p.stride;
  for (int r = 0; r < p.stride && row * p.stride + r < p.last_row; ++r)
    splits[r] = {row * p.stride + r, slot * p.stride + r, (slot + pieces) * p.stride, p.stride};
  return slot;
}

__device__ __forceinline__ Item item_of(const PlanParams& p, const Pieces& pieces, int row, int k, int slot) {
  return pieces.item(row * p.stride, k, slot < 0 ? -1 : slot * p.stride);
}

// In row order, a split row's pieces but the first in front.
__global__ void __launch_bounds__(kPlanThreads) natural_kernel(const PlanParams p) {
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (row >= p.num_rows) return;
  const Pieces pieces = Cursor(p, row).next(p, 0);
  const int slot = split(p, int(row), pieces.count);
  p.items[p.front + row] = item_of(p, pieces, int(row), 0, slot);
  if (slot < 0) return;
  // One fewer than slots per split row: their places are taken from the end of the front.
  const int64_t end = p.front - atomicAdd(&p.counts[3], pieces.count - 1);
  for (int k = 1; k < pieces.count; ++k) p.items[end - k] = item_of(p, pieces, int(row), k, slot + k);
}

// Part by part; in a part by falling length, or the rows of a block together.
__global__ void __launch_bounds__(kPlanThreads) ordered_kernel(const PlanParams p) {
  __shared__ int start[kBuckets], taken[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  int slot = -1;
  if (ok) {
    Cursor all(p, row);
    int pieces = 0;
    for (int part = 0; part < p.parts; ++part) pieces += all.next(p, part).count;
    slot = split(p, int(row), pieces);
  }
  Cursor cursor(p, ok ? row : 0);
  const int own = kBuckets - 1 - int(threadIdx.x);  // this thread's bucket, the longest first
  int before = 0;
  for (int part = 0; part < p.parts; ++part) {
    int32_t* counts = bucket_counts(p, part);
    int total;
    const int begin = before + sum_before(own >= 0 ? counts[own] : 0, total);
    if (own >= 0) start[own] = begin, taken[own] = 0;
    __syncthreads();
    const Pieces pieces = cursor.next(p, part);
    const int bucket = p.by_length ? bucket_of(pieces.length) : 0;
    int rank = 0;
    if (ok && pieces.count) rank = atomicAdd(&taken[bucket], pieces.count);
    __syncthreads();
    if (own >= 0 && taken[own]) start[own] += atomicAdd(&counts[kBuckets + own], taken[own]);
    __syncthreads();
    if (ok) {
      for (int k = 0; k < pieces.count; ++k)
        p.items[int64_t(start[bucket]) + rank + k] =
            item_of(p, pieces, int(row), k, slot < 0 ? -1 : slot + k);
      if (slot >= 0) slot += pieces.count;
    }
    before += total;
  }
}

}  // namespace

const char* plan_rows(const PlanParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(p.items, 0xff, p.num_items * sizeof(Item), s);
  cudaMemsetAsync(p.splits, 0, p.num_splits * sizeof(Split), s);
  cudaMemsetAsync(p.counts, 0, p.num_counts * sizeof(int32_t), s);
  if (p.num_rows == 0) return last_error();
  const dim3 grid = blocks_of(p.num_rows, kPlanThreads);
  if (p.by_length || p.parts > 1) {
    lengths_kernel<<<grid, kPlanThreads, 0, s>>>(p);
    ordered_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  } else {
    natural_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  }
  return last_error();
}

}  // namespace dfgnn::cuda
