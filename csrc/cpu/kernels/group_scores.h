// The scores of scores.h for groups of short rows. There is no fix(row), because a group has several rows: an
// edge finds its row by Group::row_of. Arrays per edge and head are edge-major.
//   raw(block, group, z)   writes the raw score of each edge and head to z
//   accumulate(block, group, fetch, grad_raw, a, a2)
//                          computes a[r], the gradient of row r of the group, and unless a2 is null a2[r],
//                          what row r contributes to the gradient of attn. grad_raw (d raw) is the gradient
//                          of the raw score per edge and head, and may be overwritten; fetch: columns.h
#pragma once

#include "columns.h"
#include "scores.h"

namespace dfgnn::cpu::DFGNN_ISA {

// raw = the score term of the gathered node + that of the group's row: alpha_src + alpha_dst, or in the pass
// over the sources alpha_dst + alpha_src.
template <class T>
class AdditiveGroupScore : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using Block = EdgeBlock<Acc<T>, EdgeMajor>;
  static constexpr bool kGathersValues = false;

  // gathered: the term of node j and head h is at j * stride + h, where stride is H, or more if the terms are
  // a part of node_stats (gradients.h). fixed: the terms [N, H] of the rows, or null for 0.
  AdditiveGroupScore(const A* gathered, int64_t stride, const A* fixed, int heads, A negative_slope)
      : Activation<Acc<T>>(negative_slope),
        gathered_(gathered),
        stride_(stride),
        fixed_(fixed),
        heads_(heads) {}

  void raw(const Block& block, const Group& group, A* z) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using Heads = Vec<A, width.value>;
      const int heads = heads_;
      const int32_t* const index = block.index;
      const int64_t stride = stride_, limit = block.limit;
      const A* const gathered = gathered_ + h;
      const A* const fixed = fixed_ ? fixed_ + group.row * heads + h : nullptr;
      group.each_edge([&](int r, int e) {
        if (e + kTableAhead < limit) __builtin_prefetch(gathered + index[e + kTableAhead] * stride);
        Heads score = load_vector<Heads>(gathered + index[e] * stride);
        if (fixed) score += load_vector<Heads>(fixed + r * heads);
        store_vector(z + e * heads + h, score);
      });
    });
  }

 private:
  const A* gathered_;
  int64_t stride_;
  const A* fixed_;
  int heads_;
};

template <class T>
class DotGroupScore : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  using Block = EdgeBlock<Acc<T>, EdgeMajor>;
  static constexpr bool kGathersValues = false;

  DotGroupScore(const void* gathered, const void* fixed, int heads, int dim, A scale, A negative_slope,
                int most_rows)
      : Activation<Acc<T>>(negative_slope),
        gathered_(gathered, heads, dim),
        fixed_(fixed, heads, dim, most_rows),
        scale_(scale) {}

  int64_t size() const { return gathered_.size(); }

  void raw(const Block& block, const Group& group, A* z) {
    gathered_.dots(group, block.index, block.limit, fixed_.of(group), z);
    block.update(z, [&](V v, int) { return v * scale_; });
  }
  void accumulate(const Block& block, const Group& group, Fetch fetch, A* grad_raw, SumRows<T> a,
                  SumRows<T>) const {
    block.update(grad_raw, [&](V v, int) { return v * scale_; });
    gathered_.aggregate(group, block.index, fetch, grad_raw, a);
  }

 private:
  Columns<T> gathered_;
  FixedRows<T> fixed_;
  A scale_;
};

template <class T>
class AdditiveV2GroupScore : public Activation<Acc<T>> {
 public:
  using A = Acc<T>;
  using Block = EdgeBlock<Acc<T>, EdgeMajor>;
  static constexpr bool kGathersValues = true;

  AdditiveV2GroupScore(const void* gathered, const void* fixed, int heads, int dim, const void* attn,
                       A negative_slope, int most_rows)
      : Activation<Acc<T>>(A(1)),
        gathered_(gathered, heads, dim),
        fixed_(fixed, heads, dim, most_rows),
        slope_(negative_slope),
        attn_(gathered_.size()) {
    to_accumulators(static_cast<const T*>(attn), size(), gathered_.paired(), attn_);
  }

  int64_t size() const { return gathered_.size(); }

  void raw(const Block& block, const Group& group, A* z) {
    gathered_.leaky_dots(group, block.index, block.limit, fixed_.of(group), attn_, slope_, z);
  }
  void accumulate(const Block& block, const Group& group, Fetch fetch, A* grad_raw, SumRows<T> a,
                  SumRows<T> a2) const {
    gathered_.leaky_aggregate(group, block.index, fetch, fixed_.of(group), attn_, slope_, grad_raw, a, a2);
  }

 private:
  Columns<T> gathered_;
  FixedRows<T> fixed_;
  A slope_;
  Buffer<A> attn_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
