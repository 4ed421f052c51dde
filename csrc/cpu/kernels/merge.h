// Sums of the partial results of a split row.
#pragma once

#include "rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

template <class A>
class PartialSum {
 public:
  explicit PartialSum(const RowShape& shape)
      : shape_(shape), sum_(shape.packed_size()), row_(shape.packed_size()) {}

  void reset() {
    for (int64_t d = 0; d < shape_.packed_size(); ++d) sum_[d] = 0;
  }

  // sum[h] += factor[h] row[h]; row: [H, D]; factor null: 1.
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

}  // namespace dfgnn::cpu::DFGNN_ISA
