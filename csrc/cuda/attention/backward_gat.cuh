// Backward of the additive score where it needs no number per edge from the features: statistics of the
// destinations, then one gather over the sources. See params.h for the formulas.
#pragma once

#include "gather.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

// delta = g . (out - out_bias) (+ row_sums), the stats that the pass over sources reads, and
// grad_alpha_dst = (1 - slope) (g . positive - delta positive_mass). LPH lanes per (row, head), kPairs of
// them at a time, so that enough loads are in flight.
inline constexpr int kPairs = 2;

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
    // 0 where one edge has all the weight.
    if (p.positive)
      static_cast<A*>(p.grad_alpha_dst)[pair] =
          (row.log_sum == 0 ? A(0) : 1 - A(p.negative_slope)) *
          (dot_positive[k] - delta[k] * static_cast<const A*>(p.positive_mass)[pair]);
  }
}

// Over sources, when no gradient of an edge tensor is wanted and no option makes the value or LeakyReLU'
// differ by edge: one gather of g and no reduction per edge. With c_ij = f alpha LeakyReLU'(z):
//   sum_i c_ij (g_i . v_j) = v_j . (slope * sum_i f alpha g_i + (1 - slope) * sum_{z > 0} f alpha g_i)
// so the same two weighted sums as in forward are all that the loop computes. Where each edge has all of its
// destination's weight, the difference of the sums is 0 but for rounding, and is made 0.
template <class C, bool EDGE, int B>
__global__ void __launch_bounds__(kThreads, kMinBlocks<C, Load::one_row>)
    additive_sources_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr int CHUNK = B > LPH ? B : LPH, SLOTS = CHUNK / LPH;

  Place<C> me(t, p.shape, p.shape.value_dim, p.reverse);
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  A slope = A(p.negative_slope);
  keep(slope);
  const Rows<C> grads = me.rows(p.grad_out);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);

  // What an item and a step of it need first.
  A alpha_src;
  NodeStats<A> stats[SLOTS];
  constexpr bool EIDS = EDGE && SLOTS == 1;
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw rows[B][NV];
  const auto load_item = [&] { alpha_src = *me.template at<A>(p.alpha_src, me.row); };
  const auto load_step = [&] {
    repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    load_rows<C, B>(grads, 0, index, rows);
  };

  // The state of a row.
  Raw value_row[NV];
  A acc[NV][VEC], acc_positive[NV][VEC], sum_delta, shared_weight;
  const auto begin = [&](int row, int) {
    me.load_row(p.value, value_row, row);
    zero(acc);
    zero(acc_positive);
    sum_delta = shared_weight = 0;
  };

  const auto step = [&](const int done, const int left) {
    // Weights f alpha, and the sum that delta is in.
    Weights<A, SLOTS, true, EDGE> weights;
    const auto eid_at = [&](int s) { return eid_of<C, CHUNK, EIDS>(me, p.reverse, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + me.hl < left;
      const int eid = EDGE && (EIDS || edge.tensors) ? eid_at(s) : 0;
      const A factor = dropout.factor(s) * (EDGE ? edge.weight(eid) : A(1));
      const EdgeScore<T, EDGE> z(edge, alpha_src + stats[s].term, slope, eid);
      A alpha = stats[s].row.alpha(z.score);
      alpha = valid ? alpha : A(0);  // without a branch: several edges' exponentials overlap
      sum_delta += valid ? alpha * z.slope * stats[s].delta : A(0);
      shared_weight += valid ? 1 - alpha : A(0);
      weights.set(s, alpha * factor, z.positive);
    }
    // The two sums of rows.
    whole_or_not<CHUNK>(left, [&](auto whole) {
      add_chunk<C, decltype(whole)::value, true, B, CHUNK>(grads, left, index, weights, rows, acc,
                                                           acc_positive);
    });
  };

  const auto finish = [&](const int row, const int slot) {
    if (me.shared()) {
      me.across(acc, t);
      me.across(acc_positive, t);
      sum_delta = me.across(sum_delta, t);
      shared_weight = me.across(shared_weight, t);
    }

    // grad_alpha_src is linear in the two sums.
    A value[NV][VEC], grad_alpha = -sum_delta;
    me.unpack_row(value_row, value, A(1));
    repeat<NV, VEC>([&](int k, int c) {
      grad_alpha += value[k][c] * (slope * acc[k][c] + (1 - slope) * acc_positive[k][c]);
    });
    grad_alpha = reduce_sum<LPH>(grad_alpha);
    if (reduce_sum<LPH>(shared_weight) == 0) grad_alpha *= 0;
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
  constexpr Ahead AHEAD = LPH >= 4 ? Ahead::none : Ahead::all;
  walk<CHUNK, AHEAD, EIDS>(me, p.reverse, t.items, index, load_item, load_step, begin, [] {}, step, finish);
}

}  // namespace dfgnn::cuda
