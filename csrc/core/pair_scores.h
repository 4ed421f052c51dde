// Two operators for GATv2 whose edges have attributes x_e, projected by W: pair_scores computes the scores,
// pair_sums the sums over edges that their derivatives contain. Derivatives of any order consist of these two
// (docs/internals/second_derivatives.md). Edge e goes from source col(e) to destination row(e). u [cols, H,
// D] are the feature rows of the sources, v [rows, H, D] those of the destinations; E is the number of edges,
// H that of heads, D the size of a head. All arrays but `positive` have one type, float or double.
//   m[e, h, d] = u[col(e), h, d] + v[row(e), h, d] + (W x_e)[h, d],     positive[e, h, d] = m[e, h, d] > 0
//   pair_scores:  score[e, h] = sum_d attn[h, d] sigma[e, h, d] m[e, h, d],
//                 sigma = 1 where positive, else slope: the derivative of LeakyReLU(m), and sigma m is
//                 LeakyReLU(m)
//   pair_sums:    with s[e, h, d] = weight[e, h] sigma[e, h, d],
//                 out[i, h, d] = sum over the row's edges of s,  of_attr[e] = W^T s[e],
//                 of_proj = sum_e s[e] x_e^T
// Where attn is 1 and weight is the gradient of score, out, of_attr and of_proj are the gradients of v, of
// the attributes x and of the projection W. If the caller passes `positive` to pair_scores, both operators
// are linear in every other argument, so that their derivatives are calls of the same two operators. Only
// `positive`, of one byte per element, has E x H x D elements.
#pragma once

#include "params.h"

namespace dfgnn {

// D must be a multiple of this, to which the caller pads heads (dfgnn/engine/edge_scores.py): pair_sums takes
// four columns at a time, whose slopes have 2^4 combinations (cpu/kernels/pair_scores.cpp).
inline constexpr int kPairColumns = 4;

struct PairScoreParams {
  DType dtype;
  int64_t num_rows, num_cols, num_edges;
  int32_t heads, dim, attrs;  // attrs: attributes of an edge
  Csr csr;
  double slope;
  const void* cols;         // u [cols, H, D], or null: 0
  const void* rows;         // v [rows, H, D], or null: 0
  const void* attn;         // [H, D], or null: 1
  const void* attr;         // x [E, attrs], edges in the user's order, or null
  const void* proj;         // W [H D, attrs], or null
  const uint8_t* positive;  // [E, H, D]; if null, it is computed from m and written to new_positive
  uint8_t* new_positive;    // [E, H, D]
  void* score;              // [E, H]
  const void* weight;       // pair_sums: [E, H]
  void* out;                // pair_sums: [rows, H, D]
  void* partial_out;        // pair_sums: [csr.num_slots, H, D], scratch: partial results of split rows
  void* of_attr;            // pair_sums: [E, attrs], or null
  void* of_proj;            // pair_sums: [parts, H D, attrs], partial sums, which the caller adds up; or null
  int64_t parts;            // pair_sums: what pair_parts of the backend returns
};

}  // namespace dfgnn
