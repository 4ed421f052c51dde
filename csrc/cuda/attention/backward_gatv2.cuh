// Backward of additive_v2 (GATv2): a pass over destinations for the gradient of x_dst, then a pass over
// sources for the gradient of the values. Both compute the scores again, and both add to the gradient of
// attn. Formulas: params.h. Words, steps and names: csrc/cuda/README.md.
//
// With u = x_i + v_j (+ e_ij), L'(u) is slope or 1, and so
//   sum grad_raw L'(u) = slope sum grad_raw + (1 - slope) sum_{u > 0} grad_raw:
// kernels add up, per column, only the grad_raw of the edges with u > 0. As L(u) = u L'(u), the gradient of
// attn is the sum of x_i times this sum over destinations, of v_j times it over sources and of e_ij times it
// over edges.
//
// FEAT: the edges have feature rows; EDGES is features_scalars then, so that EDGE holds, too. row_term: the
// linear part of the score that a row's edges have in common, slope attn . x of the row x, or with QUADS
// attn . x; in the pass over sources x is v_j. slope: that of a LeakyReLU after the score. GATv2 has none, so
// that it is 1; `keep` makes the compiler take it for a parameter, with which it makes fewer instructions.
// pair.slope: that within the score.
// writes: me.writes, if the item exists; begin() sets it with the item's other values, because in finish()
// `me` may be at the next item. next_stats: load_item() loads the statistics of an item, begin() copies them
// to `stats`; `= {}` is for the compiler only. p.grad_attn: this launch's partial sums; pair_launch.cuh moves
// the pointer from launch to launch.
#pragma once

#include "backward_steps.cuh"
#include "scores.cuh"

namespace dfgnn::cuda {

template <class C, Edges EDGES>
constexpr int gatv2_destinations_blocks() {
  if (kQuads<C, Score::additive_v2, EDGES>) return kQuadBlocksDestinations;
  constexpr bool MANY = has_features(EDGES) || (C::LPH == 1 && sizeof(typename C::T) > 2);
  return kMinBlocks < C, MANY ? Held::many_rows : Held::four_rows > ;
}
template <class C, Edges EDGES>
constexpr int gatv2_sources_blocks() {
  if (kQuads<C, Score::additive_v2, EDGES>) return kQuadBlocksSources;
  return kMinBlocks < C, has_features(EDGES) ? Held::most_rows : Held::many_rows > ;
}
template <class C, Edges EDGES>
constexpr Ahead gatv2_ahead() {
  constexpr bool QUADS = kQuads<C, Score::additive_v2, EDGES>, NARROW = sizeof(typename C::T) == 2;
  return !has_features(EDGES) && (QUADS || !NARROW) ? Ahead::rows : Ahead::none;
}

// A lane's share of the gradient of attn, over all its work items. It is kept in registers, or with QUADS in
// the shared memory that store_share_of_block needs anyway.
template <class C, bool QUADS>
struct AttnShare {
  using A = typename C::A;
  static constexpr int NV = C::NV, VEC = C::VEC;
  A share[QUADS ? 1 : NV][VEC] = {};
  A (&shares)[kWarps][NV * VEC][32];
  int lane, warp;

  __device__ __forceinline__ explicit AttnShare(A (&shared)[kWarps][NV * VEC][32])
      : shares(shared), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {
    if constexpr (QUADS) repeat<VEC>([&](int v) { shares[warp][v][lane] = 0; });
  }
  // The share of column v of this lane's k-th load.
  __device__ __forceinline__ A& at(int k, int v) {
    return QUADS ? shares[warp][v][lane] : share[QUADS ? 0 : k][v];
  }
  // Adds up the shares of a block and stores the sum as the block's row of `parts` [blocks, H, D].
  __device__ __forceinline__ void store(const Place<C>& me, const Tiling& t, void* parts) {
    A total[NV][VEC];
    repeat<NV, VEC>([&](int k, int v) { total[k][v] = at(k, v); });
    store_share_of_block(me, t, total, shares, parts);
  }
};

// scores, dots = the scores and g . v of the own edges of an iteration: sums over columns of the row's
// operands x and b and the neighbours' y_rows and d_rows; feat_rows is added to y. Every lane adds up its own
// columns; then the sums of a head's lanes are reduced into the lanes that own the edges. LINEAR: as in
// PairScore; without it, scores are attn . max(u, 0). KEYS: with features, keys = y + e. S: Own::SHARE. P:
// PairScore.
template <bool LINEAR, bool KEYS, class C, bool FEAT, int B, int K, int N, int S, class P>
__device__ __forceinline__ void pair_scores(
    const Place<C>& me, const Tiling& t, const BackwardParams& p, const P& pair,
    const FeatureTargets<C, FEAT>& features, const PairArrays& arrays, int row, const int (&index)[N],
    const typename C::A (&x)[C::NV][C::VEC], const typename C::A (&b)[C::NV][C::VEC],
    const Raw (&y_rows)[B][C::NV], const Raw (&d_rows)[B][C::NV], const Raw (&feat_rows)[FEAT ? B : 1][C::NV],
    typename C::A (&keys)[K][C::NV][C::VEC], typename C::A (&scores)[S], typename C::A (&dots)[S]) {
  using T = typename C::T;
  constexpr int LPH = C::LPH;
#pragma unroll
  for (int u = 0; u < B; ++u) {
    dots[u] = 0;
    typename P::Sum score;
#pragma unroll
    for (int k = 0; k < C::NV; ++k) {
      typename C::A y[C::VEC];
      Pack<T>::unpack(y_rows[u][k], y);
      features.add_to_key(y, feat_rows[FEAT ? u : 0][k]);
      if constexpr (FEAT && KEYS) copy(keys[u][k], y);
      pair.template add<LINEAR>(k, x[k], y, score);
      dots[u] = dot<T>(b[k], d_rows[u][k], dots[u]);
    }
    if (C::WIDE && t.chunks > 1) {  // the columns that other blocks have
      const int j = of_lane<LPH>(index[u / LPH], u % LPH);
      const int eid = FEAT ? of_lane<LPH>(index[N / 2 + u / LPH], u % LPH) : 0;
      pair.template add_far<LINEAR>(me, t, p.attn, arrays.x, row, arrays.y, j, features.of_key(p.edge), eid,
                                    score);
      dots[u] += me.far_dot(t, arrays.b, row, arrays.d, j);
    }
    scores[u] = LINEAR ? pair.join(score) : score.positive;
  }
  reduce_scatter<S, LPH>(scores, me.hl);
  reduce_scatter<S, LPH>(dots, me.hl);
}

// Adds grad_raw to `sum`, and mass to sum_of_mass, in every column where u = x + y > 0.
template <int VEC, typename A>
__device__ __forceinline__ void add_where_positive(const A (&x)[VEC], const A (&y)[VEC], A grad_raw, A mass,
                                                   A (&sum)[VEC], A (&sum_of_mass)[VEC]) {
  repeat<VEC>([&](int v) {
    const bool positive = x[v] + y[v] > 0;
    if (positive) sum[v] += grad_raw;
    if (positive) sum_of_mass[v] += mass;
  });
}

// Adds an edge's features, times grad_raw L'(u) by column, u = x + y, to the gradient of attn, and writes the
// gradient of the features, attn grad_raw L'(u), in this lane's k-th load.
template <class C, class P>
__device__ __forceinline__ void gradient_of_features(const Place<C>& me, const BackwardParams& p,
                                                     const P& pair, int k, int eid,
                                                     const typename C::A (&x)[C::VEC],
                                                     const typename C::A (&y)[C::VEC], typename C::A grad_raw,
                                                     const Raw& feat_columns,
                                                     typename C::A (&grad_attn)[C::VEC]) {
  using T = typename C::T;
  using A = typename C::A;
  const A grad_raw_negative = grad_raw * pair.slope;
  A feat[C::VEC], grad[C::VEC];
  Pack<T>::unpack(feat_columns, feat);
  repeat<C::VEC>([&](int v) {
    grad[v] = x[v] + y[v] > 0 ? grad_raw : grad_raw_negative;
    grad_attn[v] += grad[v] * feat[v];
  });
  if (!p.grad_feat) return;
  repeat<C::VEC>([&](int v) { grad[v] *= pair.numbers[k][v]; });
  if (me.inside(k)) store_raw(me.address(p.grad_feat, eid, k), Pack<T>::pack(grad));
}

// `sum` is, by column, the sum of grad_raw over the edges with u > 0. Replaces it by the row's gradient, attn
// sum grad_raw L'(u), and if `writes`, adds the row's part of the gradient of attn, x sum grad_raw L'(u), to
// this lane's share. sum_grad_raw: the sum over all edges. x: the row; with QUADS it is read from minus_x
// instead.
template <class C, class P, bool QUADS>
__device__ __forceinline__ void finish_columns(const P& pair, AttnShare<C, QUADS>& grad_attn,
                                               const typename C::A (&x)[C::NV][C::VEC], const Raw& minus_x,
                                               typename C::A sum_grad_raw, bool writes,
                                               typename C::A (&sum)[C::NV][C::VEC]) {
  using A = typename C::A;
  constexpr int VEC = C::VEC;
  repeat<C::NV>([&](int k) {
    A row[VEC], attn[VEC];
    if constexpr (QUADS) {
      Pack<typename C::T>::unpack(negated(minus_x), row);
    } else {
      copy(row, x[k]);
    }
    pair.attn(k, attn);
    repeat<VEC>([&](int v) {
      sum[k][v] = pair.slope * sum_grad_raw + (1 - pair.slope) * sum[k][v];
      A& share = grad_attn.at(k, v);
      if (writes) share += row[v] * sum[k][v];
      sum[k][v] *= attn[v];
    });
  });
}

// grad_query_i = attn sum_j grad_raw_ij L'(u), over the work items of the destinations. Also adds up the
// gradient of attn and writes node_stats for the pass over sources.
template <class C, Edges EDGES, int B>
__global__ void __launch_bounds__(kThreads, (gatv2_destinations_blocks<C, EDGES>()))
    gatv2_destinations_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES);
  constexpr bool QUADS = kQuads<C, Score::additive_v2, EDGES>, EIDS = FEAT || (EDGE && SLOTS == 1);

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                // this lane owns the edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const PairScore<C, Score::additive_v2, QUADS> pair(me, p.attn, A(p.negative_slope));
  A slope = 1;  // there is no LeakyReLU after the score (see the head of this file)
  keep(slope);
  const FeatureTargets<C, FEAT> features(p.edge);
  const Rows<C> values = me.rows(p.value), feats = me.rows(FEAT ? p.edge.feat : nullptr);
  // Unused, because this pass does not read node_stats; but without this line nvcc 13.0 makes more
  // instructions per edge or a larger stack.
  [[maybe_unused]] const Terms<A> residuals = me.template terms<A>(p.node_stats);
  __shared__ A shares[kWarps][NV * VEC][32];
  AttnShare<C, QUADS> grad_attn(shares);

  // ---- 2. Load: a row's own arrays, and those of the neighbours of an iteration.
  Raw x_raw[NV], grad_raw[NV], out_raw[NV];
  A row_term = 0;                            // slope attn . x_i, or with QUADS attn . x_i (see the head)
  RowStats<A> next_stats = {};               // see the head of this file
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw value_rows[B][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] {
    me.load_row(p.query, x_raw, me.row);
    me.load_row(p.grad_out, grad_raw, me.row);
    me.load_row(p.out, out_raw, me.row);
    next_stats = load_stats(me.template at<RowStats<A>>(p.stats, me.row));
  };
  const auto load_edges = [&] {
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    load_rows<C, B>(values, 0, index, value_rows);
  };

  // ---- 3. Begin and open a row: unpack its operands, compute delta0, and set its sums to 0.
  int row;
  bool writes;
  RowStats<A> stats;
  // x, or with QUADS minus_x, is initialized because finish_columns reads it for rows without edges, too, for
  // which open() is not called.
  A x[NV][VEC] = {}, grad[NV][VEC], delta;
  Raw minus_x{};                         // QUADS: -x
  QuadRows quads;                        // QUADS: its two rows are g and attn
  A sum[NV][VEC], sum_of_mass[NV][VEC];  // sums of grad_raw and of mass where u > 0, by column
  A sum_grad_raw, residual, sum_mass;    // sums over all edges of the row
  const auto open = [&] {
    me.unpack_row(x_raw, x, A(1));
    me.unpack_row(grad_raw, grad, A(1));
    row_term = pair.linear(me, t, p.attn, x, p.query, row);
    if constexpr (QUADS) {
      minus_x = negated(x_raw[0]);
      quads.set(me.inside_or_zero(grad_raw[0]), pair.words);
    } else {
      row_term *= pair.slope;
    }
    delta = first_delta(me, t, p, grad, out_raw, row);
  };
  const auto begin = [&](const int at, const int n) {
    row = at, stats = next_stats;
    writes = me.writes && me.slot_of(n) != me.kNoItem;
    delta = 0;
    zero(sum);
    zero(sum_of_mass);
    sum_grad_raw = residual = sum_mass = 0;
  };

  A sum_keys[FEAT ? B : 1][NV][VEC];  // FEAT: v + e of the iteration's edges
  const auto add_edge = [&](const int u, const A grad_raw, const A mass) {
    if constexpr (QUADS) {
      repeat<4>([&](int w) {
        add_where_greater<T>(value_rows[u][0].x[w], minus_x.x[w], grad_raw, sum[0][2 * w], sum[0][2 * w + 1],
                             mass, sum_of_mass[0][2 * w], sum_of_mass[0][2 * w + 1]);
      });
    } else {
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        A y[VEC];
        Pack<T>::unpack(value_rows[u][k], y);
        if constexpr (FEAT) copy(y, sum_keys[u][k]);
        add_where_positive(x[k], y, grad_raw, mass, sum[k], sum_of_mass[k]);
      }
    }
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. Scores (of x and y) and g . v (b . d, see PairArrays), in the lanes that own the edges.
    A scores[Own::SHARE] = {}, dots[Own::SHARE] = {};
    if constexpr (QUADS) {
      float products[4][4];
      scores[0] = row_term + pair.quad_sum(quads, minus_x, value_rows, products);
      dots[0] = first_of_own_edge<C>(products);
    } else {
      pair_scores<true, true>(me, t, p, pair, features, {p.query, p.value, p.grad_out, p.value}, row, index,
                              x, grad, value_rows, value_rows, feat_rows, sum_keys, scores, dots);
    }

    // ---- 5. Softmax weights: compute alpha again, then the gradients of the own edges' scores.
    const auto eid_at = [&](int s) { return eid_of<C, B, EIDS>(me, p.csr, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ true, /*SIGNED*/ true> grads_raw;  // and, in `positive`, mass
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const auto of = gradient_of_own_edge<EIDS>(p, edge, dropout, eid_at, s, valid, scores[s], slope,
                                                 dots[s], stats, delta);
      grads_raw.set(s, of.grad_raw, true);
      sum_grad_raw += of.grad_raw;
      grads_raw.positive[s] = of.mass();  // replaces grad_raw, which `set` has written there, too
      residual += of.ds;
      sum_mass += of.mass();
    }

    // ---- 6. Sums of grad_raw and of mass, by column.
    whole_or_not<B>(
        left, [&](auto whole) { for_edges<LPH, B, decltype(whole)::value>(left, grads_raw, add_edge); });
  };

  // ---- 7. Epilogue: the residual of delta, the row's gradient and its share of that of attn.
  const auto finish = [&](const int row, const int slot) {
    sum_grad_raw = reduce_sum<Own::PERIOD>(sum_grad_raw);
    if (me.shared()) {
      me.across(sum, t);
      sum_grad_raw = me.across(sum_grad_raw, t);
    }
    residual = reduce_sum<Own::PERIOD>(residual);
    sum_mass = reduce_sum<Own::PERIOD>(sum_mass);
    if (me.shared()) {
      me.across(sum_of_mass, t);
      residual = me.across(residual, t);
      sum_mass = me.across(sum_mass, t);
    }
    if (slot >= 0 || p.part_of_rows) residual = 0;
    sum_grad_raw -= residual * sum_mass;
    repeat<NV, VEC>([&](int k, int v) { sum[k][v] -= residual * sum_of_mass[k][v]; });
    if (writes && me.hl == 0 && me.chunk == 0)
      *me.template at<NodeStats<A>>(p.node_stats, row) = {QUADS ? pair.slope * row_term : row_term, stats,
                                                          delta + residual};
    finish_columns(pair, grad_attn, x, minus_x, sum_grad_raw, writes, sum);
    me.store_row(p.grad_query, p.partial_query, sum, A(1), row, slot);
  };
  main_loop<B, gatv2_ahead<C, EDGES>(), EIDS>(me, p.csr, t.items, index, load_item, load_edges, begin, open,
                                              iterate, finish);
  grad_attn.store(me, t, p.grad_attn);
}

// grad_value_j = attn sum_i grad_raw_ij L'(u) + sum_i f alpha g_i, over the work items of the sources. With
// features (LINEAR), the linear part of the score contains e_ij, so that it is added up per edge, and
// row_term is not used. Without features the linear part is row_term + node_stats.term, slope attn . (v_j +
// x_i), or with QUADS attn . v_j + slope attn . x_i. Step 4 then computes only the other part of a score,
// attn . max(u, 0) or with QUADS attn . max(-v, x), and step 5 puts the score together. As quad_sum leaves
// `products` unset then, they get the products with the neighbours' gradients, for g . v.
template <class C, Edges EDGES, int B>
__global__ void __launch_bounds__(kThreads, (gatv2_sources_blocks<C, EDGES>()))
    gatv2_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES);
  constexpr bool QUADS = kQuads<C, Score::additive_v2, EDGES>, EIDS = FEAT || (EDGE && SLOTS == 1);
  constexpr bool LINEAR = FEAT;  // else row_term and the neighbours' statistics have the linear part

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                    // this lane owns edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const PairScore<C, Score::additive_v2, QUADS> pair(me, p.attn, A(p.negative_slope));
  A slope = 1;  // there is no LeakyReLU after the score (see the head of this file)
  keep(slope);
  const FeatureTargets<C, FEAT> features(p.edge);
  const Rows<C> xs = me.rows(p.query), grads = me.rows(p.grad_out),
                feats = me.rows(FEAT ? p.edge.feat : nullptr);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);
  __shared__ A shares[kWarps][NV * VEC][32];
  AttnShare<C, QUADS> grad_attn(shares);

  // ---- 2. Load: a row's own array, and those of the neighbours of an iteration.
  Raw value_raw[NV];
  A row_term = 0;  // slope attn . v_j, or with QUADS attn . v_j (see the head of this file)
  NodeStats<A> stats[SLOTS];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw x_rows[B][NV], grad_rows[B][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] { me.load_row(p.value, value_raw, me.row); };
  const auto load_edges = [&] {
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    load_rows<C, B>(xs, 0, index, x_rows);
    load_rows<C, B>(grads, 0, index, grad_rows);
  };

  // ---- 3. Begin and open a row: unpack its operand, and set its sums to 0.
  int row;
  bool writes;
  A value[NV][VEC] = {};               // initialized: finish() reads it even if open() was not called
  Raw minus_value{};                   // QUADS: -v; initialized for the same reason
  QuadRows quads;                      // QUADS: its two rows are v and attn
  A sum[NV][VEC], sum_value[NV][VEC];  // sum: of grad_raw where u > 0, by column; sum_value: of f alpha g
  A sum_attn[FEAT ? NV : 1][VEC];      // grad_raw L'(u) e over this sub-warp's edges: part of grad_attn
  A sum_grad_raw;                      // over all edges of the row
  const auto open = [&] {
    me.unpack_row(value_raw, value, A(1));
    row_term = pair.linear(me, t, p.attn, value, p.value, row);
    if constexpr (QUADS) {
      minus_value = negated(value_raw[0]);
      quads.set(me.inside_or_zero(value_raw[0]), pair.words);
    } else {
      row_term *= pair.slope;
    }
  };
  const auto begin = [&](const int at, const int n) {
    row = at;
    writes = me.writes && me.slot_of(n) != me.kNoItem;
    zero(sum);
    zero(sum_value);
    zero(sum_attn);
    sum_grad_raw = 0;
  };

  // Adds edge u of the chunk to the sums; with features, also writes the gradient of its features.
  const auto add_edge = [&](const int u, const A grad_raw, [[maybe_unused]] const int eid) {
    if constexpr (QUADS) {
      repeat<4>([&](int w) {
        add_where_greater<T>(x_rows[u][0].x[w], minus_value.x[w], grad_raw, sum[0][2 * w], sum[0][2 * w + 1]);
      });
    } else {
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        A y[VEC];
        Pack<T>::unpack(x_rows[u][k], y);
        features.add_to_key(y, feat_rows[FEAT ? u : 0][k]);
        repeat<VEC>([&](int v) {
          if (value[k][v] + y[v] > 0) sum[k][v] += grad_raw;
        });
        if constexpr (FEAT)
          gradient_of_features(me, p, pair, k, eid, value[k], y, grad_raw, feat_rows[u][k], sum_attn[k]);
      }
    }
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. Scores (of x and y) and g . v (b . d, see PairArrays), in the lanes that own the edges.
    A scores[Own::SHARE] = {}, dots[Own::SHARE] = {};
    if constexpr (QUADS) {
      float products[4][4];
      scores[0] = pair.template quad_sum<LINEAR>(quads, minus_value, x_rows, products);
      repeat<4>([&](int u) { quads.template multiply_by<T>(grad_rows[u][0], products[u]); });
      dots[0] = first_of_own_edge<C>(products);
    } else {
      A no_keys[1][NV][VEC];
      pair_scores<LINEAR, false>(me, t, p, pair, features, {p.value, p.query, p.value, p.grad_out}, row,
                                 index, value, value, x_rows, grad_rows, feat_rows, no_keys, scores, dots);
    }

    // ---- 5. Softmax weights: compute alpha again, then the gradients of the own edges' scores.
    const auto eid_at = [&](int s) { return eid_of<C, B, EIDS>(me, p.reverse, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ false, /*SIGNED*/ true> weights, grads_raw;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const A score = LINEAR ? scores[s] : fma(1 - pair.slope, scores[s], row_term + stats[s].term);
      const auto of = gradient_of_own_edge<EIDS>(p, edge, dropout, eid_at, s, valid, score, slope, dots[s],
                                                 stats[s].row, stats[s].delta);
      weights.set(s, of.weight(), true);
      grads_raw.set(s, of.grad_raw, true);
      sum_grad_raw += of.grad_raw;
      if constexpr (EDGE) {  // one lane per edge and head writes
        if (valid && me.head_ok && me.hl < Own::PERIOD && me.chunk == 0) of.store(p);
      }
    }

    // ---- 6. Sums of the neighbours' gradients by weight, and of grad_raw by column.
    whole_or_not<B>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, weights, grad_rows, sum_value, sum_value);
      if constexpr (FEAT) {
        for_edges<LPH, B, FULL>(left, grads_raw, weights, index,
                                [&](int u, A grad_raw, A, int eid) { add_edge(u, grad_raw, eid); });
      } else {
        for_edges<LPH, B, FULL>(left, grads_raw, [&](int u, A grad_raw, A) { add_edge(u, grad_raw, 0); });
      }
    });
  };

  // ---- 7. Epilogue: the row's gradient, and its share of the gradient of attn.
  const auto finish = [&](const int row, const int slot) {
    sum_grad_raw = reduce_sum<Own::PERIOD>(sum_grad_raw);
    if (me.shared()) {
      me.across(sum, t);
      me.across(sum_value, t);
      sum_grad_raw = me.across(sum_grad_raw, t);
    }
    finish_columns(pair, grad_attn, value, minus_value, sum_grad_raw, writes, sum);
    repeat<NV, VEC>([&](int k, int v) {
      if constexpr (FEAT) grad_attn.at(k, v) += sum_attn[k][v];  // not only if `writes`: own edges' part
      sum_value[k][v] += sum[k][v];
    });
    me.store_row(p.grad_value, p.partial_value, sum_value, A(1), row, slot);
  };
  main_loop<B, gatv2_ahead<C, EDGES>(), EIDS>(me, p.reverse, t.items, index, load_item, load_edges, begin,
                                              open, iterate, finish);
  grad_attn.store(me, t, p.grad_attn);
}

}  // namespace dfgnn::cuda
