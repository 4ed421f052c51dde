// The loops over edges of class Columns; columns.h explains the names.
#include "columns.h"

#include "ahead.h"

namespace dfgnn::cpu::DFGNN_ISA {

template <class T>
Columns<T>::Columns(const void* data, int heads, int dim)
    : data_(static_cast<const T*>(data)),
      heads_(heads),
      dim_(dim),
      size_(int64_t(heads) * dim),
      paired_(matrix_shape<T>(heads, dim).paired),
      shape_(matrix_shape<T>(1, int(size_), dim % 2 == 0)),
      head_(shape_.vectors),
      offset_(shape_.packed),
      sums_(heads, dim) {
  for (int v = 0; v < shape_.vectors; ++v) {
    const int W = shape_.width, step = shape_.paired ? 2 : 1;
    const int column = shape_.paired ? v / 2 * 2 * W + v % 2 : feature(shape_, v, W);
    head_[v] = column / dim;
    for (int l = 0; l < W; ++l) offset_[v * W + l] = (column + l * step) / dim - head_[v];
  }
}

// Computes the sums of all rows of a group for V vectors of columns, from `vector` on. The sums of a row stay
// in registers over its edges.
template <class T>
template <int W, bool pairs, TileHeads tile, int V, class Terms>
void Columns<T>::aggregate_tile(int vector, const Group& group, const int32_t* index, Fetch fetch,
                                const Terms& all_terms, SumRows<T> a, SumRows<T> a2) const {
  using Vector = Vec<A, W>;
  using Lanes = Vec<Bits<A>, W>;
  constexpr bool two = Terms::kTwo;
  const int heads = heads_;
  const int64_t size = size_, first = feature(shape_, vector, W),
                last = feature(shape_, vector + V - 1, W) - first;
  const T* base = data_ + first;
  const Ahead ahead(Rows<T>{data_, shape_}, index, fetch.limit);
  const int32_t* const head = head_ + vector;
  Lanes lane[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v)
    lane[v] = load_vector<Lanes>(offset_ + (vector + v) * W) + Bits<A>(head[v] - head[0]);
  // Returns the weights of vector v's columns. w: the weights of an edge's (or a row's) heads.
  const auto weight = [&](const A* w, int v) __attribute__((always_inline)) -> Vector {
    if constexpr (pairs) v = v / 2 * 2;  // both vectors of a pair belong to the same heads
    if constexpr (tile == TileHeads::same)
      return splat<A, W>(w[head[0]]);
    else if constexpr (tile == TileHeads::next)
      return splat<A, W>((w + head[0])[pairs ? v / 2 : v]);
    else if constexpr (tile == TileHeads::any)
      return splat<A, W>(w[head[v]]);
    else
      return spread<A, W>(w + head[0], lane[v]);  // one load for all vectors
  };
  // Calls f(vector v, v) for the V vectors of a row in memory order. x: the row's first column of the tile.
  const auto each_of = [&](const auto* x, const auto& f) __attribute__((always_inline)) {
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (pairs) {
        const auto pair = load_pair<X, W>(x + v * W);
        f(pair.even, v), ++v, f(pair.odd, v);
      } else {
        f(load<X, W>(x + (v == V - 1 ? last : v * W)), v);
      }
    }
  };
  // Does the same as each_of for a row of accumulators that is stored like `fixed` (Columns::paired).
  const auto each_of_fixed = [&](const A* x, const auto& f) __attribute__((always_inline)) {
    if constexpr (pairs && tile != TileHeads::mixed) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) f(load_vector<Vector>(x + v * W), v);
    } else {
      each_of(x, f);
    }
  };
  group.each([&](int r, int begin, int end) __attribute__((always_inline)) {
    Vector sum[V] = {}, sum2[V] = {}, fixed[V] = {};
    if constexpr (Terms::kLeaky)
      each_of_fixed(all_terms.fixed + r * size + first,
                    [&](Vector x, int v) __attribute__((always_inline)) { fixed[v] = x; });
    for (int e = begin; e < end; ++e) {
      if (fetch.hot)  // the edge group.n positions later is one of the next group
        __builtin_prefetch(base + size * index[e + group.n < fetch.limit ? e + group.n : e], 0, 2);
      else if (fetch.limit)
        prefetch<V * W* int(sizeof(T))>(base + size * ahead(e));
      const T* row = base + size * index[e];
      each_of(row, [&](Vector x, int v) __attribute__((always_inline)) {
        const Vector w = weight(all_terms.w + e * heads, v);
        if constexpr (Terms::kLeaky) {
          const Vector u = x + fixed[v], leaking = w * all_terms.slope, term = u > 0 ? w : leaking;
          sum[v] += term;
          if (two) sum2[v] += term * u;
        } else {
          sum[v] += w * x;
          if (two) sum2[v] += weight(all_terms.w2 + e * heads, v) * x;
        }
      });
    }
    if constexpr (Terms::kLeaky) {
      each_of_fixed(all_terms.attn + first,
                    [&](Vector x, int v) __attribute__((always_inline)) { sum[v] *= x; });
    } else {
      if (all_terms.factor)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const Vector factor = weight(all_terms.factor + r * heads, v);
          sum[v] *= factor;
          if (two) sum2[v] *= factor;
        }
      if (all_terms.plus)
        each_of(all_terms.plus + r * all_terms.plus_stride + first,
                [&](Vector x, int v) __attribute__((always_inline)) { sum[v] += x; });
    }
    const auto write_to = [&](auto* to, const Vector* x) __attribute__((always_inline)) {
      using X = std::remove_pointer_t<decltype(to)>;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        if constexpr (pairs) {
          store_pair<X, W>(to + v * W, {x[v], x[v + 1]}), ++v;
        } else {
          store<X, W>(to + (v == V - 1 ? last : v * W), x[v]);
        }
      }
    };
    const auto write = [&](const SumRows<T>& to, const Vector* x) __attribute__((always_inline)) {
      to.rows ? write_to(to.rows + r * size + first, x) : write_to(to.sums + r * size + first, x);
    };
    write(a, sum);
    if (two) write(a2, sum2);
  });
}

namespace {

template <TileHeads heads>
using HeadsOf = std::integral_constant<TileHeads, heads>;

// The arguments of aggregate and leaky_aggregate, for the loop that both share. kTwo: there is a second sum.
template <class T, bool two>
struct Weighted {
  static constexpr bool kTwo = two, kLeaky = false;
  const Acc<T>*w, *w2, *factor, *plus;
  int64_t plus_stride;
};
template <class T, bool two>
struct LeakyWeighted {
  static constexpr bool kTwo = two, kLeaky = true;
  const Acc<T>*w, *fixed, *attn;
  Acc<T> slope;
};

}  // namespace

template <class T>
template <class MakeTerms>
void Columns<T>::aggregate_all(const Group& group, const int32_t* index, Fetch fetch,
                               const MakeTerms& make_terms, SumRows<T> a, SumRows<T> a2) const {
  with_layout<T>(shape_, [&](auto width, auto in_pairs) {
    constexpr int W = width.value;
    constexpr bool pairs = in_pairs.value;
    // two: whether there is a second sum; wide: whether each vector (or pair) is within a head, so that its
    // weight is broadcast instead of permuted.
    const auto run = [&](auto two, auto wide) {
      const auto terms = make_terms(two);
      constexpr bool leaky = decltype(terms)::kLeaky, full = W == kLanes<A>;
      constexpr int least = pairs ? 2 : 1;
      // The most vectors of a tile. Sums, fixed rows (leaky) and permutations (not wide) take up to 24 of 32
      // registers with AVX-512, 8 of 16 otherwise.
      constexpr int per_vector = 1 + two.value + leaky + !wide.value;
      constexpr int most = !full                ? 2
                           : kVectorBytes == 64 ? (leaky && !wide.value ? 4 : 8)
                           : per_vector == 1    ? 8
                           : per_vector == 2    ? 4
                                                : 2;
      int v = 0;
      // Computes tiles of V vectors as long as V vectors are left and the weights of their heads fit in one
      // vector for permutations, as they do if V is `least`. (If `wide`, there are no permutations.)
      const auto tiles = [&](auto vectors) {
        constexpr int V = vectors.value;
        if constexpr (V <= most && (!pairs || V > 1)) {
          const auto run_tile = [&](auto heads) {
            aggregate_tile<W, pairs, heads.value, V>(v, group, index, fetch, terms, a, a2);
          };
          const auto between = [&] { return heads_between(v, v + V - 1, W); };
          for (; v + V <= shape_.vectors && (wide.value || V == least || between() < W); v += V) {
            if constexpr (!wide.value)
              run_tile(HeadsOf<TileHeads::mixed>());
            else if constexpr (V == least)
              run_tile(HeadsOf<TileHeads::same>());
            else if constexpr (!full)
              run_tile(HeadsOf<TileHeads::any>());
            else if (dim_ == least * W)
              run_tile(HeadsOf<TileHeads::next>());
            else if (between() == 0)
              run_tile(HeadsOf<TileHeads::same>());
            else
              run_tile(HeadsOf<TileHeads::any>());
          }
        }
      };
      tiles(std::integral_constant<int, 8>());
      tiles(std::integral_constant<int, 4>());
      tiles(std::integral_constant<int, 2>());
      tiles(std::integral_constant<int, 1>());
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    // Permutations serve every shape. Loops without them are for the types and shapes of most models: each of
    // them takes long to compile.
    constexpr bool may_be_wide = W == 1 || pairs || (W == kLanes<A> && std::is_same_v<T, float>);
    if constexpr (may_be_wide) {
      if (W == 1 || heads_ == 1 || dim_ % (pairs ? 2 * W : W) == 0) return a2 ? run(yes, yes) : run(no, yes);
    }
    if constexpr (W > 1) a2 ? run(yes, no) : run(no, no);
  });
}

template <class T>
void Columns<T>::aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* w, const A* w2,
                           const A* factor, const A* plus, int64_t plus_stride, SumRows<T> a,
                           SumRows<T> a2) const {
  aggregate_all(
      group, index, fetch, [&](auto two) { return Weighted<T, two.value>{w, w2, factor, plus, plus_stride}; },
      a, a2);
}

template <class T>
void Columns<T>::leaky_aggregate(const Group& group, const int32_t* index, Fetch fetch, const A* fixed,
                                 const A* attn, A slope, const A* w, SumRows<T> a, SumRows<T> a2) const {
  aggregate_all(
      group, index, fetch, [&](auto two) { return LeakyWeighted<T, two.value>{w, fixed, attn, slope}; }, a,
      a2);
}

template <class T>
template <class Term>
void Columns<T>::dots_all(const Group& group, const int32_t* index, int64_t limit, const A* fixed,
                          const Term& term, A* s) {
  const int64_t size = size_;
  const Ahead ahead(Rows<T>{data_, shape_}, index, limit);
  const auto run = [&](const auto& add) __attribute__((always_inline)) {
    group.each_edge([&](int r, int e) __attribute__((always_inline)) {
      if (limit) prefetch(data_ + size * ahead(e), size * int64_t(sizeof(T)));
      const T* x = data_ + size * index[e];
      const A* row = fixed + r * size;
      add([&](auto width, int at, const auto& own, auto total)
              __attribute__((always_inline)) { return term(width, x + at, row + at, at, own, total); });
    });
  };
  if constexpr (kInPairs<T>)
    if (paired_) return sums_.template operator()<true>(run, s);
  sums_(run, s);
}

template <class T>
void Columns<T>::dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed, A* s) {
  dots_all(
      group, index, limit, fixed,
      [](auto width, const T* x, const A* r, int, const auto& own, auto total)
          __attribute__((always_inline)) {
            using Vector = decltype(total);
            if constexpr (width.value > kLanes<A>) {
              constexpr int W = kLanes<A>;
              const auto pair = load_pair<T, W>(x);
              total += pair.even * load_vector<Vector>(r);
              return total + pair.odd * load_vector<Vector>(r + W);
            } else {
              return total + own(load<T, width.value>(x)) * load_vector<Vector>(r);
            }
          },
      s);
}

template <class T>
void Columns<T>::leaky_dots(const Group& group, const int32_t* index, int64_t limit, const A* fixed,
                            const A* attn, A slope, A* s) {
  dots_all(
      group, index, limit, fixed,
      [=](auto width, const T* x, const A* r, int at, const auto& own,
          auto total) __attribute__((always_inline)) {
        using Vector = decltype(total);
        const auto term = [&](Vector x, int k) __attribute__((always_inline)) {
          return own(load_vector<Vector>(attn + at + k)) * leaky_relu(x + load_vector<Vector>(r + k), slope);
        };
        if constexpr (width.value > kLanes<A>) {
          constexpr int W = kLanes<A>;
          const auto pair = load_pair<T, W>(x);
          total += term(pair.even, 0);
          return total + term(pair.odd, W);
        } else {
          return total + term(load<T, width.value>(x), 0);
        }
      },
      s);
}

template class Columns<float>;
template class Columns<double>;
template class Columns<Half>;
template class Columns<BFloat16>;

}  // namespace dfgnn::cpu::DFGNN_ISA
