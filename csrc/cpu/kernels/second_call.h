// Second derivatives of attention on the CPU (second_order.cpp): what both passes share. That is the division
// of work items into groups of rows, the buffers of a group, and the arguments of second_order(). A cotangent
// is that of the gradient of the named tensor.
#pragma once

#include "merge.h"
#include "second_edges.h"
#include "second_rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

constexpr int kMostEdges = EdgeMajor::kEdges;  // the most edges of a group

// Divides work items into groups: consecutive whole rows of at most kMostEdges edges together, or a block of
// a longer row.
class Groups {
 public:
  // columns: how many columns the widest rows have that are summed. The rows of a group have at most 4096
  // columns together, unless it has one row, so that their sums stay in the first level of cache.
  explicit Groups(int64_t columns) : most_rows_(int(larger<int64_t>(1, 4096 / larger<int64_t>(columns, 1)))) {
    if (most_rows_ > kMostRows) most_rows_ = kMostRows;
  }
  int most_rows() const { return most_rows_; }

  // For the work items [first, last): calls of_rows(group) for groups of whole rows, and of_row(item) for
  // rows that do not fit in a group and for chunks of split rows.
  template <class OfRows, class OfRow>
  void walk(const Csr& csr, int64_t first, int64_t last, const OfRows& of_rows, const OfRow& of_row) {
    for (int64_t k = first; k < last;) {
      if (fits(csr.items[k])) {
        const Group group = from(csr.items + k, last - k);
        of_rows(group);
        k += group.rows;
      } else {
        of_row(csr.items[k++]);
      }
    }
  }

  // Calls f(block, whether it is the first) for the blocks of a work item, each a Group with this row alone.
  // A work item without edges has one block.
  template <class F>
  void each_block(const Item& item, const F& f) {
    for (int32_t begin = item.begin; begin == item.begin || begin < item.end; begin += kMostEdges) {
      const int32_t end = item.end - begin < kMostEdges ? item.end : begin + kMostEdges;
      const Item block{item.row, begin, end, item.slot};
      __builtin_memset(row_of_, 0, sizeof row_of_);
      f(Group{&block, 1, end - begin, item.row, begin, row_of_}, begin == item.begin);
    }
  }

 private:
  // Whether a work item is a whole row that fits in a group.
  static bool fits(const Item& item) { return item.slot < 0 && item.end - item.begin <= kMostEdges; }

  // Returns the group that begins with the first of these items.
  Group from(const Item* items, int64_t count) {
    int rows = 1;
    while (rows < count && rows < most_rows_ && fits(items[rows]) && items[rows].row == items[0].row + rows &&
           items[rows].begin == items[rows - 1].end && items[rows].end - items[0].begin <= kMostEdges)
      ++rows;
    for (int r = 0; r < rows; ++r)
      for (int e = items[r].begin; e < items[r].end; ++e) row_of_[e - items[0].begin] = r;
    return {items, rows, items[rows - 1].end - items[0].begin, items[0].row, items[0].begin, row_of_};
  }

  int most_rows_;
  int32_t row_of_[kMostEdges];  // Group::row_of of the group that was made last
};

// The rows of a group's own nodes in a table [N, size]. of(group) returns them as accumulators [rows, size]:
// in place, or as a converted copy. If the table is null, they are zeros.
template <class T>
class OwnRows {
 public:
  using A = Acc<T>;
  OwnRows(const void* data, int64_t size, int most_rows)
      : data_(static_cast<const T*>(data)),
        size_(size),
        rows_(data && std::is_same_v<T, A> ? 0 : size * most_rows) {
    if (!data) rows_.clear(size * most_rows);
  }
  const A* of(const Group& group) {
    if (!data_) return rows_;
    const T* rows = data_ + group.row * size_;
    if constexpr (std::is_same_v<T, A>) {
      return rows;
    } else {
      to_accumulators(rows, group.rows * size_, false, rows_);
      return rows_;
    }
  }

 private:
  const T* data_;
  int64_t size_;
  Buffer<A> rows_;
};

// Sums [rows, size] over the edges of each row of a group; and for a row of several blocks, the total over
// them.
template <class A>
class Sums {
 public:
  Sums(int64_t size, int most_rows) : size_(size), rows_(size * most_rows), total_(size) {}
  A* rows() const { return rows_; }
  operator A*() const { return rows_; }
  A* total() const { return total_; }
  int64_t size() const { return size_; }

  // Writes the group's rows to `result` [N, size], unless it is null.
  template <class T>
  void write(const Group& group, void* result) const {
    if (result) copy(rows_, group.rows * size_, static_cast<T*>(result) + group.row * size_);
  }
  // Adds the results of a block, a group of one row, to the total, which starts from 0 for the first block.
  void add(bool first) {
    if (first) total_.clear(size_);
    for (int64_t d = 0; d < size_; ++d) total_[d] += rows_[d];
  }
  // Writes the total to the item's row of `result`, or for a chunk of a split row to its slot of `partial`;
  // nothing if `result` is null.
  template <class T>
  void write(const Item& item, void* result, void* partial) const {
    if (!result) return;
    if (item.slot < 0)
      copy(total_, size_, static_cast<T*>(result) + item.row * size_);
    else
      copy(total_, size_, static_cast<A*>(partial) + item.slot * size_);
  }

 private:
  template <class T>
  static void copy(const A* from, int64_t n, T* to) {
    for_columns<A>(n, [&](auto width, int64_t i) {
      store<T, width.value>(to + i, load_vector<Vec<A, width.value>>(from + i));
    });
  }
  int64_t size_;
  Buffer<A> rows_, total_;
};

// The arguments of second_order(), with the types and sizes that both passes need.
template <class T>
class Call {
 public:
  using A = Acc<T>;
  explicit Call(const SecondParams& p)
      : p(p),
        size{p.shape.heads, p.shape.dim, p.shape.value_dim},
        row(int64_t(size.heads) * size.dim),
        value_row(int64_t(size.heads) * size.value_dim),
        stride(second_numbers(p.csr)),
        width(row_shape<A>(1, size.dim < size.value_dim ? size.dim : size.value_dim).width),
        zeros_(larger(row, value_row)),
        vectors_(2 * row) {
    zeros_.clear(larger(row, value_row));
    if (p.score != Score::additive_v2) return;
    to_accumulators(static_cast<const T*>(p.attn), row, false, vectors_);
    if (p.of_attn)
      __builtin_memcpy(vectors_ + row, p.of_attn, row * sizeof(A));
    else
      __builtin_memset(vectors_ + row, 0, row * sizeof(A));
  }

  const SecondParams& p;
  HeadSizes size;
  int64_t row, value_row;  // the columns of a row of keys, and of one of values
  int64_t stride;          // the number of scalars per edge and head in SecondParams::numbers
  int width;               // the lanes of vectors, which fit in a head of keys and in one of values

  bool pairs() const { return p.score == Score::additive_v2; }
  Vectors<A> vectors() const { return {vectors_, vectors_ + row, A(p.negative_slope)}; }
  A* numbers() const { return static_cast<A*>(p.numbers); }

  // Returns the table with rows of `columns` elements at `data`; if that is null, one with a row of zeros for
  // all.
  Table<T> table(const void* data, int64_t columns) const {
    return data ? Table<T>{static_cast<const T*>(data), columns} : Table<T>{zeros_, 0};
  }
  bool feat() const { return p.edge.feat != nullptr; }

 private:
  Buffer<T> zeros_;
  Buffer<A> vectors_;  // GATv2's vector attn, and the cotangent of the gradient of attn
};

template <class T>
void second_destinations(const Call<T>&, const Parallel&);
template <class T>
void second_sources(const Call<T>&, const Parallel&);

}  // namespace dfgnn::cpu::DFGNN_ISA
