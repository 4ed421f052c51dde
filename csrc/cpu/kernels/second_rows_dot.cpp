// Second derivatives of attention on the CPU: products_of_dot, sums_of_dot and sums_of_destinations of
// second_rows.h, for dot products and GAT.
//
// Pointers to feature rows have the letters of that file: k, v, q, g. An o before a letter stands for the
// cotangent of its gradient (ok, ov, oq), an f behind it for the edge's features that are added to it (kf,
// okf, vf, ovf). p, raw, t and u are an edge's factors (A, R, M and f alpha). Vectors with features added: x
// and y of k and ok, z and o of v and ov (in products(): x and y of both pairs).
#include "second_rows.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T, int W, bool keyed, bool feat>
void products(const DestinationRows<T>& rows, Acc<T>* products) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Gathering<T>& from = rows.from;
  const Destinations<A>& to = rows.to;
  const int heads = rows.size.heads, dim = rows.size.dim, value_dim = rows.size.value_dim;
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

template <class T, int W, bool feat>
void sums(const DestinationRows<T>& rows, const Factors<Acc<T>>& by, bool in_key, bool in_value,
          const DestinationSums<T>& sums) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Gathering<T>& from = rows.from;
  const Destinations<A>& to = rows.to;
  A *const query = sums.query, *const grad = sums.grad;
  T* const feat_grad = sums.feat;
  const int heads = rows.size.heads, dim = query ? rows.size.dim : rows.size.value_dim;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  group.each([&](int r, int begin, int end) {
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V q[N] = {}, oq[N] = {}, g[N] = {}, query_sum[N] = {}, grad_sum[N] = {};
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (in_key)
            q[n] = load_vector<V>(to.query + row + n * W), oq[n] = load_vector<V>(to.of_query + row + n * W);
          if (in_value) g[n] = load_vector<V>(to.grad + row + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t j = index[e], eid = eids[e];
          const int i = e * heads + h;
          const V p = splat<A, W>(by.p[i]), raw = splat<A, W>(by.raw[i]), t = splat<A, W>(by.t_raw[i]),
                  u = splat<A, W>(by.u[i]);
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
            query_sum[n] += raw * x + t * y;
            grad_sum[n] += p * z + u * o;
            if constexpr (feat)
              if (feat_grad)
                store<T, W>(feat_grad + eid * row_size + at + n * W, raw * q[n] + t * oq[n] + p * g[n]);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (query) store_vector(query + row + n * W, query_sum[n]);
          if (grad) store_vector(grad + row + n * W, grad_sum[n]);
        }
      });
  });
}

template <class T, int W>
void sums_back(const SourceRows<T>& rows, int dim, const Factors<Acc<T>>& by, Acc<T>* value, Acc<T>* key) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Table<T>&grad = rows.grad, &query = rows.query, &of_query = rows.of_query;
  const int heads = rows.heads;
  const int64_t row_size = int64_t(heads) * dim;
  group.each([&](int r, int begin, int end) {
    for (int e = begin; e < end; ++e) edges.fetch(e);
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V value_sum[N] = {}, key_sum[N] = {};
        for (int e = begin; e < end; ++e) {
          const int64_t i = edges.index[e];
          const T *g = grad[i] + at, *q = query[i] + at, *oq = of_query[i] + at;
          const V p = splat<A, W>(by.p[e * heads + h]), raw = splat<A, W>(by.raw[e * heads + h]),
                  t = splat<A, W>(by.t_raw[e * heads + h]);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            if (value) value_sum[n] += p * load<T, W>(g + n * W);
            if (key) key_sum[n] += raw * load<T, W>(q + n * W) + t * load<T, W>(oq + n * W);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          if (value) store_vector(value + row + n * W, value_sum[n]);
          if (key) store_vector(key + row + n * W, key_sum[n]);
        }
      });
  });
}

}  // namespace

template <class T>
void products_of_dot(const DestinationRows<T>& rows, bool keyed, Acc<T>* to) {
  with_rows<T>(rows, [&](auto width, auto feat) {
    keyed ? products<T, width.value, true, feat.value>(rows, to)
          : products<T, width.value, false, feat.value>(rows, to);
  });
}

template <class T>
void sums_of_dot(const DestinationRows<T>& rows, const Factors<Acc<T>>& by, bool in_key, bool in_value,
                 const DestinationSums<T>& to) {
  with_rows<T>(
      rows, [&](auto width, auto feat) { sums<T, width.value, feat.value>(rows, by, in_key, in_value, to); });
}

template <class T>
void sums_of_destinations(const SourceRows<T>& rows, int dim, const Factors<Acc<T>>& by, Acc<T>* value,
                          Acc<T>* key) {
  with_width<Acc<T>>(rows.width, [&](auto width) { sums_back<T, width.value>(rows, dim, by, value, key); });
}

#define DFGNN_INSTANTIATE(T)                                                               \
  template void products_of_dot(const DestinationRows<T>&, bool, Acc<T>*);                 \
  template void sums_of_dot(const DestinationRows<T>&, const Factors<Acc<T>>&, bool, bool, \
                            const DestinationSums<T>&);                                    \
  template void sums_of_destinations(const SourceRows<T>&, int, const Factors<Acc<T>>&, Acc<T>*, Acc<T>*);
DFGNN_INSTANTIATE(float)
DFGNN_INSTANTIATE(double)
DFGNN_INSTANTIATE(Half)
DFGNN_INSTANTIATE(BFloat16)
#undef DFGNN_INSTANTIATE

}  // namespace dfgnn::cpu::DFGNN_ISA
