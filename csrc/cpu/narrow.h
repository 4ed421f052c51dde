// Conversions of consecutive elements of 16 bits, float16 or bfloat16, by one thread.
#pragma once

#include "core/params.h"

namespace dfgnn::cpu {

void widen(const void* from, DType type, int64_t n, float* to);
void narrow(const float* from, DType type, int64_t n, void* to);

}  // namespace dfgnn::cpu
