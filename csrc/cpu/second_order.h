// The CPU engine of core/second_order.h.
#pragma once

#include "core/second_order.h"
#include "engine.h"

namespace dfgnn::cpu {

// How many sums over a row's edges are computed: of alpha, alpha f p, alpha t, and then alpha y.
inline constexpr int kSecondSums = 4;
// Scalars per edge and head in scratch: three factors for the sources' pass. Where rows are longer than a
// block, four, because the products that the factors are made of are saved first.
int64_t second_numbers(const Csr& destinations);

void second_order(const SecondParams&, const Parallel&);

}  // namespace dfgnn::cpu
