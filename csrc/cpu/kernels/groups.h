// Groups of short rows of a CSR, which are processed together.
//
// A row that is processed alone (rows.h) loops over its heads, and fills only as many lanes of a vector as it
// has edges. With a few edges per row, the work per row and head dominates. Therefore consecutive short rows
// form a group of up to EdgeMajor::kEdges edges. The scalars of its edges and heads are edge-major, without
// gaps between rows, so that elementwise work (scores, options, exponentials, gradients) fills vectors over
// the whole group, and divisions and logarithms over all its rows and heads. Only maxima and sums loop over
// rows, a vector of heads at a time.
//
// The plan and the shape decide whether rows are grouped, and a row's result depends on nothing else: neither
// on where its group begins nor on the number of threads.
#pragma once

#include "cpu/engine.h"
#include "edges.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Consecutive whole rows with consecutive edges.
struct Group {
  const Item* items;
  int rows, n;            // the number of rows, and of their edges
  int64_t row, begin;     // the first row, and the position of its first edge in the CSR
  const int32_t* row_of;  // [n]: the row of each edge, relative to `row`

  // Calls f(r, first edge, end) for each row, with rows relative to `row` and edges relative to `begin`.
  template <class F>
  [[gnu::always_inline]] void each(const F& f) const {
    const Item* const items = this->items;  // local copies: members would be read again after each store of f
    const int64_t begin = this->begin;
    for (int r = 0, n = rows; r < n; ++r) f(r, int(items[r].begin - begin), int(items[r].end - begin));
  }
  // Calls f(r, edge) for each edge in one loop: the processor would mispredict the ends of a loop per row.
  template <class F>
  [[gnu::always_inline]] void each_edge(const F& f) const {
    const int32_t* const row_of = this->row_of;
    for (int e = 0, n = this->n; e < n; ++e) f(int(row_of[e]), e);
  }
};

constexpr int kMostRows = 64;  // the most rows of a group

// Whether HeadSums rounds like Rows::dots for this dimension: it does where a head has at most kRun vectors,
// which both add up one after another.
template <class A>
static inline bool has_dots(int dim) {
  return dim > 0 && row_shape<A>(1, dim).vectors <= kRun;
}

// Decides which items of a plan are grouped, and how many rows a group has at most.
class Grouping {
 public:
  // Decides for one pass over the rows of csr. p: ForwardParams or BackwardParams; degree: rows are grouped
  // if work items have fewer edges on average; possible: whether the caller has code for groups in this case.
  // The rows of a group have at most 4096 columns together, so that they stay in the first level of cache.
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
  // Whether this work item is processed in a group.
  bool takes(const Item& item) const { return on_ && item.slot < 0 && item.end - item.begin <= kBlock; }

  // If some of the work items [first, last) are grouped, calls grouped(each), and if some are not,
  // alone(each). `grouped` and `alone` are the caller's: each makes a function object f with the buffers that
  // it needs, and calls each(f). This calls f(Group) for every group, or, from `alone`, f(Item) for every
  // work item that is not grouped.
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
  // Returns the group that begins with the first of these items, and fills its row_of.
  Group from(const Item* items, int64_t count, int32_t* row_of) const {
    using Rows = Vec<int32_t, kLanes<float>>;
    int rows = 1;
    while (rows < count && rows < most_rows_ && takes(items[rows]) &&
           items[rows].row == items[0].row + rows && items[rows].begin == items[rows - 1].end &&
           items[rows].end - items[0].begin <= EdgeMajor::kEdges)
      ++rows;
    for (int r = 0, at = 0; r < rows; ++r) {
      const int end = items[r].end - items[0].begin;
      do store_vector(row_of + at, Rows{} + r);  // the next row overwrites lanes beyond this one's edges
      while ((at += kLanes<float>) < end);
      at = end;
    }
    return {items, rows, items[rows - 1].end - items[0].begin, items[0].row, items[0].begin, row_of};
  }

  Grouping(bool on, int most_rows) : on_(on), most_rows_(most_rows) {}

  bool on_;
  int most_rows_;
};

// Calls f(integral constant width, first element) for vectors that cover `heads` elements; the last may
// overlap the one before.
template <class A, class F>
[[gnu::always_inline]] static inline void for_heads(int heads, const F& f) {
  const RowShape shape = row_shape<A>(1, heads);
  with_width<A>(shape.width, [&](auto width) {
    for (int v = 0; v < shape.vectors; ++v) f(width, feature(shape, v, width.value));
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
