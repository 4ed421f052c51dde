// sddmm and spmm (ProductParams in core/params.h): dot products of the feature rows of an edge's two nodes,
// and weighted sums of neighbours' feature rows.
#include "edges.h"
#include "kernels.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T>
void sddmm_as(const ProductParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int heads = p.shape.heads;
  const EdgeOptions none{};
  parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
    const Rows<T> rows{static_cast<const T*>(p.feat), matrix_shape<T>(heads, p.shape.dim)};
    EdgeBlock<Acc<T>> block(p.csr, none, p.shape, p.dtype);
    Buffer<A> row(rows.shape.packed_size()), s(int64_t(heads) * kBlock);
    for (int64_t k = first; k < last; ++k) {
      const Item& item = p.csr.items[k];
      pack(rows.shape, static_cast<const T*>(p.row_feat) + item.row * rows.shape.size(), row);
      for_blocks(item, [&](int64_t begin, int64_t end, bool) {
        block.load(begin, end, true);
        rows.dots(block.index, block.n, block.limit, row, s);
        scatter<HeadMajor, 1, A>(s, 0, block.eid, block.n, heads, static_cast<T*>(p.edge_out));
      });
    }
  });
}

template <class T>
void spmm_as(const ProductParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int heads = p.shape.heads;
  EdgeOptions weighted{};
  weighted.weight = p.weight, weighted.weight_heads = heads;
  parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
    const Rows<T> rows{static_cast<const T*>(p.feat), matrix_shape<T>(heads, p.shape.dim)};
    EdgeBlock<Acc<T>> block(p.csr, weighted, p.shape, p.dtype);
    Buffer<A> sum(rows.shape.packed_size());
    for (int64_t k = first; k < last; ++k) {
      const Item& item = p.csr.items[k];
      if (item.begin == item.end) sum.clear(rows.shape.packed_size());
      for_blocks(item, [&](int64_t begin, int64_t end, bool start) {
        block.load(begin, end, true);
        rows.aggregate(block.index, block.n, block.limit, block.factor, nullptr, sum, nullptr, start);
      });
      write_sum<T>(item, rows.shape, sum, p.out, p.partial_out);
    }
  });
  merge_splits<T>(p.csr, parallel, heads, p.shape.dim, p.partial_out, p.out);
}

}  // namespace

void sddmm(const ProductParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { sddmm_as<decltype(type)>(p, parallel); });
}

void spmm(const ProductParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { spmm_as<decltype(type)>(p, parallel); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
