// The pass over the destinations in the backward of attention's backward. Each row of the CSR, a destination
// with its edges, takes three steps:
//   multiply_row  computes four products of feature rows per edge and head: the raw score raw; t_raw, its
//                 derivative in the direction of the cotangents; g . (v + e), which is p without gamma
//                 (grad_attention), where p is the gradient that reaches f alpha; and u = g . (V + F)
//   weigh_row     (edges.cuh) replaces these scalars by factors: A, R, M and f alpha
//   add_up_row    adds up the feature rows of the edges' other ends, weighted by the factors: the gradients
//                 of the destination's tensors. It also writes the gradients of the edges' features.
// Letters, names in code and names from other files: csrc/cuda/README.md, "Second derivatives".
#pragma once

#include "edges.cuh"

namespace dfgnn::cuda {

// The columns of an edge that a lane loads: key, value and the cotangents of their gradients, with those of
// feat added where options say so. GATv2 has one tensor for both: `key` is v + e, for scores, and `value` is
// v, for sums. GAT has no key, and `key` is not used. source, edge: indices in arrays [N_src, H, D] and
// [E, H, D].
template <typename T, Score SCORE>
struct EdgeColumns {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  A key[V], of_key[V], value[V], of_value[V];

  __device__ __forceinline__ EdgeColumns(const SecondParams& p, int64_t source, int64_t edge) {
    load_columns<T>(p.value, source, value), load_columns<T>(p.of_value, source, of_value);
    if constexpr (SCORE == Score::dot) {
      load_columns<T>(p.key, source, key), load_columns<T>(p.of_src, source, of_key);
    } else {
      copy(key, value), copy(of_key, of_value);
    }
    if (!p.edge.feat) return;
    A feat[V], of_feat[V];
    load_columns<T>(p.edge.feat, edge, feat), load_columns<T>(p.of_feat, edge, of_feat);
    if (p.edge.feat_in_key) repeat<V>([&](int v) { key[v] += feat[v], of_key[v] += of_feat[v]; });
    if (p.edge.feat_in_value) repeat<V>([&](int v) { value[v] += feat[v], of_value[v] += of_feat[v]; });
  }
};

// The columns of a destination that a lane loads: grad_out in `grad`; except for GAT also query and of_query;
// for GATv2 also attn and of_attn.
template <typename T, Score SCORE>
struct RowColumns {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  A grad[V], query[V], of_query[V], attn[V], of_attn[V];

  // at, column: indices in arrays [N_dst, H, D] and [H, D].
  __device__ __forceinline__ RowColumns(const SecondParams& p, int64_t at, int64_t column) {
    load_columns<T>(p.grad_out, at, grad);
    if constexpr (SCORE != Score::additive)
      load_columns<T>(p.query, at, query), load_columns<T>(p.of_dst, at, of_query);
    if constexpr (SCORE == Score::additive_v2)
      load_columns<T>(p.attn, column, attn), load_acc_columns<T>(p.of_attn, column, of_attn);
  }
};

// Writes the four products of each of a row's edges to its EdgeNumbers.
template <typename T, Score SCORE, int WARPS>
__device__ __forceinline__ void multiply_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const Share& by_columns = me.by_columns;
  const A slope = A(p.negative_slope);
  for (int base = row.begin; base < row.end; base += by_columns.slots) {
    // A lane without an edge repeats the row's last one, so that all lanes shuffle, and writes nothing.
    const int at = min(base + by_columns.slot, row.end - 1), eid = edge_id(p.csr, at),
              src = __ldg(p.csr.indices + at);
    EdgeNumbers<A> products{};
    for (int c = me.column; c < me.dim; c += me.step) {
      const EdgeColumns<T, SCORE> edge(p, me.head_of_row(src) + c, me.head_of_row(eid) + c);
      const RowColumns<T, SCORE> own(p, me.head_of_row(row.row) + c, me.head_of_row(0) + c);
      repeat<V>([&](int v) {
        if constexpr (SCORE == Score::dot) {
          products.x[kRaw] += own.query[v] * edge.key[v];
          products.x[kTRaw] += own.of_query[v] * edge.key[v] + own.query[v] * edge.of_key[v];
        }
        if constexpr (SCORE == Score::additive_v2) {
          const A argument = edge.key[v] + own.query[v], of_argument = edge.of_key[v] + own.of_query[v];
          const A leaky = leaky_relu(argument, slope);
          products.x[kRaw] += own.attn[v] * leaky;
          products.x[kTRaw] +=
              own.attn[v] * (leaky_relu_grad(argument, slope) * of_argument) + own.of_attn[v] * leaky;
        }
        products.x[kP] += own.grad[v] * edge.value[v];
        products.x[kU] += own.grad[v] * edge.of_value[v];
      });
    }
    for (int o = me.tile.lanes / 2; o > 0; o /= 2)
      repeat<4>([&](int k) { products.x[k] += __shfl_xor_sync(kAll, products.x[k], o); });
    if (me.column || !by_columns.ok || base + by_columns.slot >= row.end) continue;
    if constexpr (SCORE == Score::additive) {
      // A node's entry of alpha_src or alpha_dst, or of of_src or of_dst; 0 if there is no such array.
      const auto term = [&](const void* table, int node) {
        return table ? static_cast<const A*>(table)[int64_t(node) * me.heads + by_columns.head] : A(0);
      };
      products.x[kRaw] = term(p.alpha_src, src) + term(p.alpha_dst, row.row);
      products.x[kTRaw] = term(p.of_src, src) + term(p.of_dst, row.row);
    }
    if constexpr (SCORE == Score::dot) products.x[kRaw] *= A(p.scale), products.x[kTRaw] *= A(p.scale);
    *numbers_of<A>(p, eid, by_columns.head) = products;
  }
}

// A row's sums. grad, query and attn: a lane's columns of the gradients of grad_out, of query (not for GAT)
// and of GATv2's attn. raw: the sum of R, which only GAT reads, as the gradient of alpha_dst. Every lane of a
// head computes it in each step over columns; that of the first step is stored.
template <typename T, Score SCORE>
struct RowSums {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  Sums<A, V> grad, query, attn;
  Sums<A, 1> raw;

  __device__ __forceinline__ void operator+=(const RowSums& other) {
    grad += other.grad;
    if constexpr (SCORE == Score::additive) raw += other.raw;
    if constexpr (SCORE != Score::additive) query += other.query;
    if constexpr (SCORE == Score::additive_v2) attn += other.attn;
  }
  // Adds an edge, weighted by its factors. Sets feat to this lane's columns of the edge features' gradient.
  __device__ __forceinline__ void add(const SecondParams& p, const RowColumns<T, SCORE>& own,
                                      const EdgeColumns<T, SCORE>& edge, const A (&factors)[4],
                                      A (&feat)[V]) {
    const A slope = A(p.negative_slope);
    raw.x[0] += factors[kByRaw];
    repeat<V>([&](int v) {
      grad.x[v] += factors[kByP] * edge.value[v] + factors[kShare] * edge.of_value[v];
      feat[v] = 0;
      if constexpr (SCORE == Score::dot) {
        query.x[v] += factors[kByRaw] * edge.key[v] + factors[kByTRaw] * edge.of_key[v];
        if (p.edge.feat_in_key) feat[v] = factors[kByRaw] * own.query[v] + factors[kByTRaw] * own.of_query[v];
      }
      if constexpr (SCORE == Score::additive_v2) {
        const A argument = edge.key[v] + own.query[v], of_argument = edge.of_key[v] + own.of_query[v];
        const A slopes = leaky_relu_grad(argument, slope);
        feat[v] = slopes * (factors[kByRaw] * own.attn[v] + factors[kByTRaw] * own.of_attn[v]);
        query.x[v] += feat[v];
        attn.x[v] += slopes * (factors[kByRaw] * argument + factors[kByTRaw] * of_argument);
      } else {
        if (p.edge.feat_in_value) feat[v] += factors[kByP] * own.grad[v];
      }
    });
  }
};

// Adds up the feature rows of a row's edges, weighted by the factors, and writes the gradients of the row and
// of the edges' features. part: the team's partial sum [H, D] of grad_attn (GATv2), to which it adds.
template <typename T, Score SCORE, int WARPS>
__device__ __forceinline__ void add_up_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row,
                                           Acc<T>* part) {
  using A = Acc<T>;
  const Share& by_columns = me.by_columns;
  for (int first = 0; first < me.dim; first += me.step) {
    const int c = first + me.column;
    const bool inside = by_columns.ok && c < me.dim;
    const int64_t column = me.head_of_row(0) + c, at_row = me.head_of_row(row.row) + c;
    RowSums<T, SCORE> sums;
    if (inside) {
      const RowColumns<T, SCORE> own(p, at_row, column);
      by_columns.add_edges(row, sums, [&](int at, RowSums<T, SCORE>& to) {
        const int eid = edge_id(p.csr, at), src = __ldg(p.csr.indices + at);
        const EdgeNumbers<A> factors = *numbers_of<A>(p, eid, by_columns.head);
        const int64_t at_edge = me.head_of_row(eid) + c;
        const EdgeColumns<T, SCORE> edge(p, me.head_of_row(src) + c, at_edge);
        A feat[kVec<T>];
        to.add(p, own, edge, factors.x, feat);
        if (p.grad_feat) store_columns<T>(p.grad_feat, at_edge, feat);
      });
    }
    me.add_up_columns(sums.grad.x);
    if constexpr (SCORE == Score::additive) {
      me.add_up_columns(sums.raw.x);
      // One lane per head writes. grad_dst is null if there is no alpha_dst; other scores have a query.
      if (me.writes() && c == 0 && p.grad_dst)
        static_cast<A*>(p.grad_dst)[int64_t(row.row) * me.heads + by_columns.head] = sums.raw.x[0];
    } else {
      me.add_up_columns(sums.query.x);
    }
    if constexpr (SCORE == Score::additive_v2) me.add_up_columns(sums.attn.x);
    if (!inside || !me.writes()) continue;  // to the next step, whose add_up_columns needs all lanes
    store_columns<T>(p.grad_grad_out, at_row, sums.grad.x);
    if constexpr (SCORE != Score::additive) store_columns<T>(p.grad_dst, at_row, sums.query.x);
    if constexpr (SCORE == Score::additive_v2)
      repeat<kVec<T>>([&](int v) { part[column + v] += sums.attn.x[v]; });
  }
}

// Takes the three steps (head of this file) for each of the team's rows. first_part: the index in grad_attn
// [attn_parts, H, D], which GATv2 alone has, of the first team's partial sum: 0 for teams that are warps; the
// partial sums of teams that are blocks follow those. Each team sets its own to 0 first.
template <typename T, Score SCORE, int WARPS>
__global__ void __launch_bounds__(32 * block_warps(WARPS))
    second_destinations_kernel(const SecondParams p, const HeadTile tile, const int64_t first_part) {
  follow();
  const Team<T, WARPS> me(p.shape, tile);
  Acc<T>* const part = static_cast<Acc<T>*>(p.grad_attn) + (first_part + me.id) * me.heads * int64_t(me.dim);
  if constexpr (SCORE == Score::additive_v2) {
    for (int c = me.column; c < me.dim; c += me.step)
      if (me.writes()) repeat<kVec<T>>([&](int v) { part[me.head_of_row(0) + c + v] = 0; });
  }
  me.for_rows(p.csr, static_cast<const int2*>(p.ranges), [&](const RowEdges& row) {
    multiply_row<T, SCORE>(p, me, row);
    me.sync();
    weigh_row(p, me, row);
    me.sync();
    add_up_row<T, SCORE>(p, me, row, part);
  });
}

}  // namespace dfgnn::cuda
