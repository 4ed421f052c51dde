#include "columns.h"

#include "ahead.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// a0 + a1, a2 + a3, ... of the lanes of a and then b.
template <class A, int W, int... I>
inline Vec<A, W> add_neighbours(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

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

// The halves of every head are added where they are whole vectors.
template <class A>
void add_halves_of_heads(A* x, int64_t count, int half) {
  constexpr int W = kLanes<A>;
  for (int64_t h = 0; h < count; ++h)
    for (int d = 0; d < half; d += W) {
      const A* from = x + h * 2 * half + d;
      store_vector(x + h * half + d, load_vector<Vec<A, W>>(from) + load_vector<Vec<A, W>>(from + half));
    }
}

// out[i] = x[2 i] + x[2 i + 1]; out may be x.
template <class A>
void add_pairs_of(const A* x, int64_t count, A* out) {
  constexpr int W = kLanes<A>;
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  int64_t i = 0;
  for (; i + W <= count; i += W)
    store_vector(out + i, add_neighbours<A, W>(load_vector<Vec<A, W>>(x + 2 * i),
                                               load_vector<Vec<A, W>>(x + 2 * i + W), lanes));
  for (; i < count; ++i) out[i] = x[2 * i] + x[2 * i + 1];
}

// out[h][d] = x[h][d] + x[h][d + D / 2] for heads of D lanes, whose halves are less than a vector; out may be
// x.
template <class A, int D, int... I>
void fold(const A* x, int64_t count, A* out, std::integer_sequence<int, I...>) {
  constexpr int W = kLanes<A>, half = D / 2;
  const int64_t total = count * half;
  int64_t i = 0;
  for (; i + W <= total; i += W) {
    const auto a = load_vector<Vec<A, W>>(x + 2 * i), b = load_vector<Vec<A, W>>(x + 2 * i + W);
    store_vector(out + i, __builtin_shufflevector(a, b, (I / half * D + I % half)...) +
                              __builtin_shufflevector(a, b, (I / half * D + I % half + half)...));
  }
  for (; i < total; ++i) {
    const A* from = x + i / half * D + i % half;
    out[i] = from[0] + from[half];
  }
}

// sums[h] = sum of the `width` lanes of head h, in the order of sum4; x is overwritten.
template <class A, int W = kLanes<A>>
void sum_lanes(A* x, int64_t count, int width, A* sums) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes<A>>();
  if constexpr (W == 1) {
    __builtin_memcpy(sums, x, std::size_t(count) * sizeof(A));
  } else if (width < W) {
    sum_lanes<A, W / 2>(x, count, width, sums);
  } else if constexpr (W == 2) {
    fold<A, 2>(x, count, sums, lanes);
  } else {
    fold<A, W>(x, count, x, lanes);
    fold<A, W / 2>(x, count, W == 4 ? sums : x, lanes);
    if constexpr (W == 16) add_pairs_of(x, count * 2, x);
    if constexpr (W > 4) add_pairs_of(x, count, sums);
  }
}

}  // namespace

template <class A>
void sum_heads(A* x, int64_t count, int dim, A* sums) {
  while (dim > 0 && dim % 2 == 0) {
    dim /= 2;
    if (dim % kLanes<A> == 0)
      add_halves_of_heads(x, count, dim);
    else
      add_pairs_of(x, count * dim, dim == 1 ? sums : x);
    if (dim == 1) return;
  }
  for (int64_t h = 0; h < count; ++h, x += dim) {
    constexpr int W = 16 / sizeof(A);
    Vec<A, W> total{};
    int d = 0;
    for (; d + W <= dim; d += W) total += load_vector<Vec<A, W>>(x + d);
    A rest = 0;
    for (; d < dim; ++d) rest += x[d];
    sums[h] = sum<A, W>(total) + rest;
  }
}

template <class T>
Columns<T>::Columns(const void* data, int heads, int dim)
    : data_(static_cast<const T*>(data)),
      heads_(heads),
      dim_(dim),
      size_(int64_t(heads) * dim),
      shape_(row_shape<A>(1, int(size_))),
      head_(shape_.vectors),
      offset_(shape_.packed),
      products_(size_ < kColumnsAtOnce ? kColumnsAtOnce : size_) {
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
                                const Terms& all_terms, A* a, A* a2) const {
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
        fixed[v] = load<T, W>(all_terms.fixed + r * size + first + (v == V - 1 ? last : v * W));
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
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t at = r * size + first + (v == V - 1 ? last : v * W);
      store_vector(a + at, sum[v]);
      if (two) store_vector(a2 + at, sum2[v]);
    }
  });
}

namespace {

// What an aggregation adds; wide: all lanes of a vector are of one head.
template <class T, bool two, bool wide>
struct Weighted {
  static constexpr bool kTwo = two, kWide = wide, kLeaky = false;
  const Acc<T>*w, *w2;
};
template <class T, bool two, bool wide>
struct LeakyWeighted {
  static constexpr bool kTwo = two, kWide = wide, kLeaky = true;
  const Acc<T>* w;
  const T* fixed;
  Acc<T> slope;
};

}  // namespace

template <class T>
template <class MakeTerms>
void Columns<T>::aggregate_all(const Group& group, const int32_t* index, int64_t limit,
                               const MakeTerms& make_terms, A* a, A* a2) const {
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
    const bool wide = W == 1 || dim_ % W == 0;
    if constexpr (W > 1) {
      if (!wide) return a2 ? run(yes, no) : run(no, no);
    }
    a2 ? run(yes, yes) : run(no, yes);
  });
}

template <class T>
void Columns<T>::aggregate(const Group& group, const int32_t* index, int64_t limit, const A* w, const A* w2,
                           A* a, A* a2) const {
  aggregate_all(
      group, index, limit, [&](auto two, auto wide) { return Weighted<T, two.value, wide.value>{w, w2}; }, a,
      w2 ? a2 : nullptr);
}

template <class T>
void Columns<T>::leaky_aggregate(const Group& group, const int32_t* index, const T* fixed, A slope,
                                 const A* w, A* a, A* a2) const {
  aggregate_all(
      group, index, 0,
      [&](auto two, auto wide) { return LeakyWeighted<T, two.value, wide.value>{w, fixed, slope}; }, a, a2);
}

// Per edge and head one vector, or a part of one, to be summed over its lanes; some edges at a time. `term`
// gives what is added for a vector of the gathered and one of the fixed row.
template <class T>
template <class Term>
void Columns<T>::dots_all(const Group& group, const int32_t* index, int64_t limit, const T* fixed,
                          const Term& term, A* s) {
  constexpr int W = kLanes<A>;
  const RowShape head = row_shape<A>(1, dim_);
  const int64_t size = size_;
  const int most = size < kColumnsAtOnce / 2 ? int(kColumnsAtOnce / (size > 0 ? size : 1)) : 1;
  const Ahead ahead(Rows<T>{data_, shape_}, index, limit);
  A* to = products_;
  int done = 0;
  const auto fold = [&](int end) {
    sum_lanes<A>(products_, int64_t(end - done) * heads_, head.width, s + int64_t(done) * heads_);
    to = products_, done = end;
  };
  group.each([&](int r, int begin, int end) {
    const T* other = fixed + r * size;
    for (int e = begin; e < end; ++e) {
      if (limit) prefetch(data_ + size * ahead(e), size * int64_t(sizeof(T)));
      const T* x = data_ + size * index[e];
      if (head.vectors == 1) {
        with_width<A>(shape_.width, [&](auto width) {
          for (int v = 0; v < shape_.vectors; ++v) {
            const int at = feature(shape_, v, width.value);
            store_vector(to + at, term(width, x, other, at, Vec<A, width.value>{}));
          }
        });
        to += size;
      } else {
        for (int h = 0; h < heads_; ++h, to += W) {
          Vec<A, W> total{};
          for (int d = h * dim_; d < (h + 1) * dim_; d += W)
            total = term(std::integral_constant<int, W>(), x, other, d, total);
          store_vector(to, total);
        }
      }
      if (e + 1 - done == most) fold(e + 1);
    }
  });
  if (done < group.n) fold(group.n);
}

template <class T>
void Columns<T>::dots(const Group& group, const int32_t* index, int64_t limit, const T* fixed, A* s) {
  dots_all(
      group, index, limit, fixed,
      [](auto width, const T* x, const T* r, int at, auto total) __attribute__((always_inline)) {
        return total + load<T, width.value>(x + at) * load<T, width.value>(r + at);
      },
      s);
}

template <class T>
void Columns<T>::leaky_dots(const Group& group, const int32_t* index, int64_t limit, const T* fixed,
                            const A* attn, A slope, A* s) {
  dots_all(
      group, index, limit, fixed,
      [=](auto width, const T* x, const T* r, int at, auto total) __attribute__((always_inline)) {
        constexpr int W = width.value;
        return total +
               load_vector<Vec<A, W>>(attn + at) * leaky_relu(load<T, W>(x + at) + load<T, W>(r + at), slope);
      },
      s);
}

template void sum_heads(float*, int64_t, int, float*);
template void sum_heads(double*, int64_t, int, double*);
template class Columns<float>;
template class Columns<double>;
template class Columns<Half>;
template class Columns<BFloat16>;

}  // namespace dfgnn::cpu::DFGNN_ISA
