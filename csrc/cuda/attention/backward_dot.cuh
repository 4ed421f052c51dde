// Backward of dot attention: a pass over destinations for the gradient of the query, then one over sources
// for those of key and value. The second one computes alpha and ds of every edge again (dot_sources_kernel),
// or reads what the first one saved (dot_saved_sources_kernel). Formulas: params.h. Words, steps and names:
// csrc/cuda/README.md.
#pragma once

#include "backward_steps.cuh"
#include "scores.cuh"

namespace dfgnn::cuda {

// Projected features x of the edges in the pass over destinations (EdgeAttr in params.h): their part of the
// scores and of g . v, and the sum b = sum_j grad_raw_ij x_ij of a row. ON = false (below) does nothing.
template <class C, bool ON, int B>
struct ProjectedDestinations {
  using T = typename C::T;
  using A = typename C::A;
  static constexpr int F = C::FEATS;
  AttrLanes<C, true> lanes;
  ItemFeatures<C> items;  // rows in shared memory: W^T q, later overwritten by b, and (k = 1) W^T g
  T x[B][F];              // features of an iteration's edges
  A query[F], grad[F], sum[1][F],
      mass[1][F];  // the row's W^T q and W^T g, and sums of x by grad_raw and by mass

  // Multiplies q and g of the warp's items by W^T.
  __device__ __forceinline__ ProjectedDestinations(const Place<C>& me, const Tiling& t,
                                                   const BackwardParams& p)
      : lanes(me, p.attr) {
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    float* const to = products.template shared<2>();
    products.onto(p.query, to);
    products.onto(p.grad_out, to + products.size());
    items = {me, products, to};
    __syncwarp();
  }
  template <int S>
  __device__ __forceinline__ void load(const int (&index)[S]) {
    lanes.load(index, x);
  }
  __device__ __forceinline__ void open(int item) {
    lanes.load_row(items.row(item), query);
    lanes.load_row(items.row(item, 1), grad);
  }
  __device__ __forceinline__ void clear() {
    zero(sum);
    zero(mass);
  }
  __device__ __forceinline__ void add_to_scores(int u, A& score, A& dot_gv) const {
    score = lanes.dot(query, x[u], score);
    dot_gv = lanes.dot(grad, x[u], dot_gv);
  }
  __device__ __forceinline__ void add_to_sums(int u, A grad_raw, A edge_mass) {
    lanes.axpy(sum[0], grad_raw, x[u]);
    lanes.axpy(mass[0], edge_mass, x[u]);
  }
  // Stores b of a whole row in shared memory, for finish(), or of a row chunk in its partial-result slot.
  __device__ __forceinline__ void store(const Place<C>& me, const Tiling& t, A residual, int slot, int item) {
    repeat<F>([&](int f) {
      if (me.shared()) {
        sum[0][f] = me.across(sum[0][f], t);
        mass[0][f] = me.across(mass[0][f], t);
      }
      sum[0][f] -= residual * mass[0][f];
    });
    lanes.store_row(me, sum[0], A(1), slot, items.row(item));
  }
  // Adds scale W b to the warp's whole rows (project_splits_kernel: to split ones). Saves b in attr.sums.
  __device__ __forceinline__ void finish(const Place<C>& me, const Tiling& t, const BackwardParams& p) const {
    __syncwarp();
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.back(products.template shared<2>(), p.grad_query, float(p.scale), p.attr.sums);
  }
};
template <class C, int B>
struct ProjectedDestinations<C, false, B> {
  __device__ __forceinline__ ProjectedDestinations(const Place<C>&, const Tiling&, const BackwardParams&) {}
  template <class... X>
  __device__ __forceinline__ void load(const X&...) {}
  template <class... X>
  __device__ __forceinline__ void open(const X&...) {}
  __device__ __forceinline__ void clear() {}
  template <class... X>
  __device__ __forceinline__ void add_to_scores(const X&...) const {}
  template <class... X>
  __device__ __forceinline__ void add_to_sums(const X&...) {}
  template <class... X>
  __device__ __forceinline__ void store(const X&...) {}
  template <class... X>
  __device__ __forceinline__ void finish(const X&...) const {}
};

// Adds the products of this lane's k-th load to `score`, q . k, and to dot_gv, g . v, of an edge. In the pass
// over sources q and g are the neighbour's: key and query change places, and so do value and grad.
template <class C>
__device__ __forceinline__ void add_columns(const Place<C>& me, int k, const typename C::A (&query)[C::VEC],
                                            const typename C::A (&grad)[C::VEC], const Raw& key_columns,
                                            const Raw& value_columns, typename C::A& score,
                                            typename C::A& dot_gv) {
  // Returns before unpacking: else the compiler keeps all rows in float32. With LPH = 1 all loads are inside.
  if (C::LPH > 1 && !me.inside(k)) return;
  typename C::A key[C::VEC];
  Pack<typename C::T>::unpack(key_columns, key);
  for (int v = 0; v < C::VEC; ++v) score += query[v] * key[v];
  dot_gv = dot<typename C::T>(grad, value_columns, dot_gv);
}
// The same with the edge's features added to the key, the value or both. sum_key = k, or k + e if in the key.
template <class C>
__device__ __forceinline__ void add_columns(const Place<C>& me, const FeatureTargets<C, true>& features,
                                            int k, const typename C::A (&query)[C::VEC],
                                            const typename C::A (&grad)[C::VEC], const Raw& key_columns,
                                            const Raw& value_columns, const Raw& feat_columns,
                                            typename C::A (&sum_key)[C::VEC], typename C::A& score,
                                            typename C::A& dot_gv) {
  using A = typename C::A;
  A key[C::VEC], value[C::VEC];
  Pack<typename C::T>::unpack(key_columns, key);
  features.add_to_key(key, feat_columns);
  copy(sum_key, key);
  const A score_before = score, dot_before = dot_gv;
  for (int v = 0; v < C::VEC; ++v) score += query[v] * key[v];
  Pack<typename C::T>::unpack(value_columns, value);
  features.add_to_value(value, feat_columns);
  repeat<C::VEC>([&](int v) { dot_gv += grad[v] * value[v]; });
  if (C::LPH > 1 && !me.inside(k)) score = score_before, dot_gv = dot_before;  // undone, without a branch
}

// scores, dots = the scores, not scaled yet, and g . v of the own edges: sums over columns of the row's
// operands x and b and the neighbours' y_rows and d_rows, to which feat_rows are added. Every lane adds up
// its own columns; the sums of a head's lanes then go to those that own the edges. With FEAT, keys = y (+ e).
template <class C, bool FEAT, int B, int K, int N, int S, class Projected>
__device__ __forceinline__ void pair_scores(
    const Place<C>& me, const Tiling& t, const BackwardParams& p, const FeatureTargets<C, FEAT>& features,
    const Projected& projected, const PairArrays& arrays, int row, const int (&index)[N],
    const typename C::A (&x)[C::NV][C::VEC], const typename C::A (&b)[C::NV][C::VEC],
    const Raw (&y_rows)[B][C::NV], const Raw (&d_rows)[B][C::NV], const Raw (&feat_rows)[FEAT ? B : 1][C::NV],
    typename C::A (&keys)[K][C::NV][C::VEC], typename C::A (&scores)[S], typename C::A (&dots)[S]) {
  constexpr int LPH = C::LPH;
#pragma unroll
  for (int u = 0; u < B; ++u) {
    typename C::A score = 0;
    dots[u] = 0;
#pragma unroll
    for (int k = 0; k < C::NV; ++k) {
      if constexpr (FEAT) {
        add_columns(me, features, k, x[k], b[k], y_rows[u][k], d_rows[u][k], feat_rows[u][k], keys[u][k],
                    score, dots[u]);
      } else {
        add_columns(me, k, x[k], b[k], y_rows[u][k], d_rows[u][k], score, dots[u]);
      }
    }
    if (C::WIDE && t.chunks > 1) {  // the columns that other blocks have
      const int j = of_lane<LPH>(index[u / LPH], u % LPH);
      const int eid = FEAT ? of_lane<LPH>(index[N / 2 + u / LPH], u % LPH) : 0;
      score += me.far_dot(t, arrays.x, row, arrays.y, j, features.of_key(p.edge), eid);
      dots[u] += me.far_dot(t, arrays.b, row, arrays.d, j, features.of_value(p.edge), eid);
    }
    projected.add_to_scores(u, score, dots[u]);
    scores[u] = score;
  }
  reduce_scatter<S, LPH>(scores, me.hl);
  reduce_scatter<S, LPH>(dots, me.hl);
}

template <class C, Edges EDGES, bool SAVES>
constexpr Ahead dot_destinations_ahead() {  // measured; main_loop.cuh explains why kernels differ
  constexpr bool FEAT = has_features(EDGES), NARROW = sizeof(typename C::T) == 2;
  return NARROW && (FEAT || (C::LPH == 1 && !SAVES)) ? Ahead::rows : Ahead::none;
}

// grad_query_i = scale sum_j grad_raw_ij (k_j + e_ij), over the work items of the destinations. SAVES: alpha
// and ds of every edge are stored in p.handed, for the pass over sources.
template <class C, Edges EDGES, int B, bool SAVES>
__global__ void __launch_bounds__(kThreads, (kMinBlocks < C, has_features(EDGES) || projects(EDGES)
                                                                 ? Held::many_rows
                                                                 : Held::four_rows >))
    dot_destinations_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES), PROJ = projects(EDGES);
  // SAVES needs the id of every edge (FEAT and PROJ imply SAVES). Else: EIDS in lanes.cuh.
  constexpr bool EIDS = SAVES || (EDGE && SLOTS == 1);

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.csr);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                // this lane owns the edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  const FeatureTargets<C, FEAT> features(p.edge);
  const Rows<C> keys = me.rows(p.key), values = me.rows(p.value);
  const Rows<C> feats = me.rows(FEAT ? p.edge.feat : nullptr);
  // Unused, but without this line nvcc 13.0 makes more instructions per edge or a larger stack.
  [[maybe_unused]] const Terms<A> residuals = me.template terms<A>(p.node_stats);
  ProjectedDestinations<C, PROJ, B> projected(me, t, p);

  // ---- 2. Load: a row's own arrays, and those of the neighbours of an iteration.
  Raw query_raw[NV], grad_raw[NV], out_raw[NV];
  RowStats<A> next_stats = {};               // load_item() sets it ahead, begin() copies it to `stats`
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw key_rows[B][NV], value_rows[B][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] {
    me.load_row(p.query, query_raw, me.row);
    me.load_row(p.grad_out, grad_raw, me.row);
    me.load_row(p.out, out_raw, me.row);
    next_stats = load_stats(me.template at<RowStats<A>>(p.stats, me.row));
  };
  const auto load_edges = [&] {
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    load_rows<C, B>(keys, 0, index, key_rows);
    load_rows<C, B>(values, 0, index, value_rows);
    projected.load(index);
  };

  // ---- 3. Begin and open a row: unpack its operands, compute delta0, and set its sums to 0.
  int row, item;
  bool writes;  // me.writes, if the item exists
  RowStats<A> stats;
  // `= {}`: for the compiler only. Where open() is skipped, for rows without edges, nothing reads the query.
  A query[NV][VEC] = {}, grad[NV][VEC], delta;
  A sum[NV][VEC], sum_of_mass[NV][VEC], residual;  // sum, sum_of_mass: of keys, by grad_raw and by mass
  const auto open = [&] {
    me.unpack_row(query_raw, query, A(1));
    me.unpack_row(grad_raw, grad, A(1));
    projected.open(item);
    delta = first_delta(me, t, p, grad, out_raw, row);
  };
  const auto begin = [&](const int at, const int n) {
    row = at, item = n, stats = next_stats;
    writes = me.writes && me.slot_of(n) != me.kNoItem;
    delta = 0;
    zero(sum);
    zero(sum_of_mass);
    projected.clear();
    residual = 0;
  };

  A sum_keys[FEAT ? B : 1][NV][VEC];  // FEAT: k, or k + e, of the iteration's edges
  const auto add_sum_key = [&](const int u, const A grad_raw, const A mass) {
    add_scaled(sum, grad_raw, sum_of_mass, mass, sum_keys[u]);
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. Scores and g . v, in the lanes that own the edges.
    A scores[Own::SHARE] = {}, dots[Own::SHARE] = {};
    pair_scores(me, t, p, features, projected, {p.query, p.key, p.grad_out, p.value}, row, index, query, grad,
                key_rows, value_rows, feat_rows, sum_keys, scores, dots);

    // ---- 5. Softmax weights: compute alpha again, then the gradients of the own edges' scores.
    const auto eid_at = [&](int s) { return eid_of<C, B, EIDS>(me, p.csr, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ true, /*SIGNED*/ true> grads_raw;  // and, in `positive`, mass
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const auto of = gradient_of_own_edge<EIDS>(p, edge, dropout, eid_at, s, valid, scores[s] * A(p.scale),
                                                 slope, dots[s], stats, delta);
      grads_raw.set(s, of.grad_raw, true);  // sets both weights to grad_raw
      grads_raw.positive[s] = of.mass();    // replaces the second one
      residual += of.ds;
      if constexpr (SAVES) {  // one lane per edge and head writes: others hold copies
        if (valid && me.head_ok && me.hl < Own::PERIOD && me.chunk == 0) {
          *me.template at<SavedEdge<A>>(p.handed, of.eid) = {PROJ || of.z.positive ? of.alpha : -of.alpha,
                                                             of.ds};
          if constexpr (EDGE && !PROJ) of.store_of_destinations(p);
        }
      }
    }

    // ---- 6. Sums of the neighbours' keys, weighted by grad_raw and by mass.
    whole_or_not<B>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      if constexpr (FEAT) {
        for_edges<LPH, B, FULL>(left, grads_raw, add_sum_key);
      } else {
        add_rows<C, FULL, true, B>(
            0, left, grads_raw, key_rows, sum, sum_of_mass,
            [&](int u, A grad_raw, A mass) { projected.add_to_sums(u, grad_raw, mass); });
      }
    });
  };

  // ---- 7. Epilogue: the residual of delta, and the row's gradient. item, stats, delta: still this item's.
  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) me.across(sum, t);
    residual = reduce_sum<Own::PERIOD>(residual);
    if (me.shared()) {
      me.across(sum_of_mass, t);
      residual = me.across(residual, t);
    }
    if (slot >= 0 || p.part_of_rows) residual = 0;
    repeat<NV, VEC>([&](int k, int v) { sum[k][v] -= residual * sum_of_mass[k][v]; });
    projected.store(me, t, residual, slot, item);
    if (writes && me.hl == 0 && me.chunk == 0) {  // items of one split row write the same: residual is 0
      if constexpr (SAVES) {
        *me.template at<A>(p.node_stats, row) = residual;
      } else {
        *me.template at<NodeStats<A>>(p.node_stats, row) = {A(0), stats, delta + residual};
      }
    }
    me.store_row(p.grad_query, p.partial_query, sum, A(p.scale), row, slot);
  };
  constexpr Ahead AHEAD = dot_destinations_ahead<C, EDGES, SAVES>();
  main_loop<B, AHEAD, EIDS>(me, p.csr, t.items, index, load_item, load_edges, begin, open, iterate, finish);
  projected.finish(me, t, p);
}

// grad_key_j = scale sum_i grad_raw_ij q_i and grad_value_j = sum_i f alpha g_i, over the work items of the
// sources. EDGES: none or scalars.
template <class C, Edges EDGES, int B>
__global__ void __launch_bounds__(kThreads,
                                  (kMinBlocks < C, C::LPH == 1 ? Held::many_rows : Held::four_rows >))
    dot_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool EDGE = has_options(EDGES), EIDS = EDGE && SLOTS == 1;
  static_assert(!has_features(EDGES) && !projects(EDGES));

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                    // this lane owns edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  const Rows<C> queries = me.rows(p.query), grads = me.rows(p.grad_out);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);
  const FeatureTargets<C, false> no_features(p.edge);  // these four are unused arguments of pair_scores
  const ProjectedDestinations<C, false, B> no_projection(me, t, p);
  Raw no_rows[1][NV];
  A no_keys[1][NV][VEC];

  // ---- 2. Load: a row's own arrays, and those of the neighbours of an iteration.
  Raw key_raw[NV], value_raw[NV];
  NodeStats<A> stats[SLOTS];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw query_rows[B][NV], grad_rows[B][NV];
  const auto load_item = [&] {
    me.load_row(p.key, key_raw, me.row);
    me.load_row(p.value, value_raw, me.row);
  };
  const auto load_edges = [&] {
    repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    load_rows<C, B>(queries, 0, index, query_rows);
    load_rows<C, B>(grads, 0, index, grad_rows);
  };

  // ---- 3. Begin and open a row: unpack its operands, and set its sums to 0.
  int row;
  A key[NV][VEC] = {}, value[NV][VEC];                     // `= {}`: for the compiler only
  A sum_key[NV][VEC], sum_value[NV][VEC], unused[1][VEC];  // unused: add_rows has one sum here
  const auto open = [&] {
    me.unpack_row(key_raw, key, A(1));
    me.unpack_row(value_raw, value, A(1));
  };
  const auto begin = [&](const int at, int) {
    row = at;
    zero(sum_key);
    zero(sum_value);
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. Scores and g . v, in the lanes that own the edges.
    A scores[Own::SHARE] = {}, dots[Own::SHARE] = {};
    pair_scores(me, t, p, no_features, no_projection, {p.key, p.query, p.value, p.grad_out}, row, index, key,
                value, query_rows, grad_rows, no_rows, no_keys, scores, dots);

    // ---- 5. Softmax weights: compute alpha again, then the gradients of the own edges' scores.
    const auto eid_at = [&](int s) { return eid_of<C, B, EIDS>(me, p.reverse, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ false, /*SIGNED*/ true> weights, grads_raw;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const auto of = gradient_of_own_edge<EIDS>(p, edge, dropout, eid_at, s, valid, scores[s] * A(p.scale),
                                                 slope, dots[s], stats[s].row, stats[s].delta);
      weights.set(s, of.weight(), true);
      grads_raw.set(s, of.grad_raw, true);
      if constexpr (EDGE) {  // one lane per edge and head writes
        if (valid && me.head_ok && me.hl < Own::PERIOD && me.chunk == 0) of.store(p);
      }
    }

    // ---- 6. Sums of the neighbours' gradients by weight, and of their queries by grad_raw.
    whole_or_not<B>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, weights, grad_rows, sum_value, sum_value);
      add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, grads_raw, query_rows, sum_key, unused);
    });
  };

  // ---- 7. Epilogue: the row's gradients.
  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) {
      me.across(sum_key, t);
      me.across(sum_value, t);
    }
    me.store_row(p.grad_key, p.partial_key, sum_key, A(p.scale), row, slot);
    me.store_row(p.grad_value, p.partial_value, sum_value, A(1), row, slot);
  };
  constexpr Ahead AHEAD = sizeof(T) == 2 ? Ahead::rows : Ahead::own;
  main_loop<B, AHEAD, EIDS>(me, p.reverse, t.items, index, load_item, load_edges, begin, open, iterate,
                            finish);
}

// The same gradients, from alpha and ds of the edges in p.handed: no score is computed, no feature row read.
template <class C, Edges EDGES, int B>
__global__ void __launch_bounds__(kThreads,
                                  (kMinBlocks < C, projects(EDGES)                    ? Held::four_rows
                                                   : EDGES == Edges::features_scalars ? Held::two_rows
                                                                                      : Held::sums >))
    dot_saved_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES), PROJ = projects(EDGES);

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);  // on CUDA D = Dv
  const int own = me.hl % Own::PERIOD;                    // this lane owns edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  // The gradient of an edge's features is in_key times the key's gradient, which contains the scale, plus
  // in_value times the value's.
  A in_key = FEAT && p.edge.feat_in_key ? A(p.scale) : A(0);
  const A in_value = FEAT && p.edge.feat_in_value;
  keep(in_key);
  const Rows<C> queries = me.rows(p.query), grads = me.rows(p.grad_out);
  const Terms<A> residuals = me.template terms<A>(p.node_stats);
  const auto saved_at = [&](int eid) { return me.template at<SavedEdge<A>>(p.handed, eid); };

  // ---- 2. Load: the arrays of an iteration's neighbours and edges.
  A residual[SLOTS];
  int index[2 * SLOTS] = {};  // neighbours, and the edges' ids
  Raw query_rows[B][NV], grad_rows[B][NV];
  SavedEdge<A> saved[SLOTS];
  const auto load_edges = [&] {
    repeat<SLOTS>([&](int s) {
      residual[s] = __ldg(residuals.at(index[s]));
      saved[s] = *saved_at(index[SLOTS + s]);
    });
    load_rows<C, B>(queries, 0, index, query_rows);
    load_rows<C, B>(grads, 0, index, grad_rows);
  };

  // ---- 3. Begin a row: set its sums to 0.
  A sum_key[NV][VEC], sum_value[NV][VEC], unused[1][VEC];  // unused: add_rows has one sum here
  const auto begin = [&](int, int) {
    zero(sum_key);
    zero(sum_value);
  };

  // Adds an edge with features to the sums, and writes the gradient of its features.
  [[maybe_unused]] const auto add_edge = [&](const int u, const A grad_raw, const A weight, const int eid) {
#pragma unroll
    for (int k = 0; k < NV; ++k) {
      A query[VEC], grad[VEC];
      Pack<T>::unpack(query_rows[u][k], query);
      repeat<VEC>([&](int v) { sum_key[k][v] += grad_raw * query[v]; });
      Pack<T>::unpack(grad_rows[u][k], grad);
      repeat<VEC>([&](int v) { sum_value[k][v] += weight * grad[v]; });
      if (p.grad_feat) {
        repeat<VEC>([&](int v) { grad[v] = in_key * grad_raw * query[v] + in_value * weight * grad[v]; });
        if (me.inside(k)) store_raw(me.address(p.grad_feat, eid, k), Pack<T>::pack(grad));
      }
    }
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 5. Softmax weights: read the own edges' alpha and ds, and apply the options on edges to them.
    const auto eid_at = [&](int s) { return eid_of<C, B, true>(me, p.reverse, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ false, /*SIGNED*/ true> weights, grads_raw;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const A mask = dropout.factor(s);
      SavedEdge<A> now = {};  // its alpha becomes f alpha, and its ds becomes grad_raw
      int eid = 0;
      if (valid) {
        eid = index[SLOTS + s];
        const bool positive = PROJ || saved[s].alpha > 0;
        const A alpha = abs(saved[s].alpha), ds = saved[s].ds - residual[s] * alpha;
        const A dz = positive ? ds : ds * slope;
        now = {alpha, dz};
        if constexpr (EDGE) now.alpha *= mask * edge.weight(eid);
        if constexpr (EDGE && !PROJ) {
          now.ds *= edge.gate(eid);
          if (me.head_ok && me.hl < Own::PERIOD && me.chunk == 0) {
            const int64_t at = int64_t(eid) * me.heads + me.head;
            if (p.grad_bias) static_cast<A*>(p.grad_bias)[at] = p.edge.bias_after ? ds : dz;
            if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] *= dz;  // it holds raw until now
          }
        }
      }
      weights.set(s, now.alpha, true);
      grads_raw.set(s, now.ds, true);
      if (PROJ && p.attr.keep_edges) {
        __syncwarp();  // until all lanes have read the edge in p.handed that `now` replaces
        if (valid && me.head_ok && me.hl < Own::PERIOD) *saved_at(eid) = now;
      }
    }

    // ---- 6. Sums of the neighbours' gradients by weight, and of their queries by grad_raw.
    whole_or_not<B>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      if constexpr (FEAT) {
        for_edges<LPH, B, FULL>(left, grads_raw, weights, index, add_edge);
      } else {
        add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, weights, grad_rows, sum_value, sum_value);
        add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, grads_raw, query_rows, sum_key, unused);
      }
    });
  };

  // ---- 7. Epilogue: the row's gradients.
  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) {
      me.across(sum_key, t);
      me.across(sum_value, t);
    }
    me.store_row(p.grad_key, p.partial_key, sum_key, A(p.scale), row, slot);
    me.store_row(p.grad_value, p.partial_value, sum_value, A(1), row, slot);
  };
  constexpr Ahead AHEAD = FEAT || PROJ ? Ahead::none : Ahead::all;
  main_loop<B, AHEAD, true>(me, p.reverse, t.items, index, [] {}, load_edges, begin, [] {}, iterate, finish);
}

}  // namespace dfgnn::cuda
