// Declares the kernels of the instruction set DFGNN_ISA, which cpu/dispatch.cpp calls.
#pragma once

#include "cpu/kernel_list.h"

namespace dfgnn::cpu::DFGNN_ISA {

DFGNN_KERNELS(DFGNN_DECLARE)

}  // namespace dfgnn::cpu::DFGNN_ISA
