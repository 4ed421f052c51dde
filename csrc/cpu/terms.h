// Score terms on the CPU: see core/terms.h.
#pragma once

#include "core/terms.h"
#include "engine.h"

namespace dfgnn::cpu {

void terms(const TermsParams&, const Parallel&);
void terms_backward(const TermsBackwardParams&, const Parallel&);
// Returns how many partial sums terms_backward writes (TermsBackwardParams::parts), whatever the number of
// threads.
int64_t terms_parts(const TermsParams&);

}  // namespace dfgnn::cpu
