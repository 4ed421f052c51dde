#include "columns.h"

#include "ahead.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// x[lane], lane by lane.
template <class A, int W>
[[gnu::always_inline]] inline Vec<A, W> spread(const A* x, Vec<Bits<A>, W> lane) {
#if defined(__AVX2__) && __has_builtin(__builtin_shuffle)
  return __builtin_shuffle(load_vector<Vec<A, W>>(x), lane);
#else
  Vec<A, W> out;
  for (int l = 0; l < W; ++l) out[l] = x[lane[l]];
  return out;
#endif
}

}  // namespace

template <class T>
Columns<T>::Columns(const void* data, int heads, int dim)
    : data_(static_cast<const T*>(data)),
      heads_(heads),
      dim_(dim),
      size_(int64_t(heads) * dim),
      shape_(row_shape<A>(1, int(size_))),
      head_(shape_.vectors),
      offset_(shape_.packed),
      sums_(heads, dim) {
  for (int v = 0; v < shape_.vectors; ++v) {
    const int column = feature(shape_, v, shape_.width);
    head_[v] = column / dim;
    for (int l = 0; l < shape_.width; ++l) offset_[v * shape_.width + l] = (column + l) / dim - head_[v];
  }
}

// V vectors of columns from `vector` on, in registers over a row's edges.
template <class T>
template <int W, int V, class Terms>
void Columns<T>::aggregate_tile(int vector, const Group& group, const int32_t* index, int64_t limit,
                                const Terms& all_terms, SumRows<T> a, SumRows<T> a2) const {
  using Vector = Vec<A, W>;
  using Lanes = Vec<Bits<A>, W>;
  constexpr bool two = Terms::kTwo;
  const int heads = heads_;
  const int64_t size = size_, first = feature(shape_, vector, W),
                last = feature(shape_, vector + V - 1, W) - first;
  const T* base = data_ + first;
  const Ahead ahead(Rows<T>{data_, shape_}, index, limit);
  const int32_t* const head = head_ + vector;
  Lanes lane[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) lane[v] = load_vector<Lanes>(offset_ + (vector + v) * W);
  const auto weight = [&](const A* w, int v) __attribute__((always_inline)) -> Vector {
    if constexpr (Terms::kWide)
      return splat<A, W>(w[head[v]]);
    else
      return spread<A, W>(w + head[v], lane[v]);
  };
  group.each([&](int r, int begin, int end) {
    Vector sum[V] = {}, sum2[V] = {}, fixed[V] = {};
    if constexpr (Terms::kLeaky)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        fixed[v] = load_vector<Vector>(all_terms.fixed + r * size + first + (v == V - 1 ? last : v * W));
    for (int e = begin; e < end; ++e) {
      if (limit) prefetch<V * W* int(sizeof(T))>(base + size * ahead(e));
      const T* row = base + size * index[e];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Vector x = load<T, W>(row + (v == V - 1 ? last : v * W)),
                     w = weight(all_terms.w + e * heads, v);
        if constexpr (Terms::kLeaky) {
          const Vector u = x + fixed[v], term = w * leaky_slope(u, all_terms.slope);
          sum[v] += term;
          if (two) sum2[v] += term * u;
        } else {
          sum[v] += w * x;
          if (two) sum2[v] += weight(all_terms.w2 + e * heads, v) * x;
        }
      }
    }
    const auto write = [&](const SumRows<T>& to, int64_t at, Vector x) __attribute__((always_inline)) {
      if (to.rows)
        store<T, W>(to.rows + r * size + at, x);
      else
        store_vector(to.sums + r * size + at, x);
    };
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t at = first + (v == V - 1 ? last : v * W);
      if constexpr (Terms::kLeaky) {
        sum[v] *= load_vector<Vector>(all_terms.attn + at);
      } else {
        if (all_terms.factor) {
          const Vector factor = weight(all_terms.factor + r * heads, v);
          sum[v] *= factor;
          if (two) sum2[v] *= factor;
        }
        if (all_terms.plus) sum[v] += load_vector<Vector>(all_terms.plus + r * all_terms.plus_stride + at);
      }
      write(a, at, sum[v]);
      if (two) write(a2, at, sum2[v]);
    }
  });
}

namespace {

// What an aggregation adds; wide: all lanes of a vector are of one head.
template <class T, bool two, bool wide>
struct Weighted {
  static constexpr bool kTwo = two, kWide = wide, kLeaky = false;
  const Acc<T>*w, *w2, *factor, *plus;
  int64_t plus_stride;
};
template <class T, bool two, bool wide>
struct LeakyWeighted {
  static constexpr bool kTwo = two, kWide = wide, kLeaky = true;
  const Acc<T>*w, *fixed, *attn;
  Acc<T> slope;
};

}  // namespace

template <class T>
template <class MakeTerms>
void Columns<T>::aggregate_all(const Group& group, const int32_t* index, int64_t limit,
                               const MakeTerms& make_terms, SumRows<T> a, SumRows<T> a2) const {
  with_width<A>(shape_.width, [&](auto width) {
    constexpr int W = width.value;
    const auto run = [&](auto two, auto wide) {
      const auto terms = make_terms(two, wide);
      // Accumulators and what spreads the weights: up to 24 of 32 registers with AVX-512, 12 of 16 otherwise.
      constexpr bool many = two.value || decltype(terms)::kLeaky;
      constexpr int most = W < kLanes<A>        ? 2
                           : kVectorBytes == 64 ? (decltype(terms)::kLeaky ? 4 : 8)
                           : many               ? 2
                                                : 4;
      const auto tile = [&](auto vectors, int v) {
        aggregate_tile<W, vectors.value>(v, group, index, limit, terms, a, a2);
      };
      int v = 0;
      for (; v + most <= shape_.vectors; v += most) tile(std::integral_constant<int, most>(), v);
      if constexpr (most > 4)
        if (v + 4 <= shape_.vectors) tile(std::integral_constant<int, 4>(), v), v += 4;
      for (; v + 2 <= shape_.vectors; v += 2) tile(std::integral_constant<int, 2>(), v);
      if (v < shape_.vectors) tile(std::integral_constant<int, 1>(), v);
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const bool wide = heads_ == 1 || dim_ % W == 0;
    if constexpr (W > 1) {
      if (!wide) return a2 ? run(yes, no) : run(no, no);
    }
    a2 ? run(yes, yes) : run(no, yes);
  });
}

template <class T>
void Columns<T>::aggregate(const Group& group, const int32_t* index, int64_t limit, const A* w, const A* w2,
                           const A* factor, const A* plus, int64_t plus_stride, SumRows<T> a,
                           SumRows<T> a2) const {
  aggregate_all(
      group, index, limit,
      [&](auto two, auto wide) {
        return Weighted<T, two.value, wide.value>{w, w2, factor, plus, plus_stride};
      },
      a, a2);
}

template <class T>
void Columns<T>::leaky_aggregate(const Group& group, const int32_t* index, int64_t limit, const A* fixed,
                                 const A* attn, A slope, const A* w, SumRows<T> a, SumRows<T> a2) const {
  aggregate_all(
      group, index, limit,
      [&](auto two, auto wide) { return LeakyWeighted<T, two.value, wide.value>{w, fixed, attn, slope}; }, a,
      a2);
}

template <class T>
template <class Term>
void Columns<T>::dots_all(const Group& group, const int32_t* index, int64_t limit, const A* fixed,
                          const Term& term, A* s) {
  const int64_t size = size_;
  const Ahead ahead(Rows<T>{data_, shape_}, index, limit);
  sums_(
      [&](const auto& add) __attribute__((always_inline)) {
        group.each_edge([&](int r, int e) __attribute__((always_inline)) {
          if (limit) prefetch(data_ + size * ahead(e), size * int64_t(sizeof(T)));
          const T* x = data_ + size * index[e];
          const A* row = fixed + r * size;
          add([&](auto width, int at, const auto& own, auto total)
                  __attribute__((always_inline)) { return term(width, x + at, row + at, at, own, total); });
        });
      },
      s);
}

template <class T>
void Columns<T>::dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed, A* s) {
  dots_all(
      group, index, limit, fixed,
      [](auto width, const T* x, const A* r, int, const auto& own, auto total)
          __attribute__((always_inline)) {
            return total + own(load<T, width.value>(x)) * load_vector<Vec<A, width.value>>(r);
          },
      s);
}

template <class T>
void Columns<T>::leaky_dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed,
                            const A* attn, A slope, A* s) {
  dots_all(
      group, index, limit, fixed,
      [=](auto width, const T* x, const A* r, int at, const auto& own, auto total)
          __attribute__((always_inline)) {
            constexpr int W = width.value;
            return total + own(load_vector<Vec<A, W>>(attn + at)) *
                               leaky_relu(load<T, W>(x) + load_vector<Vec<A, W>>(r), slope);
          },
      s);
}

template class Columns<float>;
template class Columns<double>;
template class Columns<Half>;
template class Columns<BFloat16>;

}  // namespace dfgnn::cpu::DFGNN_ISA
