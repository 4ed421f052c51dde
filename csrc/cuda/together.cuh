// A stable radix sort by all blocks of one cooperative grid: few keys, which take less time than the launches
// of a sort for many.
#pragma once

#include <cooperative_groups.h>

#include "scan.cuh"

namespace dfgnn::cuda {

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
static_assert(kDigits <= kPlanThreads && kPlanThreads % kDigits == 0);

// keys[0] and places[0] by the lowest `bits` bits, into either of the two; returns which. counts: [blocks,
// kDigits]. A block has a run of the keys, and of it each warp one; of every digit the warps' keys come one
// after the other.
__device__ __forceinline__ int sort_together(const cooperative_groups::grid_group& grid,
                                             uint64_t* const* keys, int32_t* const* places, int num_keys,
                                             int bits, int* counts) {
  constexpr int kWarps = kPlanThreads / 32, kShares = kPlanThreads / kDigits;
  __shared__ int begins[kWarps][kDigits], shares[2][kShares][kDigits];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, blocks = gridDim.x;
  const int digit = threadIdx.x % kDigits, share = threadIdx.x / kDigits;
  const int of_warp = (num_keys + blocks * kWarps - 1) / (blocks * kWarps);
  const int first = min((int(blockIdx.x) * kWarps + warp) * of_warp, num_keys);
  const int last = min(first + of_warp, num_keys);
  int from = 0;
  for (int shift = 0; shift < bits; shift += kDigitBits, from ^= 1) {
    const auto digit_of = [&](uint64_t key) { return int(key >> shift) & (kDigits - 1); };
    for (int d = lane; d < kDigits; d += 32) begins[warp][d] = 0;
    __syncwarp();
    for (int k = first + lane; k < last; k += 32) atomicAdd(&begins[warp][digit_of(keys[from][k])], 1);
    __syncthreads();
    if (share == 0) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        const int found = begins[w][digit];
        begins[w][digit] = sum, sum += found;
      }
      counts[blockIdx.x * kDigits + digit] = sum;
    }
    grid.sync();

    int before = 0, all = 0;
#pragma unroll 8
    for (int b = share; b < blocks; b += kShares) {
      const int found = counts[b * kDigits + digit];
      all += found, before += b < int(blockIdx.x) ? found : 0;
    }
    shares[0][share][digit] = before, shares[1][share][digit] = all;
    __syncthreads();
    before = all = 0;
    for (int k = 0; k < kShares; ++k) before += shares[0][k][digit], all += shares[1][k][digit];
    int total;
    before += sum_before(share == 0 ? all : 0, total);
    if (share == 0)
      for (int w = 0; w < kWarps; ++w) begins[w][digit] += before;
    __syncthreads();

    for (int group = first; group < last; group += 32) {
      const int k = group + lane;
      const bool ok = k < last;
      const uint64_t key = ok ? keys[from][k] : 0;
      const int own = ok ? digit_of(key) : kDigits;
      const unsigned alike = __match_any_sync(kAll, own);
      const int rank = __popc(alike & ((1u << lane) - 1));
      const int at = ok ? begins[warp][own] + rank : 0;
      __syncwarp();
      if (ok && rank == 0) begins[warp][own] += __popc(alike);
      __syncwarp();
      if (ok) keys[from ^ 1][at] = key, places[from ^ 1][at] = places[from][k];
    }
    grid.sync();
  }
  return from;
}

}  // namespace dfgnn::cuda
