// pair_scores and pair_sums of core/pair_scores.h on the CPU.
#pragma once

#include "core/pair_scores.h"
#include "engine.h"

namespace dfgnn::cpu {

void pair_scores(const PairScoreParams&, const Parallel&);
void pair_sums(const PairScoreParams&, const Parallel&);
// Returns how many partial sums of the projection's gradient pair_sums writes (PairScoreParams::parts).
int64_t pair_parts(const Csr&);

}  // namespace dfgnn::cpu
