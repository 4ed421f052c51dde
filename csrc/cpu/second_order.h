// Second derivatives of attention on the CPU, with the parameters of core/second_order.h.
#pragma once

#include "core/second_order.h"
#include "engine.h"

namespace dfgnn::cpu {

// How many sums over each row's edges are computed: of alpha, alpha f p, alpha t, and then alpha y. The
// letters are explained in kernels/second_edges.h.
inline constexpr int kSecondSums = 4;
// How many scalars per edge and head SecondParams::numbers has: the three factors for the pass over the
// sources. If a row is longer than a block or split it has four, because the four products from which the
// factors are computed are saved there first.
int64_t second_numbers(const Csr& destinations);

void second_order(const SecondParams&, const Parallel&);

}  // namespace dfgnn::cpu
