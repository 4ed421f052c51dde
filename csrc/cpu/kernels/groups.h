// Groups of short rows.
//
// A row that is worked on alone (rows.h) has its heads one after another, and of every vector only as many
// lanes as it has edges: with a few edges per row nearly all the time goes into what is done once per row and
// head. Where rows are short, consecutive ones form a group of up to EdgeMajor::kEdges edges instead. The
// numbers of its edges and heads lie edge after edge, heads in the lanes, without gaps between rows, so that
// all that is done entry by entry (scores, options, exponentials, gradients) runs over the whole group in
// full vectors, and divisions and logarithms over all its rows and heads. Only maxima and sums go row by row,
// a vector of heads at a time.
//
// Which way a row goes depends on the plan and the shape, and a row's result on nothing but the way: neither
// where a group begins nor the number of threads matters.
#pragma once

#include "cpu/engine.h"
#include "edges.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Consecutive whole rows with consecutive edges.
struct Group {
  const Item* items;
  int rows, n;  // n: edges
  int64_t row, begin;
  const int32_t* row_of;  // [n] the edges' rows, counted from the group's first

  // Calls f(r, first edge, end), counted from the group's first.
  template <class F>
  [[gnu::always_inline]] void each(const F& f) const {
    for (int r = 0; r < rows; ++r) f(r, int(items[r].begin - begin), int(items[r].end - begin));
  }
  // Calls f(r, edge) for all edges: without a loop per row, whose end is mispredicted where rows differ.
  template <class F>
  [[gnu::always_inline]] void each_edge(const F& f) const {
    for (int e = 0; e < n; ++e) f(int(row_of[e]), e);
  }
};

constexpr int kMostRows = 64;

// Whether HeadSums adds up products as Rows::dots does.
template <class A>
static inline bool has_dots(int dim) {
  return dim > 0 && row_shape<A>(1, dim).vectors <= kRun;
}

// Which items of a plan are grouped, and how many at most.
class Grouping {
 public:
  // The way of a call's rows in one direction; p: ForwardParams or BackwardParams. A: accumulators;
  // degree: grouped below.
  template <class A, class Params>
  static Grouping of(const Params& p, const Csr& csr, RowWay way, int64_t degree, bool possible = true) {
    const Shape& s = p.shape;
    const int64_t columns = int64_t(s.heads) * (s.dim > s.value_dim ? s.dim : s.value_dim);
    const bool dots = p.score == Score::additive || (has_dots<A>(s.dim) && has_dots<A>(s.value_dim));
    const bool short_rows = s.num_edges < degree * csr.num_items;
    const bool on = possible && dots && columns > 0 && !p.edge.feat &&
                    (way == RowWay::grouped || (way == RowWay::automatic && short_rows));
    const int64_t fit = 4096 / (columns > 0 ? columns : 1);
    return {on, int(fit < 1 ? 1 : fit > kMostRows ? kMostRows : fit)};
  }

  int most_rows() const { return most_rows_; }
  bool takes(const Item& item) const { return on_ && item.slot < 0 && item.end - item.begin <= kBlock; }

  // Calls grouped(each) and alone(each) for items [first, last) where they have something to do: each(f)
  // calls f(Group) for all groups, or f(Item) for all other items.
  template <class Grouped, class Alone>
  void walk(const Csr& csr, int64_t first, int64_t last, const Grouped& grouped, const Alone& alone) const {
    int64_t taken = 0;
    for (int64_t k = first; k < last; ++k) taken += takes(csr.items[k]);
    if (taken > 0)
      grouped([&](auto&& f) {
        int32_t row_of[EdgeMajor::kEdges + kLanes<float>];
        for (int64_t k = first; k < last;) {
          if (!takes(csr.items[k])) {
            ++k;
            continue;
          }
          const Group group = from(csr.items + k, last - k, row_of);
          f(group);
          k += group.rows;
        }
      });
    if (taken < last - first)
      alone([&](auto&& f) {
        for (int64_t k = first; k < last; ++k)
          if (!takes(csr.items[k])) f(csr.items[k]);
      });
  }

 private:
  // The group of the first of these items, which it takes.
  Group from(const Item* items, int64_t count, int32_t* row_of) const {
    using Rows = Vec<int32_t, kLanes<float>>;
    int rows = 1;
    while (rows < count && rows < most_rows_ && takes(items[rows]) &&
           items[rows].row == items[0].row + rows && items[rows].begin == items[rows - 1].end &&
           items[rows].end - items[0].begin <= EdgeMajor::kEdges)
      ++rows;
    for (int r = 0, at = 0; r < rows; ++r) {
      const int end = items[r].end - items[0].begin;
      do store_vector(row_of + at, Rows{} + r);  // what is behind the row belongs to the next one
      while ((at += kLanes<float>) < end);
      at = end;
    }
    return {items, rows, items[rows - 1].end - items[0].begin, items[0].row, items[0].begin, row_of};
  }

  Grouping(bool on, int most_rows) : on_(on), most_rows_(most_rows) {}

  bool on_;
  int most_rows_;
};

// Calls f(integral constant width, place of the first lane) for vectors that cover `heads` numbers; the last
// may overlap the one before.
template <class A, class F>
[[gnu::always_inline]] static inline void for_heads(int heads, const F& f) {
  const RowShape shape = row_shape<A>(1, heads);
  with_width<A>(shape.width, [&](auto width) {
    for (int v = 0; v < shape.vectors; ++v) f(width, feature(shape, v, width.value));
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
