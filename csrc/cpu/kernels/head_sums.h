// Sums over the columns of each head, [count, H] for `count` feature rows, of terms that the caller computes
// a vector at a time, such as the products of a dot product. These sums round like Rows::dots (rows.h),
// because forward may compute a score by HeadSums and backward by Rows::dots, or the reverse.
#pragma once

#include "rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

// How many columns are processed before their sums are formed, so that their terms stay in the first level of
// cache.
constexpr int kColumnsAtOnce = 2048;

// a and b consist of heads of 2 * L lanes. Returns a vector of heads of L lanes, first those of a, then those
// of b, in which each lane is the sum of two lanes of its head: adjacent ones (neighbours), or such that are
// L apart.
template <class A, int L, bool neighbours, int... I>
[[gnu::always_inline]] static inline Vec<A, kLanes<A>> add_lanes(Vec<A, kLanes<A>> a, Vec<A, kLanes<A>> b,
                                                                 std::integer_sequence<int, I...>) {
  if constexpr (neighbours)
    return shuffled<(2 * I)...>(a, b) + shuffled<(2 * I + 1)...>(a, b);
  else
    return shuffled<(I / L * 2 * L + I % L)...>(a, b) + shuffled<(I / L * 2 * L + I % L + L)...>(a, b);
}

// The heads in the vectors at(k), at(k + 1), ... have D lanes each. Returns one vector in which each of these
// heads has L lanes, which add up to the same sum. The order of additions is that of sum4 (simd.h), so that
// results round alike: the halves of a head are added until D / 4 lanes are left, then neighbours.
template <class A, int L, int D, class At>
[[gnu::always_inline]] static inline Vec<A, kLanes<A>> folded(const At& at, int k = 0) {
  if constexpr (L == D)
    return at(k);
  else
    return add_lanes<A, L, (L < D / 4)>(folded<A, 2 * L, D>(at, k), folded<A, 2 * L, D>(at, k + D / (2 * L)),
                                        std::make_integer_sequence<int, kLanes<A>>());
}

// sums[k] = sum of the elements [k * width, (k + 1) * width) of x. It reads x and writes sums as if `count`
// were rounded up to a multiple of kLanes<A>.
template <class A, int W = kLanes<A>>
static inline void sum_lanes(const A* x, int64_t count, int width, A* sums) {
  if constexpr (W == 1) {
    __builtin_memcpy(sums, x, std::size_t(count) * sizeof(A));
  } else {
    if (width < W) return sum_lanes<A, W / 2>(x, count, width, sums);
    for (int64_t k = 0; k < count; k += kLanes<A>, x += kLanes<A> * W)
      store_vector(sums + k, folded<A, 1, W>([x](int v) __attribute__((always_inline)) {
                     return load_vector<Vec<A, kLanes<A>>>(x + v * kLanes<A>);
                   }));
  }
}

template <class A>
class HeadSums {
 public:
  HeadSums(int heads, int dim)
      : heads_(heads),
        row_(row_shape<A>(1, heads * dim)),
        head_(row_shape<A>(1, dim)),
        lanes_(heads * head_.width),
        most_(lanes_ < kColumnsAtOnce ? kColumnsAtOnce / (lanes_ > 0 ? lanes_ : 1) : 1),
        products_(int64_t(most_) * lanes_ + kLanes<A> * kLanes<A>) {}

  // Writes sums [count, H]. The caller's each(add) calls add(term) for each row, and its term(width, at, own,
  // total) returns total plus the terms of `width` columns from `at` on. It multiplies terms by 0 in lanes
  // whose columns the vector before has, too, by applying own(x) to one factor x. Less than a vector is
  // written beyond the end of `sums`. paired: heads consist of whole Pairs (simd.h), and term has a width of
  // two vectors.
  template <bool paired = false, class Each>
  [[gnu::always_inline]] void operator()(const Each& each, A* sums) const {
    const auto run = [&](const auto& products) __attribute__((always_inline)) {
      A *to = products_, *const full = to + int64_t(most_) * lanes_;
      const auto sum = [&] {
        const int64_t count = (to - products_) / (head_.width > 0 ? head_.width : 1);
        sum_lanes<A>(products_, count, head_.width, sums);
        sums += count, to = products_;
      };
      each([&](const auto& term) __attribute__((always_inline)) {
        products(term, to);
        to += lanes_;
        if (to == full) sum();
      });
      if (to > products_) sum();
    };
    constexpr int W = kLanes<A>;
    if constexpr (paired) {
      if (head_.dim == 2 * W)
        run([&](const auto& term, A* to) __attribute__((always_inline)) { of_pairs<1>(term, to); });
      else
        run([&](const auto& term, A* to) __attribute__((always_inline)) { of_pairs<0>(term, to); });
    } else if (head_.dim == W && heads_ % W == 0) {
      of_squares(each, sums);
    } else if (head_.dim == head_.width) {  // vectors of whole heads
      if (row_.width == W && row_.dim % (4 * W) == 0)
        run([&](const auto& term, A* to) __attribute__((always_inline)) { of_rows<W, 4>(term, to); });
      else
        with_width<A>(row_.width, [&](auto width) {
          run([&](const auto& term, A* to)
                  __attribute__((always_inline)) { of_rows<width.value, 1>(term, to); });
        });
    } else if (head_.dim == 2 * W) {
      run([&](const auto& term, A* to) __attribute__((always_inline)) { of_heads<W, 2>(term, to); });
    } else {
      with_width<A>(head_.width, [&](auto width) {
        run([&](const auto& term, A* to)
                __attribute__((always_inline)) { of_heads<width.value, 0>(term, to); });
      });
    }
  }

 private:
  // The function `own` for vectors of which no other vector has a column: it changes nothing.
  struct All {
    template <class X>
    X operator()(X x) const {
      return x;
    }
  };

  // Sums W heads of W columns at a time, whose terms stay in registers.
  template <class Each>
  [[gnu::always_inline]] void of_squares(const Each& each, A* sums) const {
    constexpr int W = kLanes<A>;
    constexpr std::integral_constant<int, W> width;
    each([&](const auto& term) __attribute__((always_inline)) {
      for (int h = 0; h < heads_; h += W, sums += W) {
        Vec<A, W> products[W];
#pragma GCC unroll 16
        for (int k = 0; k < W; ++k) products[k] = term(width, (h + k) * W, All(), Vec<A, W>{});
        const auto at = [&](int k) __attribute__((always_inline)) { return products[k]; };
        store_vector(sums, folded<A, 1, W>(at));
      }
    });
  }

  // Stores a row's terms, V vectors per iteration, for heads of one vector or less, which sum_lanes adds up.
  template <int W, int V, class Term>
  [[gnu::always_inline]] void of_rows(const Term& term, A* to) const {
    constexpr std::integral_constant<int, W> width;
    for (int v = 0; v < row_.vectors; v += V)
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) {
        const int at = V > 1 ? (v + k) * W : feature(row_, v, W);
        store_vector(to + at, term(width, at, All(), Vec<A, W>{}));
      }
  }

  // Adds up the V vectors of each head, or if V is 0 any number of them, to one vector, which sum_lanes
  // reduces. The last vector may overlap the one before.
  template <int W, int V, class Term>
  [[gnu::always_inline]] void of_heads(const Term& term, A* to) const {
    constexpr std::integral_constant<int, W> width;
    using Vector = Vec<A, W>;
    for (int h = 0, at = 0; h < heads_; ++h, at += head_.dim) {
      Vector total{};
      if constexpr (V > 0) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) total = term(width, at + v * W, All(), total);
      } else {
        for (int v = 0; v < head_.vectors - 1; ++v) total = term(width, at + v * W, All(), total);
        const auto overlap = before<A, W>(0, head_.packed - head_.dim);
        total = term(
            width, at + head_.last,
            [&](Vector x) __attribute__((always_inline)) { return overlap ? Vector{} : x; }, total);
      }
      store_vector(to + h * W, total);
    }
  }

  // Does the same as of_heads for heads of P pairs of vectors, or if P is 0 of any number of pairs.
  template <int P, class Term>
  [[gnu::always_inline]] void of_pairs(const Term& term, A* to) const {
    constexpr int W = kLanes<A>;
    constexpr std::integral_constant<int, 2 * W> width;
    const int pairs = P > 0 ? P : head_.vectors / 2;
    for (int h = 0, at = 0; h < heads_; ++h) {
      Vec<A, W> total{};
      for (int p = 0; p < pairs; ++p, at += 2 * W) total = term(width, at, All(), total);
      store_vector(to + h * W, total);
    }
  }

  int heads_;
  RowShape row_, head_;  // row_: the shape of a row, taken as a single head; head_: that of one head
  int lanes_, most_;     // lanes_: how many elements of products_ a row takes; most_: how many rows it holds
  Buffer<A> products_;   // terms [most_, H, head_.width], and behind them what sum_lanes also reads
};

}  // namespace dfgnn::cpu::DFGNN_ISA
