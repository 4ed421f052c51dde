// What launchers know of the device. The current one is asked, once.
#pragma once

#include <cstdint>

namespace dfgnn::cuda {

struct Device {
  int multiprocessors;
  int threads;           // resident ones of a multiprocessor
  int shared_bytes;      // shared memory of a multiprocessor
  int shared_per_block;  // of which a block may ask for so much
  int64_t l2_bytes;
  bool follows;  // a kernel's blocks may be launched while those of the one before end
};

// Of the current device. Where it cannot be asked, the launch that follows returns the error.
const Device& device();

}  // namespace dfgnn::cuda
