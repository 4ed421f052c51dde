// Products of low-dimensional edge features with rows of nodes: edge_dot, edge_sum and edge_outer of
// core/edge_terms.h, which defines their arguments; d is `dim` here. A node has a matrix [H, d] of rows,
// which is copied so that either heads or features are in the lanes of vectors, and combined with the
// features or weights of the node's edges.
#include "blocked_sum.h"
#include "edges.h"
#include "kernels.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

constexpr int kTogether = 4;  // how many edges share a load of the node's matrix
constexpr int kAhead = 12;    // by how many edges tables are prefetched ahead

// Returns how many lanes vectors for n elements have: halves the widest vector while n elements fit into one
// half, down to 16 bytes.
template <class A>
int lanes_for(int n) {
  int width = kLanes<A>;
  while (width * int(sizeof(A)) > 16 && n <= width / 2) width /= 2;
  return width;
}

// Returns an edge's position in the user's order.
int64_t edge_of(const Csr& csr, int64_t position) { return csr.eids ? csr.eids[position] : position; }

// Returns a row [n] as accumulators: the row itself if it consists of them, else a copy in `space`.
template <class T>
const Acc<T>* as_accumulators(const T* row, int n, Acc<T>* space) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return row;
  } else {
    constexpr int W = kLanes<Acc<T>>;
    int k = 0;
    for (; k + W <= n; k += W) store_vector(space + k, load<T, W>(row + k));
    for (; k < n; ++k) space[k] = load<T, 1>(row + k);
    return space;
  }
}

// The edges of a row from position `begin` on, n <= kTogether of them. If n is smaller, eid repeats the last
// one.
struct Together {
  int n;
  int64_t eid[kTogether];
  Together(const Csr& csr, int64_t begin, int64_t end)
      : n(int(end - begin < kTogether ? end - begin : kTogether)) {
    for (int k = 0; k < kTogether; ++k) eid[k] = edge_of(csr, begin + (k < n ? k : n - 1));
  }
};

// Prefetches the first cache lines of the rows in a table [E, size] of kTogether edges: those from kAhead
// positions after `position` on. limit: the end of the positions that may be read.
template <class X>
void fetch_ahead(const Csr& csr, const X* table, int64_t size, int64_t position, int64_t limit) {
  for (int k = 0; k < kTogether; ++k)
    if (position + kAhead + k < limit) __builtin_prefetch(table + edge_of(csr, position + kAhead + k) * size);
}

// y[e, l] = sum_k x[e, k] matrix(row(e), k, l) for all edges, with k < inner and l < outer. matrix(i, k, l)
// is scale times the element i * row_stride + k * inner_stride + l * outer_stride of `rows`. l runs over the
// lanes. This is edge_dot if l is a head and k a feature, and edge_outer the other way round.
template <class X, class Y, class T>
void multiply_edges(const EdgeTermParams& p, const Parallel& parallel, const X* x, Y* y, int inner, int outer,
                    int64_t inner_stride, int64_t outer_stride) {
  using A = Acc<T>;
  const T* rows = static_cast<const T*>(p.rows);
  const A scale = A(p.scale);
  with_width<A>(lanes_for<A>(outer), [&](auto width) {
    constexpr int W = width.value;
    using V = Vec<A, W>;
    const int vectors = (outer + W - 1) / W, padded = vectors * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> matrix(int64_t(inner) * padded), space(int64_t(kTogether) * (inner + 1));
      matrix.clear(int64_t(inner) * padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        const T* row = rows + item.row * p.row_stride;
        if (item.begin < item.end)
          for (int k = 0; k < inner; ++k) {
            int l = 0;
            if (outer_stride == 1)
              for (; l + W <= outer; l += W)
                store_vector(matrix + k * padded + l, load<T, W>(row + k * inner_stride + l) * scale);
            for (; l < outer; ++l)
              matrix[k * padded + l] = scale * load<T, 1>(row + k * inner_stride + l * outer_stride);
          }
        for (int64_t e = item.begin; e < item.end; e += kTogether) {
          const Together edges(p.csr, e, item.end);
          fetch_ahead(p.csr, x, inner, e, limit);
          const A* from[kTogether];
          for (int k = 0; k < kTogether; ++k)
            from[k] = as_accumulators(x + edges.eid[k] * inner, inner, space + k * inner);
          for (int v = 0; v < vectors; ++v) {
            // If there are several vectors, the last one begins so early that it ends with the last element.
            const int at = vectors > 1 && v == vectors - 1 ? outer - W : v * W;
            const A *x0 = from[0], *x1 = from[1], *x2 = from[2], *x3 = from[3], *m = matrix + at;
            V sum[kTogether] = {};
            for (int c = 0; c < inner; ++c, m += padded) {
              const V y = load_vector<V>(m);
              sum[0] += x0[c] * y, sum[1] += x1[c] * y, sum[2] += x2[c] * y, sum[3] += x3[c] * y;
            }
            // If there are fewer edges than kTogether, the last one is stored several times: without a
            // branch, the sums stay in registers.
#pragma GCC unroll 4
            for (int k = 0; k < kTogether; ++k) {
              Y* to = y + edges.eid[k] * outer + at;
              if (outer >= W) {
                store<Y, W>(to, sum[k]);
              } else if constexpr (W > 1) {
                for (int l = 0; l < outer; ++l) store<Y, 1>(to + l, sum[k][l]);
              }
            }
          }
        }
      }
    });
  });
}

// Whether features, instead of heads, are in the lanes: whichever is estimated to take fewer vector
// operations per edge. With features in the lanes, edge_dot (products) has to add up lanes, by a tree for
// four heads at a time, which counts as 9 operations; edge_sum has not. A vector of heads counts as two of
// features.
template <class A>
bool features_in_lanes(int heads, int dim, bool products) {
  const auto vectors = [](int n) {
    const int width = lanes_for<A>(n);
    return (n + width - 1) / width;
  };
  const int tree = products ? (heads + 3) / 4 * 9 : 0;
  return heads * vectors(dim) + tree < 2 * dim * vectors(heads);
}

// operator()(at) returns the n elements at position `at` of a table of `size` elements, so that `padded`
// elements, which are whole vectors, can be read: in place, or near the end of the table as a copy. Elements
// beyond n are undefined.
template <class T>
class WholeRows {
 public:
  WholeRows(const T* table, int64_t size, int n, int padded)
      : table_(table), end_(table + size), n_(n), padded_(padded), space_(padded) {
    __builtin_memset(space_, 0, std::size_t(padded) * sizeof(T));
  }
  const T* operator()(int64_t at) {
    const T* row = table_ + at;
    if (end_ - row >= padded_) return row;
    __builtin_memcpy(space_, row, std::size_t(n_) * sizeof(T));
    return space_;
  }

 private:
  const T *table_, *end_;
  int n_, padded_;
  Buffer<T> space_;
};

// Returns the vector from element v on of a row of n elements, with zeros in lanes beyond the last element.
template <class T, int W>
Vec<Acc<T>, W> within(const T* row, int v, int n) {
  const auto x = load<T, W>(row + v);
  if constexpr (W == 1)
    return x;
  else
    return v + W <= n ? x : before<Acc<T>, W>(v, n) ? x : Vec<Acc<T>, W>{};
}

// edge_dot (core/edge_terms.h) with features in the lanes.
template <class T>
void dot_of_lanes(const EdgeTermParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const T *rows = static_cast<const T*>(p.rows), *attr = static_cast<const T*>(p.attr);
  const int heads = p.heads, dim = p.dim;
  const A scale = A(p.scale);
  with_width<A>(lanes_for<A>(dim), [&](auto width) {
    constexpr int W = width.value;
    using V = Vec<A, W>;
    const int vectors = (dim + W - 1) / W, padded = vectors * W, fours = heads / 4 * 4;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> matrix(int64_t(heads) * padded);
      WholeRows<T> row(rows, (p.num_rows - 1) * p.row_stride + (heads - 1) * p.head_stride + p.width, dim,
                       padded),
          features(attr, p.num_edges * dim, dim, padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        if (item.begin == item.end) continue;
        for (int h = 0; h < heads; ++h) {
          const T* from = row(item.row * p.row_stride + h * p.head_stride);
          for (int v = 0; v < padded; v += W)
            store_vector(matrix + h * padded + v, within<T, W>(from, v, dim) * scale);
        }
        for (int64_t e = item.begin; e < item.end; ++e) {
          if (e + kAhead < limit) __builtin_prefetch(attr + edge_of(p.csr, e + kAhead) * dim);
          const int64_t eid = edge_of(p.csr, e);
          const T* x = features(eid * dim);
          A* to = static_cast<A*>(p.edge_out) + eid * heads;
          for (int h = 0; h < fours; h += 4) {
            V sum[4] = {};
            for (int v = 0; v < padded; v += W) {
              const V y = within<T, W>(x, v, dim);
#pragma GCC unroll 4
              for (int k = 0; k < 4; ++k) sum[k] += y * load_vector<V>(matrix + (h + k) * padded + v);
            }
            sum4<A, W>(sum, to + h);
          }
          for (int h = fours; h < heads; ++h) {
            V one{};
            for (int v = 0; v < padded; v += W)
              one += within<T, W>(x, v, dim) * load_vector<V>(matrix + h * padded + v);
            to[h] = sum<A, W>(one);
          }
        }
      }
    });
  });
}

// Writes the sums of a work item, at(h, c) for c < dim and zeros beyond, to its row of `out` or its slot of
// `partial_out`, [H, width].
template <class T, class At>
void write_sums(const EdgeTermParams& p, const Item& item, const At& at) {
  const int64_t size = int64_t(p.heads) * p.width;
  const auto write = [&](auto* to) {
    using To = std::remove_pointer_t<decltype(to)>;
    for (int h = 0; h < p.heads; ++h)
      for (int c = 0; c < p.width; ++c) store<To, 1>(to + h * p.width + c, c < p.dim ? at(h, c) : Acc<T>(0));
  };
  if (item.slot < 0)
    write(static_cast<T*>(p.out) + item.row * size);
  else
    write(static_cast<Acc<T>*>(p.partial_out) + item.slot * size);
}

// edge_sum with heads in the lanes. Sums of long rows are sums of blocks of edges (blocked_sum.h).
template <class T>
void sum_of_heads(const EdgeTermParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const T* attr = static_cast<const T*>(p.attr);
  const A* weight = static_cast<const A*>(p.weight);
  const int heads = p.heads, dim = p.dim;
  with_width<A>(lanes_for<A>(heads), [&](auto width) {
    constexpr int W = width.value;
    using V = Vec<A, W>;
    const int vectors = (heads + W - 1) / W, padded = vectors * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> sums(int64_t(dim) * padded), space(int64_t(kTogether) * (dim + 1)),
          weights(int64_t(kTogether) * padded);
      weights.clear(int64_t(kTogether) * padded);
      Blocks<A> blocks(int64_t(dim) * padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        sums.clear(int64_t(dim) * padded);
        for (int64_t e = item.begin; e < item.end; e += kTogether) {
          blocks.before(e - item.begin, sums);
          const Together edges(p.csr, e, item.end);
          fetch_ahead(p.csr, attr, dim, e, limit);
          fetch_ahead(p.csr, weight, heads, e, limit);
          const A* from[kTogether];
          for (int k = 0; k < kTogether; ++k) {
            from[k] = as_accumulators(attr + edges.eid[k] * dim, dim, space + k * dim);
            for (int h = 0; h < heads; ++h)
              weights[k * padded + h] = k < edges.n ? weight[edges.eid[k] * heads + h] : A(0);
          }
          for (int v = 0; v < vectors; ++v) {
            V w[kTogether];
            for (int k = 0; k < kTogether; ++k) w[k] = load_vector<V>(weights + k * padded + v * W);
            const A *x0 = from[0], *x1 = from[1], *x2 = from[2], *x3 = from[3];
            A* at = sums + v * W;
            for (int c = 0; c < dim; ++c, at += padded)
              store_vector(at,
                           load_vector<V>(at) + (x0[c] * w[0] + x1[c] * w[1] + x2[c] * w[2] + x3[c] * w[3]));
          }
        }
        blocks.end(item.end - item.begin, sums);
        write_sums<T>(p, item, [&](int h, int c) { return sums[c * padded + h]; });
      }
    });
  });
}

// Edges [begin, end) of a row; those below `limit` may be prefetched.
struct Run {
  int64_t begin, end, limit;
};

// sums[h, c] += sum of weight[e, h] attr[e, c] over the edges e of `run`, for the N heads h from `head` on,
// whose sums stay in registers. sums: [H, padded].
template <class T, int W, int N>
void add_edges(const EdgeTermParams& p, WholeRows<T>& features, const Run& run, int head, int padded,
               Acc<T>* sums) {
  using A = Acc<T>;
  using V = Vec<A, W>;
  const T* attr = static_cast<const T*>(p.attr);
  const A* weight = static_cast<const A*>(p.weight) + head;
  for (int v = 0; v < padded; v += W) {
    const bool fetches = head == 0 && v == 0;
    V sum[N] = {};
    for (int64_t e = run.begin; e < run.end; ++e) {
      if (fetches && e + kAhead < run.limit) {
        const int64_t next = edge_of(p.csr, e + kAhead);
        __builtin_prefetch(attr + next * p.dim), __builtin_prefetch(weight + next * p.heads);
      }
      const int64_t eid = edge_of(p.csr, e);
      const V x = load<T, W>(features(eid * p.dim) + v);
      const A* w = weight + eid * p.heads;
#pragma GCC unroll 8
      for (int k = 0; k < N; ++k) sum[k] += w[k] * x;
    }
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) {
      A* at = sums + (head + k) * padded + v;
      store_vector(at, load_vector<V>(at) + sum[k]);
    }
  }
}

// edge_sum with features in the lanes. Sums of long rows are sums over blocks of kBlock edges (for_blocks),
// which round less.
template <class T>
void sum_of_lanes(const EdgeTermParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const T* attr = static_cast<const T*>(p.attr);
  const int heads = p.heads, dim = p.dim;
  with_width<A>(lanes_for<A>(dim), [&](auto width) {
    constexpr int W = width.value;
    const int padded = (dim + W - 1) / W * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> sums(int64_t(heads) * padded);
      WholeRows<T> features(attr, p.num_edges * dim, dim, padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        sums.clear(int64_t(heads) * padded);
        for_blocks(item, [&](int64_t begin, int64_t end, bool) {
          const Run run{begin, end, limit};
          int h = 0;
          for (; h + 8 <= heads; h += 8) add_edges<T, W, 8>(p, features, run, h, padded, sums);
          if (h + 4 <= heads) add_edges<T, W, 4>(p, features, run, h, padded, sums), h += 4;
          for (; h < heads; ++h) add_edges<T, W, 1>(p, features, run, h, padded, sums);
        });
        // Rows without padding are written in vectors of 4 accumulators, of which the last may overlap the
        // one before.
        if (dim == p.width && item.slot < 0 && dim >= 4 && sizeof(A) == 4) {
          for (int h = 0; h < heads; ++h) {
            T* to = static_cast<T*>(p.out) + (item.row * heads + h) * dim;
            const A* from = sums + h * padded;
            for (int c = 0; c < dim - 4; c += 4) store<T, 4>(to + c, load_vector<Vec<A, 4>>(from + c));
            store<T, 4>(to + dim - 4, load_vector<Vec<A, 4>>(from + dim - 4));
          }
          continue;
        }
        write_sums<T>(p, item, [&](int h, int c) { return sums[h * padded + c]; });
      }
    });
  });
}

template <class T>
void edge_dot_as(const EdgeTermParams& p, const Parallel& parallel) {
  if (features_in_lanes<Acc<T>>(p.heads, p.dim, true)) return dot_of_lanes<T>(p, parallel);
  multiply_edges<T, Acc<T>, T>(p, parallel, static_cast<const T*>(p.attr), static_cast<Acc<T>*>(p.edge_out),
                               p.dim, p.heads, 1, p.head_stride);
}

template <class T>
void edge_outer_as(const EdgeTermParams& p, const Parallel& parallel) {
  multiply_edges<Acc<T>, T, T>(p, parallel, static_cast<const Acc<T>*>(p.weight), static_cast<T*>(p.edge_out),
                               p.heads, p.dim, p.head_stride, 1);
}

template <class T>
void edge_sum_as(const EdgeTermParams& p, const Parallel& parallel) {
  if (features_in_lanes<Acc<T>>(p.heads, p.dim, false))
    sum_of_lanes<T>(p, parallel);
  else
    sum_of_heads<T>(p, parallel);
  merge_splits<T>(p.csr, parallel, p.heads, p.width, p.partial_out, p.out);
}

}  // namespace

void edge_dot(const EdgeTermParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { edge_dot_as<decltype(type)>(p, parallel); });
}

void edge_sum(const EdgeTermParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { edge_sum_as<decltype(type)>(p, parallel); });
}

void edge_outer(const EdgeTermParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { edge_outer_as<decltype(type)>(p, parallel); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
