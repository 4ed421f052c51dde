// Backward: a streaming pass over the destinations for delta, then gathers. Additive: one gather of
// grad_out over the sources. Dot: gathers over the rows and over the sources.
#include "kernels.h"
#include "merge.h"
#include "schedule.h"
#include "scores.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T>
struct Arrays {
  using A = Acc<T>;
  const T *value, *out, *positive, *grad_out;
  const A *alpha_src, *alpha_dst, *lse, *positive_mass, *attention, *grad_attention;
  A *grad_alpha_src, *grad_alpha_dst, *grad_bias, *grad_weight, *stats, *partial_alpha, *row_sums,
      *partial_sums;
  explicit Arrays(const BackwardParams& p)
      : value(static_cast<const T*>(p.value)),
        out(static_cast<const T*>(p.out)),
        positive(static_cast<const T*>(p.positive)),
        grad_out(static_cast<const T*>(p.grad_out)),
        alpha_src(static_cast<const A*>(p.alpha_src)),
        alpha_dst(static_cast<const A*>(p.alpha_dst)),
        lse(static_cast<const A*>(p.lse)),
        positive_mass(static_cast<const A*>(p.positive_mass)),
        attention(static_cast<const A*>(p.attention)),
        grad_attention(static_cast<const A*>(p.grad_attention)),
        grad_alpha_src(static_cast<A*>(p.grad_alpha_src)),
        grad_alpha_dst(static_cast<A*>(p.grad_alpha_dst)),
        grad_bias(static_cast<A*>(p.grad_bias)),
        grad_weight(static_cast<A*>(p.grad_weight)),
        stats(static_cast<A*>(p.node_stats)),
        partial_alpha(static_cast<A*>(p.partial_alpha)),
        row_sums(static_cast<A*>(p.row_sums)),
        partial_sums(static_cast<A*>(p.partial_sums)) {}
  bool from_positive() const { return grad_alpha_dst && positive && !grad_attention; }
  bool per_edge() const { return grad_attention || grad_bias || grad_weight; }
};

// grad[row] = sum of the row's slots
template <class T>
void merge_splits(const Csr& csr, const Parallel& parallel, int heads, int dim, const void* partial,
                  void* grad) {
  using A = Acc<T>;
  parallel_range(parallel, csr.num_splits, 1, [&](int64_t first, int64_t last) {
    const RowShape shape = row_shape<A>(heads, dim);
    PartialSum<A> sum(shape);
    for (int64_t k = first; k < last; ++k) {
      const Split& split = csr.splits[k];
      sum.reset();
      for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot)
        sum.add(static_cast<const A*>(partial) + slot * shape.size(), nullptr);
      unpack(shape, sum.packed(), nullptr, static_cast<T*>(grad) + split.row * shape.size());
    }
  });
}

// sums[row, h] = sum over the row's edges of term(position in the user's order * H + h)
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

// node_stats of one destination, and grad_alpha_dst from the sums over edges with z > 0.
template <class T>
class Stats {
 public:
  using A = Acc<T>;
  Stats(const BackwardParams& p, const Arrays<T>& a)
      : p_(p),
        a_(a),
        shape_(row_shape<A>(p.shape.heads, p.shape.value_dim)),
        grad_(shape_.packed_size()),
        row_(shape_.packed_size()),
        bias_(p.out_bias ? shape_.packed_size() : 0),
        delta_(shape_.heads),
        plus_(shape_.heads) {
    if (p.out_bias) pack(shape_, static_cast<const T*>(p.out_bias), bias_);
  }

  void operator()(int64_t i) {
    const int heads = shape_.heads;
    pack(shape_, a_.grad_out + i * shape_.size(), grad_);
    pack(shape_, a_.out + i * shape_.size(), row_);
    for (int k = 0; p_.out_bias && k < int(shape_.packed_size()); ++k) row_[k] -= bias_[k];
    head_dots<A>(shape_, grad_, row_, delta_);
    for (int h = 0; a_.grad_attention && h < heads; ++h) delta_[h] += a_.row_sums[i * heads + h];
    const bool additive = p_.score == Score::additive;
    if (additive && a_.from_positive()) {
      pack(shape_, a_.positive + i * shape_.size(), row_);
      head_dots<A>(shape_, grad_, row_, plus_);
      for (int h = 0; h < heads; ++h)
        a_.grad_alpha_dst[i * heads + h] =
            (1 - A(p_.negative_slope)) * (plus_[h] - delta_[h] * a_.positive_mass[i * heads + h]);
    }
    for (int h = 0; h < heads; ++h) {
      const int64_t at = i * heads + h;
      if (additive) {
        A* s = a_.stats + at * 4;
        s[0] = a_.alpha_dst ? a_.alpha_dst[at] : A(0), s[1] = a_.lse[at], s[2] = delta_[h], s[3] = 0;
      } else {
        a_.stats[at * 2] = a_.lse[at], a_.stats[at * 2 + 1] = delta_[h];
      }
    }
  }

 private:
  const BackwardParams& p_;
  const Arrays<T>& a_;
  RowShape shape_;
  Buffer<A> grad_, row_, bias_, delta_, plus_;
};

template <class T>
void node_stats(const BackwardParams& p, const Arrays<T>& a, const Parallel& parallel) {
  if (a.grad_attention)
    sum_rows(p.csr, parallel, p.shape.heads, a.partial_sums, a.row_sums,
             [&](int64_t e) { return a.attention[e] * a.grad_attention[e]; });
  parallel_range(parallel, p.shape.num_dst, kRowsPerThread, [&](int64_t first, int64_t last) {
    Stats<T> stats(p, a);
    for (int64_t i = first; i < last; ++i) stats(i);
  });
}

// The inputs of a block's edge gradients: z, t = g . v + gamma, and lse and delta of the destination.
template <class T>
class EdgeInputs {
 public:
  using A = Acc<T>;
  explicit EdgeInputs(const Arrays<T>& a, int heads)
      : a_(a), heads_(heads), size_(heads * kBlock), arrays_(int64_t(5) * size_) {}

  A* z() const { return arrays_; }
  A* t() const { return arrays_ + size_; }
  A* lse() const { return arrays_ + 2 * size_; }
  A* delta() const { return arrays_ + 3 * size_; }

  // t += gamma
  void add_grad_attention(const EdgeBlock<T>& block) {
    using V = Vec<A, kLanes<A>>;
    if (!a_.grad_attention) return;
    A* gamma = arrays_ + 4 * size_;
    gather(a_.grad_attention, block.eid, block.n, heads_, heads_, 1, gamma);
    for (int h = 0; h < heads_; ++h)
      for_edges<A>(h, block.n, [&](int i, auto) {
        store_vector(t() + i, load_vector<V>(t() + i) + load_vector<V>(gamma + i));
      });
  }

  // lse and delta at `at` of each destination's `step` entries per head; of the block's edges or of
  // one row.
  void stats_of_edges(const EdgeBlock<T>& block, int step, int at) {
    gather(a_.stats + at, block.index, block.n, heads_, int64_t(heads_) * step, step, lse());
    gather(a_.stats + at + 1, block.index, block.n, heads_, int64_t(heads_) * step, step, delta());
  }
  void stats_of_row(int64_t row, int step, int at) {
    const A* stats = a_.stats + row * heads_ * step + at;
    for (int i = 0; i < size_; ++i) {
      lse()[i] = stats[i / kBlock * step];
      delta()[i] = stats[i / kBlock * step + 1];
    }
  }

 private:
  const Arrays<T>& a_;
  int heads_, size_;
  Buffer<A> arrays_;
};

// grad_value and grad_alpha_src by one gather of grad_out. Without per-edge results the products g . v
// are not taken edge by edge. With P and N the sums of f alpha g over edges with z > 0 and the others:
//   grad_value = P + N
//   grad_alpha_src = (v . P - sum of alpha delta, z > 0) + slope (v . N - sum of alpha delta, others)
template <class T>
class AdditiveSources {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;

  AdditiveSources(const BackwardParams& p, const Arrays<T>& a)
      : p_(p),
        a_(a),
        heads_(p.shape.heads),
        grads_{a.grad_out, row_shape<A>(heads_, p.shape.value_dim)},
        score_(a.stats, int64_t(heads_) * 4, 4, a.alpha_src, heads_, A(p.negative_slope)),
        block_(p.reverse, p.edge, p.shape.num_edges, heads_),
        inputs_(a, heads_),
        edges_(int64_t(3) * heads_ * kBlock),
        tail_(heads_),
        tail2_(heads_),
        dots_(heads_),
        dots2_(heads_),
        value_(grads_.shape.packed_size()),
        sum_(grads_.shape.packed_size()),
        sum2_(grads_.shape.packed_size()) {}

  void operator()(const Item& item) {
    const RowShape& shape = grads_.shape;
    score_.fix(item.row);
    pack(shape, a_.value + item.row * shape.size(), value_);
    for (int h = 0; h < heads_; ++h) tail_[h] = tail2_[h] = 0;
    if (item.begin == item.end)
      for (int64_t d = 0; d < shape.packed_size(); ++d) sum_[d] = sum2_[d] = 0;
    for (int64_t e = item.begin; e < item.end; e += kBlock)
      block(e, e + kBlock < item.end ? e + kBlock : item.end, e == item.begin);

    A* grad_alpha = item.slot < 0 ? a_.grad_alpha_src + int64_t(item.row) * heads_
                                  : a_.partial_alpha + int64_t(item.slot) * heads_;
    if (a_.per_edge()) {
      for (int h = 0; h < heads_; ++h) grad_alpha[h] = tail_[h];
    } else {
      head_dots<A>(shape, value_, sum_, dots_);
      head_dots<A>(shape, value_, sum2_, dots2_);
      for (int h = 0; h < heads_; ++h)
        grad_alpha[h] = (dots_[h] - tail_[h]) + A(p_.negative_slope) * (dots2_[h] - tail2_[h]);
      for (int64_t d = 0; d < shape.packed_size(); ++d) sum_[d] += sum2_[d];
    }
    if (item.slot < 0)
      unpack(shape, sum_, nullptr, static_cast<T*>(p_.grad_value) + item.row * shape.size());
    else
      unpack(shape, sum_, nullptr, static_cast<A*>(p_.partial_value) + item.slot * shape.size());
  }

 private:
  void block(int64_t begin, int64_t end, bool first) {
    const bool per_edge = a_.per_edge();
    A *w = edges_, *w2 = w + heads_ * kBlock, *weight = w2 + heads_ * kBlock;
    block_.load(begin, end, per_edge);
    const int n = block_.n;
    score_.raw(block_, inputs_.z());
    block_.add_bias(inputs_.z());
    inputs_.stats_of_edges(block_, 4, 1);
    if (per_edge) {
      grads_.dots(block_.index, n, block_.limit, value_, inputs_.t());
      inputs_.add_grad_attention(block_);
    }
    for (int h = 0; h < heads_; ++h) {
      V tail{}, tail2{};
      for_edges<A>(h, n, [&](int i, auto inside) {
        const V z = load_vector<V>(inputs_.z() + i), delta = load_vector<V>(inputs_.delta() + i);
        const V alpha = exp<A, kLanes<A>>(score_.activate(z) - load_vector<V>(inputs_.lse() + i));
        const V value = block_.factor ? alpha * load_vector<V>(block_.factor + i) : alpha;
        if (per_edge) {
          const V t = load_vector<V>(inputs_.t() + i);
          const V grad = (value * t - alpha * delta) * score_.slope(z);
          store_vector(w + i, value);
          store_vector(w2 + i, grad);
          store_vector(weight + i, (block_.mask ? alpha * load_vector<V>(block_.mask + i) : alpha) * t);
          tail += inside ? grad : V{};
        } else {
          const auto positive = z > 0;
          const V part = inside ? alpha * delta : V{};
          store_vector(w + i, positive ? value : V{});
          store_vector(w2 + i, positive ? V{} : value);
          tail += positive ? part : V{};
          tail2 += positive ? V{} : part;
        }
      });
      tail_[h] += sum<A, kLanes<A>>(tail);
      tail2_[h] += sum<A, kLanes<A>>(tail2);
    }
    if (a_.grad_bias) scatter(w2, block_.eid, n, heads_, a_.grad_bias);
    if (a_.grad_weight) scatter(weight, block_.eid, n, heads_, a_.grad_weight);
    if (per_edge)
      grads_.aggregate(block_.index, n, 0, w, nullptr, sum_, nullptr, first);
    else
      grads_.aggregate(block_.index, n, block_.limit, w, w2, sum_, sum2_, first);
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  int heads_;
  Rows<T> grads_;
  AdditiveScore<T> score_;
  EdgeBlock<T> block_;
  EdgeInputs<T> inputs_;
  Buffer<A> edges_;  // weights of sum_ and of sum2_ (or the gradient of z), gradient of the edge weight
  Buffer<A> tail_, tail2_;  // sums of alpha delta (or of the gradient of z), of its z <= 0 part
  Buffer<A> dots_, dots2_;
  Buffer<A> value_, sum_, sum2_;  // packed
};

// One direction of dot backward. Over the rows: gathers keys and values, sums grad_query and writes
// the edges' gradients. Over the sources: gathers queries and grad_out, sums grad_key and grad_value.
template <class T>
class DotPass {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;

  DotPass(const BackwardParams& p, const Arrays<T>& a, bool over_rows)
      : p_(p),
        a_(a),
        over_rows_(over_rows),
        heads_(p.shape.heads),
        score_(over_rows ? p.key : p.query, over_rows ? p.query : p.key, row_shape<A>(heads_, p.shape.dim),
               A(p.scale)),
        values_{over_rows ? a.value : a.grad_out, row_shape<A>(heads_, p.shape.value_dim)},
        fixed_(over_rows ? a.grad_out : a.value),
        block_(over_rows ? p.csr : p.reverse, p.edge, p.shape.num_edges, heads_),
        inputs_(a, heads_),
        edges_(int64_t(3) * heads_ * kBlock),
        scale_(heads_),
        row_(values_.shape.packed_size()),
        score_sum_(score_.rows().shape.packed_size()),
        value_sum_(values_.shape.packed_size()) {
    for (int h = 0; h < heads_; ++h) scale_[h] = A(p.scale);
  }

  void operator()(const Item& item) {
    score_.fix(item.row);
    pack(values_.shape, fixed_ + item.row * values_.shape.size(), row_);
    if (over_rows_) inputs_.stats_of_row(item.row, 2, 0);
    if (item.begin == item.end) {
      for (int64_t d = 0; d < score_.rows().shape.packed_size(); ++d) score_sum_[d] = 0;
      for (int64_t d = 0; d < values_.shape.packed_size(); ++d) value_sum_[d] = 0;
    }
    for (int64_t e = item.begin; e < item.end; e += kBlock)
      block(e, e + kBlock < item.end ? e + kBlock : item.end, e == item.begin);
    const A* scale = scale_;
    write(item, score_.rows().shape, score_sum_, scale, over_rows_ ? p_.grad_query : p_.grad_key,
          over_rows_ ? p_.partial_query : p_.partial_key);
    if (!over_rows_) write(item, values_.shape, value_sum_, nullptr, p_.grad_value, p_.partial_value);
  }

 private:
  void block(int64_t begin, int64_t end, bool first) {
    A *w = edges_, *ds = w + heads_ * kBlock, *weight = ds + heads_ * kBlock;
    block_.load(begin, end, a_.per_edge());
    const int n = block_.n;
    score_.raw(block_, inputs_.z());
    block_.add_bias(inputs_.z());
    values_.dots(block_.index, n, block_.limit, row_, inputs_.t());
    inputs_.add_grad_attention(block_);
    if (!over_rows_) inputs_.stats_of_edges(block_, 2, 0);
    for (int h = 0; h < heads_; ++h)
      for_edges<A>(h, n, [&](int i, auto) {
        const V t = load_vector<V>(inputs_.t() + i);
        const V alpha =
            exp<A, kLanes<A>>(load_vector<V>(inputs_.z() + i) - load_vector<V>(inputs_.lse() + i));
        const V value = block_.factor ? alpha * load_vector<V>(block_.factor + i) : alpha;
        store_vector(w + i, value);
        store_vector(ds + i, value * t - alpha * load_vector<V>(inputs_.delta() + i));
        store_vector(weight + i, (block_.mask ? alpha * load_vector<V>(block_.mask + i) : alpha) * t);
      });
    score_.rows().aggregate(block_.index, n, 0, ds, nullptr, score_sum_, nullptr, first);
    if (!over_rows_) {
      values_.aggregate(block_.index, n, 0, w, nullptr, value_sum_, nullptr, first);
    } else {
      if (a_.grad_bias) scatter(ds, block_.eid, n, heads_, a_.grad_bias);
      if (a_.grad_weight) scatter(weight, block_.eid, n, heads_, a_.grad_weight);
    }
  }

  static void write(const Item& item, const RowShape& shape, const A* sum, const A* scale, void* grad,
                    void* partial) {
    if (item.slot < 0)
      unpack(shape, sum, scale, static_cast<T*>(grad) + item.row * shape.size());
    else
      unpack(shape, sum, scale, static_cast<A*>(partial) + item.slot * shape.size());
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  bool over_rows_;
  int heads_;
  DotScore<T> score_;
  Rows<T> values_;
  const T* fixed_;
  EdgeBlock<T> block_;
  EdgeInputs<T> inputs_;
  Buffer<A> edges_;  // f alpha, the gradient of the score, the gradient of the edge weight
  Buffer<A> scale_;
  Buffer<A> row_, score_sum_, value_sum_;  // packed
};

template <class T>
void backward_as(const BackwardParams& p, const Parallel& parallel) {
  const Arrays<T> a(p);
  const Shape& shape = p.shape;
  node_stats(p, a, parallel);
  if (p.score == Score::additive) {
    parallel_items(parallel, p.reverse, [&](int64_t first, int64_t last) {
      AdditiveSources<T> work(p, a);
      for (int64_t k = first; k < last; ++k) work(p.reverse.items[k]);
    });
    merge_splits<Acc<T>>(p.reverse, parallel, shape.heads, 1, p.partial_alpha, p.grad_alpha_src);
    if (a.grad_alpha_dst && !a.from_positive())
      sum_rows(p.csr, parallel, shape.heads, a.partial_sums, a.grad_alpha_dst,
               [&](int64_t e) { return a.grad_bias[e]; });
  } else {
    for (const bool over_rows : {true, false}) {
      const Csr& csr = over_rows ? p.csr : p.reverse;
      parallel_items(parallel, csr, [&](int64_t first, int64_t last) {
        DotPass<T> work(p, a, over_rows);
        for (int64_t k = first; k < last; ++k) work(csr.items[k]);
      });
    }
    merge_splits<T>(p.csr, parallel, shape.heads, shape.dim, p.partial_query, p.grad_query);
    merge_splits<T>(p.reverse, parallel, shape.heads, shape.dim, p.partial_key, p.grad_key);
  }
  merge_splits<T>(p.reverse, parallel, shape.heads, shape.value_dim, p.partial_value, p.grad_value);
}

}  // namespace

void backward(const BackwardParams& p, const Parallel& parallel) {
  switch (p.dtype) {
    case DType::f32:
      return backward_as<float>(p, parallel);
    case DType::f64:
      return backward_as<double>(p, parallel);
    case DType::f16:
      return backward_as<Half>(p, parallel);
    case DType::bf16:
      return backward_as<BFloat16>(p, parallel);
  }
}

}  // namespace dfgnn::cpu::DFGNN_ISA
