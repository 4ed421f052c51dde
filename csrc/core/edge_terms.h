// Products of low-dimensional edge features with rows of nodes. Edge projections that are moved to the nodes
// (EdgeAttr in params.h) consist of them. attr [E, d] holds the features in the user's edge order, and
// d <= width; r [N, H, width] holds a row for each of the N rows of the CSR, and row(e) is that of edge e. T,
// acc, E and H are defined in params.h.
//   edge_dot:    s[e, h] = scale sum_c r[row(e), h, c] attr[e, c]
//   edge_sum:    r[i, h, c] = sum over the row's edges e of w[e, h] attr[e, c]; 0 for c >= d
//   edge_outer:  attr[e, c] = scale sum_h w[e, h] r[row(e), h, c]
// Each is linear in both arguments, and the gradients of one are the other two.
#pragma once

#include "params.h"

namespace dfgnn {

// d is `dim`, r is `rows` or `out`, and w is `weight`.
struct EdgeTermParams {
  DType dtype;
  int64_t num_rows, num_edges;
  int32_t heads, dim, width;
  Csr csr;
  double scale;
  const void* attr;    // [E, d] T
  const void* weight;  // [E, H] acc
  const void* rows;    // [N, H, width] T, entry (i, h, c) at i * row_stride + h * head_stride + c
  int64_t row_stride, head_stride;
  void* edge_out;     // edge_dot: [E, H] acc; edge_outer: [E, d] T
  void* out;          // edge_sum: [N, H, width] T
  void* partial_out;  // edge_sum: [csr.num_slots, H, width] acc, scratch: partial results of split rows
};

// The gradient of a projection W [H, D, width] that was moved to the nodes (EdgeAttr in params.h) is a sum
// over the nodes i. Each node has two feature rows x_k [N, H, D] and two sums of edge features y_k [N, H,
// width]: x_0 is the query, y_0 the sum b of EdgeAttr, x_1 is grad_out, and y_1 the sum a.
//   grad_proj[h] = sum_i scale x_0[i, h] y_0[i, h]^T + x_1[i, h] y_1[i, h]^T
struct ProjectionGradParams {
  DType dtype;  // not f64
  int64_t num_rows;
  int32_t heads, dim, width;  // dim elements, and width elements, take a multiple of 16 bytes
  double scale;
  const void *rows[2], *sums[2];  // x_k, y_k: T
  void* partial;                  // [parts, H, D, width] acc: partial sums, added in a fixed order
  int64_t parts;                  // what projection_parts (cuda/edges/edge_terms.h) returns
  void* out;                      // [H, D, width] T
};

}  // namespace dfgnn
