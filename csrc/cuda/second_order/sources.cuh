// The pass over the sources in the backward of attention's backward. A row of the reverse CSR is a source
// with its edges. The gradients of the source's tensors are sums of feature rows of its edges' destinations,
// weighted by factors of the edges, which the pass over the destinations (destinations.cuh) has written. The
// slopes sigma of GATv2's LeakyReLU differ by column, so that these factors do not contain them, and this
// pass computes them again. Letters, names in code and names from other files: csrc/cuda/README.md, "Second
// derivatives".
#pragma once

#include "edges.cuh"

namespace dfgnn::cuda {

// What a lane loads once per source and step over columns, for GATv2 only: its columns of value, attn and
// of_attn. row and column: indices in arrays [N_src, H, D] and [H, D].
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

// A row's sums. value, key: a lane's columns of the gradients of value and (dot) of key. raw: the sum of R,
// which only GAT reads, as the gradient of alpha_src. Every lane of a head computes it in each step over
// columns; that of the first step is stored.
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

// Writes for each row j of the reverse CSR, as sums over its edges from j to i:
//   grad_value  sum_i A g_i; for GATv2 plus sum_i sigma (R a + M N)
//   grad_src    dot: grad_key = scale sum_i (R q_i + M Q_i); GAT: grad_alpha_src = sum_i R
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
      if (!inside || !me.writes()) continue;  // to the next step, whose add_up_columns needs all lanes
      store_columns<T>(p.grad_value, at_row, sums.value.x);
      if constexpr (SCORE == Score::dot) store_columns<T>(p.grad_src, at_row, sums.key.x);
    }
  });
}

}  // namespace dfgnn::cuda
