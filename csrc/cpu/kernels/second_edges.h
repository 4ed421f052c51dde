// The scalars per edge and head in the backward of attention's backward, edge-major, for the edges of a group
// of rows. Names are those of docs/internals/second_derivatives.md.
//
// There are three loops over a row's edges. weigh() and sum() compute the sums of the softmax, of alpha f p
// and of alpha t; centre() and sum_moments() the sum of alpha y; settle() the factors of rows and the
// gradients of the edges' options. y is computed from f p and t less their means. It differs from the y of
// that page by a constant of the row, and is small where f p and t hardly vary.
#pragma once

#include "cpu/second_order.h"
#include "groups.h"

namespace dfgnn::cpu::DFGNN_ISA {

template <class A, int W, int... I>
static inline Vec<A, W> even_lanes(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...);
}
template <class A, int W, int... I>
static inline Vec<A, W> odd_lanes(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Splits W groups of four scalars into four vectors.
template <class A, int W>
static inline void split_fours(const A* fours, Vec<A, W>* out) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  using V = Vec<A, W>;
  const V a = load_vector<V>(fours), b = load_vector<V>(fours + W), c = load_vector<V>(fours + 2 * W),
          d = load_vector<V>(fours + 3 * W);
  const V even = even_lanes<A, W>(a, b, lanes), even2 = even_lanes<A, W>(c, d, lanes),
          odd = odd_lanes<A, W>(a, b, lanes), odd2 = odd_lanes<A, W>(c, d, lanes);
  out[0] = even_lanes<A, W>(even, even2, lanes), out[1] = even_lanes<A, W>(odd, odd2, lanes);
  out[2] = odd_lanes<A, W>(even, even2, lanes), out[3] = odd_lanes<A, W>(odd, odd2, lanes);
}

template <class T>
class SecondEdges {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  using Block = EdgeBlock<T, EdgeMajor>;

  // most_rows: the most rows of a group
  SecondEdges(const SecondParams& p, int most_rows)
      : p_(p),
        heads_(p.shape.heads),
        size_(heads_ * EdgeMajor::kEdges + kLanes<A>),
        slope_(p.score == Score::additive_v2 ? A(1) : A(p.negative_slope)),
        scale_(p.score == Score::dot ? A(p.scale) : A(1)),
        after_(p.edge.bias_after),
        arrays_(int64_t(kArrays) * size_ + kLanes<A>),
        products_(int64_t(4) * size_ + 4 * kLanes<A>),
        sums_(int64_t(kSecondSums) * heads_ * most_rows),
        stats_(int64_t(2) * heads_ * most_rows) {}

  int heads() const { return heads_; }
  int size() const { return size_; }
  // Edge-major [n, H, 4], split by take(): raw and t_raw without `scale`, p without gamma, u.
  A* products() const { return products_; }
  // The first of four consecutive arrays, which may be saved and restored.
  A* raw() const { return array(0); }
  A* t_raw() const { return array(1); }
  // Results of settle(): A, R and M times `scale`, f alpha; four consecutive arrays.
  A* of_p() const { return array(4); }
  A* of_raw() const { return array(5); }
  A* of_t() const { return array(6); }
  A* share() const { return array(7); }
  // [rows, kSecondSums, H]
  A* sums() const { return sums_; }

  void take(const Block& block) {
    block.each([&](int i) {
      V four[4];
      split_fours<A, kLanes<A>>(products_ + 4 * i, four);
      store_vector(raw() + i, four[0] * scale_), store_vector(t_raw() + i, four[1] * scale_);
      store_vector(p() + i, four[2]), store_vector(u() + i, four[3]);
    });
  }

  // Computes alpha, not yet divided by the row's sum, and t.
  void weigh(Block& block, const Group& group) {
    find_stats(group);
    __builtin_memcpy(z(), raw(), size_ * sizeof(A));
    block.transform(z());
    const A *of_bias = find(p_.of_bias, block, 14), *of_gate = find(p_.of_gate, block, 15);
    if (const A* gamma = find(p_.grad_attention, block, 16))
      block.update(p(), [&](V p, int i) { return p + load_vector<V>(gamma + i); });
    block.each([&](int i) {
      const V z = load_vector<V>(this->z() + i), slope = leaky_slope(z, slope_);
      const V score = block.score(leaky_relu(z, slope_), i);
      V t = load_vector<V>(t_raw() + i);
      if (block.gate) t *= load_vector<V>(block.gate + i);
      if (of_gate) t += load_vector<V>(raw() + i) * load_vector<V>(of_gate + i);
      if (of_bias && !after_) t += load_vector<V>(of_bias + i);
      t *= slope;
      if (of_bias && after_) t += load_vector<V>(of_bias + i);
      store_vector(this->t() + i, t);
      store_vector(alpha() + i, exp<A, kLanes<A>>((score - load_vector<V>(row_array(0) + i)) -
                                                  load_vector<V>(row_array(1) + i)));
    });
  }

  // Writes to sums() the sums of alpha, alpha f p and alpha t over the edges of each row.
  void sum(const Block& block, const Group& group) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W total{}, of_p{}, of_t{};
        for (int i = begin * heads_ + h; i < end * heads_; i += heads_) {
          const W alpha = load_vector<W>(this->alpha() + i), p = load_vector<W>(this->p() + i);
          total += alpha, of_t += alpha * load_vector<W>(t() + i);
          of_p += alpha * (block.factor ? p * load_vector<W>(block.factor + i) : p);
        }
        A* const to = sums_ + int64_t(r) * kSecondSums * heads_ + h;
        store_vector(to, total), store_vector(to + heads_, of_p), store_vector(to + 2 * heads_, of_t);
      });
    });
  }

  // Replaces the sums of f p and t by their means. A row whose weights are all 0 is left as it is.
  void divide(int rows, A* sums) const {
    for (int r = 0; r < rows; ++r, sums += kSecondSums * heads_)
      for (int h = 0; h < heads_; ++h) {
        A& total = sums[h];
        if (total == 0) total = 1;
        sums[heads_ + h] /= total, sums[2 * heads_ + h] /= total;
      }
  }

  // Computes alpha, f p - delta, t - tau and y. The score of a row's only edge has no gradient: an exact 0
  // keeps rounding from making one.
  void centre(const Block& block, const Group& group, const A* sums) {
    spread<3>(group, sums, 0);
    const A* of_weight = find(p_.of_weight, block, 17);
    block.each([&](int i) {
      const V alpha = load_vector<V>(this->alpha() + i) / load_vector<V>(row_array(0) + i);
      const V p = load_vector<V>(this->p() + i), u = load_vector<V>(this->u() + i),
              t = load_vector<V>(this->t() + i);
      const V fp = block.factor ? p * load_vector<V>(block.factor + i) : p;
      const V centred = alpha == 1 ? fp * 0 : fp - load_vector<V>(row_array(1) + i),
              moved = alpha == 1 ? t * 0 : t - load_vector<V>(row_array(2) + i);
      V y = centred * moved + (block.factor ? u * load_vector<V>(block.factor + i) : u);
      if (of_weight) y += p * masked(block, load_vector<V>(of_weight + i), i);
      store_vector(this->alpha() + i, alpha), store_vector(this->t() + i, moved);
      store_vector(this->centred() + i, centred), store_vector(this->y() + i, y);
    });
  }

  // Writes to sums() the sums of alpha y over the edges of each row.
  void sum_moments(const Group& group) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W total{};
        for (int i = begin * heads_ + h; i < end * heads_; i += heads_)
          total += load_vector<W>(alpha() + i) * load_vector<W>(y() + i);
        store_vector(sums_ + (int64_t(r) * kSecondSums + 3) * heads_ + h, total);
      });
    });
  }

  void settle(const Block& block, const Group& group, const A* sums) {
    spread<1>(group, sums, 3);
    const A *of_weight = p_.of_weight ? array(17) : nullptr, *of_gate = p_.of_gate ? array(15) : nullptr;
    block.each([&](int i) {
      const V alpha = load_vector<V>(this->alpha() + i), y = load_vector<V>(this->y() + i);
      const V slope = leaky_slope(load_vector<V>(z() + i), slope_);
      const V d = alpha * (alpha == 1 ? y * 0 : y - load_vector<V>(row_array(0) + i));
      const V dz = d * slope, first = alpha * load_vector<V>(centred() + i) * slope;
      const V t = load_vector<V>(this->t() + i);
      V moved = t, share = alpha, raw = dz, of_t = first;
      if (block.factor) moved *= load_vector<V>(block.factor + i), share *= load_vector<V>(block.factor + i);
      if (of_weight) moved += masked(block, load_vector<V>(of_weight + i), i);
      if (block.gate) raw *= load_vector<V>(block.gate + i), of_t *= load_vector<V>(block.gate + i);
      if (of_gate) raw += first * load_vector<V>(of_gate + i);
      store_vector(of_p() + i, moved * alpha), store_vector(this->share() + i, share);
      store_vector(of_raw() + i, raw * scale_), store_vector(this->of_t() + i, of_t * scale_);
      if (p_.grad_bias) store_vector(array(12) + i, after_ ? d : dz);
      if (p_.grad_gate)
        store_vector(array(13) + i,
                     load_vector<V>(this->raw() + i) * dz + first * load_vector<V>(t_raw() + i));
      if (p_.grad_weight)
        store_vector(array(18) + i,
                     masked(block, alpha * (load_vector<V>(p() + i) * t + load_vector<V>(u() + i)), i));
    });
    write(of_p(), block, p_.grad_grad_attention), write(array(12), block, p_.grad_bias);
    write(array(13), block, p_.grad_gate), write(array(18), block, p_.grad_weight);
  }

  // Adds the sums [first, last) of a block to those of its row.
  void add(int first, int last, A* sums) const {
    for (int i = first * heads_; i < last * heads_; ++i) sums[i] += sums_[i];
  }

  // Writes to `sums` [rows, H] the sums of R over the edges of each row.
  void sum_raw(const Group& group, A* sums) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W total{};
        for (int i = begin * heads_ + h; i < end * heads_; i += heads_) total += load_vector<W>(of_raw() + i);
        store_vector(sums + r * heads_ + h, total);
      });
    });
  }

 private:
  static constexpr int kArrays = 22;
  A* array(int k) const { return arrays_ + int64_t(k) * size_; }
  A* p() const { return array(2); }
  A* u() const { return array(3); }
  A* z() const { return array(8); }
  A* alpha() const { return array(9); }
  A* t() const { return array(10); }
  A* y() const { return array(11); }
  A* centred() const { return array(4); }  // until settle() overwrites it with A
  A* row_array(int k) const { return array(19 + k); }

  // x times the dropout mask
  V masked(const Block& block, V x, int i) const {
    return block.dropout ? x * load_vector<V>(block.dropout + i) : x;
  }

  // Returns a cotangent [E, H] for the block's edges as array k, or null if there is no table.
  const A* find(const void* table, const Block& block, int k) {
    if (table)
      gather<EdgeMajor>(static_cast<const A*>(table), block.eid, block.n, 0, heads_, heads_, array(k), 0);
    return table ? array(k) : nullptr;
  }
  void write(const A* from, const Block& block, void* table) const {
    if (table) scatter<EdgeMajor>(from, 0, block.eid, block.n, heads_, static_cast<A*>(table));
  }

  // Copies K of the rows' sums [rows, kSecondSums, H], from `first` on, to each of their edges.
  template <int K>
  void spread(const Group& group, const A* sums, int first) {
    spread_rows<K>(group, sums + first * heads_, kSecondSums);
  }
  template <int K>
  void spread_rows(const Group& group, const A* rows, int kinds) {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each_edge([&](int r, int e) {
        const A* from = rows + int64_t(r) * kinds * heads_ + h;
#pragma GCC unroll 3
        for (int k = 0; k < K; ++k)
          store_vector(row_array(k) + e * heads_ + h, load_vector<W>(from + k * heads_));
      });
    });
  }

  void find_stats(const Group& group) {
    const A* stats = static_cast<const A*>(p_.stats) + group.row * heads_ * 2;
    for (int r = 0; r < group.rows; ++r)
      for (int h = 0; h < heads_; ++h)
        for (int k = 0; k < 2; ++k) stats_[(r * 2 + k) * heads_ + h] = stats[(r * heads_ + h) * 2 + k];
    spread_rows<2>(group, stats_, 2);
  }

  const SecondParams& p_;
  int heads_, size_;  // size_: of an array, and a line more, so that arrays do not share a set of the cache
  A slope_, scale_;
  bool after_;
  Buffer<A> arrays_, products_, sums_, stats_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
