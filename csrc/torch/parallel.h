// Passes torch's threads to the CPU engine, which is built without torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../cpu/engine.h"

namespace dfgnn {

inline cpu::Parallel parallel() {
  const auto run = [](int64_t begin, int64_t end, int64_t grain, cpu::RangeFn fn, void* ctx) {
    const bool done = torch_parallel_for(begin, end, grain, fn, ctx) == AOTI_TORCH_SUCCESS;
    STD_TORCH_CHECK(done,
                    "dfgnn: CPU out of memory: no buffers for the kernels");  // the only error in kernels
  };
  return {run, static_cast<int>(torch::stable::get_num_threads())};
}

}  // namespace dfgnn
