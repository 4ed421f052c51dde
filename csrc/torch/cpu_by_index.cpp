// Softmax and sums over groups given by an index, as operators.
#include "../cpu/by_index.h"
#include "checks.h"
#include "parallel.h"

namespace dfgnn {
namespace {

// The arguments of one call, checked, and the tensors that hold them.
struct Call {
  Tensor rows, index;
  cpu::ByIndexParams params{};

  Call(const Checker& check, const Tensor& given, const Tensor& groups, int64_t num_groups)
      : rows(dense(given)), index(groups.is_contiguous() ? groups : torch::stable::contiguous(groups)) {
    check.tensor("rows", rows, {-1, -1}, {ScalarType::Float, ScalarType::Double});
    check.tensor("index", index, {rows.size(0)}, {ScalarType::Int, ScalarType::Long});
    check.require(num_groups >= 0, "num_groups: expected a number from 0 on, got ", num_groups);
    check.count("columns", rows.size(1));
    params.index_is_long = index.scalar_type() == ScalarType::Long;
    const cpu::IndexRange range = cpu::index_range(data(index), params.index_is_long, rows.size(0));
    check.require(range.low >= 0 && range.high < num_groups, "index: expected numbers in [0, ", num_groups,
                  "), got ", range.low < 0 ? range.low : range.high);
    params.dtype = dtype_of(check.op(), rows);
    params.num_rows = rows.size(0), params.num_groups = num_groups, params.columns = int(rows.size(1));
    params.index = data(index), params.index_rises = range.rises, params.rows = data(rows);
  }

  Tensor run(int64_t num_rows, void (*kernel)(const cpu::ByIndexParams&, const cpu::Parallel&)) {
    Tensor out = make(rows, {num_rows, rows.size(1)}, rows.scalar_type());
    params.out = out.mutable_data_ptr();
    if (num_rows * params.columns > 0) kernel(params, parallel());
    return out;
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

Tensor index_sum(Tensor rows, Tensor index, int64_t num_groups) {
  return Call(Checker("dfgnn::index_sum", rows), rows, index, num_groups).run(num_groups, cpu::index_sum);
}

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) {
  m.impl("index_softmax", TORCH_BOX(&dfgnn::index_softmax));
  m.impl("index_softmax_backward", TORCH_BOX(&dfgnn::index_softmax_backward));
  m.impl("index_sum", TORCH_BOX(&dfgnn::index_sum));
}
