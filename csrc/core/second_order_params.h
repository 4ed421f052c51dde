// The parameters of the backward of attention's backward, which docs/internals/second_derivatives.md derives.
#pragma once

#include "params.h"

namespace dfgnn {

// The inputs are those of BackwardParams (params.h) and a cotangent for each of its results: of_x is the
// cotangent of grad_x. `src` stands for alpha_src (additive) or key (dot), `dst` for alpha_dst (additive),
// query (dot) or x_dst (additive_v2). A cotangent that is null is 0. The results grad_x are the gradients of
// the inputs x.
struct SecondParams {
  Score score;
  DType dtype;
  Shape shape;
  Csr csr;      // rows are destinations
  Csr reverse;  // rows are sources. csr.eids, reverse.eids: null only if edges are in the user's order
  EdgeOptions edge;

  const void* value;
  const void* alpha_src;
  const void* alpha_dst;
  const void* query;
  const void* key;
  const void* attn;
  double negative_slope;
  double scale;

  const void* stats;           // [N_dst, H, 2] acc, of forward
  const void* grad_out;        // [N_dst, H, Dv] T
  const void* grad_attention;  // [E, H] acc, or null

  const void* of_value;  // [N_src, H, Dv] T
  const void* of_src;    // additive: [N_src, H] acc; dot: [N_src, H, D] T
  const void* of_dst;    // additive: [N_dst, H] acc; else [N_dst, H, D] T
  const void* of_attn;   // additive_v2: [H, D] acc
  const void* of_bias;   // [E, H] acc, as of_gate and of_weight
  const void* of_gate;
  const void* of_weight;
  const void* of_feat;  // [E, H, D] T

  void* grad_grad_out;        // [N_dst, H, Dv] T
  void* grad_grad_attention;  // [E, H] acc. It and the gradients of edge tensors are null if not needed
  void* grad_value;           // [N_src, H, Dv] T
  void* grad_src;             // additive: [N_src, H] acc; dot: [N_src, H, D] T
  void* grad_dst;             // additive: [N_dst, H] acc, or null without alpha_dst; else [N_dst, H, D] T
  void* grad_attn;            // additive_v2: [attn_parts, H, D] acc: partial sums, in a fixed order
  int64_t attn_parts;         // what second_parts of the backend returns
  void* grad_bias;            // [E, H] acc, as grad_gate and grad_weight
  void* grad_gate;
  void* grad_weight;
  void* grad_feat;  // [E, H, D] T

  // Scratch.
  void* numbers;  // scalars per edge and head, edges in the user's order: on CPUs [E, second_numbers(csr), H]
                  // acc (cpu/second_order.h), on CUDA [E, H, 4] acc
  // CPUs: partial results of split rows. kSecondSums: cpu/second_order.h.
  void* partial_sums;   // [csr.num_slots, kSecondSums, H] acc
  void* partial_query;  // [csr.num_slots, H, D] acc
  void* partial_out;    // [csr.num_slots, H, Dv] acc
  void* partial_key;    // [reverse.num_slots, H, D] acc
  void* partial_value;  // [reverse.num_slots, H, Dv] acc
  // CUDA: [N_dst, 2] and [N_src, 2] int32, where the edges of each row begin and end, found from the work
  // items of csr and reverse; null where each row is one work item.
  void *ranges, *reverse_ranges;
};

}  // namespace dfgnn
