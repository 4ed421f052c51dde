// The operators' schemas.
//
// GRAPH is the forward CSR and its plan. REVERSE is the CSR by source and its plan; only backward needs it,
// and forward takes it for autograd. TILES are the tiles of either direction, if its plan has them. plan =
// [num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges], which Csr in params.h explains: the
// last three are the graph's sizes, with which all other sizes are compared. If some work items add to what
// earlier ones wrote to a row (kJoins in params.h), the number of work items of each source partition
// follows. ENDS are the inputs of a score at source and destination (`Inputs` in attention.h):
//   score 0 (additive): src, dst = alpha_src, alpha_dst;  1 (dot): key, query;  2 (additive_v2): none, x_dst
// flags and need are bits of the enums Flag and Need in attention.h.
//
// Every size, dtype and device is checked, and on the CPU also that work items and splits name existing rows,
// edges and slots. Operators trust the rest, which the Python class Graph has checked: that the values in
// indices are neighbours below num_cols, that eids are a permutation, and that work items, splits and tiles
// together cover every row once. On CUDA they also trust the values in items, splits and tiles, because
// reading them would wait for the device. Missing eids mean that edges are in the user's order, which
// backward on the CPU checks for some edges; calls without edge tensors may omit the eids of both directions.
// Operators that make plans trust the values in indptr and offsets.
#pragma once

#define DFGNN_GRAPH "Tensor indices, Tensor? eids, Tensor items, Tensor splits, int[] plan"
#define DFGNN_REVERSE \
  "Tensor? rev_indices, Tensor? rev_eids, Tensor? rev_items, Tensor? rev_splits, int[] rev_plan"
#define DFGNN_TILES "Tensor? tiles, Tensor? rev_tiles"
#define DFGNN_ENDS "int score, Tensor value, Tensor? src, Tensor? dst, Tensor? attn"
#define DFGNN_EDGE                                                                                    \
  "Tensor? edge_bias, Tensor? edge_gate, Tensor? edge_mask, Tensor? edge_weight, Tensor? edge_feat, " \
  "Tensor? seed, Tensor? out_bias"
#define DFGNN_NUMBERS "float negative_slope, float scale, float dropout_p, int flags"

namespace dfgnn {

inline constexpr const char* kForward =
    "attention_forward(" DFGNN_ENDS ", " DFGNN_EDGE ", " DFGNN_GRAPH ", " DFGNN_REVERSE ", " DFGNN_TILES
    ", int num_dst, " DFGNN_NUMBERS
    ", bool return_attention, bool save_positive)"
    " -> (Tensor out, Tensor stats, Tensor positive, Tensor positive_mass, Tensor attention)";

inline constexpr const char* kBackward =
    "attention_backward(Tensor grad_out, Tensor? grad_attention, " DFGNN_ENDS ", " DFGNN_EDGE
    ", Tensor out, Tensor stats, Tensor? positive, Tensor? positive_mass, Tensor? attention, " DFGNN_GRAPH
    ", " DFGNN_REVERSE ", " DFGNN_TILES ", " DFGNN_NUMBERS
    ", int need)"
    " -> (Tensor grad_value, Tensor grad_src, Tensor grad_dst, Tensor grad_attn, Tensor grad_bias, "
    "Tensor grad_gate, Tensor grad_weight, Tensor grad_feat)";

// The operators of eager calls (attention.h). graph is the number that graph_handle returned; it is valid
// until the library's dfgnn_drop_graph_... is called. `kept` is the tensor with all that backward needs
// beside out. score_terms are the sums over the last dimension of feat [N, H, D] times attn [.., H, D]; gat
// is additive attention with these terms, where the destinations are the first rows of feat. attend_projected
// is dot attention with EdgeAttr (params.h): onto and back are [H, steps, elements of a step]; the result
// `edges` [E, H, 2] is f alpha and grad_raw of params.h if keep_edges, and else scratch. score_terms and gat
// also take feat, grad_out, out and out_bias with heads and columns in one dimension, and so does attend with
// all features if heads is not 0.
inline constexpr const char* kPlanned[] = {
    "graph_handle(" DFGNN_GRAPH ", " DFGNN_REVERSE ", " DFGNN_TILES ") -> int",
    "attend(int graph, int heads, " DFGNN_ENDS ", " DFGNN_EDGE ", " DFGNN_NUMBERS
    ", bool return_attention, bool save_positive) -> (Tensor out, Tensor kept, Tensor? attention)",
    "attend_backward(int graph, int heads, Tensor grad_out, Tensor? grad_attention, " DFGNN_ENDS
    ", " DFGNN_EDGE ", Tensor out, Tensor kept, bool has_positive, Tensor? attention, " DFGNN_NUMBERS
    ", int need)"
    " -> (Tensor grad_value, Tensor? grad_src, Tensor? grad_dst, Tensor? grad_attn, Tensor? grad_bias, "
    "Tensor? grad_gate, Tensor? grad_weight, Tensor? grad_feat)",
    "attend_projected(int graph, Tensor query, Tensor key, Tensor value, Tensor attr, Tensor onto, "
    "Tensor back, Tensor? edge_bias, Tensor? edge_mask, Tensor? edge_weight, Tensor? seed, Tensor? out_bias, "
    "float scale, float dropout_p) -> (Tensor out, Tensor kept, Tensor sums)",
    "attend_projected_backward(int graph, Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor attr, Tensor onto, Tensor back, Tensor? edge_bias, Tensor? edge_mask, Tensor? edge_weight, "
    "Tensor? seed, Tensor? out_bias, Tensor out, Tensor kept, float scale, "
    "float dropout_p, bool keep_edges)"
    " -> (Tensor grad_value, Tensor grad_key, Tensor grad_query, Tensor grad_sums, Tensor edges)",
    "score_terms(Tensor feat, Tensor attn_src, Tensor attn_dst, SymInt num_dst) -> (Tensor src, Tensor dst)",
    "score_terms_backward(Tensor grad_src, Tensor grad_dst, Tensor feat, Tensor attn_src, Tensor attn_dst)"
    " -> (Tensor grad_feat, Tensor grad_attn_src, Tensor grad_attn_dst)",
    "gat(int graph, Tensor feat, Tensor attn_src, Tensor attn_dst, Tensor? seed, Tensor? out_bias, "
    "float negative_slope, float dropout_p, bool train) -> (Tensor out, Tensor kept)",
    "gat_backward(int graph, Tensor grad_out, Tensor feat, Tensor attn_src, Tensor attn_dst, Tensor? seed, "
    "Tensor? out_bias, Tensor out, Tensor kept, float negative_slope, float dropout_p)"
    " -> (Tensor grad_feat, Tensor grad_attn_src, Tensor grad_attn_dst, Tensor? grad_bias)",
};

// The operator of second_order.h. of_x is the cotangent of attention_backward's result grad_x; of_attn is [H,
// D], grad_attn are partial sums [parts, H, D]. need: a bit for each edge tensor whose gradient is needed.
inline constexpr const char* kSecondOrder =
    "attend_second_order(int graph, Tensor grad_out, Tensor? grad_attention, " DFGNN_ENDS ", " DFGNN_EDGE
    ", Tensor stats, Tensor? of_value, Tensor? of_src, Tensor? of_dst, Tensor? of_attn, Tensor? of_bias, "
    "Tensor? of_gate, Tensor? of_weight, Tensor? of_feat, " DFGNN_NUMBERS
    ", int need)"
    " -> (Tensor grad_grad_out, Tensor? grad_grad_attention, Tensor grad_value, Tensor? grad_src, "
    "Tensor? grad_dst, Tensor? grad_attn, Tensor? grad_bias, Tensor? grad_gate, Tensor? grad_weight, "
    "Tensor? grad_feat)";

inline constexpr const char* kSddmm = "sddmm(Tensor row_feat, Tensor feat, " DFGNN_GRAPH ") -> Tensor";
inline constexpr const char* kSpmm =
    "spmm(Tensor weight, Tensor feat, " DFGNN_GRAPH ", int num_rows) -> Tensor";
// The operators of core/edge_terms.h. `rows` has one row for each row of the CSR, which all of its edges use,
// so that no row is gathered per edge.
inline constexpr const char* kEdgeDot =
    "edge_dot(Tensor rows, Tensor attr, " DFGNN_GRAPH ", float scale) -> Tensor";
inline constexpr const char* kEdgeSum =
    "edge_sum(Tensor weight, Tensor attr, " DFGNN_GRAPH ", int num_rows, int width) -> Tensor";
inline constexpr const char* kEdgeOuter =
    "edge_outer(Tensor weight, Tensor rows, " DFGNN_GRAPH ", int dim, float scale) -> Tensor";
// CPU only; core/edge_products.h has the formulas. GRAPH is either direction. `products` is t of the
// formulas. `products` and `grad_feat` are empty if they were not asked for.
inline constexpr const char* kEdgeProducts =
    "edge_products(Tensor rows, Tensor cols, Tensor feat, " DFGNN_GRAPH
    ", float scale, bool with_products) -> (Tensor score, Tensor products)";
inline constexpr const char* kEdgeProductsBackward =
    "edge_products_backward(Tensor weight, Tensor? edge_weight, Tensor rows, Tensor cols, Tensor "
    "feat, " DFGNN_GRAPH ", float scale, bool need_feat) -> (Tensor grad_rows, Tensor grad_feat)";
// CPU only; core/pair_scores.h has the formulas. At least one of cols, rows and proj must be passed. The
// result `positive` is empty if it was passed; of_attr is empty without proj, of_proj without attr.
inline constexpr const char* kPairScores =
    "pair_scores(Tensor? cols, Tensor? rows, Tensor? attn, Tensor? attr, Tensor? proj, Tensor? "
    "positive, " DFGNN_GRAPH
    ", int num_rows, int num_cols, int heads, int dim, float slope) -> (Tensor score, Tensor positive)";
inline constexpr const char* kPairSums =
    "pair_sums(Tensor weight, Tensor positive, Tensor? attr, Tensor? proj, " DFGNN_GRAPH
    ", int num_rows, int num_cols, float slope) -> (Tensor rows, Tensor of_attr, Tensor of_proj)";
// CUDA only: returns grad_proj [H, D, width] of core/edge_terms.h. query and query_sums are x_0 and y_0 of
// the formula there, grad and grad_sums x_1 and y_1.
inline constexpr const char* kProjectionGrad =
    "projection_grad(Tensor query, Tensor query_sums, Tensor grad, Tensor grad_sums, float scale) -> Tensor";
// CUDA only (cuda/attention/merge_parts.h): merges the results of attention over own sources and over fetched
// ones. weight: the share of the latter.
inline constexpr const char* kMergeParts =
    "merge_parts(Tensor own, Tensor own_stats, Tensor halo, Tensor halo_stats)"
    " -> (Tensor out, Tensor stats, Tensor weight)";
// CUDA only: sums of neighbours' rows [n, d] without weights.
inline constexpr const char* kGatherSum =
    "gather_sum(Tensor feat, Tensor indices, Tensor items, Tensor splits, int[] plan, int num_dst) -> Tensor";
// Returns constants that Python repeats, as "name=value;...". tests/functional/test_constants.py compares
// them.
inline constexpr const char* kConstants = "constants() -> str";
// CPU only (cpu_by_index.cpp): softmax and sums over groups of rows. index, int32 or int64 [E], is the group
// of each row, below num_groups. source, of the same type and size, says which row of `rows` the k-th summand
// is; without `source` the k-th summand is the k-th row.
inline constexpr const char* kByIndex[] = {
    "index_softmax(Tensor score, Tensor index, int num_groups, bool masked) -> Tensor",
    "index_softmax_backward(Tensor result, Tensor grad, Tensor index, int num_groups) -> Tensor",
    "index_sum(Tensor rows, Tensor index, int num_groups, Tensor? source=None) -> Tensor",
};
// Attention among all pairs within blocks (core/blocks.h has the formulas). key_bias and the gradients of it
// are [M, H] in the accumulation type. `second` is the backward of backward, of the cotangents of its
// results.
#define DFGNN_BLOCKS \
  "Tensor query, Tensor key, Tensor value, Tensor offsets, Tensor key_offsets, Tensor? key_bias"
inline constexpr const char* kBlocks[] = {
    "block_attention_forward(" DFGNN_BLOCKS ", float scale) -> (Tensor out, Tensor stats)",
    "block_attention_backward(Tensor grad_out, Tensor? grad_log_sum, " DFGNN_BLOCKS
    ", Tensor out, Tensor stats, float scale, bool need_bias)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
    "block_attention_second(Tensor grad_out, Tensor? grad_log_sum, " DFGNN_BLOCKS
    ", Tensor out, Tensor stats, Tensor of_query, Tensor of_key, Tensor of_value, Tensor? of_bias, float "
    "scale, "
    "bool need_bias) -> (Tensor grad_grad_out, Tensor grad_grad_log_sum, Tensor grad_query, Tensor grad_key, "
    "Tensor grad_value, Tensor grad_bias)",
};
// CPU only: these make CSRs and plans. cpu_structure.cpp describes arguments and results.
inline constexpr const char* kCooToCsr =
    "coo_to_csr(Tensor src, Tensor? dst, int num_src, int num_dst, bool with_loops, int max_edges, "
    "bool backward) -> (int graph, int num_edges, Tensor packed, Tensor? edge_map, Tensor? indptr, "
    "Tensor? indices, Tensor? eids)";
inline constexpr const char* kTransposeCsr =
    "transpose_csr(Tensor indptr, Tensor indices, Tensor? eids, int num_cols, bool need_eids)"
    " -> (Tensor indptr, Tensor indices, Tensor eids)";
inline constexpr const char* kPlanGraph =
    "plan_graph(Tensor? indptr, Tensor? indices, Tensor? eids, Tensor? rev_indptr, Tensor? rev_indices, "
    "Tensor? rev_eids, int num_dst, int num_src, int max_edges, bool backward)"
    " -> (int graph, int num_slots, int rev_num_slots, Tensor? made_indptr, Tensor? made_indices, "
    "Tensor? made_eids, Tensor items, Tensor splits, Tensor? rev_items, Tensor? rev_splits)";
// CUDA only: makes both CSRs of edges. StructureParams in cuda/graph/structure.h has arguments and results.
inline constexpr const char* kStructure =
    "structure(Tensor src, Tensor dst, int num_src, int num_dst, bool with_loops)"
    " -> (Tensor numbers, Tensor indptr, Tensor indices, Tensor eids, Tensor? edge_map, "
    "Tensor rev_indptr, Tensor rev_indices, Tensor rev_eids)";
// CUDA only: as `structure`, but it waits for the device and returns the numbers as a list on the host.
inline constexpr const char* kStructureRead =
    "structure_read(Tensor src, Tensor dst, int num_src, int num_dst, bool with_loops)"
    " -> (int[] numbers, Tensor indptr, Tensor indices, Tensor eids, Tensor? edge_map, "
    "Tensor rev_indptr, Tensor rev_indices, Tensor rev_eids)";
// These make plans, or count what a planner must know; PlanParams in params.h and engine.h describe the
// results. They are for CUDA only, except plan_rows.
inline constexpr const char* kPlanRows =
    "plan_rows(Tensor indptr, Tensor indices, int num_cols, int parts, int max_edges, bool by_length)"
    " -> (Tensor items, Tensor splits, Tensor counts)";
// CUDA only: cut_rows makes work items and splits in exact numbers. more and num_splits are the work items
// beyond one per row and the split rows, as `degrees` counts them. cut_graph does this for a graph, one
// direction or both, and graph_handle (cuda.cpp describes `how`).
inline constexpr const char* kCutRows =
    "cut_rows(Tensor indptr, Tensor indices, int max_edges, bool by_length, int more, int num_splits)"
    " -> (Tensor items, Tensor splits)";
inline constexpr const char* kCutGraph =
    "cut_graph(Tensor indptr, Tensor indices, Tensor? eids, int[] how, Tensor? rev_indptr, "
    "Tensor? rev_indices, Tensor? rev_eids, int[] rev_how)"
    " -> (int graph, Tensor items, Tensor splits, Tensor? rev_items, Tensor? rev_splits)";
inline constexpr const char* kPlanWindows =
    "plan_windows(Tensor offsets, int num_chunks, int num_rows, int max_chunks)"
    " -> (Tensor items, Tensor splits, Tensor counts)";
inline constexpr const char* kDegrees = "degrees(Tensor indptr) -> Tensor";
inline constexpr const char* kFalls = "falls(Tensor indptr, Tensor indices) -> Tensor";
inline constexpr const char* kSharing =
    "sharing(Tensor indptr, Tensor indices, int step, int most) -> Tensor";
inline constexpr const char* kTileCounts = "tile_counts(Tensor indptr, Tensor indices) -> Tensor";
inline constexpr const char* kTiles =
    "tiles(Tensor indptr, Tensor indices, Tensor offsets, int num_chunks) -> (Tensor chunks, Tensor twice)";
inline constexpr const char* kPlanning[] = {kCooToCsr,  kTransposeCsr,  kPlanGraph, kPlanRows,   kPlanWindows,
                                            kDegrees,   kFalls,         kSharing,   kTileCounts, kTiles,
                                            kStructure, kStructureRead, kCutRows,   kCutGraph};

}  // namespace dfgnn
