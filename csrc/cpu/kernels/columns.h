// The operations of rows.h for groups of short rows, on feature rows of C = H * D columns in memory order: a
// vector may cover columns of several heads, and the last vector overlaps the one before. A permutation
// copies a scalar per edge and head to the lanes of its D columns; products are added up per head by halving,
// for all edges of a group together. Arrays per edge and head are edge-major; arrays per row are [rows, C] or
// [rows, H].
//
// L is LeakyReLU, L' its derivative. Other words, vectors: rows.h. Names from other files:
// groups.h:
//   Group           `rows` rows from `row` on, with n edges from `begin` on. each(f) calls f(r, first edge,
//                   end) for each row, each_edge(f) calls f(r, e) for each edge
// rows.h, simd.h:
//   RowShape        how a row consists of vectors: width, vectors, last; feature(shape, v, width): the first
//                   element of vector v
//   with_layout     calls f(width, whether vectors come in pairs), both as constants
//   spread<A, W>    (x, lane): the vector whose lane l is x[lane[l]]
//   kInPairs<T>     whether T (bfloat16) is read as pairs of vectors; load_pair reads one: of the even and of
//                   the odd elements
// head_sums.h, ahead.h:
//   HeadSums        sums per head of a row's columns, for many edges together
//   Ahead           ahead(e): the index of the row to prefetch while edge e is processed; prefetch: does so
#pragma once

#include "groups.h"
#include "head_sums.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Calls f(integral constant width, i) for the whole vectors of elements 0 ... n - 1, and then with a width of
// 1 for the remaining elements. i: the first element.
template <class A, class F>
[[gnu::always_inline]] static inline void for_columns(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(std::integral_constant<int, kLanes<A>>(), i);
  for (; i < n; ++i) f(std::integral_constant<int, 1>(), i);
}

// Converts n elements of x to accumulators. in_pairs: writes each 2 W of them as a Pair (simd.h), the even
// ones before the odd ones, if T is read so.
template <class T>
static inline void to_accumulators(const T* x, int64_t n, bool in_pairs, Acc<T>* out) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  if (kInPairs<T> && in_pairs)
    for (int64_t i = 0; i < n; i += 2 * W) {
      const auto pair = load_pair<T, W>(x + i);
      store_vector(out + i, pair.even), store_vector(out + i + W, pair.odd);
    }
  else
    for_columns<A>(n, [&](auto width, int64_t i) { store_vector(out + i, load<T, width.value>(x + i)); });
}

// The rows [rows, C] of a group's own nodes, the fixed ends of its edges, as the argument `fixed` of Columns:
// of accumulators, in the order that Columns::paired describes.
template <class T>
class FixedRows {
 public:
  using A = Acc<T>;
  FixedRows(const void* data, int heads, int dim, int most_rows)
      : data_(static_cast<const T*>(data)),
        size_(int64_t(heads) * dim),
        in_pairs_(matrix_shape<T>(heads, dim).paired),
        rows_(std::is_same_v<T, A> ? 0 : size_ * most_rows) {}

  const A* of(const Group& group) const {
    const T* rows = data_ + group.row * size_;
    if constexpr (std::is_same_v<T, A>) {
      return rows;
    } else {
      to_accumulators(rows, group.rows * size_, in_pairs_, rows_);
      return rows_;
    }
  }

 private:
  const T* data_;
  int64_t size_;
  bool in_pairs_;
  Buffer<A> rows_;
};

// Where sums [rows, C] are written: to `rows`, of the features' type, or if that is null to `sums`, of
// accumulators. If both are null, there is no such sum.
template <class T>
struct SumRows {
  T* rows = nullptr;
  Acc<T>* sums = nullptr;
  operator bool() const { return rows || sums; }
};

// What an aggregation prefetches. limit: how many indices may be read; 0 turns prefetching off. hot: the rows
// that the group gathers are in cache, and one line of each row of the next group is prefetched instead, so
// that the processor translates the addresses of their pages early.
struct Fetch {
  int64_t limit;
  bool hot;
  Fetch(int64_t limit, bool hot = false) : limit(limit), hot(hot && limit > 0) {}
};

// The heads of a tile, which is some adjacent vectors of columns that stay in registers:
//   same    all vectors are within one head
//   next    each vector (if they come in pairs, each pair) is a whole head
//   any     each vector is within a head
//   mixed   a vector may cover columns of several heads
enum class TileHeads { same, next, any, mixed };

// A gathered matrix [N, H, D], whose rows are read as C columns.
template <class T>
class Columns {
 public:
  using A = Acc<T>;

  // data: a matrix [N, H, D].
  Columns(const void* data, int heads, int dim);

  int64_t size() const { return size_; }
  const T* row(int64_t k) const { return data_ + k * size_; }

  // Whether the arguments `fixed` and `attn`, below, have each 2 W adjacent columns as a Pair (simd.h): a
  // vector of the even columns and, behind it, a vector of the odd ones.
  bool paired() const { return paired_; }

  // In the functions below, x is the matrix, index_e the row of it that edge e gathers, limit says how many
  // entries of `index` may be read in order to prefetch (0 turns prefetching off), and `fixed` [rows, C] are
  // the group's own rows.

  // a[r] = factor[r] (sum over the edges e of row r of w[e] x[index_e]) + plus[r * plus_stride]. a2, unless
  // null, is the same with w2 and without `plus`. factor: [rows, H], or null for 1; plus: [rows, C], or with
  // a plus_stride of 0 one row [C] for all rows; or null for 0.
  void aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* w, const A* w2,
                 const A* factor, const A* plus, int64_t plus_stride, SumRows<T> a, SumRows<T> a2) const;
  // a[r] = sum over the edges e of row r of w[e] x[index_e]
  void aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* w, SumRows<T> a) const {
    aggregate(group, index, fetch, w, nullptr, nullptr, nullptr, 0, a, {});
  }
  // With u_e = x[index_e] + fixed[r]: a[r] = attn * (sum over the edges e of row r of w[e] L'(u_e)); and
  // unless a2 is null a2[r] = sum of w[e] L(u_e).
  void leaky_aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* fixed, const A* attn,
                       A slope, const A* w, SumRows<T> a, SumRows<T> a2) const;

  // s[e, h] = x[index_e, h] . fixed[r, h], rounded like Rows::dots, because forward may compute a score by
  // one of these two functions and backward by the other.
  void dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed, A* s);
  // s[e, h] = attn[h] . L(u_e[h]), with u_e of leaky_aggregate.
  void leaky_dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed, const A* attn,
                  A slope, A* s);

 private:
  template <int W, bool pairs, TileHeads tile, int V, class Terms>
  void aggregate_tile(int vector, const Group& group, const int32_t* index, Fetch fetch, const Terms& terms,
                      SumRows<T> a, SumRows<T> a2) const;
  template <class MakeTerms>
  void aggregate_all(const Group& group, const int32_t* index, Fetch fetch, const MakeTerms& make_terms,
                     SumRows<T> a, SumRows<T> a2) const;
  template <class Term>
  void dots_all(const Group& group, const int32_t* index, int64_t limit, const A* fixed, const Term& term,
                A* s);

  // Returns by how many heads the last column of vector `last` is behind the first column of vector v.
  int heads_between(int v, int last, int width) const {
    return int(head_[last] - head_[v] + offset_[last * width + width - 1]);
  }

  const T* data_;
  int heads_, dim_;
  int64_t size_;
  bool paired_;             // whether pairs of vectors fill a head
  RowShape shape_;          // of a row as one head of C columns; paired if pairs of vectors fill the row
  Buffer<int32_t> head_;    // per vector: the head of its first column
  Buffer<Bits<A>> offset_;  // per vector and lane: the column's head, relative to head_
  HeadSums<A> sums_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
