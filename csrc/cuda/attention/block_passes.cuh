// The passes of attention within blocks (core/blocks.h), which are instantiated in instances/.
#pragma once

#include "../../core/blocks.h"
#include "../launch.cuh"

namespace dfgnn::cuda {

// The columns of each row: the first one, and the one behind the last.
struct BlockRanges {
  const int2 *rows, *keys;  // [N]: the keys of a query; [M]: the queries of a key
};

template <typename T>
void block_forward(const BlockParams& p, const BlockRanges& ranges, cudaStream_t stream);
template <typename T>
void block_backward(const BlockParams& p, const BlockRanges& ranges, cudaStream_t stream);
template <typename T>
void block_second(const BlockParams& p, const BlockRanges& ranges, cudaStream_t stream);  // 32 and 64 bits

}  // namespace dfgnn::cuda
