// The scalars of an edge and head in the backward of attention's backward. Names are those of
// docs/internals/second_derivatives.md.
//
// y is computed from f p and t less their means. It differs from the y of that page by a constant of the row,
// and is small where f p and t hardly vary.
#pragma once

#include "../attention/edge_options.cuh"
#include "../attention/softmax.cuh"
#include "teams.cuh"

namespace dfgnn::cuda {

// SecondParams::numbers of an edge and head. At first they are the four products of rows, then, in the same
// memory, the factors of rows: A, R and M times `scale`, and f alpha.
template <typename A>
struct alignas(16) EdgeNumbers {
  A x[4];
};
enum Product { kRaw, kTRaw, kP, kU };
enum Factor { kOfP, kOfRaw, kOfT, kShare };

template <typename A>
__device__ __forceinline__ EdgeNumbers<A>* numbers_of(const SecondParams& p, int eid, int head) {
  return static_cast<EdgeNumbers<A>*>(p.numbers) + int64_t(eid) * p.shape.heads + head;
}

// An edge's terms, from which the sums of its row and the factors of rows are computed.
template <typename T>
struct EdgeTerms {
  using A = Acc<T>;
  A raw, t_raw, p, u;
  EdgeScore<T, true> score;
  A mask, factor, of_gate, of_weight;  // of_weight is multiplied by mask
  A alpha;                             // until centre(): not yet divided by the row's sum
  A t, fp;                             // after centre(): less their means
  A y = 0;
  int64_t at;  // in arrays [E, H]
  bool alone = false;

  __device__ __forceinline__ EdgeTerms(const SecondParams& params, const EdgeReader<T>& edge, int eid,
                                       const EdgeNumbers<A>& products, RowStats<A> stats)
      : raw(products.x[kRaw]),
        t_raw(products.x[kTRaw]),
        p(products.x[kP]),
        u(products.x[kU]),
        score(edge, raw, params.score == Score::additive_v2 ? A(1) : A(params.negative_slope), eid),
        mask(edge.mask(eid)),
        factor(mask * edge.weight(eid)),
        at(int64_t(eid) * edge.heads + edge.head) {
    p += read(params.grad_attention);
    of_gate = read(params.of_gate), of_weight = mask * read(params.of_weight);
    const A of_bias = read(params.of_bias);
    t = score.slope * (t_raw * score.gate + raw * of_gate + (edge.o.bias_after ? A(0) : of_bias));
    if (edge.o.bias_after) t += of_bias;
    fp = factor * p;
    alpha = stats.alpha(score.score);
  }

  // The score of a row's only edge has no gradient. An exact 0 keeps rounding from making one.
  __device__ __forceinline__ void centre(A total, A delta, A tau) {
    alpha /= total;
    alone = alpha == 1;
    fp = alone ? fp * 0 : fp - delta;
    t = alone ? t * 0 : t - tau;
    y = fp * t + factor * u + p * of_weight;
  }

  // Returns the factors of rows, and writes the gradients of arrays [E, H].
  __device__ __forceinline__ EdgeNumbers<A> settle(const SecondParams& params, const EdgeReader<T>& edge,
                                                   A kappa) const {
    const A d = alpha * (alone ? y * 0 : y - kappa), dz = d * score.slope, first = alpha * fp * score.slope;
    const A of_p = alpha * (factor * t + of_weight),
            scale = params.score == Score::dot ? A(params.scale) : A(1);
    write(params.grad_grad_attention, of_p);
    write(params.grad_bias, edge.o.bias_after ? d : dz);
    write(params.grad_gate, raw * dz + first * t_raw);
    write(params.grad_weight, mask * alpha * (p * t + u));
    return {{of_p, scale * (score.gate * dz + first * of_gate), scale * score.gate * first, alpha * factor}};
  }

 private:
  __device__ __forceinline__ A read(const void* table) const {
    return table ? static_cast<const A*>(table)[at] : A(0);
  }
  __device__ __forceinline__ void write(void* table, A x) const {
    if (table) static_cast<A*>(table)[at] = x;
  }
};

// Replaces the products of a row's edges by their factors, in three sweeps over them: the sums of the softmax
// and its means, the sum of alpha y, and the factors.
template <typename T, int WARPS>
__device__ __forceinline__ void weigh_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row) {
  using A = Acc<T>;
  const Share& my = me.numbers;
  const EdgeReader<T> edge(p.edge, me.heads, my.head);
  const RowStats<A> stats =
      load_stats(static_cast<const RowStats<A>*>(p.stats) + int64_t(row.row) * me.heads + my.head);
  const RowEdges edges = my.ok ? row : RowEdges{row.row, 0, 0};
  const auto terms = [&](int at) {
    const int eid = edge_id(p.csr, at);
    return EdgeTerms<T>(p, edge, eid, *numbers_of<A>(p, eid, my.head), stats);
  };
  Numbers<A, 3> sums;
  my.add_edges(edges, sums, [&](int at, Numbers<A, 3>& to) {
    const EdgeTerms<T> of = terms(at);
    to.x[0] += of.alpha, to.x[1] += of.alpha * of.fp, to.x[2] += of.alpha * of.t;
  });
  me.add_up(sums.x, me.tile.heads);
  const A total = sums.x[0] == 0 ? A(1) : sums.x[0], delta = sums.x[1] / total, tau = sums.x[2] / total;
  Numbers<A, 1> kappa;
  my.add_edges(edges, kappa, [&](int at, Numbers<A, 1>& to) {
    EdgeTerms<T> of = terms(at);
    of.centre(total, delta, tau);
    to.x[0] += of.alpha * of.y;
  });
  me.add_up(kappa.x, me.tile.heads);
  for (int at = edges.begin + my.slot; at < edges.end; at += my.slots) {
    EdgeTerms<T> of = terms(at);
    of.centre(total, delta, tau);
    *numbers_of<A>(p, edge_id(p.csr, at), my.head) = of.settle(p, edge, kappa.x[0]);
  }
}

}  // namespace dfgnn::cuda
