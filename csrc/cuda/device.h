// Properties of the current device that launchers use. Each device is queried once.
#pragma once

#include <cstdint>

namespace dfgnn::cuda {

struct Device {
  int multiprocessors;
  int threads;           // most resident threads of a multiprocessor
  int shared_bytes;      // shared memory of a multiprocessor
  int shared_per_block;  // most shared memory of a block
  int64_t l2_bytes;
  // Whether it has programmatic dependent launch: a kernel may start while the one before it still runs.
  bool follows;
};

// The current device. Where the query fails, the launch that follows returns the error.
const Device& device();

}  // namespace dfgnn::cuda
