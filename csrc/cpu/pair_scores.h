// The products of core/pair_scores.h on the CPU; see engine.h.
#pragma once

#include "core/pair_scores.h"
#include "engine.h"

namespace dfgnn::cpu {

void pair_scores(const PairScoreParams&, const Parallel&);
void pair_sums(const PairScoreParams&, const Parallel&);
// How many partial sums the projection's gradient has.
int64_t pair_parts(const Csr&);

}  // namespace dfgnn::cpu
