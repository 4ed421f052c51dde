// Score terms of additive attention from projected features and a layer's attention vectors, and their
// gradients: a fused layer computes them around the attention kernels.
#pragma once

#include "params.h"

namespace dfgnn {

// terms[0][n, h] = sum_d feat[n, h, d] vectors[0][h, d]    for n < num_rows[0]: alpha_src
// terms[1][n, h] = sum_d feat[n, h, d] vectors[1][h, d]    for n < num_rows[1]: alpha_dst
struct TermsParams {
  DType dtype;          // T, of feat
  int64_t num_rows[2];  // num_rows[1] <= num_rows[0]
  int32_t heads;
  int32_t dim;              // elements of a head of feat in memory, padding included
  int32_t vector_dim;       // elements of a head of the vectors, <= dim; further elements of feat are padding
  int32_t vectors_are_acc;  // whether the vectors have the type acc; else they have T
  const void* feat;         // [num_rows[0], H, dim] T
  const void* vectors[2];   // [H, vector_dim] T or acc
  void* terms[2];           // [num_rows[k], H] acc
};

// How many sums TermsBackwardParams::sums has, and how many partial sums of each there are at most.
inline constexpr int kTermsSums = 3, kMostTermsParts = 512;

// grad_feat[n, h, d] += sum_k grad_terms[k][n, h] vectors[k][h, d]
// sums[k][h, d] = sum_n grad_terms[k][n, h] feat[n, h, d], k < 2;  sums[2][h, d] = sum_n grad_out[n, h, d]
struct TermsBackwardParams {
  TermsParams of;             // the arguments of the forward pass; backward does not read of.terms
  const void* grad_terms[2];  // [num_rows[k], H] acc
  const void* grad_out;       // [num_rows[1], H, dim] T, or null
  void* grad_feat;            // [num_rows[0], H, dim] T
  void* sums[kTermsSums];  // [H, vector_dim], the type of the vectors. sums[2]: T, or null without grad_out
  void* partial;           // [parts, kTermsSums, H, dim] acc: partial sums, added in a fixed order
  int64_t parts;           // what terms_parts of the backend returns
};

}  // namespace dfgnn
