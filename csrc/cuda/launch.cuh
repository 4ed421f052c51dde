// How launchers launch kernels: the lane layout (Config in lanes.cuh) and the grid follow from the
// parameters. Launchers return null or the text of the launch error.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../core/layout.h"
#include "attention/lanes.cuh"
#include "device.h"
#include "engine.h"

namespace dfgnn::cuda {

// Launches a kernel that begins with `follow`: its blocks may start while those of the kernel before it end
// (programmatic dependent launch). carveout: the percentage of a multiprocessor's L1 memory that is shared
// memory while the kernel runs; the rest is cache. -1: CUDA chooses.
template <class... P, class... X>
void launch_carved(int carveout, cudaStream_t stream, dim3 grid, dim3 threads, int shared,
                   void (*kernel)(P...), X... args) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.stream = stream, config.attrs = attributes;
  if (device().follows) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (carveout >= 0) {
    cudaLaunchAttribute& split = attributes[config.numAttrs++];
    split.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    split.val.sharedMemCarveout = unsigned(carveout);
  }
  cudaLaunchKernelEx(&config, kernel, P(args)...);
}
template <class... P, class... X>
void launch(cudaStream_t stream, dim3 grid, dim3 threads, int shared, void (*kernel)(P...), X... args) {
  launch_carved(-1, stream, grid, threads, shared, kernel, args...);
}
// The carve-out, in percent, of kernels with little shared memory, for which CUDA would take more from L1
// than their blocks need. The next kernel, which may start while such a kernel ends, inherits its carve-out,
// and kernels that gather rows need L1.
inline constexpr int kLittleShared = 14;

// Calls f(part) for each source partition, in their order; `part` is csr with the work items of this
// partition alone. Without partitions it calls f(csr).
template <class F>
void for_each_part(Csr csr, F f) {
  if (csr.num_parts == 0) return f(csr);
  for (int part = 0; part < csr.num_parts; ++part) {
    csr.num_items = csr.part_items[part];
    if (csr.num_items) f(csr);
    csr.items += csr.num_items;
  }
}

// Launchers for one type and score, which are instantiated in attention/instances/. pair_... are those of dot
// and additive_v2.
template <typename T>
const char* additive_forward(const ForwardParams& p, cudaStream_t stream);
template <typename T>
const char* additive_backward(const BackwardParams& p, cudaStream_t stream);
template <typename T, Score SCORE>
const char* pair_forward(const ForwardParams& p, cudaStream_t stream);
template <typename T, Score SCORE>
const char* pair_backward(const BackwardParams& p, cudaStream_t stream);

// Launch the kernels for block-sparse tiles (params.h): forward, and the two passes of backward.
template <typename T, Score SCORE>
void tile_forward(const ForwardParams& p, cudaStream_t stream);
template <typename T>
void tile_destinations(const BackwardParams& p, cudaStream_t stream);  // dot only
template <typename T, Score SCORE>
void tile_sources(const BackwardParams& p, cudaStream_t stream);
// Whether there are kernels for tiles.
template <typename T, Score SCORE>
inline constexpr bool kHasTiles = sizeof(T) == 2 && SCORE != Score::additive_v2;

// Returns f(0), where the 0 has the type that `dtype` names.
template <class F>
auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f64:
      return f(double{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

// The edge options for which a call's kernel must be compiled (Edges in edge_options.cuh). also: whether the
// kernel needs edge ids for something else, such as returned attention, as it does for scalars per edge.
inline Edges edges_of(const EdgeOptions& e, bool also) {
  const bool scalars = e.scalars() || also;
  if (e.feat) return scalars ? Edges::features_scalars : Edges::features;
  return scalars ? Edges::scalars : Edges::none;
}

inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// A grid of blocks for `work` items, of which each block takes per_block.
inline dim3 blocks_of(int64_t work, int64_t per_block) {
  return dim3(unsigned((work + per_block - 1) / per_block));
}

// Calls f(Config) with the smallest lane layout that covers a head of `dim` elements, or the largest if none
// does. heads: how many heads a row has.
template <typename T, class F>
void with_config(int heads, int dim, F f) {
  const int lanes = lanes_per_head(heads, dim, sizeof(T)), loads = (dim + kVec<T> - 1) / kVec<T>;
  if constexpr (sizeof(T) == 8) {
    if (lanes == 4) return f(Config<T, 4, 1>{});
    if (loads <= 32) return f(Config<T, 32, 1>{});
  } else {
    if (lanes == 1) return f(Config<T, 1, 1>{});
    if (lanes == 2) return f(Config<T, 2, 1>{});
    if (lanes == 4) return f(Config<T, 4, 1>{});
    if (lanes == 8) return f(Config<T, 8, 1>{});
    if (lanes == 16) return f(Config<T, 16, 1>{});
    if (loads <= 32) return f(Config<T, 32, 1>{});
    if (loads <= 64) return f(Config<T, 32, 2>{});
  }
  return f(Config<T, 32, 4>{});
}

// The most work items of a warp:
//   kItems           in general
//   kItemsProjected  with projected features (EdgeAttr), because tensor cores take eight rows at a time
//   kItemsPacked     of each sub-warp, if packed: few, because sub-warps wait for the longest row in the warp
//   kItemsV2         in backward of additive_v2: many, because each block writes a partial sum of grad_attn
// kWarpEdges: about the most edges of a warp, if it takes several work items.
// A window (Tiling in lanes.cuh; not one of tiles) is a range of about as many blocks as are resident at a
// time, kWindowBlocks per multiprocessor; the work items of a warp are one window apart. A warp takes several
// work items only if about kLeastWindows windows are left, so that the work is balanced.
inline constexpr int kItems = 4, kItemsProjected = 8, kItemsPacked = 2, kItemsV2 = 8, kWarpEdges = 256,
                     kWindowBlocks = 8;
inline constexpr unsigned kLeastWindows = 4;
// The most work items of a warp in backward of additive_v2. With source partitions it is
// kItems: each launch has only some of the work items, and partial sums of its own.
inline int items_v2(const Csr& csr) { return csr.num_parts ? kItems : kItemsV2; }

// The grid, and the distribution of work over it, of a kernel of layout C on one CSR. dim: columns of a head;
// most_items: the most work items of a warp.
template <class C>
struct Launch {
  Tiling tiling;
  dim3 grid;
  int shared;  // bytes of shared memory, in which warps keep their work items
  Launch(const Shape& s, int dim, const Csr& csr, int most_items = kItems) {
    int heads = C::LPH == 1 ? 2 : 1;  // a sub-warp has at least two lanes
    const int most = csr.heads_per_tile ? std::min(csr.heads_per_tile, s.heads) : s.heads;
    while (heads < most && heads * C::LPH < 32) heads *= 2;
    int lanes_log2 = 0;
    while ((1 << lanes_log2) < heads * C::LPH) ++lanes_log2;
    const int64_t window = device().multiprocessors * kWindowBlocks;
    tiling = {lanes_log2, heads, (dim + C::COLS - 1) / C::COLS, 1, Divisor(uint32_t(window))};
    const int rows_per_warp = csr.packed ? 32 / tiling.lanes() : 1;
    const int64_t blocks = blocks_of(csr.num_items, kWarps * rows_per_warp).x;
    grid = dim3(unsigned(blocks));
    most_items = int(std::min<int64_t>(most_items, kWarpEdges * csr.num_items / (s.num_edges + 1) + 1));
    if (csr.packed) most_items = std::min({most_items, kItemsPacked, tiling.lanes() - 1});
    const int64_t windows = std::max(blocks_of(blocks, window * most_items).x, kLeastWindows);
    tiling.items = std::max<int64_t>((blocks + windows * window - 1) / (windows * window), 1);
    shared = kWarps * rows_per_warp * (tiling.items + 1) * int(sizeof(int4));
    if (tiling.items > 1) grid.x = blocks_of(blocks, window * tiling.items).x * unsigned(window);
    grid.y = (s.heads + heads - 1) / heads;
    grid.z = tiling.chunks;
  }
};

}  // namespace dfgnn::cuda
