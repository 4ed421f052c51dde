// The scalars of an edge and head in the backward of attention's backward: weigh_row computes them from four
// products of feature rows. Formulas and letters are those of docs/internals/second_derivatives.md.
// On that page capital letters are cotangents of gradients: V, K, Q, B, C, W, F of those of value, key,
// query, bias, gate, weight and feat, for GATv2 X and N of those of its query and attn. In code they are
// of_value, ..., and of_x is the cotangent of the gradient of x. The capitals A (in code a type), R and M are
// factors of an edge instead: the derivatives by p, raw and t_raw of the sum S that the page differentiates.
// by_x is the derivative of S by x.
//
// y is computed as the centred y' of that page: from f p and t less their means over the row, delta and tau.
// This y differs from the page's y by a constant of the row, and is small where f p and t hardly vary there.
#pragma once

#include "../attention/edge_options.cuh"
#include "../attention/softmax.cuh"
#include "teams.cuh"

namespace dfgnn::cuda {

// The four scalars of an edge and head in SecondParams::numbers. weigh_row reads products of feature rows
// (Product), and writes factors of feature rows (Factor) in their place:
//   products  x[kRaw] = raw, x[kTRaw] = t_raw, x[kP] = g . (v + e), which is p without gamma, x[kU] = u
//   factors   x[kByP] = A, x[kByRaw] = scale R, x[kByTRaw] = scale M, x[kShare] = f alpha
// scale is SecondParams::scale for dot, and else 1; raw and t_raw of dot contain it.
template <typename A>
struct alignas(16) EdgeNumbers {
  A x[4];
};
enum Product { kRaw, kTRaw, kP, kU };
enum Factor { kByP, kByRaw, kByTRaw, kShare };

// Where the scalars of the edge with id `eid` lie.
template <typename A>
__device__ __forceinline__ EdgeNumbers<A>* numbers_of(const SecondParams& p, int eid, int head) {
  return static_cast<EdgeNumbers<A>*>(p.numbers) + int64_t(eid) * p.shape.heads + head;
}

// All scalars of one edge and head. The constructor computes those that need no sum over the row, centre()
// those that need the row's first three sums, and settle() the results.
template <typename T>
struct EdgeTerms {
  using A = Acc<T>;
  A raw, t_raw, p, u;
  EdgeScore<T, true> score;
  A mask, factor, of_gate, of_weight;  // m (dropout's factor), f (m times the weight), C, m times W
  A alpha;                             // until centre(): not yet divided by the row's sum of alpha
  A t, fp;                             // t and f p; after centre(): t - tau and f p - delta
  A y = 0;
  int64_t at;          // index of the edge and head in arrays [E, H]
  bool alone = false;  // after centre(): whether the edge has all of its row's weight, alpha = 1

  // For GATv2 negative_slope belongs to the LeakyReLU within raw. None follows raw, so that EdgeScore gets 1.
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

  // Sets alpha, t, fp and y. total: the row's sum of alpha, which is 1 only up to rounding, because scores
  // are computed again here; after division by it the alpha of a row's only edge is exactly 1. The score of
  // an edge with all of its row's weight has no gradient: an exact 0 keeps rounding from making one. (x * 0,
  // not 0, so that NaN stays NaN.)
  __device__ __forceinline__ void centre(A total, A delta, A tau) {
    alpha /= total;
    alone = alpha == 1;
    fp = alone ? fp * 0 : fp - delta;
    t = alone ? t * 0 : t - tau;
    y = fp * t + factor * u + p * of_weight;
  }

  // Returns the edge's factors, and writes its entries of the gradients [E, H]. kappa: the row's sum of
  // alpha y.
  __device__ __forceinline__ EdgeNumbers<A> settle(const SecondParams& params, const EdgeReader<T>& edge,
                                                   A kappa) const {
    const A d = alpha * (alone ? y * 0 : y - kappa), by_z = d * score.slope, dz = alpha * fp * score.slope;
    const A by_p = alpha * (factor * t + of_weight),
            scale = params.score == Score::dot ? A(params.scale) : A(1);
    write(params.grad_grad_attention, by_p);
    write(params.grad_bias, edge.o.bias_after ? d : by_z);
    write(params.grad_gate, raw * by_z + dz * t_raw);
    write(params.grad_weight, mask * alpha * (p * t + u));
    return {{by_p, scale * (score.gate * by_z + dz * of_gate), scale * score.gate * dz, alpha * factor}};
  }

 private:
  // `read` returns this edge and head's entry of an array [E, H], `write` sets it. Where the array is null,
  // `read` returns 0 and `write` does nothing.
  __device__ __forceinline__ A read(const void* table) const {
    return table ? static_cast<const A*>(table)[at] : A(0);
  }
  __device__ __forceinline__ void write(void* table, A x) const {
    if (table) static_cast<A*>(table)[at] = x;
  }
};

// Replaces the products of a row's edges by their factors, and writes the gradients [E, H]. It loops over the
// edges three times, and computes their scalars anew each time: for the sums of alpha, alpha f p and alpha t;
// for the sum of alpha y; and for the results.
template <typename T, int WARPS>
__device__ __forceinline__ void weigh_row(const SecondParams& p, const Team<T, WARPS>& me, RowEdges row) {
  using A = Acc<T>;
  const Share& by_edges = me.by_edges;
  const EdgeReader<T> edge(p.edge, me.heads, by_edges.head);
  const RowStats<A> stats =
      load_stats(static_cast<const RowStats<A>*>(p.stats) + int64_t(row.row) * me.heads + by_edges.head);
  // A lane whose head does not exist has no edges, but takes part in the shuffles of add_up.
  const RowEdges edges = by_edges.ok ? row : RowEdges{row.row, 0, 0};
  const auto terms_at = [&](int at) {
    const int eid = edge_id(p.csr, at);
    return EdgeTerms<T>(p, edge, eid, *numbers_of<A>(p, eid, by_edges.head), stats);
  };
  Sums<A, 3> sums;
  by_edges.add_edges(edges, sums, [&](int at, Sums<A, 3>& to) {
    const EdgeTerms<T> terms = terms_at(at);
    to.x[0] += terms.alpha, to.x[1] += terms.alpha * terms.fp, to.x[2] += terms.alpha * terms.t;
  });
  me.add_up(sums.x, me.tile.heads);
  // A row without edges, or whose scores are all -inf, has alpha = 0 everywhere; division by 1 keeps it.
  const A total = sums.x[0] == 0 ? A(1) : sums.x[0], delta = sums.x[1] / total, tau = sums.x[2] / total;
  Sums<A, 1> kappa;
  by_edges.add_edges(edges, kappa, [&](int at, Sums<A, 1>& to) {
    EdgeTerms<T> terms = terms_at(at);
    terms.centre(total, delta, tau);
    to.x[0] += terms.alpha * terms.y;
  });
  me.add_up(kappa.x, me.tile.heads);
  for (int at = edges.begin + by_edges.slot; at < edges.end; at += by_edges.slots) {
    EdgeTerms<T> terms = terms_at(at);
    terms.centre(total, delta, tau);
    *numbers_of<A>(p, edge_id(p.csr, at), by_edges.head) = terms.settle(p, edge, kappa.x[0]);
  }
}

}  // namespace dfgnn::cuda
