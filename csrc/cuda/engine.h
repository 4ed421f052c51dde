// Launchers of the CUDA engine. They enqueue on `stream` (a cudaStream_t) of the current device and
// return null, or the text of the launch error.
#pragma once

#include "../core/params.h"

namespace dfgnn {

// out_i = sum_j value_j over the edges j -> i; the yardstick that attention is measured against.
struct GatherSumParams {
  DType dtype;
  Shape shape;
  Csr csr;
  const void* value;  // [N_src, Dv] T
  void* out;          // [N_dst, Dv] T
  void* partial_out;  // [num_slots, Dv] acc
};

namespace cuda {

const char* forward(const ForwardParams& params, void* stream);
const char* backward(const BackwardParams& params, void* stream);
const char* gather_sum(const GatherSumParams& params, void* stream);

}  // namespace cuda
}  // namespace dfgnn
