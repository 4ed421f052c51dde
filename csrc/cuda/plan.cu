// Plans on the device: what dfgnn/schedule.py does with tensors on the CPU, in two launches and without
// waiting.
#include <cuda_runtime.h>

#include "launch.cuh"

namespace dfgnn::cuda {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kMaxPlanBlocks = 2048;

// Degrees below kDegreeBins one by one, then those above together, the largest degree and the sum of squares.
__global__ void __launch_bounds__(kPlanThreads)
    degrees_kernel(const int64_t* indptr, int64_t num_rows, unsigned long long* sums) {
  __shared__ int bins[kDegreeBins + 1];
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads) bins[b] = 0;
  __syncthreads();
  unsigned long long largest = 0, squares = 0;
  for (int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x; row < num_rows;
       row += int64_t(gridDim.x) * kPlanThreads) {
    const unsigned long long degree = indptr[row + 1] - indptr[row];
    largest = max(largest, degree);
    squares += degree * degree;
    atomicAdd(&bins[degree < kDegreeBins ? int(degree) : kDegreeBins], 1);
  }
  for (int o = 16; o > 0; o /= 2) {
    largest = max(largest, __shfl_xor_sync(kAll, largest, o));
    squares += __shfl_xor_sync(kAll, squares, o);
  }
  if ((threadIdx.x & 31) == 0) {
    atomicMax(&sums[kDegreeBins + 1], largest);
    atomicAdd(&sums[kDegreeBins + 2], squares);
  }
  __syncthreads();
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads)
    if (bins[b]) atomicAdd(&sums[b], static_cast<unsigned long long>(bins[b]));
}

// Lengths are alike within a quarter of an octave.
constexpr int kBuckets = 128;
static_assert(kPlanCounts == 3 + 2 * kBuckets, "a histogram and a cursor per bucket");
__device__ __forceinline__ int bucket_of(int length) {
  const int log2 = 31 - __clz(max(length, 1));
  const int quarter = log2 >= 2 ? (length >> (log2 - 2)) & 3 : 0;
  return 4 * log2 + quarter;
}

struct Pieces {
  int64_t begin, end;
  int count, length;
  __device__ __forceinline__ Pieces(const int64_t* indptr, int64_t row, int max_edges)
      : begin(indptr[row]), end(indptr[row + 1]) {
    const int degree = int(end - begin);
    count = max((degree - 1) / max_edges + 1, 1);
    length = (degree + count - 1) / count;
  }
  __device__ __forceinline__ Item item(int row, int k, int slot) const {
    const int64_t from = min(begin + int64_t(k) * length, end);
    return {row, int(from), int(min(from + length, end)), slot};
  }
};

__global__ void __launch_bounds__(kPlanThreads) lengths_kernel(const PlanParams p) {
  __shared__ int buckets[kBuckets];
  for (int b = threadIdx.x; b < kBuckets; b += kPlanThreads) buckets[b] = 0;
  __syncthreads();
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (row < p.num_rows) {
    const Pieces pieces(p.indptr, row, p.max_edges);
    atomicAdd(&buckets[bucket_of(pieces.length)], pieces.count);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kBuckets; b += kPlanThreads)
    if (buckets[b]) atomicAdd(&p.counts[3 + b], buckets[b]);
}

// A row's items: in row order, the pieces of split rows in front; or by falling length.
template <bool BY_LENGTH>
__global__ void __launch_bounds__(kPlanThreads) items_kernel(const PlanParams p) {
  [[maybe_unused]] __shared__ int start[kBuckets], taken[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  const Pieces pieces(p.indptr, ok ? row : 0, p.max_edges);
  const int bucket = bucket_of(pieces.length);
  int rank = 0;
  if constexpr (BY_LENGTH) {
    if (threadIdx.x < kBuckets) {
      taken[threadIdx.x] = 0;
      start[threadIdx.x] = 0;
      for (int b = threadIdx.x + 1; b < kBuckets; ++b) start[threadIdx.x] += p.counts[3 + b];
    }
    __syncthreads();
    if (ok) rank = atomicAdd(&taken[bucket], pieces.count);
    __syncthreads();
    if (threadIdx.x < kBuckets && taken[threadIdx.x])
      start[threadIdx.x] += atomicAdd(&p.counts[3 + kBuckets + threadIdx.x], taken[threadIdx.x]);
    __syncthreads();
    rank += start[bucket];
  }
  if (!ok) return;
  int slot = -1;
  int64_t front = p.front;
  if (pieces.count > 1) {
    front -= 1 + atomicAdd(&p.counts[0], pieces.count - 1);
    slot = atomicAdd(&p.counts[1], pieces.count);
    p.splits[atomicAdd(&p.counts[2], 1)] = {int(row), slot, slot + pieces.count, 1};
  }
  for (int k = 0; k < pieces.count; ++k) {
    const int64_t at = BY_LENGTH ? rank + k : k ? front - (k - 1) : p.front + row;
    p.items[at] = pieces.item(int(row), k, slot < 0 ? -1 : slot + k);
  }
}

}  // namespace

const char* degrees(const int64_t* indptr, int64_t num_rows, int64_t* sums, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(sums, 0, (kDegreeBins + 3) * sizeof(int64_t), s);
  const dim3 grid(unsigned(std::min<int64_t>((num_rows + kPlanThreads - 1) / kPlanThreads, kMaxPlanBlocks)));
  if (num_rows)
    degrees_kernel<<<grid, kPlanThreads, 0, s>>>(indptr, num_rows,
                                                 reinterpret_cast<unsigned long long*>(sums));
  return last_error();
}

const char* plan_rows(const PlanParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(p.items, 0xff, p.num_items * sizeof(Item), s);
  cudaMemsetAsync(p.splits, 0, p.num_splits * sizeof(Split), s);
  cudaMemsetAsync(p.counts, 0, kPlanCounts * sizeof(int32_t), s);
  if (p.num_rows == 0) return last_error();
  const dim3 grid = blocks_of(p.num_rows, kPlanThreads);
  if (p.by_length) {
    lengths_kernel<<<grid, kPlanThreads, 0, s>>>(p);
    items_kernel<true><<<grid, kPlanThreads, 0, s>>>(p);
  } else {
    items_kernel<false><<<grid, kPlanThreads, 0, s>>>(p);
  }
  return last_error();
}

}  // namespace dfgnn::cuda
