// Both CSRs of a graph from its edges, on the device. Nothing waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/params.h"

namespace dfgnn::cuda {

// Node ids as the user has them, int32 or int64.
struct Ids {
  const void* data;
  int64_t stride;
  int32_t is_int64;
};

// Bounds of items, from the least one on in powers of two, for which degrees are counted by how many items
// and splits there would be.
inline constexpr int kCutBounds = 6, kLeastCut = 32;
// Per direction: the smallest degree that half (99 %) of the rows do not exceed, or kDegreeBins if that is
// not below it; empty rows, the largest degree, the sum of squares; then per bound the items beyond one per
// row, and the split rows.
inline constexpr int kDegreeNumbers = 5 + 2 * kCutBounds;
inline constexpr int kDegreeScratch = kDegreeBins + 4 + 2 * kCutBounds;

struct Degrees {
  const int64_t* indptr;
  int64_t num_rows;
  int64_t* scratch;                 // [kDegreeScratch]
  int64_t* found;                   // [kDegreeNumbers]
  const int32_t* counts = nullptr;  // [num_rows]: in place of what indptr tells
  int64_t* done = nullptr;          // memory of the host: not 0 when `found` is there
};
// Of one or two directions. zeroed: their scratch is 0 already.
const char* degrees(const Degrees* directions, int count, bool zeroed, void* stream);

// numbers: least and largest source, least and largest destination (0, -1 without edges), edges that are
// kept, how often a source and a destination is below the one before it; then those of `Degrees` of the rows
// by destination and by source.
inline constexpr int kEdgeNumbers = 7, kStructureNumbers = kEdgeNumbers + 2 * kDegreeNumbers;
inline constexpr int kStructureParts = 3;  // edges, and either direction's degrees
inline constexpr int kMostEdgeBlocks = 1024;

// Edges src -> dst, sorted by destination, stable, and by source in the order of that, so that neighbours
// rise; or as given, where sources rise and destinations do not. An edge with an end that is out of range is
// dropped. with_loops: so are edges from a node to itself, and i -> i for i < num_loops follows the others.
// An edge's id is its place among those that are kept. There is room for num_given + num_loops edges; what
// lies behind the kept ones is in no row.
struct StructureParams {
  Ids src, dst;
  int64_t num_given, num_loops, num_src, num_dst;
  int64_t room;  // num_given + num_loops
  int32_t with_loops;

  int64_t* numbers;     // [kStructureNumbers]
  int64_t* done;        // [kStructureParts], or null: in memory of the host, not 0 as parts of them are there
  int64_t* indptr[2];   // by destination [num_dst + 1], by source [num_src + 1]
  int32_t* indices[2];  // [room]: the other end
  int32_t* eids[2];     // [room]
  int64_t* edge_map;    // [room]: of an id the place in src and dst, -1 of an appended loop; or null

  // Scratch.
  void* keys[2];    // [2 room] uint64
  void* places[2];  // [2 room] int32
  void* ends;       // [2 room] int32: sources, then destinations, by id
  void* parts;      // [kMostEdgeBlocks, kEdgeNumbers] int64
  void* degrees;    // [2, kDegreeScratch] int64
  void* sorting;    // [sorting_bytes]
  size_t sorting_bytes;
};
// Null, or an error.
const char* sorting_bytes(const StructureParams& params, size_t& bytes);
const char* structure(const StructureParams& params, void* stream);

// `plan_rows` (engine.h) of one or two directions.
const char* plan_directions(const PlanParams* directions, int count, void* stream);

// Memory of the host, into which the device writes `StructureParams::numbers` where somebody waits for them:
// without a copy, and before edges are sorted.
class HostNumbers {
 public:
  HostNumbers();
  ~HostNumbers();
  HostNumbers(const HostNumbers&) = delete;
  HostNumbers& operator=(const HostNumbers&) = delete;
  const char* error() const { return error_; }  // null where there is memory
  int64_t* numbers() const { return numbers_; }
  int64_t* done() const { return numbers_ + kStructureNumbers; }
  // For all of them, which `stream` was given; null, or an error.
  const char* wait(void* stream);

 private:
  class Pool;
  int64_t* numbers_;
  const char* error_;
};

}  // namespace dfgnn::cuda
