// Forward of a group of short rows:
//   1. Compute raw scores of all edges and heads, of which the options on edges make z.
//   2. Compute scores, exponentials, weights, and the statistics of the rows.
//   3. Write the attention, if it is asked for.
//   4. Write weighted sums of the values, divided by the rows' sums of exponentials. Where such a sum is 0
//      (no edges, or all scores -inf), the weighted sum is set to 0.
//
// z, the score s, max, log_sum and the options on edges: core/params.h. L is LeakyReLU. Words and vectors:
// rows.h. Names from other files:
// groups.h:
//   Group                `rows` rows from `row` on, with n edges from `begin` on. each(f) calls f(r, first
//                        edge, end) for each row, each_edge(f) calls f(r, e) for each edge
//   for_heads(heads, f)  calls f(width, h) for vectors that cover the heads
// columns.h:
//   Columns values_      the matrix that is gathered. aggregate: out[r] = factor[r] * sum of w x + bias, and
//                        the same with w2
//   Fetch                what aggregate prefetches: (how many indices may be read, whether the rows that the
//                        group gathers are in cache)
//   for_columns(n, f)    calls f(width, i) for vectors of n elements, and then for single elements
// edges.h:
//   EdgeBlock block_     the group's edges. load(begin, end, whether positions are wanted); n: their number;
//                        index: the gathered rows; eid: positions in the user's order; factor: edge weight
//                        times dropout, null for 1
//   block_.transform(z)  turns raw scores into z. block_.score(L(z), i) returns scores: it adds the bias if
//                        this comes after the LeakyReLU, and gives -inf where EdgeOptions::mask is 0
//   block_.each(f)       calls f(i) for vectors of all entries
// scores.h, group_scores.h:
//   Score                raw(block, group, z): raw scores; activate(z): L(z). kGathersValues: raw has read
//                        the values' rows
#pragma once

#include "group_scores.h"

namespace dfgnn::cpu::DFGNN_ISA {

// The arrays of ForwardParams that a pass writes, and the bias that is added to `out`, with their types.
template <class T>
struct Outputs {
  using A = Acc<T>;
  T *out, *positive;
  A *stats, *positive_mass, *attention;
  A *partial_out, *partial_positive, *partial_stats;
  const T* bias;
  explicit Outputs(const ForwardParams& p)
      : out(static_cast<T*>(p.out)),
        positive(static_cast<T*>(p.positive)),
        stats(static_cast<A*>(p.stats)),
        positive_mass(static_cast<A*>(p.positive_mass)),
        attention(static_cast<A*>(p.attention)),
        partial_out(static_cast<A*>(p.partial_out)),
        partial_positive(static_cast<A*>(p.partial_positive)),
        partial_stats(static_cast<A*>(p.partial_stats)),
        bias(static_cast<const T*>(p.out_bias)) {}
};

// Returns what to subtract from scores whose maximum is `largest`: 0 instead of -inf, because -inf - -inf is
// nan.
template <class A, class V>
[[gnu::always_inline]] static inline V origin_of(V largest) {
  return largest == -kInfinity<A> ? V{} : largest;
}

// The softmax of a group: what it computes from scalars of edges, for any type of features.
template <class A>
class GroupSoftmax {
 public:
  using V = Vec<A, kLanes<A>>;
  using Block = EdgeBlock<A, EdgeMajor>;

  GroupSoftmax(const ForwardParams& p, int most_rows)
      : stats_(static_cast<A*>(p.stats)),
        positive_mass_(static_cast<A*>(p.positive_mass)),
        attention_(static_cast<A*>(p.attention)),
        positive_(p.positive),
        heads_(p.shape.heads),
        rows_(int64_t(4) * heads_ * most_rows) {}

  // [rows, H]: the rows' sums of exponentials, and their inverse.
  A* sums(const Group& group) const { return rows_ + group.rows * heads_; }
  A* factors(const Group& group) const { return rows_ + 2 * group.rows * heads_; }

  // From z of all edges computes the scores, and replaces them by exponentials, s. Writes to w the
  // exponentials times block.factor, unless that is null; to w2 the same but 0 where z <= 0, if `positive` is
  // wanted; and the results that belong to rows (stats, positive_mass).
  void operator()(const Group& group, const Block& block, const Activation<A>& score, const A* z, A* s, A* w,
                  A* w2) {
    block.each([&](int i) { store_vector(s + i, block.score(score.activate(load_vector<V>(z + i)), i)); });
    const int heads = heads_, entries = group.rows * heads;
    A *largest = rows_, *sum = sums(group), *factor = factors(group),
      *positive = positive_ ? positive_mass_ + group.row * heads : nullptr;
    for_heads<A>(heads, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W top = splat<A, width.value>(-kInfinity<A>);
        for (int e = begin; e < end; ++e) {
          const W score = load_vector<W>(s + e * heads + h);
          top = score > top ? score : top;
        }
        store_vector(largest + r * heads + h, top);
        store_vector(factor + r * heads + h, origin_of<A>(top));
      });
      group.each_edge([&](int r, int e) {
        store_vector(w + e * heads + h,
                     load_vector<W>(s + e * heads + h) - load_vector<W>(factor + r * heads + h));
      });
    });
    block.each([&](int i) {
      const V p = exp<A, kLanes<A>>(load_vector<V>(w + i));
      const V weight = block.factor ? p * load_vector<V>(block.factor + i) : p;
      store_vector(s + i, p);
      if (block.factor) store_vector(w + i, weight);
      if (positive_) store_vector(w2 + i, load_vector<V>(z + i) <= 0 ? V{} : weight);
    });
    for_heads<A>(heads, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W total{}, plus{};
        for (int e = begin; e < end; ++e) {
          const W p = load_vector<W>(s + e * heads + h);
          total += p;
          if (positive_)  // nan <= 0 is false, so that a nan enters both sums
            plus += load_vector<W>(z + e * heads + h) <= 0 ? W{} : p;
        }
        store_vector(sum + r * heads + h, total);
        // `total` is 0 without edges, or if all scores are -inf; it is not 0 if a score is nan.
        const W inverse = total == 0 ? W{} : 1 / total;
        store_vector(factor + r * heads + h, inverse);
        if (positive_) store_vector(positive + r * heads + h, plus * inverse);
      });
    });
    A *logs = factor + entries, *stats = stats_ + group.row * heads * 2;
    for (int i = 0; i < entries; i += kLanes<A>)
      store_vector(logs + i, log<A, kLanes<A>>(load_vector<V>(sum + i)));
    for_columns<A>(entries, [&](auto width, int64_t i) {
      constexpr int W = width.value;
      using X = Vec<A, W>;
      const X mass = load_vector<X>(sum + i), top = load_vector<X>(largest + i),
              log = load_vector<X>(logs + i);
      store_interleaved<A, W>(stats + 2 * i, mass == 0 ? splat<A, W>(kInfinity<A>) : top,
                              mass == 0 ? X{} : log);
    });
  }

  // Writes the attention, which is w divided by the row's sum. attention: scratch for all entries of the
  // group.
  void write_attention(const Group& group, const Block& block, const A* w, A* attention) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        const W factor = load_vector<W>(factors(group) + r * heads_ + h);
        for (int e = begin; e < end; ++e)
          store_vector(attention + e * heads_ + h, load_vector<W>(w + e * heads_ + h) * factor);
      });
    });
    scatter<EdgeMajor>(attention, 0, block.eid, block.n, heads_, attention_);
  }

 private:
  A *stats_, *positive_mass_, *attention_;
  bool positive_;  // whether sums over edges with z > 0 are wanted
  int heads_;
  Buffer<A> rows_;  // [4, rows, H]: largest score, sum of exponentials, its inverse, its logarithm
};

// Computes all results of the rows of a group.
template <class T, class Score>
class GroupWorker {
 public:
  using A = Acc<T>;

  template <class MakeScore>
  GroupWorker(const ForwardParams& p, const Outputs<T>& o, const Grouping& grouping,
              const MakeScore& make_score)
      : o_(o),
        heads_(p.shape.heads),
        dim_(p.shape.value_dim),
        values_(p.value, heads_, dim_),
        score_(make_score(grouping.most_rows())),
        block_(p.csr, p.edge, p.shape, p.dtype),
        edges_(int64_t(4) * heads_ * EdgeMajor::kEdges),
        softmax_(p, grouping.most_rows()),
        bias_(o.bias ? values_.size() : 0) {
    for (int64_t d = 0; o.bias && d < values_.size(); ++d) bias_[d] = load<T, 1>(o.bias + d);
  }

  void operator()(const Group& group) {
    const int64_t size = int64_t(heads_) * EdgeMajor::kEdges;
    A *z = edges_, *s = z + size, *w = s + size, *w2 = w + size;
    // ---- 1. Raw scores, and the options on edges.
    block_.load(group.begin, group.begin + group.n, o_.attention != nullptr);
    score_.raw(block_, group, z);
    block_.transform(z);
    // ---- 2. Softmax weights.
    softmax_(group, block_, score_, z, s, w, w2);
    if (!block_.factor) w = s;
    // ---- 3. Attention.
    if (o_.attention) softmax_.write_attention(group, block_, w, z);
    // ---- 4. Weighted sums of the values.
    const int64_t size_of_row = values_.size(), first = group.row * size_of_row;
    T *const out = o_.out + first, *const positive = o_.positive ? o_.positive + first : nullptr;
    values_.aggregate(group, block_.index, Fetch(block_.limit, Score::kGathersValues), w, w2,
                      softmax_.factors(group), o_.bias ? static_cast<A*>(bias_) : nullptr, 0, {out},
                      {positive});
    clear(group, out, positive);
  }

 private:
  // Sets `out` to the bias, and `positive` to 0, in rows and heads whose sum of exponentials is 0: there
  // aggregate has multiplied by 0, which gives nan for a value that is not finite.
  void clear(const Group& group, T* out, T* positive) const {
    const A* sum = softmax_.sums(group);
    Bits<A> none = 0;  // an integer of the sums' size, so that the compiler vectorizes the loop
    for (int i = 0; i < group.rows * heads_; ++i) none += sum[i] == 0;
    if (none == 0) return;
    for (int r = 0, i = 0; r < group.rows; ++r)
      for (int h = 0; h < heads_; ++h, ++i) {
        if (sum[i] != 0) continue;
        for (int d = h * dim_; d < (h + 1) * dim_; ++d) {
          store<T, 1>(out + r * values_.size() + d, o_.bias ? bias_[d] : A(0));
          if (positive) store<T, 1>(positive + r * values_.size() + d, A(0));
        }
      }
  }

  const Outputs<T>& o_;
  int heads_, dim_;
  Columns<T> values_;
  Score score_;
  EdgeBlock<Acc<T>, EdgeMajor> block_;
  Buffer<A> edges_;  // four arrays: z, s, w and w2 of softmax_
  GroupSoftmax<A> softmax_;
  Buffer<A> bias_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
