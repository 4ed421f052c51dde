// The pass over the destinations. It computes the four products of each edge, from these the factors of rows,
// and with them the sums of rows that are the gradients of the destinations' tensors and of the edges'
// features.
#pragma once

#include "edges.cuh"

namespace dfgnn::cuda {

// The columns of an edge that a lane loads: key, value and their cotangents, with the features added. GATv2's
// key is its value, which here has no features. source, edge: positions in arrays [N, H, D] and [E, H, D].
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

// The columns of a destination that a lane loads, and GATv2's vector and its cotangent.
template <typename T, Score SCORE>
struct RowColumns {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  A grad[V], query[V], of_query[V], attn[V], of_attn[V];

  // at: the position in an array [N, H, D]; column: in an array [H, D].
  __device__ __forceinline__ RowColumns(const SecondParams& p, int64_t at, int64_t column) {
    load_columns<T>(p.grad_out, at, grad);
    if constexpr (SCORE != Score::additive)
      load_columns<T>(p.query, at, query), load_columns<T>(p.of_dst, at, of_query);
    if constexpr (SCORE == Score::additive_v2)
      load_columns<T>(p.attn, column, attn), load_numbers<T>(p.of_attn, column, of_attn);
  }
};

// Writes the four products of each of a row's edges.
template <typename T, Score SCORE, int WARPS>
__device__ __forceinline__ void multiply_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const Share& my = me.columns;
  const A slope = A(p.negative_slope);
  for (int base = row.begin; base < row.end; base += my.slots) {
    const int at = min(base + my.slot, row.end - 1), eid = edge_id(p.csr, at),
              src = __ldg(p.csr.indices + at);
    EdgeNumbers<A> sums{};
    for (int c = me.column; c < me.dim; c += me.step) {
      const EdgeColumns<T, SCORE> of(p, me.head_of_row(src) + c, me.head_of_row(eid) + c);
      const RowColumns<T, SCORE> own(p, me.head_of_row(row.row) + c, me.head_of_row(0) + c);
      repeat<V>([&](int v) {
        if constexpr (SCORE == Score::dot) {
          sums.x[kRaw] += own.query[v] * of.key[v];
          sums.x[kTRaw] += own.of_query[v] * of.key[v] + own.query[v] * of.of_key[v];
        }
        if constexpr (SCORE == Score::additive_v2) {
          const A w = of.key[v] + own.query[v], moved = of.of_key[v] + own.of_query[v];
          const A leaky = leaky_relu(w, slope);
          sums.x[kRaw] += own.attn[v] * leaky;
          sums.x[kTRaw] += own.attn[v] * (leaky_relu_grad(w, slope) * moved) + own.of_attn[v] * leaky;
        }
        sums.x[kP] += own.grad[v] * of.value[v];
        sums.x[kU] += own.grad[v] * of.of_value[v];
      });
    }
    for (int o = me.tile.lanes / 2; o > 0; o /= 2)
      repeat<4>([&](int k) { sums.x[k] += __shfl_xor_sync(kAll, sums.x[k], o); });
    if (me.column || !my.ok || base + my.slot >= row.end) continue;
    if constexpr (SCORE == Score::additive) {
      const auto term = [&](const void* table, int node) {
        return table ? static_cast<const A*>(table)[int64_t(node) * me.heads + my.head] : A(0);
      };
      sums.x[kRaw] = term(p.alpha_src, src) + term(p.alpha_dst, row.row);
      sums.x[kTRaw] = term(p.of_src, src) + term(p.of_dst, row.row);
    }
    if constexpr (SCORE == Score::dot) sums.x[kRaw] *= A(p.scale), sums.x[kTRaw] *= A(p.scale);
    *numbers_of<A>(p, eid, my.head) = sums;
  }
}

// A lane's columns of the row's sums: those for g, for q (GATv2: x) and for attn.
template <typename T, Score SCORE>
struct RowSums {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  Numbers<A, V> grad, query, attn;
  Numbers<A, 1> raw;

  __device__ __forceinline__ void operator+=(const RowSums& other) {
    grad += other.grad;
    if constexpr (SCORE == Score::additive) raw += other.raw;
    if constexpr (SCORE != Score::additive) query += other.query;
    if constexpr (SCORE == Score::additive_v2) attn += other.attn;
  }
  // Adds an edge. feat: the gradient of its features.
  __device__ __forceinline__ void add(const SecondParams& p, const RowColumns<T, SCORE>& own,
                                      const EdgeColumns<T, SCORE>& of, const A (&by)[4], A (&feat)[V]) {
    const A slope = A(p.negative_slope);
    raw.x[0] += by[kOfRaw];
    repeat<V>([&](int v) {
      grad.x[v] += by[kOfP] * of.value[v] + by[kShare] * of.of_value[v];
      feat[v] = 0;
      if constexpr (SCORE == Score::dot) {
        query.x[v] += by[kOfRaw] * of.key[v] + by[kOfT] * of.of_key[v];
        if (p.edge.feat_in_key) feat[v] = by[kOfRaw] * own.query[v] + by[kOfT] * own.of_query[v];
      }
      if constexpr (SCORE == Score::additive_v2) {
        const A w = of.key[v] + own.query[v], moved = of.of_key[v] + own.of_query[v];
        const A slopes = leaky_relu_grad(w, slope);
        feat[v] = slopes * (by[kOfRaw] * own.attn[v] + by[kOfT] * own.of_attn[v]);
        query.x[v] += feat[v];
        attn.x[v] += slopes * (by[kOfRaw] * w + by[kOfT] * moved);
      } else {
        if (p.edge.feat_in_value) feat[v] += by[kOfP] * own.grad[v];
      }
    });
  }
};

// Adds up, by the factors, the rows that belong to the edges of a row, and writes the gradients of the edges'
// features. part: the team's [H, D] of grad_attn.
template <typename T, Score SCORE, int WARPS>
__device__ __forceinline__ void add_up_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row,
                                           Acc<T>* part) {
  using A = Acc<T>;
  const Share& my = me.columns;
  for (int first = 0; first < me.dim; first += me.step) {
    const int c = first + me.column;
    const bool inside = my.ok && c < me.dim;
    const int64_t column = me.head_of_row(0) + c, at_row = me.head_of_row(row.row) + c;
    RowSums<T, SCORE> sums;
    if (inside) {
      const RowColumns<T, SCORE> own(p, at_row, column);
      my.add_edges(row, sums, [&](int at, RowSums<T, SCORE>& to) {
        const int eid = edge_id(p.csr, at), src = __ldg(p.csr.indices + at);
        const EdgeNumbers<A> by = *numbers_of<A>(p, eid, my.head);
        const int64_t at_edge = me.head_of_row(eid) + c;
        const EdgeColumns<T, SCORE> of(p, me.head_of_row(src) + c, at_edge);
        A feat[kVec<T>];
        to.add(p, own, of, by.x, feat);
        if (p.grad_feat) store_columns<T>(p.grad_feat, at_edge, feat);
      });
    }
    me.add_up_columns(sums.grad.x);
    if constexpr (SCORE == Score::additive) {
      me.add_up_columns(sums.raw.x);
      if (me.writes() && c == 0 && p.grad_dst)
        static_cast<A*>(p.grad_dst)[int64_t(row.row) * me.heads + my.head] = sums.raw.x[0];
    } else {
      me.add_up_columns(sums.query.x);
    }
    if constexpr (SCORE == Score::additive_v2) me.add_up_columns(sums.attn.x);
    if (!inside || !me.writes()) continue;
    store_columns<T>(p.grad_grad_out, at_row, sums.grad.x);
    if constexpr (SCORE != Score::additive) store_columns<T>(p.grad_dst, at_row, sums.query.x);
    if constexpr (SCORE == Score::additive_v2)
      repeat<kVec<T>>([&](int v) { part[column + v] += sums.attn.x[v]; });
  }
}

// first_part: the number of the first team's partial sum in grad_attn.
template <typename T, Score SCORE, int WARPS>
__global__ void __launch_bounds__(32 * block_warps(WARPS))
    second_destinations_kernel(const SecondParams p, const HeadTile tile, const int64_t first_part) {
  follow();
  const Team<T, WARPS> me(p.shape, tile);
  Acc<T>* const part =
      static_cast<Acc<T>*>(p.grad_attn) + (first_part + me.number) * me.heads * int64_t(me.dim);
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
