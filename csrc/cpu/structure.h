// The structure of a graph on the CPU: sorting edges into a CSR, transposing a CSR, and the work items of a
// plan (core/params.h). "Edge ids" are positions in the user's order of edges.
//
// The results equal those of the tensor operations in dfgnn/sparse/csr.py and dfgnn/plan, without the cost
// per operation that dominates on graphs of a few hundred edges. They do not depend on the number of threads.
// Each value is checked before it is used as an index.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "engine.h"

namespace dfgnn::cpu {

// Node ids as the user passed them, int32 or int64.
struct Ids {
  const void* data;
  int64_t stride;
  bool is_int64;
};

// What one pass over all edges finds out.
struct Coo {
  int64_t src_low, src_high, dst_low, dst_high;  // the ranges of ids of both ends; [0, -1] without edges
  int64_t num_kept;                              // number of edges, without those that are dropped
  // Whether the ids of this end ascend over the edges that are kept, followed by the appended self loops.
  bool src_sorted, dst_sorted;
};
// with_loops: whether the caller will drop the edges' self loops and append a self loop of each of the first
// nodes (CooSort).
Coo read_coo(const Ids& src, const Ids& dst, int64_t num_edges, bool with_loops);

// The arguments of sort_coo, which sorts edges cols[e] -> rows[e] by row, stably.
struct CooSort {
  Ids rows, cols;
  int64_t num_kept;         // number of edges, without self loops that are dropped
  int64_t num_loops;        // number of self loops i -> i, i < num_loops <= num_rows, that end their rows
  int64_t num_rows;         // above all rows[e]
  bool sorted;              // whether rows[e] ascend already, so that no edge ids are needed
  const int64_t* edge_map;  // [num_kept], ascending: the edges that are kept; or null: all edges
  int64_t* indptr;          // [num_rows + 1]
  int32_t* indices;         // [num_kept + num_loops], or null
  int32_t* eids;            // [num_kept + num_loops], or null if sorted
};
void sort_coo(const CooSort&, const Parallel&);
// Writes to edge_map, in ascending order, which edges are no self loops.
void find_kept(const Ids& src, const Ids& dst, int64_t num_edges, int64_t* edge_map);

// The arguments of transpose, which makes the other direction of a CSR. The edges of a row of the result have
// the order that they have in the given CSR.
struct Transposition {
  const int64_t* indptr;   // [num_rows + 1]
  const int32_t* indices;  // [E]
  const int32_t* eids;     // [E], or null: the identity
  int64_t num_rows, num_cols, num_edges;
  int64_t* new_indptr;   // [num_cols + 1]
  int32_t* new_indices;  // [E]
  int32_t* new_eids;     // [E], or null
};
// Returns null, or an error message if indptr or indices have impossible values.
const char* transpose(const Transposition&, const Parallel&);

// Whether p.csr and p.reverse, the two directions of a graph, agree about edge ids, or no ids are used. In a
// direction without ids, an edge's id is its position: the other direction's ids must lead to the same edges.
// Checks only the first edge of each of up to 16 work items. uses_ids: whether the caller uses ids apart from
// the options on edges and the gradient of the attention, which p has.
bool same_edges(const BackwardParams&, bool uses_ids);

// The sizes of a plan whose items are rows, or equal chunks of rows of at most max_edges edges, in the order
// of rows.
struct RowPlan {
  int64_t num_items, num_splits, num_slots;
};
// Returns the sizes of this plan; num_items = -1 if indptr does not ascend from 0 to num_edges.
RowPlan count_items(const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t max_edges);
// Writes the plan's items and splits.
void make_items(const int64_t* indptr, int64_t num_rows, int64_t max_edges, const RowPlan& plan, Item* items,
                Split* splits, const Parallel&);

}  // namespace dfgnn::cpu
