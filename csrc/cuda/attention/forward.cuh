// Forward of every score: online softmax over the edges of an item, one visit per edge.
//
// Mapping: lanes.cuh. Registers hold the output row's columns of the lane (twice with POSITIVE), the
// query row (dot, additive_v2), B neighbour rows in flight (2 B for dot, B more with edge features). Reads
// indices, alpha_src or key, value once per edge; writes out and the softmax's statistics per row, or a
// partial per slot. B is the number of rows in flight.
#pragma once

#include "edge_projection.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

// Features of edges in registers of 16 bits, and nothing else of them.
template <class C, Score SCORE, Edges EDGES>
inline constexpr bool kFewRows =
    SCORE == Score::dot && EDGES == Edges::features && sizeof(typename C::T) == 2 && C::LPH > 1;

template <class C, Score SCORE, Edges EDGES>
constexpr int forward_blocks() {
  if (kQuads<C, SCORE, EDGES>) return kQuadBlocksForward;
  constexpr Load LOAD = has_features(EDGES) && !kFewRows<C, SCORE, EDGES> ? Load::many_rows
                        : SCORE == Score::additive                        ? Load::one_row
                                                                          : Load::two_rows;
  return kMinBlocks<C, LOAD>;
}

template <class C, Score SCORE, Edges EDGES, bool POSITIVE, int B>
__global__ void __launch_bounds__(kThreads, (forward_blocks<C, SCORE, EDGES>()))
    forward_kernel(const ForwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr bool DOT = SCORE == Score::dot, V2 = SCORE == Score::additive_v2, PAIR = DOT || V2;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES);
  constexpr bool PROJ = projects(EDGES), QUADS = kQuads<C, SCORE, EDGES>;
  constexpr Ahead AHEAD = DOT && FEAT ? Ahead::rows : DOT || (!V2 && LPH > 1) ? Ahead::own : Ahead::all;
  constexpr int CHUNK = PAIR || FEAT || B > LPH ? B : LPH;  // edges per sub-warp and step
  constexpr int SHARE = share_of(CHUNK), PERIOD = period_of(CHUNK, LPH),
                SLOTS = SHARE / PERIOD;  // edges owned by a lane
  constexpr bool EIDS = PROJ || FEAT || (EDGE && SLOTS == 1);

  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const int own = me.hl % PERIOD;
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const PairScore<C, SCORE, QUADS> pair(me, p.attn, A(p.negative_slope));
  const Terms<A> alpha_src = me.template terms<A>(p.alpha_src);
  A slope = V2 ? A(1) : A(p.negative_slope);
  keep(slope);
  const void* key = V2 ? p.value : p.key;
  const Rows<C> values = me.rows(p.value), keys = me.rows(key), feats = me.rows(FEAT ? p.edge.feat : nullptr);
  const A in_key = FEAT && p.edge.feat_in_key, in_value = FEAT && p.edge.feat_in_value;
  const AttrLanes<C, PROJ> attr(me, p.attr);
  constexpr int F = PROJ ? C::FEATS : 1;
  ItemFeatures<C> features;  // W^T q and then a
  if constexpr (PROJ) {
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.onto(p.query, products.template shared<1>());
    features = {me, products, products.template shared<1>()};
    __syncwarp();
  }

  // What an item and a step of it need first.
  Raw query_row[NV];
  A alpha_dst = 0, raw_score[SLOTS];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw rows[B][NV], key_rows[DOT ? B : 1][NV], feat_rows[FEAT ? B : 1][NV];
  T attrs[PROJ ? B : 1][C::FEATS];
  const auto load_item = [&] {
    if constexpr (PAIR) {
      me.load_row(p.query, query_row, me.row);
    } else if (p.alpha_dst) {
      alpha_dst = *me.template at<A>(p.alpha_dst, me.row);
    }
  };
  const auto load_step = [&] {
    if constexpr (!PAIR) repeat<SLOTS>([&](int s) { raw_score[s] = __ldg(alpha_src.at(index[s])); });
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    if constexpr (DOT) load_rows<C, B>(keys, 0, index, key_rows);
    load_rows<C, B>(values, 0, index, rows);  // they travel while the scores are computed
    if constexpr (PROJ) attr.load(index, attrs);
  };

  // The state of a row.
  int row, item;
  A query[PAIR ? NV : 1][VEC], row_term = 0, acc[NV][VEC], acc_positive[POSITIVE ? NV : 1][VEC];
  A query_attr[C::FEATS], acc_attr[1][C::FEATS];
  Raw minus_query;
  QuadRows quads;
  if constexpr (QUADS) {
    Raw turned;
    repeat<4>([&](int w) { turned.x[w] = __shfl_xor_sync(kAll, pair.words.x[w], 8); });
    quads.set(turned, pair.words);
  }
  Softmax<A, POSITIVE> softmax;
  const auto open = [&] {
    if constexpr (PAIR) me.unpack_row(query_row, query, A(1));
    if constexpr (QUADS) {
      row_term = pair.linear(me, t, p.attn, query, p.query, row);
      minus_query = negated(query_row[0]);
    }
  };
  const auto begin = [&](int at, int n) {
    row = at, item = n;
    if constexpr (PROJ) attr.load_row(features.row(n), query_attr);
    softmax = {};
    zero(acc);
    zero(acc_positive);
    zero(acc_attr);
  };

  const auto step = [&](const int done, const int rest) {
    const int left = SHARE > CHUNK ? min(rest, CHUNK) : rest;
    // What the family computes: sums over columns, brought to the lanes that own the edges, or two terms.
    A score[SLOTS];
    if constexpr (QUADS) {
      float unused[4][4];
      score[0] = row_term + pair.template quad_sum<true, true>(quads, minus_query, rows, unused);
    } else if constexpr (PAIR) {
      A part[PAIR ? SHARE : 1] = {};
#pragma unroll
      for (int u = 0; u < B; ++u) {
        typename PairScore<C, SCORE, QUADS>::Sum sum;
#pragma unroll
        for (int k = 0; k < NV; ++k) {
          if (!V2 && !FEAT && LPH > 1 && !me.inside(k)) continue;  // attn is 0 there
          A y[VEC];
          Pack<T>::unpack(DOT ? key_rows[DOT ? u : 0][k] : rows[u][k], y);
          if constexpr (FEAT) axpy<T>(y, in_key, feat_rows[u][k]);
          const auto before = sum;
          pair.add(k, query[k], y, sum);
          if (DOT && FEAT && LPH > 1 && !me.inside(k)) sum = before;  // without a branch
        }
        if (C::WIDE && t.chunks > 1) {
          const int j = __shfl_sync(kAll, index[u / LPH], u % LPH, LPH);
          int eid = 0;
          if constexpr (FEAT) eid = of_lane<LPH>(index[SLOTS + u / LPH], u % LPH);
          pair.add_far(me, t, p.attn, p.query, row, key, j, in_key != 0 ? p.edge.feat : nullptr, eid, sum);
        }
        if constexpr (PROJ) sum.linear = attr.dot(query_attr, attrs[u], sum.linear);
        part[u] = pair.join(sum);
      }
      reduce_scatter<SHARE, LPH>(part, me.hl);
      repeat<SLOTS>([&](int s) { score[s] = DOT ? part[s] * A(p.scale) : part[s]; });
    } else {
      repeat<SLOTS>([&](int s) { score[s] = raw_score[s] + alpha_dst; });
    }

    // Options on edges make it the score; one that is not there is -inf.
    bool positive[SLOTS] = {};
    A factor[SLOTS], peak = -infinity<A>();
    const auto eid_at = [&](int s) { return eid_of<C, CHUNK, EIDS>(me, p.csr, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const int eid = EDGE && (EIDS || edge.tensors || p.attention) ? eid_at(s) : 0;
      const EdgeScore<T, EDGE> z(edge, score[s], slope, eid);
      positive[s] = z.positive;
      score[s] = z.score;
      if constexpr (EDGE) {
        const A kept = dropout.factor(s);
        factor[s] = valid ? edge.weight(eid) * kept : A(0);
        if (p.attention && valid && me.head_ok && me.hl < PERIOD && me.chunk == 0)
          static_cast<A*>(p.attention)[int64_t(eid) * me.heads + me.head] = score[s];
      } else {
        factor[s] = A(1);
      }
      if (!valid) score[s] = -infinity<A>();
      peak = max(peak, score[s]);
    }

    // A larger score than all before scales down what has been added up.
    peak = reduce_max<PERIOD>(peak);
    if (__any_sync(kAll, peak > softmax.top)) {
      const A shrink = softmax.raise(peak);
      scale(acc, shrink);
      if constexpr (POSITIVE) scale(acc_positive, shrink);
      if constexpr (PROJ) scale(acc_attr, shrink);
    }

    // Weights relative to the largest score, and the rows that they belong to.
    const A reference = softmax.reference();
    Weights<A, SLOTS, POSITIVE, EDGE> weights;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const A e = exponential(minus(score[s], reference));
      softmax.mass += e;
      if constexpr (POSITIVE) softmax.positive += positive[s] ? e : A(0);
      weights.set(s, factor[s] * e, positive[s]);
    }
    whole_or_not<CHUNK>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      if constexpr (PROJ) {
        add_rows<C, FULL, false, B>(0, left, weights, rows, acc, acc,
                                    [&](int u, A w, A) { attr.axpy(acc_attr[0], w, attrs[u]); });
      } else if constexpr (PAIR || FEAT) {
        add_rows<C, FULL, POSITIVE, B>(0, left, weights, rows, acc, acc_positive,
                                       [&](int u, A w, A w_positive) {
                                         if constexpr (FEAT) {
                                           if (in_value == 0) return;
                                           repeat<NV>([&](int k) {
                                             axpy<T>(acc[k], w, feat_rows[u][k]);
                                             if constexpr (POSITIVE)
                                               axpy<T>(acc_positive[k], w_positive, feat_rows[u][k]);
                                           });
                                         }
                                       });
      } else {
        add_chunk<C, FULL, POSITIVE, B, CHUNK>(values, left, index, weights, rows, acc, acc_positive);
      }
    });
  };

  const auto finish = [&](const int row, const int slot) {
    softmax.mass = reduce_sum<PERIOD>(softmax.mass);
    if constexpr (POSITIVE) softmax.positive = reduce_sum<PERIOD>(softmax.positive);
    if (me.shared()) {  // bring the sub-warps to one maximum, then add
      A risen = softmax.top;
      for (int o = t.lanes(); o < 32; o *= 2) risen = max(risen, __shfl_xor_sync(kAll, risen, o));
      const A shrink = softmax.raise(risen);
      softmax.mass = me.across(softmax.mass, t);
      scale(acc, shrink);
      if constexpr (POSITIVE) scale(acc_positive, shrink);
      if constexpr (PROJ) repeat<F>([&](int f) { acc_attr[0][f] = me.across(acc_attr[0][f] * shrink, t); });
      me.across(acc, t);
      if constexpr (POSITIVE) {
        softmax.positive = me.across(softmax.positive, t);
        me.across(acc_positive, t);
      }
    }

    const bool joins = me.joins(slot);
    A before = 0, ours = 1;  // factors of what an earlier part left in the row, and of these sums
    if (joins) before = softmax.join(read_stats(me.template at<RowStats<A>>(p.stats, row)), ours);
    if constexpr (sizeof(A) == sizeof(T)) __syncwarp();  // all lanes have read it
    const A norm = softmax.norm();
    before *= norm, ours *= norm;
    const bool adds_bias = p.out_bias && slot < 0;
    if (adds_bias) {  // what an earlier part left in the row has it, too
      const Rows<C> biases = me.rows(p.out_bias);
      repeat<NV>([&](int k) {
        A bias[VEC];
        Pack<T>::unpack(biases.load(0, k), bias);
        repeat<VEC>([&](int c) { acc[k][c] = acc[k][c] * ours + (1 - before) * bias[c]; });
      });
    }
    me.store_row(p.out, p.partial_out, acc, adds_bias ? A(1) : ours, row, slot, before);
    if constexpr (PROJ) attr.store_row(me, acc_attr[0], ours, slot, features.row(item));
    if constexpr (POSITIVE)
      me.store_row(p.positive, p.partial_positive, acc_positive, ours, row, slot, before);
    if (me.writes && slot != me.kNoItem && me.hl == 0 && me.chunk == 0) {
      if (slot < 0) {
        *me.template at<RowStats<A>>(p.stats, row) = softmax.stats();
        if constexpr (POSITIVE) {
          A* mass = me.template at<A>(p.positive_mass, row);
          *mass = softmax.positive * norm + (joins ? read_number(mass) * before : A(0));
        }
      } else {
        *me.template at<Softmax<A, true>>(p.partial_stats, slot) = {softmax.top, softmax.mass,
                                                                    softmax.positive};
      }
    }
  };
  walk<CHUNK, AHEAD, EIDS>(me, p.csr, t.items, index, load_item, load_step, begin, open, step, finish);
  if constexpr (PROJ) {
    __syncwarp();
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.back(products.template shared<1>(), p.out, 1, p.attr.sums);
  }
}

}  // namespace dfgnn::cuda
