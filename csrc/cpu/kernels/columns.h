// The operations of rows.h for groups of short rows, on rows of C = H * D columns as they lie in memory:
// vectors take columns whatever heads they belong to, the last one overlaps the one before, and nothing is
// packed. A number per edge and head is spread over its D columns by a permutation; products are folded to
// sums per head by halves, for all edges at once. Arrays per edge and head are edge-major; those per row are
// [rows, C] or [rows, H].
#pragma once

#include "groups.h"
#include "head_sums.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Calls f(integral constant width, i) for vectors of numbers 0 ... n - 1 and then for the rest one by one.
template <class A, class F>
[[gnu::always_inline]] static inline void for_columns(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(std::integral_constant<int, kLanes<A>>(), i);
  for (; i < n; ++i) f(std::integral_constant<int, 1>(), i);
}

// out[i] = a[i] + bias[i], i < n; bias null: 0.
template <class T>
static inline void convert(const Acc<T>* a, int64_t n, const T* bias, T* out) {
  using A = Acc<T>;
  for_columns<A>(n, [&](auto width, int64_t i) {
    constexpr int W = width.value;
    const Vec<A, W> x = load_vector<Vec<A, W>>(a + i);
    store<T, W>(out + i, bias ? x + load<T, W>(bias + i) : x);
  });
}

template <class T>
class Columns {
 public:
  using A = Acc<T>;

  // data: [N, H, D]
  Columns(const void* data, int heads, int dim);

  int64_t size() const { return size_; }
  const T* row(int64_t k) const { return data_ + k * size_; }

  // `limit` below: so many indices may be read, to prefetch; 0 if the rows are in cache already. Rows of the
  // group's ends, [rows, C], are `fixed`.

  // a[r] = factor[r] times the sum of w[e] x[index_e] over the edges e of row r; a2 likewise, with w2, unless
  // that is null. factor: [rows, H], or null: 1.
  void aggregate(const Group& group, const int32_t* index, int64_t limit, const A* w, const A* w2,
                 const A* factor, A* a, A* a2) const;
  // With u_e = x[index_e] + fixed[r]: a[r] = sum of w[e] L'(u_e), a2[r] = sum of w[e] L(u_e) unless it is
  // null.
  void leaky_aggregate(const Group& group, const int32_t* index, int64_t limit, const T* fixed, A slope,
                       const A* w, A* a, A* a2) const;

  // s[e, h] = x[index_e, h] . fixed[r, h], rounded as by Rows::dots: backward may find a score the other way.
  void dots(const Group& group, const int32_t* index, int64_t limit, const T* fixed, A* s);
  // s[e, h] = attn[h] . L(u_e[h])
  void leaky_dots(const Group& group, const int32_t* index, int64_t limit, const T* fixed, const A* attn,
                  A slope, A* s);

 private:
  template <int W, int V, class Terms>
  void aggregate_tile(int vector, const Group& group, const int32_t* index, int64_t limit, const Terms& terms,
                      A* a, A* a2) const;
  template <class MakeTerms>
  void aggregate_all(const Group& group, const int32_t* index, int64_t limit, const MakeTerms& make_terms,
                     A* a, A* a2) const;
  template <class Term>
  void dots_all(const Group& group, const int32_t* index, int64_t limit, const T* fixed, const Term& term,
                A* s);

  const T* data_;
  int heads_, dim_;
  int64_t size_;
  RowShape shape_;          // of one head of C columns
  Buffer<int32_t> head_;    // per vector: the head of its first column
  Buffer<Bits<A>> offset_;  // per vector and lane: the column's head, counted from there
  HeadSums<A> sums_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
