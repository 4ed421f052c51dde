// The forward kernel of all scores: online softmax over the edges of a work item, which are visited once.
//
// Formulas: params.h. Mapping, words, steps and names: csrc/cuda/README.md. A lane holds in registers its
// columns of the row's sum (and with POSITIVE of the sum over edges with z > 0), of the query (dot,
// additive_v2) and of the B neighbours' rows that are in flight (2 B for dot, B more with edge features). Per
// edge the kernel reads the index, the value, and for additive alpha_src, for dot the key; per row it writes
// `out` and the softmax's statistics, or a partial result.
//
// POSITIVE: also adds up `positive`, from which backward computes grad_alpha_dst; only for additive. CHUNK:
// edges of an iteration, the B whose rows are in flight; for additive without features, which computes a
// score per lane, the LPH edges that a head's lanes own, if these are more: add_chunk then loads the rows
// after the first B. EIDS: edge ids are loaded ahead; without it an id costs a load, and is read only where
// it is needed. AHEAD: measured, as main_loop.cuh explains. row_term: with QUADS attn . q, which the scores
// of a row's edges have in common. rows: the neighbours' values, for additive_v2 also the keys. quads: here
// second = attn scores neighbours 0 and 1, and first = attn of quad ^ 2 scores 2 and 3: these results are in
// other lanes, so that one shuffle fetches two.
#pragma once

#include "edge_projection.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

// Kernels of dot with feature rows of the edges in 16 bits, and without scalars per edge, need fewer
// registers than other kernels with feature rows, so that forward_blocks asks for more blocks.
template <class C, Score SCORE, Edges EDGES>
inline constexpr bool kFewRows =
    SCORE == Score::dot && EDGES == Edges::features && sizeof(typename C::T) == 2 && C::LPH > 1;

template <class C, Score SCORE, Edges EDGES>
constexpr int forward_blocks() {
  if (kQuads<C, SCORE, EDGES>) return kQuadBlocksForward;
  constexpr Held HELD = has_features(EDGES) && !kFewRows<C, SCORE, EDGES> ? Held::many_rows
                        : SCORE == Score::additive                        ? Held::one_row
                                                                          : Held::two_rows;
  return kMinBlocks<C, HELD>;
}

// Projected features x of the edges in forward (EdgeAttr in params.h): their part of the scores, and the sum
// a = sum_j w m alpha_ij x_ij of a row. The specialisation for ON = false does nothing.
template <class C, bool ON, int B>
struct ProjectedForward {
  using T = typename C::T;
  using A = typename C::A;
  static constexpr int F = C::FEATS;
  AttrLanes<C, true> lanes;
  ItemFeatures<C> items;  // rows in shared memory: W^T q, later overwritten by a
  T x[B][F];              // features of an iteration's edges
  A query[F], sum[1][F];  // the row's W^T q, and the sum of x by softmax weight, not normalised yet

  // Multiplies the queries of the warp's items by W^T.
  __device__ __forceinline__ ProjectedForward(const Place<C>& me, const Tiling& t, const ForwardParams& p)
      : lanes(me, p.attr) {
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.onto(p.query, products.template shared<1>());
    items = {me, products, products.template shared<1>()};
    __syncwarp();
  }
  template <int S>
  __device__ __forceinline__ void load(const int (&index)[S]) {
    lanes.load(index, x);
  }
  __device__ __forceinline__ void begin(int item) {
    lanes.load_row(items.row(item), query);
    zero(sum);
  }
  // Adds the features' part, W^T q . x, to the score of the u-th edge.
  __device__ __forceinline__ void add_to_score(int u, A& score) const {
    score = lanes.dot(query, x[u], score);
  }
  __device__ __forceinline__ void add_to_sum(int u, A w) { lanes.axpy(sum[0], w, x[u]); }
  __device__ __forceinline__ void scale(A factor) { cuda::scale(sum, factor); }
  // Multiplies the sum by `factor`, and adds it up over the sub-warps of the row.
  __device__ __forceinline__ void across(const Place<C>& me, const Tiling& t, A factor) {
    repeat<F>([&](int f) { sum[0][f] = me.across(sum[0][f] * factor, t); });
  }
  // Stores factor times the sum of a whole row in shared memory, for finish(), or the sum of a row chunk,
  // unscaled, in its partial-result slot.
  __device__ __forceinline__ void store(const Place<C>& me, A factor, int slot, int item) {
    lanes.store_row(me, sum[0], factor, slot, items.row(item));
  }
  // Adds W a to the whole rows that the warp has written; split rows get theirs from project_splits_kernel,
  // after the merge. Also saves a in attr.sums for backward, unless that is null.
  __device__ __forceinline__ void finish(const Place<C>& me, const Tiling& t, const ForwardParams& p) const {
    __syncwarp();
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.back(products.template shared<1>(), p.out, 1, p.attr.sums);
  }
};
template <class C, int B>
struct ProjectedForward<C, false, B> {
  using A = typename C::A;
  __device__ __forceinline__ ProjectedForward(const Place<C>&, const Tiling&, const ForwardParams&) {}
  template <int S>
  __device__ __forceinline__ void load(const int (&)[S]) {}
  __device__ __forceinline__ void begin(int) {}
  __device__ __forceinline__ void add_to_score(int, A&) const {}
  __device__ __forceinline__ void add_to_sum(int, A) {}
  __device__ __forceinline__ void scale(A) {}
  __device__ __forceinline__ void across(const Place<C>&, const Tiling&, A) {}
  __device__ __forceinline__ void store(const Place<C>&, A, int, int) {}
  __device__ __forceinline__ void finish(const Place<C>&, const Tiling&, const ForwardParams&) const {}
};

// Returns x if FIRST, else y, whose type may be another one.
template <bool FIRST, class X, class Y>
__device__ __forceinline__ const auto& either(const X& x, const Y& y) {
  if constexpr (FIRST) {
    return x;
  } else {
    return y;
  }
}

// scores = the raw scores of the own edges of an iteration: sums over the columns of the row's query and the
// neighbours' keys (additive_v2: values), to which feat_rows are added where in_key is 1. Every lane adds up
// its own columns; then the sums of a head's lanes are reduced into the lanes that own the edges. Columns are
// tested only if LPH > 1: with one lane per head, every column is in the head. N: entries of `index`, with
// FEAT the neighbours, then the edges' ids.
template <bool FEAT, int B, class C, Score SCORE, bool PROJ, int Q, int F, int S, int N>
__device__ __forceinline__ void pair_scores(const Place<C>& me, const Tiling& t, const ForwardParams& p,
                                            const PairScore<C, SCORE>& pair,
                                            const typename C::A (&query)[Q][C::VEC],
                                            const Raw (&key_rows)[B][C::NV], const Raw (&feat_rows)[F][C::NV],
                                            typename C::A in_key,
                                            const ProjectedForward<C, PROJ, B>& projected, int row,
                                            const int (&index)[N], typename C::A (&scores)[S]) {
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH;
  constexpr bool DOT = SCORE == Score::dot;
  A parts[Own::SHARE] = {};
#pragma unroll
  for (int u = 0; u < B; ++u) {
    typename PairScore<C, SCORE>::Sum sum;
#pragma unroll
    for (int k = 0; k < C::NV; ++k) {
      if (DOT && !FEAT && LPH > 1 && !me.inside(k)) continue;  // additive_v2 needs no test: attn is 0 there
      A y[C::VEC];
      Pack<typename C::T>::unpack(key_rows[u][k], y);
      if constexpr (FEAT) axpy<typename C::T>(y, in_key, feat_rows[u][k]);
      const auto before = sum;
      pair.add(k, query[k], y, sum);
      if (DOT && FEAT && LPH > 1 && !me.inside(k)) sum = before;  // undone, without a branch
    }
    if (C::WIDE && t.chunks > 1) {
      const int j = of_lane<LPH>(index[u / LPH], u % LPH);
      int eid = 0;
      if constexpr (FEAT) eid = of_lane<LPH>(index[N / 2 + u / LPH], u % LPH);
      pair.add_far(me, t, p.attn, p.query, row, DOT ? p.key : p.value, j, in_key != 0 ? p.edge.feat : nullptr,
                   eid, sum);
    }
    projected.add_to_score(u, sum.linear);
    parts[u] = pair.join(sum);
  }
  reduce_scatter<Own::SHARE, LPH>(parts, me.hl);
  repeat<S>([&](int s) { scores[s] = DOT ? parts[s] * A(p.scale) : parts[s]; });
}

// Adds w times the features of an edge to `sum`, and with POSITIVE w_positive times the features to
// sum_positive. If in_value is 0, the value has no features, and nothing is added.
template <typename T, bool POSITIVE, int N, int P>
__device__ __forceinline__ void add_features(Acc<T> in_value, const Raw (&feat_row)[N], Acc<T> w,
                                             Acc<T> w_positive, Acc<T> (&sum)[N][kVec<T>],
                                             Acc<T> (&sum_positive)[P][kVec<T>]) {
  if (in_value == 0) return;
  repeat<N>([&](int k) {
    axpy<T>(sum[k], w, feat_row[k]);
    if constexpr (POSITIVE) axpy<T>(sum_positive[k], w_positive, feat_row[k]);
  });
}

// Returns the softmax over the edges of PERIOD lanes together. Their edges differ, their maximum is the same.
template <int PERIOD, typename A, bool POSITIVE>
__device__ __forceinline__ Softmax<A, POSITIVE> over_lanes(Softmax<A, POSITIVE> softmax) {
  softmax.mass = reduce_sum<PERIOD>(softmax.mass);
  if constexpr (POSITIVE) softmax.positive = reduce_sum<PERIOD>(softmax.positive);
  return softmax;
}
// Adds up the softmax and the sums of the sub-warps of a row, relative to the largest of their maxima.
// Returns the row's softmax; in all sub-warps the sums become those of the row.
template <class C, bool POSITIVE, int P, class Projected>
__device__ __forceinline__ Softmax<typename C::A, POSITIVE> add_subwarps(
    const Place<C>& me, const Tiling& t, Softmax<typename C::A, POSITIVE> softmax,
    typename C::A (&sum)[C::NV][C::VEC], typename C::A (&sum_positive)[P][C::VEC], Projected& projected) {
  using A = typename C::A;
  A top = softmax.top;
  for (int o = t.lanes(); o < 32; o *= 2) top = max(top, __shfl_xor_sync(kAll, top, o));
  const A shrink = softmax.raise(top);
  softmax.mass = me.across(softmax.mass, t);
  scale(sum, shrink);
  if constexpr (POSITIVE) scale(sum_positive, shrink);
  projected.across(me, t, shrink);
  me.across(sum, t);
  if constexpr (POSITIVE) {
    softmax.positive = me.across(softmax.positive, t);
    me.across(sum_positive, t);
  }
  return softmax;
}

// Returns the product of dropout's factor and the edge weight of this lane's s-th edge, by which its softmax
// weight is multiplied, or 0 if it does not exist (valid). If attention is returned, one lane per edge and
// head also writes the score to that array, where attention_kernel (epilogue.cuh) replaces it once the row's
// sum is known.
template <class C, int PERIOD, class D>
__device__ __forceinline__ typename C::A factor_of_weight(const Place<C>& me, const ForwardParams& p,
                                                          const EdgeReader<typename C::T>& edge,
                                                          const D& dropout, int s, int eid, bool valid,
                                                          typename C::A score) {
  using A = typename C::A;
  const A kept = dropout.factor(s), factor = valid ? edge.weight(eid) * kept : A(0);
  if (p.attention && valid && me.head_ok && me.hl < PERIOD && me.chunk == 0)
    static_cast<A*>(p.attention)[int64_t(eid) * me.heads + me.head] = score;
  return factor;
}

// x = factor x + share out_bias, in this lane's columns; x is then stored without a factor. share: 1, or
// where a row is joined 1 - before, because the old contents of the row, which are scaled by `before`,
// contain the bias already.
template <class C>
__device__ __forceinline__ void add_bias(const Place<C>& me, const void* out_bias, typename C::A factor,
                                         typename C::A share, typename C::A (&x)[C::NV][C::VEC]) {
  const Rows<C> biases = me.rows(out_bias);
  repeat<C::NV>([&](int k) {
    typename C::A bias[C::VEC];
    Pack<typename C::T>::unpack(biases.load(0, k), bias);
    repeat<C::VEC>([&](int c) { x[k][c] = x[k][c] * factor + share * bias[c]; });
  });
}

// Writes the softmax's statistics of a row, or of a row chunk. norm: 1 / mass. before: the factor for what
// the work item of an earlier source partition left in the row. One lane of each head writes.
template <class C, bool POSITIVE>
__device__ __forceinline__ void store_softmax(const Place<C>& me, const ForwardParams& p,
                                              const Softmax<typename C::A, POSITIVE> softmax,
                                              typename C::A norm, typename C::A before, int row, int slot) {
  using A = typename C::A;
  if (!me.writes || slot == me.kNoItem || me.hl != 0 || me.chunk != 0) return;
  if (slot < 0) {
    *me.template at<RowStats<A>>(p.stats, row) = softmax.stats();
    if constexpr (POSITIVE) {
      A* mass = me.template at<A>(p.positive_mass, row);
      *mass = softmax.positive * norm + (me.joins(slot) ? read_number(mass) * before : A(0));
    }
  } else {
    *me.template at<Softmax<A, true>>(p.partial_stats, slot) = {softmax.top, softmax.mass, softmax.positive};
  }
}

template <class C, Score SCORE, Edges EDGES, bool POSITIVE, int B>
__global__ void __launch_bounds__(kThreads, (forward_blocks<C, SCORE, EDGES>()))
    forward_kernel(const ForwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr bool DOT = SCORE == Score::dot, V2 = SCORE == Score::additive_v2, PAIR = DOT || V2;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES), PROJ = projects(EDGES);
  constexpr int CHUNK = PAIR || FEAT || B > LPH ? B : LPH;  // edges per sub-warp and iteration
  using Own = OwnEdges<C, CHUNK>;
  constexpr int SLOTS = Own::SLOTS;
  constexpr bool QUADS = kQuads<C, SCORE, EDGES>, EIDS = PROJ || FEAT || (EDGE && SLOTS == 1);

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                // this lane owns the edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const PairScore<C, SCORE, QUADS> pair(me, p.attn, A(p.negative_slope));
  const Terms<A> alpha_src = me.template terms<A>(p.alpha_src);
  A slope = V2 ? A(1) : A(p.negative_slope);  // V2: its LeakyReLU is in `pair`, and there is none after it
  keep(slope);
  const Rows<C> values = me.rows(p.value), keys = me.rows(V2 ? p.value : p.key);  // keys: read for dot
  const Rows<C> feats = me.rows(FEAT ? p.edge.feat : nullptr);
  const A in_key = FEAT && p.edge.feat_in_key, in_value = FEAT && p.edge.feat_in_value;
  ProjectedForward<C, PROJ, B> projected(me, t, p);

  // ---- 2. Load: a row's own array or term, and the arrays of an iteration's neighbours (dot: also keys).
  Raw query_raw[NV];
  A alpha_dst = 0, raw_score[SLOTS];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw rows[B][NV], key_rows[DOT ? B : 1][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] {
    if constexpr (PAIR) {
      me.load_row(p.query, query_raw, me.row);
    } else if (p.alpha_dst) {
      alpha_dst = *me.template at<A>(p.alpha_dst, me.row);
    }
  };
  const auto load_edges = [&] {
    if constexpr (!PAIR) repeat<SLOTS>([&](int s) { raw_score[s] = __ldg(alpha_src.at(index[s])); });
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    if constexpr (DOT) load_rows<C, B>(keys, 0, index, key_rows);
    load_rows<C, B>(values, 0, index, rows);  // in flight while the scores are computed
    projected.load(index);
  };

  // ---- 3. Begin and open a row: unpack its operands, and set its sums to 0.
  int row, item;
  A query[PAIR ? NV : 1][VEC], row_term = 0, sum[NV][VEC], sum_positive[POSITIVE ? NV : 1][VEC];
  Raw minus_query;  // QUADS: -q
  QuadRows quads;   // QUADS: attn as both rows, the first one turned (see the head of this file)
  if constexpr (QUADS) quads.set(turned(pair.words), pair.words);
  Softmax<A, POSITIVE> softmax;
  const auto open = [&] {
    if constexpr (PAIR) me.unpack_row(query_raw, query, A(1));
    if constexpr (QUADS) {
      row_term = pair.linear(me, t, p.attn, query, p.query, row);
      minus_query = negated(query_raw[0]);
    }
  };
  const auto begin = [&](const int at, const int n) {
    row = at, item = n;
    projected.begin(n);
    softmax = {};
    zero(sum);
    zero(sum_positive);
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. Raw scores: sums over columns in the lanes that own the edges, or sums of two terms.
    A scores[SLOTS];
    if constexpr (QUADS) {
      scores[0] = row_term + pair.quad_score(quads, minus_query, rows);
    } else if constexpr (PAIR) {
      pair_scores<FEAT, B>(me, t, p, pair, query, either<DOT>(key_rows, rows), feat_rows, in_key, projected,
                           row, index, scores);
    } else {
      repeat<SLOTS>([&](int s) { scores[s] = raw_score[s] + alpha_dst; });
    }

    // ---- 4b. Scores from raw scores (-inf beyond the last edge), their maximum, and factors of the weights.
    bool positive[SLOTS] = {};
    A factor[SLOTS], peak = -infinity<A>();
    const auto eid_at = [&](int s) { return eid_of<C, CHUNK, EIDS>(me, p.csr, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const int eid = EDGE && (EIDS || edge.tensors || p.attention) ? eid_at(s) : 0;  // 0: nothing reads it
      const EdgeScore<T, EDGE> z(edge, scores[s], slope, eid);
      positive[s] = z.positive;
      factor[s] = A(1);
      if constexpr (EDGE)
        factor[s] = factor_of_weight<C, Own::PERIOD>(me, p, edge, dropout, s, eid, valid, z.score);
      scores[s] = valid ? z.score : -infinity<A>();
      peak = max(peak, scores[s]);
    }

    // ---- 5. Softmax weights. Where the maximum rises, all sums are scaled down.
    peak = reduce_max<Own::PERIOD>(peak);
    if (__any_sync(kAll, peak > softmax.top)) {
      const A shrink = softmax.raise(peak);
      scale(sum, shrink);
      scale(sum_positive, shrink);
      if constexpr (PROJ) projected.scale(shrink);
    }
    Weights<A, SLOTS, POSITIVE, EDGE> weights;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const A e = exponential(minus(scores[s], softmax.reference()));
      softmax.add(e, positive[s]);
      weights.set(s, factor[s] * e, positive[s]);
    }

    // ---- 6. Weighted sums of the neighbours' rows.
    whole_or_not<CHUNK>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      if constexpr (PAIR || FEAT) {
        add_rows<C, FULL, POSITIVE, B>(
            0, left, weights, rows, sum, sum_positive, [&](int u, A w, A w_positive) {
              if constexpr (PROJ) projected.add_to_sum(u, w);
              if constexpr (FEAT)
                add_features<T, POSITIVE>(in_value, feat_rows[u], w, w_positive, sum, sum_positive);
            });
      } else {
        add_chunk<C, FULL, POSITIVE, B, CHUNK>(values, left, index, weights, rows, sum, sum_positive);
      }
    });
  };

  // ---- 7. Epilogue: results of a row or row chunk. `me` is at the next item; the sums and `item` are not.
  const auto finish = [&](const int row, const int slot) {
    softmax = over_lanes<Own::PERIOD>(softmax);
    if (me.shared()) softmax = add_subwarps(me, t, softmax, sum, sum_positive, projected);
    A before = 0, ours = 1;  // factors of what an earlier partition left in the row, and of these sums
    if (me.joins(slot)) before = softmax.join(read_stats(me.template at<RowStats<A>>(p.stats, row)), ours);
    if (sizeof(A) == sizeof(T)) __syncwarp();  // types that join: store_softmax overwrites what was read
    const A norm = softmax.norm();
    before *= norm, ours *= norm;
    const bool adds_bias = p.out_bias && slot < 0;
    if (adds_bias) add_bias(me, p.out_bias, ours, 1 - before, sum);  // add_bias says why 1 - before
    me.store_row(p.out, p.partial_out, sum, adds_bias ? A(1) : ours, row, slot, before);
    projected.store(me, ours, slot, item);
    if constexpr (POSITIVE)
      me.store_row(p.positive, p.partial_positive, sum_positive, ours, row, slot, before);
    store_softmax(me, p, softmax, norm, before, row, slot);
  };
  constexpr Ahead AHEAD = DOT && FEAT ? Ahead::rows : DOT || (!V2 && LPH > 1) ? Ahead::own : Ahead::all;
  main_loop<CHUNK, AHEAD, EIDS>(me, p.csr, t.items, index, load_item, load_edges, begin, open, iterate,
                                finish);
  projected.finish(me, t, p);
}

}  // namespace dfgnn::cuda
