// The operations of rows.h for groups of short rows, on feature rows of C = H * D columns in memory order: a
// vector may cover columns of several heads, and the last vector overlaps the one before. A permutation
// copies a scalar per edge and head to the lanes of its D columns; products are added up per head by halving,
// for all edges of a group together. Arrays per edge and head are edge-major; arrays per row are [rows, C] or
// [rows, H].
//
// Words and vectors: rows.h. Names from other files:
// groups.h:
//   Group         rows, n edges; row, begin: the first ones. each(f): f(r, first edge, end) per row;
//                 each_edge(f): f(r, e)
// rows.h, simd.h:
//   RowShape      vectors of a row: width, vectors, last; feature(shape, v, width): first element of vector
//                 v
//   with_layout   calls f(width, whether vectors come in pairs), as constants
//   spread<A, W>  (x, lanes): x[lane] in each lane; kInPairs, load_pair: bfloat16 as even and odd elements
// head_sums.h, ahead.h:
//   HeadSums      sums per head of a row's columns, for many edges together
//   Ahead         (e): the index of the row to prefetch during edge e; prefetch: does so
#pragma once

#include "groups.h"
#include "head_sums.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Calls f(integral constant width, i) for whole vectors of elements 0 ... n - 1, and then for single
// elements.
template <class A, class F>
[[gnu::always_inline]] static inline void for_columns(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(std::integral_constant<int, kLanes<A>>(), i);
  for (; i < n; ++i) f(std::integral_constant<int, 1>(), i);
}

// Converts x[n] to accumulators. in_pairs: in the order of pairs of vectors (simd.h).
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

// The rows [rows, C] of the group, which are the fixed ends of its edges, in the layout of Columns.
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

// Where sums are written, [rows, C]: to `rows` of the features' type, or else to `sums` of accumulators;
// nowhere if both are null.
template <class T>
struct SumRows {
  T* rows = nullptr;
  Acc<T>* sums = nullptr;
  operator bool() const { return rows || sums; }
};

// What an aggregation prefetches. limit: the number of indices that may be read; 0 turns prefetching off.
// hot: the group's rows are in cache, and one line of each row of the next group is prefetched instead, so
// that the processor translates their addresses early.
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

template <class T>
class Columns {
 public:
  using A = Acc<T>;

  // data: a matrix [N, H, D].
  Columns(const void* data, int heads, int dim);

  int64_t size() const { return size_; }
  const T* row(int64_t k) const { return data_ + k * size_; }

  // Whether `fixed` and `attn`, below, have each 2 W adjacent columns as a vector of the even ones and,
  // behind it, a vector of the odd ones (Pair in simd.h).
  bool paired() const { return paired_; }

  // In the functions below, x is the matrix, index_e the row of it that edge e reads, limit the number of
  // indices that may be read to prefetch, where 0 turns prefetching off, and fixed are the group's own rows
  // [rows, C].

  // a[r] = factor[r] (sum over the edges e of row r of w[e] x[index_e]) + plus[r * plus_stride]. a2, unless
  // null, is the same with w2 and without `plus`. factor: [rows, H], or null for 1; plus: rows of C columns,
  // or one for all rows with a plus_stride of 0; or null for 0.
  void aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* w, const A* w2,
                 const A* factor, const A* plus, int64_t plus_stride, SumRows<T> a, SumRows<T> a2) const;
  // The same with only one sum, and without factor and plus.
  void aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* w, SumRows<T> a) const {
    aggregate(group, index, fetch, w, nullptr, nullptr, nullptr, 0, a, {});
  }
  // With u_e = x[index_e] + fixed[r]: a[r] = attn sum of w[e] L'(u_e), and a2[r] = sum of w[e] L(u_e) unless
  // it is null.
  void leaky_aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* fixed, const A* attn,
                       A slope, const A* w, SumRows<T> a, SumRows<T> a2) const;

  // s[e, h] = x[index_e, h] . fixed[r, h], rounded like Rows::dots: forward may use one of the two functions
  // for a score, and backward the other.
  void dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed, A* s);
  // s[e, h] = attn[h] . L(u_e[h])
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
  bool paired_;             // pairs of vectors fill a head
  RowShape shape_;          // of one head of C columns; paired if pairs fill a row
  Buffer<int32_t> head_;    // per vector: the head of its first column
  Buffer<Bits<A>> offset_;  // per vector and lane: the column's head, relative to head_
  HeadSums<A> sums_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
