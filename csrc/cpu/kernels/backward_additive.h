// The statistics of the destinations that backward needs for every score, such as delta; and backward of the
// additive score, whose terms belong to single nodes, so that one gather over the sources is enough. Formulas
// and letters: BackwardParams (core/params.h); grad_raw (d raw) is the gradient of the raw score. Names from
// other files: the head of backward.cpp, and HeadSums (head_sums.h), which sums over each head's columns of
// many rows.
#pragma once

#include "group_backward.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {

// sums[row, h] = sum over the row's edges e of term(e * H + h), where e is the position in the user's order.
// partial: [slots, H], scratch for split rows.
template <class A, class Term>
void sum_rows(const Csr& csr, const Parallel& parallel, int heads, A* partial, A* sums, const Term& term) {
  parallel_items(parallel, csr, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Item& item = csr.items[k];
      A* sum = item.slot < 0 ? sums + int64_t(item.row) * heads : partial + int64_t(item.slot) * heads;
      for (int h = 0; h < heads; ++h) sum[h] = 0;
      for (int64_t p = item.begin; p < item.end; ++p) {
        const int64_t e = (csr.eids ? csr.eids[p] : p) * heads;
        for (int h = 0; h < heads; ++h) sum[h] += term(e + h);
      }
    }
  });
  merge_splits<A>(csr, parallel, heads, 1, partial, sums);
}

// Computes node_stats of destinations and, for the additive score, grad_alpha_dst from forward's sums over
// edges with z > 0, `positive` and `positive_mass`. It takes rows_ rows at a time, so that loops fill
// vectors.
template <class T>
class Stats {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  Stats(const BackwardParams& p, const Arrays<T>& a)
      : p_(p),
        a_(a),
        heads_(p.shape.heads),
        size_(int64_t(heads_) * p.shape.value_dim),
        rows_(size_ < kColumnsAtOnce / 2 ? kColumnsAtOnce / (size_ > 0 ? size_ : 1) : 1),
        sums_(heads_, p.shape.value_dim),
        delta_(rows_ * heads_),
        plus_(rows_ * heads_),
        largest_(rows_ * heads_),
        log_sum_(rows_ * heads_) {}

  void operator()(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += rows_) some(i, i + rows_ < last ? rows_ : last - i);
  }

 private:
  // sums[r, h] = grad_out[i + r, h] . (x[i + r, h] - bias[h]) for r < rows. bias: or null for 0.
  void dots(int64_t i, int64_t rows, const void* x, const void* bias, A* sums) {
    const T *g = a_.grad_out + i * size_, *y = static_cast<const T*>(x) + i * size_,
            *b = static_cast<const T*>(bias);
    sums_(
        [&](const auto& add) __attribute__((always_inline)) {
          for (int64_t r = 0; r < rows; ++r, g += size_, y += size_)
            add([&](auto width, int at, const auto& own, auto total) __attribute__((always_inline)) {
              constexpr int W = width.value;
              auto x = load<T, W>(y + at);
              if (b) x -= load<T, W>(b + at);
              return total + own(load<T, W>(g + at)) * x;
            });
        },
        sums);
  }

  // Processes the rows [i, i + rows).
  void some(int64_t i, int64_t rows) {
    const int64_t at = i * heads_, entries = rows * heads_;
    dots(i, rows, p_.out, p_.out_bias, delta_);
    if (a_.attention)
      for (int64_t k = 0; k < entries; ++k) delta_[k] += a_.row_sums[at + k];
    const bool additive = p_.score == Score::additive, from_positive = additive && a_.from_positive();
    if (from_positive) dots(i, rows, p_.positive, nullptr, plus_);
    // A row's ds add up to 0, so that its sum of ds L'(z) is (1 - slope) times the sum of ds over edges with
    // z > 0.
    const A positive_part = 1 - A(p_.negative_slope);
    for_columns<A>(entries, [&](auto width, int64_t k) {
      constexpr int W = width.value;
      using X = Vec<A, W>;
      const auto stats = load_interleaved<A, W>(a_.stats + (at + k) * 2);
      store_vector(largest_ + k, stats.even), store_vector(log_sum_ + k, stats.odd);
      if (!from_positive) return;
      const X mass = load_vector<X>(a_.positive_mass + at + k),
              dst = positive_part * (load_vector<X>(plus_ + k) - load_vector<X>(delta_ + k) * mass);
      // log_sum is 0 if one edge has all of the row's weight. The gradient is then 0: that is set, but nan
      // stays nan.
      store_vector(a_.grad_alpha_dst + at + k, stats.odd == 0 ? dst * 0 : dst);
    });
    const A* alpha = additive && a_.alpha_dst ? a_.alpha_dst + at : nullptr;
    const A* const from[] = {alpha, largest_, log_sum_, delta_};
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      A* to = a_.node_stats + at * kNodeStats + h;
      for (int64_t k = h; k < entries; k += heads_, to += kNodeStats * heads_)
#pragma GCC unroll 4
        for (int s = 0; s < kNodeStats; ++s)
          store_vector(to + s * heads_, from[s] ? load_vector<W>(from[s] + k) : W{});
    });
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  int heads_;
  int64_t size_, rows_;
  HeadSums<A> sums_;
  Buffer<A> delta_, plus_, largest_, log_sum_;
};

// Computes node_stats for all destinations, and grad_alpha_dst where `positive` gives it.
template <class T>
void node_stats(const BackwardParams& p, const Arrays<T>& a, const Parallel& parallel) {
  if (a.attention)
    sum_rows(p.csr, parallel, p.shape.heads, a.partial_sums, a.row_sums,
             [&](int64_t e) { return a.attention[e] * a.grad_attention[e]; });
  parallel_range(parallel, p.shape.num_dst, kRowsPerThread,
                 [&](int64_t first, int64_t last) { Stats<T>(p, a)(first, last); });
}

// Computes grad_value and grad_alpha_src of the sources by one gather of grad_out. Without a gate, edge
// features and gradients of edge tensors, no product g . v per edge is needed. Let P be the sum of f alpha g
// over a source's edges with z > 0, N that over its other edges, and tail and tail2 such sums of alpha delta:
//   grad_value = P + N      grad_alpha_src = (v . P - tail) + slope (v . N - tail2)
// If each of the edges has all of its destination's weight (the sum of 1 - alpha is 0), grad_alpha_src is 0
// up to rounding, and is set to 0.
template <class T>
class AdditiveSources {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;

  AdditiveSources(const BackwardParams& p, const Arrays<T>& a)
      : p_(p),
        a_(a),
        per_edge_(per_edge(p, a)),
        heads_(p.shape.heads),
        score_(a.node_stats, int64_t(heads_) * kNodeStats, a.alpha_src, heads_, A(p.negative_slope)),
        grads_(a.grad_out, matrix_shape<T>(heads_, p.shape.value_dim, !p.edge.feat), p.edge.feat,
               Gathered<T>::Feat::fixed),
        block_(p.reverse, p.edge, p.shape, p.dtype),
        edges_(a, heads_, true),
        weights_(int64_t(2) * heads_ * kBlock),
        tail_(heads_),
        tail2_(heads_),
        shared_(heads_),
        dots_(heads_),
        dots2_(heads_),
        value_(grads_.shape().packed_size()),
        sum_(grads_.shape().packed_size()),
        sum2_(grads_.shape().packed_size()) {}

  // Whether the product g . v of each edge is needed.
  static bool per_edge(const BackwardParams& p, const Arrays<T>& a) {
    return a.per_edge() || p.edge.gate || p.edge.feat;
  }

  void operator()(const Item& item) {
    const RowShape& shape = grads_.shape();
    score_.fix(item.row);
    pack(shape, a_.value + item.row * shape.size(), value_);
    tail_.clear(heads_), tail2_.clear(heads_), shared_.clear(heads_);
    if (item.begin == item.end) sum_.clear(shape.packed_size()), sum2_.clear(shape.packed_size());
    for_blocks(item, [&](int64_t begin, int64_t end, bool first) {
      block_.load(begin, end, a_.per_edge());
      edges_.start(score_, block_);
      edges_.stats_of_edges(block_);
      grads_.load(block_, true);
      per_edge_ ? edge_by_edge(first) : at_once(first);
    });

    A* grad_alpha = item.slot < 0 ? a_.grad_alpha_src + int64_t(item.row) * heads_
                                  : a_.partial_alpha + int64_t(item.slot) * heads_;
    if (per_edge_) {
      for (int h = 0; h < heads_; ++h) grad_alpha[h] = tail_[h];
    } else {
      head_dots<A>(shape, value_, sum_, dots_);
      head_dots<A>(shape, value_, sum2_, dots2_);
      for (int h = 0; h < heads_; ++h)
        grad_alpha[h] = (shared_[h] == 0 ? A(0) : A(1)) *
                        ((dots_[h] - tail_[h]) + A(p_.negative_slope) * (dots2_[h] - tail2_[h]));
      for (int64_t d = 0; d < shape.packed_size(); ++d) sum_[d] += sum2_[d];
    }
    write_sum<T>(item, shape, sum_, p_.grad_value, p_.partial_value);
  }

 private:
  // Adds f alpha g of a block's edges to sum_ and their grad_raw to tail_, and writes the gradients of edge
  // tensors.
  void edge_by_edge(bool first) {
    grads_.dots(block_, value_, edges_.t());
    edges_.solve(score_, block_);
    edges_.add_grad_raw(block_, tail_);
    edges_.scatter_options(block_);
    if (a_.grad_feat)
      grads_.rows().scatter(block_.index, block_.n, edges_.weight(), block_.eid, a_.grad_feat);
    grads_.aggregate(block_, edges_.weight(), nullptr, sum_, nullptr, first);
  }

  // Adds a block's edges to sum_ (P), sum2_ (N), tail_, tail2_ and shared_.
  void at_once(bool first) {
    A *w = weights_, *w2 = w + heads_ * kBlock;
    for (int h = 0; h < heads_; ++h) {
      V tail{}, tail2{}, shared{};
      for_edges<A>(h, block_.n, [&](int i, auto inside) {
        const V z = load_vector<V>(edges_.z() + i), delta = load_vector<V>(edges_.delta() + i);
        const V alpha = edges_.alpha(score_, block_, z, i);
        const V value = block_.factor ? alpha * load_vector<V>(block_.factor + i) : alpha;
        const auto positive = z > 0;
        const V part = inside ? alpha * delta : V{};
        store_vector(w + i, positive ? value : V{});
        store_vector(w2 + i, positive ? V{} : value);
        tail += positive ? part : V{};
        tail2 += positive ? V{} : part;
        shared += inside ? 1 - alpha : V{};
      });
      tail_[h] += sum<A, kLanes<A>>(tail);
      tail2_[h] += sum<A, kLanes<A>>(tail2);
      shared_[h] += sum<A, kLanes<A>>(shared);
    }
    grads_.aggregate(block_, w, w2, sum_, sum2_, first);
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  bool per_edge_;
  int heads_;
  AdditiveScore<T> score_;
  Gathered<T> grads_;
  EdgeBlock<Acc<T>> block_;
  EdgeGradients<Acc<T>> edges_;
  Buffer<A> weights_;             // two arrays with an entry per edge and head: f alpha in P, and in N
  Buffer<A> tail_, tail2_;        // [H]; if per_edge_, tail_ is the sum of grad_raw
  Buffer<A> shared_;              // [H]: the sum of 1 - alpha
  Buffer<A> dots_, dots2_;        // [H]: v . P, v . N
  Buffer<A> value_, sum_, sum2_;  // packed rows: v; P, or if per_edge_ the sum of f alpha g; N
};

}  // namespace dfgnn::cpu::DFGNN_ISA
