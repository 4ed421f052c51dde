// A checksum of memory, by which layers notice that a tensor's contents were replaced.
#pragma once

#include <cstdint>

#include "engine.h"

namespace dfgnn::cpu {

// Returns a checksum that depends only on the bytes and their positions, not on the instruction set or the
// number of threads. Two contents that were not built to collide have the same checksum with a probability of
// about 2^-64.
uint64_t checksum(const void* data, int64_t bytes, const Parallel&);

}  // namespace dfgnn::cpu
