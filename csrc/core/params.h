// What a launcher receives: plain data, no torch, no CUDA.
//
// Words: dst = row = query = the node that aggregates; src = neighbour = key/value.
// N_dst, N_src = numbers of nodes, E = edges, H = heads, D = score dimension per head, Dv = value
// dimension per head. T is the feature type; acc is the accumulation type, float for half, bfloat16
// and float and double for double. Every array is contiguous; "or null" marks optional ones.
#pragma once

#include <cstdint>

namespace dfgnn {

enum class Score : int { additive, dot, additive_v2 };
enum class DType : int { f32, f64, f16, bf16 };

// A bounded piece of one row: edges [begin, end) of the CSR. slot = kWhole: the item is the whole row, or the
// first piece of a row whose others join it. slot >= 0: the row is split and the item writes its partial
// result to this slot.
struct Item {
  int32_t row, begin, end, slot;
};
// kJoins: the item's result is added to what an earlier part of the items (Csr) left in the row.
inline constexpr int32_t kWhole = -1, kJoins = -2;
inline constexpr int kMostParts = 16;
// Bytes of a head that a warp holds at most: wider ones are worked on in chunks, where no item joins a row.
inline constexpr int kWideBytes = 2048;

// A split row and its partial results, every stride-th of the slots [slot_begin, slot_end), merged in this
// order.
struct Split {
  int32_t row, slot_begin, slot_end, stride;
};

// Tiles (CUDA): a window is kTileRows consecutive rows, and the neighbours that they have, each once, are cut
// into chunks of kTileCols columns. A chunk is kTileInts numbers: its columns, filled up with the first, then
// a mask per row, whose bit c says that the row has an edge to column c.
inline constexpr int kTileRows = 64, kTileCols = 32, kTileInts = kTileCols + kTileRows;

// One direction of the graph with its plan. Forward: rows are destinations, indices are sources.
// Reverse: rows are sources, indices are destinations. Every row occurs in exactly one item with
// slot = kWhole, or in one Split; a row without edges has an item with begin == end.
struct Csr {
  const int32_t* indices;  // [E]
  const int32_t* eids;     // [E] position of each edge in the user's order, or null: identity
  const Item* items;       // [num_items]
  const Split* splits;     // [num_splits]
  const int32_t* tiles;    // [chunks, kTileInts], or null: work on rows. With tiles an item is a piece of a
                           // window: row is its first, [begin, end) its chunks, slot that of the first row
  int64_t num_items;
  int64_t num_splits;
  int64_t num_slots;
  int64_t num_rows;
  int32_t packed;  // CUDA: give each sub-warp its own row instead of a whole warp per row
  int32_t
      heads_per_tile;  // CUDA: at most so many heads at a time, over all rows; 0: as many as a warp has lanes
  // CUDA: parts of the items, one launch each, in this order; 0: all items are one part. Of a row with items
  // that join it a part has one item.
  int32_t num_parts;
  int32_t part_items[kMostParts];
};

// Of dropout's random numbers (math.h): the fewest that pass all tests of BigCrush.
inline constexpr int kPhiloxRounds = 7;

// Options on edges, all in the user's edge order. From what the family computes (raw) to the score:
//   z = gate * raw (+ bias)      s = LeakyReLU(z) (+ bias)      s = -inf where mask is false
struct EdgeOptions {
  const void* bias;     // [E, H] T, or acc if bias_is_acc; or null
  const void* gate;     // [E, gate_heads] T, or acc if gate_is_acc; or null: 1
  const uint8_t* mask;  // [E, mask_heads] 0 or 1; or null: 1
  const void* weight;   // [E, weight_heads] T, or acc if weight_is_acc; or null: 1
  const void* feat;     // [E, H, D] T, or null; added to the key, to the value, or to both
  const int64_t* seed;  // [1] of the dropout mask; null: no dropout
  int32_t bias_is_acc, gate_is_acc, weight_is_acc;
  int32_t gate_heads, mask_heads, weight_heads;  // 1 or H
  int32_t bias_after;                            // the bias is added behind the LeakyReLU
  int32_t feat_in_key, feat_in_value;
  uint32_t dropout_threshold;  // an edge is dropped when its 32 random bits are below
  double dropout_scale;        // 1 / (1 - p); 0 when p = 1
  bool scalars() const { return bias || gate || mask || weight || seed; }
  bool any() const { return feat || scalars(); }
};

// Features x_ij of the edges that are projected at the nodes (dot, on CUDA in 16 bits), e_ij = W x_ij:
//   raw_ij = scale (q_i . k_j + r_i . x_ij), r_i = W^T q_i      out_i += W a_i, a_i = sum_j w m alpha x_ij
// Backward, with s_i = W^T g_i:
//   dalpha_ij = f_ij (g_i . v_j + s_i . x_ij)      grad_query_i += scale W b_i, b_i = sum_j draw_ij x_ij
struct EdgeAttr {
  const void* x;  // [E, dim] T, user's order; or null
  int32_t dim, width;
  // W [H, cols, feats] T, filled up with zeros to the columns that a head's lanes have and to a multiple of
  // 16 features, in the order in which registers take it (dfgnn/engine/edge_projection.py):
  const void* onto;    // column = (block, t 4, s 2, j 2, e 2), feature = (step, i 2, g 8):
                       //   [H, step, block, s, g, t, j, i, e]
  const void* back;    // column = (group, g 8, word, i 2), feature = (step, t 4, j 2, e 2):
                       //   [H, group, step, word, g, t, j, i, e]
  void* sums;          // a, or in backward b: [N_dst, H, width] T, 0 behind dim; or null
  void* partial;       // [csr.num_slots, H, width] acc
  int32_t keep_edges;  // backward leaves f alpha and draw in `handed`
};

struct Shape {
  int64_t num_dst, num_src, num_edges;
  int32_t heads;      // H
  int32_t dim;        // D (additive: equal to value_dim)
  int32_t value_dim;  // Dv
};

// out_i = sum_j w_ij m_ij alpha_ij (v_j + e_ij), alpha_ij = exp((s_ij - max_i) - log_sum_i),
// max_i = max_j s_ij, log_sum_i = log sum_j exp(s_ij - max_i)
// with s_ij of EdgeOptions and e_ij its feat, where feat_in_key (below) or feat_in_value say so;
//   additive:    raw_ij = alpha_src[j] + alpha_dst[i]; feat never in the key
//   dot:         raw_ij = scale * q_i . (k_j + e_ij)
//   additive_v2: raw_ij = attn . LeakyReLU(v_j + x_dst[i] + e_ij); x_dst is `query`, feat never in the value;
//                negative_slope is the inner one, and the LeakyReLU of EdgeOptions is the identity
// A row without mass (no edges, or all scores -inf) has out = 0, max = +inf and log_sum = 0, so that
// alpha = 0. max + log_sum as one number would lose log_sum where max is large.
struct ForwardParams {
  Score score;
  DType dtype;
  Shape shape;
  Csr csr;
  EdgeOptions edge;

  const void* value;      // [N_src, H, Dv] T
  const void* alpha_src;  // additive: [N_src, H] acc
  const void* alpha_dst;  // additive: [N_dst, H] acc, or null: 0
  const void* query;      // dot, additive_v2: [N_dst, H, D] T
  const void* key;        // dot: [N_src, H, D] T
  const void* attn;       // additive_v2: [H, D] T
  double negative_slope;  // of the LeakyReLU; 1: none
  double scale;           // dot

  const void* out_bias;  // [H, Dv] T, added to out; or null

  void* out;            // [N_dst, H, Dv] T
  void* stats;          // [N_dst, H, 2] acc: max, log_sum
  void* positive;       // additive: [N_dst, H, Dv] T, sum of w m alpha v over edges with z > 0; or null
  void* positive_mass;  // additive: [N_dst, H] acc, sum of alpha over edges with z > 0; or null
  void* attention;      // [E, H] acc, w m alpha in the user's edge order; or null

  // Scratch for split rows.
  void* partial_out;       // [num_slots, H, Dv] acc
  void* partial_positive;  // [num_slots, H, Dv] acc, or null like positive
  void* partial_stats;     // [num_slots, H, 3] acc: max, sum, positive mass

  EdgeAttr attr;
};

// Runs that partial sums are added up in first, and how many are added up at once.
inline constexpr int kAttnSums = 64, kAttnAtOnce = 512;

// With g = grad_out, gamma = grad_attention, f_ij = w_ij m_ij, L' the derivative of LeakyReLU:
//   delta_i = g_i . (out_i - out_bias) + sum_j attention_ij gamma_ij      (the sum only with attention:
//   without
//        it, out contains all that the weights went into, which got the gradient g, too)
//   dalpha_ij = f_ij (g_i . (v_j + e_ij) + gamma_ij)
//   ds_ij = alpha_ij (dalpha_ij - delta_i)      dz_ij = ds_ij L'(z_ij)      draw_ij = gate_ij dz_ij
//   grad_value[j] = sum_i f alpha g_i
//   additive:
//     grad_alpha_src[j] = sum_i draw_ij
//     grad_alpha_dst[i] = sum_j draw_ij
//        = (1 - slope) (g_i . positive_i - delta_i positive_mass_i)  without grad_attention and gate
//   dot:
//     grad_query[i] = scale sum_j draw_ij (k_j + e_ij)      grad_key[j] = scale sum_i draw_ij q_i
//   additive_v2, with u = v_j + x_dst[i] + e_ij:
//     grad_query[i] = attn sum_j draw_ij L'(u)      grad_value[j] += attn sum_i draw_ij L'(u)
//     grad_attn = sum_ij draw_ij LeakyReLU(u)
//   grad_bias_ij = dz_ij, or ds_ij with bias_after      grad_gate_ij = dz_ij raw_ij
//   grad_weight_ij = m_ij alpha_ij (g_i . (v_j + e_ij) + gamma_ij)
//   grad_feat_ij = f_ij alpha_ij g_i (in the value) + draw_ij scale q_i, or draw_ij attn L'(u) (in the key)
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
  const void* attn;
  double negative_slope;
  double scale;

  const void* out;       // [N_dst, H, Dv] T
  const void* out_bias;  // [H, Dv] T, which out contains; or null
  const void* stats;     // [N_dst, H, 2] acc, of forward
  int32_t part_of_rows;  // csr has but some edges of the rows that out and stats are of
  const void* positive;  // additive, when grad_alpha_dst is wanted without grad_attention and gate
  const void* positive_mass;
  const void* attention;       // [E, H] acc, or null; only with grad_attention
  const void* grad_out;        // [N_dst, H, Dv] T
  const void* grad_attention;  // [E, H] acc, or null

  void* grad_value;      // [N_src, H, Dv] T
  void* grad_alpha_src;  // additive: [N_src, H] acc
  void* grad_alpha_dst;  // additive: [N_dst, H] acc, or null
  void* grad_query;      // dot, additive_v2: [N_dst, H, D] T
  void* grad_key;        // dot: [N_src, H, D] T
  void* grad_attn;       // additive_v2: [attn_parts, H, D] acc: partial sums, in a fixed order
  int64_t attn_parts;    // attention_parts of the backend
  void* attn_total;      // CUDA: [H, D] acc: their sum
  void* attn_sums;       // CUDA: [kAttnSums, H, D] acc, scratch for more than kAttnAtOnce parts
  void* grad_bias;       // [E, H] acc, user's edge order; or null
  void* grad_gate;       // [E, H] acc, user's edge order; or null
  void* grad_weight;     // [E, H] acc, user's edge order; or null
  void* grad_feat;       // [E, H, D] T, user's edge order; or null
  void* grad_raw;  // additive: [E, H] acc, draw_ij in the user's edge order, which is summed by row: where
                   // grad_alpha_dst is wanted with grad_attention or gate; or null

  // Scratch.
  void* node_stats;  // [N_dst, H, 4] acc: alpha_dst or slope attn . x_dst (dot: unused), max, log_sum, delta
                     // or, with handed, [N_dst, H]: what is left of delta behind its first guess
  void* partial_query;  // dot, additive_v2: [csr.num_slots, H, D] acc
  void* partial_key;    // dot: [reverse.num_slots, H, D] acc
  void* partial_value;  // [reverse.num_slots, H, Dv] acc
  void* partial_alpha;  // additive: [reverse.num_slots, H] acc
  void* row_sums;       // [N_dst, H] acc, with attention: sum_j attention_ij gamma_ij
  void* partial_sums;   // [csr.num_slots, H] acc, with attention or grad_raw
  // dot on CUDA: [E, H, 2] acc, user's order: alpha and ds from the pass over destinations to the one over
  // sources; or null. node_stats is [N_dst, H] then.
  void* handed;

  EdgeAttr attr;
};

// sddmm: edge_[eid, h] = row_feat[i, h] . feat[j, h];  spmm: out[i, h] = sum_j edge_[eid, h] feat[j, h], over
// the edges of row i with neighbours j. Both directions of a graph serve as `csr`.
struct ProductParams {
  DType dtype;
  Shape shape;  // num_dst rows, num_src neighbours; dim = value_dim
  Csr csr;
  const void* feat;      // [N_src, H, D] T
  const void* row_feat;  // sddmm: [N_dst, H, D] T
  const void* weight;    // spmm: [E, H] T, user's edge order
  void* edge_out;        // sddmm: [E, H] T, user's edge order
  void* out;             // spmm: [N_dst, H, D] T
  void* partial_out;     // spmm: [num_slots, H, D] acc
};

// Items and splits of a plan, made on the device. In row order: the pieces of split rows, but for each row's
// first one, then all rows; or by falling length, and with several parts, part after part. The order follows
// from the rows alone. There is room for as many as there can be: items that are not needed have row < 0 and
// lie ahead of all others in row order, else behind them; splits that are not needed have no slots. exact: as
// many as there are.
struct PlanParams {
  const int64_t* indptr;  // [num_rows + 1]
  int64_t num_rows;
  int32_t max_edges;
  int32_t by_length;
  int32_t parts;           // rows are cut where their neighbours pass from one part of all to the next
  const int32_t* indices;  // [E], with parts > 1: of columns below num_cols, rising in every row
  int64_t num_cols;
  int32_t stride;    // 1; kTileRows: a row of indptr is a window of so many rows, and its edges are chunks
  int64_t last_row;  // rows there are, windows in full or not
  int32_t exact;
  Item* items;  // [num_items]: num_rows + front
  int64_t num_items;
  int64_t front;  // >= items beyond one per row
  Split* splits;  // [num_splits]
  int64_t num_splits;
  int32_t* counts;  // [plan_counts]: items beyond one per row, slots and splits, in strides; then scratch
};
inline constexpr int kPlanBuckets = 128;

// Degrees that are counted one by one (DegreeStats in dfgnn/sparse/csr.py).
inline constexpr int kDegreeBins = 2048;

}  // namespace dfgnn
