// edge_dot, edge_sum and edge_outer of core/edge_terms.h on the CPU.
#pragma once

#include "core/edge_terms.h"
#include "engine.h"

namespace dfgnn::cpu {

void edge_dot(const EdgeTermParams&, const Parallel&);
void edge_sum(const EdgeTermParams&, const Parallel&);
void edge_outer(const EdgeTermParams&, const Parallel&);

}  // namespace dfgnn::cpu
