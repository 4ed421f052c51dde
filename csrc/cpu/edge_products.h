// edge_products and its backward, of core/edge_products.h, on the CPU.
#pragma once

#include "core/edge_products.h"
#include "engine.h"

namespace dfgnn::cpu {

void edge_products(const EdgeProductParams&, const Parallel&);
void edge_products_backward(const EdgeProductParams&, const Parallel&);

}  // namespace dfgnn::cpu
