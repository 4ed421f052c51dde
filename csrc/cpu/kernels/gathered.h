// The operations of rows.h on the gathered rows of a block's edges, with features of the edges added.
#pragma once

#include "edges.h"

namespace dfgnn::cpu::DFGNN_ISA {

// A gathered matrix x, and features `feat` [E, H, D] of the edges, or null. Of edge e they are added either
// to the gathered row, x_e = x[index_e] + feat[eid_e] (Feat::gathered), or to the fixed row r of its other
// end, r + feat[eid_e] (Feat::fixed).
template <class T>
class Gathered {
 public:
  using A = Acc<T>;
  enum class Feat { gathered, fixed };

  Gathered(const void* data, const RowShape& shape, const void* feat, Feat side)
      : rows_{static_cast<const T*>(data), shape},
        feat_{static_cast<const T*>(feat), shape},
        side_(side),
        sums_(summed() ? kBlock * shape.size() : 0) {
    for (int e = 0; e < kBlock; ++e) own_[e] = e;
  }

  const RowShape& shape() const { return rows_.shape; }
  const Rows<T>& rows() const { return rows_; }
  // The sums x_e [n, H, D] of the block's edges, if features are added to the gathered rows.
  const A* sums() const { return sums_; }

  // Callers call this for every block before the functions below. fresh: whether the block's rows are not in
  // cache yet, so that they are prefetched.
  void load(const EdgeBlock<Acc<T>>& block, bool fresh) {
    limit_ = fresh ? block.limit : 0;
    if (!summed()) return;
    rows_.add_pairs(block.index, block.n, limit_, feat_, block.eids_ahead(), block.eids_limit(), sums_);
    limit_ = 0;
  }

  // The functions of Rows, with the features added. The one that is called first for a block brings its rows
  // into cache, so that the next ones need not prefetch (limit_ = 0).
  void dots(const EdgeBlock<Acc<T>>& block, const A* r, A* s) {
    if (feat_.data && !summed())
      rows_.pair_dots(block.index, block.n, limit_, r, feat_, block.eids_ahead(), block.eids_limit(), s);
    else
      with_rows(block,
                [&](const auto& rows, const int32_t* index) { rows.dots(index, block.n, limit_, r, s); });
    limit_ = 0;
  }
  void leaky_dots(const EdgeBlock<Acc<T>>& block, const A* r, const A* attn, A slope, A* s) {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.leaky_dots(index, block.n, limit_, r, attn, slope, s);
    });
    limit_ = 0;
  }
  void aggregate(const EdgeBlock<Acc<T>>& block, const A* w, const A* w2, A* a, A* a2, bool first) const {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.aggregate(index, block.n, limit_, w, w2, a, a2, first);
    });
  }
  void leaky_aggregate(const EdgeBlock<Acc<T>>& block, const A* r, A slope, const A* w, A* a, A* a2,
                       bool first) const {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.leaky_aggregate(index, block.n, limit_, r, slope, w, a, a2, first);
    });
  }

 private:
  // Whether features are added to the gathered rows.
  bool summed() const { return feat_.data && side_ == Feat::gathered; }

  // Calls f(rows, index) with the rows to process: x_e if features are added to them, else the matrix.
  template <class F>
  void with_rows(const EdgeBlock<Acc<T>>& block, const F& f) const {
    if (summed())
      f(Rows<A>{sums_, rows_.shape}, own_);
    else
      f(rows_, block.index);
  }

  Rows<T> rows_, feat_;
  Feat side_;
  Buffer<A> sums_;
  int32_t own_[kBlock];  // 0, 1, ...: the index of each edge's row in sums_
  int64_t limit_ = 0;    // how many indices may be read in order to prefetch the block's rows
};

}  // namespace dfgnn::cpu::DFGNN_ISA
