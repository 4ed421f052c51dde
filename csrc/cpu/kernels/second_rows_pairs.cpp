// Second derivatives of attention on the CPU: products_of_pairs, sums_of_pairs and sums_of_pairs_back of
// second_rows.h, for GATv2. A pair is the row v of a source and the row x of a destination, which GATv2 adds
// up with the edge's features: w = v + x + e. m = V + X + F is the sum of the cotangents of their gradients.
//
// Pointers to feature rows: v, x, g and f (the edge's features); with an o before, the cotangent of the
// gradient: ov, ox and of. a and n, or a[] and o[], are GATv2's vector and the cotangent of its gradient. p,
// raw, t and u are an edge's factors (A, R, M and f alpha).
#include "second_rows.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T, int W, bool feat>
void products(const DestinationRows<T>& rows, Acc<T>* products) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Gathering<T>& from = rows.from;
  const Destinations<A>& to = rows.to;
  const Vectors<A>& vectors = rows.vectors;
  const int heads = rows.size.heads, dim = rows.size.dim;
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

template <class T, int W, bool feat>
void sums(const DestinationRows<T>& rows, const Factors<Acc<T>>& by, const DestinationSums<T>& sums) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Gathering<T>& from = rows.from;
  const Destinations<A>& to = rows.to;
  const Vectors<A>& vectors = rows.vectors;
  A *const query = sums.query, *const grad = sums.grad, *const attn = sums.attn;
  T* const feat_grad = sums.feat;
  const int heads = rows.size.heads, dim = rows.size.dim;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  const A slope = vectors.slope;
  group.each([&](int r, int begin, int end) {
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V x[N], ox[N], a[N], o[N], query_sum[N] = {}, grad_sum[N] = {}, attn_sum[N] = {};
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          x[n] = load_vector<V>(to.query + row + n * W), ox[n] = load_vector<V>(to.of_query + row + n * W);
          a[n] = load_vector<V>(vectors.attn + at + n * W),
          o[n] = load_vector<V>(vectors.of_attn + at + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t j = index[e], eid = eids[e];
          const int i = e * heads + h;
          const V p = splat<A, W>(by.p[i]), raw = splat<A, W>(by.raw[i]), t = splat<A, W>(by.t_raw[i]),
                  u = splat<A, W>(by.u[i]);
          const T *v = from.value[j] + at, *ov = from.of_value[j] + at, *f = from.key_feat[eid] + at,
                  *of = from.of_key_feat[eid] + at;
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            const V value = load<T, W>(v + n * W), of_value = load<T, W>(ov + n * W);
            V w = value + x[n], m = of_value + ox[n];
            if constexpr (feat) w += load<T, W>(f + n * W), m += load<T, W>(of + n * W);
            const V full = raw * a[n] + t * o[n], slopes = leaky_slope(w, slope), term = full * slopes;
            query_sum[n] += term;
            grad_sum[n] += p * value + u * of_value;
            attn_sum[n] += slopes * (raw * w + t * m);
            if constexpr (feat)
              if (feat_grad) store<T, W>(feat_grad + eid * row_size + at + n * W, term);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          store_vector(query + row + n * W, query_sum[n]), store_vector(grad + row + n * W, grad_sum[n]);
          store_vector(attn + row + n * W, attn_sum[n]);
        }
      });
  });
}

template <class T, int W, bool feat>
void sums_back(const SourceRows<T>& rows, int dim, const Acc<T>* fixed, const Factors<Acc<T>>& by,
               Acc<T>* value) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const Group& group = rows.group;
  const Edges<T>& edges = rows.edges;
  const Vectors<A>& vectors = rows.vectors;
  const Table<T>&grad = rows.grad, &query = rows.query, &feats = rows.feats;
  const int heads = rows.heads;
  const int64_t row_size = int64_t(heads) * dim;
  const int32_t *index = edges.index, *eids = edges.eid;
  group.each([&](int r, int begin, int end) {
    for (int e = begin; e < end; ++e) edges.fetch(e);
    for (int h = 0; h < heads; ++h)
      for_tiles<A, W>(dim, [&](auto tile, int d) __attribute__((always_inline)) {
        constexpr int N = tile.value;
        const int64_t at = h * dim + d, row = r * row_size + at;
        V value_sum[N] = {}, x[N], a[N], o[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          x[n] = load_vector<V>(fixed + row + n * W), a[n] = load_vector<V>(vectors.attn + at + n * W);
          o[n] = load_vector<V>(vectors.of_attn + at + n * W);
        }
        for (int e = begin; e < end; ++e) {
          const int64_t i = index[e], eid = eids[e];
          const T *g = grad[i] + at, *q = query[i] + at, *f = feats[eid] + at;
          const V p = splat<A, W>(by.p[e * heads + h]), raw = splat<A, W>(by.raw[e * heads + h]),
                  t = splat<A, W>(by.t_raw[e * heads + h]);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            V w = x[n] + load<T, W>(q + n * W);
            if constexpr (feat) w += load<T, W>(f + n * W);
            value_sum[n] +=
                p * load<T, W>(g + n * W) + (raw * a[n] + t * o[n]) * leaky_slope(w, vectors.slope);
          }
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) store_vector(value + row + n * W, value_sum[n]);
      });
  });
}

}  // namespace

template <class T>
void products_of_pairs(const DestinationRows<T>& rows, Acc<T>* to) {
  with_rows<T>(rows, [&](auto width, auto feat) { products<T, width.value, feat.value>(rows, to); });
}

template <class T>
void sums_of_pairs(const DestinationRows<T>& rows, const Factors<Acc<T>>& by, const DestinationSums<T>& to) {
  with_rows<T>(rows, [&](auto width, auto feat) { sums<T, width.value, feat.value>(rows, by, to); });
}

template <class T>
void sums_of_pairs_back(const SourceRows<T>& rows, int dim, const Acc<T>* fixed, const Factors<Acc<T>>& by,
                        Acc<T>* value) {
  with_rows<T>(rows, [&](auto width, auto feat) {
    sums_back<T, width.value, feat.value>(rows, dim, fixed, by, value);
  });
}

#define DFGNN_INSTANTIATE(T)                                                                                 \
  template void products_of_pairs(const DestinationRows<T>&, Acc<T>*);                                       \
  template void sums_of_pairs(const DestinationRows<T>&, const Factors<Acc<T>>&, const DestinationSums<T>&); \
  template void sums_of_pairs_back(const SourceRows<T>&, int, const Acc<T>*, const Factors<Acc<T>>&, Acc<T>*);
DFGNN_INSTANTIATE(float)
DFGNN_INSTANTIATE(double)
DFGNN_INSTANTIATE(Half)
DFGNN_INSTANTIATE(BFloat16)
#undef DFGNN_INSTANTIATE

}  // namespace dfgnn::cpu::DFGNN_ISA
