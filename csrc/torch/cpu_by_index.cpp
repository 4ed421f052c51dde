// The operators index_softmax and index_sum: softmax and sums over groups of rows, which an index gives.
#include "../cpu/by_index.h"
#include "checks.h"
#include "parallel.h"

namespace dfgnn {
namespace {

// The arguments of a call of an operator, checked, and the tensors that own their memory.
struct Call {
  Tensor rows, index;
  OptTensor from;
  cpu::ByIndexParams params{};

  // given: the rows. source (index_sum): which row each summand is, if not simply the next one. groups: the
  // group of each summand or, without `source`, of each row.
  Call(const Checker& check, const Tensor& given, const Tensor& groups, int64_t num_groups,
       const OptTensor& source = {})
      : rows(dense(given)), index(without_gaps(groups)) {
    const int64_t num_rows = source ? source->size(0) : rows.size(0);
    check.tensor("rows", rows, {-1, -1}, {ScalarType::Float, ScalarType::Double});
    check.tensor("index", index, {num_rows}, {ScalarType::Int, ScalarType::Long});
    check.require(num_groups >= 0, "num_groups: expected a number from 0 on, got ", num_groups);
    check.count("columns", rows.size(1));
    params.index_is_long = index.scalar_type() == ScalarType::Long;
    params.index_rises = check_range(check, "index", index, num_groups);
    if (source) {
      from = without_gaps(*source);
      check.tensor("source", from, {-1}, {index.scalar_type()});
      check_range(check, "source", *from, rows.size(0));
    }
    params.dtype = dtype_of(check.op(), rows);
    params.num_rows = num_rows, params.num_groups = num_groups, params.columns = int(rows.size(1));
    params.index = data(index), params.source = data(from), params.rows = data(rows);
  }

  // Runs a kernel and returns its result, of num_rows rows.
  Tensor run(int64_t num_rows, void (*kernel)(const cpu::ByIndexParams&, const cpu::Parallel&)) {
    Tensor out = make(rows, {num_rows, rows.size(1)}, rows.scalar_type());
    params.out = out.mutable_data_ptr();
    if (num_rows * params.columns > 0) kernel(params, parallel());
    return out;
  }

 private:
  static Tensor without_gaps(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

  // Checks that the values are in [0, end), and returns whether none is less than the one before.
  bool check_range(const Checker& check, const char* name, const Tensor& values, int64_t end) const {
    const cpu::IndexRange range = cpu::index_range(data(values), params.index_is_long, values.size(0));
    check.require(range.low >= 0 && range.high < end, name, ": expected numbers in [0, ", end, "), got ",
                  range.low < 0 ? range.low : range.high);
    return range.rises;
  }
};

Tensor index_softmax(Tensor score, Tensor index, int64_t num_groups, bool masked) {
  Call call(Checker("dfgnn::index_softmax", score), score, index, num_groups);
  call.params.masked = masked;
  return call.run(score.size(0), cpu::index_softmax);
}

Tensor index_softmax_backward(Tensor result, Tensor grad, Tensor index, int64_t num_groups) {
  const Checker check("dfgnn::index_softmax_backward", result);
  Call call(check, grad, index, num_groups);
  check.tensor("result", result, {grad.size(0), grad.size(1)}, {grad.scalar_type()});
  const Tensor kept = dense(result);
  call.params.result = data(kept);
  return call.run(grad.size(0), cpu::index_softmax_backward);
}

Tensor index_sum(Tensor rows, Tensor index, int64_t num_groups, OptTensor source) {
  Call call(Checker("dfgnn::index_sum", rows), rows, index, num_groups, source);
  return call.run(num_groups, cpu::index_sum);
}

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) {
  m.impl("index_softmax", TORCH_BOX(&dfgnn::index_softmax));
  m.impl("index_softmax_backward", TORCH_BOX(&dfgnn::index_softmax_backward));
  m.impl("index_sum", TORCH_BOX(&dfgnn::index_sum));
}
