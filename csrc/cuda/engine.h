// Launchers of the CUDA engine. They enqueue on `stream` (a cudaStream_t) of the current device and
// return null, or the text of the launch error.
#pragma once

#include "../core/params.h"

namespace dfgnn::cuda {

const char* forward(const ForwardParams& params, void* stream);
const char* backward(const BackwardParams& params, void* stream);
// Whether dot attention supports EdgeAttr (params.h) with this number of features.
bool projects(DType dtype, const Shape& shape, int64_t features);
// The number of partial sums of grad_attn: one per block (grid.x) of the two passes.
int64_t attention_parts(const BackwardParams& params);

// ProductParams in params.h has the formulas of sddmm and spmm.
const char* sddmm(const ProductParams& params, void* stream);
// Without a weight spmm is the plain sum of neighbours' rows, the baseline that attention is compared with.
const char* spmm(const ProductParams& params, void* stream);

// Makes a plan on the device: its work items, and its splits, which are the rows divided over several items
// and where their partial results are (Split in params.h).
const char* plan_rows(const PlanParams& params, void* stream);
// How many elements PlanParams::counts has.
int64_t plan_counts(const PlanParams& params);
// Writes to count [1] the number of descending indices: edges with a smaller column than the edge before in
// the same row.
const char* falls(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                  int64_t* count, void* stream);
// Samples how much rows share neighbours (dfgnn/plan/tiles.py), from every step-th window of kTileRows rows
// (params.h): sums[0] is the number of edges in these windows, sums[1] the sum of each window's distinct
// columns. Of each row only the first `most` edges count.
const char* sharing(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t step, int most,
                    int64_t* sums, void* stream);
// Writes to chunks [windows + 1] a 0, then the number of chunks of each window (tiles, params.h).
const char* tile_counts(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t* chunks,
                        void* stream);
// Writes all chunks [num_chunks, kTileInts]; those of window w begin at offsets[w], and offsets [windows + 1]
// ends with num_chunks. Sets twice [1] to 1 if an edge occurs twice, which masks cannot tell, else to 0.
const char* tiles(const int64_t* indptr, const int32_t* indices, int64_t num_rows, const int64_t* offsets,
                  int64_t num_chunks, int32_t* chunks, int32_t* twice, void* stream);

}  // namespace dfgnn::cuda
