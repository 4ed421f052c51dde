// Declares the functions of one instruction set that the dispatcher calls.
#pragma once

#include "cpu/kernel_list.h"

namespace dfgnn::cpu::DFGNN_ISA {

DFGNN_KERNELS(DFGNN_DECLARE)

}  // namespace dfgnn::cpu::DFGNN_ISA
