// Launchers of core/edge_terms.h (see engine.h). The width of rows is a multiple of 16 bytes, and so is the
// address of each head's row.
#pragma once

#include "../../core/edge_terms.h"

namespace dfgnn::cuda {

const char* edge_dot(const EdgeTermParams& params, void* stream);
const char* edge_sum(const EdgeTermParams& params, void* stream);
const char* edge_outer(const EdgeTermParams& params, void* stream);
const char* projection_grad(const ProjectionGradParams& params, void* stream);
int64_t projection_parts(const ProjectionGradParams& params);

}  // namespace dfgnn::cuda
