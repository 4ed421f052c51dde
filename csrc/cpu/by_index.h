// Softmax and sums over groups of rows. An index gives the group of each row, in any order, without a plan.
// Sums run in the order of the rows, whatever the number of threads.
#pragma once

#include <cstdint>

#include "engine.h"

namespace dfgnn::cpu {

struct ByIndexParams {
  DType dtype;                   // f32 or f64
  int64_t num_rows, num_groups;  // of sums, num_rows is the number of summands
  int columns;
  const void* index;  // the group of each row, already checked by index_range
  bool index_is_long, index_rises;
  const void* rows;    // [num_rows, columns]: the scores, or in backward the gradient of the result
  const void* source;  // sum: the number of each summand's row, of the index's type, checked; or null
  const void* result;  // backward: the result of the softmax
  bool masked;         // an infinite maximum counts as 0, so that a softmax over -inf alone is 0
  void* out;           // [num_rows, columns]; sum: [num_groups, columns]
};

struct IndexRange {
  int64_t low, high;  // [0, -1] without rows
  bool rises;
};

IndexRange index_range(const void* index, bool is_long, int64_t num_rows);
void index_softmax(const ByIndexParams&, const Parallel&);
void index_softmax_backward(const ByIndexParams&, const Parallel&);
void index_sum(const ByIndexParams&, const Parallel&);

}  // namespace dfgnn::cpu
