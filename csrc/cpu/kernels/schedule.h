// Division of a plan's items among threads.
#pragma once

#include "cpu/engine.h"
#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Cost of a row in edges: reading and writing its own features, and the overheads of a short row.
constexpr int64_t kRowCost = 4;
// Edges below which another thread costs more than it helps.
constexpr int64_t kMinChunkCost = 4096;

// Rows that make a thread worth while when they are only streamed.
constexpr int64_t kRowsPerThread = 256;

// Calls body(first, last) on ranges of items with equal numbers of edges.
template <class Body>
static void parallel_items(const Parallel& parallel, const Csr& csr, const Body& body) {
  if (csr.num_items == 0) return;
  struct Context {
    const Csr& csr;
    const Body& body;
    int64_t cost, chunks;
    // The first item of a chunk; cost before item k is begin_k + kRowCost * k, which never decreases.
    int64_t boundary(int64_t chunk) const {
      if (chunk == chunks) return csr.num_items;
      const int64_t target = cost / chunks * chunk;
      int64_t low = 0, high = csr.num_items;
      while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (csr.items[mid].begin + kRowCost * mid < target)
          low = mid + 1;
        else
          high = mid;
      }
      return low;
    }
  };
  const int64_t cost = csr.items[csr.num_items - 1].end + kRowCost * csr.num_items;
  const int64_t most = int64_t(parallel.num_threads) * 8, useful = cost / kMinChunkCost + 1;
  Context context{csr, body, cost, most < useful ? most : useful};
  const auto run = [](int64_t begin, int64_t end, void* p) {
    const auto& c = *static_cast<const Context*>(p);
    const int64_t first = c.boundary(begin), last = c.boundary(end);
    if (first < last) c.body(first, last);
  };
  parallel.run(0, context.chunks, 1, run, &context);
}

// Calls body(first, last) on ranges that cover [0, n); grain: the fewest worth a thread.
template <class Body>
static void parallel_range(const Parallel& parallel, int64_t n, int64_t grain, const Body& body) {
  if (n == 0) return;
  const auto run = [](int64_t begin, int64_t end, void* p) { (*static_cast<const Body*>(p))(begin, end); };
  parallel.run(0, n, grain, run, const_cast<Body*>(&body));
}

}  // namespace dfgnn::cpu::DFGNN_ISA
