// Second derivatives of attention on the CPU, with the parameters of core/second_order_params.h.
#pragma once

#include "core/second_order_params.h"
#include "engine.h"

namespace dfgnn::cpu {

// The number of sums over each row's edges that are computed per head: those of alpha, alpha f p and alpha t,
// and with these that of alpha y. The letters are explained in kernels/second_edges.h.
inline constexpr int kSecondSums = 4;
// Returns how many scalars per edge and head SecondParams::numbers has. It has three, the factors A, R and M
// for the pass over the sources; or four if a row is split or does not fit in a block, because the four
// products from which the factors of such a row are computed are saved there first.
int64_t second_numbers(const Csr& destinations);

void second_order(const SecondParams&, const Parallel&);

}  // namespace dfgnn::cpu
