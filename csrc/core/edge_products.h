// Products of an edge's two ends with its own features, entry by entry: scores of attention whose edges
// multiply. With x [rows, H, D] of the nodes that aggregate, y [cols, H, D] of the others, f [E, H, D] of the
// edges in the user's order, and T, acc, E, H, D as in params.h:
//   edge_products:           t[e, h, d] = scale x[row(e), h, d] y[col(e), h, d] f[e, h, d],
//                            score[e, h] = sum_d t[e, h, d]
//   edge_products_backward:  with g[e, h, d] = scale (weight[e, h] + edge_weight[e, h, d]), the gradient of
//   t,
//                            out[i, h, d] = sum over the row's edges of g y f,  edge_out = g x y
// The gradient of y is `out` over the other direction's edges, with x and y exchanged.
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
  void* partial_out;        // backward: [num_slots, H, D] acc
};

}  // namespace dfgnn
