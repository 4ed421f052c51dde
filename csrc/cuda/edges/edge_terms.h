// Launchers of the products of core/edge_terms.h; engine.h says what launchers have in common. The width of
// `rows` is a multiple of 16 bytes, and so is the address of each head of its rows.
#pragma once

#include "../../core/edge_terms.h"

namespace dfgnn::cuda {

const char* edge_dot(const EdgeTermParams& params, void* stream);
const char* edge_sum(const EdgeTermParams& params, void* stream);
const char* edge_outer(const EdgeTermParams& params, void* stream);
const char* projection_grad(const ProjectionGradParams& params, void* stream);
// How many partial sums projection_grad writes (ProjectionGradParams::parts).
int64_t projection_parts(const ProjectionGradParams& params);

}  // namespace dfgnn::cuda
