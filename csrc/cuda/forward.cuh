// Forward of every score: online softmax over the edges of an item, one visit per edge.
//
// Mapping: lanes.cuh. Registers hold the output row's columns of the lane (twice with POSITIVE), the
// query row (dot, additive_v2), B neighbour rows in flight (2 B for dot, B more with edge features). Reads
// indices, alpha_src or key, value once per edge; writes out and lse per row, or a partial per slot. B is the
// number of rows in flight.
#pragma once

#include "scores.cuh"

namespace dfgnn::cuda {

template <class C, Score SCORE, Edges EDGES, bool POSITIVE, int B>
__global__ void __launch_bounds__(kThreads, kMinBlocks<C, EDGES == Edges::features   ? Load::many_rows
                                                          : SCORE == Score::additive ? Load::one_row
                                                                                     : Load::two_rows>)
    forward_kernel(const ForwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr bool DOT = SCORE == Score::dot, V2 = SCORE == Score::additive_v2, PAIR = DOT || V2;
  constexpr bool EDGE = EDGES != Edges::none, FEAT = EDGES == Edges::features;
  constexpr bool EARLY = !DOT;  // registers suffice for rows in flight while results are written
  constexpr int CHUNK = PAIR || FEAT || B > LPH ? B : LPH;  // edges per sub-warp and step
  constexpr int PERIOD = CHUNK < LPH ? CHUNK : LPH;         // lanes of a head that own different edges
  constexpr int SLOTS = CHUNK / PERIOD;                     // edges owned by a lane

  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const int own = me.hl % PERIOD;
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const PairScore<C, SCORE> pair(me, p.attn, A(p.negative_slope));
  const Terms<A> alpha_src = me.template terms<A>(p.alpha_src);
  A slope = V2 ? A(1) : A(p.negative_slope);
  keep(slope);
  const void* key = V2 ? p.value : p.key;
  const Rows<C> values = me.rows(p.value), keys = me.rows(key), feats = me.rows(FEAT ? p.edge.feat : nullptr);
  const A in_key = FEAT && p.edge.feat_in_key, in_value = FEAT && p.edge.feat_in_value;

  // What an item and a step of it need first.
  Raw query_row[NV];
  A alpha_dst = 0, raw_score[SLOTS];
  int index[SLOTS], next[SLOTS];
  Raw rows[B][NV], key_rows[DOT ? B : 1][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] {
    if constexpr (PAIR) {
      me.load_row(p.query, query_row, me.row);
    } else if (p.alpha_dst) {
      alpha_dst = *me.template at<A>(p.alpha_dst, me.row);
    }
  };
  const auto load_step = [&] {
    if constexpr (!PAIR) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) raw_score[s] = __ldg(alpha_src.at(index[s]));
    }
    if constexpr (DOT) load_rows<C, B>(keys, 0, index, key_rows);
    load_rows<C, B>(values, 0, index, rows);  // they travel while the scores are computed
  };

  me.take(0);
  fetch<C, CHUNK>(me, p.csr, 0, 0, index);
  if constexpr (EARLY) {
    load_item();
    if (me.any(0)) load_step();
  }
  for (int n = 0; n < t.items;) {
    fetch<C, CHUNK>(me, p.csr, n, CHUNK, next);
    const int row = me.row;
    if constexpr (!EARLY) load_item();
    A query[PAIR ? NV : 1][VEC];
    if constexpr (PAIR) me.unpack_row(query_row, query, V2 ? A(1) : A(p.scale));
    A acc[NV][VEC] = {};
    A acc_positive[POSITIVE ? NV : 1][VEC] = {};
    A top = -infinity<A>(), mass = 0, mass_positive = 0;

    bool more = me.any(0);
    for (int done = 0; more;) {
      const int left = me.count - done;
      if constexpr (!EARLY) load_step();
      if constexpr (FEAT) {
        int eids[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) eids[s] = fetch_eid<C, CHUNK>(me, p.csr, done, s);
        load_rows<C, B>(feats, 0, eids, feat_rows);
      }
      A score[SLOTS];
      bool positive[SLOTS] = {};
      if constexpr (PAIR) {
        A part[B];
#pragma unroll
        for (int u = 0; u < B; ++u) {
          typename PairScore<C, SCORE>::Sum sum;
#pragma unroll
          for (int k = 0; k < NV; ++k) {
            if (!V2 && !me.inside(k)) continue;  // attn is 0 there
            A y[VEC];
            Pack<T>::unpack(DOT ? key_rows[DOT ? u : 0][k] : rows[u][k], y);
            if constexpr (FEAT) axpy<T>(y, in_key, feat_rows[u][k]);
            pair.add(k, query[k], y, sum);
          }
          if (C::WIDE && t.chunks > 1) {
            const int j = __shfl_sync(kAll, index[u / LPH], u % LPH, LPH);
            int eid = 0;
            if constexpr (FEAT) eid = edge_of<C>(me, p.csr, done + u);
            pair.add_far(me, t, A(p.scale), p.attn, p.query, row, key, j, in_key != 0 ? p.edge.feat : nullptr,
                         eid, sum);
          }
          part[u] = pair.join(sum);
        }
        reduce_scatter<CHUNK, LPH>(part, me.hl);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) score[s] = part[s];
      } else {
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) score[s] = raw_score[s] + alpha_dst;
      }

      A factor[SLOTS];
      A peak = -infinity<A>();
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        const bool valid = s * LPH + own < left;
        int eid = 0;
        if constexpr (EDGE) {
          if (valid) eid = edge_id(p.csr, me.first + (done + s * LPH + own) * me.stride);
        }
        // Past the end, eid 0 exists: there are edges, or this loop would not run.
        const EdgeScore<T, EDGE> z(edge, score[s], slope, eid);
        positive[s] = z.positive;
        score[s] = z.score;
        if constexpr (EDGE) {
          factor[s] = valid ? edge.weight(eid) * edge.mask(eid) : A(0);
          if (p.attention && valid && me.head_ok && me.hl < PERIOD && me.chunk == 0)
            static_cast<A*>(p.attention)[int64_t(eid) * me.heads + me.head] = score[s];
        } else {
          factor[s] = A(1);
        }
        if (!valid) score[s] = -infinity<A>();
        peak = max(peak, score[s]);
      }
      peak = reduce_max<PERIOD>(peak);
      if (__any_sync(kAll, peak > top)) {
        const A risen = max(top, peak);
        const A shrink = top == risen ? A(1) : exponential(top - risen);
        top = risen;
        mass *= shrink;
        mass_positive *= shrink;
#pragma unroll
        for (int k = 0; k < NV; ++k) {
#pragma unroll
          for (int c = 0; c < VEC; ++c) {
            acc[k][c] *= shrink;
            if constexpr (POSITIVE) acc_positive[k][c] *= shrink;
          }
        }
      }
      const A reference = top == -infinity<A>() ? A(0) : top;
      Weights<A, SLOTS, POSITIVE, EDGE> weights;
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        const A e = exponential(score[s] - reference);
        mass += e;
        if constexpr (POSITIVE) mass_positive += positive[s] ? e : A(0);
        weights.set(s, factor[s] * e, positive[s]);
      }
      const auto add = [&](auto full) {
        constexpr bool FULL = decltype(full)::value;
        if constexpr (PAIR || FEAT) {
          add_rows<C, FULL, POSITIVE, B>(0, left, weights, rows, acc, acc_positive);
          if constexpr (FEAT) {
            if (in_value != 0) add_rows<C, FULL, POSITIVE, B>(0, left, weights, feat_rows, acc, acc_positive);
          }
        } else {
          add_chunk<C, FULL, POSITIVE, B, CHUNK>(values, left, index, weights, rows, acc, acc_positive);
        }
      };
      if (__all_sync(kAll, left >= CHUNK)) {
        add(std::true_type{});
      } else {
        add(std::false_type{});
      }
      done += CHUNK;
      more = me.any(done);
      if (more) {
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) index[s] = next[s];
        if constexpr (EARLY) load_step();
        fetch<C, CHUNK>(me, p.csr, n, done + CHUNK, next);
      }
    }

    const int slot = me.slot_of(n);
    if (++n < t.items) {  // what the next item needs first travels while this one's results are written
      me.take(n);
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) index[s] = next[s];
      if constexpr (EARLY) {
        load_item();
        if (me.any(0)) load_step();
      }
    }

    mass = reduce_sum<PERIOD>(mass);
    if constexpr (POSITIVE) mass_positive = reduce_sum<PERIOD>(mass_positive);
    if (!p.csr.packed &&
        me.num_sub > 1) {  // the sub-warps shared the row: bring them to one maximum, then add
      A risen = top;
      for (int o = t.lanes(); o < 32; o *= 2) risen = max(risen, __shfl_xor_sync(kAll, risen, o));
      const A shrink = top == risen ? A(1) : exponential(top - risen);
      top = risen;
      mass = me.across(mass * shrink, t);
#pragma unroll
      for (int k = 0; k < NV; ++k) {
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          acc[k][c] *= shrink;
          if constexpr (POSITIVE) acc_positive[k][c] *= shrink;
        }
      }
      me.across(acc, t);
      if constexpr (POSITIVE) {
        mass_positive = me.across(mass_positive * shrink, t);
        me.across(acc_positive, t);
      }
    }

    const A norm = mass == 0 ? A(0) : A(1) / mass;
    me.store_row(p.out, p.partial_out, acc, norm, row, slot);
    if constexpr (POSITIVE) me.store_row(p.positive, p.partial_positive, acc_positive, norm, row, slot);
    if (me.writes && slot != me.kNoItem && me.hl == 0 && me.chunk == 0) {
      if (slot < 0) {
        *me.template at<A>(p.lse, row) = mass == 0 ? infinity<A>() : top + logarithm(mass);
        if constexpr (POSITIVE) *me.template at<A>(p.positive_mass, row) = mass_positive * norm;
      } else {
        A* stats = *me.template at<A[3]>(p.partial_stats, slot);
        stats[0] = top;
        stats[1] = mass;
        stats[2] = mass_positive;
      }
    }
  }
}

}  // namespace dfgnn::cuda
