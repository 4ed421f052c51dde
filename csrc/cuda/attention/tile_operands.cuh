// Tiles (tiles.cuh): the layout of shared memory, the operands of the tensor cores, and the place of a
// thread.
//
// Names from other files:
// params.h, softmax.cuh:
//   kTileRows      rows of a window; kTileCols: columns of a chunk; Item: a work item
//   NodeStats      what the pass over sources needs of a destination and head
// tile_edges.cuh:
//   TileParams p   a pass's arrays: operands a, b of rows and c, d of columns (with a table of what these are
//                  in each pass), and results
// mma.cuh:
//   multiply<T>    (c, a, b0, b1): c += a b, m16n8k16. In lane 4 g + t, c[e] is in row g + 8 (e / 2) and
//                  column 2 t + e % 2
//   load_matrices  four 8 x 8 blocks of shared memory (ldmatrix); load_transposed: each transposed
//   pack_two<T>    two numbers, rounded to 16 bits, in a word
// lanes.cuh:
//   reduce_sum<W>  (x): the sum over W lanes, in all of them; reduce_max<W>: the maximum
#pragma once

#include "../mma.cuh"
#include "tile_edges.cuh"

namespace dfgnn::cuda {

inline constexpr int kTileWarps = kTileRows / 16, kTileThreads = 32 * kTileWarps;

// A row's running maximum may be too small by this much, so that accumulators are seldom rescaled: weights
// are then up to e^kLag = 2^8, and as exact as weights up to 1.
inline constexpr float kLag = 8 * kLn2;

// Scores of dot are not rounded before the maximum is subtracted (fused multiply-add), but the maximum is.
// All weights of a row are off by the same factor e^(rounding), which the mass contains, too, and which
// cancels. Beyond kLargeScore the rounding may exceed 1, and rows are computed edge by edge. kLeastNormal:
// the least normal number.
inline constexpr float kLargeScore = 0x1p24f, kLeastNormal = 0x1p-126f;
__device__ __forceinline__ bool is_large(float top) {
  return abs(top) > kLargeScore && top != -infinity<float>();
}

// ---- layout ----------------------------------------------------------------------------------------

// Returns the byte offset of the 16-byte piece `piece` of row `row`, for rows of D elements. Pieces are
// swizzled: those with the same number in 8 consecutive rows are in different banks.
template <int D>
__device__ __forceinline__ int piece_at(int row, int piece) {
  constexpr int C = D / 8, SHARE = C >= 8 ? 1 : 8 / C;
  return (row * C + (piece ^ ((row / SHARE) & ((C < 8 ? C : 8) - 1)))) * 16;
}

// Shared memory, in bytes: the rows' operands A and B, then STAGES chunks, each with its columns of c, its
// columns of d and their statistics, then delta of the rows.
template <int D>
struct TileLayout {
  static constexpr int STAGES = D <= 32 ? 4 : D == 64 ? 3 : 2;
  static constexpr int ROWS = kTileRows * D * 2, COLS = kTileCols * D * 2, STATS = kTileCols * 16;
  static constexpr int STAGE = 2 * COLS + STATS;
  static constexpr int A = 0, B = ROWS, FIRST_STAGE = 2 * ROWS;
  static constexpr int DELTA = FIRST_STAGE + STAGES * STAGE;
  static constexpr int BYTES = DELTA + kTileRows * 4;
};

// ---- operands of the tensor cores ------------------------------------------------------------------

// The warp's 16 rows as the left operand of the tensor cores, in registers (kept) or in shared memory (base).
template <typename T, int D, bool IN_REGISTERS>
struct RowOperand {
  static constexpr int STEPS = D < 16 ? 1 : D / 16;
  uint32_t base;
  uint32_t kept[IN_REGISTERS ? STEPS : 1][4];

  __device__ __forceinline__ static uint32_t address(uint32_t base, int warp, int lane, int step) {
    const int row = warp * 16 + (lane & 15), piece = 2 * step + (lane >> 4);
    return base + piece_at<D>(row, D < 16 ? 0 : piece);
  }
  __device__ __forceinline__ void init(uint32_t at, int warp, int lane) {
    base = at;
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < STEPS; ++k) load_matrices(kept[k], address(at, warp, lane, k));
    }
  }
  __device__ __forceinline__ void negate() {
    repeat<STEPS, 4>([&](int k, int i) { kept[k][i] ^= 0x80008000u; });
  }
  // s[n] += rows x columns^T for M groups of 8 of the chunk's columns, from group `first` on.
  template <int M>
  __device__ __forceinline__ void times(float (&s)[M][4], uint32_t columns, int warp, int lane,
                                        int first = 0) const {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      uint32_t a[4];
      if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = kept[k][i];
      } else {
        load_matrices(a, address(base, warp, lane, k));
      }
#pragma unroll
      for (int n = 0; n < M; n += 2) {
        uint32_t b[4];
        load_matrices(b, columns + piece_at<D>((first + n + (lane >> 4)) * 8 + (lane & 7),
                                               D < 16 ? 0 : 2 * k + ((lane >> 3) & 1)));
        if constexpr (D < 16) a[2] = a[3] = b[1] = b[3] = 0;  // half of the product is zeros
        multiply<T>(s[n], a, b[0], b[1]);
        multiply<T>(s[n + 1], a, b[2], b[3]);
      }
    }
  }
};

// The warp's weights of 16 rows and 8 M columns in 16 bits, as a left operand: packed from the layout of the
// scores.
template <typename T, int M>
struct Packed {
  uint32_t a[M / 2][4];
  __device__ __forceinline__ explicit Packed(const float (&w)[M][4]) {
    repeat<M / 2, 4>([&](int k, int i) {
      a[k][i] = pack_two<T>(w[2 * k + i / 2][i % 2 * 2], w[2 * k + i / 2][i % 2 * 2 + 1]);
    });
  }
  // Clears the weights w[n][e] for which bit 4 n + e of `bits` is 0.
  __device__ __forceinline__ void keep_only(uint32_t bits) {
    repeat<M / 2, 4>([&](int k, int i) {
      const uint32_t two = bits >> (8 * k + 2 * i);
      a[k][i] &= (two & 1 ? 0x0000ffffu : 0) | (two & 2 ? 0xffff0000u : 0);
    });
  }
};

// acc += w x columns for the warp's 16 rows, over the M groups of 8 columns of the chunk that w has, from
// group `first` on.
template <typename T, int D, int M>
__device__ __forceinline__ void add_columns(float (&acc)[D / 8][4], const Packed<T, M>& w, uint32_t columns,
                                            int lane, int first = 0) {
#pragma unroll
  for (int k = 0; k < M / 2; ++k) {
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      load_transposed(b,
                      columns + piece_at<D>((first + 2 * k) * 8 + (lane & 15), D < 16 ? 0 : n + (lane >> 4)));
      multiply<T>(acc[n], w.a[k], b[0], b[1]);
      if constexpr (D >= 16) multiply<T>(acc[n + 1], w.a[k], b[2], b[3]);
    }
  }
}

// Adds the rows' sums of the rounded weights to `sum`: entries 0 and 1 are both of row g, entries 2 and 3 of
// row g + 8.
template <typename T, int M>
__device__ __forceinline__ void add_weights(float (&sum)[4], const Packed<T, M>& w) {
  const uint32_t ones = pack_two<T>(1, 1);
  repeat<M / 2>([&](int k) { multiply<T>(sum, w.a[k], ones, ones); });
}

// Return the sum, or the maximum, over the four lanes that have a row's columns.
__device__ __forceinline__ float quad_sum(float x) { return reduce_sum<4>(x); }
__device__ __forceinline__ float quad_max(float x) { return reduce_max<4>(x); }

// ---- what a pass has and where a thread works ------------------------------------------------------

// How many arrays [16, D] a warp accumulates in registers.
template <Score SCORE, Pass PASS, bool POSITIVE>
inline constexpr int kTileSums = POSITIVE || (SCORE == Score::dot && PASS == Pass::sources) ? 2 : 1;
// Blocks that a multiprocessor must hold, for D columns and SUMS accumulated arrays. This caps registers,
// because more blocks hide latency better.
template <int D, int SUMS>
inline constexpr int kTileBlocks = (D <= 32   ? 7
                                    : D == 64 ? 5
                                              : 4) -
                                   SUMS;

// Which operands of TileParams a pass reads (HAS_) and writes (OUT_).
template <int D, Score SCORE, Pass PASS>
struct TileTraits {
  static constexpr bool DOT = SCORE == Score::dot, FORWARD = PASS == Pass::forward;
  static constexpr bool SOURCES = PASS == Pass::sources, DESTINATIONS = PASS == Pass::destinations;
  static constexpr bool HAS_A = DOT, HAS_B = !FORWARD, HAS_C = DOT;
  static constexpr bool OUT_C = DOT && !FORWARD, OUT_D = !DESTINATIONS;
  static constexpr bool KEEP = D <= 64 || FORWARD;    // the rows' operands stay in registers
  static constexpr int C = D / 8, N = kTileCols / 8;  // C: 16-byte pieces of a row; N: groups of 8 columns
  static constexpr int SOME = D <= 32 ? N / 2 : N;    // of N, how many backward has in registers at a time
  // Bytes of statistics of a column.
  static constexpr int STAT = FORWARD ? (DOT ? 0 : 4) : SOURCES ? int(sizeof(NodeStats<float>)) : 0;
};

// The place of a thread. Its rows are g and g + 8 of the warp's 16, its columns 8 n + 2 t and + 1.
template <typename T, int D>
struct TilePlace {
  const TileParams& p;
  char* shared;
  uint32_t smem;
  Item item;
  int thread, lane, warp, g, t, head, heads, first_row;

  __device__ __forceinline__ TilePlace(const TileParams& params, char* memory)
      : p(params), shared(memory), smem(shared_address(memory)) {
    thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    head = blockIdx.y, heads = p.heads;
    const int4 raw = __ldg(reinterpret_cast<const int4*>(p.items) + blockIdx.x);
    item = {raw.x, raw.y, raw.z, raw.w};
    first_row = item.row + warp * 16;
  }
  // The node of the window's row r, or the last one where the graph has no such row.
  __device__ __forceinline__ int row_of(int r) const { return min(item.row + r, p.num_rows - 1); }
  // The address of the row of a node and this block's head in an array [nodes, H, D].
  __device__ __forceinline__ const T* element(const void* x, int64_t node) const {
    return static_cast<const T*>(x) + (node * heads + head) * D;
  }
  // Where the partial results of this lane's row g + 8 i and the head are.
  __device__ __forceinline__ int64_t slot_head(int i) const {
    return int64_t(item.slot + warp * 16 + g + 8 * i) * heads + head;
  }
};

}  // namespace dfgnn::cuda
