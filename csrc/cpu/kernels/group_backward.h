// Backward of groups of short rows. The letters are those of BackwardParams (core/params.h); grad_raw (d raw)
// is the gradient of the raw score. Names from other files: the heads of backward.cpp and group_forward.h,
// and HeadSums (head_sums.h), which sums over each head's columns of many rows.
#pragma once

#include "gradients.h"
#include "group_scores.h"

namespace dfgnn::cpu::DFGNN_ISA {

// AdditiveSources (backward_additive.h) for groups, where no product g . v per edge is needed. With S and S'
// the sums over a source's edges of f alpha g and of f alpha g L'(z),
//   grad_value = S      grad_alpha_src = v . S' - sum of alpha delta L'(z)
// If each of the edges has all of its destination's weight (the sum of 1 - alpha is 0), grad_alpha_src is 0
// up to rounding, and is set to 0.
template <class T>
class AdditiveGroups {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;

  AdditiveGroups(const BackwardParams& p, const Arrays<T>& a, const Grouping& grouping)
      : p_(p),
        a_(a),
        heads_(p.shape.heads),
        score_(a.node_stats, int64_t(heads_) * kNodeStats, a.alpha_src, heads_, A(p.negative_slope)),
        grads_(a.grad_out, heads_, p.shape.value_dim),
        block_(p.reverse, p.edge, p.shape, p.dtype),
        edges_(a, heads_, false),
        weights_(int64_t(4) * heads_ * EdgeMajor::kEdges),
        tails_(int64_t(heads_) * grouping.most_rows()),
        shared_(int64_t(heads_) * grouping.most_rows()),
        products_(int64_t(heads_) * grouping.most_rows()),
        sum2_(grads_.size() * grouping.most_rows()),
        head_sums_(heads_, p.shape.value_dim) {}

  void operator()(const Group& group) {
    const int heads = heads_;
    const int64_t size = int64_t(heads) * EdgeMajor::kEdges;
    A *w = weights_, *w2 = w + size, *part = w2 + size, *others = part + size;
    block_.load(group.begin, group.begin + group.n, false);
    gather(group);
    block_.transform(edges_.z());
    block_.each([&](int i) {
      const V z = load_vector<V>(edges_.z() + i), delta = load_vector<V>(edges_.delta() + i);
      const V alpha = edges_.alpha(score_, block_, z, i);
      const V value = block_.factor ? alpha * load_vector<V>(block_.factor + i) : alpha;
      const V slope = score_.slope(z);
      store_vector(w + i, value);
      store_vector(w2 + i, value * slope);
      store_vector(part + i, alpha * delta * slope);
      store_vector(others + i, 1 - alpha);
    });
    for_heads<A>(heads, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W tail{}, shared{};
        for (int e = begin; e < end; ++e) {
          tail += load_vector<W>(part + e * heads + h);
          shared += load_vector<W>(others + e * heads + h);
        }
        store_vector(tails_ + r * heads + h, tail);
        store_vector(shared_ + r * heads + h, shared);
      });
    });
    const int64_t columns = grads_.size(), first = group.row * columns;
    grads_.aggregate(group, block_.index, block_.limit, w, w2, nullptr, nullptr, 0,
                     {static_cast<T*>(p_.grad_value) + first}, {nullptr, sum2_});

    head_sums_(
        [&](const auto& add) __attribute__((always_inline)) {
          const T* value = a_.value + first;
          const A* sum = sum2_;
          for (int r = 0; r < group.rows; ++r, value += columns, sum += columns)
            add([&](auto width, int at, const auto& own, auto total) __attribute__((always_inline)) {
              constexpr int W = width.value;
              return total + own(load<T, W>(value + at)) * load_vector<Vec<A, W>>(sum + at);
            });
        },
        products_);
    A* const grad_alpha = a_.grad_alpha_src + group.row * heads;
    for (int i = 0; i < group.rows * heads; ++i)
      grad_alpha[i] = (shared_[i] == 0 ? A(0) : A(1)) * (products_[i] - tails_[i]);
  }

 private:
  // Computes the raw scores in z(), and gathers the destinations' statistics. The four scalars of a
  // destination are adjacent in node_stats.
  void gather(const Group& group) {
    A* const to[] = {edges_.z(), edges_.largest(), edges_.log_sum(), edges_.delta()};
    const int heads = heads_;
    const int32_t* const index = block_.index;
    const int64_t stride = int64_t(heads) * kNodeStats, limit = block_.limit;
    for_heads<A>(heads, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      const A *nodes = a_.node_stats + h, *rows = a_.alpha_src + group.row * heads + h;
      group.each_edge([&](int r, int e) {
        if (e + kTableAhead < limit) {
          const A* next = nodes + index[e + kTableAhead] * stride;
          __builtin_prefetch(next), __builtin_prefetch(next + stride - heads);
        }
        const A* from = nodes + index[e] * stride;
        store_vector(to[0] + e * heads + h, load_vector<W>(from) + load_vector<W>(rows + r * heads));
#pragma GCC unroll 3
        for (int k = 1; k < kNodeStats; ++k)
          store_vector(to[k] + e * heads + h, load_vector<W>(from + k * heads));
      });
    });
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  int heads_;
  AdditiveGroupScore<T> score_;
  Columns<T> grads_;
  EdgeBlock<Acc<T>, EdgeMajor> block_;
  EdgeGradients<Acc<T>, EdgeMajor> edges_;
  // Four arrays with an entry per edge and head: the weight f alpha of S, the weight f alpha L'(z) of S',
  // alpha delta L'(z), and 1 - alpha.
  Buffer<A> weights_;
  Buffer<A> tails_, shared_, products_;  // [rows, H]: sums of alpha delta L'(z), of 1 - alpha; v . S'
  Buffer<A> sum2_;                       // [rows, H, Dv]: S'
  HeadSums<A> head_sums_;
};

// The passes of FeatureRows (backward.cpp), which handles rows alone, for groups.
template <class T, class Score>
class FeatureGroups {
 public:
  using A = Acc<T>;
  static constexpr bool kKeyIsValue = Score::kGathersValues;

  // over_rows: the pass over the destinations, else that over the sources. attn: [H, D], to which the rows'
  // contribution to grad_attn is added; or null.
  FeatureGroups(const BackwardParams& p, const Arrays<T>& a, const Grouping& grouping, Score& score,
                bool over_rows, A* attn)
      : p_(p),
        a_(a),
        over_rows_(over_rows),
        given_(!over_rows && a.edges),
        heads_(p.shape.heads),
        attn_(attn),
        score_(score),
        values_(over_rows ? a.value : a.grad_out, heads_, p.shape.value_dim),
        fixed_(over_rows ? a.grad_out : a.value, heads_, p.shape.value_dim, grouping.most_rows()),
        block_(over_rows ? p.csr : p.reverse, given_ ? kNoOptions : p.edge, p.shape, p.dtype),
        edges_(a, heads_, over_rows),
        key_sum_(kKeyIsValue && !over_rows ? score.size() * grouping.most_rows() : 0),
        attn_sum_(attn ? score.size() * grouping.most_rows() : 0) {}

  void operator()(const Group& group) {
    block_.load(group.begin, group.begin + group.n, a_.per_edge() || a_.edges);
    if (given_) {
      edges_.find(block_);
    } else {
      edges_.start(score_, block_, group);
      values_.dots(group, block_.index, kKeyIsValue && over_rows_ ? 0 : block_.limit, fixed_.of(group),
                   edges_.t());
      over_rows_ ? edges_.stats_of_rows(group) : edges_.stats_of_edges(block_);
      if (over_rows_ && a_.whole_rows) {
        edges_.guess(score_, block_);
        edges_.sum_rows(group);
        edges_.settle(score_, block_);
      } else {
        edges_.solve(score_, block_);
      }
    }
    const int64_t limit = given_ ? block_.limit : 0;
    if (over_rows_) {
      if (a_.edges) edges_.keep(block_);
      edges_.scatter_options(block_);
      score_.accumulate(block_, group, Fetch(block_.limit, true), edges_.grad_raw(),
                        rows(group, score_.size(), p_.grad_query),
                        {nullptr, attn_ ? static_cast<A*>(attn_sum_) : nullptr});
      return add_attn(group);
    }
    const SumRows<T> to = rows(group, values_.size(), p_.grad_value);
    if (kKeyIsValue) {
      score_.accumulate(block_, group, limit, edges_.grad_raw(), {nullptr, key_sum_}, {});
      values_.aggregate(group, block_.index, limit, edges_.weight(), nullptr, nullptr, key_sum_,
                        values_.size(), to, {});
    } else {
      score_.accumulate(block_, group, limit, edges_.grad_raw(), rows(group, score_.size(), p_.grad_key), {});
      values_.aggregate(group, block_.index, limit, edges_.weight(), to);
    }
  }

 private:
  // Returns the group's rows of a result [N, size], as where sums are to be written.
  static SumRows<T> rows(const Group& group, int64_t size, void* result) {
    return {static_cast<T*>(result) + group.row * size};
  }

  void add_attn(const Group& group) const {
    if (!attn_) return;
    const int64_t size = score_.size();
    for (int r = 0; r < group.rows; ++r)
      for (int64_t d = 0; d < size; ++d) attn_[d] += attn_sum_[r * size + d];
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  bool over_rows_, given_;  // given_: whether the pass over the destinations has saved f alpha and grad_raw
  int heads_;
  A* attn_;
  Score& score_;
  Columns<T> values_;
  FixedRows<T> fixed_;
  EdgeBlock<Acc<T>, EdgeMajor> block_;
  EdgeGradients<Acc<T>, EdgeMajor> edges_;
  Buffer<A> key_sum_, attn_sum_;  // [rows, H, D]
};

}  // namespace dfgnn::cpu::DFGNN_ISA
