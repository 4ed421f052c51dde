// Queries the properties of devices, and remembers them.
#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

#include "device.h"

namespace dfgnn::cuda {
namespace {

// A query that fails yields 1, so that launchers do not divide by 0.
Device ask(int ordinal) {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    cudaDeviceGetAttribute(&value, name, ordinal);
    return value > 0 ? value : 1;
  };
  return {attribute(cudaDevAttrMultiProcessorCount),
          attribute(cudaDevAttrMaxThreadsPerMultiProcessor),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          attribute(cudaDevAttrL2CacheSize),
          attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
}

}  // namespace

const Device& device() {
  static std::mutex mutex;
  static std::unordered_map<int, Device> known;  // adding elements keeps references valid
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(ordinal);
  return (found != known.end() ? found : known.emplace(ordinal, ask(ordinal)).first)->second;
}

}  // namespace dfgnn::cuda
