// Products of small dense matrices, and how rows of one head are gathered for them.
#pragma once

#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {

// A product keeps kDenseRows rows of kDenseVectors vectors of its result in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDenseRows = 8, kDenseVectors = 2;
#elif defined(__AVX2__)
constexpr int kDenseRows = 6, kDenseVectors = 2;
#else
constexpr int kDenseRows = 4, kDenseVectors = 2;
#endif

// n, rounded up to whole vectors.
template <class A>
constexpr int64_t padded(int64_t n) {
  return (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// A matrix whose element (i, k) is at data[i * row + k * column].
template <class A>
struct Strided {
  const A* data;
  int64_t row, column;
};

// R rows and C vectors of columns of c = or += a b.
template <class A, int R, int C>
[[gnu::always_inline]] static inline void dense_tile(A* c, int64_t c_row, Strided<A> a, const A* b,
                                                     int64_t b_row, int64_t depth, bool add) {
  constexpr int W = kLanes<A>;
  using V = Vec<A, W>;
  V sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < C; ++n) sums[r][n] = add ? load_vector<V>(c + r * c_row + n * W) : V{};
  for (int64_t k = 0; k < depth; ++k) {
    V columns[C];
#pragma GCC unroll 4
    for (int n = 0; n < C; ++n) columns[n] = load_vector<V>(b + k * b_row + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const A factor = a.data[r * a.row + k * a.column];
#pragma GCC unroll 4
      for (int n = 0; n < C; ++n) sums[r][n] += columns[n] * factor;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < C; ++n) store_vector(c + r * c_row + n * W, sums[r][n]);
}

template <class A, int C, int R>
static inline void dense_rows(int64_t rows, A* c, int64_t c_row, Strided<A> a, const A* b, int64_t b_row,
                              int64_t depth, bool add) {
  for (; rows >= R; rows -= R, c += R * c_row, a.data += R * a.row)
    dense_tile<A, R, C>(c, c_row, a, b, b_row, depth, add);
  if constexpr (R > 1) {
    if (rows) dense_rows<A, C, (R > 4 ? 4 : R / 2)>(rows, c, c_row, a, b, b_row, depth, add);
  }
}

// c = a b, or with `add` c += a b: c has `rows` rows and `columns` columns, which are whole vectors, and the
// sums have `depth` terms. The rows of b and c are contiguous, b_row and c_row elements apart.
template <class A>
static inline void multiply(A* c, int64_t c_row, Strided<A> a, const A* b, int64_t b_row, int64_t rows,
                            int64_t columns, int64_t depth, bool add) {
  constexpr int W = kLanes<A>, C = kDenseVectors;
  int64_t n = 0;
  for (; n + C * W <= columns; n += C * W)
    dense_rows<A, C, kDenseRows>(rows, c + n, c_row, a, b + n, b_row, depth, add);
  for (; n < columns; n += W) dense_rows<A, 1, kDenseRows>(rows, c + n, c_row, a, b + n, b_row, depth, add);
}

// The rows of one head of an array [nodes, heads, width] T.
template <class T>
struct HeadRows {
  const T* data;
  int64_t stride;
  int width;
  HeadRows(const void* x, int heads, int columns, int head)
      : data(static_cast<const T*>(x) + int64_t(head) * columns),
        stride(int64_t(heads) * columns),
        width(columns) {}

  // to [count, padded(width)] = rows [first, first + count) times a factor, with zeros behind each row.
  void copy(int64_t first, int64_t count, Acc<T> factor, Acc<T>* to) const {
    using A = Acc<T>;
    constexpr int W = kLanes<A>;
    const int64_t wide = padded<A>(width);
    for (int64_t r = 0; r < count; ++r, to += wide) {
      const T* from = data + (first + r) * stride;
      int d = 0;
      for (; d + W <= width; d += W) store_vector(to + d, load<T, W>(from + d) * factor);
      for (; d < width; ++d) to[d] = load<T, 1>(from + d) * factor;
      for (; d < wide; ++d) to[d] = 0;
    }
  }
  // to [width, columns] = the rows' transpose, with zeros behind `count` columns. columns: count, padded.
  // `rows` are these rows, as copy() wrote them with the factor 1.
  void transpose(const Acc<T>* rows, int64_t count, int64_t columns, Acc<T>* to) const {
    using A = Acc<T>;
    using V = Vec<A, 4>;
    const int64_t wide = padded<A>(width);
    int64_t r = 0;
    for (; r + 4 <= count; r += 4)
      for (int d = 0; d < width; d += 4) {  // four by four; beyond the width there are zeros
        V a[4];
        for (int k = 0; k < 4; ++k) a[k] = load_vector<V>(rows + (r + k) * wide + d);
        const V p = shuffled<0, 4, 1, 5>(a[0], a[1]), q = shuffled<0, 4, 1, 5>(a[2], a[3]),
                s = shuffled<2, 6, 3, 7>(a[0], a[1]), t = shuffled<2, 6, 3, 7>(a[2], a[3]);
        const V lines[4] = {shuffled<0, 1, 4, 5>(p, q), shuffled<2, 3, 6, 7>(p, q),
                            shuffled<0, 1, 4, 5>(s, t), shuffled<2, 3, 6, 7>(s, t)};
        for (int k = 0; k < 4 && d + k < width; ++k) store_vector(to + (d + k) * columns + r, lines[k]);
      }
    for (int d = 0; d < width; ++d) {
      for (int64_t k = r; k < count; ++k) to[d * columns + k] = rows[k * wide + d];
      for (int64_t k = count; k < columns; ++k) to[d * columns + k] = 0;
    }
  }
};

// Writes rows [count, padded(width)] of accumulators, times a factor, as rows [first, ...) of one head.
template <class T>
static inline void write_rows(const Acc<T>* from, int64_t count, int64_t first, Acc<T> factor, void* out,
                              int heads, int width, int head) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  const int64_t wide = padded<A>(width);
  for (int64_t r = 0; r < count; ++r, from += wide) {
    T* to = static_cast<T*>(out) + ((first + r) * heads + head) * width;
    int d = 0;
    for (; d + W <= width; d += W) store<T, W>(to + d, load_vector<Vec<A, W>>(from + d) * factor);
    for (; d < width; ++d) store<T, 1>(to + d, from[d] * factor);
  }
}

}  // namespace dfgnn::cpu::DFGNN_ISA
