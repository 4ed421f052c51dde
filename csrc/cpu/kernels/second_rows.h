// Second derivatives of attention on the CPU (second_order.cpp): dot products of the feature rows of an
// edge's two nodes, and weighted sums of such rows over a row's edges, for a group of rows.
//
// Feature rows, of a node or an edge, are [H, D] as they lie in memory. Vectors of W columns cover a head. If
// W does not divide D, the last vector overlaps the one before it. For products, the columns that both have
// are set to 0 in the last vector; sums compute the same result for them in both. An input that is absent,
// such as a cotangent or the features of edges, is one row of zeros for all edges.
//
// In the formulas q, k, v, g and e are query, key, value, grad_out and the features of an edge; x and a are
// GATv2's destination row and vector, L and L' LeakyReLU and its derivative. A capital letter is the
// cotangent of the gradient of the small one (Q of grad_query, ...); for e it is F, for a it is N.
// Exceptions: A, R and M are scalars per edge and head, the members p, raw and t_raw of `Factors`; R and M
// include dot's scale.
#pragma once

#include "ahead.h"
#include "columns.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Feature rows of T, one per node or edge. With a stride of 0 all nodes or edges have the same row.
template <class T>
struct Table {
  const T* data;
  int64_t stride;
  const T* operator[](int64_t k) const { return data + k * stride; }
};

// What the pass over destinations gathers for an edge: rows of keys and of values, and the edge features that
// are added to them. of_x: the cotangent of the gradient of x. GATv2's value is also its key.
template <class T>
struct Gathering {
  Table<T> key, of_key, value, of_value;                      // a row per source
  Table<T> key_feat, of_key_feat, value_feat, of_value_feat;  // a row per edge
};

// The feature rows [rows, H, D] of a group's destinations: q (GATv2: x), the cotangent of its gradient, g.
template <class A>
struct Destinations {
  const A *query, *of_query, *grad;
};

// For GATv2 alone: its vector `attn` and the cotangent of the gradient of attn, [H, D]; the LeakyReLU's
// slope.
template <class A>
struct Vectors {
  const A *attn, *of_attn;
  A slope;
};

struct HeadSizes {
  int heads, dim, value_dim;
};

// While edge e is processed, prefetches the rows that a later edge reads from several tables.
template <class T>
class Fetching {
 public:
  static constexpr int kMost = 4;
  // limit: how many entries of `index` may be read; 0 turns prefetching off.
  Fetching(const int32_t* index, int64_t limit) : index_(index), limit_(limit) {}
  // Adds a table with rows of `size` elements to those that are prefetched; call it at most kMost times.
  void add(const Table<T>& table, int64_t size) {
    if (table.stride == 0 || limit_ == 0) return;
    tables_[count_++] = {table.data, table.stride, size * int64_t(sizeof(T))};
    bytes_ += size * int64_t(sizeof(T));
    const int64_t distance = kAheadBytes / bytes_;
    distance_ = int(distance < kMinAhead ? kMinAhead : distance > kMaxAhead ? kMaxAhead : distance);
  }
  [[gnu::always_inline]] void operator()(int e) const {
    if (e + distance_ >= limit_) return;
    const int64_t k = index_[e + distance_];
    for (int n = 0; n < count_; ++n) prefetch(tables_[n].data + k * tables_[n].stride, tables_[n].bytes);
  }

 private:
  struct Rows {
    const T* data;
    int64_t stride, bytes;
  };
  const int32_t* index_;
  int64_t limit_, bytes_ = 0;
  int count_ = 0, distance_ = 0;
  Rows tables_[kMost];
};

// The edges of a group: `index`, the nodes that they gather; `eid`, their positions in the user's order; and
// the prefetching of the rows of nodes and of edge features.
template <class T>
struct Edges {
  const int32_t *index, *eid;
  Fetching<T> nodes, features;
  [[gnu::always_inline]] void fetch(int e) const { nodes(e), features(e); }
};

// Scalars per edge and head, edge-major, by which sums weigh feature rows: the derivatives by p, raw, t_raw
// and u, which are A, R, M and f alpha. SecondEdges::settle computes them.
template <class A>
struct Factors {
  const A *p, *raw, *t_raw, *u;
};

// What the functions below read in the pass over destinations. width: the lanes of a vector; feat: whether
// edges have features.
template <class T>
struct DestinationRows {
  int width;
  bool feat;
  const Group& group;
  Edges<T> edges;
  const Gathering<T>& from;
  Destinations<Acc<T>> to;
  Vectors<Acc<T>> vectors;
  HeadSizes size;
};

// What the functions below read in the pass over sources; width, feat: as in DestinationRows. of_query: for
// dot alone; feats, the features of edges: for GATv2 alone.
template <class T>
struct SourceRows {
  int width;
  bool feat;
  const Group& group;
  Edges<T> edges;
  Table<T> grad, query, of_query, feats;
  Vectors<Acc<T>> vectors;
  int heads;
};

// Where sums over the edges of each destination are written: query, grad and attn are [rows, H, D]; feat, the
// gradient of the edges' features, is [E, H, D] in the user's order. Each may be null.
template <class T>
struct DestinationSums {
  Acc<T>*query, *grad, *attn;
  T* feat;
};

// products [n, H, 4] = q.(k + e), Q.(k + e) + q.(K + F), g.(v + e), g.(V + F) of each edge and head. keyed:
// false for GAT, which has no keys; the first two products are then 0.
template <class T>
void products_of_dot(const DestinationRows<T>&, bool keyed, Acc<T>* products);

// products [n, H, 4] = a.L(w), a.(L'(w) m) + N.L(w), g.v, g.V with w = v + x + e and m = V + X + F.
template <class T>
void products_of_pairs(const DestinationRows<T>&, Acc<T>* products);

// query = sum of R (k + e) + M (K + F), grad = sum of A (v + e) + f alpha (V + F); the gradient of each
// edge's features is R q + M Q (if in_key) + A g (if in_value). If query and grad are both wanted, D must
// equal Dv.
template <class T>
void sums_of_dot(const DestinationRows<T>&, const Factors<Acc<T>>&, bool in_key, bool in_value,
                 const DestinationSums<T>&);

// query = sum of L'(w) (R a + M N), of which an edge's summand is the gradient of its features; grad = sum of
// A v + f alpha V; attn = sum of R L(w) + M L'(w) m. w and m: as for products_of_pairs.
template <class T>
void sums_of_pairs(const DestinationRows<T>&, const Factors<Acc<T>>&, const DestinationSums<T>&);

// For dot and GAT, sums over the edges of each source: value = sum of A g, key = sum of R q + M Q, [rows, H,
// dim]. Either may be null.
template <class T>
void sums_of_destinations(const SourceRows<T>&, int dim, const Factors<Acc<T>>&, Acc<T>* value, Acc<T>* key);

// For GATv2: value = sum over the edges of each source of A g + L'(w) (R a + M N), with w = v + x + e. fixed:
// the rows v [rows, H, dim] of the sources.
template <class T>
void sums_of_pairs_back(const SourceRows<T>&, int dim, const Acc<T>* fixed, const Factors<Acc<T>>&,
                        Acc<T>* value);

// ---- helpers of the files that define these functions ---------------------------------------------------

// Calls f(first column, own) for vectors of W columns that cover a head. own(x) is x with zeros in the lanes
// whose columns the vector before has, too: products apply it, so that no column counts twice.
template <class A, int W, class F>
[[gnu::always_inline]] static inline void for_own(int dim, const F& f) {
  using V = Vec<A, W>;
  int d = 0;
  for (; d + W <= dim; d += W) f(d, [](V x) __attribute__((always_inline)) { return x; });
  if constexpr (W > 1)
    if (d < dim) {
      const auto taken = before<A, W>(dim - W, d);
      f(dim - W, [&](V x) __attribute__((always_inline)) { return taken ? V{} : x; });
    }
}

// Calls f(integral constant N, first column) for tiles of N vectors that cover a head. The last tile may
// overlap the one before it.
template <class A, int W, class F>
[[gnu::always_inline]] static inline void for_tiles(int dim, const F& f) {
  int d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) f(std::integral_constant<int, 2>(), d);
  for (; d < dim; d += W) f(std::integral_constant<int, 1>(), d + W <= dim ? d : dim - W);
}

// Calls f(width of vectors, whether edges have features), both as constants, for DestinationRows or
// SourceRows.
template <class T, class Rows, class F>
static inline void with_rows(const Rows& rows, const F& f) {
  with_width<Acc<T>>(
      rows.width, [&](auto width) { rows.feat ? f(width, std::true_type()) : f(width, std::false_type()); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
