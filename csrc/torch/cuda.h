// What the CUDA operators share: the device and stream of a call, and errors of launches.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>

#include <vector>

#include "checks.h"

namespace dfgnn {

// A CSR that is to be cut into work items (PlanParams in core/params.h) without waiting for the device to
// count them. The operator `degrees` has counted before, for this max_edges, the work items beyond one per
// row (more) and the split rows (num_splits).
struct Cuttable {
  Tensor indptr, indices;
  int64_t max_edges;
  bool by_length;
  int64_t more, num_splits;
};
struct Cut {
  Tensor items, splits;
};
// Cuts one or two directions of a graph on the current device, and returns the work items and splits of each.
// It is defined in cuda_planning.cpp.
std::vector<Cut> cut_rows(const Checker& check, const std::vector<Cuttable>& directions);

// Makes the device of t the current one, as long as this object exists.
struct CudaScope {
  explicit CudaScope(const Tensor& t) : guard(t.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

// PyTorch's current stream on the device of t.
inline void* stream_of(const Tensor& t) {
  void* s = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &s));
  return s;
}

// Raises the error that a launcher (cuda/engine.h) returned, if any.
inline void launched(const char* error) { STD_TORCH_CHECK(error == nullptr, "dfgnn: CUDA kernel: ", error); }

}  // namespace dfgnn
