// The sizes of feature and accumulation types in bytes, and huge pages for large results.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

#include "core/params.h"

namespace dfgnn::cpu {

inline int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
inline int64_t size_of_acc(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

// Advises the system to use huge pages for an array that is about to be written completely. A large array is
// often new memory, which the system then clears and maps in units of 2 MB instead of 4 KB. The advice covers
// only pages inside the array, so that no memory is lost.
inline void use_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kLarge = int64_t(4) << 20;
  constexpr uintptr_t kPage = uintptr_t(2) << 20;
  if (!data || bytes < kLarge) return;
  const uintptr_t begin = (uintptr_t(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (uintptr_t(data) + uintptr_t(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace dfgnn::cpu
