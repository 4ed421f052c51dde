// Backward: the gradients of the scores of a block's edges and of the options on edges, computed from the
// scores and the products g . v. The formulas and their letters are those of BackwardParams (core/params.h):
// ds is the gradient of the score s, dz that of z (EdgeOptions in core/params.h: the raw score after gate and
// bias), and grad_raw (d raw) that of the raw score.
#pragma once

#include "groups.h"
#include "scores.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Scalars per destination and head in node_stats: alpha_dst (of the additive score), max, log_sum and delta.
// On CPUs it is [N_dst, 4, H], so that one load reads the same scalar of several heads.
constexpr int kNodeStats = 4;

// The arrays of BackwardParams with their types: those of accumulators, and those of features.
template <class A>
struct ScalarArrays {
  bool whole_rows;  // whether csr has all edges of its rows (not BackwardParams::part_of_rows)
  const A *alpha_src, *alpha_dst, *stats, *positive_mass, *attention, *grad_attention;
  A *grad_alpha_src, *grad_alpha_dst, *grad_bias, *grad_gate, *grad_weight, *grad_raw, *node_stats,
      *partial_alpha, *row_sums, *partial_sums;
  A* edges;  // [E, 2, H], user's edge order: f alpha and grad_raw, saved by the pass over destinations; or
             // null
  ScalarArrays(const BackwardParams& p, void* edges)
      : whole_rows(!p.part_of_rows),
        alpha_src(static_cast<const A*>(p.alpha_src)),
        alpha_dst(static_cast<const A*>(p.alpha_dst)),
        stats(static_cast<const A*>(p.stats)),
        positive_mass(static_cast<const A*>(p.positive_mass)),
        attention(static_cast<const A*>(p.attention)),
        grad_attention(static_cast<const A*>(p.grad_attention)),
        grad_alpha_src(static_cast<A*>(p.grad_alpha_src)),
        grad_alpha_dst(static_cast<A*>(p.grad_alpha_dst)),
        grad_bias(static_cast<A*>(p.grad_bias)),
        grad_gate(static_cast<A*>(p.grad_gate)),
        grad_weight(static_cast<A*>(p.grad_weight)),
        grad_raw(static_cast<A*>(p.grad_raw)),
        node_stats(static_cast<A*>(p.node_stats)),
        partial_alpha(static_cast<A*>(p.partial_alpha)),
        row_sums(static_cast<A*>(p.row_sums)),
        partial_sums(static_cast<A*>(p.partial_sums)),
        edges(static_cast<A*>(edges)) {}
  // Whether grad_alpha_dst is computed from `positive`, instead of gradients per edge.
  bool from_positive() const { return grad_alpha_dst && !grad_raw; }
  // Whether scalars of the edges are read or written, apart from those of EdgeOptions.
  bool scalars_per_edge() const {
    return grad_attention || grad_bias || grad_gate || grad_weight || grad_raw;
  }
};

template <class T>
struct Arrays : ScalarArrays<Acc<T>> {
  const T *value, *out, *positive, *grad_out;
  T* grad_feat;
  Arrays(const BackwardParams& p, void* edges)
      : ScalarArrays<Acc<T>>(p, edges),
        value(static_cast<const T*>(p.value)),
        out(static_cast<const T*>(p.out)),
        positive(static_cast<const T*>(p.positive)),
        grad_out(static_cast<const T*>(p.grad_out)),
        grad_feat(static_cast<T*>(p.grad_feat)) {}
  // Whether arrays with an entry per edge are read or written, apart from those of EdgeOptions.
  bool per_edge() const { return this->scalars_per_edge() || grad_feat; }
};

// The arrays of a block or group that have an entry per edge and head, and the steps that compute them.
template <class A, class Order = HeadMajor>
class EdgeGradients {
 public:
  using V = Vec<A, kLanes<A>>;

  // writes: whether this pass writes the gradients of the options on edges.
  EdgeGradients(const ScalarArrays<A>& a, int heads, bool writes)
      : a_(a),
        heads_(heads),
        size_(heads * Order::kEdges),
        writes_bias_(writes && a.grad_bias),
        writes_gate_(writes && a.grad_gate),
        writes_weight_(writes && a.grad_weight),
        arrays_(int64_t(13) * size_) {}

  // Adds `rest`, the residual of delta, to a row's delta in node_stats, for the pass over the sources.
  static void correct(const ScalarArrays<A>& a, int heads, int64_t row, const A* rest) {
    A* delta = a.node_stats + (row * kNodeStats + 3) * heads;
    for (int h = 0; h < heads; ++h) delta[h] += rest[h];
  }

  // The inputs: t = g . (v + e), which callers write, and max, log_sum and delta of the edges' destinations,
  // which the functions stats_of_... copy from node_stats.
  A* t() const { return array(0); }
  A* largest() const { return array(1); }
  A* log_sum() const { return array(2); }
  A* delta() const { return array(3); }
  // The results: start() writes z; solve(), or guess() and settle(), write the weights f alpha and grad_raw.
  A* z() const { return array(4); }
  A* weight() const { return array(5); }
  A* grad_raw() const { return array(6); }

  // These copy the statistics of each edge's destination to largest(), log_sum() and delta(). stats_of_edges,
  // for the pass over the sources, gathers them. In that over the destinations, stats_of_row copies them from
  // the row of a work item, for all of its blocks, and stats_of_rows from the rows of a group.
  [[gnu::noinline]] void stats_of_edges(const EdgeBlock<A, Order>& block) {
    const int64_t stride = int64_t(heads_) * kNodeStats;
    gather<Order, 3>(a_.node_stats + heads_, block.index, block.n, block.limit, heads_, stride, largest(),
                     size_);
  }
  [[gnu::noinline]] void stats_of_row(const Item& item) {
    const A* s = a_.node_stats + int64_t(item.row) * heads_ * kNodeStats;
    const int n = item.end - item.begin < kBlock ? item.end - item.begin : kBlock;
    for (int h = 0; h < heads_; ++h, ++s)
      for_edges<A>(h, n, [&](int i, auto) {
        store_vector(largest() + i, splat<A, kLanes<A>>(s[heads_]));
        store_vector(log_sum() + i, splat<A, kLanes<A>>(s[2 * heads_]));
        store_vector(delta() + i, splat<A, kLanes<A>>(s[3 * heads_]));
      });
  }

  [[gnu::noinline]] void stats_of_rows(const Group& group) {
    A* const to[] = {largest(), log_sum(), delta()};
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      const A* from = a_.node_stats + (group.row * kNodeStats + 1) * heads_ + h;
      group.each_edge([&](int r, int e) {
#pragma GCC unroll 3
        for (int k = 0; k < 3; ++k)
          store_vector(to[k] + e * heads_ + h, load_vector<W>(from + (r * kNodeStats + k) * heads_));
      });
    });
  }

  // Returns alpha of the entries at i. z: those that start() has computed.
  V alpha(const Activation<A>& score, const EdgeBlock<A, Order>& block, V z, int i) const {
    const V s = block.score(score.activate(z), i);
    return exp<A, kLanes<A>>((s - load_vector<V>(largest() + i)) - load_vector<V>(log_sum() + i));
  }

  // Computes z(), and a copy of the raw scores if the gradient of the gate is wanted. rows: the arguments of
  // Score::raw between the block and its result.
  template <class Score, class... Rows>
  void start(Score& score, EdgeBlock<A, Order>& block, const Rows&... rows) {
    score.raw(block, rows..., z());
    if (writes_gate_) __builtin_memcpy(raw(), z(), size_ * sizeof(A));
    block.transform(z());
  }

  // Computes weight(), grad_raw() and the gradients of the options, from t(), z() and the statistics.
  [[gnu::noinline]] void solve(const Activation<A>& score, const EdgeBlock<A, Order>& block) {
    add_gamma(block);
    block.each([&](int i) {
      const V alpha = this->alpha(score, block, load_vector<V>(z() + i), i);
      finish(score, block, i, alpha, grad_score(block, i, alpha));
    });
  }

  // These are solve() in two steps, for passes that see all edges of a row. delta in node_stats is computed
  // from `out`, which is rounded. guess() computes with it the gradients ds of the scores, and writes them to
  // grad_raw(). Their sum over the row, which would be 0 with an exact delta, is the residual of delta,
  // rest(). settle() subtracts alpha rest() from ds, and computes the results of solve().
  [[gnu::noinline]] void guess(const Activation<A>& score, const EdgeBlock<A, Order>& block) {
    add_gamma(block);
    block.each([&](int i) {
      const V alpha = this->alpha(score, block, load_vector<V>(z() + i), i);
      store_vector(this->alpha() + i, alpha);
      store_vector(grad_raw() + i, grad_score(block, i, alpha));
    });
  }
  [[gnu::noinline]] void settle(const Activation<A>& score, const EdgeBlock<A, Order>& block) {
    block.each([&](int i) {
      const V alpha = load_vector<V>(this->alpha() + i);
      finish(score, block, i, alpha, load_vector<V>(grad_raw() + i) - alpha * load_vector<V>(rest() + i));
    });
  }

  // Calls f(array) for the arrays of a block that settle() reads, except rest(): callers save them in
  // between.
  template <class F>
  void each_guess(const Activation<A>& score, EdgeBlock<A, Order>& block, F&& f) const {
    f(alpha()), f(grad_raw());
    if (!score.is_identity()) f(z());
    if (writes_gate_) f(raw());
    if (writes_weight_) f(t());
    block.each_setting(writes_weight_, f);
  }

  // Fills rest() for all blocks of a work item. rest: [H], the residual of its row.
  void set_rest(const Item& item, const A* rest) {
    const int n = item.end - item.begin < kBlock ? item.end - item.begin : kBlock;
    for (int h = 0; h < heads_; ++h)
      for_edges<A>(h, n, [&](int i, auto) { store_vector(this->rest() + i, splat<A, kLanes<A>>(rest[h])); });
  }

  // For a group, after guess(): fills rest() with the residuals of its rows, and adds them to delta in
  // node_stats, which the pass over the sources reads.
  [[gnu::noinline]] void sum_rows(const Group& group) {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        if (begin == end) return;
        W rest{};
        for (int e = begin; e < end; ++e) rest += load_vector<W>(grad_raw() + e * heads_ + h);
        for (int e = begin; e < end; ++e) store_vector(this->rest() + e * heads_ + h, rest);
        store_vector(a_.node_stats + ((group.row + r) * kNodeStats + 3) * heads_ + h,
                     load_vector<W>(delta() + begin * heads_ + h) + rest);
      });
    });
  }

  // sums[h] += the sum of grad_raw() over the block's edges; after guess() these are ds, whose sum is the
  // residual.
  [[gnu::noinline]] void add_grad_raw(const EdgeBlock<A, Order>& block, A* sums) const {
    for (int h = 0; h < heads_; ++h) {
      V total{};
      for_edges<A>(h, block.n,
                   [&](int i, auto inside) { total += inside ? load_vector<V>(grad_raw() + i) : V{}; });
      sums[h] += sum<A, kLanes<A>>(total);
    }
  }

  // keep() saves weight() and grad_raw() in the scratch Arrays::edges; find() loads them in the pass over the
  // sources.
  [[gnu::noinline]] void keep(const EdgeBlock<A, Order>& block) const {
    scatter<Order, 2>(weight(), size_, block.eid, block.n, heads_, a_.edges);
  }
  [[gnu::noinline]] void find(const EdgeBlock<A, Order>& block) const {
    const int32_t* eid = block.eids_ahead();
    gather<Order, 2>(a_.edges, eid, block.n, block.eids_limit(), heads_, 2 * heads_, weight(), size_);
  }

  // Writes the gradients of the options on edges that are wanted.
  [[gnu::noinline]] void scatter_options(const EdgeBlock<A, Order>& block) const {
    const auto write = [&](const A* from, A* to) {
      if (to) scatter<Order>(from, 0, block.eid, block.n, heads_, to);
    };
    write(grad_bias(), a_.grad_bias);
    write(raw(), a_.grad_gate);
    write(grad_weight(), a_.grad_weight);
    write(grad_raw(), a_.grad_raw);
  }

 private:
  // Adds gamma, the gradient of the returned attention, to t().
  void add_gamma(const EdgeBlock<A, Order>& block) {
    if (!a_.grad_attention) return;
    gather<Order>(a_.grad_attention, block.eid, block.n, 0, heads_, heads_, gamma(), 0);
    block.update(t(), [&](V t, int i) { return t + load_vector<V>(gamma() + i); });
  }

  // Returns ds, the gradient of the score. It is 0 for an edge with all of its row's weight (alpha = 1),
  // which is set exactly, because rounding would give another value; it is nan if dalpha is not finite.
  V grad_score(const EdgeBlock<A, Order>& block, int i, V alpha) const {
    const V t = load_vector<V>(this->t() + i);
    const V dalpha = block.factor ? load_vector<V>(block.factor + i) * t : t;
    return alpha * (alpha == 1 ? dalpha * 0 : dalpha - load_vector<V>(delta() + i));
  }

  // Writes the results of solve() at i, from alpha and ds.
  void finish(const Activation<A>& score, const EdgeBlock<A, Order>& block, int i, V alpha, V ds) {
    const V dz = ds * score.slope(load_vector<V>(z() + i));
    store_vector(weight() + i, block.factor ? alpha * load_vector<V>(block.factor + i) : alpha);
    store_vector(grad_raw() + i, block.gate ? dz * load_vector<V>(block.gate + i) : dz);
    if (writes_bias_) store_vector(grad_bias() + i, block.bias_after() ? ds : dz);
    if (writes_gate_) store_vector(raw() + i, dz * load_vector<V>(raw() + i));
    if (writes_weight_)
      store_vector(grad_weight() + i, (block.dropout ? alpha * load_vector<V>(block.dropout + i) : alpha) *
                                          load_vector<V>(t() + i));
  }

  A* array(int k) const { return arrays_ + int64_t(k) * size_; }
  A* gamma() const { return array(7); }
  A* raw() const { return array(8); }  // raw scores, which finish() replaces by the gradient of the gate
  A* grad_bias() const { return array(9); }
  A* grad_weight() const { return array(10); }
  A* alpha() const { return array(11); }
  A* rest() const { return array(12); }

  const ScalarArrays<A>& a_;
  int heads_, size_;
  bool writes_bias_, writes_gate_, writes_weight_;
  Buffer<A> arrays_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
