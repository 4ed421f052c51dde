// What the operators of CUDA share: the device and the stream of a call, and errors of launches.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>

#include <tuple>

#include "checks.h"

namespace dfgnn {

// cuda_planning.cpp
std::tuple<Tensor, Tensor> cut_rows(Tensor indptr, Tensor indices, int64_t max_edges, bool by_length,
                                    int64_t more, int64_t num_splits);

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
