// Launchers of the CUDA engine. They enqueue on `stream` (a cudaStream_t) of the current device and
// return null, or the text of the launch error.
#pragma once

#include "../core/params.h"

namespace dfgnn::cuda {

const char* forward(const ForwardParams& params, void* stream);
const char* backward(const BackwardParams& params, void* stream);
// Partial sums of grad_attn: one per block of the two passes.
int64_t attention_parts(const BackwardParams& params);

const char* sddmm(const ProductParams& params, void* stream);
// Without a weight it is the plain neighbour sum, the yardstick that attention is measured against.
const char* spmm(const ProductParams& params, void* stream);

const char* plan_rows(const PlanParams& params, void* stream);
// sums: [kDegreeBins + 3]: rows of every degree below, rows above, the largest degree, the sum of squares.
const char* degrees(const int64_t* indptr, int64_t num_rows, int64_t* sums, void* stream);

}  // namespace dfgnn::cuda
