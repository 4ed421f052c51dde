// The pass over the sources in the backward of attention's backward. A row of the reverse CSR is a source
// with its edges. The gradients of its tensors are sums of feature rows of the destinations, weighted by the
// factors that the pass over the destinations (destinations.cuh) has written. GATv2's factors do not contain
// sigma, the slopes of LeakyReLU, which differ by column: they are computed again from value v, GATv2's query
// x and the edges' features e. The letters are those of docs/internals/second_derivatives.md. On that page
// capital letters are cotangents of gradients: V, K, Q, B, C, W, F of those of value, key, query, bias, gate,
// weight and feat, for GATv2 X and N of those of its query and attn. In code they are of_value, ..., and of_x
// is the cotangent of the gradient of x. The capitals A (in code a type), R and M are factors of an edge
// instead: the derivatives by p, raw and t_raw of the sum S that the page differentiates.
//
// Names from other files:
// edges.cuh:
//   EdgeNumbers     the scalars x[4] of an edge and head, in SecondParams::numbers. numbers_of finds them
//   kByP, ...       entries of x: kByP (A), kByRaw (scale R), kByTRaw (scale M), kShare (f alpha)
// teams.cuh:
//   Team me         the lanes that share a row: a warp, or a block for a row that the plan splits. me.heads,
//                   me.dim: H, D; me.tile.lanes: lanes of a head
//   me.by_columns   a Share. head: the lane's head; ok: whether it exists; slot, slots: the lane takes the
//                   edges slot, slot + slots, ... of a row; add_edges(row, sums, f): calls f(position, sums)
//                   for each of these
//   me.column       the first column of its head that the lane loads; me.step: from one load to the next
//   me.head_of_row  (row): the index at which the lane's head begins in an array [.., H, D]
//   me.writes       whether this lane stores the team's results; me.sync: waits for the team
//   me.add_up_columns  adds up arrays over the lanes of the team that have the same columns of other edges
//   me.for_rows     calls a function for the rows (RowEdges: row, begin, end) that the team takes
//   Sums<A, N>      N sums x[0], ..., which start at 0
//   load_columns    (array, index, x): kVec<T> elements as Acc<T>; 0 if the array is null. store_columns
//                   stores them, load_acc_columns loads from an array of Acc<T>
// attention/lanes.cuh: repeat, copy, kVec, kAll and follow. attention/edge_options.cuh: edge_id
#pragma once

#include "edges.cuh"

namespace dfgnn::cuda {

// What a lane loads once per source, for GATv2 only: its columns of value, attn and of_attn. row and column:
// indices in arrays [N_src, H, D] and [H, D].
template <typename T, Score SCORE>
struct SourceColumns {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  A value[V], attn[V], of_attn[V];
  __device__ __forceinline__ SourceColumns(const SecondParams& p, int64_t row, int64_t column) {
    if constexpr (SCORE == Score::additive_v2)
      load_columns<T>(p.value, row, value), load_columns<T>(p.attn, column, attn),
          load_acc_columns<T>(p.of_attn, column, of_attn);
  }
};

// A row's sums. value, key: a lane's columns of the gradients of value and (dot) of key. raw: for GAT the sum
// of R, the gradient of alpha_src, which all lanes of a head compute.
template <typename T, Score SCORE>
struct SourceSums {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  Sums<A, V> value, key;
  Sums<A, 1> raw;

  __device__ __forceinline__ void operator+=(const SourceSums& other) {
    value += other.value;
    if constexpr (SCORE == Score::dot) key += other.key;
    if constexpr (SCORE == Score::additive) raw += other.raw;
  }
  // Adds an edge, weighted by its factors. row, edge: indices in arrays [N_dst, H, D] and [E, H, D].
  __device__ __forceinline__ void add(const SecondParams& p, const SourceColumns<T, SCORE>& own, int64_t row,
                                      int64_t edge, const A (&factors)[4]) {
    A grad[V], query[V], other[V];  // other: Q (dot), or the edge's features e (GATv2)
    load_columns<T>(p.grad_out, row, grad);
    if constexpr (SCORE != Score::additive) load_columns<T>(p.query, row, query);
    if constexpr (SCORE == Score::dot) load_columns<T>(p.of_dst, row, other);
    if constexpr (SCORE == Score::additive_v2) load_columns<T>(p.edge.feat, edge, other);
    raw.x[0] += factors[kByRaw];
    repeat<V>([&](int v) {
      value.x[v] += factors[kByP] * grad[v];
      if constexpr (SCORE == Score::dot) key.x[v] += factors[kByRaw] * query[v] + factors[kByTRaw] * other[v];
      if constexpr (SCORE == Score::additive_v2)
        value.x[v] += (factors[kByRaw] * own.attn[v] + factors[kByTRaw] * own.of_attn[v]) *
                      leaky_relu_grad(own.value[v] + query[v] + other[v], A(p.negative_slope));
    });
  }
};

// Takes the rows of the reverse CSR, and writes the gradients of value, key (dot) and alpha_src (GAT).
template <typename T, Score SCORE, int WARPS>
__global__ void __launch_bounds__(32 * block_warps(WARPS))
    second_sources_kernel(const SecondParams p, const HeadTile tile) {
  using A = Acc<T>;
  follow();
  const Team<T, WARPS> me(p.shape, tile);
  const Share& by_columns = me.by_columns;
  me.for_rows(p.reverse, static_cast<const int2*>(p.reverse_ranges), [&](const RowEdges& row) {
    for (int first = 0; first < me.dim; first += me.step) {
      const int c = first + me.column;
      const bool inside = by_columns.ok && c < me.dim;
      const int64_t at_row = me.head_of_row(row.row) + c;
      SourceSums<T, SCORE> sums;
      if (inside) {
        const SourceColumns<T, SCORE> own(p, at_row, me.head_of_row(0) + c);
        by_columns.add_edges(row, sums, [&](int at, SourceSums<T, SCORE>& to) {
          const int eid = edge_id(p.reverse, at), dst = __ldg(p.reverse.indices + at);
          const EdgeNumbers<A> factors = *numbers_of<A>(p, eid, by_columns.head);
          to.add(p, own, me.head_of_row(dst) + c, me.head_of_row(eid) + c, factors.x);
        });
      }
      me.add_up_columns(sums.value.x);
      if constexpr (SCORE == Score::additive) {
        me.add_up_columns(sums.raw.x);
        if (me.writes() && c == 0)
          static_cast<A*>(p.grad_src)[int64_t(row.row) * me.heads + by_columns.head] = sums.raw.x[0];
      }
      if constexpr (SCORE == Score::dot) me.add_up_columns(sums.key.x);
      if (!inside || !me.writes()) continue;
      store_columns<T>(p.grad_value, at_row, sums.value.x);
      if constexpr (SCORE == Score::dot) store_columns<T>(p.grad_src, at_row, sums.key.x);
    }
  });
}

}  // namespace dfgnn::cuda
