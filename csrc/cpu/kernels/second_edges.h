// Second derivatives of attention on the CPU (second_order.cpp): the scalars per edge and head, edge-major,
// for the edges of a group of rows. The letters are those of docs/internals/second_derivatives.md. S is the
// scalar that is differentiated: the sum of the first backward pass' results, each times its cotangent
// (`of_...`). Of that pass, ds, dz and grad_raw (d raw) are the gradients of the score, of z and of the raw
// score (core/params.h).
//   raw, z       the raw score of forward, and the argument of its LeakyReLU
//   f, m         edge weight times dropout mask; the mask alone
//   p, gamma     g . (v + e) + gamma, of which f p is the derivative of the loss by alpha. gamma is
//                grad_attention (core/params.h)
//   t_raw, t, u  what grad_raw, ds and f alpha are multiplied by in S
//   delta, tau   the sums over a row of alpha f p and of alpha t
//   y, d         the derivatives of S by alpha and by the score
//   kappa        the sum over a row of alpha y
//   A, R, M      the derivatives of S by p, by raw and by t_raw, of which R and M are multiplied by dot's
//                scale; the derivative by u is f alpha. In code, A is a type
//
// There are three loops over a row's edges. In the first, weigh() and sum() compute the sums of alpha, of
// alpha f p and of alpha t; in the second, centre() and sum_moments() compute kappa; in the third, settle()
// computes the derivatives of S. y is computed from f p - delta and t - tau. It differs from the y of the
// page above by a constant of the row, which has no effect on d, and is small where f p and t hardly vary.
#pragma once

#include "cpu/second_order.h"
#include "groups.h"

namespace dfgnn::cpu::DFGNN_ISA {

template <class A, int W, int... I>
static inline Vec<A, W> even_lanes(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  return shuffled<(2 * I)...>(a, b);
}
template <class A, int W, int... I>
static inline Vec<A, W> odd_lanes(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  return shuffled<(2 * I + 1)...>(a, b);
}

// Reads W adjacent entries of four scalars, and writes the k-th scalars of all entries to out[k], k < 4.
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

template <class A>
class SecondEdges {
 public:
  using V = Vec<A, kLanes<A>>;
  using Block = EdgeBlock<A, EdgeMajor>;

  // most_rows: the most rows of a group. slope_ is 1 for GATv2, whose LeakyReLU is a part of its raw score.
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
  // [n, H, 4]: what callers compute for take(): raw and t_raw without dot's scale, p without gamma, and u.
  A* products() const { return products_; }
  // raw, t_raw, p and u are four consecutive arrays, which callers save after take(), and restore.
  A* raw() const { return array(0); }
  A* t_raw() const { return array(1); }
  // Results of settle(), four consecutive arrays: A, R, M and f alpha, which are the derivatives of S by the
  // four scalars p, raw, t_raw and u of products().
  A* by_p() const { return array(4); }
  A* by_raw() const { return array(5); }
  A* by_t_raw() const { return array(6); }
  A* by_u() const { return array(7); }
  // [rows, kSecondSums, H]: the sums that sum() and sum_moments() write, of alpha, alpha f p, alpha t and
  // alpha y.
  A* sums() const { return sums_; }

  // Splits products() into the arrays raw, t_raw, p and u, and multiplies the first two by dot's scale.
  void take(const Block& block) {
    block.each([&](int i) {
      V four[4];
      split_fours<A, kLanes<A>>(products_ + 4 * i, four);
      store_vector(raw() + i, four[0] * scale_), store_vector(t_raw() + i, four[1] * scale_);
      store_vector(p() + i, four[2]), store_vector(u() + i, four[3]);
    });
  }

  // Adds gamma to p, and computes z, t and alpha. alpha is computed from forward's statistics, so that its
  // sum over a row is 1 up to rounding; centre() divides alpha by this sum.
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
        W total{}, sum_p{}, sum_t{};
        for (int i = begin * heads_ + h; i < end * heads_; i += heads_) {
          const W alpha = load_vector<W>(this->alpha() + i), p = load_vector<W>(this->p() + i);
          total += alpha, sum_t += alpha * load_vector<W>(t() + i);
          sum_p += alpha * (block.factor ? p * load_vector<W>(block.factor + i) : p);
        }
        A* const to = sums_ + int64_t(r) * kSecondSums * heads_ + h;
        store_vector(to, total), store_vector(to + heads_, sum_p), store_vector(to + 2 * heads_, sum_t);
      });
    });
  }

  // Divides the sums of alpha f p and alpha t in sums [rows, kSecondSums, H] by that of alpha, which makes
  // them delta and tau. A sum of alpha that is 0 (a row without edges, or with scores of -inf alone) is
  // replaced by 1.
  void divide(int rows, A* sums) const {
    for (int r = 0; r < rows; ++r, sums += kSecondSums * heads_)
      for (int h = 0; h < heads_; ++h) {
        A& total = sums[h];
        if (total == 0) total = 1;
        sums[heads_ + h] /= total, sums[2 * heads_ + h] /= total;
      }
  }

  // Divides alpha by its sum, and computes f p - delta, t - tau (in place of t) and y. sums: after divide().
  // For an edge with all of its row's weight (alpha = 1) both differences are 0, which is set exactly (nan if
  // f p or t is not finite), because rounding would give its score a gradient.
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

  // Writes to sums() kappa, the sum of alpha y over the edges of each row.
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

  // Computes the derivatives of S by p, raw, t_raw and u: by_p(), by_raw(), by_t_raw() and by_u(). Of the
  // gradients of grad_attention (gamma) and of the edges' bias, gate and weight, writes those that are
  // wanted. sums: [rows, kSecondSums, H], of which it reads kappa.
  void settle(const Block& block, const Group& group, const A* sums) {
    spread<1>(group, sums, 3);
    const A *of_weight = p_.of_weight ? array(17) : nullptr, *of_gate = p_.of_gate ? array(15) : nullptr;
    block.each([&](int i) {
      const V alpha = load_vector<V>(this->alpha() + i), y = load_vector<V>(this->y() + i);
      const V slope = leaky_slope(load_vector<V>(z() + i), slope_);
      const V d = alpha * (alpha == 1 ? y * 0 : y - load_vector<V>(row_array(0) + i));
      // by_z is the derivative of S by z; dz is that of the loss.
      const V by_z = d * slope, dz = alpha * load_vector<V>(centred() + i) * slope;
      const V t = load_vector<V>(this->t() + i);
      V moved = t, by_u = alpha, by_raw = by_z, by_t_raw = dz;
      if (block.factor) moved *= load_vector<V>(block.factor + i), by_u *= load_vector<V>(block.factor + i);
      if (of_weight) moved += masked(block, load_vector<V>(of_weight + i), i);
      if (block.gate) by_raw *= load_vector<V>(block.gate + i), by_t_raw *= load_vector<V>(block.gate + i);
      if (of_gate) by_raw += dz * load_vector<V>(of_gate + i);
      store_vector(by_p() + i, moved * alpha), store_vector(this->by_u() + i, by_u);
      store_vector(this->by_raw() + i, by_raw * scale_);
      store_vector(this->by_t_raw() + i, by_t_raw * scale_);
      if (p_.grad_bias) store_vector(array(12) + i, after_ ? d : by_z);
      if (p_.grad_gate)
        store_vector(array(13) + i, load_vector<V>(raw() + i) * by_z + dz * load_vector<V>(t_raw() + i));
      if (p_.grad_weight)
        store_vector(array(18) + i,
                     masked(block, alpha * (load_vector<V>(p() + i) * t + load_vector<V>(u() + i)), i));
    });
    write(by_p(), block, p_.grad_grad_attention), write(array(12), block, p_.grad_bias);
    write(array(13), block, p_.grad_gate), write(array(18), block, p_.grad_weight);
  }

  // For a block of edges of a longer row: adds the block's sums() with indices first ... last - 1 to those of
  // the row, `sums` [kSecondSums, H].
  void add(int first, int last, A* sums) const {
    for (int i = first * heads_; i < last * heads_; ++i) sums[i] += sums_[i];
  }

  // Writes to `sums` [rows, H] the sums of by_raw() over the edges of each row: for GAT, the gradients of the
  // score terms.
  void sum_raw(const Group& group, A* sums) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using W = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        W total{};
        for (int i = begin * heads_ + h; i < end * heads_; i += heads_) total += load_vector<W>(by_raw() + i);
        store_vector(sums + r * heads_ + h, total);
      });
    });
  }

 private:
  // Arrays that have no function below: 12, 13, 18 are the gradients of bias, gate and weight; 14, 15, 17 the
  // cotangents of_bias, of_gate and of_weight; 16 gamma.
  static constexpr int kArrays = 22;
  A* array(int k) const { return arrays_ + int64_t(k) * size_; }
  A* p() const { return array(2); }
  A* u() const { return array(3); }
  A* z() const { return array(8); }
  A* alpha() const { return array(9); }
  A* t() const { return array(10); }
  A* y() const { return array(11); }
  A* centred() const { return array(4); }              // f p - delta, until settle() replaces it by A
  A* row_array(int k) const { return array(19 + k); }  // values of rows, by edge, as copied by spread_rows()

  // Returns x times the dropout mask.
  V masked(const Block& block, V x, int i) const {
    return block.dropout ? x * load_vector<V>(block.dropout + i) : x;
  }

  // Gathers the entries of the block's edges from a table [E, H] into array k, and returns this; or null if
  // the table is null.
  const A* find(const void* table, const Block& block, int k) {
    if (table)
      gather<EdgeMajor>(static_cast<const A*>(table), block.eid, block.n, 0, heads_, heads_, array(k), 0);
    return table ? array(k) : nullptr;
  }
  // Writes an array to the rows of the block's edges in a table [E, H], unless that is null.
  void write(const A* from, const Block& block, void* table) const {
    if (table) scatter<EdgeMajor>(from, 0, block.eid, block.n, heads_, static_cast<A*>(table));
  }

  // Copies K of the kSecondSums sums of each row, from index `first` on, from sums [rows, kSecondSums, H] to
  // the entries of the row's edges in row_array(0), ..., row_array(K - 1). spread_rows() copies the first K
  // of rows [rows, kinds, H] in the same way.
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

  // Copies max and log_sum of the rows (ForwardParams::stats) to the entries of their edges in row_array(0)
  // and row_array(1).
  void find_stats(const Group& group) {
    const A* stats = static_cast<const A*>(p_.stats) + group.row * heads_ * 2;
    for (int r = 0; r < group.rows; ++r)
      for (int h = 0; h < heads_; ++h)
        for (int k = 0; k < 2; ++k) stats_[(r * 2 + k) * heads_ + h] = stats[(r * heads_ + h) * 2 + k];
    spread_rows<2>(group, stats_, 2);
  }

  const SecondParams& p_;
  // size_: the elements of an array. It has a vector (16 to 64 bytes) more than its entries need, so that the
  // same entry of all arrays does not fall into one set of the cache.
  int heads_, size_;
  A slope_, scale_;
  bool after_;  // EdgeOptions::bias_after
  Buffer<A> arrays_, products_, sums_, stats_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
