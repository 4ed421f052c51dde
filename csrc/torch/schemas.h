// The operators' schemas. GRAPH is the forward CSR and its plan; REVERSE the same by source, which
// only backward needs: forward takes it along for autograd. Plan = [num_slots, packed].
#pragma once

#define DFGNN_GRAPH "Tensor indices, Tensor? eids, Tensor items, Tensor splits, int[] plan"
#define DFGNN_REVERSE \
  "Tensor? rev_indices, Tensor? rev_eids, Tensor? rev_items, Tensor? rev_splits, int[] rev_plan"
#define DFGNN_EDGE "Tensor? edge_bias, Tensor? edge_weight, Tensor? seed"

namespace dfgnn {

inline constexpr const char* kGatForward =
    "gat_forward(Tensor feat, Tensor alpha_src, Tensor? alpha_dst, " DFGNN_EDGE
    ", Tensor? out_bias, " DFGNN_GRAPH ", " DFGNN_REVERSE
    ", int num_dst, float negative_slope, float dropout_p, bool return_attention, bool save_positive)"
    " -> (Tensor out, Tensor lse, Tensor positive, Tensor positive_mass, Tensor attention)";

inline constexpr const char* kGatBackward =
    "gat_backward(Tensor grad_out, Tensor? grad_attention, Tensor feat, Tensor alpha_src, Tensor? "
    "alpha_dst, " DFGNN_EDGE
    ", Tensor? out_bias, Tensor out, Tensor lse, Tensor? positive, Tensor? positive_mass, Tensor? "
    "attention, " DFGNN_GRAPH ", " DFGNN_REVERSE
    ", float negative_slope, float dropout_p, bool need_alpha_dst, bool need_bias, bool need_weight)"
    " -> (Tensor grad_feat, Tensor grad_alpha_src, Tensor grad_alpha_dst, Tensor grad_bias, Tensor "
    "grad_weight)";

inline constexpr const char* kDotForward =
    "dot_forward(Tensor query, Tensor key, Tensor value, " DFGNN_EDGE ", " DFGNN_GRAPH ", " DFGNN_REVERSE
    ", float scale, float dropout_p, bool return_attention) -> (Tensor out, Tensor lse, Tensor attention)";

inline constexpr const char* kDotBackward =
    "dot_backward(Tensor grad_out, Tensor? grad_attention, Tensor query, Tensor key, Tensor "
    "value, " DFGNN_EDGE ", Tensor out, Tensor lse, Tensor? attention, " DFGNN_GRAPH ", " DFGNN_REVERSE
    ", float scale, float dropout_p, bool need_bias, bool need_weight)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_weight)";

}  // namespace dfgnn
