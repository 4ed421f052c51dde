// Softmax and sums over groups of rows of a matrix, such as edges by their destination, without a plan. An
// index gives the group of each row, in any order. Sums run in the order of the rows, whatever the number of
// threads.
#pragma once

#include <cstdint>

#include "engine.h"

namespace dfgnn::cpu {

struct ByIndexParams {
  DType dtype;                   // f32 or f64
  int64_t num_rows, num_groups;  // in index_sum, num_rows is the number of summands
  int columns;
  const void* index;   // [num_rows]: the group of each row; the caller has checked it with index_range
  bool index_is_long;  // int64, else int32
  bool index_rises;    // IndexRange::rises
  const void* rows;    // [num_rows, columns]: the scores; in the softmax's backward the gradient of its
                       // result; in index_sum the summands
  const void* source;  // index_sum: [num_rows], of the index's type and checked: the row of `rows` that each
                       // summand is, where `rows` may have any number of rows; or null: summand k is row k
  const void* result;  // the softmax's backward: the result of the softmax
  bool masked;         // softmax: a maximum of -inf counts as 0, so that the result over -inf alone is 0
  void* out;           // [num_rows, columns]; index_sum: [num_groups, columns]
};

struct IndexRange {
  int64_t low, high;  // the least and the largest entry of the index; 0 and -1 without rows
  bool rises;         // no entry is less than the one before
};

IndexRange index_range(const void* index, bool is_long, int64_t num_rows);
void index_softmax(const ByIndexParams&, const Parallel&);
void index_softmax_backward(const ByIndexParams&, const Parallel&);
void index_sum(const ByIndexParams&, const Parallel&);

}  // namespace dfgnn::cpu
