// The block size of the kernels that make structure and plans, and prefix sums over the threads of a block.
#pragma once

#include "launch.cuh"

namespace dfgnn::cuda {

inline constexpr int kPlanThreads = 512;

// Returns the sum of x over the threads before this one, and sets `total` to the sum over the block. All
// threads must call it.
template <typename T>
__device__ __forceinline__ T sum_before(T x, T& total) {
  __shared__ T warps[kPlanThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  T sum = x;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const T other = __shfl_up_sync(kAll, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();  // wait until all threads have read the sums of the previous call
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  T before = sum - x;
  total = 0;
#pragma unroll
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before;
}

}  // namespace dfgnn::cuda
