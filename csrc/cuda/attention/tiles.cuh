// The tile schedule: rows that share neighbours load them once, and tensor cores compute the products. Words,
// the layout of fragments, and names from other files: csrc/cuda/README.md, "Tiles".
//
// The kernel computes the dense 64 x 32 block of scores of a chunk and masks it, as FlashAttention with a
// mask does (Dao 2023, arXiv 2307.08691); Fused3S (Li and Chandramowlishwaran 2025, arXiv 2505.08098) does so
// for the forward pass of graph attention. Which arrays a pass multiplies: TileParams in tile_edges.cuh.
//
// A block of 4 warps takes a work item, which is a run of chunks of one window, for one head; a warp owns 16
// rows. Shared memory holds the rows' operands and, in STAGES stages, the operands of as many chunks.
// Asynchronous copies fill it, in pieces of 16 bytes that are swizzled so that ldmatrix has no bank
// conflicts.
//
// It takes 16-bit features, head sizes 8 to 128 that are powers of two, no options on edges, and no graph in
// which an edge occurs twice, because a mask has one bit for it. In a dense product, a value that is not
// finite meets weights of 0 in rows that have no edge to it: the product is NaN and stays in the sums.
// Therefore a warp looks for numbers in its sums that are not finite at the end and, where it finds one,
// computes its 16 rows again edge by edge (tile_edges.cuh), so that such a value reaches its neighbours only.
#pragma once

#include "tile_sums.cuh"

namespace dfgnn::cuda {

// ---- asynchronous copies ---------------------------------------------------------------------------

// Copies what the columns of a chunk have in the operands c and d, and their statistics, to shared memory:
// COPIES pieces per thread. The columns' node ids are loaded an iteration ahead of the copies.
template <typename T, int D, Score SCORE, Pass PASS>
struct ColumnCopies {
  using L = LayoutOf<T, D>;
  using X = TileTraits<T, D, SCORE, PASS>;
  static constexpr int H = X::H, V = kVec<T>;
  static constexpr int COPIES = (kTileCols * X::C + kTileThreads - 1) / kTileThreads;
  struct Ids {
    int column[COPIES], stat;
  };
  const TilePlace<T, D>& me;

  // ids = the nodes from whose rows this thread copies pieces for a chunk, if there is such a chunk.
  __device__ __forceinline__ void fetch_ids(Ids& ids, int chunk) const {
    if (chunk >= me.item.end) return;
    if constexpr (X::BLOCKS) {  // beyond the last column it is copied again, because 0 times what is there is
                                // 0
      const int first = me.first_column + chunk * kTileCols;
#pragma unroll
      for (int i = 0; i < COPIES; ++i)
        ids.column[i] = min(first + (me.thread + i * kTileThreads) / X::C, me.last_column);
      ids.stat = min(first + me.thread, me.last_column);
    } else {
      const int32_t* columns = me.p.tiles + int64_t(chunk) * kTileInts;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int at = me.thread + i * kTileThreads;
        if (kTileCols * X::C % kTileThreads == 0 || at < kTileCols * X::C)
          ids.column[i] = __ldg(columns + at / X::C);
      }
      if (X::STAT && me.thread < kTileCols) ids.stat = __ldg(columns + me.thread);
    }
  }
  // The offset of a chunk's stage in shared memory.
  __device__ __forceinline__ int stage_of(int chunk) const {
    return L::FIRST_STAGE + (chunk - me.item.begin) % L::STAGES * L::STAGE;
  }
  // Starts the copies of a chunk. Past the last chunk the group of copies is empty, so that wait_copies can
  // count.
  __device__ __forceinline__ void copy(const Ids& ids, int chunk) const {
    if (chunk < me.item.end) {
      const uint32_t stage = me.smem + stage_of(chunk);
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int at = me.thread + i * kTileThreads;
        if (kTileCols * X::C % kTileThreads && at >= kTileCols * X::C) break;
        const uint32_t to = stage + piece_of<T, H>(at / X::C, at % X::C);
        if constexpr (X::HAS_C) copy_async<16>(to, me.element(me.p.c, ids.column[i]) + at % X::C * V);
        copy_async<16>(to + L::COLS, me.element(me.p.d, ids.column[i]) + at % X::C * V);
      }
      if constexpr (X::STAT > 0) {
        if (me.thread < kTileCols && (!X::BLOCKS || me.p.col_stats)) {
          const uint32_t to = stage + 2 * L::COLS + me.thread * X::STAT;
          const char* from =
              static_cast<const char*>(me.p.col_stats) + (int64_t(ids.stat) * me.heads + me.head) * X::STAT;
          if constexpr (X::STAT == 32) {
            copy_async<16>(to, from), copy_async<16>(to + 16, from + 16);
          } else {
            copy_async<X::STAT>(to, from);
          }
        }
      }
    }
    commit_copies();
  }
  // Starts the copies of the rows' operands and of the first STAGES - 1 chunks. next = the ids of the chunk
  // after these.
  __device__ __forceinline__ void begin(Ids& next) const {
    Ids first[L::STAGES - 1];
#pragma unroll
    for (int s = 0; s < L::STAGES - 1; ++s) fetch_ids(first[s], me.item.begin + s);
    fetch_ids(next, me.item.begin + L::STAGES - 1);
    for (int at = me.thread; at < kTileRows * X::C; at += kTileThreads) {
      const int r = at / X::C, piece = at % X::C;
      if constexpr (X::HAS_A)
        copy_async<16>(me.smem + L::A + piece_of<T, H>(r, piece),
                       me.element(me.p.a, me.row_of(r)) + piece * V);
      if constexpr (X::HAS_B)
        copy_async<16>(me.smem + L::B + piece_of<T, H>(r, piece),
                       me.element(me.p.b, me.row_of(r)) + piece * V);
    }
    commit_copies();
#pragma unroll
    for (int s = 0; s < L::STAGES - 1; ++s) copy(first[s], me.item.begin + s);
  }
};

// A word whose lowest n bits are set; n may be less than 0 or more than 32.
__device__ __forceinline__ uint32_t bits_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// ---- the kernel ------------------------------------------------------------------------------------

// A pass over the block's work item or, in blocks, its window.
template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__device__ __forceinline__ void tile_pass(const TileParams& p, char* shared) {
  using L = LayoutOf<T, D>;
  using X = TileTraits<T, D, SCORE, PASS>;

  // ---- 1. Load: the first copies are started, then the rows' statistics are read.
  const TilePlace<T, D> me(p, shared, X::BLOCKS);
  const ColumnCopies<T, D, SCORE, PASS> copies = {me};
  typename ColumnCopies<T, D, SCORE, PASS>::Ids next;
  copies.begin(next);
  TileRows<T, D, SCORE, PASS> rows;
  rows.load(me);

  // ---- 2. The rows' operands, once the first group of copies has ended.
  wait_copies<L::STAGES - 1>();
  __syncthreads();
  RowOperand<T, D, X::KEEP> a, b;
  if constexpr (X::HAS_A) a.init(me.smem + L::A, me.warp, me.lane);
  // In forward the maximum is taken of products before they are scaled. `factor` must therefore be positive,
  // so that rows take the sign of a negative scale, and not 0, because -inf is multiplied by it.
  // In blocks it is of scores, which have a bias.
  [[maybe_unused]] const Acc<T> factor = X::BLOCKS ? scale_of<Acc<T>>(p) : max(abs(p.scale), kLeastNormal);
  if constexpr (X::FORWARD && X::DOT && !X::BLOCKS) {
    if (p.scale < 0) a.negate();
  }
  if constexpr (X::HAS_B) b.init(me.smem + L::B, me.warp, me.lane);

  // ---- 3. Main loop over chunks: scores, weights and sums of a chunk, while the next ones are copied.
  TileSums<T, D, SCORE, PASS, POSITIVE> sums;
  const int32_t* masks = p.tiles + kTileCols + me.warp * 16 + me.g;
  uint32_t next_mask[2] = {};
  const auto fetch_masks = [&](int chunk) {
    if (chunk >= me.item.end) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) next_mask[i] = uint32_t(__ldg(masks + int64_t(chunk) * kTileInts + 8 * i));
  };
  if constexpr (!X::BLOCKS) fetch_masks(me.item.begin);

  for (int chunk = me.item.begin; chunk < me.item.end; ++chunk) {
    if constexpr (X::BLOCKS) {
      const int first = me.first_column + chunk * kTileCols;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        next_mask[i] = bits_below(rows.range[i].y - first) & ~bits_below(rows.range[i].x - first);
    }
    TileChunk here = {{next_mask[0] >> (2 * me.t), next_mask[1] >> (2 * me.t)}};
    const bool any = __any_sync(kAll, (next_mask[0] | next_mask[1]) != 0);
    wait_copies<L::STAGES - 2>();  // until this thread's copies for this chunk have arrived
    __syncthreads();  // until those of all threads have, and no warp reads the stage that is filled next
    copies.copy(next, chunk + L::STAGES - 1);
    copies.fetch_ids(next, chunk + L::STAGES);
    if constexpr (!X::BLOCKS) fetch_masks(chunk + 1);
    if (!any) continue;

    here.columns_c = me.smem + copies.stage_of(chunk), here.columns_d = here.columns_c + L::COLS;
    here.stats = shared + copies.stage_of(chunk) + 2 * L::COLS;
    const auto add = [&](auto plain) {
      constexpr bool PLAIN = decltype(plain)::value;
      if constexpr (X::FORWARD) {
        sums.template add_forward<PLAIN>(me, rows, here, a, factor);
      } else {
        sums.template add_backward<PLAIN>(me, rows, here, a, b);
      }
    };
    if constexpr (X::BLOCKS) {
      const bool biased = X::SOURCES ? p.row_term != nullptr : p.col_stats != nullptr;
      if (!biased && p.scale > 0 && __all_sync(kAll, (next_mask[0] & next_mask[1]) == ~0u)) {
        add(std::true_type());
        continue;
      }
    }
    add(std::false_type());
  }
  wait_copies<0>();

  // ---- 4. Epilogue: the results, or the rows once more edge by edge.
  if constexpr (!X::BLOCKS) {
    if (__any_sync(kAll, sums.are_doubtful(rows))) {
      tile_rows_by_edges<T, D, SCORE, PASS, POSITIVE>(p, me.item, me.head, me.warp, me.lane,
                                                      reinterpret_cast<const float*>(shared + L::DELTA));
      return;
    }
  }
  __syncwarp();
  if constexpr (X::FORWARD) {
    store_forward(me, rows, sums);
  } else {
    store_backward(me, rows, sums);
  }
}

template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<D, kTileSums<SCORE, PASS, POSITIVE>>))
    tile_kernel(const __grid_constant__ TileParams p) {
  follow();
  extern __shared__ __align__(128) char shared[];
  tile_pass<T, D, SCORE, PASS, POSITIVE>(p, shared);
}

template <typename T, int D, Pass PASS>
inline constexpr int kBlocksPerMultiprocessor =
    sizeof(T) == 2 ? kTileBlocks<D, kTileSums<kInBlocks, PASS, false>> : kWideBlocks<kHalves<T, D>>;

// A pass of attention within blocks (core/blocks.h) over a window of 64 consecutive rows, which may be of
// several blocks. Its columns are those of the rows' blocks, one after the other.
template <typename T, int D, Pass PASS>
__global__ void __launch_bounds__(kTileThreads, (kBlocksPerMultiprocessor<T, D, PASS>))
    block_kernel(const __grid_constant__ BlockTileParams p) {
  follow();
  extern __shared__ __align__(128) char shared[];
  tile_pass<T, D, kInBlocks, PASS, false>(p, shared);
}

}  // namespace dfgnn::cuda
