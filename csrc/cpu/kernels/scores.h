// The scores of rows that are processed alone, one class for each kind of attention. A pass over items fixes
// one end of the edges, the item's row, and gathers the other: destinations are fixed in forward and in the
// first pass of backward, sources in the second one. (rows.h explains blocks and packed rows.)
//   fix(row)        sets the row of the following edges
//   raw(block, z)   writes raw scores to z, which EdgeBlock::transform then turns into z of core/params.h
//   activate(z)     LeakyReLU;  slope(z): its derivative
//   kGathersValues  whether raw() reads the rows of the values, if destinations are fixed
// DotScore and AdditiveV2Score, whose ends are feature rows, also compute backward's sums over a row's edges.
// grad_raw (d raw) is the gradient of the raw score per edge and head; a and a2 are packed:
//   load(block)                 loads the gathered rows as raw() does, for blocks whose scores are not needed
//   accumulate(block, grad_raw, a, a2, first)
//                               a += the gradient of the fixed row, without a common factor; a starts
//                               from 0 if `first`
//   finish(a)                   multiplies a by this factor
//   scatter_feat(...)           writes the gradient of the edges' features
#pragma once

#include "gathered.h"

namespace dfgnn::cpu::DFGNN_ISA {

// activate() and slope() of all scores.
template <class A>
class Activation {
 public:
  using V = Vec<A, kLanes<A>>;

  explicit Activation(A negative_slope) : slope_(negative_slope) {}
  V activate(V z) const { return leaky_relu(z, slope_); }
  V slope(V z) const { return leaky_slope(z, slope_); }
  bool is_identity() const { return slope_ == 1; }

 private:
  A slope_;
};

// raw = the score term of the gathered node + that of the fixed row: alpha_src + alpha_dst, or in the pass
// over the sources alpha_dst + alpha_src.
template <class T>
class AdditiveScore : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr bool kGathersValues = false;

  // gathered: the term of node j and head h is at j * stride + h, where stride is H, or more if the terms are
  // a part of node_stats (gradients.h). fixed: the terms [N, H] of the fixed rows, or null for 0.
  AdditiveScore(const A* gathered, int64_t stride, const A* fixed, int heads, A negative_slope)
      : Activation<Acc<T>>(negative_slope),
        gathered_(gathered),
        stride_(stride),
        fixed_(fixed),
        heads_(heads) {}

  void fix(int64_t row) { row_ = row * heads_; }

  void raw(const EdgeBlock<Acc<T>>& block, A* z) const {
    gather<HeadMajor>(gathered_, block.index, block.n, block.limit, heads_, stride_, z, 0);
    if (!fixed_) return;
    for (int h = 0; h < heads_; ++h) {
      const A fixed = fixed_[row_ + h];
      for_edges<A>(h, block.n, [&](int i, auto) { store_vector(z + i, load_vector<V>(z + i) + fixed); });
    }
  }

 private:
  const A* gathered_;
  int64_t stride_;
  const A* fixed_;
  int heads_;
  int64_t row_ = 0;
};

// raw = scale * (gathered row . fixed row)
template <class T>
class DotScore : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  using Feat = typename Gathered<T>::Feat;
  static constexpr bool kGathersValues = false;

  // feat: features of the edges that are added to the keys, or null. side: whether the keys are the gathered
  // or the fixed rows.
  DotScore(const void* gathered, const void* fixed, const RowShape& shape, const void* feat, Feat side,
           A scale, A negative_slope)
      : Activation<Acc<T>>(negative_slope),
        gathered_(gathered, shape, feat, side),
        fixed_(static_cast<const T*>(fixed)),
        scale_(scale),
        row_(shape.packed_size()) {}

  const RowShape& shape() const { return gathered_.shape(); }

  void fix(int64_t row) { pack(shape(), fixed_ + row * shape().size(), row_); }

  void load(const EdgeBlock<Acc<T>>& block) { gathered_.load(block, true); }
  void raw(const EdgeBlock<Acc<T>>& block, A* z) {
    load(block);
    gathered_.dots(block, row_, z);
    block.update(z, [&](V v, int) { return v * scale_; });
  }

  void accumulate(const EdgeBlock<Acc<T>>& block, const A* grad_raw, A* a, A*, bool first) const {
    gathered_.aggregate(block, grad_raw, nullptr, a, nullptr, first);
  }
  void finish(A* a) const {
    for (int64_t d = 0; d < shape().packed_size(); ++d) a[d] *= scale_;
  }

  // For each edge: grad_feat = grad_raw * scale * query (unless grad_raw is null) + w * value (unless w is
  // null). query is the fixed row, `value` a packed row. value_shape is that of values, which is shape() if
  // both summands are wanted. Scales grad_raw in place.
  void scatter_feat(const EdgeBlock<Acc<T>>& block, A* grad_raw, const A* w, const A* value,
                    const RowShape& value_shape, T* grad_feat) const {
    if (grad_raw) block.update(grad_raw, [&](V v, int) { return v * scale_; });
    scatter_row(grad_raw ? shape() : value_shape, block.n, w, value, grad_raw, row_, block.eid, grad_feat);
  }

 private:
  Gathered<T> gathered_;
  const T* fixed_;
  A scale_;
  Buffer<A> row_;
};

// raw = attn . LeakyReLU(gathered row + fixed row). This LeakyReLU is the only one: activate() is the
// identity.
template <class T>
class AdditiveV2Score : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using Feat = typename Gathered<T>::Feat;
  static constexpr bool kGathersValues = true;

  AdditiveV2Score(const void* gathered, const void* fixed, const RowShape& shape, const void* feat,
                  const void* attn, A negative_slope)
      : Activation<Acc<T>>(1),
        gathered_(gathered, shape, feat, Feat::gathered),
        fixed_(static_cast<const T*>(fixed)),
        slope_(negative_slope),
        row_(shape.packed_size()),
        attn_(shape.packed_size()) {
    pack(shape, static_cast<const T*>(attn), attn_);
  }

  const RowShape& shape() const { return gathered_.shape(); }

  void fix(int64_t row) { pack(shape(), fixed_ + row * shape().size(), row_); }

  void load(const EdgeBlock<Acc<T>>& block) { gathered_.load(block, true); }
  void raw(const EdgeBlock<Acc<T>>& block, A* z) {
    load(block);
    gathered_.leaky_dots(block, row_, attn_, slope_, z);
  }

  // a2, unless it is null, += what the block's edges contribute to the gradient of attn.
  void accumulate(const EdgeBlock<Acc<T>>& block, const A* grad_raw, A* a, A* a2, bool first) const {
    gathered_.leaky_aggregate(block, row_, slope_, grad_raw, a, a2, first);
  }
  void finish(A* a) const {
    for (int64_t d = 0; d < shape().packed_size(); ++d) a[d] *= attn_[d];
  }

  void scatter_feat(const EdgeBlock<Acc<T>>& block, const A* grad_raw, const A*, const A*, const RowShape&,
                    T* grad_feat) const {
    scatter_leaky(shape(), gathered_.sums(), block.n, row_, attn_, slope_, grad_raw, block.eid, grad_feat);
  }

 private:
  Gathered<T> gathered_;
  const T* fixed_;
  A slope_;
  Buffer<A> row_, attn_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
