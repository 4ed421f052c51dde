// The scores of scores.h for groups of short rows: no row is fixed, all arrays are edge-major.
//   raw(block, group, z)                    what the family computes
//   accumulate(block, group, limit, draw, a, a2)
//                                           a[r] = terms of the gradient of row r, all but a factor;
//                                           a2[r], unless it is null: of attn. limit: as in columns.h
//   finish(group, a)                        a times this factor
#pragma once

#include "columns.h"
#include "scores.h"

namespace dfgnn::cpu::DFGNN_ISA {

template <class T>
class AdditiveGroupScore : public Activation<T> {
 public:
  using A = Acc<T>;
  using Block = EdgeBlock<T, EdgeMajor>;
  static constexpr bool kGathersValues = false;

  // As AdditiveScore.
  AdditiveGroupScore(const A* gathered, int64_t stride, const A* fixed, int heads, A negative_slope)
      : Activation<T>(negative_slope), gathered_(gathered), stride_(stride), fixed_(fixed), heads_(heads) {}

  void raw(const Block& block, const Group& group, A* z) const {
    for_heads<A>(heads_, [&](auto width, int h) {
      using Heads = Vec<A, width.value>;
      group.each([&](int r, int begin, int end) {
        const Heads fixed = fixed_ ? load_vector<Heads>(fixed_ + (group.row + r) * heads_ + h) : Heads{};
        for (int e = begin; e < end; ++e) {
          if (e + kTableAhead < block.limit)
            __builtin_prefetch(gathered_ + block.index[e + kTableAhead] * stride_ + h);
          const A* from = gathered_ + block.index[e] * stride_ + h;
          store_vector(z + e * heads_ + h, load_vector<Heads>(from) + fixed);
        }
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
class DotGroupScore : public Activation<T> {
 public:
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  using Block = EdgeBlock<T, EdgeMajor>;
  static constexpr bool kGathersValues = false;

  DotGroupScore(const void* gathered, const void* fixed, int heads, int dim, A scale, A negative_slope)
      : Activation<T>(negative_slope),
        gathered_(gathered, heads, dim),
        fixed_(static_cast<const T*>(fixed)),
        scale_(scale) {}

  int64_t size() const { return gathered_.size(); }

  void raw(const Block& block, const Group& group, A* z) {
    gathered_.dots(group, block.index, block.limit, fixed_ + group.row * size(), z);
    block.update(z, [&](V v, int) { return v * scale_; });
  }
  void accumulate(const Block& block, const Group& group, int64_t limit, const A* draw, A* a, A*) const {
    gathered_.aggregate(group, block.index, limit, draw, nullptr, nullptr, a, nullptr);
  }
  void finish(const Group& group, A* a) const {
    for (int64_t d = 0; d < group.rows * size(); ++d) a[d] *= scale_;
  }

 private:
  Columns<T> gathered_;
  const T* fixed_;
  A scale_;
};

template <class T>
class AdditiveV2GroupScore : public Activation<T> {
 public:
  using A = Acc<T>;
  using Block = EdgeBlock<T, EdgeMajor>;
  static constexpr bool kGathersValues = true;

  AdditiveV2GroupScore(const void* gathered, const void* fixed, int heads, int dim, const void* attn,
                       A negative_slope)
      : Activation<T>(A(1)),
        gathered_(gathered, heads, dim),
        fixed_(static_cast<const T*>(fixed)),
        slope_(negative_slope),
        attn_(gathered_.size()) {
    for (int64_t d = 0; d < size(); ++d) attn_[d] = load<T, 1>(static_cast<const T*>(attn) + d);
  }

  int64_t size() const { return gathered_.size(); }

  void raw(const Block& block, const Group& group, A* z) {
    gathered_.leaky_dots(group, block.index, block.limit, fixed_ + group.row * size(), attn_, slope_, z);
  }
  void accumulate(const Block& block, const Group& group, int64_t limit, const A* draw, A* a, A* a2) const {
    gathered_.leaky_aggregate(group, block.index, limit, fixed_ + group.row * size(), slope_, draw, a, a2);
  }
  void finish(const Group& group, A* a) const {
    for (int r = 0; r < group.rows; ++r, a += size())
      for (int64_t d = 0; d < size(); ++d) a[d] *= attn_[d];
  }

 private:
  Columns<T> gathered_;
  const T* fixed_;
  A slope_;
  Buffer<A> attn_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
