// Launchers of the score terms (core/terms.h). cuda/engine.h says what launchers have in common.
#pragma once

#include "../../core/terms.h"

namespace dfgnn::cuda {

const char* terms(const TermsParams& params, void* stream);
const char* terms_backward(const TermsBackwardParams& params, void* stream);
// How many partial sums terms_backward writes to TermsBackwardParams::partial.
int64_t terms_parts(const TermsParams& params);

}  // namespace dfgnn::cuda
