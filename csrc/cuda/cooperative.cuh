// Cooperative launches: one kernel, whose blocks wait for each other, replaces several launches. Also a
// stable radix sort within such a kernel: for few keys the several launches of CUB's sort would take longer.
#pragma once

#include <cooperative_groups.h>

#include "scan.cuh"

namespace dfgnn::cuda {

// sync() waits for all blocks of the kernel. OfCluster is for a kernel that is launched as one thread block
// cluster, whose barriers are the fastest, OfGrid for one that is launched as a cooperative grid.
struct OfCluster {
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }
};
struct OfGrid {
  __device__ __forceinline__ void sync() const { cooperative_groups::this_grid().sync(); }
};
inline constexpr unsigned kMostOfCluster = 8;  // blocks of a cluster: the portable limit

// Launches by_cluster as one cluster if its blocks fit into one, else by_grid as a cooperative grid: the same
// kernel, compiled for OfCluster and for OfGrid. There must be at most one block per multiprocessor, because
// all must be resident, and in a cluster their number must be a power of two. Device::follows also says
// whether a device has clusters: both came with compute capability 9.
template <class P>
void launch_together(cudaStream_t stream, dim3 blocks, void (*by_cluster)(P), void (*by_grid)(P),
                     const P& params) {
  const bool one_cluster = blocks.x * blocks.y <= kMostOfCluster && device().follows;
  cudaLaunchAttribute how{};
  if (one_cluster) {
    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim.x = blocks.x, how.val.clusterDim.y = blocks.y, how.val.clusterDim.z = 1;
  } else {
    how.id = cudaLaunchAttributeCooperative, how.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(kPlanThreads);
  config.stream = stream, config.attrs = &how, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, one_cluster ? by_cluster : by_grid, params);
}

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
static_assert(kDigits <= kPlanThreads && kPlanThreads % kDigits == 0);

// The most keys that a thread holds in registers, and therefore the most keys per block.
inline constexpr int kHeld = 8, kMostKeys = kHeld * kPlanThreads;

// Sorts keys[0], and the integers places[0] with them, by the lowest `bits` bits of the keys, stably. The
// passes of the sort go back and forth between keys[0] and keys[1], places[0] and places[1], which have the
// same size; it returns the index (0 or 1) of the arrays with the result. There must be at most kMostKeys
// keys per block. counts is scratch, [blocks, kDigits]. A pass sorts by one digit of kDigitBits bits: it
// counts the keys of each digit, finds where those of each warp go, and moves them. Each block has
// consecutive keys, and each of its warps consecutive ones of these; keys with the same digit keep the order
// of the blocks, of the warps, and within a warp of the lanes.
template <class Blocks>
__device__ __forceinline__ int sort_together(const Blocks& all_blocks, uint64_t* const* keys,
                                             int32_t* const* places, int num_keys, int bits, int* counts) {
  constexpr int kWarps = kPlanThreads / 32, kShares = kPlanThreads / kDigits;
  // begins[w][d]: how many keys with digit d warp w has; then how many the block's earlier warps have; at
  // last the index at which the next key with digit d of warp w goes. shares: kShares threads share the sums
  // over blocks of a digit's counts.
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
    uint64_t held[kHeld];
    int32_t held_places[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int k = first + 32 * i + lane;
      if (k < last) held[i] = keys[from][k], held_places[i] = places[from][k];
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first + 32 * i + lane < last) atomicAdd(&begins[warp][digit_of(held[i])], 1);
    __syncthreads();
    if (share == 0) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        const int found = begins[w][digit];
        begins[w][digit] = sum, sum += found;
      }
      counts[blockIdx.x * kDigits + digit] = sum;
    }
    all_blocks.sync();

    // before, all: how many keys have this digit in earlier blocks, and in all blocks. Below, `before` also
    // counts the keys with a lower digit.
    int before = 0, all = 0;
#pragma unroll 16
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

#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + 32 * i >= last) break;
      const bool ok = first + 32 * i + lane < last;
      const int own = ok ? digit_of(held[i]) : kDigits;
      // Keys of the warp with the same digit go to adjacent indices, in the order of their lanes (rank).
      const unsigned alike = __match_any_sync(kAll, own);
      const int rank = __popc(alike & ((1u << lane) - 1));
      const int at = ok ? begins[warp][own] + rank : 0;
      __syncwarp();
      if (ok && rank == 0) begins[warp][own] += __popc(alike);
      __syncwarp();
      if (ok) keys[from ^ 1][at] = held[i], places[from ^ 1][at] = held_places[i];
    }
    all_blocks.sync();
  }
  return from;
}

}  // namespace dfgnn::cuda
