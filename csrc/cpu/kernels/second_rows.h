// Products and sums of rows for the backward of the backward (second_order.cpp), over a group of rows' edges.
//
// Rows are [H, D] as they lie in memory. Vectors of W columns cover a head; where W does not divide D the
// last one overlaps the one before: in products its lanes that were taken already are 0, in sums they give
// the same number twice. What is absent, a cotangent or the features of edges, is a row of zeros that all
// edges share.
#pragma once

#include "ahead.h"
#include "columns.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Rows of T, one for each node or edge; with a stride of 0 they are all the same one.
template <class T>
struct Table {
  const T* data;
  int64_t stride;
  const T* operator[](int64_t k) const { return data + k * stride; }
};

// What the edges of a destination bring: key, value and the features in them, each with its cotangent.
// GATv2's value is the key, too.
template <class T>
struct Gathering {
  Table<T> key, of_key, value, of_value;                      // by source
  Table<T> key_feat, of_key_feat, value_feat, of_value_feat;  // by edge
};

// The rows of the destinations of a group, [rows, H, D].
template <class A>
struct Destinations {
  const A *query, *of_query, *grad;
};

// Vectors of GATv2, [H, D]: attn and its cotangent.
template <class A>
struct Vectors {
  const A *attn, *of_attn;
  A slope;
};

struct HeadSizes {
  int heads, dim, value_dim;
};

// The rows that other edges will take: fetched while one edge is at work.
template <class T>
class Fetching {
 public:
  static constexpr int kMost = 4;
  // limit: so many indices may be read; 0: nothing is fetched.
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

// The edges of a group: gathered rows and positions in the user's order, and what is fetched ahead by them.
template <class T>
struct Edges {
  const int32_t *index, *eid;
  Fetching<T> nodes, features;
  [[gnu::always_inline]] void fetch(int e) const { nodes(e), features(e); }
};

// Calls f(first column, own) for vectors of W columns that cover a head; own(x): x without what the vector
// before has, too.
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

// Calls f(integral constant V, columns of V vectors) for all columns of a head.
template <class A, int W, class F>
[[gnu::always_inline]] static inline void for_tiles(int dim, const F& f) {
  int d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) f(std::integral_constant<int, 2>(), d);
  for (; d < dim; d += W) f(std::integral_constant<int, 1>(), d + W <= dim ? d : dim - W);
}

// ---- products ------------------------------------------------------------------------------------------

// products[e][h] = q.(k + e), Q.(k + e) + q.(K + F), g.(v + e), g.(V + F). keyed: there are keys.
template <class T, int W, bool keyed, bool feat>
static void products_of_dot(const Group& group, const Edges<T>& edges, const Gathering<T>& from,
                            const Destinations<Acc<T>>& to, const HeadSizes& size, Acc<T>* products) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int heads = size.heads, dim = size.dim, value_dim = size.value_dim;
  group.each_edge([&](int r, int e) {
    edges.fetch(e);
    const int64_t j = edges.index[e], eid = edges.eid[e];
    const T *k = from.key[j], *ok = from.of_key[j], *v = from.value[j], *ov = from.of_value[j];
    const T *kf = from.key_feat[eid], *okf = from.of_key_feat[eid], *vf = from.value_feat[eid],
            *ovf = from.of_value_feat[eid];
    const A *q = to.query + int64_t(r) * heads * dim, *oq = to.of_query + int64_t(r) * heads * dim,
            *g = to.grad + int64_t(r) * heads * value_dim;
    for (int h = 0; h < heads; ++h) {
      V sums[4] = {};
      if constexpr (keyed)
        for_own<A, W>(dim, [&](int d, const auto& own) __attribute__((always_inline)) {
          V x = load<T, W>(k + h * dim + d), y = load<T, W>(ok + h * dim + d);
          if constexpr (feat) x += load<T, W>(kf + h * dim + d), y += load<T, W>(okf + h * dim + d);
          const V row = own(load_vector<V>(q + h * dim + d)), of_row = own(load_vector<V>(oq + h * dim + d));
          sums[0] += row * x;
          sums[1] += of_row * x + row * y;
        });
      for_own<A, W>(value_dim, [&](int d, const auto& own) __attribute__((always_inline)) {
        V x = load<T, W>(v + h * value_dim + d), y = load<T, W>(ov + h * value_dim + d);
        if constexpr (feat) x += load<T, W>(vf + h * value_dim + d), y += load<T, W>(ovf + h * value_dim + d);
        const V row = own(load_vector<V>(g + h * value_dim + d));
        sums[2] += row * x, sums[3] += row * y;
      });
      sum4<A, W>(sums, products + (e * heads + h) * 4);
    }
  });
}

// With w = v + x + e and m = V + X + F: a.L(w), a.(L'(w) m) + N.L(w), g.v, g.V.
template <class T, int W, bool feat>
static void products_of_pairs(const Group& group, const Edges<T>& edges, const Gathering<T>& from,
                              const Destinations<Acc<T>>& to, const Vectors<Acc<T>>& vectors,
                              const HeadSizes& size, Acc<T>* products) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int heads = size.heads, dim = size.dim;
  group.each_edge([&](int r, int e) {
    edges.fetch(e);
    const int64_t j = edges.index[e], eid = edges.eid[e], row = int64_t(r) * heads * dim;
    const T *v = from.value[j], *ov = from.of_value[j], *f = from.key_feat[eid], *of = from.of_key_feat[eid];
    const A *x = to.query + row, *ox = to.of_query + row, *g = to.grad + row;
    for (int h = 0; h < heads; ++h) {
      V sums[4] = {};
      for_own<A, W>(dim, [&](int d, const auto& own) __attribute__((always_inline)) {
        const int at = h * dim + d;
        const V value = load<T, W>(v + at), of_value = load<T, W>(ov + at);
        V w = value + load_vector<V>(x + at), m = of_value + load_vector<V>(ox + at);
        if constexpr (feat) w += load<T, W>(f + at), m += load<T, W>(of + at);
        const V a = own(load_vector<V>(vectors.attn + at)), n = own(load_vector<V>(vectors.of_attn + at)),
                grad = own(load_vector<V>(g + at));
        const V leaky = leaky_relu(w, vectors.slope), moved = w > 0 ? m : m * vectors.slope;
        sums[0] += a * leaky;
        sums[1] += a * moved + n * leaky;
        sums[2] += grad * value, sums[3] += grad * of_value;
      });
      sum4<A, W>(sums, products + (e * heads + h) * 4);
    }
  });
}

// ---- sums ----------------------------------------------------------------------------------------------

// Numbers per edge and head, edge-major: what g, raw, t_raw and u are multiplied with.
template <class A>
struct Factors {
  const A *of_p, *of_raw, *of_t, *share;
};

// Sums over the edges of each destination: query = sum of R (k + e) + M (K + F), grad = sum of A (v + e) +
// share (V + F), [rows, H, D]; and of each edge R q + M Q (in_key) + A g (in_value). Either sum may be null.
template <class T, int W, bool feat>
static void sums_of_dot(const Group& group, const Edges<T>& edges, const Gathering<T>& from,
                        const Destinations<Acc<T>>& to, const HeadSizes& size, const Factors<Acc<T>>& by,
                        bool in_key, bool in_value, Acc<T>* query, Acc<T>* grad, T* of_feat) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int heads = size.heads, dim = query ? size.dim : size.value_dim;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  group.each([&](int r, int begin, int end) {
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V q[N] = {}, oq[N] = {}, g[N] = {}, of_query[N] = {}, of_grad[N] = {};
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (in_key)
            q[n] = load_vector<V>(to.query + row + n * W), oq[n] = load_vector<V>(to.of_query + row + n * W);
          if (in_value) g[n] = load_vector<V>(to.grad + row + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t j = index[e], eid = eids[e];
          const int i = e * heads + h;
          const V p = splat<A, W>(by.of_p[i]), raw = splat<A, W>(by.of_raw[i]), t = splat<A, W>(by.of_t[i]),
                  share = splat<A, W>(by.share[i]);
          const T *k = from.key[j] + at, *ok = from.of_key[j] + at, *v = from.value[j] + at,
                  *ov = from.of_value[j] + at;
          const T *kf = from.key_feat[eid] + at, *okf = from.of_key_feat[eid] + at,
                  *vf = from.value_feat[eid] + at, *ovf = from.of_value_feat[eid] + at;
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            V x = load<T, W>(k + n * W), y = load<T, W>(ok + n * W), z = load<T, W>(v + n * W),
              o = load<T, W>(ov + n * W);
            if constexpr (feat) {
              x += load<T, W>(kf + n * W), y += load<T, W>(okf + n * W);
              z += load<T, W>(vf + n * W), o += load<T, W>(ovf + n * W);
            }
            of_query[n] += raw * x + t * y;
            of_grad[n] += p * z + share * o;
            if constexpr (feat)
              if (of_feat)
                store<T, W>(of_feat + eid * row_size + at + n * W, raw * q[n] + t * oq[n] + p * g[n]);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (query) store_vector(query + row + n * W, of_query[n]);
          if (grad) store_vector(grad + row + n * W, of_grad[n]);
        }
      });
  });
}

// GATv2: query = sum of L'(w) (R a + M N), of each edge the same; grad as above without features; attn [rows,
// H, D] = sum of R L(w) + M L'(w) m.
template <class T, int W, bool feat>
static void sums_of_pairs(const Group& group, const Edges<T>& edges, const Gathering<T>& from,
                          const Destinations<Acc<T>>& to, const Vectors<Acc<T>>& vectors,
                          const HeadSizes& size, const Factors<Acc<T>>& by, Acc<T>* query, Acc<T>* grad,
                          Acc<T>* attn, T* of_feat) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int heads = size.heads, dim = size.dim;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  const A slope = vectors.slope;
  group.each([&](int r, int begin, int end) {
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V x[N], ox[N], a[N], o[N], of_query[N] = {}, of_grad[N] = {}, of_attn[N] = {};
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          x[n] = load_vector<V>(to.query + row + n * W), ox[n] = load_vector<V>(to.of_query + row + n * W);
          a[n] = load_vector<V>(vectors.attn + at + n * W),
          o[n] = load_vector<V>(vectors.of_attn + at + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t j = index[e], eid = eids[e];
          const int i = e * heads + h;
          const V p = splat<A, W>(by.of_p[i]), raw = splat<A, W>(by.of_raw[i]), t = splat<A, W>(by.of_t[i]),
                  share = splat<A, W>(by.share[i]);
          const T *v = from.value[j] + at, *ov = from.of_value[j] + at, *f = from.key_feat[eid] + at,
                  *of = from.of_key_feat[eid] + at;
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            const V value = load<T, W>(v + n * W), of_value = load<T, W>(ov + n * W);
            V w = value + x[n], m = of_value + ox[n];
            if constexpr (feat) w += load<T, W>(f + n * W), m += load<T, W>(of + n * W);
            const V full = raw * a[n] + t * o[n], slopes = leaky_slope(w, slope), term = full * slopes;
            of_query[n] += term;
            of_grad[n] += p * value + share * of_value;
            of_attn[n] += slopes * (raw * w + t * m);
            if constexpr (feat)
              if (of_feat) store<T, W>(of_feat + eid * row_size + at + n * W, term);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          store_vector(query + row + n * W, of_query[n]), store_vector(grad + row + n * W, of_grad[n]);
          store_vector(attn + row + n * W, of_attn[n]);
        }
      });
  });
}

// Over the edges of each source: value = sum of A g, and with `key` key = sum of R q + M Q, [rows, H, D].
template <class T, int W>
static void sums_of_destinations(const Group& group, const Edges<T>& edges, const Table<T>& grad,
                                 const Table<T>& query, const Table<T>& of_query, int heads, int dim,
                                 const Factors<Acc<T>>& by, Acc<T>* value, Acc<T>* key) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int64_t row_size = int64_t(heads) * dim;
  group.each([&](int r, int begin, int end) {
    for (int e = begin; e < end; ++e) edges.fetch(e);
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V of_value[N] = {}, of_key[N] = {};
        for (int e = begin; e < end; ++e) {
          const int64_t i = edges.index[e];
          const T *g = grad[i] + at, *q = query[i] + at, *oq = of_query[i] + at;
          const V p = splat<A, W>(by.of_p[e * heads + h]), raw = splat<A, W>(by.of_raw[e * heads + h]),
                  t = splat<A, W>(by.of_t[e * heads + h]);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            if (value) of_value[n] += p * load<T, W>(g + n * W);
            if (key) of_key[n] += raw * load<T, W>(q + n * W) + t * load<T, W>(oq + n * W);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (value) store_vector(value + row + n * W, of_value[n]);
          if (key) store_vector(key + row + n * W, of_key[n]);
        }
      });
  });
}

// GATv2: value = sum of A g + L'(w) (R a + M N); fixed: the sources' own rows [rows, H, D].
template <class T, int W, bool feat>
static void sums_of_pairs_back(const Group& group, const Edges<T>& edges, const Table<T>& grad,
                               const Table<T>& query, const Table<T>& feats, const Acc<T>* fixed,
                               const Vectors<Acc<T>>& vectors, int heads, int dim, const Factors<Acc<T>>& by,
                               Acc<T>* value) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  group.each([&](int r, int begin, int end) {
    for (int e = begin; e < end; ++e) edges.fetch(e);
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V of_value[N] = {}, x[N], a[N], o[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          x[n] = load_vector<V>(fixed + row + n * W), a[n] = load_vector<V>(vectors.attn + at + n * W);
          o[n] = load_vector<V>(vectors.of_attn + at + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t i = index[e], eid = eids[e];
          const T *g = grad[i] + at, *q = query[i] + at, *f = feats[eid] + at;
          const V p = splat<A, W>(by.of_p[e * heads + h]), raw = splat<A, W>(by.of_raw[e * heads + h]),
                  t = splat<A, W>(by.of_t[e * heads + h]);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            V w = x[n] + load<T, W>(q + n * W);
            if constexpr (feat) w += load<T, W>(f + n * W);
            of_value[n] +=
                p * load<T, W>(g + n * W) + (raw * a[n] + t * o[n]) * leaky_slope(w, vectors.slope);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) store_vector(value + row + n * W, of_value[n]);
      });
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
