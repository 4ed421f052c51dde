// Divides a plan's work items (rows, or chunks of rows: core/params.h) among threads.
#pragma once

#include "cpu/engine.h"
#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {

// What a work item costs in addition to its edges, as a number of edges: it reads and writes its own row, and
// has overhead.
constexpr int64_t kRowCost = 4;
// The cost, as a number of edges, below which another thread takes more time than it saves.
constexpr int64_t kMinChunkCost = 4096;

// The fewest rows per thread in passes that only stream rows.
constexpr int64_t kRowsPerThread = 256;

// Divides a plan's work items into ranges of equal cost, here called chunks, of which there are at most
// `most`.
class Chunks {
 public:
  Chunks(const Csr& csr, int64_t most) : csr_(csr) {
    if (csr.num_items > 0) cost_ = csr.items[csr.num_items - 1].end + kRowCost * csr.num_items;
    const int64_t useful = cost_ / kMinChunkCost + 1;
    count_ = most < useful ? most : useful;
  }

  int64_t count() const { return count_; }

  // Returns the first work item of a chunk, or behind the last chunk the number of work items. It is found by
  // bisection: the cost before work item k is begin_k + kRowCost * k, which never decreases.
  int64_t boundary(int64_t chunk) const {
    if (chunk == count_) return csr_.num_items;
    const int64_t target = cost_ / count_ * chunk;
    int64_t low = 0, high = csr_.num_items;
    while (low < high) {
      const int64_t mid = (low + high) / 2;
      if (csr_.items[mid].begin + kRowCost * mid < target)
        low = mid + 1;
      else
        high = mid;
    }
    return low;
  }

 private:
  const Csr& csr_;
  int64_t cost_ = 0, count_;
};

// Calls body(first, last) in parallel on ranges that cover [0, n), of at least `grain` elements.
template <class Body>
static void parallel_range(const Parallel& parallel, int64_t n, int64_t grain, const Body& body) {
  if (n == 0) return;
  const auto run = [](int64_t begin, int64_t end, void* p) { (*static_cast<const Body*>(p))(begin, end); };
  parallel.run(0, n, grain, run, const_cast<Body*>(&body));
}

// Calls body(first, last) in parallel on ranges of work items that cost the same, by Chunks.
template <class Body>
static void parallel_items(const Parallel& parallel, const Csr& csr, const Body& body) {
  const Chunks chunks(csr, int64_t(parallel.num_threads) * 8);
  parallel_range(parallel, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = chunks.boundary(begin), last = chunks.boundary(end);
    if (first < last) body(first, last);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
