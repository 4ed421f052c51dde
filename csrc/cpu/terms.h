// Score terms on the CPU: see core/terms.h.
#pragma once

#include "core/terms.h"
#include "engine.h"

namespace dfgnn::cpu {

void terms(const TermsParams&, const Parallel&);
void terms_backward(const TermsBackwardParams&, const Parallel&);
// Number of partial sums that terms_backward writes. It does not depend on the number of threads.
int64_t terms_parts(const TermsParams&);

}  // namespace dfgnn::cpu
