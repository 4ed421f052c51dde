// Backward of the additive score (GAT): a kernel for the statistics of the destinations, then one pass over
// sources, which computes no product per edge (additive_sources_kernel), or g . v of every edge
// (gat_edge_sources_kernel). Formulas: params.h. Words, steps and names: csrc/cuda/README.md.
#pragma once

#include "backward_steps.cuh"

namespace dfgnn::cuda {

// How many pairs (row, head) each group of LPH lanes of prepare_additive_kernel takes at a time, so that
// enough loads are in flight.
inline constexpr int kPairs = 2;

// Computes delta = g . (out - out_bias) (+ row_sums), writes the statistics that the pass over sources reads,
// and grad_alpha_dst = (1 - slope) (g . positive - delta positive_mass), unless `positive` is null.
template <typename T, int LPH>
__global__ void __launch_bounds__(kThreads) prepare_additive_kernel(const BackwardParams p) {
  using A = Acc<T>;
  follow();
  const int64_t total = p.shape.num_dst * p.shape.heads;
  const int64_t group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / LPH;
  const int64_t groups = int64_t(gridDim.x) * kThreads / LPH;
  const int dim = p.shape.value_dim, hl = threadIdx.x % LPH;
  A delta[kPairs] = {}, dot_positive[kPairs] = {};
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t pair = group + k * groups;
    for (int column = hl * kVec<T>; pair < total && column < dim; column += LPH * kVec<T>) {
      const int64_t at = pair * dim + column;
      A g[kVec<T>];
      Pack<T>::unpack(load_raw(static_cast<const T*>(p.grad_out) + at), g);
      A out[kVec<T>], bias[kVec<T>] = {};
      Pack<T>::unpack(load_raw(static_cast<const T*>(p.out) + at), out);
      if (p.out_bias)
        Pack<T>::unpack(load_raw(static_cast<const T*>(p.out_bias) + pair % p.shape.heads * dim + column),
                        bias);
      repeat<kVec<T>>([&](int c) { delta[k] += g[c] * (out[c] - bias[c]); });
      if (p.positive)
        dot_positive[k] = dot<T>(g, load_raw(static_cast<const T*>(p.positive) + at), dot_positive[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t pair = group + k * groups;
    delta[k] = reduce_sum<LPH>(delta[k]);
    dot_positive[k] = reduce_sum<LPH>(dot_positive[k]);
    if (pair >= total || hl) continue;
    if (p.row_sums) delta[k] += static_cast<const A*>(p.row_sums)[pair];
    const RowStats<A> row = load_stats(static_cast<const RowStats<A>*>(p.stats) + pair);
    static_cast<NodeStats<A>*>(p.node_stats)[pair] = {
        p.alpha_dst ? static_cast<const A*>(p.alpha_dst)[pair] : A(0), row, delta[k]};
    // The gradient is 0 where one edge has all the weight (log_sum = 0), and rounding must not change that.
    if (p.positive)
      static_cast<A*>(p.grad_alpha_dst)[pair] =
          (row.log_sum == 0 ? A(0) : 1 - A(p.negative_slope)) *
          (dot_positive[k] - delta[k] * static_cast<const A*>(p.positive_mass)[pair]);
  }
}

// The pass over sources where no g . v of a single edge is needed: without gradients of edge tensors, without
// grad_attention, gate and features of the edges, and for heads that a warp's registers hold. EDGE: the edges
// have scalars (bias, mask, weight or dropout). It gathers only g, and reduces nothing per edge. With c_ij =
// f alpha LeakyReLU'(z)
//   sum_i c_ij (g_i . v_j) = v_j . (slope * sum_i f alpha g_i + (1 - slope) * sum_{z > 0} f alpha g_i),
// so that the main loop computes only two weighted sums, as forward does. Where each edge of a work item has
// all of its destination's weight, the item's part of grad_alpha_src is 0 but for rounding, and is set to 0.
// CHUNK: B edges, or LPH if this is more; add_chunk then loads the rows after the first B. As CHUNK >= LPH,
// no two lanes of a head own the same edge (PERIOD is LPH), and OwnEdges is not needed.
template <class C, bool EDGE, int B>
__global__ void __launch_bounds__(kThreads, kMinBlocks<C, Held::one_row>)
    additive_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr int CHUNK = B > LPH ? B : LPH, SLOTS = CHUNK / LPH;

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  const Rows<C> grads = me.rows(p.grad_out);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);

  // ---- 2. Load: a row's term, and the arrays of an iteration's neighbours.
  A alpha_src;
  NodeStats<A> stats[SLOTS];
  constexpr bool EIDS = EDGE && SLOTS == 1;
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw rows[B][NV];
  const auto load_item = [&] { alpha_src = *me.template at<A>(p.alpha_src, me.row); };  // only for iterate()
  const auto load_edges = [&] {
    repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    load_rows<C, B>(grads, 0, index, rows);
  };

  // ---- 3. Begin a row: load its value, and set its sums to 0. The value is loaded here and not in
  // load_item(), which may run for the next item before finish() reads value_row.
  Raw value_row[NV];
  // acc, acc_positive: sums of g by weight, over all edges and over those with z > 0. sum_delta: of alpha
  // L'(z) delta. shared_weight: of 1 - alpha, 0 if every edge has all of its destination's weight.
  A acc[NV][VEC], acc_positive[NV][VEC], sum_delta, shared_weight;
  const auto begin = [&](int row, int) {
    me.load_row(p.value, value_row, row);
    zero(acc);
    zero(acc_positive);
    sum_delta = shared_weight = 0;
  };

  const auto iterate = [&](const int done, const int left) {
    // ---- 5. Softmax weights f alpha, and the sum of alpha L'(z) delta.
    Weights<A, SLOTS, true, EDGE> weights;
    const auto eid_at = [&](int s) { return eid_of<C, CHUNK, EIDS>(me, p.reverse, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + me.hl < left;
      // Without edge tensors the id is not used: a load is left out, unless ids were loaded ahead.
      const int eid = EDGE && (EIDS || edge.tensors) ? eid_at(s) : 0;
      const A factor = dropout.factor(s) * (EDGE ? edge.weight(eid) : A(1));
      const EdgeScore<T, EDGE> z(edge, alpha_src + stats[s].term, slope, eid);
      A alpha = stats[s].row.alpha(z.score);
      alpha = valid ? alpha : A(0);  // no branch, so that exponentials of several edges overlap
      sum_delta += valid ? alpha * z.slope * stats[s].delta : A(0);
      shared_weight += valid ? 1 - alpha : A(0);
      weights.set(s, alpha * factor, z.positive);
    }
    // ---- 6. Weighted sums of the neighbours' rows: over all edges, and over those with z > 0.
    whole_or_not<CHUNK>(left, [&](auto whole) {
      add_chunk<C, decltype(whole)::value, true, B, CHUNK>(grads, left, index, weights, rows, acc,
                                                           acc_positive);
    });
  };

  // ---- 7. Epilogue: the row's gradients.
  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) {
      me.across(acc, t);
      me.across(acc_positive, t);
      sum_delta = me.across(sum_delta, t);
      shared_weight = me.across(shared_weight, t);
    }

    // The gradient of alpha_src is linear in acc, acc_positive and sum_delta. So each row chunk computes its
    // own from its sums, and the merge adds them up.
    A value[NV][VEC], grad_alpha = -sum_delta;
    me.unpack_row(value_row, value, A(1));
    repeat<NV, VEC>([&](int k, int c) {
      grad_alpha += value[k][c] * (slope * acc[k][c] + (1 - slope) * acc_positive[k][c]);
    });
    // sum_delta is of this lane's own edges, the products are of its own columns: one sum over the head's
    // lanes completes both.
    grad_alpha = reduce_sum<LPH>(grad_alpha);
    if (reduce_sum<LPH>(shared_weight) == 0) grad_alpha *= 0;  // a product, so that NaN remains NaN
    me.store_row(p.grad_value, p.partial_value, acc, A(1), row, slot);
    if (me.writes && slot != me.kNoItem && me.hl == 0) {
      if (slot < 0) {
        A* total = me.template at<A>(p.grad_alpha_src, row);
        *total = grad_alpha + (me.joins(slot) ? read_number(total) : A(0));
      } else {
        *me.template at<A>(p.partial_alpha, slot) = grad_alpha;
      }
    }
  };
  constexpr Ahead AHEAD = LPH >= 4 ? Ahead::none : Ahead::all;  // as measured (main_loop.cuh)
  main_loop<CHUNK, AHEAD, EIDS>(
      me, p.reverse, t.items, index, load_item, load_edges, begin, [] {}, iterate, finish);
}

// The pass over sources where g . v of every edge is needed: for gradients of edge tensors, with
// grad_attention, with a gate, with features of the edges (in the value), and for heads wider than a warp's
// registers. EDGES: scalars or features_scalars.
template <class C, Edges EDGES, int B>
__global__ void __launch_bounds__(kThreads,
                                  (kMinBlocks < C, has_features(EDGES) ? Held::many_rows : Held::two_rows >))
    gat_edge_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  using Own = OwnEdges<C, B>;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC, SLOTS = Own::SLOTS;
  constexpr bool FEAT = has_features(EDGES), EIDS = FEAT || SLOTS == 1;
  static_assert(has_options(EDGES));

  // ---- 1. The place of this lane, and the arrays that it reads.
  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);
  const int own = me.hl % Own::PERIOD;  // this lane owns the edges own + s LPH of an iteration
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  const FeatureTargets<C, FEAT> features(p.edge);
  const Rows<C> grads = me.rows(p.grad_out), feats = me.rows(FEAT ? p.edge.feat : nullptr);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);

  // ---- 2. Load: a row's own arrays, and those of the neighbours of an iteration.
  Raw value_raw[NV];
  A alpha_src = 0;
  NodeStats<A> stats[SLOTS];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw grad_rows[B][NV], feat_rows[FEAT ? B : 1][NV];
  const auto load_item = [&] {
    me.load_row(p.value, value_raw, me.row);
    alpha_src = *me.template at<A>(p.alpha_src, me.row);
  };
  const auto load_edges = [&] {
    if constexpr (FEAT) load_rows<C, B>(feats, 0, index, feat_rows, SLOTS);
    repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    load_rows<C, B>(grads, 0, index, grad_rows);
  };

  // ---- 3. Begin and open a row: unpack its operand, and set its sums to 0.
  int row;                             // for iterate(); finish() gets the same row as an argument
  bool writes;                         // me.writes, if the item exists
  A value[NV][VEC];                    // of the row
  A sum_value[NV][VEC], sum_grad_raw;  // sums of g by weight f alpha, and of grad_raw
  const auto open = [&] { me.unpack_row(value_raw, value, A(1)); };
  const auto begin = [&](const int at, const int n) {
    row = at;
    writes = me.writes && me.slot_of(n) != me.kNoItem;
    zero(sum_value);
    sum_grad_raw = 0;
  };

  // Writes the gradient of the features of edge u of the chunk, weight g with weight = f alpha, as the row
  // `eid` of grad_feat, unless this is null.
  [[maybe_unused]] const auto store_grad_feat = [&](const int u, const A weight, const int eid) {
#pragma unroll
    for (int k = 0; k < NV; ++k) {
      A grad_feat[VEC];
      Pack<T>::unpack(grad_rows[u][k], grad_feat);
      if (p.grad_feat) {
        repeat<VEC>([&](int v) { grad_feat[v] *= weight; });
        if (me.inside(k)) store_raw(me.address(p.grad_feat, eid, k), Pack<T>::pack(grad_feat));
      }
    }
  };

  const auto iterate = [&](const int done, const int rest) {
    const int left = Own::left(rest);
    // ---- 4. g . (v + e), in the lanes that own the edges.
    A dots[Own::SHARE] = {};  // entries from B on stay 0
#pragma unroll
    for (int u = 0; u < B; ++u) {
      dots[u] = 0;
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        // Outside the head, a lane has loaded other columns, which must not count, even if they are NaN. With
        // one lane per head, all loads are inside.
        if (LPH > 1 && !me.inside(k)) continue;
        if constexpr (FEAT) {
          A sum[VEC];
          copy(sum, value[k]);
          features.add_to_value(sum, feat_rows[u][k]);
          dots[u] = dot<T>(sum, grad_rows[u][k], dots[u]);
        } else {
          dots[u] = dot<T>(value[k], grad_rows[u][k], dots[u]);
        }
      }
      if (C::WIDE && t.chunks > 1) {  // every block of a wide head adds the columns that the others have
        const int i = of_lane<LPH>(index[u / LPH], u % LPH);
        int eid = 0;
        if constexpr (FEAT) eid = of_lane<LPH>(index[SLOTS + u / LPH], u % LPH);
        dots[u] += me.far_dot(t, p.grad_out, i, p.value, row, features.of_value(p.edge), eid);
      }
    }
    reduce_scatter<Own::SHARE, LPH>(dots, me.hl);

    // ---- 5. Softmax weights: compute alpha again, then the gradients of the own edges' scores.
    const auto eid_at = [&](int s) { return eid_of<C, B, EIDS>(me, p.reverse, index, done, s); };
    const Dropout<T, true, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, /*POSITIVE*/ false, /*SIGNED*/ true> weights, grads_raw;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const auto of =
          gradient_of_own_edge<EIDS>(p, edge, dropout, eid_at, s, valid, alpha_src + stats[s].term, slope,
                                     dots[s], stats[s].row, stats[s].delta);
      weights.set(s, of.weight(), true);
      grads_raw.set(s, of.grad_raw, true);
      sum_grad_raw += of.grad_raw;
      if (valid && me.head_ok && me.hl < Own::PERIOD && me.chunk == 0) of.store(p);
    }

    // ---- 6. Sum of the neighbours' gradients by weight.
    whole_or_not<B>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      add_rows<C, FULL, /*POSITIVE*/ false, B>(0, left, weights, grad_rows, sum_value, sum_value);
      if constexpr (FEAT) {
        // grad_raw is not used for features: this score is a sum of two terms, and features are not part of
        // it.
        for_edges<LPH, B, FULL>(left, grads_raw, weights, index,
                                [&](int u, A, A weight, int eid) { store_grad_feat(u, weight, eid); });
      }
    });
  };

  // ---- 7. Epilogue: the row's gradients.
  const auto finish = [&](const int row, const int slot) {
    sum_grad_raw = reduce_sum<Own::PERIOD>(sum_grad_raw);
    if (me.shared()) {
      me.across(sum_value, t);
      sum_grad_raw = me.across(sum_grad_raw, t);
    }
    me.store_row(p.grad_value, p.partial_value, sum_value, A(1), row, slot);
    if (writes && me.hl == 0 && me.chunk == 0) {
      if (slot < 0) {
        A* total = me.template at<A>(p.grad_alpha_src, row);
        *total = sum_grad_raw + (me.joins(slot) ? read_number(total) : A(0));
      } else {
        *me.template at<A>(p.partial_alpha, slot) = sum_grad_raw;
      }
    }
  };
  main_loop<B, Ahead::all, EIDS>(me, p.reverse, t.items, index, load_item, load_edges, begin, open, iterate,
                                 finish);
}

}  // namespace dfgnn::cuda
