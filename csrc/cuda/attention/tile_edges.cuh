// The passes on tiles (tiles.cuh) and their arrays, and the computation edge by edge of rows whose dense
// products were not finite, or not exact enough.
//
// Names from other files:
// params.h:
//   kTileCols, kTileInts  columns of a chunk; integers of a chunk: its columns' nodes, then a mask per row
// softmax.cuh:
//   Softmax               online: top, the maximum; mass, the sum of exponentials; positive, their sum where
//                         z > 0. raise(peak): the maximum becomes at least peak, returns the factor for sums;
//                         reference(): what is subtracted from scores; norm(): 1 / mass; stats(): RowStats
//   RowStats              max, log_sum. NodeStats: term, RowStats, delta. load_stats(address) loads them
// lanes.cuh, math.h:
//   reduce_sum<W>         the sum over W lanes, in all of them
//   leaky_relu            (z, slope): LeakyReLU(z); leaky_relu_grad: its derivative
#pragma once

#include "../../core/math.h"
#include "lanes.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

enum class Pass { forward, destinations, sources };

// The arrays of a pass. Row operands a, b and column operands c, d; q, k, v, g: query, key, value, grad_out;
// S = scores, which are scale a . c or LeakyReLU of a sum of two terms; P = the softmax's weights alpha; dS =
// the gradient of S. On the right are the results:
//   forward                 a = q, c = k, d = v:                out_d = P d (positive: over z > 0)
//   destinations (dot)      a = q, b = g, c = k, d = v:         out_c = scale dS c
//   sources (dot)           a = k, b = v, c = q, d = g:         out_c = scale dS c, out_d = P d
//   sources (additive)      b = v, d = g:                       out_d = P d, row_sum = sum of dS L'
// with dS = P (b . d - delta), and L' the derivative of LeakyReLU. out_c, out_d: results that are sums over
// rows of c or of d. All arrays are [nodes, H, D] T or [nodes, H] float. Where a comment begins with the name
// of a pass, only this pass has the array; it is null in others.
struct TileParams {
  const Item* items;     // row: the window's first; begin, end: chunks; slot: of the first row, or < 0
  const int32_t* tiles;  // [chunks, kTileInts]: columns, row masks
  int64_t num_items;
  int32_t num_rows, heads;
  const void *a, *b, *c, *d;
  const float* row_term;  // the rows' score term, additive only: in forward alpha_dst, or null: 0; in sources
                          // alpha_src
  const void* col_stats;  // of the columns: in forward alpha_src (additive only); in sources NodeStats
  const RowStats<float>* row_stats;                   // destinations
  const void* out;                                    // destinations, for delta = g . (out - out_bias)
  const void* out_bias;                               // [H, D] or null; forward adds it
  NodeStats<float>* node_stats;                       // destinations write them for the pass over sources
  float slope, scale;                                 // scale: of the score; out_c is scaled by it too
  void *out_c, *out_d;                                // T, results of the rows
  void* positive;                                     // T, forward: sum over z > 0, or null
  RowStats<float>* stats;                             // forward
  float* mass;                                        // forward: positive_mass
  float* row_sum;                                     // sources (additive): grad_alpha_src
  float *part_c, *part_d, *part_positive, *part_sum;  // partial results of split windows
  Softmax<float, true>* part_stats;
};

// In blocks (kInBlocks in tile_operands.cuh): col_stats or, in the pass over sources, row_term is the bias of
// the keys, or null: 0. Numbers are of the accumulation type, whatever the pointers' types.
struct BlockTileParams : TileParams {
  const int2* ranges;        // [num_rows]: the first column of the row's block, and the one behind its last
  double exact_scale;        // scale, for double
  const void* grad_log_sum;  // destinations: [nodes, H], subtracted from delta, or null: 0
};

// Computes and writes the same as tile_kernel for the 16 rows of a warp, but edge by edge and in float32. All
// lanes take one edge at a time, a lane V columns of it; where D < 32, lanes from LANES on repeat others.
// deltas: delta of the window's rows (destinations).
template <typename T, int D, Score SCORE, Pass PASS, bool POSITIVE>
__device__ __noinline__ void tile_rows_by_edges(const TileParams& p, Item item, int head, int warp, int lane,
                                                const float* deltas) {
  constexpr bool DOT = SCORE == Score::dot, FORWARD = PASS == Pass::forward, SOURCES = PASS == Pass::sources;
  constexpr bool HAS_B = !FORWARD, OUT_C = DOT && !FORWARD, OUT_D = PASS != Pass::destinations;
  constexpr int LANES = D < 32 ? D : 32, V = D / LANES;  // lanes of a row, and columns of a lane
  const int heads = p.heads, at = lane % LANES * V;
  const auto load = [&](const void* x, int64_t node, float (&to)[V]) {
    const T* from = static_cast<const T*>(x) + (node * heads + head) * D + at;
    repeat<V>([&](int k) { to[k] = float(from[k]); });
  };
  const auto product = [&](const float (&x)[V], const float (&y)[V]) {
    float sum = 0;
    repeat<V>([&](int k) { sum += x[k] * y[k]; });
    return reduce_sum<LANES>(sum);
  };

  for (int place = warp * 16; place < warp * 16 + 16; ++place) {
    const int row = item.row + place;
    if (row >= p.num_rows) return;
    const int64_t row_head = int64_t(row) * heads + head,
                  slot_head = int64_t(item.slot + place) * heads + head;
    // Stores factor x as the row of `out`, or in a split window x, unscaled, as the row of `part`.
    const auto store = [&](const float (&x)[V], float factor, void* out, float* part) {
      if (lane >= LANES) return;
      repeat<V>([&](int k) {
        if (item.slot < 0) {
          static_cast<T*>(out)[row_head * D + at + k] = T(x[k] * factor);
        } else {
          part[slot_head * D + at + k] = x[k];
        }
      });
    };
    // Stores a number per row and head in the same way.
    const auto store_number = [&](float x, float* out, float* part) {
      if (lane == 0) (item.slot < 0 ? out[row_head] : part[slot_head]) = x;
    };
    float a[V] = {}, b[V] = {}, c[V] = {}, d[V] = {}, acc_c[V] = {}, acc_d[V] = {}, acc_positive[V] = {};
    float row_term = 0, row_sum = 0;
    if constexpr (DOT) load(p.a, row, a);
    if constexpr (HAS_B) load(p.b, row, b);
    if constexpr (!DOT) row_term = p.row_term ? p.row_term[row_head] : 0.f;

    // For every edge of the row: sets c and d to the rows of its column, and calls f(statistics of the
    // column, z), where z is a . c for dot, else the sum of the two terms.
    const auto for_edges = [&](auto f) {
      for (int chunk = item.begin; chunk < item.end; ++chunk) {
        const int32_t* tile = p.tiles + int64_t(chunk) * kTileInts;
        for (uint32_t left = uint32_t(tile[kTileCols + place]); left; left &= left - 1) {
          const int64_t node = tile[__ffs(int(left)) - 1];
          [[maybe_unused]] const int64_t node_head = node * heads + head;
          NodeStats<float> of = {};
          if constexpr (SOURCES)
            of = load_stats(static_cast<const NodeStats<float>*>(p.col_stats) + node_head);
          if constexpr (FORWARD && !DOT) of.term = static_cast<const float*>(p.col_stats)[node_head];
          if constexpr (DOT) load(p.c, node, c);
          load(p.d, node, d);
          f(of, DOT ? product(a, c) : of.term + row_term);
        }
      }
    };
    // score: of z. relative: the score minus `top`, which for dot is rounded only once (fused multiply-add).
    const auto score = [&](float z) { return DOT ? z * p.scale : leaky_relu(z, p.slope); };
    const auto relative = [&](float z, float top) {
      return DOT ? fmaf(z, p.scale, -top) : minus(leaky_relu(z, p.slope), top);
    };

    if constexpr (FORWARD) {
      float top = -infinity<float>();
      for_edges([&](const NodeStats<float>&, float z) { top = max(top, score(z)); });
      const float reference = top == -infinity<float>() ? 0.f : top;
      // Of scores relative to the rounded maximum; its own maximum, `offset`, is what the rounding left.
      Softmax<float, POSITIVE> softmax;
      for_edges([&](const NodeStats<float>&, float z) {
        const float x = relative(z, reference), shrink = softmax.raise(x);
        const float w = exponential(minus(x, softmax.reference()));
        softmax.mass += w;
        if (POSITIVE && z > 0) softmax.positive += w;
        repeat<V>([&](int k) {
          acc_d[k] = acc_d[k] * shrink + w * d[k];
          if (POSITIVE) acc_positive[k] = acc_positive[k] * shrink + (z > 0 ? w * d[k] : 0.f);
        });
      });
      const float norm = softmax.norm(), offset = softmax.reference();
      if (item.slot >= 0) {  // a partial result is relative to `top`, these sums to top + offset
        const float factor = exponential(offset);
        repeat<V>([&](int k) { acc_d[k] *= factor, acc_positive[k] *= factor; });
        if (lane == 0) p.part_stats[slot_head] = {top, softmax.mass * factor, softmax.positive * factor};
      } else if (lane == 0) {
        const RowStats<float> stats = softmax.stats();
        p.stats[row_head] = {softmax.mass == 0 ? stats.max : top, offset + stats.log_sum};
        if constexpr (POSITIVE) p.mass[row_head] = softmax.positive * norm;
      }
      if (p.out_bias && item.slot < 0) {
        load(p.out_bias, 0, d);
        repeat<V>([&](int k) { acc_d[k] = acc_d[k] * norm + d[k]; });
        store(acc_d, 1, p.out_d, p.part_d);
      } else {
        store(acc_d, norm, p.out_d, p.part_d);
      }
      if constexpr (POSITIVE) store(acc_positive, norm, p.positive, p.part_positive);
    } else {
      RowStats<float> stats = {};
      float delta = 0;
      if constexpr (!SOURCES) stats = load_stats(p.row_stats + row_head), delta = deltas[place];
      for_edges([&](const NodeStats<float>& of, float z) {
        if constexpr (SOURCES) stats = of.row, delta = of.delta;
        const float w = exponential(relative(z, stats.max) - stats.log_sum);
        const float ds = w * (product(b, d) - delta);
        row_sum += ds * leaky_relu_grad(z, p.slope);
        repeat<V>([&](int k) { acc_c[k] += ds * c[k], acc_d[k] += w * d[k]; });
      });
      if constexpr (OUT_C) store(acc_c, p.scale, p.out_c, p.part_c);
      if constexpr (OUT_D) store(acc_d, 1, p.out_d, p.part_d);
      if constexpr (!DOT) store_number(row_sum, p.row_sum, p.part_sum);
    }
  }
}

}  // namespace dfgnn::cuda
