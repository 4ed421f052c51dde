// The structure of a graph on the CPU: sorting edges into a CSR, transposing a CSR, and the items of a plan.
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

// What one pass over all edges finds out. Without edges the ranges are [0, -1].
struct Coo {
  int64_t src_low, src_high, dst_low, dst_high;
  // These describe the edges that remain, followed by the loops if loops are appended.
  int64_t num_kept;
  bool src_sorted, dst_sorted;
};
// with_loops: self loops are dropped, and one is appended for each of the first nodes.
Coo read_coo(const Ids& src, const Ids& dst, int64_t num_edges, bool with_loops);

// The arguments of sort_coo, which sorts edges cols[e] -> rows[e] by row, stably.
struct CooSort {
  Ids rows, cols;
  int64_t num_kept;         // edges without dropped self loops
  int64_t num_loops;        // appended: i -> i for i < num_loops <= num_rows
  int64_t num_rows;         // above all rows[e]
  bool sorted;              // the rows are ascending already, so that no edge ids are needed
  const int64_t* edge_map;  // [num_kept], ascending: the edges that are not self loops; null: all edges
  int64_t* indptr;          // [num_rows + 1]
  int32_t* indices;         // [num_kept + num_loops], or null
  int32_t* eids;            // [num_kept + num_loops], or null if sorted
};
void sort_coo(const CooSort&, const Parallel&);
// Writes the edges that are no self loops to edge_map, in ascending order.
void find_kept(const Ids& src, const Ids& dst, int64_t num_edges, int64_t* edge_map);

// The arguments of transpose, which makes the other direction of a CSR. The edges of a new row are in the
// order of the old CSR.
struct Transposition {
  const int64_t* indptr;   // [num_rows + 1]
  const int32_t* indices;  // [E]
  const int32_t* eids;     // [E], or null: the identity
  int64_t num_rows, num_cols, num_edges;
  int64_t* new_indptr;   // [num_cols + 1]
  int32_t* new_indices;  // [E]
  int32_t* new_eids;     // [E], or null
};
// Returns null, or an error message.
const char* transpose(const Transposition&, const Parallel&);

// Whether csr and reverse, the two directions of a graph, agree about edge ids, or none are used. In a
// direction without ids, an edge's id is its position: the other direction's ids must lead to the same edges.
// Checks the first edge of each of up to 16 items.
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
