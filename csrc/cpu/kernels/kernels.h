// The functions of one instruction set that the dispatcher calls.
#pragma once

#include "cpu/engine.h"
#include "cpu/terms.h"

namespace dfgnn::cpu::DFGNN_ISA {

void forward(const ForwardParams&, const Parallel&);
void backward(const BackwardParams&, const Parallel&, void*);
void sddmm(const ProductParams&, const Parallel&);
void spmm(const ProductParams&, const Parallel&);
int64_t attention_parts(const Csr&);
void terms(const TermsParams&, const Parallel&);
void terms_backward(const TermsBackwardParams&, const Parallel&);

}  // namespace dfgnn::cpu::DFGNN_ISA
