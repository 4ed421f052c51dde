// What a schedule is chosen by, on the device: degrees and their quantiles, whether rows rise. As the tensor
// operations of dfgnn/schedule do on the CPU, in a few launches and without waiting.
#include "scan.cuh"
#include "structure.h"

namespace dfgnn::cuda {
namespace {

// Scratch: degrees below kDegreeBins one by one, then those above together; the largest degree, the sum of
// squares, how many blocks are done, and per bound the items beyond one per row, and split rows. The last
// block finds the quantiles.
constexpr int kLargest = kDegreeBins + 1, kSquares = kDegreeBins + 2, kDone = kDegreeBins + 3;
constexpr int kCuts = kDone + 1;
static_assert(kDegreeScratch == kCuts + 2 * kCutBounds);

struct Both {
  Degrees of[2];
};

// blockIdx.y: the direction.
__global__ void __launch_bounds__(kPlanThreads) degrees_kernel(const Both both) {
  const Degrees& p = both.of[blockIdx.y];
  auto* scratch = reinterpret_cast<unsigned long long*>(p.scratch);
  __shared__ int bins[kDegreeBins + 1];
  __shared__ bool last;
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads) bins[b] = 0;
  __syncthreads();
  unsigned long long largest = 0, squares = 0, more[kCutBounds] = {}, splits[kCutBounds] = {};
  for (int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x; row < p.num_rows;
       row += int64_t(gridDim.x) * kPlanThreads) {
    const unsigned long long degree = p.indptr[row + 1] - p.indptr[row];
    largest = max(largest, degree);
    squares += degree * degree;
    atomicAdd(&bins[degree < kDegreeBins ? int(degree) : kDegreeBins], 1);
#pragma unroll
    for (int k = 0; k < kCutBounds; ++k) {
      const unsigned long long beyond = degree ? (degree - 1) / (kLeastCut << k) : 0;
      more[k] += beyond, splits[k] += beyond > 0;
    }
  }
  const auto sum = [](unsigned long long x) {
    for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(kAll, x, o);
    return x;
  };
  for (int o = 16; o > 0; o /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, o));
  squares = sum(squares);
  const bool first = (threadIdx.x & 31) == 0;
  if (first) atomicMax(&scratch[kLargest], largest), atomicAdd(&scratch[kSquares], squares);
#pragma unroll
  for (int k = 0; k < kCutBounds; ++k) {
    if (!__any_sync(kAll, more[k] > 0)) break;  // nor beyond larger bounds
    const unsigned long long items = sum(more[k]), rows = sum(splits[k]);
    if (first) atomicAdd(&scratch[kCuts + 2 * k], items), atomicAdd(&scratch[kCuts + 2 * k + 1], rows);
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
  const unsigned long long half = (p.num_rows + 1) / 2, most = (p.num_rows * 99 + 99) / 100;
  int64_t* found = p.found;
  if (threadIdx.x == 0) {
    found[0] = half > total ? kDegreeBins : 0;
    found[1] = most > total ? kDegreeBins : 0;
    found[2] = int64_t(count[0]);
    found[3] = int64_t(__ldcg(&scratch[kLargest]));
    found[4] = int64_t(__ldcg(&scratch[kSquares]));
  }
  if (threadIdx.x < 2 * kCutBounds) found[5 + threadIdx.x] = int64_t(__ldcg(&scratch[kCuts + threadIdx.x]));
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

const char* degrees(const Degrees* directions, int count, bool zeroed, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  Both both;
  int64_t rows = 0;
  for (int k = 0; k < count; ++k) {
    both.of[k] = directions[k], rows = std::max(rows, directions[k].num_rows);
    if (!zeroed) cudaMemsetAsync(directions[k].scratch, 0, kDegreeScratch * sizeof(int64_t), s);
  }
  degrees_kernel<<<dim3(few_blocks(rows).x, unsigned(count)), kPlanThreads, 0, s>>>(both);
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
