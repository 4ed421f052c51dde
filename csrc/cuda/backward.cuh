// Backward: gathers over the two CSRs with alpha recomputed from lse. See params.h for the formulas.
#pragma once

#include "gather.cuh"

namespace dfgnn::cuda {

// What the passes over sources need of a destination and head; one aligned load for additive.
template <typename A>
struct alignas(16) AdditiveStats {
  A alpha_dst, lse, delta, unused;
};
template <typename A>
struct alignas(2 * sizeof(A)) DotStats {
  A lse, delta;
};

template <typename S>
__device__ __forceinline__ S load_stats(const void* base, int64_t at) {
  S s;
  if constexpr (sizeof(S) == 8) {
    const float2 v = __ldg(static_cast<const float2*>(base) + at);
    memcpy(&s, &v, 8);
  } else {
    Raw raw[sizeof(S) / 16];
#pragma unroll
    for (int k = 0; k < int(sizeof(S) / 16); ++k)
      raw[k] = load_raw(static_cast<const char*>(base) + at * sizeof(S) + 16 * k);
    memcpy(&s, raw, sizeof(S));
  }
  return s;
}

// Additive, over sources, when no gradient of an edge tensor is wanted: one gather of g and no
// reduction per edge. With c_ij = f alpha LeakyReLU'(z):
//   sum_i c_ij (g_i . v_j) = v_j . (slope * sum_i f alpha g_i + (1 - slope) * sum_{z > 0} f alpha g_i)
// so the same two weighted sums as in forward are all that the loop computes.
template <class C, bool EDGE, int B>
__global__ void __launch_bounds__(kThreads, kMinBlocks<C, false>)
    additive_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr int CHUNK = B > LPH ? B : LPH, SLOTS = CHUNK / LPH;

  const Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const int64_t row_head = int64_t(me.item.row) * me.heads + me.head;
  const A alpha_src = static_cast<const A*>(p.alpha_src)[row_head];
  A slope = A(p.negative_slope);
  keep(slope);

  const Rows<C> grads = me.rows(p.grad_out);
  A acc[NV][VEC] = {}, acc_positive[NV][VEC] = {};
  A sum_delta = 0;
  int next[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) next[s] = fetch<C, CHUNK>(me, p.reverse, 0, s);

  const int steps = (me.span + CHUNK - 1) / CHUNK, full_steps = me.common / CHUNK;
  for (int step = 0; step < steps; ++step) {
    const int left = me.count - step * CHUNK;
    int index[SLOTS];
    Weights<A, SLOTS, true, EDGE> weights;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      index[s] = next[s];
      next[s] = fetch<C, CHUNK>(me, p.reverse, step + 1, s);
    }
    Raw rows[B][NV];
    load_rows<C, B>(grads, 0, index, rows);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const auto stats = load_stats<AdditiveStats<A>>(p.node_stats, int64_t(index[s]) * me.heads + me.head);
      const bool valid = s * LPH + me.hl < left;
      A z = alpha_src + stats.alpha_dst, factor = 1;
      if constexpr (EDGE) {
        if (valid) {
          const int eid = edge_id(p.reverse, me.first + (step * CHUNK + s * LPH + me.hl) * me.stride);
          z += edge.bias(eid);
          factor = edge.weight(eid) * edge.mask(eid);
        }
      }
      const A alpha = valid ? exponential(leaky_relu(z, slope) - stats.lse) : A(0);
      sum_delta += valid ? alpha * leaky_relu_grad(z, slope) * stats.delta : A(0);
      weights.set(s, alpha * factor, z > 0);
    }
    if (step < full_steps) {
      add_chunk<C, true, true, B, CHUNK>(grads, left, CHUNK, index, weights, rows, acc, acc_positive);
    } else {
      add_chunk<C, false, true, B, CHUNK>(grads, left, me.span - step * CHUNK, index, weights, rows, acc,
                                          acc_positive);
    }
  }

  if (!p.reverse.packed && me.num_sub > 1) {
    me.across(acc, t);
    me.across(acc_positive, t);
    sum_delta = me.across(sum_delta, t);
  }
  A value[NV][VEC];
  me.load_row(p.value, value, A(1));
  A grad_alpha = -sum_delta;
#pragma unroll
  for (int k = 0; k < NV; ++k) {
#pragma unroll
    for (int c = 0; c < VEC; ++c)
      grad_alpha += value[k][c] * (slope * acc[k][c] + (1 - slope) * acc_positive[k][c]);
  }
  grad_alpha = reduce_sum<LPH>(grad_alpha);
  me.store_row(p.grad_value, p.partial_value, acc, A(1));
  if (me.writes && me.hl == 0) {
    if (me.item.slot < 0) {
      static_cast<A*>(p.grad_alpha_src)[row_head] = grad_alpha;
    } else {
      static_cast<A*>(p.partial_alpha)[int64_t(me.item.slot) * me.heads + me.head] = grad_alpha;
    }
  }
}

// The passes that need g . v of every edge. A row holds (a, b), its neighbours bring (c, d):
//   destinations (dot):   a = scale q_i, b = g_i;  c = k_j, d = v_j;  grad_query += ds c
//   sources (dot):        a = scale k_j, b = v_j;  c = q_i, d = g_i;  grad_key += ds c, grad_value += w d
//   sources (additive):   b = v_j;  d = g_i;  grad_alpha_src += dz, grad_value += w d
// Edge gradients are written by the pass over destinations (dot), or over sources (additive).
// Two partial dots per edge, scatter-reduced over the lanes of a head.
template <class C, Score SCORE, bool SOURCES, bool EDGE, int B>
__global__ void __launch_bounds__(kThreads, kMinBlocks<C, true>)
    pair_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr bool DOT = SCORE == Score::dot;
  constexpr int CHUNK = B, PERIOD = CHUNK < LPH ? CHUNK : LPH, SLOTS = CHUNK / PERIOD;
  constexpr bool EDGE_GRADS = EDGE && (DOT != SOURCES);

  const Csr& csr = SOURCES ? p.reverse : p.csr;
  const Place<C> me(t, p.shape, p.shape.value_dim, csr);
  const int own = me.hl % PERIOD;
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const int64_t row_head = int64_t(me.item.row) * me.heads + me.head;
  const void* rows_a = SOURCES ? p.key : p.query;
  const void* rows_b = SOURCES ? p.value : p.grad_out;
  const void* rows_c = SOURCES ? p.query : p.key;
  const void* rows_d = SOURCES ? p.grad_out : p.value;

  A a[DOT ? NV : 1][VEC], b[NV][VEC];
  if constexpr (DOT) me.load_row(rows_a, a, A(p.scale));
  me.load_row(rows_b, b, A(1));
  A alpha_src = 0, row_lse = 0, row_delta = 0;
  if constexpr (!DOT) alpha_src = static_cast<const A*>(p.alpha_src)[row_head];
  if constexpr (!SOURCES) {  // delta_i, which the pass over sources reads later
    const Rows<C> outs = me.rows(p.out);
#pragma unroll
    for (int k = 0; k < NV; ++k) row_delta = dot<T>(b[k], outs.load(me.item.row, k), row_delta);
    row_delta = reduce_sum<LPH>(row_delta);
    if (C::WIDE && t.chunks > 1)
      row_delta += reduce_sum<LPH>(me.far_dot(t, p.grad_out, me.item.row, p.out, me.item.row));
    if (p.grad_attention) row_delta += static_cast<const A*>(p.row_sums)[row_head];
    row_lse = static_cast<const A*>(p.lse)[row_head];
    if (me.writes && me.hl == 0 && me.chunk == 0)
      static_cast<DotStats<A>*>(p.node_stats)[row_head] = {row_lse, row_delta};
  }
  A slope = A(p.negative_slope);
  keep(slope);

  const Rows<C> source_c = me.rows(rows_c), source_d = me.rows(rows_d);
  A acc_c[DOT ? NV : 1][VEC] = {}, acc_d[SOURCES ? NV : 1][VEC] = {};
  A sum_alpha = 0;
  int next[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) next[s] = fetch<C, CHUNK>(me, csr, 0, s);

  const int steps = (me.span + CHUNK - 1) / CHUNK, full_steps = me.common / CHUNK;
  for (int step = 0; step < steps; ++step) {
    const int left = me.count - step * CHUNK;
    int index[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      index[s] = next[s];
      next[s] = fetch<C, CHUNK>(me, csr, step + 1, s);
    }
    Raw c[B][NV], d[B][NV];
    if constexpr (DOT) load_rows<C, B>(source_c, 0, index, c);
    load_rows<C, B>(source_d, 0, index, d);
    A score[SLOTS], lse[SLOTS], delta[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int64_t at = int64_t(index[s]) * me.heads + me.head;
      if constexpr (!SOURCES) {
        lse[s] = row_lse, delta[s] = row_delta;
      } else if constexpr (DOT) {
        const auto stats = load_stats<DotStats<A>>(p.node_stats, at);
        lse[s] = stats.lse, delta[s] = stats.delta;
      } else {
        const auto stats = load_stats<AdditiveStats<A>>(p.node_stats, at);
        score[s] = alpha_src + stats.alpha_dst, lse[s] = stats.lse, delta[s] = stats.delta;
      }
    }
    A part_s[B], part_t[B];
#pragma unroll
    for (int u = 0; u < B; ++u) {
      part_s[u] = part_t[u] = 0;
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        if (!me.inside(k)) continue;
        if constexpr (DOT) part_s[u] = dot<T>(a[k], c[u][k], part_s[u]);
        part_t[u] = dot<T>(b[k], d[u][k], part_t[u]);
      }
      if (C::WIDE && t.chunks > 1) {
        const int j = __shfl_sync(kAll, index[u / LPH], u % LPH, LPH);
        if constexpr (DOT) part_s[u] += A(p.scale) * me.far_dot(t, rows_a, me.item.row, rows_c, j);
        part_t[u] += me.far_dot(t, rows_b, me.item.row, rows_d, j);
      }
    }
    if constexpr (DOT) reduce_scatter<B, LPH>(part_s, me.hl);
    reduce_scatter<B, LPH>(part_t, me.hl);

    Weights<A, SLOTS, false, true> weights, grad_scores;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      if constexpr (DOT) score[s] = part_s[s];
      A dot_gv = part_t[s], mask = 1, factor = 1;
      int64_t at = 0;
      if constexpr (EDGE) {
        if (valid) {
          const int eid = edge_id(csr, me.first + (step * CHUNK + s * LPH + own) * me.stride);
          at = int64_t(eid) * me.heads + me.head;
          score[s] += edge.bias(eid);
          mask = edge.mask(eid);
          factor = mask * edge.weight(eid);
          if (p.grad_attention) dot_gv += static_cast<const A*>(p.grad_attention)[at];
        }
      }
      A slope_z = 1;
      if constexpr (!DOT) {
        slope_z = leaky_relu_grad(score[s], slope);
        score[s] = leaky_relu(score[s], slope);
      }
      const A alpha = valid ? exponential(score[s] - lse[s]) : A(0);
      const A grad_score = valid ? alpha * (factor * dot_gv - delta[s]) * slope_z : A(0);
      weights.set(s, alpha * factor, true);
      grad_scores.set(s, grad_score, true);
      sum_alpha += grad_score;
      if constexpr (EDGE_GRADS) {
        if (valid && me.head_ok && me.hl < PERIOD && me.chunk == 0) {
          if (p.grad_bias) static_cast<A*>(p.grad_bias)[at] = grad_score;
          if (p.grad_weight) static_cast<A*>(p.grad_weight)[at] = mask * alpha * dot_gv;
        }
      }
    }
    const auto add = [&](auto full) {
      constexpr bool FULL = decltype(full)::value;
      if constexpr (DOT) add_rows<C, FULL, false, B>(0, left, grad_scores, c, acc_c, acc_c);
      if constexpr (SOURCES) add_rows<C, FULL, false, B>(0, left, weights, d, acc_d, acc_d);
    };
    if (step < full_steps) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
  }

  if (!csr.packed && me.num_sub > 1) {
    if constexpr (DOT) me.across(acc_c, t);
    if constexpr (SOURCES) me.across(acc_d, t);
    if constexpr (!DOT) sum_alpha = me.across(sum_alpha, t);
  }
  if constexpr (DOT)
    me.store_row(SOURCES ? p.grad_key : p.grad_query, SOURCES ? p.partial_key : p.partial_query, acc_c,
                 A(p.scale));
  if constexpr (SOURCES) me.store_row(p.grad_value, p.partial_value, acc_d, A(1));
  if constexpr (!DOT) {
    sum_alpha = reduce_sum<PERIOD>(sum_alpha);
    if (me.writes && me.hl == 0 && me.chunk == 0) {
      if (me.item.slot < 0) {
        static_cast<A*>(p.grad_alpha_src)[row_head] = sum_alpha;
      } else {
        static_cast<A*>(p.partial_alpha)[int64_t(me.item.slot) * me.heads + me.head] = sum_alpha;
      }
    }
  }
}

}  // namespace dfgnn::cuda
