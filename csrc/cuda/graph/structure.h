// Makes both CSRs of a graph from its edges on the device, without waiting for it, and counts degrees.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/params.h"

namespace dfgnn::cuda {

// The user's node ids, int32 or int64.
struct Ids {
  const void* data;
  int64_t stride;  // in elements
  int32_t is_int64;
};

// Work items are counted for kCutBounds different maxima of edges per work item, from which the planner
// chooses: kLeastCut, 2 kLeastCut, 4 kLeastCut, ....
inline constexpr int kCutBounds = 6, kLeastCut = 32;
// How many numbers Degrees::found has for a direction: the smallest degree that half of the rows do not
// exceed, and the one that 99 % do not exceed (each is kDegreeBins if it is not below that); how many rows
// are empty; the largest degree; the sum of the degrees' squares; then for each maximum of edges per work
// item the work items beyond one per row, and the split rows.
inline constexpr int kDegreeNumbers = 5 + 2 * kCutBounds;
// The size of Degrees::scratch, whose contents plan/degrees.cuh explains.
inline constexpr int kDegreeScratch = kDegreeBins + 4 + 2 * kCutBounds;

// Arguments of `degrees` for one direction of a graph.
struct Degrees {
  const int64_t* indptr;
  int64_t num_rows;
  int64_t* scratch;                 // [kDegreeScratch]
  int64_t* found;                   // [kDegreeNumbers]
  const int32_t* counts = nullptr;  // [num_rows]: degrees, to be used in place of indptr; or null
  int64_t* done = nullptr;          // host memory that is set to 1 when `found` is complete; or null
};
// Counts the degrees of `count` directions, one or two. zeroed: whether their scratch is 0 already.
const char* degrees(const Degrees* directions, int count, bool zeroed, void* stream);

// How many numbers StructureParams::numbers has. First come kEdgeNumbers that describe the edges: least and
// largest source, least and largest destination (0 and -1 without edges), how many given edges are kept, how
// often a source is smaller than the one before, how often a destination is. Then comes Degrees::found for
// the CSR by destination, and for the CSR by source.
inline constexpr int kEdgeNumbers = 7, kStructureNumbers = kEdgeNumbers + 2 * kDegreeNumbers;
// StructureParams::numbers becomes complete in three parts: the numbers of the edges, and those of the
// degrees of each direction.
inline constexpr int kStructureParts = 3;
inline constexpr int kMostEdgeBlocks = 1024;  // the most blocks that read the edges

// Arguments of `structure`, which makes both CSRs of edges src -> dst. One is sorted by destination, stably.
// The other is sorted by source, and within a source by destination, so that indices rise; or, if the given
// sources rise and the destinations do not, within a source in the given order (unless with_loops). An edge
// with a node out of range is dropped. with_loops: edges from a node to itself are dropped, too, and i -> i
// for i < num_loops is appended. An edge's id is its position among the kept edges, which the appended ones
// follow. Arrays have room for num_given + num_loops edges; elements after those of the CSR's edges are in no
// row.
struct StructureParams {
  Ids src, dst;
  int64_t num_given, num_loops, num_src, num_dst;
  int64_t room;  // num_given + num_loops
  int32_t with_loops;

  int64_t* numbers;     // [kStructureNumbers]
  int64_t* done;        // [kStructureParts] host memory: each is set to 1 when its part of the numbers is
                        // complete; or null
  int64_t* indptr[2];   // by destination [num_dst + 1], by source [num_src + 1]
  int32_t* indices[2];  // [room]: the other node of each edge
  int32_t* eids[2];     // [room]: edge id of each entry
  int64_t* edge_map;    // [room]: id -> position in src and dst, -1 for an appended loop; or null

  // Scratch. Sorting goes from keys[0] and places[0] to keys[1] and places[1], or back and forth. The first
  // half of each array belongs to the edges by destination, the second to those by source.
  void* keys[2];    // [2 room] uint64: sort keys
  void* places[2];  // [2 room] int32: edge ids, sorted with the keys
  void* ends;       // [2 room] int32: sources by edge id, then destinations by edge id
  void* parts;      // [kMostEdgeBlocks, kEdgeNumbers] int64: the numbers of each block's edges
  void* degrees;    // [2, kDegreeScratch] int64: Degrees::scratch
  void* sorting;    // [sorting_bytes]: what the sort needs; for small graphs also degrees
  size_t sorting_bytes;
};
// Sets `bytes` to the size of `sorting`. Returns null, or an error.
const char* sorting_bytes(const StructureParams& params, size_t& bytes);
const char* structure(const StructureParams& params, void* stream);

// `plan_rows` (engine.h) for `count` directions, one or two.
const char* plan_directions(const PlanParams* directions, int count, void* stream);

// Host memory for `StructureParams::numbers` and `done`, to which the device writes. A host that waits for
// the numbers needs no copy, and has them before the edges are sorted.
class HostNumbers {
 public:
  HostNumbers();
  ~HostNumbers();
  HostNumbers(const HostNumbers&) = delete;
  HostNumbers& operator=(const HostNumbers&) = delete;
  const char* error() const { return error_; }  // null if the memory could be allocated
  int64_t* numbers() const { return numbers_; }
  int64_t* done() const { return numbers_ + kStructureNumbers; }
  // Waits for all numbers, which kernels in `stream` write. Returns null, or an error.
  const char* wait(void* stream);

 private:
  class Pool;
  int64_t* numbers_;
  const char* error_;
};

}  // namespace dfgnn::cuda
