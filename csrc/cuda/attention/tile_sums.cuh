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

// The scale of scores in blocks.
template <typename A>
__device__ __forceinline__ A scale_of(const TileParams& p) {
  return sizeof(A) == 8 ? A(static_cast<const BlockTileParams&>(p).exact_scale) : A(p.scale);
}

// ---- rows ------------------------------------------------------------------------------------------

// Score terms and statistics of this lane's two rows. top: in forward the running maximum, in the pass over
// destinations the saved one. log_sum is in units of log 2. ok: whether the graph has this row. row_head: the
// index of the row and head in arrays [nodes, H].
template <typename T, int D, Score SCORE, Pass PASS>
struct TileRows {
  using X = TileTraits<T, D, SCORE, PASS>;
  using A = Acc<T>;
  int64_t row_head[2];
  bool ok[2];
  A term[2] = {}, top[2], log_sum[2] = {}, delta[2] = {};
  int2 range[2];  // of the row's columns, in blocks

  __device__ __forceinline__ void load(const TilePlace<T, D>& me) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ok[i] = me.first_row + me.g + 8 * i < me.p.num_rows;
      row_head[i] = int64_t(me.row_of(me.warp * 16 + me.g + 8 * i)) * me.heads + me.head;
      if constexpr (!X::DOT || (X::BLOCKS && X::SOURCES))
        term[i] = me.p.row_term ? reinterpret_cast<const A*>(me.p.row_term)[row_head[i]] : A(0);
      if constexpr (X::BLOCKS)
        range[i] =
            __ldg(static_cast<const BlockTileParams&>(me.p).ranges + me.row_of(me.warp * 16 + me.g + 8 * i));
      top[i] = -infinity<A>();
      if constexpr (X::DESTINATIONS) {
        const RowStats<A> stats =
            load_stats(reinterpret_cast<const RowStats<A>*>(me.p.row_stats) + row_head[i]);
        top[i] = stats.max, log_sum[i] = stats.log_sum * kUnit<A>;
      }
    }
    if constexpr (X::DESTINATIONS) load_deltas(me);
  }

  // Computes delta = g . (out - out_bias) of the warp's rows, by C lanes per row, and writes node_stats for
  // the pass over sources.
  __device__ __forceinline__ void load_deltas(const TilePlace<T, D>& me) {
    constexpr int V = kVec<T>;
    A* deltas = reinterpret_cast<A*>(me.shared + LayoutOf<T, D>::DELTA);
    const auto* row_stats = reinterpret_cast<const RowStats<A>*>(me.p.row_stats);
    auto* node_stats = reinterpret_cast<NodeStats<A>*>(me.p.node_stats);
    for (int at = me.lane; at < 16 * X::C; at += 32) {
      const int r = at / X::C, piece = at % X::C;
      const int64_t node = me.row_of(me.warp * 16 + r);
      A x[V], y[V], z[V] = {}, sum = 0;
      Pack<T>::unpack(load_raw(me.element(me.p.b, node) + piece * V), x);
      Pack<T>::unpack(load_raw(me.element(me.p.out, node) + piece * V), y);
      if constexpr (!X::BLOCKS) {
        if (me.p.out_bias) Pack<T>::unpack(load_raw(me.element(me.p.out_bias, 0) + piece * V), z);
      }
      repeat<V>([&](int k) { sum += x[k] * (y[k] - z[k]); });
      sum = reduce_sum<X::C>(sum);
      if (piece == 0) {
        if constexpr (X::BLOCKS) {
          const auto* of_sum = static_cast<const A*>(static_cast<const BlockTileParams&>(me.p).grad_log_sum);
          if (of_sum) sum -= of_sum[node * me.heads + me.head];
        }
        deltas[me.warp * 16 + r] = sum;
        if (me.first_row + r < me.p.num_rows)
          node_stats[node * me.heads + me.head] = {A(0), load_stats(row_stats + node * me.heads + me.head),
                                                   sum};
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
  using X = TileTraits<T, D, SCORE, PASS>;
  using A = Acc<T>;
  using Rows = TileRows<T, D, SCORE, PASS>;
  static constexpr int C = X::G, N = X::N;
  A c[X::OUT_C ? C : 2][4] = {}, d[X::OUT_D ? C : 2][4] = {}, positive[POSITIVE ? C : 2][4] = {};
  A mass[4] = {}, mass_positive[4] = {};  // laid out as in add_weights
  A row[2] = {};  // additive, blocks: over sources, sum of dS L' over this lane's columns

  // In blocks, the bias of the column of x[n][e].
  __device__ __forceinline__ static A bias_of(const TilePlace<T, D>& me, const TileChunk& chunk, int n,
                                              int e) {
    return me.p.col_stats ? reinterpret_cast<const A*>(chunk.stats)[8 * n + 2 * me.t + (e & 1)] : A(0);
  }

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
  __device__ __forceinline__ void rescale(Rows& rows, const A (&peak)[2]) {
    const bool rises[2] = {peak[0] > rows.top[0] + kLag, peak[1] > rows.top[1] + kLag};
    if (__any_sync(kAll, rises[0] || rises[1])) {
      A shrink[2];
      repeat<2>([&](int i) {
        shrink[i] = rises[i] ? exp_unit((rows.top[i] - peak[i]) * kUnit<A>) : A(1);
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
  // PLAIN (blocks): there is no bias, all pairs exist, and the factor is positive.
  template <bool PLAIN, typename Operand>
  __device__ __forceinline__ void add_forward(const TilePlace<T, D>& me, Rows& rows, const TileChunk& chunk,
                                              const Operand& a, A factor) {
    A s[N][4] = {};
    [[maybe_unused]] uint32_t positive_bits = 0;
    if constexpr (X::DOT) {
      a.times(s, chunk.columns_c, me.warp, me.lane);  // not scaled yet
    } else {
      additive_scores(s, positive_bits, me, rows, chunk);
    }
    constexpr bool SCALED =
        X::DOT && (PLAIN || !X::BLOCKS);  // the maximum is of products that are not scaled yet
    A peak[2] = {-infinity<A>(), -infinity<A>()};
    repeat<N, 4>([&](int n, int e) {
      if constexpr (X::BLOCKS && !PLAIN) s[n][e] = fma(s[n][e], factor, bias_of(me, chunk, n, e));
      if constexpr (!PLAIN) s[n][e] = chunk.exists(n, e) ? s[n][e] : -infinity<A>();
      peak[e >> 1] = max(peak[e >> 1], s[n][e]);
    });
    repeat<2>([&](int i) { peak[i] = quad_max(peak[i]) * (SCALED ? factor : A(1)); });
    rescale(rows, peak);

    // ---- Softmax weights, rounded to 16 bits, and the sums by these weights.
    const A reference[2] = {rows.top[0] == -infinity<A>() ? A(0) : rows.top[0],
                            rows.top[1] == -infinity<A>() ? A(0) : rows.top[1]};
    repeat<N, 4>([&](int n, int e) {
      if constexpr (PLAIN && sizeof(T) == 2) {
        s[n][e] = exp_unit(fma(s[n][e], factor * kUnit<A>, -reference[e >> 1] * kUnit<A>));
        return;
      }
      const A x = SCALED ? fma(s[n][e], factor, -reference[e >> 1]) : minus(s[n][e], reference[e >> 1]);
      s[n][e] = exp_unit(x * kUnit<A>);
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
  template <bool PLAIN, typename Operand>
  __device__ __forceinline__ void add_backward(const TilePlace<T, D>& me, const Rows& rows,
                                               const TileChunk& chunk, const Operand& a, const Operand& b) {
    constexpr int SOME = X::SOME;
#pragma unroll(sizeof(T) == 2 ? N : 1)
    for (int first = 0; first < N; first += SOME) {
      A s[SOME][4] = {}, grad[SOME][4] = {};
      if constexpr (X::DOT) a.times(s, chunk.columns_c, me.warp, me.lane, first);
      b.times(grad, chunk.columns_d, me.warp, me.lane, first);
      repeat<SOME, 4>([&](int m, int e) {
        const int n = first + m;
        RowStats<A> of_row = {rows.top[e >> 1], rows.log_sum[e >> 1]};
        A delta = rows.delta[e >> 1], slope = 1;
        if constexpr (X::SOURCES && X::BLOCKS) {
          const auto of = reinterpret_cast<const NodeStats<A>*>(chunk.stats)[8 * n + 2 * me.t + (e & 1)];
          of_row = {of.row.max, of.row.log_sum * kUnit<A>}, delta = of.delta;
        } else if constexpr (X::SOURCES) {
          const float4 of = reinterpret_cast<const float4*>(chunk.stats)[8 * n + 2 * me.t + (e & 1)];
          of_row = {of.y, of.z * kLog2E}, delta = of.w;  // of: NodeStats
          if constexpr (!X::DOT) {
            const float z = of.x + rows.term[e >> 1];
            slope = leaky_relu_grad(z, me.p.slope);
            s[m][e] = z * slope;
          }
        }
        A x;
        if constexpr (PLAIN) {
          x = fma(s[m][e], scale_of<A>(me.p), -of_row.max);
        } else if constexpr (X::BLOCKS) {
          const A bias = X::SOURCES ? rows.term[e >> 1] : bias_of(me, chunk, n, e);
          x = minus(fma(s[m][e], scale_of<A>(me.p), bias), of_row.max);
        } else {
          x = X::DOT ? fma(s[m][e], me.p.scale, -of_row.max) : minus(s[m][e], of_row.max);
        }
        const A w = PLAIN || chunk.exists(n, e) ? exp_unit(fma(x, kUnit<A>, -of_row.log_sum)) : A(0);
        const A ds = w * (grad[m][e] - delta);
        s[m][e] = w;
        grad[m][e] = ds;
        if constexpr (!X::DOT || (X::BLOCKS && X::SOURCES)) row[e >> 1] += ds * slope;
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
__device__ __forceinline__ void store_sums(const TilePlace<T, D>& me, const Acc<T> (&acc)[D / 8][4],
                                           const Acc<T> (&factor)[2], void* out, float* part) {
  constexpr int H = kHalves<T, D>, C = H / 8, A = LayoutOf<T, D>::A;
  if (me.item.slot < 0) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = me.warp * 16 + me.g + 8 * i;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint32_t*>(me.shared + A + piece_of<T, H>(row, n) + 4 * me.t) =
              pack_two<T>(acc[n][2 * i] * factor[i], acc[n][2 * i + 1] * factor[i]);
        } else {
          const int byte = (8 * n + 2 * me.t) * int(sizeof(T));
          T* to = reinterpret_cast<T*>(me.shared + A + piece_of<T, H>(row, byte / 16) + byte % 16);
          to[0] = acc[n][2 * i] * factor[i], to[1] = acc[n][2 * i + 1] * factor[i];
        }
      }
    }
    __syncwarp();
    for (int at = me.lane; at < 16 * C; at += 32) {
      const int r = at / C, piece = at % C;
      if (me.first_row + r < me.p.num_rows)
        *reinterpret_cast<uint4*>(const_cast<T*>(me.element(out, me.first_row + r)) + piece * kVec<T>) =
            *reinterpret_cast<const uint4*>(me.shared + A + piece_of<T, H>(me.warp * 16 + r, piece));
    }
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to =
          part + (int64_t(me.item.slot + me.warp * 16 + me.g + 8 * i) * me.heads + me.head) * D + 2 * me.t;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
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
  using A = Acc<T>;
  const TileParams& p = me.p;
  A norm[2];
  if constexpr (SCORE == kInBlocks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const A sum = whole_sum<T>(sums.mass[2 * i]);
      norm[i] = sum == 0 ? A(0) : 1 / sum;
      const Softmax<A, false> softmax = {rows.top[i], sum};
      if (me.t == 0 && rows.ok[i])
        reinterpret_cast<RowStats<A>*>(p.stats)[rows.row_head[i]] = softmax.stats();
    }
    return store_sums(me, sums.d, norm, p.out_d, p.part_d);
  } else {
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
}

// Writes out_c, scaled, and out_d, and for additive row_sum, the sum of dS L'; or the partial results of a
// split window.
template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__device__ __forceinline__ void store_backward(const TilePlace<T, D>& me,
                                               const TileRows<T, D, SCORE, PASS>& rows,
                                               TileSums<T, D, SCORE, PASS, POSITIVE>& sums) {
  using X = TileTraits<T, D, SCORE, PASS>;
  using A = Acc<T>;
  const TileParams& p = me.p;
  const A factor = X::BLOCKS ? scale_of<A>(p) : A(p.scale), scale[2] = {factor, factor},
          one[2] = {A(1), A(1)};
  if constexpr (X::OUT_C) store_sums(me, sums.c, scale, p.out_c, p.part_c);
  if constexpr (X::OUT_D) store_sums(me, sums.d, one, p.out_d, p.part_d);
  if constexpr (X::BLOCKS && X::SOURCES) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.row[i] = quad_sum(sums.row[i]);
      if (me.t == 0 && rows.ok[i] && p.row_sum)
        reinterpret_cast<A*>(p.row_sum)[rows.row_head[i]] = sums.row[i];
    }
  } else if constexpr (!X::DOT) {
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
