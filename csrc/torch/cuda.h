// What the operators of CUDA share: the device and the stream of a call, and errors of launches.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>

#include <vector>

#include "checks.h"

namespace dfgnn {

// A CSR to be cut as by plan_rows of one part, without waiting for how many items there are: more, num_splits
// as `degrees` counts them.
struct Cuttable {
  Tensor indptr, indices;
  int64_t max_edges;
  bool by_length;
  int64_t more, num_splits;
};
struct Cut {
  Tensor items, splits;
};
// Of one or two, on the current device. cuda_planning.cpp
std::vector<Cut> cut_rows(const Checker& check, const std::vector<Cuttable>& directions);

struct CudaScope {
  explicit CudaScope(const Tensor& t) : guard(t.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

inline void* stream_of(const Tensor& t) {
  void* s = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &s));
  return s;
}

inline void launched(const char* error) { STD_TORCH_CHECK(error == nullptr, "dfgnn: CUDA kernel: ", error); }

}  // namespace dfgnn
