// The CPU engine of core/second_order.h.
#pragma once

#include "core/second_order.h"
#include "engine.h"

namespace dfgnn::cpu {

// How many sums over a row's edges are computed: of alpha, alpha f p, alpha t, and then alpha y.
inline constexpr int kSecondSums = 4;
// How many scalars per edge and head the scratch has: the three factors for the pass over the sources. If
// rows are longer than a block it has four, because the products from which the factors are computed are
// saved first.
int64_t second_numbers(const Csr& destinations);

void second_order(const SecondParams&, const Parallel&);

}  // namespace dfgnn::cpu
