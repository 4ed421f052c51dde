// Writes the results of rows, and adds up the partial results of split rows.
#pragma once

#include "rows.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {

// A sum of rows, such as the partial results of a split row. It is packed (rows.h).
template <class A>
class PartialSum {
 public:
  explicit PartialSum(const RowShape& shape)
      : shape_(shape), sum_(shape.packed_size()), row_(shape.packed_size()) {}

  void reset() {
    for (int64_t d = 0; d < shape_.packed_size(); ++d) sum_[d] = 0;
  }

  // sum[h] += factor[h] row[h] for all heads h. row: [H, D], not packed; factor: [H], or null for 1.
  void add(const A* row, const A* factor) {
    pack(shape_, row, row_);
    if (factor) scale_heads<A>(shape_, factor, row_);
    for (int64_t d = 0; d < shape_.packed_size(); ++d) sum_[d] += row_[d];
  }

  A* packed() const { return sum_; }

 private:
  RowShape shape_;
  Buffer<A> sum_, row_;
};

// Writes the packed sum of a work item, unpacked, to its row of `result` [N, H, D] T, or if it is a chunk of
// a split row to its slot of `partial` [slots, H, D] acc.
template <class T>
static void write_sum(const Item& item, const RowShape& shape, const Acc<T>* sum, void* result,
                      void* partial) {
  if (item.slot < 0)
    unpack(shape, sum, nullptr, static_cast<T*>(result) + item.row * shape.size());
  else
    unpack(shape, sum, nullptr, static_cast<Acc<T>*>(partial) + item.slot * shape.size());
}

// For each split row: result[row] = sum of the row's slots of `partial`. partial: [slots, heads, dim] acc;
// result: [rows, heads, dim] T.
template <class T>
static void merge_splits(const Csr& csr, const Parallel& parallel, int heads, int dim, const void* partial,
                         void* result) {
  using A = Acc<T>;
  parallel_range(parallel, csr.num_splits, 1, [&](int64_t first, int64_t last) {
    const RowShape shape = row_shape<A>(heads, dim);
    PartialSum<A> sum(shape);
    for (int64_t k = first; k < last; ++k) {
      const Split& split = csr.splits[k];
      sum.reset();
      for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot)
        sum.add(static_cast<const A*>(partial) + slot * shape.size(), nullptr);
      unpack(shape, sum.packed(), nullptr, static_cast<T*>(result) + split.row * shape.size());
    }
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
