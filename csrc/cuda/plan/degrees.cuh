// Counts the degrees of a CSR's rows by several blocks, of which the last one to finish finds the quantiles.
// Degrees (graph/structure.h) has the arguments and says what the results are.
#pragma once

#include "../graph/structure.h"
#include "../scan.cuh"

namespace dfgnn::cuda {

// Degrees::scratch holds, over all blocks: how many rows have each degree below kDegreeBins, and how many
// have a larger one; the largest degree (at kLargest), the sum of the degrees' squares (kSquares), the number
// of finished blocks (kDone); and from kCuts on, for each maximum of edges per work item, the work items
// beyond one per row and the split rows.
inline constexpr int kLargest = kDegreeBins + 1, kSquares = kDegreeBins + 2, kDone = kDegreeBins + 3;
inline constexpr int kCuts = kDone + 1;
static_assert(kDegreeScratch == kCuts + 2 * kCutBounds);

// `blocks` blocks of kPlanThreads threads must call this function, of which this is number `block`. p.scratch
// must be 0 before.
__device__ __forceinline__ void count_degrees(const Degrees& p, unsigned block, unsigned blocks) {
  auto* scratch = reinterpret_cast<unsigned long long*>(p.scratch);
  __shared__ int bins[kDegreeBins + 1];
  __shared__ bool last;
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads) bins[b] = 0;
  __syncthreads();
  unsigned long long largest = 0, squares = 0, more[kCutBounds] = {}, splits[kCutBounds] = {};
  for (int64_t row = int64_t(block) * kPlanThreads + threadIdx.x; row < p.num_rows;
       row += int64_t(blocks) * kPlanThreads) {
    const unsigned long long degree = p.counts ? p.counts[row] : p.indptr[row + 1] - p.indptr[row];
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
    // If no row of this warp exceeds a maximum, none exceeds the larger maxima.
    if (!__any_sync(kAll, more[k] > 0)) break;
    const unsigned long long items = sum(more[k]), rows = sum(splits[k]);
    if (first) atomicAdd(&scratch[kCuts + 2 * k], items), atomicAdd(&scratch[kCuts + 2 * k + 1], rows);
  }
  __syncthreads();
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads)
    if (bins[b]) atomicAdd(&scratch[b], static_cast<unsigned long long>(bins[b]));

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&scratch[kDone], 1ull) == blocks - 1;
  __syncthreads();
  if (!last) return;
  // Only the last block goes on. `below`: how many rows have smaller degrees than this thread's kEach bins.
  __threadfence();
  constexpr int kEach = kDegreeBins / kPlanThreads;
  static_assert(kEach * kPlanThreads == kDegreeBins);
  unsigned long long count[kEach], own = 0, total;
  for (int k = 0; k < kEach; ++k) own += count[k] = __ldcg(&scratch[threadIdx.x * kEach + k]);
  unsigned long long below = sum_before(own, total);
  const unsigned long long half = (p.num_rows + 1) / 2, most = (p.num_rows * 99 + 99) / 100;
  int64_t* found = p.found;
  if (threadIdx.x == 0) {
    // `total` rows have degrees below kDegreeBins. A quantile among the other rows is kDegreeBins; one among
    // these `total` is written below.
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
  if (!p.done) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile int64_t*>(p.done) = 1;
}

}  // namespace dfgnn::cuda
