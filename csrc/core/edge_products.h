// Products, entry by entry, of the rows of an edge's two nodes with the edge's own features: the scores of
// attention whose edge features multiply. row(e) and col(e) are the row of edge e in the CSR, the node that
// aggregates, and its neighbour: x [rows, H, D] belongs to the rows, y [cols, H, D] to the neighbours, f [E,
// H, D] to the edges in the user's order. T, acc, E, H and D are defined in params.h.
//   edge_products:           t[e, h, d] = scale x[row(e), h, d] y[col(e), h, d] f[e, h, d],
//                            score[e, h] = sum_d t[e, h, d]
//   edge_products_backward:  weight is the gradient of score and edge_weight that of t;
//                            g[e, h, d] = scale (weight[e, h] + edge_weight[e, h, d]),
//                            out[i, h, d] = sum over the row's edges of g y f, the gradient of x,
//                            edge_out = g x y, the gradient of f
// The gradient of y is `out` computed over the other direction's edges, with x and y exchanged.
#pragma once

#include "params.h"

namespace dfgnn {

struct EdgeProductParams {
  DType dtype;
  int64_t num_rows, num_cols, num_edges;
  int32_t heads, dim;
  Csr csr;
  double scale;
  const void* rows;         // x [rows, H, D] T
  const void* cols;         // y [cols, H, D] T
  const void* feat;         // f [E, H, D] T
  const void* weight;       // backward: [E, H] acc
  const void* edge_weight;  // backward: [E, H, D] T, or null
  void* score;              // [E, H] acc
  void* edge_out;           // t or the gradient of f, [E, H, D] T, or null
  void* out;                // backward: [rows, H, D] T
  void* partial_out;        // backward: [csr.num_slots, H, D] acc, scratch: partial results of split rows
};

}  // namespace dfgnn
