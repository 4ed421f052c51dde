// Launcher of core/second_order.h (see engine.h). Keys and values must have heads of one size, a multiple of
// 16 bytes, and the plan must be one on rows.
#pragma once

#include "../../core/second_order.h"

namespace dfgnn::cuda {

const char* second_order(const SecondParams& params, void* stream);
// Number of partial sums of grad_attn.
int64_t second_parts(const SecondParams& params);

}  // namespace dfgnn::cuda
