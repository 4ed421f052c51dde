// Second derivatives of attention on the CPU (second_order.cpp): dot products of the feature rows of an
// edge's two nodes, and weighted sums of such rows over a row's edges, for a group of rows.
//
// Feature rows are [H, D] as they lie in memory. Vectors of W columns cover a head. If W does not divide D,
// the last vector overlaps the one before it: products set the lanes that both have to 0, and sums compute
// the same result in both. An input that is absent, such as a cotangent or the features of edges, is one row
// of zeros for all edges.
//
// In the formulas q, k, v, g and e are query, key, value, grad_out and the features of an edge; x and a are
// GATv2's destination row and vector, L and L' LeakyReLU and its derivative. A capital letter is the
// cotangent of the small one: Q, K, V, F of the features e, X, N of the vector a. But A, R and M are scalars
// of an edge and head: p, raw and t_raw of `Factors`, of which raw and t_raw contain dot's scale.
#pragma once

#include "ahead.h"
#include "columns.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Rows of T, one per node or edge. With a stride of 0 all of them are the same row.
template <class T>
struct Table {
  const T* data;
  int64_t stride;
  const T* operator[](int64_t k) const { return data + k * stride; }
};

// The tables that edges are gathered from: keys, values and the features in either, each with its cotangent.
// GATv2's value is also its key.
template <class T>
struct Gathering {
  Table<T> key, of_key, value, of_value;                      // by source
  Table<T> key_feat, of_key_feat, value_feat, of_value_feat;  // by edge
};

// The rows of a group's destinations, [rows, H, D]: q (GATv2: x), its cotangent, and g.
template <class A>
struct Destinations {
  const A *query, *of_query, *grad;
};

// GATv2's vectors [H, D]: attn and its cotangent.
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
  // limit: the number of indices that may be read; 0 turns prefetching off.
  Fetching(const int32_t* index, int64_t limit) : index_(index), limit_(limit) {}
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

// The edges of a group: the nodes that are gathered for them, their positions in the user's order, and the
// prefetching of rows by either.
template <class T>
struct Edges {
  const int32_t *index, *eid;
  Fetching<T> nodes, features;
  [[gnu::always_inline]] void fetch(int e) const { nodes(e), features(e); }
};

// Scalars per edge and head, edge-major, by which sums weigh rows: the derivatives by p, raw, t_raw and u
// that SecondEdges::settle computes (A, R, M and f alpha).
template <class A>
struct Factors {
  const A *p, *raw, *t_raw, *u;
};

// What the functions below read, in the pass over destinations and in that over sources. width: lanes of a
// vector; feat: whether edges have features.
template <class T>
struct DestinationRows {
  int width;
  bool feat;
  const Group& group;
  Edges<T> edges;
  const Gathering<T>& from;
  Destinations<Acc<T>> to;
  Vectors<Acc<T>> vectors;  // of GATv2
  HeadSizes size;
};

template <class T>
struct SourceRows {
  int width;
  bool feat;
  const Group& group;
  Edges<T> edges;
  Table<T> grad, query, of_query, feats;  // of_query: dot alone; feats: GATv2 alone
  Vectors<Acc<T>> vectors;
  int heads;
};

// Where sums over the edges of each destination go: [rows, H, D], or null; and `feat`, the gradient of the
// edges' features [E, H, D] in the user's order, or null.
template <class T>
struct DestinationSums {
  Acc<T>*query, *grad, *attn;
  T* feat;
};

// products[e][h] = q.(k + e), Q.(k + e) + q.(K + F), g.(v + e), g.(V + F). keyed: false for GAT, which has no
// keys; the first two products are then 0.
template <class T>
void products_of_dot(const DestinationRows<T>&, bool keyed, Acc<T>* products);

// With w = v + x + e and m = V + X + F: a.L(w), a.(L'(w) m) + N.L(w), g.v, g.V.
template <class T>
void products_of_pairs(const DestinationRows<T>&, Acc<T>* products);

// query = sum of R (k + e) + M (K + F), grad = sum of A (v + e) + f alpha (V + F), and of each edge's
// features R q + M Q (if in_key) + A g (if in_value). If both sums are wanted, D = Dv.
template <class T>
void sums_of_dot(const DestinationRows<T>&, const Factors<Acc<T>>&, bool in_key, bool in_value,
                 const DestinationSums<T>&);

// query = sum of L'(w) (R a + M N), and each summand is the gradient of that edge's features; grad = sum of
// A v + f alpha V; attn = sum of R L(w) + M L'(w) m. w and m: as for products_of_pairs.
template <class T>
void sums_of_pairs(const DestinationRows<T>&, const Factors<Acc<T>>&, const DestinationSums<T>&);

// Over the edges of each source: value = sum of A g, key = sum of R q + M Q, [rows, H, D]; either may be
// null.
template <class T>
void sums_of_destinations(const SourceRows<T>&, int dim, const Factors<Acc<T>>&, Acc<T>* value, Acc<T>* key);

// GATv2: value = sum of A g + L'(w) (R a + M N). fixed: the sources' own rows [rows, H, D].
template <class T>
void sums_of_pairs_back(const SourceRows<T>&, int dim, const Acc<T>* fixed, const Factors<Acc<T>>&,
                        Acc<T>* value);

// ---- helpers of the files that define these functions ---------------------------------------------------

// Calls f(first column, own) for vectors of W columns that cover a head. own(x) is x with zeros in the lanes
// that the vector before has, too.
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

// Calls f(constant vector width, constant: whether edges have features).
template <class T, class Rows, class F>
static inline void with_rows(const Rows& rows, const F& f) {
  with_width<Acc<T>>(
      rows.width, [&](auto width) { rows.feat ? f(width, std::true_type()) : f(width, std::false_type()); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
