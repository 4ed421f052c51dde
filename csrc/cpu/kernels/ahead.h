// Prefetching of gathered rows: which row to prefetch while another one is being processed, and how.
#pragma once

#include "rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

constexpr int kLine = 64;  // bytes of a cache line
// How far ahead rows are prefetched: by the number of rows that have kAheadBytes bytes, but by kMinAhead rows
// at least and by kMaxAhead rows at most.
constexpr int kAheadBytes = 6144, kMinAhead = 2, kMaxAhead = 32;
// The level of cache to prefetch into. The second handles more misses at a time than the first, but on
// Intel's processors rows that are already in the third then arrive later.
#if defined(__x86_64__)
static const bool kIntoFirst = __builtin_cpu_is("intel");
#else
constexpr bool kIntoFirst = false;
#endif

// ahead(e) is the index of the row to prefetch while edge e is being processed: that of the edge `distance`
// later, or if this is beyond `limit` that of e. limit: how many entries of `index` may be read.
struct Ahead {
  const int32_t* index;
  int64_t limit;
  int distance;
  template <class T>
  Ahead(const Rows<T>& rows, const int32_t* index, int64_t limit) : index(index), limit(limit) {
    const int64_t bytes = rows.shape.size() * int64_t(sizeof(T));
    const int64_t d = kAheadBytes / (bytes > 0 ? bytes : 1);
    distance = int(d < kMinAhead ? kMinAhead : d > kMaxAhead ? kMaxAhead : d);
  }
  int32_t operator()(int e) const { return index[e + distance < limit ? e + distance : e]; }
};

// Prefetches `bytes` bytes at p. level: the locality argument of __builtin_prefetch, 3 for the first level of
// cache and 2 for the second.
template <int level>
[[gnu::always_inline]] static inline void prefetch_into(const char* p, int64_t bytes) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(p + line, 0, level);
  __builtin_prefetch(p + bytes - 1, 0, level);
}

// Prefetches into the level of cache that suits the processor. prefetch is always inlined: gcc considers a
// function that only prefetches free of effects, and would remove its calls.
[[gnu::always_inline]] static inline void prefetch(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  kIntoFirst ? prefetch_into<3>(c, bytes) : prefetch_into<2>(c, bytes);
}
template <int bytes>
[[gnu::always_inline]] static inline void prefetch(const void* p) {
  prefetch(p, bytes);
}

}  // namespace dfgnn::cpu::DFGNN_ISA
