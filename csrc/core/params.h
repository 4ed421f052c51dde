// What a launcher receives: plain data, no torch, no CUDA.
//
// Words: dst = row = query = the node that aggregates; src = neighbour = key/value.
// N_dst, N_src = numbers of nodes, E = edges, H = heads, D = score dimension per head, Dv = value
// dimension per head. T is the feature type; acc is the accumulation type, float for half, bfloat16
// and float and double for double. Every array is contiguous; "or null" marks optional ones.
#pragma once

#include <cstdint>

namespace dfgnn {

enum class Score : int { additive, dot };
enum class DType : int { f32, f64, f16, bf16 };

// A bounded piece of one row: edges [begin, end) of the CSR. slot < 0: the item is the whole row.
// slot >= 0: the row is split and the item writes its partial result to this slot.
struct Item {
  int32_t row, begin, end, slot;
};

// A split row and its partial results, slots [slot_begin, slot_end), merged in this order.
struct Split {
  int32_t row, slot_begin, slot_end, unused;
};

// One direction of the graph with its plan. Forward: rows are destinations, indices are sources.
// Reverse: rows are sources, indices are destinations. Every row occurs in exactly one item with
// slot < 0, or in one Split; a row without edges has an item with begin == end.
struct Csr {
  const int32_t* indices;  // [E]
  const int32_t* eids;     // [E] position of each edge in the user's order, or null: identity
  const Item* items;       // [num_items]
  const Split* splits;     // [num_splits]
  int64_t num_items;
  int64_t num_splits;
  int64_t num_slots;
  int64_t num_rows;
  int32_t packed;  // CUDA: give each sub-warp its own row instead of a whole warp per row
};

// Options on edges, all in the user's edge order.
struct EdgeOptions {
  const void* bias;     // [E, H] T, or acc if bias_is_acc; or null
  const void* weight;   // [E, weight_heads] T, or acc if weight_is_acc; or null
  const int64_t* seed;  // [1] of the dropout mask; null: no dropout
  int32_t bias_is_acc;
  int32_t weight_is_acc;
  int32_t weight_heads;        // 1 or H
  uint32_t dropout_threshold;  // an edge is dropped when its 32 random bits are below
  double dropout_scale;        // 1 / (1 - p); 0 when p = 1
  bool any() const { return bias || weight || seed; }
};

struct Shape {
  int64_t num_dst, num_src, num_edges;
  int32_t heads;      // H
  int32_t dim;        // D (additive: equal to value_dim)
  int32_t value_dim;  // Dv
};

// out_i = sum_j w_ij m_ij alpha_ij v_j, alpha_ij = exp(s_ij - lse_i), lse_i = log sum_j exp(s_ij)
//   additive: s_ij = LeakyReLU(alpha_src[j] + alpha_dst[i] + b_ij)
//   dot:      s_ij = scale * q_i . k_j + b_ij
// A row without edges (or with all scores -inf) has out = 0 and lse = +inf, so that
// exp(s - lse) = 0.
struct ForwardParams {
  Score score;
  DType dtype;
  Shape shape;
  Csr csr;
  EdgeOptions edge;

  const void* value;      // [N_src, H, Dv] T
  const void* alpha_src;  // additive: [N_src, H] acc
  const void* alpha_dst;  // additive: [N_dst, H] acc, or null: 0
  const void* query;      // dot: [N_dst, H, D] T
  const void* key;        // dot: [N_src, H, D] T
  double negative_slope;  // additive
  double scale;           // dot

  void* out;            // [N_dst, H, Dv] T
  void* lse;            // [N_dst, H] acc
  void* positive;       // additive: [N_dst, H, Dv] T, sum of w m alpha v over edges with z > 0; or null
  void* positive_mass;  // additive: [N_dst, H] acc, sum of alpha over edges with z > 0; or null
  void* attention;      // [E, H] acc, w m alpha in the user's edge order; or null

  // Scratch for split rows.
  void* partial_out;       // [num_slots, H, Dv] acc
  void* partial_positive;  // [num_slots, H, Dv] acc, or null like positive
  void* partial_stats;     // [num_slots, H, 3] acc: max, sum, positive mass
};

// With g = grad_out, gamma = grad_attention, f_ij = w_ij m_ij:
//   delta_i = g_i . (out_i - out_bias) + sum_j attention_ij gamma_ij      (the sum only with grad_attention)
//   dalpha_ij = f_ij (g_i . v_j + gamma_ij)
//   ds_ij = alpha_ij (dalpha_ij - delta_i)
//   additive: dz_ij = ds_ij * (z_ij > 0 ? 1 : negative_slope)
//     grad_value[j] = sum_i f alpha g_i      grad_alpha_src[j] = sum_i dz_ij
//     grad_alpha_dst[i] = sum_j dz_ij
//        = (1 - slope) (g_i . positive_i - delta_i positive_mass_i)  without grad_attention
//     grad_bias_ij = dz_ij
//   dot:
//     grad_query[i] = scale sum_j ds_ij k_j      grad_key[j] = scale sum_i ds_ij q_i
//     grad_value[j] = sum_i f alpha g_i          grad_bias_ij = ds_ij
//   grad_weight_ij = m_ij alpha_ij (g_i . v_j + gamma_ij)
struct BackwardParams {
  Score score;
  DType dtype;
  Shape shape;
  Csr csr;      // rows are destinations
  Csr reverse;  // rows are sources
  EdgeOptions edge;

  const void* value;  // as in ForwardParams
  const void* alpha_src;
  const void* alpha_dst;
  const void* query;
  const void* key;
  double negative_slope;
  double scale;

  const void* out;       // [N_dst, H, Dv] T
  const void* out_bias;  // additive: [H, Dv] T, which out contains; or null
  const void* lse;       // [N_dst, H] acc
  const void* positive;  // additive, when grad_alpha_dst is wanted without grad_attention
  const void* positive_mass;
  const void* attention;       // [E, H] acc, with grad_attention
  const void* grad_out;        // [N_dst, H, Dv] T
  const void* grad_attention;  // [E, H] acc, or null

  void* grad_value;      // [N_src, H, Dv] T
  void* grad_alpha_src;  // additive: [N_src, H] acc
  void* grad_alpha_dst;  // additive: [N_dst, H] acc, or null
  void* grad_query;      // dot: [N_dst, H, D] T
  void* grad_key;        // dot: [N_src, H, D] T
  void* grad_bias;       // [E, H] acc, user's edge order; or null. Additive: never null when
                         // grad_alpha_dst and grad_attention are given (it is then summed by row)
  void* grad_weight;     // [E, H] acc, user's edge order; or null

  // Scratch.
  void* node_stats;     // additive: [N_dst, H, 4] acc: alpha_dst, lse, delta, unused
                        // dot: [N_dst, H, 2] acc: lse, delta
  void* partial_query;  // dot: [csr.num_slots, H, D] acc
  void* partial_key;    // dot: [reverse.num_slots, H, D] acc
  void* partial_value;  // [reverse.num_slots, H, Dv] acc
  void* partial_alpha;  // additive: [reverse.num_slots, H] acc
  void* row_sums;       // [N_dst, H] acc, with grad_attention: sum_j attention_ij gamma_ij
  void* partial_sums;   // [csr.num_slots, H] acc, with grad_attention
};

}  // namespace dfgnn
