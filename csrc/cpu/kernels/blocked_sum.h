// Sums over the edges of long rows, which round less than adding one edge after another.
#pragma once

#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Adds up a long row in blocks of edges. Similar terms have similar rounding errors, whose sum then grows
// with the length of a block and the number of blocks instead of the length of the row.
template <class A, int64_t kBlockOfSums = 64>
class Blocks {
 public:
  explicit Blocks(int64_t size) : size_(size), total_(size) {}
  // The next row has this many sums, at most as many as the first.
  void resize(int64_t size) { size_ = size; }
  // Callers call this before they add an edge to `sums` [size]. place: the edge's position in the row. After
  // a block of edges it moves `sums` to the total, and clears it.
  void before(int64_t place, A* sums) {
    if (place == 0 || place % kBlockOfSums != 0) return;
    if (place == kBlockOfSums) total_.clear(size_);
    for (int64_t k = 0; k < size_; ++k) total_[k] += sums[k], sums[k] = A(0);
  }
  // Adds the total to `sums` after the last edge of a row. length: how many edges the row has.
  void end(int64_t length, A* sums) const {
    if (length <= kBlockOfSums) return;
    for (int64_t k = 0; k < size_; ++k) sums[k] += total_[k];
  }

 private:
  int64_t size_;
  Buffer<A> total_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
