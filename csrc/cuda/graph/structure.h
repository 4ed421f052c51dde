// Makes both CSRs of a graph from its edges on the device, without waiting.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/params.h"

namespace dfgnn::cuda {

// The user's node ids, int32 or int64.
struct Ids {
  const void* data;
  int64_t stride;
  int32_t is_int64;
};

// For how many maxima of edges per work item the work items are counted: powers of two from kLeastCut on.
inline constexpr int kCutBounds = 6, kLeastCut = 32;
// How many numbers a direction has: the smallest degrees that half and 99 % of the rows do not exceed, or
// kDegreeBins if they are not below that; empty rows; the largest degree; the sum of squares; then for each
// maximum of edges per work item the work items beyond one per row, and the split rows.
inline constexpr int kDegreeNumbers = 5 + 2 * kCutBounds;
inline constexpr int kDegreeScratch = kDegreeBins + 4 + 2 * kCutBounds;

struct Degrees {
  const int64_t* indptr;
  int64_t num_rows;
  int64_t* scratch;                 // [kDegreeScratch]
  int64_t* found;                   // [kDegreeNumbers]
  const int32_t* counts = nullptr;  // [num_rows]: degrees, to be used in place of indptr; or null
  int64_t* done = nullptr;          // host memory that is set when `found` is complete; or null
};
// Counts the degrees of one or two directions. zeroed: their scratch is 0 already.
const char* degrees(const Degrees* directions, int count, bool zeroed, void* stream);

// The numbers are: least and largest source, least and largest destination (0, -1 without edges), the edges
// that are kept, how often a source and a destination is smaller than the one before; then the numbers of
// `Degrees` by destination and by source.
inline constexpr int kEdgeNumbers = 7, kStructureNumbers = kEdgeNumbers + 2 * kDegreeNumbers;
inline constexpr int kStructureParts = 3;  // parts of the numbers: edges', and degrees' of each direction
inline constexpr int kMostEdgeBlocks = 1024;

// Arguments of `structure`, which makes both CSRs of edges src -> dst. One is sorted by destination, stably.
// The other is sorted by source, and within a source by destination, so that indices rise; or in the given
// order, if the given sources rise and the destinations do not. An edge with a node out of range is dropped.
// with_loops: edges from a node to itself are dropped, too, and i -> i for i < num_loops is appended. An
// edge's id is its position among the kept ones. Arrays have room for num_given + num_loops edges; elements
// after the kept edges are in no row.
struct StructureParams {
  Ids src, dst;
  int64_t num_given, num_loops, num_src, num_dst;
  int64_t room;  // num_given + num_loops
  int32_t with_loops;

  int64_t* numbers;     // [kStructureNumbers]
  int64_t* done;        // [kStructureParts] host memory, set when a part of the numbers is complete; or null
  int64_t* indptr[2];   // by destination [num_dst + 1], by source [num_src + 1]
  int32_t* indices[2];  // [room]: the other node of each edge
  int32_t* eids[2];     // [room]
  int64_t* edge_map;    // [room]: id -> position in src and dst, -1 for an appended loop; or null

  // Scratch.
  void* keys[2];    // [2 room] uint64
  void* places[2];  // [2 room] int32
  void* ends;       // [2 room] int32: sources, then destinations, by id
  void* parts;      // [kMostEdgeBlocks, kEdgeNumbers] int64
  void* degrees;    // [2, kDegreeScratch] int64
  void* sorting;    // [sorting_bytes]
  size_t sorting_bytes;
};
// Sets the size of `sorting`. Returns null, or an error.
const char* sorting_bytes(const StructureParams& params, size_t& bytes);
const char* structure(const StructureParams& params, void* stream);

// `plan_rows` (engine.h) for one or two directions.
const char* plan_directions(const PlanParams* directions, int count, void* stream);

// Host memory into which the device writes `StructureParams::numbers` if the host waits for them: it needs no
// copy, and the numbers are ready before edges are sorted.
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
