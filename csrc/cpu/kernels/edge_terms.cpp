// Low-dimensional edge features against rows (core/edge_terms.h). A row's [H, d] matrix is laid out with one
// of its two sizes in the lanes, and the edges of the row are multiplied with it four at a time.
#include "core/edge_terms.h"

#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {

void edge_dot(const EdgeTermParams&, const Parallel&);
void edge_sum(const EdgeTermParams&, const Parallel&);
void edge_outer(const EdgeTermParams&, const Parallel&);

namespace {

constexpr int kTogether = 4;    // edges that share a load of the matrix
constexpr int kEdgesAhead = 8;  // between the fetch of an edge's row and its use

// Lanes of the vectors that cover n numbers with the least padding, the widest of those.
template <class A>
int lanes_for(int n) {
  const auto padded = [&](int width) { return (n + width - 1) / width * width; };
  int width = kLanes<A>;
  while (width * int(sizeof(A)) > 16 && padded(width / 2) < padded(width)) width /= 2;
  return width;
}

int64_t edge_of(const Csr& csr, int64_t position) { return csr.eids ? csr.eids[position] : position; }

// Numbers of an edge's row [n] as accumulators: the row itself where it has them already.
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

// The next edges of a row, at most kTogether, the last one again in place of those that are missing.
struct Together {
  int n;
  int64_t eid[kTogether];
  Together(const Csr& csr, int64_t begin, int64_t end)
      : n(int(end - begin < kTogether ? end - begin : kTogether)) {
    for (int k = 0; k < kTogether; ++k) eid[k] = edge_of(csr, begin + (k < n ? k : n - 1));
  }
};

template <class X>
void fetch_ahead(const Csr& csr, const X* table, int64_t size, int64_t position, int64_t limit) {
  for (int k = 0; k < kTogether; ++k)
    if (position + kEdgesAhead + k < limit)
      __builtin_prefetch(table + edge_of(csr, position + kEdgesAhead + k) * size);
}

// y[e, l] = sum_k x[e, k] matrix(row(e), k, l), k < inner, l < outer, for all edges.
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
      Buffer<A> matrix(int64_t(inner) * padded), space(int64_t(kTogether) * (inner + 1)),
          result(int64_t(kTogether) * padded);
      matrix.clear(int64_t(inner) * padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        const T* row = rows + item.row * p.row_stride;
        if (item.begin < item.end)
          for (int k = 0; k < inner; ++k)
            for (int l = 0; l < outer; ++l)
              matrix[k * padded + l] = scale * load<T, 1>(row + k * inner_stride + l * outer_stride);
        for (int64_t e = item.begin; e < item.end; e += kTogether) {
          const Together edges(p.csr, e, item.end);
          fetch_ahead(p.csr, x, inner, e, limit);
          const A* from[kTogether];
          for (int k = 0; k < kTogether; ++k)
            from[k] = as_accumulators(x + edges.eid[k] * inner, inner, space + k * inner);
          for (int v = 0; v < vectors; ++v) {
            V sum[kTogether] = {};
            for (int c = 0; c < inner; ++c) {
              const V m = load_vector<V>(matrix + c * padded + v * W);
#pragma GCC unroll 4
              for (int k = 0; k < kTogether; ++k) sum[k] += from[k][c] * m;
            }
            const int left = outer - v * W;
            for (int k = 0; k < edges.n; ++k) {
              Y* to = y + edges.eid[k] * outer + v * W;
              if (left >= W) {
                store<Y, W>(to, sum[k]);
              } else if constexpr (W > 1) {
                for (int l = 0; l < left; ++l) store<Y, 1>(to + l, sum[k][l]);
              }
            }
          }
        }
      }
    });
  });
}

template <class T>
void edge_dot_as(const EdgeTermParams& p, const Parallel& parallel) {
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
  using A = Acc<T>;
  const T* attr = static_cast<const T*>(p.attr);
  const A* weight = static_cast<const A*>(p.weight);
  const int heads = p.heads, dim = p.dim;
  const int64_t size = int64_t(heads) * p.width;
  with_width<A>(lanes_for<A>(heads), [&](auto width) {
    constexpr int W = width.value;
    using V = Vec<A, W>;
    const int vectors = (heads + W - 1) / W, padded = vectors * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> sums(int64_t(dim) * padded), space(int64_t(kTogether) * (dim + 1)),
          weights(int64_t(kTogether) * padded);
      weights.clear(int64_t(kTogether) * padded);
      const int64_t limit = p.csr.items[last - 1].end;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = p.csr.items[i];
        sums.clear(int64_t(dim) * padded);
        for (int64_t e = item.begin; e < item.end; e += kTogether) {
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
            for (int c = 0; c < dim; ++c) {
              A* at = sums + c * padded + v * W;
              V sum = load_vector<V>(at);
#pragma GCC unroll 4
              for (int k = 0; k < kTogether; ++k) sum += from[k][c] * w[k];
              store_vector(at, sum);
            }
          }
        }
        const auto write = [&](auto* to) {
          using To = std::remove_pointer_t<decltype(to)>;
          for (int h = 0; h < heads; ++h)
            for (int c = 0; c < p.width; ++c)
              store<To, 1>(to + h * p.width + c, c < dim ? sums[c * padded + h] : A(0));
        };
        if (item.slot < 0)
          write(static_cast<T*>(p.out) + item.row * size);
        else
          write(static_cast<A*>(p.partial_out) + item.slot * size);
      }
    });
  });
  merge_splits<T>(p.csr, parallel, heads, p.width, p.partial_out, p.out);
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
