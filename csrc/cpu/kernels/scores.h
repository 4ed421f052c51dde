// The score functors. A pass over items fixes one end of the edges, the item's row, and gathers the
// other; forward and backward differ in which end that is.
//   fix(row)        the row whose edges follow
//   raw(block, z)   what comes before the activation, without the edge bias
//   activate(z)     the score;  slope(z): its derivative
#pragma once

#include "edges.h"

namespace dfgnn::cpu::DFGNN_ISA {

// LeakyReLU(alpha of the gathered node + alpha of the row)
template <class T>
class AdditiveScore {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr bool kLeaky = true;

  // gathered: alpha of node j and head h at j * stride + h * step. fixed: [N, H] or null: 0.
  AdditiveScore(const A* gathered, int64_t stride, int step, const A* fixed, int heads, A negative_slope)
      : gathered_(gathered),
        stride_(stride),
        step_(step),
        fixed_(fixed),
        heads_(heads),
        slope_(negative_slope) {}

  void fix(int64_t row) { row_ = row * heads_; }

  void raw(const EdgeBlock<T>& block, A* z) const {
    gather(gathered_, block.index, block.n, heads_, stride_, step_, z);
    if (!fixed_) return;
    for (int h = 0; h < heads_; ++h) {
      const A fixed = fixed_[row_ + h];
      for_edges<A>(h, block.n, [&](int i, auto) { store_vector(z + i, load_vector<V>(z + i) + fixed); });
    }
  }

  V activate(V z) const { return z > 0 ? z : z * slope_; }
  V slope(V z) const { return z > 0 ? V{} + 1 : V{} + slope_; }

 private:
  const A* gathered_;
  int64_t stride_;
  int step_;
  const A* fixed_;
  int heads_;
  A slope_;
  int64_t row_ = 0;
};

// scale * (gathered row . row)
template <class T>
class DotScore {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr bool kLeaky = false;

  DotScore(const void* gathered, const void* fixed, const RowShape& shape, A scale)
      : gathered_{static_cast<const T*>(gathered), shape},
        fixed_(static_cast<const T*>(fixed)),
        scale_(scale),
        row_(shape.packed_size()) {}

  const Rows<T>& rows() const { return gathered_; }

  void fix(int64_t row) { pack(gathered_.shape, fixed_ + row * gathered_.shape.size(), row_); }

  void raw(const EdgeBlock<T>& block, A* z) const {
    gathered_.dots(block.index, block.n, block.limit, row_, z);
    for (int h = 0; h < gathered_.shape.heads; ++h)
      for_edges<A>(h, block.n, [&](int i, auto) { store_vector(z + i, load_vector<V>(z + i) * scale_); });
  }

  V activate(V z) const { return z; }

 private:
  Rows<T> gathered_;
  const T* fixed_;
  A scale_;
  Buffer<A> row_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
