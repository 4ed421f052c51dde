// What a schedule is chosen by, on the device: degrees and their quantiles, whether rows rise. As the tensor
// operations of dfgnn/schedule do on the CPU, in a few launches and without waiting.
#include "scan.cuh"

namespace dfgnn::cuda {
namespace {

// Scratch: degrees below kDegreeBins one by one, then those above together; the largest degree, the sum of
// squares, and how many blocks are done. The last one finds the quantiles.
constexpr int kLargest = kDegreeBins + 1, kSquares = kDegreeBins + 2, kDone = kDegreeBins + 3;
static_assert(kDegreeScratch == kDone + 1);

__global__ void __launch_bounds__(kPlanThreads)
    degrees_kernel(const int64_t* indptr, int64_t num_rows, unsigned long long* scratch, int64_t* found) {
  __shared__ int bins[kDegreeBins + 1];
  __shared__ bool last;
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
    atomicMax(&scratch[kLargest], largest);
    atomicAdd(&scratch[kSquares], squares);
  }
  __syncthreads();
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads)
    if (bins[b]) atomicAdd(&scratch[b], static_cast<unsigned long long>(bins[b]));

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&scratch[kDone], 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  constexpr int kEach = kDegreeBins / kPlanThreads;
  static_assert(kEach * kPlanThreads == kDegreeBins);
  unsigned long long count[kEach], own = 0, total;
  for (int k = 0; k < kEach; ++k) own += count[k] = __ldcg(&scratch[threadIdx.x * kEach + k]);
  unsigned long long below = sum_before(own, total);
  const unsigned long long half = (num_rows + 1) / 2, most = (num_rows * 99 + 99) / 100;
  if (threadIdx.x == 0) {
    found[0] = half > total ? kDegreeBins : 0;
    found[1] = most > total ? kDegreeBins : 0;
    found[2] = int64_t(count[0]);
    found[3] = int64_t(__ldcg(&scratch[kLargest]));
    found[4] = int64_t(__ldcg(&scratch[kSquares]));
  }
  __syncthreads();
  for (int k = 0; k < kEach; ++k) {
    const unsigned long long upto = below + count[k];
    if (below < half && half <= upto) found[0] = threadIdx.x * kEach + k;
    if (below < most && most <= upto) found[1] = threadIdx.x * kEach + k;
    below = upto;
  }
}

// How often an index is below the one before it, without those that begin a row: 0 if rows rise.
__global__ void __launch_bounds__(kPlanThreads)
    falls_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                 unsigned long long* falls) {
  const int64_t first = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kPlanThreads;
  long long count = 0;
#pragma unroll 8
  for (int64_t e = first + 1; e < num_edges; e += step) count += indices[e] < indices[e - 1];
  for (int64_t row = first; row < num_rows; row += step) {
    const int64_t begin = indptr[row];
    if (begin > 0 && begin < indptr[row + 1]) count -= indices[begin] < indices[begin - 1];
  }
  for (int o = 16; o > 0; o /= 2) count += __shfl_xor_sync(kAll, count, o);
  if ((threadIdx.x & 31) == 0 && count) atomicAdd(falls, static_cast<unsigned long long>(count));
}

// Blocks that add up what they have found: few, as additions to one place wait for each other.
dim3 few_blocks(int64_t work) {
  const int64_t most = 2 * device().multiprocessors;
  return dim3(unsigned(std::clamp<int64_t>((work + kPlanThreads - 1) / kPlanThreads, 1, most)));
}

}  // namespace

const char* degrees(const int64_t* indptr, int64_t num_rows, int64_t* scratch, int64_t* found, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(scratch, 0, kDegreeScratch * sizeof(int64_t), s);
  degrees_kernel<<<few_blocks(num_rows), kPlanThreads, 0, s>>>(
      indptr, num_rows, reinterpret_cast<unsigned long long*>(scratch), found);
  return last_error();
}

const char* falls(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                  int64_t* count, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(count, 0, sizeof(int64_t), s);
  // Every edge is read, and hardly a block has something to add: as many as are resident.
  const dim3 grid(4 * few_blocks(num_edges + num_rows).x);
  falls_kernel<<<grid, kPlanThreads, 0, s>>>(indptr, indices, num_rows, num_edges,
                                             reinterpret_cast<unsigned long long*>(count));
  return last_error();
}

}  // namespace dfgnn::cuda
