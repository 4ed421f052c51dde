// Attention within blocks on CUDA (core/blocks.h).
#pragma once

#include "../../core/blocks.h"

namespace dfgnn::cuda {

// Heads of queries and of values must have the same size, 16, 32, 64 or 128 (not 128 in double precision).
// offsets and key_offsets are read on the device alone; where they decrease or exceed the rows, results are
// not specified, but nothing beyond the arrays is read or written. Returns null or the text of a launch
// error.
const char* block_attention(const BlockParams& p, BlockPass pass, void* stream);

}  // namespace dfgnn::cuda
