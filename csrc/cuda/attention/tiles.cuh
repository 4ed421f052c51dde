// The tile schedule: rows that share their neighbours load them once, and tensor cores do the products.
//
// A *window* is 64 consecutive rows. The neighbours of a window, each once, are cut into *chunks* of 32
// columns; of a chunk, row r has a mask whose bit c says that the edge (r, column c) exists. So a dense
// 64 x 32 block of scores is computed and masked, as in FlashAttention with a mask (Dao 2023, arXiv
// 2307.08691); Fused3S (Li and Chandramowlishwaran 2025, arXiv 2505.08098) does so for graph attention
// forward.
//
// Mapping: a block of 4 warps takes an item, a run of chunks of one window, for one head; a warp owns 16
// rows. Memory: the rows' operands and STAGES chunks of columns in shared memory, filled by asynchronous
// copies, in 16-byte pieces that are swizzled so that ldmatrix has no bank conflicts. Accumulators in
// registers (m16n8k16 layout: lane = 4 g + t holds rows g, g + 8 and columns 8 n + 2 t, + 1).
// For 16-bit features, head sizes 8 to 128, no options on edges and no edge twice: a mask has no place for
// them. A weight of 0 times a number that is not finite is NaN, which stays in the sums: 16 rows in whose
// sums there is one in the end are worked on again edge by edge (tile_edges.cuh), so that such a number
// reaches its neighbours only.
#pragma once

#include "../mma.cuh"
#include "tile_edges.cuh"

namespace dfgnn::cuda {

inline constexpr int kTileWarps = kTileRows / 16, kTileThreads = 32 * kTileWarps;

// The running maximum may lag behind by this much, so that accumulators are seldom rescaled: weights up to
// 2^8 are as exact as those up to 1.
inline constexpr float kLag = 8 * kLn2;

// Scores of products are exact: a largest one is rounded, and so weights relative to it are common factors of
// e^(rounding) off, which the mass has, too. Beyond this score the rounding may exceed 1.
inline constexpr float kLargeScore = 0x1p24f, kLeastNormal = 0x1p-126f;
__device__ __forceinline__ bool is_large(float top) {
  return abs(top) > kLargeScore && top != -infinity<float>();
}

// ---- layout ----------------------------------------------------------------------------------------

// Byte offset of the 16-byte piece of a row of D elements: 8 consecutive rows of a piece meet all banks.
template <int D>
__device__ __forceinline__ int piece_at(int row, int piece) {
  constexpr int C = D / 8, SHARE = C >= 8 ? 1 : 8 / C;
  return (row * C + (piece ^ ((row / SHARE) & ((C < 8 ? C : 8) - 1)))) * 16;
}

template <int D>
struct TileLayout {
  static constexpr int STAGES = D <= 32 ? 4 : D == 64 ? 3 : 2;
  static constexpr int ROWS = kTileRows * D * 2, COLS = kTileCols * D * 2, STATS = kTileCols * 16;
  static constexpr int STAGE = 2 * COLS + STATS;
  static constexpr int A = 0, B = ROWS, FIRST_STAGE = 2 * ROWS;
  static constexpr int DELTA = FIRST_STAGE + STAGES * STAGE;
  static constexpr int BYTES = DELTA + kTileRows * 4;
};

// ---- pieces of the kernel --------------------------------------------------------------------------

// s[n] += rows x columns^T for the warp's 16 rows and the chunk's 32 columns.
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
        if constexpr (D < 16) a[2] = a[3] = b[1] = b[3] = 0;  // half of a product is enough
        multiply<T>(s[n], a, b[0], b[1]);
        multiply<T>(s[n + 1], a, b[2], b[3]);
      }
    }
  }
};

// The warp's 16 x 32 weights, from the layout of the scores to an operand in 16 bits.
template <typename T, int M>
struct Packed {
  uint32_t a[M / 2][4];
  __device__ __forceinline__ explicit Packed(const float (&w)[M][4]) {
    repeat<M / 2, 4>([&](int k, int i) {
      a[k][i] = pack_two<T>(w[2 * k + i / 2][i % 2 * 2], w[2 * k + i / 2][i % 2 * 2 + 1]);
    });
  }
  // Of weights w[n][e] only those with bit 4 n + e, else 0.
  __device__ __forceinline__ void keep_only(uint32_t bits) {
    repeat<M / 2, 4>([&](int k, int i) {
      const uint32_t two = bits >> (8 * k + 2 * i);
      a[k][i] &= (two & 1 ? 0x0000ffffu : 0) | (two & 2 ? 0xffff0000u : 0);
    });
  }
};

// acc += w x columns for the warp's 16 rows.
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

// sum += the rows' sums of w, as it is rounded for the products; in entries 0 (row g) and 2 (row g + 8).
template <typename T, int M>
__device__ __forceinline__ void add_weights(float (&sum)[4], const Packed<T, M>& w) {
  const uint32_t ones = pack_two<T>(1, 1);
  repeat<M / 2>([&](int k) { multiply<T>(sum, w.a[k], ones, ones); });
}

__device__ __forceinline__ float quad_sum(float x) { return reduce_sum<4>(x); }
__device__ __forceinline__ float quad_max(float x) { return reduce_max<4>(x); }

// ---- the kernel ------------------------------------------------------------------------------------

// Arrays that a pass accumulates: what takes its registers.
template <Score SCORE, Pass PASS, bool POSITIVE>
inline constexpr int kTileSums = POSITIVE || (SCORE == Score::dot && PASS == Pass::sources) ? 2 : 1;
// Blocks that a multiprocessor holds: caps registers, because more blocks hide latency better.
template <int D, int SUMS>
inline constexpr int kTileBlocks = (D <= 32   ? 7
                                    : D == 64 ? 5
                                              : 4) -
                                   SUMS;

template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<D, kTileSums<SCORE, PASS, POSITIVE>>))
    tile_kernel(const __grid_constant__ TileParams p) {
  using L = TileLayout<D>;
  constexpr bool DOT = SCORE == Score::dot, FORWARD = PASS == Pass::forward, SOURCES = PASS == Pass::sources;
  constexpr bool HAS_A = DOT, HAS_B = !FORWARD, HAS_C = DOT;
  constexpr bool OUT_C = DOT && !FORWARD, OUT_D = PASS != Pass::destinations;
  constexpr bool KEEP = D <= 64 || FORWARD;
  constexpr int C = D / 8, N = kTileCols / 8;
  constexpr int SOME = D <= 32 ? N / 2 : N;  // of the N, that backward has in registers at a time
  constexpr int COPIES = (kTileCols * C + kTileThreads - 1) / kTileThreads;
  // Bytes of statistics of a column.
  constexpr int STAT = FORWARD ? (DOT ? 0 : 4) : SOURCES ? int(sizeof(NodeStats<float>)) : 0;

  follow();
  extern __shared__ __align__(128) char shared[];
  const uint32_t smem = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, heads = p.heads;
  const int4 raw = __ldg(reinterpret_cast<const int4*>(p.items) + blockIdx.x);
  const Item item = {raw.x, raw.y, raw.z, raw.w};
  const auto row_of = [&](int r) { return min(item.row + r, p.num_rows - 1); };
  const auto element = [&](const void* x, int64_t node) {
    return static_cast<const T*>(x) + (node * heads + head) * D;
  };

  // Columns of a chunk, which this thread copies: their ids are fetched a step ahead of the copies.
  struct Ids {
    int column[COPIES], stat;
  };
  const auto fetch_ids = [&](Ids& ids, int chunk) {
    if (chunk >= item.end) return;
    const int32_t* columns = p.tiles + int64_t(chunk) * kTileInts;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int at = thread + i * kTileThreads;
      if (kTileCols * C % kTileThreads == 0 || at < kTileCols * C) ids.column[i] = __ldg(columns + at / C);
    }
    if (STAT && thread < kTileCols) ids.stat = __ldg(columns + thread);
  };
  const auto stage_of = [&](int chunk) {
    return L::FIRST_STAGE + (chunk - item.begin) % L::STAGES * L::STAGE;
  };
  const auto copy_chunk = [&](const Ids& ids, int chunk) {
    if (chunk < item.end) {
      const uint32_t stage = smem + stage_of(chunk);
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int at = thread + i * kTileThreads;
        if (kTileCols * C % kTileThreads && at >= kTileCols * C) break;
        const uint32_t to = stage + piece_at<D>(at / C, at % C);
        if constexpr (HAS_C) copy_async<16>(to, element(p.c, ids.column[i]) + at % C * 8);
        copy_async<16>(to + L::COLS, element(p.d, ids.column[i]) + at % C * 8);
      }
      if constexpr (STAT > 0) {
        if (thread < kTileCols)
          copy_async<STAT>(stage + 2 * L::COLS + thread * STAT,
                           static_cast<const char*>(p.col_stats) + (int64_t(ids.stat) * heads + head) * STAT);
      }
    }
    commit_copies();
  };
  // The first chunks and the row operands are on their way.
  Ids next;
  {
    Ids first[L::STAGES - 1];
#pragma unroll
    for (int s = 0; s < L::STAGES - 1; ++s) fetch_ids(first[s], item.begin + s);
    fetch_ids(next, item.begin + L::STAGES - 1);
    for (int at = thread; at < kTileRows * C; at += kTileThreads) {
      const int r = at / C, piece = at % C;
      if constexpr (HAS_A)
        copy_async<16>(smem + L::A + piece_at<D>(r, piece), element(p.a, row_of(r)) + piece * 8);
      if constexpr (HAS_B)
        copy_async<16>(smem + L::B + piece_at<D>(r, piece), element(p.b, row_of(r)) + piece * 8);
    }
    commit_copies();
#pragma unroll
    for (int s = 0; s < L::STAGES - 1; ++s) copy_chunk(first[s], item.begin + s);
  }

  // This lane's rows are g and g + 8 of the warp's 16: their terms and statistics.
  const int first_row = item.row + warp * 16;
  int64_t row_head[2];
  bool row_ok[2];
  float row_term[2] = {}, top[2], log_sum[2] = {}, delta[2] = {};  // log_sum in units of log 2
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row_ok[i] = first_row + g + 8 * i < p.num_rows;
    row_head[i] = int64_t(row_of(warp * 16 + g + 8 * i)) * heads + head;
    if constexpr (!DOT) row_term[i] = p.row_term ? p.row_term[row_head[i]] : 0.f;
    top[i] = -infinity<float>();
    if constexpr (PASS == Pass::destinations) {
      const RowStats<float> stats = load_stats(p.row_stats + row_head[i]);
      top[i] = stats.max, log_sum[i] = stats.log_sum * kLog2E;
    }
  }
  if constexpr (PASS == Pass::destinations) {
    float* deltas = reinterpret_cast<float*>(shared + L::DELTA);
    for (int at = lane; at < 16 * C; at += 32) {  // C lanes per row
      const int r = at / C, piece = at % C;
      const int64_t node = row_of(warp * 16 + r);
      float x[8], y[8], z[8] = {}, sum = 0;
      Pack<T>::unpack(load_raw(element(p.b, node) + piece * 8), x);
      Pack<T>::unpack(load_raw(element(p.out, node) + piece * 8), y);
      if (p.out_bias) Pack<T>::unpack(load_raw(element(p.out_bias, 0) + piece * 8), z);
      repeat<8>([&](int k) { sum += x[k] * (y[k] - z[k]); });
      sum = reduce_sum<C>(sum);
      if (piece == 0) {
        deltas[warp * 16 + r] = sum;
        if (first_row + r < p.num_rows)
          p.node_stats[node * heads + head] = {0.f, load_stats(p.row_stats + node * heads + head), sum};
      }
    }
    __syncwarp();
    delta[0] = deltas[warp * 16 + g], delta[1] = deltas[warp * 16 + g + 8];
  }

  wait_copies<L::STAGES - 1>();
  __syncthreads();
  RowOperand<T, D, KEEP> a, b;
  if constexpr (HAS_A) a.init(smem + L::A, warp, lane);
  // Forward, the largest score is that of the largest product: of a scale below 0 the rows take the sign, and
  // none is 0, which -inf must not be multiplied by.
  [[maybe_unused]] const float factor = max(abs(p.scale), kLeastNormal);
  if constexpr (FORWARD && DOT) {
    if (p.scale < 0) a.negate();
  }
  if constexpr (HAS_B) b.init(smem + L::B, warp, lane);

  float acc_c[OUT_C ? C : 2][4] = {}, acc_d[OUT_D ? C : 2][4] = {}, acc_positive[POSITIVE ? C : 2][4] = {};
  float mass[4] = {}, mass_positive[4] = {};  // as of add_weights
  float row_sum[2] = {};

  const int32_t* masks = p.tiles + kTileCols + warp * 16 + g;
  uint32_t next_mask[2] = {};
  const auto fetch_masks = [&](int chunk) {
    if (chunk >= item.end) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) next_mask[i] = uint32_t(__ldg(masks + int64_t(chunk) * kTileInts + 8 * i));
  };
  fetch_masks(item.begin);

  for (int chunk = item.begin; chunk < item.end; ++chunk) {
    const uint32_t mask[2] = {next_mask[0] >> (2 * t), next_mask[1] >> (2 * t)};
    const bool any = __any_sync(kAll, (next_mask[0] | next_mask[1]) != 0);
    wait_copies<L::STAGES - 2>();
    __syncthreads();
    copy_chunk(next, chunk + L::STAGES - 1);
    fetch_ids(next, chunk + L::STAGES);
    fetch_masks(chunk + 1);
    if (!any) continue;

    const uint32_t columns_c = smem + stage_of(chunk), columns_d = columns_c + L::COLS;
    const char* stats = shared + stage_of(chunk) + 2 * L::COLS;
    const auto exists = [&](int n, int e) { return (mask[e >> 1] >> (8 * n + (e & 1))) & 1; };
    // Scores of all pairs.
    float s[N][4] = {};
    [[maybe_unused]] uint32_t positive = 0;  // forward: bit 4 n + e: z > 0
    if constexpr (DOT && FORWARD) {
      a.times(s, columns_c, warp, lane);  // not scaled yet
    } else if constexpr (FORWARD) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 term = reinterpret_cast<const float2*>(stats)[4 * n + t];
        repeat<4>([&](int e) {
          const float z = (e & 1 ? term.y : term.x) + row_term[e >> 1];
          if (POSITIVE && z > 0) positive |= 1u << (4 * n + e);
          s[n][e] = z * leaky_relu_grad(z, p.slope);
        });
      }
    }

    if constexpr (FORWARD) {
      // Those of edges, and a maximum that has risen by much scales down what has been added up.
      float peak[2] = {-infinity<float>(), -infinity<float>()};
      repeat<N, 4>([&](int n, int e) {
        s[n][e] = exists(n, e) ? s[n][e] : -infinity<float>();
        peak[e >> 1] = max(peak[e >> 1], s[n][e]);
      });
      repeat<2>([&](int i) { peak[i] = quad_max(peak[i]) * (DOT ? factor : 1.f); });
      const bool rises[2] = {peak[0] > top[0] + kLag, peak[1] > top[1] + kLag};
      if (__any_sync(kAll, rises[0] || rises[1])) {
        float shrink[2];
        repeat<2>([&](int i) {
          shrink[i] = rises[i] ? exp2_fast((top[i] - peak[i]) * kLog2E) : 1.f;
          if (rises[i]) top[i] = peak[i];
        });
        repeat<4>([&](int e) {
          mass[e] *= shrink[e >> 1];
          mass_positive[e] *= shrink[e >> 1];
        });
        repeat<C, 4>([&](int n, int e) {
          acc_d[n][e] *= shrink[e >> 1];
          if constexpr (POSITIVE) acc_positive[n][e] *= shrink[e >> 1];
        });
      }

      // Weights, their sums and those of the columns.
      const float reference[2] = {top[0] == -infinity<float>() ? 0.f : top[0],
                                  top[1] == -infinity<float>() ? 0.f : top[1]};
      repeat<N, 4>([&](int n, int e) {
        const float x = DOT ? fmaf(s[n][e], factor, -reference[e >> 1]) : minus(s[n][e], reference[e >> 1]);
        s[n][e] = exp2_fast(x * kLog2E);
      });
      Packed<T, N> weights(s);
      add_weights(mass, weights);
      add_columns<T, D>(acc_d, weights, columns_d, lane);
      if constexpr (POSITIVE) {
        weights.keep_only(positive);
        add_weights(mass_positive, weights);
        add_columns<T, D>(acc_positive, weights, columns_d, lane);
      }
    } else {
      // Some columns at a time, so that registers suffice: alpha, and the gradient of the score.
#pragma unroll
      for (int first = 0; first < N; first += SOME) {
        float s[SOME][4] = {}, grad[SOME][4] = {};
        if constexpr (DOT) a.times(s, columns_c, warp, lane, first);
        b.times(grad, columns_d, warp, lane, first);
        repeat<SOME, 4>([&](int m, int e) {
          const int n = first + m;
          RowStats<float> row = {top[e >> 1], log_sum[e >> 1]};
          float o = delta[e >> 1], slope = 1;
          if constexpr (SOURCES) {
            const float4 of = reinterpret_cast<const float4*>(stats)[8 * n + 2 * t + (e & 1)];  // NodeStats
            row = {of.y, of.z * kLog2E}, o = of.w;
            if constexpr (!DOT) {
              const float z = of.x + row_term[e >> 1];
              slope = leaky_relu_grad(z, p.slope);
              s[m][e] = z * slope;
            }
          }
          const float x = DOT ? fmaf(s[m][e], p.scale, -row.max) : minus(s[m][e], row.max);
          const float w = exists(n, e) ? exp2_fast(fmaf(x, kLog2E, -row.log_sum)) : 0.f;
          const float ds = w * (grad[m][e] - o);
          s[m][e] = w;
          grad[m][e] = ds;
          if constexpr (!DOT) row_sum[e >> 1] += ds * slope;
        });
        // The sums of columns.
        const Packed<T, SOME> weights(s), grads(grad);
        if constexpr (OUT_D) add_columns<T, D>(acc_d, weights, columns_d, lane, first);
        if constexpr (OUT_C) add_columns<T, D>(acc_c, grads, columns_c, lane, first);
      }
    }
  }
  wait_copies<0>();

  // Numbers that are not finite, and scores of which the rounding of the largest is no small number: again.
  float probe = 0;
  const auto look_at = [&](const auto& sums) {
    for (const auto& of_columns : sums) repeat<4>([&](int e) { probe = fmaf(of_columns[e], 0.f, probe); });
  };
  if constexpr (OUT_C) look_at(acc_c);
  if constexpr (OUT_D) look_at(acc_d);
  if constexpr (POSITIVE) look_at(acc_positive);
  bool again = probe + row_sum[0] * 0.f + row_sum[1] * 0.f != 0;
  if constexpr (FORWARD && DOT) again |= is_large(top[0]) || is_large(top[1]);
  if (__any_sync(kAll, again)) {
    tile_rows_by_edges<T, D, SCORE, PASS, POSITIVE>(p, item, head, warp, lane,
                                                    reinterpret_cast<const float*>(shared + L::DELTA));
    return;
  }

  // Results, through the warp's own rows of shared memory so that they leave in 16-byte pieces.
  __syncwarp();
  const auto store = [&](const float (&acc)[C][4], const float (&factor)[2], void* out, float* part) {
    if (item.slot < 0) {
#pragma unroll
      for (int n = 0; n < C; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<uint32_t*>(shared + L::A + piece_at<D>(warp * 16 + g + 8 * i, n) + 4 * t) =
              pack_two<T>(acc[n][2 * i] * factor[i], acc[n][2 * i + 1] * factor[i]);
      }
      __syncwarp();
      for (int at = lane; at < 16 * C; at += 32) {
        const int r = at / C, piece = at % C;
        if (first_row + r < p.num_rows)
          *reinterpret_cast<uint4*>(const_cast<T*>(element(out, first_row + r)) + piece * 8) =
              *reinterpret_cast<const uint4*>(shared + L::A + piece_at<D>(warp * 16 + r, piece));
      }
      __syncwarp();
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* to = part + (int64_t(item.slot + warp * 16 + g + 8 * i) * heads + head) * D + 2 * t;
#pragma unroll
        for (int n = 0; n < C; ++n)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
      }
    }
  };
  const auto slot_head = [&](int i) { return int64_t(item.slot + warp * 16 + g + 8 * i) * heads + head; };

  if constexpr (FORWARD) {
    float norm[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = mass[2 * i];
      norm[i] = sum == 0 ? 0.f : 1 / sum;
      if (t) continue;
      const Softmax<float, true> softmax = {top[i], sum, mass_positive[2 * i]};
      if (item.slot >= 0) {
        p.part_stats[slot_head(i)] = softmax;
      } else if (row_ok[i]) {
        p.stats[row_head[i]] = softmax.stats();
        if constexpr (POSITIVE) p.mass[row_head[i]] = mass_positive[2 * i] * norm[i];
      }
    }
    if (p.out_bias && item.slot < 0) {
      const T* bias = static_cast<const T*>(p.out_bias) + head * D + 2 * t;
      repeat<C, 4>(
          [&](int n, int e) { acc_d[n][e] = acc_d[n][e] * norm[e >> 1] + float(bias[8 * n + (e & 1)]); });
      const float one[2] = {1.f, 1.f};
      store(acc_d, one, p.out_d, p.part_d);
    } else {
      store(acc_d, norm, p.out_d, p.part_d);
    }
    if constexpr (POSITIVE) store(acc_positive, norm, p.positive, p.part_positive);
  } else {
    const float scale[2] = {p.scale, p.scale}, one[2] = {1.f, 1.f};
    if constexpr (OUT_C) store(acc_c, scale, p.out_c, p.part_c);
    if constexpr (OUT_D) store(acc_d, one, p.out_d, p.part_d);
    if constexpr (!DOT) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_sum[i] = quad_sum(row_sum[i]);
        if (t) continue;
        if (item.slot >= 0) {
          p.part_sum[slot_head(i)] = row_sum[i];
        } else if (row_ok[i]) {
          p.row_sum[row_head[i]] = row_sum[i];
        }
      }
    }
  }
}

}  // namespace dfgnn::cuda
