// The gathered rows of a block's edges, together with features of the edges, for the operations of rows.h.
#pragma once

#include "edges.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Features [E, H, D] are added either to the gathered rows, x_e = x[index_e] + feat[eid_e], or to the fixed
// row r of the other end, r + feat[eid_e].
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
  // x_e [n, H, D], if features are added to the gathered rows.
  const A* sums() const { return sums_; }

  // Callers call this first for every block. fresh: the block's rows are not in cache yet.
  void load(const EdgeBlock<T>& block, bool fresh) {
    limit_ = fresh ? block.limit : 0;
    if (!summed()) return;
    rows_.add_pairs(block.index, block.n, limit_, feat_, block.eids_ahead(), block.eids_limit(), sums_);
    limit_ = 0;
  }

  // Like the functions of Rows, with the features. The first one that is called for a block brings its rows
  // into cache.
  void dots(const EdgeBlock<T>& block, const A* r, A* s) {
    if (feat_.data && !summed())
      rows_.pair_dots(block.index, block.n, limit_, r, feat_, block.eids_ahead(), block.eids_limit(), s);
    else
      with_rows(block,
                [&](const auto& rows, const int32_t* index) { rows.dots(index, block.n, limit_, r, s); });
    limit_ = 0;
  }
  void leaky_dots(const EdgeBlock<T>& block, const A* r, const A* attn, A slope, A* s) {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.leaky_dots(index, block.n, limit_, r, attn, slope, s);
    });
    limit_ = 0;
  }
  void aggregate(const EdgeBlock<T>& block, const A* w, const A* w2, A* a, A* a2, bool first) const {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.aggregate(index, block.n, limit_, w, w2, a, a2, first);
    });
  }
  void leaky_aggregate(const EdgeBlock<T>& block, const A* r, A slope, const A* w, A* a, A* a2,
                       bool first) const {
    with_rows(block, [&](const auto& rows, const int32_t* index) {
      rows.leaky_aggregate(index, block.n, limit_, r, slope, w, a, a2, first);
    });
  }

 private:
  bool summed() const { return feat_.data && side_ == Feat::gathered; }

  template <class F>
  void with_rows(const EdgeBlock<T>& block, const F& f) const {
    if (summed())
      f(Rows<A>{sums_, rows_.shape}, own_);
    else
      f(rows_, block.index);
  }

  Rows<T> rows_, feat_;
  Feat side_;
  Buffer<A> sums_;
  int32_t own_[kBlock];  // indices into sums_
  int64_t limit_ = 0;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
