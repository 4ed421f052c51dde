// Tiles (tiles.cuh): the rows' statistics, the sums that a pass adds up chunk by chunk, and its results. Lane
// 4 g + t has the rows g and g + 8 of its warp's 16. In arrays named x here, x[i] is of row g + 8 i, and
// x[n][e] of row g + 8 (e / 2) and column 8 n + 2 t + e % 2. dS: the gradient of a score; L': the derivative
// of the LeakyReLU (additive).
//
// Names from other files:
// tile_edges.cuh:
//   TileParams p        a pass's arrays: operands a, b of rows and c, d of columns (with a table by pass),
//                       and results
// tile_operands.cuh:
//   TilePlace me        warp, lane, g, t, item, head; row_of(r): node of the window's row r; element(array,
//                       node): its row; slot_head(i): index of row i in partial results
//   TileTraits X        DOT or additive; FORWARD, DESTINATIONS, SOURCES; OUT_C, OUT_D: the results of the
//                       pass; C: 16-byte pieces of a row; N, SOME: groups of 8 columns of a chunk, and how
//                       many backward takes at a time
//   a.times(s, ...)     s += rows' operand times a chunk's columns (tensor cores)
//   Packed              weights in 16 bits; keep_only(bits) sets the weights whose bit is 0 to 0
//   add_columns         (acc, weights, columns, ...): acc += weights x columns (tensor cores)
//   add_weights         (sum, weights): sum += the rows' sums of the rounded weights
//   quad_sum, quad_max  the sum and maximum over the four lanes of a row, in all of them
//   piece_at<D>         (row, piece) returns the offset of a 16-byte piece of a row in shared memory
//   kLag                how far a row's maximum may rise before its sums are scaled down
//   is_large(top)       whether the rounding of the maximum `top` may exceed 1
// mma.cuh, softmax.cuh:
//   exp2_fast           2^x; kLog2E: log2 e. pack_two: two numbers in 16 bits each, in a word
//   RowStats            max, log_sum. NodeStats: term, RowStats, delta. Softmax: top, mass, positive (mass
//                       where z > 0); stats(): RowStats
#pragma once

#include "tile_operands.cuh"

namespace dfgnn::cuda {

// ---- rows ------------------------------------------------------------------------------------------

// Score terms and statistics of this lane's two rows. top: in forward the running maximum, in the pass over
// destinations the saved one. log_sum is in units of log 2. ok: whether the graph has this row. row_head: the
// index of the row and head in arrays [nodes, H].
template <typename T, int D, Score SCORE, Pass PASS>
struct TileRows {
  using X = TileTraits<D, SCORE, PASS>;
  int64_t row_head[2];
  bool ok[2];
  float term[2] = {}, top[2], log_sum[2] = {}, delta[2] = {};

  __device__ __forceinline__ void load(const TilePlace<T, D>& me) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ok[i] = me.first_row + me.g + 8 * i < me.p.num_rows;
      row_head[i] = int64_t(me.row_of(me.warp * 16 + me.g + 8 * i)) * me.heads + me.head;
      if constexpr (!X::DOT) term[i] = me.p.row_term ? me.p.row_term[row_head[i]] : 0.f;
      top[i] = -infinity<float>();
      if constexpr (X::DESTINATIONS) {
        const RowStats<float> stats = load_stats(me.p.row_stats + row_head[i]);
        top[i] = stats.max, log_sum[i] = stats.log_sum * kLog2E;
      }
    }
    if constexpr (X::DESTINATIONS) load_deltas(me);
  }

  // Computes delta = g . (out - out_bias) of the warp's rows, by C lanes per row, and writes node_stats for
  // the pass over sources.
  __device__ __forceinline__ void load_deltas(const TilePlace<T, D>& me) {
    float* deltas = reinterpret_cast<float*>(me.shared + TileLayout<D>::DELTA);
    for (int at = me.lane; at < 16 * X::C; at += 32) {
      const int r = at / X::C, piece = at % X::C;
      const int64_t node = me.row_of(me.warp * 16 + r);
      float x[8], y[8], z[8] = {}, sum = 0;
      Pack<T>::unpack(load_raw(me.element(me.p.b, node) + piece * 8), x);
      Pack<T>::unpack(load_raw(me.element(me.p.out, node) + piece * 8), y);
      if (me.p.out_bias) Pack<T>::unpack(load_raw(me.element(me.p.out_bias, 0) + piece * 8), z);
      repeat<8>([&](int k) { sum += x[k] * (y[k] - z[k]); });
      sum = reduce_sum<X::C>(sum);
      if (piece == 0) {
        deltas[me.warp * 16 + r] = sum;
        if (me.first_row + r < me.p.num_rows)
          me.p.node_stats[node * me.heads + me.head] = {
              0.f, load_stats(me.p.row_stats + node * me.heads + me.head), sum};
      }
    }
    __syncwarp();
    delta[0] = deltas[me.warp * 16 + me.g], delta[1] = deltas[me.warp * 16 + me.g + 8];
  }
};

// ---- sums ------------------------------------------------------------------------------------------

// A chunk in shared memory. columns_c, columns_d, stats: where operands c and d of its columns, and the
// columns' statistics, lie. mask[i]: which of the chunk's columns have an edge with the lane's row g + 8 i.
// It is shifted right by 2 t, so that bit 8 n + j is for column 8 n + 2 t + j, j = 0 or 1.
struct TileChunk {
  uint32_t mask[2], columns_c, columns_d;
  const char* stats;
  // Whether the pair of x[n][e] is an edge.
  __device__ __forceinline__ bool exists(int n, int e) const {
    return (mask[e >> 1] >> (8 * n + (e & 1))) & 1;
  }
};

// The sums of a pass for the warp's rows: c adds up the columns' operand c, weighted by dS; d their operand
// d, weighted by the softmax's weight; positive is d's sum over the edges with z > 0 alone; mass and
// mass_positive are the sums of the weights over the edges of d and of positive.
template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
struct TileSums {
  using X = TileTraits<D, SCORE, PASS>;
  using Rows = TileRows<T, D, SCORE, PASS>;
  static constexpr int C = X::C, N = X::N;
  float c[X::OUT_C ? C : 2][4] = {}, d[X::OUT_D ? C : 2][4] = {}, positive[POSITIVE ? C : 2][4] = {};
  float mass[4] = {}, mass_positive[4] = {};  // laid out as in add_weights
  float row[2] = {};                          // additive over sources: sum of dS L' over this lane's columns

  // s = scores that are LeakyReLU of z, a term of the row plus one of the column. Bit 4 n + e of
  // positive_bits says that z > 0 for s[n][e].
  __device__ __forceinline__ static void additive_scores(float (&s)[N][4], uint32_t& positive_bits,
                                                         const TilePlace<T, D>& me, const Rows& rows,
                                                         const TileChunk& chunk) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 term = reinterpret_cast<const float2*>(chunk.stats)[4 * n + me.t];
      repeat<4>([&](int e) {
        const float z = (e & 1 ? term.y : term.x) + rows.term[e >> 1];
        if (POSITIVE && z > 0) positive_bits |= 1u << (4 * n + e);
        s[n][e] = z * leaky_relu_grad(z, me.p.slope);
      });
    }
  }

  // peak: the largest scores of a chunk in the two rows. Where one exceeds the row's running maximum by more
  // than kLag, it becomes the maximum, and the row's sums are scaled down.
  __device__ __forceinline__ void rescale(Rows& rows, const float (&peak)[2]) {
    const bool rises[2] = {peak[0] > rows.top[0] + kLag, peak[1] > rows.top[1] + kLag};
    if (__any_sync(kAll, rises[0] || rises[1])) {
      float shrink[2];
      repeat<2>([&](int i) {
        shrink[i] = rises[i] ? exp2_fast((rows.top[i] - peak[i]) * kLog2E) : 1.f;
        if (rises[i]) rows.top[i] = peak[i];
      });
      repeat<4>([&](int e) {
        mass[e] *= shrink[e >> 1];
        mass_positive[e] *= shrink[e >> 1];
      });
      repeat<C, 4>([&](int n, int e) {
        d[n][e] *= shrink[e >> 1];
        if constexpr (POSITIVE) positive[n][e] *= shrink[e >> 1];
      });
    }
  }

  // Adds a chunk to the sums of forward. A score of dot is the product of a row and a column times `factor`.
  template <typename Operand>
  __device__ __forceinline__ void add_forward(const TilePlace<T, D>& me, Rows& rows, const TileChunk& chunk,
                                              const Operand& a, float factor) {
    float s[N][4] = {};
    [[maybe_unused]] uint32_t positive_bits = 0;
    if constexpr (X::DOT) {
      a.times(s, chunk.columns_c, me.warp, me.lane);  // not scaled yet
    } else {
      additive_scores(s, positive_bits, me, rows, chunk);
    }
    float peak[2] = {-infinity<float>(), -infinity<float>()};
    repeat<N, 4>([&](int n, int e) {
      s[n][e] = chunk.exists(n, e) ? s[n][e] : -infinity<float>();
      peak[e >> 1] = max(peak[e >> 1], s[n][e]);
    });
    repeat<2>([&](int i) { peak[i] = quad_max(peak[i]) * (X::DOT ? factor : 1.f); });
    rescale(rows, peak);

    // ---- Softmax weights, rounded to 16 bits, and the sums by these weights.
    const float reference[2] = {rows.top[0] == -infinity<float>() ? 0.f : rows.top[0],
                                rows.top[1] == -infinity<float>() ? 0.f : rows.top[1]};
    repeat<N, 4>([&](int n, int e) {
      const float x = X::DOT ? fmaf(s[n][e], factor, -reference[e >> 1]) : minus(s[n][e], reference[e >> 1]);
      s[n][e] = exp2_fast(x * kLog2E);
    });
    Packed<T, N> weights(s);
    add_weights(mass, weights);
    add_columns<T, D>(d, weights, chunk.columns_d, me.lane);
    if constexpr (POSITIVE) {
      weights.keep_only(positive_bits);
      add_weights(mass_positive, weights);
      add_columns<T, D>(positive, weights, chunk.columns_d, me.lane);
    }
  }

  // Adds a chunk to the sums of backward: computes alpha and the gradients of the scores, of SOME groups of
  // columns at a time, so that registers suffice.
  template <typename Operand>
  __device__ __forceinline__ void add_backward(const TilePlace<T, D>& me, const Rows& rows,
                                               const TileChunk& chunk, const Operand& a, const Operand& b) {
    constexpr int SOME = X::SOME;
#pragma unroll
    for (int first = 0; first < N; first += SOME) {
      float s[SOME][4] = {}, grad[SOME][4] = {};
      if constexpr (X::DOT) a.times(s, chunk.columns_c, me.warp, me.lane, first);
      b.times(grad, chunk.columns_d, me.warp, me.lane, first);
      repeat<SOME, 4>([&](int m, int e) {
        const int n = first + m;
        RowStats<float> of_row = {rows.top[e >> 1], rows.log_sum[e >> 1]};
        float delta = rows.delta[e >> 1], slope = 1;
        if constexpr (X::SOURCES) {
          const float4 of = reinterpret_cast<const float4*>(chunk.stats)[8 * n + 2 * me.t + (e & 1)];
          of_row = {of.y, of.z * kLog2E}, delta = of.w;  // of: NodeStats
          if constexpr (!X::DOT) {
            const float z = of.x + rows.term[e >> 1];
            slope = leaky_relu_grad(z, me.p.slope);
            s[m][e] = z * slope;
          }
        }
        const float x = X::DOT ? fmaf(s[m][e], me.p.scale, -of_row.max) : minus(s[m][e], of_row.max);
        const float w = chunk.exists(n, e) ? exp2_fast(fmaf(x, kLog2E, -of_row.log_sum)) : 0.f;
        const float ds = w * (grad[m][e] - delta);
        s[m][e] = w;
        grad[m][e] = ds;
        if constexpr (!X::DOT) row[e >> 1] += ds * slope;
      });
      const Packed<T, SOME> weights(s), grads(grad);
      if constexpr (X::OUT_D) add_columns<T, D>(d, weights, chunk.columns_d, me.lane, first);
      if constexpr (X::OUT_C) add_columns<T, D>(c, grads, chunk.columns_c, me.lane, first);
    }
  }

  // Whether the rows must be computed again edge by edge: where a sum is not finite (0 times it is NaN, and
  // NaN is not 0), or the maximum is so large that its rounding may exceed 1.
  __device__ __forceinline__ bool are_doubtful(const Rows& rows) const {
    float probe = 0;
    const auto look_at = [&](const auto& sums) {
      for (const auto& of_columns : sums) repeat<4>([&](int e) { probe = fmaf(of_columns[e], 0.f, probe); });
    };
    if constexpr (X::OUT_C) look_at(c);
    if constexpr (X::OUT_D) look_at(d);
    if constexpr (POSITIVE) look_at(positive);
    bool again = probe + row[0] * 0.f + row[1] * 0.f != 0;
    if constexpr (X::FORWARD && X::DOT) again |= is_large(rows.top[0]) || is_large(rows.top[1]);
    return again;
  }
};

// ---- results ---------------------------------------------------------------------------------------

// Writes the sums of a window that is one work item, times a factor per row, to `out`: through the warp's own
// rows in shared memory (area A), so that it stores 16-byte pieces. The sums of a split window go to their
// partial-result slots in `part`, unscaled.
template <typename T, int D>
__device__ __forceinline__ void store_sums(const TilePlace<T, D>& me, const float (&acc)[D / 8][4],
                                           const float (&factor)[2], void* out, float* part) {
  constexpr int C = D / 8, A = TileLayout<D>::A;
  if (me.item.slot < 0) {
#pragma unroll
    for (int n = 0; n < C; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(me.shared + A + piece_at<D>(me.warp * 16 + me.g + 8 * i, n) + 4 * me.t) =
            pack_two<T>(acc[n][2 * i] * factor[i], acc[n][2 * i + 1] * factor[i]);
    }
    __syncwarp();
    for (int at = me.lane; at < 16 * C; at += 32) {
      const int r = at / C, piece = at % C;
      if (me.first_row + r < me.p.num_rows)
        *reinterpret_cast<uint4*>(const_cast<T*>(me.element(out, me.first_row + r)) + piece * 8) =
            *reinterpret_cast<const uint4*>(me.shared + A + piece_at<D>(me.warp * 16 + r, piece));
    }
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to =
          part + (int64_t(me.item.slot + me.warp * 16 + me.g + 8 * i) * me.heads + me.head) * D + 2 * me.t;
#pragma unroll
      for (int n = 0; n < C; ++n)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
    }
  }
}

// Writes the results of forward for the warp's rows: out (+ out_bias), the array `positive` of ForwardParams,
// and the statistics; or the partial results of a split window.
template <typename T, int D, Score SCORE, bool POSITIVE>
__device__ __forceinline__ void store_forward(const TilePlace<T, D>& me,
                                              const TileRows<T, D, SCORE, Pass::forward>& rows,
                                              TileSums<T, D, SCORE, Pass::forward, POSITIVE>& sums) {
  const TileParams& p = me.p;
  float norm[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = sums.mass[2 * i];
    norm[i] = sum == 0 ? 0.f : 1 / sum;
    if (me.t) continue;
    const Softmax<float, true> softmax = {rows.top[i], sum, sums.mass_positive[2 * i]};
    if (me.item.slot >= 0) {
      p.part_stats[me.slot_head(i)] = softmax;
    } else if (rows.ok[i]) {
      p.stats[rows.row_head[i]] = softmax.stats();
      if constexpr (POSITIVE) p.mass[rows.row_head[i]] = sums.mass_positive[2 * i] * norm[i];
    }
  }
  if (p.out_bias && me.item.slot < 0) {
    const T* bias = static_cast<const T*>(p.out_bias) + me.head * D + 2 * me.t;
    repeat<D / 8, 4>(
        [&](int n, int e) { sums.d[n][e] = sums.d[n][e] * norm[e >> 1] + float(bias[8 * n + (e & 1)]); });
    const float one[2] = {1.f, 1.f};
    store_sums(me, sums.d, one, p.out_d, p.part_d);
  } else {
    store_sums(me, sums.d, norm, p.out_d, p.part_d);
  }
  if constexpr (POSITIVE) store_sums(me, sums.positive, norm, p.positive, p.part_positive);
}

// Writes out_c, scaled, and out_d, and for additive row_sum, the sum of dS L'; or the partial results of a
// split window.
template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__device__ __forceinline__ void store_backward(const TilePlace<T, D>& me,
                                               const TileRows<T, D, SCORE, PASS>& rows,
                                               TileSums<T, D, SCORE, PASS, POSITIVE>& sums) {
  using X = TileTraits<D, SCORE, PASS>;
  const TileParams& p = me.p;
  const float scale[2] = {p.scale, p.scale}, one[2] = {1.f, 1.f};
  if constexpr (X::OUT_C) store_sums(me, sums.c, scale, p.out_c, p.part_c);
  if constexpr (X::OUT_D) store_sums(me, sums.d, one, p.out_d, p.part_d);
  if constexpr (!X::DOT) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.row[i] = quad_sum(sums.row[i]);
      if (me.t) continue;
      if (me.item.slot >= 0) {
        p.part_sum[me.slot_head(i)] = sums.row[i];
      } else if (rows.ok[i]) {
        p.row_sum[rows.row_head[i]] = sums.row[i];
      }
    }
  }
}

}  // namespace dfgnn::cuda
