// The launcher of the backward of attention's backward (core/second_order_params.h); engine.h says what
// launchers have in common. Keys and values must have heads of one size, a multiple of 16 bytes, and plans
// must not have tiles.
#pragma once

#include "../../core/second_order_params.h"

namespace dfgnn::cuda {

const char* second_order(const SecondParams& params, void* stream);
// The number of partial sums of grad_attn (SecondParams::attn_parts).
int64_t second_parts(const SecondParams& params);

}  // namespace dfgnn::cuda
