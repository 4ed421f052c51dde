// The loops of rows.h: an aggregation keeps a tile of accumulators, some vectors of some heads, in registers
// over a block's edges; a dot product takes four edges at a time. Functors say what they add for an edge and
// a vector.
//
// Words, vectors, packed rows: rows.h. DFGNN_ISA: the instruction set (simd.h). Names from other files:
// ahead.h:
//   Ahead       ahead(e): the index of the row to prefetch while edge e is processed; ahead.index[e]: the
//               index of e's own row; prefetch<bytes>(p): prefetches the row at p
// simd.h:
//   load_pair   2 W elements as their even and their odd ones
//   sum4        (v, sums): the sums of the lanes of four vectors
//   leaky_relu  L(z); leaky_slope: L'(z)
#include "ahead.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// Functors of aggregations. tile(head, at) returns the functor for a tile that begins at this head and at
// element `at` of a packed row. operator() adds to sum and sum2 what edge e contributes to one vector; x is
// that vector of the edge's gathered row, h and v are the vector's head and first element relative to the
// tile. two: whether there is a second sum.
template <class T, int W, bool two>
struct Weighted {
  static constexpr bool kTwo = two;
  const Acc<T>*w, *w2;
  Weighted tile(int head, int64_t) const { return {w + head * kBlock, two ? w2 + head * kBlock : w2}; }
  template <class Vector>
  [[gnu::always_inline]] void operator()(Vector x, int e, int h, int64_t, Vector& sum, Vector& sum2) const {
    sum += w[h * kBlock + e] * x;
    if (two) sum2 += w2[h * kBlock + e] * x;
  }
};

template <class T, int W, bool two>
struct LeakyWeighted {
  static constexpr bool kTwo = two;
  const Acc<T>*w, *r;
  Acc<T> slope;
  LeakyWeighted tile(int head, int64_t at) const { return {w + head * kBlock, r + at, slope}; }
  template <class Vector>
  [[gnu::always_inline]] void operator()(Vector x, int e, int h, int64_t v, Vector& sum, Vector& sum2) const {
    const Vector u = x + load_vector<Vector>(r + v);
    const Vector weight = w[h * kBlock + e] * leaky_slope(u, slope);
    sum += weight;
    if (two) sum2 += weight * u;
  }
};

// Adds to a and a2 the sums over a block's edges, for H heads from `head` on and V vectors of each head from
// `vector` on. fresh, fresh2: a, a2 start from 0. The sums of the block start from 0 even if a and a2 do not,
// because sums of sums round less.
template <class T, int W, bool paired, int H, int V, class Terms>
void aggregate_tile(const Rows<T>& rows, const Ahead& ahead, int head, int vector, int n,
                    const Terms& all_terms, Acc<T>* a, Acc<T>* a2, bool fresh, bool fresh2) {
  using A = Acc<T>;
  using Vector = Vec<A, W>;
  constexpr bool two = Terms::kTwo;
  const RowShape& shape = rows.shape;
  const int64_t stride = shape.size(), dim = shape.dim, packed = shape.packed;
  const T* base = rows.data + head * dim + feature(shape, vector, W);
  const int64_t last = feature(shape, vector + V - 1, W) - feature(shape, vector, W);
  const int64_t tile = head * packed + vector * W;
  const Terms terms = all_terms.tile(head, tile);
  Vector sum[H][V] = {}, sum2[H][V] = {};
  for (int e = 0; e < n; ++e) {
    if (ahead.limit) prefetch<H * V * W* int(sizeof(T))>(base + stride * ahead(e));
    const T* row = base + stride * ahead.index[e];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        if constexpr (!paired) {
          const Vector x = load<T, W>(row + h * dim + (v == V - 1 ? last : v * W));
          terms(x, e, h, h * packed + v * W, sum[h][v], sum2[h][v]);
        } else {
          const auto x = load_pair<T, W>(row + h * dim + v * W);
          terms(x.even, e, h, h * packed + v * W, sum[h][v], sum2[h][v]);
          ++v;  // the odd elements are the next vector
          terms(x.odd, e, h, h * packed + v * W, sum[h][v], sum2[h][v]);
        }
      }
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t at = tile + h * packed + v * W;
      store_vector(a + at, fresh ? sum[h][v] : load_vector<Vector>(a + at) + sum[h][v]);
      if (two) store_vector(a2 + at, fresh2 ? sum2[h][v] : load_vector<Vector>(a2 + at) + sum2[h][v]);
    }
}

// Does the same for all heads and vectors of a row, in tiles.
template <class T, int W, bool paired, class Terms>
void aggregate_all(const Rows<T>& rows, const Ahead& ahead, int n, const Terms& terms, Acc<T>* a, Acc<T>* a2,
                   bool fresh, bool fresh2) {
  using A = Acc<T>;
  // Accumulators take 8 of 16 registers; with AVX-512 8 of 32, or 16 if there are two sums.
  constexpr int most = Terms::kTwo && kVectorBytes < 64 ? 4 : 8;
  const int heads = rows.shape.heads, vectors = rows.shape.vectors;
  const auto tile = [&](auto h, auto v, int head, int vector) {
    // A head of narrow vectors has at most three of them: it is shorter than the next width.
    if constexpr (paired ? v.value % 2 == 0 : W == kLanes<A> || v.value <= 2)
      aggregate_tile<T, W, paired, h.value, v.value>(rows, ahead, head, vector, n, terms, a, a2, fresh,
                                                     fresh2);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> pair;
  constexpr integral_constant<int, 4> four;
  constexpr integral_constant<int, most> full;
  int head = 0;
  if (vectors == 1) {
    for (; head + most <= heads; head += most) tile(full, one, head, 0);
  } else if (vectors == 2) {
    for (; head + most / 2 <= heads; head += most / 2)
      tile(integral_constant<int, most / 2>(), pair, head, 0);
  } else if (vectors == 4 && most == 8) {
    for (; head + 2 <= heads; head += 2) tile(pair, four, head, 0);
  }
  for (; head < heads; ++head) {
    int v = 0;
    for (; v + most <= vectors; v += most) tile(one, full, head, v);
    if (v + 4 <= vectors) tile(one, four, head, v), v += 4;
    if (v + 2 <= vectors) tile(one, pair, head, v), v += 2;
    if (v < vectors) tile(one, one, head, v);
  }
}

// Functors of dot products: they return what an edge contributes to the sum of its products for a vector x of
// its gathered row. feature, packed: the vector's position in a row and in a packed row; last: whether it is
// the last vector of its head. start(edge) is called before the edge's vectors are.
template <class T, int W>
struct RowTerm {
  const Acc<T>* r;
  void start(int) const {}
  template <class Vector>
  [[gnu::always_inline]] Vector operator()(Vector x, int, int64_t, int64_t packed, bool) const {
    return x * load_vector<Vector>(r + packed);
  }
};

template <class T, int W>
struct LeakyTerm {
  const Acc<T>*r, *attn;
  Acc<T> slope;
  void start(int) const {}
  template <class Vector>
  [[gnu::always_inline]] Vector operator()(Vector x, int, int64_t, int64_t packed, bool) const {
    return load_vector<Vector>(attn + packed) * leaky_relu(x + load_vector<Vector>(r + packed), slope);
  }
};

template <class T, int W>
struct PairTerm {
  const Acc<T>* r;
  const Rows<T>& y;
  Ahead ahead;
  void start(int edge) const { prefetch(y.row(ahead(edge)), y.shape.size() * int64_t(sizeof(T))); }
  template <class Vector>
  [[gnu::always_inline]] Vector operator()(Vector x, int edge, int64_t feature, int64_t packed,
                                           bool last) const {
    const Vector sum = load<T, W>(y.row(ahead.index[edge]) + feature) + load_vector<Vector>(r + packed);
    if (!last) return x * sum;
    // Columns that the vector before has, too, are set to 0, so that they count once.
    return x * (before<Acc<T>, W>(0, y.shape.packed - y.shape.dim) ? Vector{} : sum);
  }
};

// s[h][e] = sum of the terms of edge e over the vectors of head h. Four edges at a time share the loads of
// the fixed row, and the tree that adds up their lanes.
template <class T, int W, bool paired, class Terms>
void dots_all(const Rows<T>& rows, const Ahead& ahead, int n, const Terms& terms, Acc<T>* s) {
  using A = Acc<T>;
  using Vector = Vec<A, W>;
  constexpr int E = 4;
  const RowShape shape = rows.shape;
  const int64_t stride = shape.size(), bytes = stride * int64_t(sizeof(T)), dim = shape.dim,
                packed = shape.packed;
  for (int e = 0; e < n; e += E) {
    const T* row[E];
    int edge[E];
#pragma GCC unroll 4
    for (int i = 0; i < E; ++i) {
      edge[i] = e + i < n ? e + i : n - 1;  // results after the last edge are not used
      row[i] = rows.data + stride * ahead.index[edge[i]];
      if (ahead.limit) prefetch(rows.data + stride * ahead(edge[i]), bytes);
      terms.start(edge[i]);
    }
    for (int h = 0; h < shape.heads; ++h) {
      const auto add = [&](Vector* sum, int64_t at, int64_t vector, bool last)
                           __attribute__((always_inline)) {
#pragma GCC unroll 4
                             for (int i = 0; i < E; ++i) {
                               const int64_t from = h * dim + at, place = h * packed + vector * W;
                               if constexpr (!paired) {
                                 sum[i] += terms(load<T, W>(row[i] + from), edge[i], from, place, last);
                               } else {
                                 const auto x = load_pair<T, W>(row[i] + from);
                                 sum[i] += terms(x.even, edge[i], from, place, last);
                                 sum[i] += terms(x.odd, edge[i], from, place + W, last);
                               }
                             }
                           };
      const int most = paired ? shape.vectors : shape.vectors - 1;
      constexpr int step = paired ? 2 : 1;
      Vector total[E] = {};
      int v = 0;
      for (; v < most && v < kRun; v += step) add(total, v * W, v, false);
      if constexpr (W == kLanes<A>)  // a head of narrow vectors has at most three of them
        while (v < most) {
          Vector run[E] = {};
          for (const int end = v + kRun; v < most && v < end; v += step) add(run, v * W, v, false);
#pragma GCC unroll 4
          for (int i = 0; i < E; ++i) total[i] += run[i];
        }
      if (!paired && most >= 0) add(total, shape.last, most, true);  // most is -1 if D is 0
      A sums[E];
      sum4<A, W>(total, sums);
#pragma GCC unroll 4
      for (int i = 0; i < E; ++i) s[h * kBlock + e + i] = sums[i];
    }
  }
}

// Writes to row y_index[e] of y the vectors term(e, h, position in the row, position in a packed row), for n
// edges e and all heads h. A head's last vector is written first, because its second copies of features may
// be wrong (rows.h), and the vector before overwrites them.
template <class T, int W, class Term>
void write_rows(const RowShape& shape, int n, const int32_t* y_index, T* y, const Term& term) {
  for (int e = 0; e < n; ++e)
    for (int h = 0; h < shape.heads; ++h)
      for (int v = shape.vectors - 1; v >= 0; --v) {
        const int64_t at = int64_t(h) * shape.dim + feature(shape, v, W);
        store<T, W>(y + y_index[e] * shape.size() + at, term(e, h, at, int64_t(h) * shape.packed + v * W));
      }
}

}  // namespace

template <class T>
void Rows<T>::dots(const int32_t* index, int n, int64_t limit, const A* r, A* s) const {
  const Ahead ahead(*this, index, limit);
  with_layout<T>(shape, [&](auto w, auto paired) {
    dots_all<T, w.value, paired.value>(*this, ahead, n, RowTerm<T, w.value>{r}, s);
  });
}

template <class T>
void Rows<T>::leaky_dots(const int32_t* index, int n, int64_t limit, const A* r, const A* attn, A slope,
                         A* s) const {
  const Ahead ahead(*this, index, limit);
  with_layout<T>(shape, [&](auto w, auto paired) {
    dots_all<T, w.value, paired.value>(*this, ahead, n, LeakyTerm<T, w.value>{r, attn, slope}, s);
  });
}

template <class T>
void Rows<T>::pair_dots(const int32_t* index, int n, int64_t limit, const A* r, const Rows& y,
                        const int32_t* y_index, int64_t y_limit, A* s) const {
  const Ahead ahead(*this, index, limit);
  with_width<A>(shape.width, [&](auto w) {
    dots_all<T, w.value, false>(*this, ahead, n, PairTerm<T, w.value>{r, y, Ahead(y, y_index, y_limit)}, s);
  });
}

template <class T>
void Rows<T>::aggregate(const int32_t* index, int n, int64_t limit, const A* w, const A* w2, A* a, A* a2,
                        bool fresh) const {
  const Ahead ahead(*this, index, limit);
  with_layout<T>(shape, [&](auto width, auto paired) {
    constexpr int W = width.value;
    if (w2)
      aggregate_all<T, W, paired.value>(*this, ahead, n, Weighted<T, W, true>{w, w2}, a, a2, fresh, fresh);
    else
      aggregate_all<T, W, paired.value>(*this, ahead, n, Weighted<T, W, false>{w, w2}, a, a2, fresh, fresh);
  });
}

template <class T>
void Rows<T>::leaky_aggregate(const int32_t* index, int n, int64_t limit, const A* r, A slope, const A* w,
                              A* a, A* a2, bool fresh) const {
  const Ahead ahead(*this, index, limit);
  with_layout<T>(shape, [&](auto width, auto paired) {
    constexpr int W = width.value;
    constexpr bool in_pairs = paired.value;
    if (a2)
      aggregate_all<T, W, in_pairs>(*this, ahead, n, LeakyWeighted<T, W, true>{w, r, slope}, a, a2, fresh,
                                    false);
    else
      aggregate_all<T, W, in_pairs>(*this, ahead, n, LeakyWeighted<T, W, false>{w, r, slope}, a, a2, fresh,
                                    false);
  });
}

template <class T>
void Rows<T>::add_pairs(const int32_t* index, int n, int64_t limit, const Rows& y, const int32_t* y_index,
                        int64_t y_limit, A* sum) const {
  const Ahead ahead(*this, index, limit), y_ahead(y, y_index, y_limit);
  const RowShape flat = row_shape<A>(1, int(shape.size()));
  const int64_t size = shape.size(), bytes = size * int64_t(sizeof(T));
  with_width<A>(flat.width, [&](auto width) {
    constexpr int W = width.value;
    for (int e = 0; e < n; ++e, sum += size) {
      prefetch(row(ahead(e)), bytes);
      prefetch(y.row(y_ahead(e)), bytes);
      const T *a = row(index[e]), *b = y.row(y_index[e]);
      for (int v = 0; v < flat.vectors; ++v) {
        const int at = feature(flat, v, W);
        store_vector(sum + at, load<T, W>(a + at) + load<T, W>(b + at));
      }
    }
  });
}

template <class T>
void Rows<T>::scatter(const int32_t* index, int n, const A* w, const int32_t* y_index, T* y) const {
  with_width<A>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    write_rows<T, W>(shape, n, y_index, y, [&](int e, int h, int64_t at, int64_t) {
      return w[h * kBlock + e] * load<T, W>(row(index[e]) + at);
    });
  });
}

template <class T>
void scatter_row(const RowShape& shape, int n, const Acc<T>* w, const Acc<T>* a, const Acc<T>* w2,
                 const Acc<T>* a2, const int32_t* y_index, T* y) {
  with_width<Acc<T>>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    using Vector = Vec<Acc<T>, W>;
    write_rows<T, W>(shape, n, y_index, y, [&](int e, int h, int64_t, int64_t packed) {
      Vector x{};
      if (w) x += w[h * kBlock + e] * load_vector<Vector>(a + packed);
      if (w2) x += w2[h * kBlock + e] * load_vector<Vector>(a2 + packed);
      return x;
    });
  });
}

template <class T>
void scatter_leaky(const RowShape& shape, const Acc<T>* x, int n, const Acc<T>* r, const Acc<T>* attn,
                   Acc<T> slope, const Acc<T>* w, const int32_t* y_index, T* y) {
  with_width<Acc<T>>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    using Vector = Vec<Acc<T>, W>;
    write_rows<T, W>(shape, n, y_index, y, [&](int e, int h, int64_t at, int64_t packed) {
      const Vector u = load_vector<Vector>(x + e * shape.size() + at) + load_vector<Vector>(r + packed);
      return w[h * kBlock + e] * load_vector<Vector>(attn + packed) * leaky_slope(u, slope);
    });
  });
}

template <class T>
void pack(const RowShape& shape, const T* row, Acc<T>* packed) {
  using A = Acc<T>;
  if (shape.paired) {
    constexpr int W = kLanes<A>;
    for (int64_t d = 0; d < shape.size(); d += 2 * W) {
      const auto x = load_pair<T, W>(row + d);
      store_vector(packed + d, x.even), store_vector(packed + d + W, x.odd);
    }
    return;
  }
  with_width<A>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    const int copies = shape.packed - shape.dim;
    for (int h = 0; h < shape.heads; ++h, row += shape.dim, packed += shape.packed) {
      for (int v = 0; v < shape.vectors; ++v)
        store_vector(packed + v * W, load<T, W>(row + feature(shape, v, W)));
      for (int d = 0; d < copies; ++d) packed[shape.packed - W + d] = 0;
    }
  });
}

template <class T>
void unpack(const RowShape& shape, const Acc<T>* a, const Acc<T>* factor, T* row, const Acc<T>* bias) {
  using A = Acc<T>;
  if (shape.paired) {
    constexpr int W = kLanes<A>;
    for (int64_t d = 0; d < shape.size(); d += 2 * W) {
      const A f = factor ? factor[d / shape.dim] : A(1);
      const auto part = [&](int64_t at) {
        const Vec<A, W> x = load_vector<Vec<A, W>>(a + at) * f;
        return bias ? x + load_vector<Vec<A, W>>(bias + at) : x;
      };
      store_pair<T, W>(row + d, {part(d), part(d + W)});
    }
    return;
  }
  with_width<A>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    using Vector = Vec<A, W>;
    for (int h = 0; h < shape.heads; ++h, row += shape.dim)
      for (int v = shape.vectors - 1; v >= 0; --v) {  // the last vector first, as in write_rows
        const int at = h * shape.packed + v * W;
        const Vector x = load_vector<Vector>(a + at) * (factor ? factor[h] : A(1));
        store<T, W>(row + feature(shape, v, W), bias ? x + load_vector<Vector>(bias + at) : x);
      }
  });
}

template <class A>
void head_dots(const RowShape& shape, const A* r, const A* a, A* s) {
  with_width<A>(shape.width, [&](auto width) {
    constexpr int W = width.value;
    using Vector = Vec<A, W>;
    for (int h = 0; h < shape.heads; ++h) {
      Vector total{};
      for (int d = h * shape.packed; d < (h + 1) * shape.packed; d += W)
        total += load_vector<Vector>(r + d) * load_vector<Vector>(a + d);
      s[h] = sum<A, W>(total);
    }
  });
}

template struct Rows<float>;
template struct Rows<double>;
template struct Rows<Half>;
template struct Rows<BFloat16>;
template void pack(const RowShape&, const float*, float*);
template void pack(const RowShape&, const double*, double*);
template void pack(const RowShape&, const Half*, float*);
template void pack(const RowShape&, const BFloat16*, float*);
template void unpack(const RowShape&, const float*, const float*, float*, const float*);
template void unpack(const RowShape&, const double*, const double*, double*, const double*);
template void unpack(const RowShape&, const float*, const float*, Half*, const float*);
template void unpack(const RowShape&, const float*, const float*, BFloat16*, const float*);
#define DFGNN_SCATTER(T)                                                                                 \
  template void scatter_row(const RowShape&, int, const Acc<T>*, const Acc<T>*, const Acc<T>*,           \
                            const Acc<T>*, const int32_t*, T*);                                          \
  template void scatter_leaky(const RowShape&, const Acc<T>*, int, const Acc<T>*, const Acc<T>*, Acc<T>, \
                              const Acc<T>*, const int32_t*, T*);
DFGNN_SCATTER(float)
DFGNN_SCATTER(double)
DFGNN_SCATTER(Half)
DFGNN_SCATTER(BFloat16)
#undef DFGNN_SCATTER
template void head_dots(const RowShape&, const float*, const float*, float*);
template void head_dots(const RowShape&, const double*, const double*, double*);

}  // namespace dfgnn::cpu::DFGNN_ISA
