// Steps that the backward kernels share. Formulas, with ds, dz and dalpha: params.h. grad_raw ("d raw") is
// the gradient of an edge's raw score; f is the factor of alpha, the edge's weight times dropout's factor.
//
// The residual of delta. delta = g . out is known before a row's edges are visited, but `out` is rounded.
// Therefore the pass over destinations uses delta0 = g . out as a first guess and adds up what is missing of
// delta, residual = sum_j alpha_ij (dalpha_ij - delta0). The row's gradient is sum_j grad_raw_ij y_j with
// grad_raw = alpha (dalpha - delta) L'(z) gate, where y_j is a key (dot) or attn L'(u) (additive_v2). Since
//   sum_j alpha (dalpha - delta0 - residual) L'(z) gate y_j
//     = sum_j alpha (dalpha - delta0) L'(z) gate y_j - residual sum_j alpha L'(z) gate y_j,
// it is exact if a second sum of the rows y_j is added up, in which an edge's weight is its `mass`, alpha
// L'(z) gate. The pass over sources, which also writes the gradients of edge tensors, reads delta0 +
// residual. Rows of several row chunks use delta0 alone, and so do rows of which a launch sees only some
// edges (part_of_rows: with a sink, with processes that share a graph, or with source partitions): their
// residual is set to 0.
#pragma once

#include "edge_projection.cuh"
#include "gather.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

// What the pass over destinations saves of an edge and head for the pass over sources: alpha, with a negative
// sign where z <= 0 (not with projected features, which exclude the LeakyReLU), and ds as computed from
// delta0. The pass over sources subtracts alpha times the residual from ds, and computes from the two numbers
// the edge's weight f alpha and grad_raw.
template <typename A>
struct alignas(2 * sizeof(A)) SavedEdge {
  A alpha, ds;
};

// One edge and head in backward: alpha, computed from the score, and the gradients ds of the score s, dz of z
// and grad_raw of the raw score; the options on edges make s from raw and z (EdgeOptions in params.h).
template <typename T, bool EDGE, int SLOTS>
struct EdgeGradient {
  using A = Acc<T>;
  int eid;
  A raw, mask, factor = 1;  // factor: f
  int64_t at = 0;           // the position of the edge and head in arrays [E, H]
  A dot_gv;                 // g . (v + e), plus the gradient of the returned attention
  EdgeScore<T, EDGE> z;
  A alpha, ds, dz, grad_raw;

  // valid: whether the edge exists; else its gradients are 0. mask: dropout's factor. dot_gv: g . (v + e).
  // SLOTS: edges of a lane.
  __device__ __forceinline__ EdgeGradient(const BackwardParams& p, const EdgeReader<T>& edge, int eid_,
                                          bool valid, A mask_, A raw_, A slope, A dot_gv_,
                                          RowStats<A> softmax, A delta)
      : eid(eid_),
        raw(raw_),
        mask(mask_),
        dot_gv(with_options(p, edge, eid, valid, dot_gv_)),
        z(edge, raw_, slope, eid) {
    // Where a lane has several edges there is no branch on `valid`, so that their exponentials overlap.
    alpha = SLOTS > 1 || valid ? softmax.alpha(z.score) : A(0);
    alpha = valid ? alpha : A(0);
    // An edge that has all of its row's weight has no gradient, and rounding must not give it one. Its alpha
    // is 1 but for the rounding of the score, that of the row's other edges is about 0.
    const A dalpha = times(factor, dot_gv);
    const bool alone = softmax.log_sum == 0 && alpha > A(0.5);
    ds = valid ? alpha * (dalpha - (alone ? dalpha : delta)) : A(0);
    dz = ds * z.slope, grad_raw = dz * z.gate;
  }
  // The edge's weight in sums of values.
  __device__ __forceinline__ A weight() const { return alpha * factor; }
  // The edge's weight in the second sum of rows (see the head of this file).
  __device__ __forceinline__ A mass() const { return alpha * z.slope * z.gate; }
  // Writes the gradients of edge tensors [E, H], and grad_raw to grad_raw.
  __device__ __forceinline__ void store(const BackwardParams& p) const {
    if (p.grad_bias) static_cast<A*>(p.grad_bias)[at] = p.edge.bias_after ? ds : dz;
    if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] = dz * raw;
    if (p.grad_weight) static_cast<A*>(p.grad_weight)[at] = mask * alpha * dot_gv;
    if (p.grad_raw) static_cast<A*>(p.grad_raw)[at] = grad_raw;
  }
  // The same in a pass over destinations that saves alpha and ds. Its ds lacks the residual; therefore the
  // pass over sources writes grad_bias, and completes grad_gate: it multiplies raw, which is stored here, by
  // dz.
  __device__ __forceinline__ void store_of_destinations(const BackwardParams& p) const {
    if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] = raw;
    if (p.grad_weight) static_cast<A*>(p.grad_weight)[at] = mask * alpha * dot_gv;
  }

 private:
  // Sets `factor` = f and `at`, if the edge exists. Returns dalpha / f, which is g . (v + e) plus the
  // gradient of the returned attention.
  __device__ __forceinline__ A with_options(const BackwardParams& p, const EdgeReader<T>& edge, int eid,
                                            bool valid, A dot_gv) {
    if constexpr (EDGE) {
      if (valid) {
        at = int64_t(eid) * edge.heads + edge.head;
        factor = mask * edge.weight(eid);
        if (p.grad_attention) dot_gv += static_cast<const A*>(p.grad_attention)[at];
      }
    }
    return dot_gv;
  }
};

// Whether anything is read or written by edge id. If not, and ids are not loaded with the neighbours (EIDS),
// the load of an id is left out.
template <bool EDGE, typename T>
__device__ __forceinline__ bool needs_ids(const BackwardParams& p, const EdgeReader<T>& edge) {
  return EDGE && (edge.tensors || p.grad_attention || p.grad_raw);
}

// Returns the gradients of the s-th of this lane's own edges, whose id is eid_at(s). EIDS: ids were loaded
// with the neighbours. slope: of the LeakyReLU after the score. dot_gv: g . (v + e).
template <bool EIDS, typename T, bool EDGE, int LPH, int SLOTS, class EidAt>
__device__ __forceinline__ EdgeGradient<T, EDGE, SLOTS> gradient_of_own_edge(
    const BackwardParams& p, const EdgeReader<T>& edge, const Dropout<T, EDGE, LPH, SLOTS>& dropout,
    EidAt eid_at, int s, bool valid, Acc<T> raw, Acc<T> slope, Acc<T> dot_gv, RowStats<Acc<T>> softmax,
    Acc<T> delta) {
  const Acc<T> mask = dropout.factor(s);
  const int eid = EIDS || needs_ids<EDGE>(p, edge) ? eid_at(s) : 0;
  return {p, edge, eid, valid, mask, raw, slope, dot_gv, softmax, delta};
}

// Calls f(u, w, second weight) for the first `left` edges of an iteration, in all lanes, with the weights of
// the lanes that own the edges. FULL: all sub-warps have all edges.
template <int LPH, int B, bool FULL, class W, class F>
__device__ __forceinline__ void for_edges(int left, const W& weights, F f) {
#pragma unroll
  for (int u = 0; u < B; ++u) {
    typename W::A w, w_positive = 0;
    weights.template get<LPH>(u, w, w_positive);
    if (FULL || u < left) f(u, w, w_positive);
  }
}

// Calls f(u, grad_raw, weight, eid) for the same edges, with grad_raw from `grads_raw` and the weight from
// `weights`. The ids are in the second half of `index`.
template <int LPH, int B, bool FULL, class W, int S, class F>
__device__ __forceinline__ void for_edges(int left, const W& grads_raw, const W& weights,
                                          const int (&index)[S], F f) {
#pragma unroll
  for (int u = 0; u < B; ++u) {
    typename W::A grad_raw, weight, unused;
    grads_raw.template get<LPH>(u, grad_raw, unused);
    weights.template get<LPH>(u, weight, unused);
    const int eid = of_lane<LPH>(index[S / 2 + u / LPH], u % LPH);
    if (FULL || u < left) f(u, grad_raw, weight, eid);
  }
}

// sum += w x and other += v x.
template <typename A, int N, int M>
__device__ __forceinline__ void add_scaled(A (&sum)[N][M], A w, A (&other)[N][M], A v, const A (&x)[N][M]) {
  for (int k = 0; k < N; ++k) {
    for (int c = 0; c < M; ++c) {
      sum[k][c] += w * x[k][c];
      other[k][c] += v * x[k][c];
    }
  }
}

// Returns delta0 of a row, the first guess of delta: g . (out - out_bias) (+ row_sums), in all lanes of the
// head. grad_row, out_row: the row in this lane's columns.
template <class C>
__device__ __forceinline__ typename C::A first_delta(const Place<C>& me, const Tiling& t,
                                                     const BackwardParams& p,
                                                     const typename C::A (&grad_row)[C::NV][C::VEC],
                                                     const Raw (&out_row)[C::NV], int row) {
  using T = typename C::T;
  using A = typename C::A;
  A delta = 0;
  const Rows<C> bias = me.rows(p.out_bias);
  repeat<C::NV>([&](int k) {
    delta = dot<T>(grad_row[k], out_row[k], delta);
    if (p.out_bias) delta -= dot<T>(grad_row[k], bias.load(0, k), A(0));
  });
  delta = reduce_sum<C::LPH>(delta);
  if (C::WIDE && t.chunks > 1) {
    A far = me.far_dot(t, p.grad_out, row, p.out, row);
    if (p.out_bias) far -= me.far_dot(t, p.grad_out, row, p.out_bias, 0);
    delta += reduce_sum<C::LPH>(far);
  }
  if (p.row_sums) delta += *me.template at<A>(p.row_sums, row);
  return delta;
}

// The arrays whose rows a pass multiplies: x and b have a row per row of the pass, y and d one per neighbour.
// The score is of x and y, and g . v is b . d.
struct PairArrays {
  const void *x, *y, *b, *d;
};

// What feature rows of the edges [E, H, D] are added to: the key, the value or both. ON = false: there are no
// features, and the functions that add them are empty.
template <class C, bool ON>
struct FeatureTargets {
  using T = typename C::T;
  using A = typename C::A;
  A in_key, in_value;  // 1 if the features are added there, else 0

  __device__ __forceinline__ explicit FeatureTargets(const EdgeOptions& o)
      : in_key(ON && o.feat_in_key ? A(1) : A(0)), in_value(ON && o.feat_in_value) {
    keep(in_key);
  }
  // The array of edge features if they are part of the key, else null.
  __device__ __forceinline__ const void* of_key(const EdgeOptions& o) const {
    return in_key != 0 ? o.feat : nullptr;
  }
  // The array of edge features if they are part of the value, else null.
  __device__ __forceinline__ const void* of_value(const EdgeOptions& o) const {
    return in_value != 0 ? o.feat : nullptr;
  }
  // Adds columns of an edge's features to those of its key, if in_key is 1.
  __device__ __forceinline__ void add_to_key(A (&key)[C::VEC], const Raw& columns) const {
    if constexpr (ON) axpy<T>(key, in_key, columns);
  }
  // Adds columns of an edge's features to those of its value, if in_value is 1.
  __device__ __forceinline__ void add_to_value(A (&value)[C::VEC], const Raw& columns) const {
    if constexpr (ON) axpy<T>(value, in_value, columns);
  }
};

}  // namespace dfgnn::cuda
