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

// The same for rows of numbers of T. Double-precision operands are read number by number, 16 lanes at a time:
// four rows, which are consecutive or every other one, and two pieces of each. In any such four, the order of
// a row's pairs of pieces differs.
template <typename T, int H>
__device__ __forceinline__ int piece_of(int row, int piece) {
  if constexpr (sizeof(T) == 8) {
    return (row * (H / 8) + (piece ^ (2 * ((row & 3) ^ ((row >> 2) & 1))))) * 16;
  } else {
    return piece_at<H>(row, piece);
  }
}

// Half the bytes of a row of D elements: its columns, if it had 16-bit ones. Layouts in shared memory depend
// on nothing else.
template <typename T, int D>
inline constexpr int kHalves = D * int(sizeof(T)) / 2;

// Shared memory, in bytes, for rows of D elements of 16 bits: the rows' operands A and B, then STAGES chunks,
// each with its columns of c, its columns of d and their statistics (NUMBER: bytes of one number), then delta
// of the rows.
template <int D, int NUMBER = 4>
struct TileLayout {
  static constexpr int STAGES = D <= 32 ? 4 : D == 64 ? 3 : 2;
  static constexpr int ROWS = kTileRows * D * 2, COLS = kTileCols * D * 2, STATS = kTileCols * 4 * NUMBER;
  static constexpr int STAGE = 2 * COLS + STATS;
  static constexpr int A = 0, B = ROWS, FIRST_STAGE = 2 * ROWS;
  static constexpr int DELTA = FIRST_STAGE + STAGES * STAGE;
  static constexpr int BYTES = DELTA + kTileRows * NUMBER;
};
template <typename T, int D>
using LayoutOf = TileLayout<kHalves<T, D>, int(sizeof(Acc<T>))>;

// ---- operands of the tensor cores ------------------------------------------------------------------

// The warp's 16 rows as the left operand of the tensor cores, in registers (kept) or in shared memory (base).
template <typename T, int COLUMNS, bool IN_REGISTERS>
struct RowOperand {
  static constexpr int D = kHalves<T, COLUMNS>, STEPS = D < 16 ? 1 : D / 16;
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
    static_assert(sizeof(T) == 2);
    repeat<STEPS, 4>([&](int k, int i) { kept[k][i] ^= 0x80008000u; });
  }
  // s[n] += rows x columns^T for M groups of 8 of the chunk's columns, from group `first` on.
  template <int M>
  __device__ __forceinline__ void times(float (&s)[M][4], uint32_t columns, int warp, int lane,
                                        int first = 0) const {
    [[maybe_unused]] float part[M][4] = {};  // in single precision, the sums of two steps
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
        if constexpr (sizeof(T) == 4) {
          const SplitFloats<4> rows(a);
          multiply(part[n], rows, SplitFloats<2>({b[0], b[1]}));
          multiply(part[n + 1], rows, SplitFloats<2>({b[2], b[3]}));
        } else {
          multiply<T>(s[n], a, b[0], b[1]);
          multiply<T>(s[n + 1], a, b[2], b[3]);
        }
      }
      if constexpr (sizeof(T) == 4) {
        if (k % 2 || k == STEPS - 1)
          repeat<M, 4>([&](int n, int e) { s[n][e] += part[n][e], part[n][e] = 0; });
      }
    }
  }
};

// The same in double precision, whose operands are loaded number by number: the lane's are of rows g and g +
// 8, and of column t of each step's four.
template <int D, bool IN_REGISTERS>
struct RowOperand<double, D, IN_REGISTERS> {
  static constexpr int H = kHalves<double, D>, STEPS = D / 4;
  uint32_t base;
  double kept[IN_REGISTERS ? STEPS : 1][2];

  __device__ __forceinline__ static double number(uint32_t base, int row, int column) {
    return load_double(base + piece_of<double, H>(row, column / 2) + column % 2 * 8);
  }
  __device__ __forceinline__ void init(uint32_t at, int warp, int lane) {
    base = at;
    if constexpr (IN_REGISTERS)
      repeat<STEPS, 2>([&](int k, int i) {
        kept[k][i] = number(at, warp * 16 + (lane >> 2) + 8 * i, 4 * k + (lane & 3));
      });
  }
  template <int M>
  __device__ __forceinline__ void times(double (&s)[M][4], uint32_t columns, int warp, int lane,
                                        int first = 0) const {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      double a[2];
      repeat<2>([&](int i) {
        a[i] = IN_REGISTERS ? kept[IN_REGISTERS ? k : 0][i]
                            : number(base, warp * 16 + (lane >> 2) + 8 * i, 4 * k + (lane & 3));
      });
      repeat<M>([&](int n) {
        multiply(s[n], a, number(columns, (first + n) * 8 + (lane >> 2), 4 * k + (lane & 3)));
      });
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

// The weights in single precision, as the tensor cores take them, whose step has eight columns. The order of
// a step's columns may be any, if both operands have it: that of the scores needs no exchange between lanes.
// With it, the column of number t of a step is 2 t, that of t + 4 is 2 t + 1.
template <int M>
struct Packed<float, M> {
  float w[M][4];
  __device__ __forceinline__ explicit Packed(const float (&weights)[M][4]) {
    repeat<M, 4>([&](int n, int e) { w[n][e] = weights[n][e]; });
  }
};
template <int M>
struct Packed<double, M> {
  double w[M][4];
  __device__ __forceinline__ explicit Packed(const double (&weights)[M][4]) {
    repeat<M, 4>([&](int n, int e) { w[n][e] = weights[n][e]; });
  }
};
// Tensor cores cut sums off instead of rounding them, so that no sum of more than a few products stays in
// them.
template <typename T, int D, int M>
__device__ __forceinline__ void add_columns(float (&acc)[D / 8][4], const Packed<float, M>& p,
                                            uint32_t columns, int lane, int first = 0) {
  constexpr int H = kHalves<float, D>;
  SplitFloats<4> w[M];
  repeat<M>([&](int k) {
    w[k] = SplitFloats<4>({__float_as_uint(p.w[k][0]), __float_as_uint(p.w[k][2]), __float_as_uint(p.w[k][1]),
                           __float_as_uint(p.w[k][3])});
  });
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const int piece = 2 * n + (lane >> 4), within = (lane >> 2) % 4 * 4;
    float part[4] = {};
    repeat<M>([&](int k) {
      const int row = (first + k) * 8 + 2 * (lane & 3);
      multiply(part, w[k],
               SplitFloats<2>({load_word(columns + piece_at<H>(row, piece) + within),
                               load_word(columns + piece_at<H>(row + 1, piece) + within)}));
    });
    repeat<4>([&](int e) { acc[n][e] += part[e]; });
    if (D >= 64 && n % 2) __syncwarp();  // no load is moved further up, where no registers are left for it
  }
}
template <typename T, int D, int M>
__device__ __forceinline__ void add_columns(double (&acc)[D / 8][4], const Packed<double, M>& p,
                                            uint32_t columns, int lane, int first = 0) {
#pragma unroll
  for (int k = 0; k < M; ++k) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const double w[2] = {p.w[k][odd], p.w[k][2 + odd]};
      repeat<D / 8>([&](int n) {
        multiply(acc[n], w,
                 RowOperand<double, D, false>::number(columns, (first + k) * 8 + 2 * (lane & 3) + odd,
                                                      8 * n + (lane >> 2)));
      });
    }
  }
}

// Adds the rows' sums of the rounded weights to `sum`: entries 0 and 1 are both of row g, entries 2 and 3 of
// row g + 8. In 32 and 64 bits entries 0 and 2 get the sums over this lane's columns alone, which whole_sum
// completes.
template <typename T, int M>
__device__ __forceinline__ void add_weights(Acc<T> (&sum)[4], const Packed<T, M>& w) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t ones = pack_two<T>(1, 1);
    repeat<M / 2>([&](int k) { multiply<T>(sum, w.a[k], ones, ones); });
  } else {
    repeat<M, 4>([&](int n, int e) { sum[e & 2] += w.w[n][e]; });
  }
}

// Return the sum, or the maximum, over the four lanes that have a row's columns.
template <typename A>
__device__ __forceinline__ A quad_sum(A x) {
  return reduce_sum<4>(x);
}
template <typename A>
__device__ __forceinline__ A quad_max(A x) {
  return reduce_max<4>(x);
}
// Number 2 i of the sums of add_weights, over all columns.
template <typename T, typename A>
__device__ __forceinline__ A whole_sum(A sum) {
  return sizeof(T) == 2 ? sum : quad_sum(sum);
}

// ---- what a pass has and where a thread works ------------------------------------------------------

// The score of attention within blocks (core/blocks.h): a dot product plus a bias of the column (of the row,
// in the pass over sources). The columns of a window are the consecutive rows of its rows' blocks.
inline constexpr Score kInBlocks = Score(3);

// How many arrays [16, D] a warp accumulates in registers.
template <Score SCORE, Pass PASS, bool POSITIVE>
inline constexpr int kTileSums =
    POSITIVE || ((SCORE == Score::dot || SCORE == kInBlocks) && PASS == Pass::sources) ? 2 : 1;
// Blocks that a multiprocessor must hold, for D columns and SUMS accumulated arrays. This caps registers,
// because more blocks hide latency better.
template <int D, int SUMS>
inline constexpr int kTileBlocks = (D <= 32   ? 7
                                    : D == 64 ? 5
                                              : 4) -
                                   SUMS;
// The same for operands of more than 16 bits, H = kHalves.
template <int H>
inline constexpr int kWideBlocks = H <= 64    ? 3
                                   : H == 128 ? 2
                                              : 1;

// Which operands of TileParams a pass reads (HAS_) and writes (OUT_).
template <typename T, int D, Score SCORE, Pass PASS>
struct TileTraits {
  static constexpr bool BLOCKS = SCORE == kInBlocks;
  static constexpr bool DOT = SCORE == Score::dot || BLOCKS, FORWARD = PASS == Pass::forward;
  static constexpr bool SOURCES = PASS == Pass::sources, DESTINATIONS = PASS == Pass::destinations;
  static constexpr bool HAS_A = DOT, HAS_B = !FORWARD, HAS_C = DOT;
  static constexpr bool OUT_C = DOT && !FORWARD, OUT_D = !DESTINATIONS;
  static constexpr int H = kHalves<T, D>;
  static constexpr bool KEEP = H <= 64 || (FORWARD && H <= 128);  // the rows' operands stay in registers
  // C: 16-byte pieces of a row; G: groups of 8 columns of its sums; N: groups of 8 columns of a chunk
  static constexpr int C = H / 8, G = D / 8, N = kTileCols / 8;
  // Of N, how many backward has in registers at a time.
  static constexpr int SOME = D <= 32 || sizeof(T) == 4 ? N / 2 : N;
  // Bytes of statistics of a column.
  static constexpr int STAT = SOURCES                          ? int(sizeof(NodeStats<Acc<T>>))
                              : BLOCKS                         ? int(sizeof(Acc<T>))
                              : FORWARD && SCORE != Score::dot ? 4
                                                               : 0;
};

// The place of a thread. Its rows are g and g + 8 of the warp's 16, its columns 8 n + 2 t and + 1.
template <typename T, int D>
struct TilePlace {
  const TileParams& p;
  char* shared;
  uint32_t smem;
  Item item;
  int thread, lane, warp, g, t, head, heads, first_row;
  int first_column = 0, last_column = 0;  // of the window, in blocks

  // blocks: TileParams is that of BlockTileParams.
  __device__ __forceinline__ TilePlace(const TileParams& params, char* memory, bool blocks)
      : p(params), shared(memory), smem(shared_address(memory)) {
    thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    head = blockIdx.y, heads = p.heads;
    if (blocks) {
      const int2* ranges = static_cast<const BlockTileParams&>(p).ranges;
      item = {int(blockIdx.x) * kTileRows, 0, 0, kWhole};
      first_column = __ldg(ranges + item.row).x;
      const int end = __ldg(ranges + min(item.row + kTileRows, p.num_rows) - 1).y;
      item.end = max(end - first_column + kTileCols - 1, 0) / kTileCols;
      last_column = end - 1;
    } else {
      const int4 raw = __ldg(reinterpret_cast<const int4*>(p.items) + blockIdx.x);
      item = {raw.x, raw.y, raw.z, raw.w};
    }
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
