// Attention among all pairs within blocks of rows: what the kernels get, with the formulas.
//
// The rows of queries and of keys are cut into B blocks: those of block b are offsets[b] up to, but without,
// offsets[b + 1], of the keys by key_offsets. Every query of a block sees every key of the same block, and no
// other. N, M: the numbers of queries and keys. T, acc: as in params.h. i: a query, j: a key of its block.
//
//   forward    s_ij = scale q_i . k_j + b_j      P_ij = exp(s_ij - max_i - log_sum_i)
//              out_i = sum_j P_ij v_j            stats_i = (max_i, log_sum_i)
// A query whose block has no keys, or none but those with b_j = -inf, has out = 0 and stats = (inf, 0).
//
//   backward   delta_i = g_i . out_i - l_i       dS_ij = P_ij (g_i . v_j - delta_i)
//              grad_query_i = scale sum_j dS_ij k_j      grad_key_j = scale sum_i dS_ij q_i
//              grad_value_j = sum_i P_ij g_i             grad_bias_j = sum_i dS_ij
// where g is the gradient of out, and l that of max + log_sum, the logarithm of the sum of exponentials.
//
//   second     of the cotangents a, c, e, f of grad_query, grad_key, grad_value, grad_bias:
//              t_ij = scale (a_i . k_j + q_i . c_j) + f_j        tau_i = sum_j P_ij t_ij
//              u_ij = g_i . e_j     rho_i = sum_j (dS_ij t_ij + P_ij u_ij) - l_i tau_i
//              x_ij = dS_ij (t_ij - tau_i) + P_ij (u_ij - rho_i)       y_ij = P_ij (t_ij - tau_i)
//              grad_grad_out_i = sum_j y_ij v_j + P_ij e_j       grad_grad_log_sum_i = tau_i
//              grad_query_i = scale sum_j x_ij k_j + dS_ij c_j   grad_key_j = scale sum_i x_ij q_i + dS_ij
//              a_i grad_value_j = sum_i y_ij g_i                     grad_bias_j = sum_i x_ij
// (A row's x_ij add up to 0, and its dS_ij to l_i.)
#pragma once

#include "params.h"

namespace dfgnn {

enum class BlockPass : int { forward, backward, second };

struct BlockParams {
  DType dtype;
  int64_t num_rows, num_keys, num_blocks;  // N, M, B
  int32_t heads, dim, value_dim;
  double scale;
  const void *offsets, *key_offsets;  // [B + 1], int64 or int32
  bool offsets_are_long, key_offsets_are_long;
  const void *query, *key, *value;  // [N, H, D], [M, H, D], [M, H, Dv] T
  const void* key_bias;             // [M, H] acc, or null: 0
  void* out;                        // [N, H, Dv] T, a result of forward
  void* stats;                      // [N, H, 2] acc, a result of forward: RowStats
  // Backward and second.
  const void* grad_out;          // [N, H, Dv] T
  const void* grad_log_sum;      // [N, H] acc, or null: 0
  void *grad_query, *grad_key;   // T
  void *grad_value, *grad_bias;  // T, and [M, H] acc or null: not wanted
  void* delta;                   // scratch: [N, H] acc on the CPU, [N, H, 4] on CUDA
  // Second alone.
  const void *of_query, *of_key, *of_value;  // a, c, e, shaped as query, key and value; T
  const void* of_bias;                       // f [M, H] acc, or null: 0
  void *grad_grad_out, *tau;                 // [N, H, Dv] T; [N, H] acc
  void* rho;                                 // scratch: [N, H] acc
  void* items;                               // CUDA, scratch: the windows of queries, then those of keys
};

}  // namespace dfgnn
