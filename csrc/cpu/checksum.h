// A checksum of memory, by which layers notice that a tensor's contents were replaced.
#pragma once

#include <cstdint>

#include "engine.h"

namespace dfgnn::cpu {

// Depends on the bytes and their places alone, not on instruction set or number of threads. Two contents that
// were not made to collide have the same with a probability of about 2^-64.
uint64_t checksum(const void* data, int64_t bytes, const Parallel&);

}  // namespace dfgnn::cpu
