// Operations on gathered feature rows, over a block of at most kBlock edges of one row. x [N, H, D] is the
// gathered matrix, index_e the row of it that edge e reads, r the fixed row of the block, w weights:
//   dots:             s[h][e]  = x[index_e, h] . r[h]
//   aggregate:        a[h]    += sum_e w[h][e] x[index_e, h]      (for one or two sets of weights)
//   leaky_dots:       s[h][e]  = attn[h] . L(u_e[h]),  u_e[h] = x[index_e, h] + r[h],  L = LeakyReLU
//   leaky_aggregate:  a[h]    += sum_e w[h][e] L'(u_e[h]),  a2[h] += sum_e w[h][e] L(u_e[h]),  L' = dL/du
// and operations on rows of features per edge. Arrays with an entry per edge and head are "head-major": entry
// (h, e) lies at h * kBlock + e.
//
// A row of accumulators (r and a above) is "packed": each head consists of whole vectors. The last vector of
// a head covers its last `width` features. If the width does not divide the dimension it overlaps the one
// before, so that no masks are needed and nothing is read beyond a row. `a` holds the overlapping features
// twice; their second copy is in the last vector. In `r` and `attn` the second copy is 0, so that dot
// products count a feature once. What leaky_aggregate adds to the second copy in `a` is therefore wrong, and
// unpack and scatter_row overwrite it with the first one. In a paired shape vectors come in pairs (simd.h).
//
// Other words and names that the CPU kernels have in common:
//   row              of the CSR: a destination, or in a pass over the sources a source. A feature row: the
//                    features [H, D] of a node or an edge
//   item             a work item: a row of the CSR, or a chunk of one
//   block            at most kBlock edges of one row, which are processed together
//   group            consecutive short rows with up to 128 edges (groups.h). Its arrays per edge and head
//                    are "edge-major": entry (h, e) lies at e * H + h
//   RowShape         a row's heads, dim; packed: elements of a packed head; size(), packed_size(): of a row.
//                    row_shape and matrix_shape make it
//   limit            how many entries of an index array may be read in order to prefetch the rows of later
//                    edges; 0 turns prefetching off
// simd.h:
//   T, A = Acc<T>    the type of the features, and that of sums: double for double, else float
//   Vec<A, W>        a vector of W lanes; kLanes<A>: lanes of the widest one. V: such a vector
//   load<T, W>       W features as accumulators; store: the reverse. load_vector, store_vector: without
//                    conversion
//   splat            a vector of equal lanes; sum, max: over the lanes of a vector; larger, exp1: the larger
//                    of two scalars, the exponential of a scalar
//   before<A, W>     (begin, end): the mask of the lanes l with begin + l < end
//   Pair             a vector of the even and one of the odd ones of 2 W elements, as which bfloat16 is read
//                    (kInPairs)
//   Buffer<A>        an array that lives as long as its scope
#pragma once

#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {

constexpr int kBlock = 64;  // the most edges of a block
// The longest run of vectors that a dot product adds one after another. Sums of such sums round less.
constexpr int kRun = 32;

struct RowShape {
  int heads, dim;
  int width;    // lanes of a vector
  int vectors;  // vectors per head
  int last;     // first feature of a head's last vector
  int packed;   // vectors * width
  bool paired;  // whether pairs of the widest vectors fill a head
  int64_t size() const { return int64_t(heads) * dim; }
  int64_t packed_size() const { return int64_t(heads) * packed; }
};

// Returns the shape with the widest vectors that fit in a head; single elements if no vector of 16 bytes
// does.
template <class A>
static inline RowShape row_shape(int heads, int dim) {
  int width = kLanes<A>;
  while (width > 1 && (width > dim || width * sizeof(A) < 16)) width /= 2;
  const int vectors = (dim + width - 1) / width;
  return {heads, dim, width, vectors, dim - width, vectors * width, false};
}

// Returns the shape of a matrix of T, paired if possible. may_pair: false where features of edges are added
// to the rows, because Rows::add_pairs keeps the order of memory.
template <class T>
static inline RowShape matrix_shape(int heads, int dim, bool may_pair = true) {
  RowShape shape = row_shape<Acc<T>>(heads, dim);
  shape.paired = kInPairs<T> && may_pair && dim > 0 && dim % (2 * kLanes<Acc<T>>) == 0;
  return shape;
}

// Calls f(integral constant width) for a `width` that is known at run time only.
template <class A, int W = kLanes<A>, class F>
[[gnu::always_inline]] static inline void with_width(int width, const F& f) {
  if constexpr (W == 1) {
    f(std::integral_constant<int, 1>());
  } else if (width == W) {
    f(std::integral_constant<int, W>());
  } else {
    with_width<A, (W / 2 * sizeof(A) < 16 ? 1 : W / 2)>(width, f);
  }
}

// Calls f(integral constant width, true_type if the shape is paired) for a matrix of T.
template <class T, class F>
[[gnu::always_inline]] static inline void with_layout(const RowShape& shape, const F& f) {
  if constexpr (kInPairs<T>)
    if (shape.paired) return f(std::integral_constant<int, kLanes<Acc<T>>>(), std::true_type());
  with_width<Acc<T>>(shape.width, [&](auto width) { f(width, std::false_type()); });
}

// Returns the first feature of vector v of a head.
static inline int feature(const RowShape& shape, int v, int width) {
  return v == shape.vectors - 1 ? shape.last : v * width;
}

// A gathered matrix [N, H, D].
template <class T>
struct Rows {
  using A = Acc<T>;
  const T* data;
  RowShape shape;

  const T* row(int64_t k) const { return data + k * shape.size(); }

  // The formulas are at the head of this file. limit: how many entries of `index` may be read in order to
  // prefetch; 0 if the rows are in cache already.
  void dots(const int32_t* index, int n, int64_t limit, const A* r, A* s) const;
  void leaky_dots(const int32_t* index, int n, int64_t limit, const A* r, const A* attn, A slope, A* s) const;
  // w2, a2: a second set of weights and its accumulator, or null. fresh: a and a2 start from 0.
  void aggregate(const int32_t* index, int n, int64_t limit, const A* w, const A* w2, A* a, A* a2,
                 bool fresh) const;
  // a2: a second sum, which never starts from 0; or null. fresh: a starts from 0.
  void leaky_aggregate(const int32_t* index, int n, int64_t limit, const A* r, A slope, const A* w, A* a,
                       A* a2, bool fresh) const;

  // s[h][e] = x[index_e, h] . (r[h] + y[y_index_e, h]). The sum r + y is rounded as by add_pairs, which
  // computes it for the same scores in the pass that gathers the rows r, so that both passes find equal
  // scores.
  void pair_dots(const int32_t* index, int n, int64_t limit, const A* r, const Rows& y,
                 const int32_t* y_index, int64_t y_limit, A* s) const;
  // sum[e] = x[index_e] + y[y_index_e]; sum: [n, H, D]
  void add_pairs(const int32_t* index, int n, int64_t limit, const Rows& y, const int32_t* y_index,
                 int64_t y_limit, A* sum) const;
  // y[y_index_e, h] = w[h][e] x[index_e, h]
  void scatter(const int32_t* index, int n, const A* w, const int32_t* y_index, T* y) const;
};

// y[y_index_e, h] = w[h][e] a[h] + w2[h][e] a2[h]. A term whose w or w2 is null is left out.
template <class T>
void scatter_row(const RowShape& shape, int n, const Acc<T>* w, const Acc<T>* a, const Acc<T>* w2,
                 const Acc<T>* a2, const int32_t* y_index, T* y);

// y[y_index_e, h] = w[h][e] attn[h] L'(x[e, h] + r[h]). x: [n, H, D], not packed.
template <class T>
void scatter_leaky(const RowShape& shape, const Acc<T>* x, int n, const Acc<T>* r, const Acc<T>* attn,
                   Acc<T> slope, const Acc<T>* w, const int32_t* y_index, T* y);

// Packs a row [H, D], with zeros as the second copies of overlapping features.
template <class T>
void pack(const RowShape& shape, const T* row, Acc<T>* packed);

// Unpacks: row[h] = factor[h] a[h] + bias[h]. a and bias are packed. factor: [H], or null for 1; bias: or
// null for 0.
template <class T>
void unpack(const RowShape& shape, const Acc<T>* a, const Acc<T>* factor, T* row,
            const Acc<T>* bias = nullptr);

// Multiplies each head of a packed row by a factor.
template <class A>
static inline void scale_heads(const RowShape& shape, const A* factor, A* a) {
  for (int h = 0; h < shape.heads; ++h)
    for (int d = 0; d < shape.packed; ++d) a[h * shape.packed + d] *= factor[h];
}

// s[h] = r[h] . a[h], of two packed rows, of which r has zeros as second copies.
template <class A>
void head_dots(const RowShape& shape, const A* r, const A* a, A* s);

}  // namespace dfgnn::cpu::DFGNN_ISA
