// The pass over the sources: sums of the destinations' rows, by the factors that the pass over the
// destinations has written. As GATv2's slopes differ by column, it also reads x and the edges' features
// again.
#pragma once

#include "edges.cuh"

namespace dfgnn::cuda {

// What a lane loads of the source itself: GATv2's own columns and its vectors.
template <typename T, Score SCORE>
struct SourceColumns {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  A value[V], attn[V], of_attn[V];
  __device__ __forceinline__ SourceColumns(const SecondParams& p, int64_t row, int64_t column) {
    if constexpr (SCORE == Score::additive_v2)
      load_columns<T>(p.value, row, value), load_columns<T>(p.attn, column, attn),
          load_numbers<T>(p.of_attn, column, of_attn);
  }
};

// The sums of a row in a lane's columns.
template <typename T, Score SCORE>
struct SourceSums {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  Numbers<A, V> value, key;
  Numbers<A, 1> raw;

  __device__ __forceinline__ void operator+=(const SourceSums& other) {
    value += other.value;
    if constexpr (SCORE == Score::dot) key += other.key;
    if constexpr (SCORE == Score::additive) raw += other.raw;
  }
  // Adds an edge. row, edge: positions in the arrays of the destinations and of the edges.
  __device__ __forceinline__ void add(const SecondParams& p, const SourceColumns<T, SCORE>& own, int64_t row,
                                      int64_t edge, const A (&by)[4]) {
    A grad[V], query[V], other[V];
    load_columns<T>(p.grad_out, row, grad);
    if constexpr (SCORE != Score::additive) load_columns<T>(p.query, row, query);
    if constexpr (SCORE == Score::dot) load_columns<T>(p.of_dst, row, other);
    if constexpr (SCORE == Score::additive_v2) load_columns<T>(p.edge.feat, edge, other);
    raw.x[0] += by[kOfRaw];
    repeat<V>([&](int v) {
      value.x[v] += by[kOfP] * grad[v];
      if constexpr (SCORE == Score::dot) key.x[v] += by[kOfRaw] * query[v] + by[kOfT] * other[v];
      if constexpr (SCORE == Score::additive_v2)
        value.x[v] += (by[kOfRaw] * own.attn[v] + by[kOfT] * own.of_attn[v]) *
                      leaky_relu_grad(own.value[v] + query[v] + other[v], A(p.negative_slope));
    });
  }
};

template <typename T, Score SCORE, int WARPS>
__global__ void __launch_bounds__(32 * block_warps(WARPS))
    second_sources_kernel(const SecondParams p, const HeadTile tile) {
  using A = Acc<T>;
  follow();
  const Team<T, WARPS> me(p.shape, tile);
  const Share& my = me.columns;
  me.for_rows(p.reverse, static_cast<const int2*>(p.reverse_ranges), [&](const RowEdges& row) {
    for (int first = 0; first < me.dim; first += me.step) {
      const int c = first + me.column;
      const bool inside = my.ok && c < me.dim;
      const int64_t at_row = me.head_of_row(row.row) + c;
      SourceSums<T, SCORE> sums;
      if (inside) {
        const SourceColumns<T, SCORE> own(p, at_row, me.head_of_row(0) + c);
        my.add_edges(row, sums, [&](int at, SourceSums<T, SCORE>& to) {
          const int eid = edge_id(p.reverse, at), dst = __ldg(p.reverse.indices + at);
          const EdgeNumbers<A> by = *numbers_of<A>(p, eid, my.head);
          to.add(p, own, me.head_of_row(dst) + c, me.head_of_row(eid) + c, by.x);
        });
      }
      me.add_up_columns(sums.value.x);
      if constexpr (SCORE == Score::additive) {
        me.add_up_columns(sums.raw.x);
        if (me.writes() && c == 0)
          static_cast<A*>(p.grad_src)[int64_t(row.row) * me.heads + my.head] = sums.raw.x[0];
      }
      if constexpr (SCORE == Score::dot) me.add_up_columns(sums.key.x);
      if (!inside || !me.writes()) continue;
      store_columns<T>(p.grad_value, at_row, sums.value.x);
      if constexpr (SCORE == Score::dot) store_columns<T>(p.grad_src, at_row, sums.key.x);
    }
  });
}

}  // namespace dfgnn::cuda
