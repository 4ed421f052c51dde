// Products of the feature rows of an edge's two nodes with its own features, and their backward
// (core/edge_products.h, which defines x, y, f, t and g). Each head of a row is read in vectors of the widest
// size that fits, and its remaining columns one by one.
#include "ahead.h"
#include "blocked_sum.h"
#include "kernels.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

constexpr int kAheadOfEdge = 8;  // by how many edges rows are prefetched ahead

// Returns the lanes of the widest vectors, of at least 16 bytes, that fit in `dim` columns; 1 if none does.
template <class A>
int lanes_within(int dim) {
  int width = kLanes<A>;
  while (width > dim && width * int(sizeof(A)) > 16) width /= 2;
  return width > dim ? 1 : width;
}

// For each of the work items [first, last): calls begin(item), then for each of its edges edge(item, position
// in the CSR, position in the user's order, the neighbour's row of `cols`), and end(item). Prefetches the
// feature rows of later edges.
template <class T, class Begin, class Edge, class End>
void for_edges(const EdgeProductParams& p, int64_t first, int64_t last, const Begin& begin, const Edge& edge,
               const End& end) {
  const int64_t size = int64_t(p.heads) * p.dim, bytes = size * int64_t(sizeof(T));
  const T *cols = static_cast<const T*>(p.cols), *feat = static_cast<const T*>(p.feat),
          *more = static_cast<const T*>(p.edge_weight), *to = static_cast<const T*>(p.edge_out);
  const Csr& csr = p.csr;
  const int64_t limit = csr.items[last - 1].end;
  for (int64_t k = first; k < last; ++k) {
    const Item& item = csr.items[k];
    begin(item);
    for (int64_t e = item.begin; e < item.end; ++e) {
      if (e + kAheadOfEdge < limit) {
        prefetch(cols + int64_t(csr.indices[e + kAheadOfEdge]) * size, bytes);
        if (csr.eids) {
          const int64_t next = int64_t(csr.eids[e + kAheadOfEdge]) * size;
          prefetch(feat + next, bytes);
          if (more) prefetch(more + next, bytes);
          if (to)
            for (int64_t line = 0; line < bytes; line += 64)
              __builtin_prefetch(reinterpret_cast<const char*>(to + next) + line, 1);
        }
      }
      edge(item, e, csr.eids ? csr.eids[e] : e, cols + int64_t(csr.indices[e]) * size);
    }
    end(item);
  }
}

template <class T>
void products_as(const EdgeProductParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int heads = p.heads, dim = p.dim;
  const int64_t size = int64_t(heads) * dim;
  const T *rows = static_cast<const T*>(p.rows), *feat = static_cast<const T*>(p.feat);
  const A scale = A(p.scale);
  with_width<A>(lanes_within<A>(dim), [&](auto width) {
    constexpr int W = width.value;
    using V = Vec<A, W>;
    const int whole = dim / W * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> row(size), left(4);
      const auto begin = [&](const Item& item) {
        if (item.begin == item.end) return;
        const T* from = rows + item.row * size;
        for (int64_t k = 0; k < size; ++k) row[k] = scale * load<T, 1>(from + k);
      };
      const auto edge = [&](const Item&, int64_t, int64_t id, const T* y) {
        const T* f = feat + id * size;
        A* score = static_cast<A*>(p.score) + id * heads;
        T* to = p.edge_out ? static_cast<T*>(p.edge_out) + id * size : nullptr;
        // Writes the products t of head h, if they are wanted. Returns the sum of their whole vectors, as a
        // vector whose lanes are still to be added up, and in `rest` the sum over the remaining columns.
        const auto head = [&](int h, A& rest) {
          const int64_t at = int64_t(h) * dim;
          V sums{};
          for (int v = 0; v < whole; v += W) {
            const V t = load_vector<V>(row + at + v) * load<T, W>(y + at + v) * load<T, W>(f + at + v);
            sums += t;
            if (to) store<T, W>(to + at + v, t);
          }
          rest = A(0);
          for (int v = whole; v < dim; ++v) {
            const A t = row[at + v] * load<T, 1>(y + at + v) * load<T, 1>(f + at + v);
            rest += t;
            if (to) store<T, 1>(to + at + v, t);
          }
          return sums;
        };
        int h = 0;
        for (; h + 4 <= heads; h += 4) {
          V sums[4];
          for (int k = 0; k < 4; ++k) sums[k] = head(h + k, left[k]);
          sum4<A, W>(sums, score + h);
          for (int k = 0; k < 4; ++k) score[h + k] += left[k];
        }
        for (; h < heads; ++h) {
          const V sums = head(h, left[0]);
          score[h] = sum<A, W>(sums) + left[0];
        }
      };
      for_edges<T>(p, first, last, begin, edge, [](const Item&) {});
    });
  });
}

template <class T>
void backward_as(const EdgeProductParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int heads = p.heads, dim = p.dim;
  const RowShape shape = row_shape<A>(heads, dim);
  const int64_t size = shape.size();
  const T *rows = static_cast<const T*>(p.rows), *feat = static_cast<const T*>(p.feat),
          *edge_weight = static_cast<const T*>(p.edge_weight);
  const A *weight = static_cast<const A*>(p.weight), scale = A(p.scale);
  with_width<A>(lanes_within<A>(dim), [&](auto width) {
    constexpr int W = width.value;
    const int whole = dim / W * W;
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Buffer<A> row(size), sums(size), packed(shape.packed_size());
      Blocks<A> blocks(size);
      const auto begin = [&](const Item& item) {
        sums.clear(size);
        if (item.begin == item.end || !p.edge_out) return;
        const T* from = rows + item.row * size;
        for (int64_t k = 0; k < size; ++k) row[k] = load<T, 1>(from + k);
      };
      const auto edge = [&](const Item& item, int64_t e, int64_t id, const T* y) {
        blocks.before(e - item.begin, sums);
        const T *f = feat + id * size, *more = edge_weight ? edge_weight + id * size : nullptr;
        T* to = p.edge_out ? static_cast<T*>(p.edge_out) + id * size : nullptr;
        // For as many columns as there are `lanes`, from `at` on: adds g y f to `sums`, and writes g x y, if
        // it is wanted. of_head: the summand of g that a head's columns have in common.
        const auto at_once = [&](int64_t at, A of_head, auto lanes) {
          constexpr int N = lanes.value;
          using X = Vec<A, N>;
          X g = splat<A, N>(of_head);
          if (more) g += load<T, N>(more + at) * scale;
          const X gy = g * load<T, N>(y + at);
          store_vector(sums + at, load_vector<X>(sums + at) + gy * load<T, N>(f + at));
          if (to) store<T, N>(to + at, gy * load_vector<X>(row + at));
        };
        for (int h = 0; h < heads; ++h) {
          const A of_head = scale * weight[id * heads + h];
          const int64_t at = int64_t(h) * dim;
          for (int v = 0; v < whole; v += W) at_once(at + v, of_head, std::integral_constant<int, W>());
          for (int v = whole; v < dim; ++v) at_once(at + v, of_head, std::integral_constant<int, 1>());
        }
      };
      const auto end = [&](const Item& item) {
        blocks.end(item.end - item.begin, sums);
        pack(shape, static_cast<const A*>(sums), packed);
        write_sum<T>(item, shape, packed, p.out, p.partial_out);
      };
      for_edges<T>(p, first, last, begin, edge, end);
    });
  });
  merge_splits<T>(p.csr, parallel, heads, dim, p.partial_out, p.out);
}

}  // namespace

void edge_products(const EdgeProductParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { products_as<decltype(type)>(p, parallel); });
}

void edge_products_backward(const EdgeProductParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { backward_as<decltype(type)>(p, parallel); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
