// The structure of a graph on the CPU: a CSR from edges, its transposition, the items of a plan.
//
// What the tensor operations of dfgnn/sparse/csr.py and dfgnn/plan give, in a few passes and without their
// cost per operation, which is what a graph of some hundred edges takes its time for. Results do not depend
// on the number of threads. Values are checked as they are read: a bad one stops a function before anything
// is read or written by it.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "engine.h"

namespace dfgnn::cpu {

// Node ids as the user has them, int32 or int64.
struct Ids {
  const void* data;
  int64_t stride;
  bool is_int64;
};

// What one reading of all edges tells; of no edges the ranges are [0, -1].
struct Coo {
  int64_t src_low, src_high, dst_low, dst_high;
  // Of the edges that are kept, followed by loops if they are appended:
  int64_t num_kept;
  bool src_sorted, dst_sorted;
};
// with_loops: edges from a node to itself are dropped, and one for each of the first nodes is appended.
Coo read_coo(const Ids& src, const Ids& dst, int64_t num_edges, bool with_loops);

// Edges cols[e] -> rows[e] sorted by row, stable. Without their loops if edge_map says which are left.
struct CooSort {
  Ids rows, cols;
  int64_t num_kept;         // edges, without loops to be dropped
  int64_t num_loops;        // appended: i -> i of i < num_loops <= num_rows
  int64_t num_rows;         // above all rows[e]
  bool sorted;              // rows rise already: edge ids are not needed
  const int64_t* edge_map;  // [num_kept] which of the given edges, rising; or null: all
  int64_t* indptr;          // [num_rows + 1]
  int32_t* indices;         // [num_kept + num_loops], or null: not wanted
  int32_t* eids;            // [num_kept + num_loops], or null if sorted
};
void sort_coo(const CooSort&, const Parallel&);
// The given edges that are no loops, rising.
void find_kept(const Ids& src, const Ids& dst, int64_t num_edges, int64_t* edge_map);

// The other direction of a CSR; the edges of a new row are in the order of the old CSR.
struct Transposition {
  const int64_t* indptr;   // [num_rows + 1]
  const int32_t* indices;  // [E]
  const int32_t* eids;     // [E], or null: the identity
  int64_t num_rows, num_cols, num_edges;
  int64_t* new_indptr;   // [num_cols + 1]
  int32_t* new_indices;  // [E]
  int32_t* new_eids;     // [E], or null: not wanted
};
// Null, or what is wrong with the CSR.
const char* transpose(const Transposition&, const Parallel&);

// Whether the first edges of up to 16 items are the same in both directions of a call that uses their ids,
// where one direction has none and so claims that they are the identity.
bool same_edges(const BackwardParams&, bool uses_ids);

// Items and splits of rows cut into equal pieces of at most max_edges edges, in the order of the rows.
struct RowPlan {
  int64_t num_items, num_splits, num_slots;
};
// How many there are; num_items = -1 if indptr does not rise from 0 to num_edges.
RowPlan count_items(const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t max_edges);
void make_items(const int64_t* indptr, int64_t num_rows, int64_t max_edges, const RowPlan& plan, Item* items,
                Split* splits, const Parallel&);

}  // namespace dfgnn::cpu
