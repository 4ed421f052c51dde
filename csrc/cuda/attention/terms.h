// Launchers of the score terms: core/terms.h, and engine.h for what launchers have in common.
#pragma once

#include "../../core/terms.h"

namespace dfgnn::cuda {

const char* terms(const TermsParams& params, void* stream);
const char* terms_backward(const TermsBackwardParams& params, void* stream);
// Partial sums that terms_backward writes.
int64_t terms_parts(const TermsParams& params);

}  // namespace dfgnn::cuda
