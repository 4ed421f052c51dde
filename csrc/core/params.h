// The structs that are passed to kernels, with the formulas of forward and backward. They are plain data,
// without types of torch or CUDA.
//
// A destination (dst) is a node that aggregates; it has a row of the CSR and a query. A source (src) is its
// neighbour; it has a key and a value. N_dst and N_src are the numbers of nodes, E of edges, H of heads; D is
// the size of a head of queries and keys, Dv that of values. T is the feature type; acc is the accumulation
// type, which is double for double and else float. Every array is contiguous. "or null" marks an optional
// array, and "or null: x" one whose elements are x if it is missing.
#pragma once

#include <cstdint>

namespace dfgnn {

enum class Score : int { additive, dot, additive_v2 };
enum class DType : int { f32, f64, f16, bf16 };

// A work item is a row or a row chunk (a part of a long row): the edges [begin, end) of the CSR. With slot =
// kWhole it writes the row's result, to which work items with kJoins may add later. With slot >= 0 the row is
// split, and the work item writes its partial result to that slot.
struct Item {
  int32_t row, begin, end, slot;
};
// With slot = kJoins a work item adds its result to the one that a work item of an earlier source partition
// (Csr::num_parts) wrote to the row.
inline constexpr int32_t kWhole = -1, kJoins = -2;
inline constexpr int kMostParts = 16;  // the most source partitions (Csr::num_parts)
// The most bytes of a head that a warp's registers hold. Wider heads are computed in chunks of columns, by
// kernels that do not support kJoins.
inline constexpr int kWideBytes = 2048;

// A split row and the slots of its partial results: slot_begin, slot_begin + stride, ... below slot_end. The
// results are merged in this order. stride is 1; with tiles it is kTileRows, because a work item there has
// that number of rows, and a slot for each.
struct Split {
  int32_t row, slot_begin, slot_end, stride;
};

// Block-sparse tiles (CUDA): a window is kTileRows consecutive rows. Its distinct neighbours are cut into
// chunks of kTileCols columns. A chunk is stored as kTileInts integers: the neighbours of its columns, padded
// with the first one, then a mask per row, whose bit c says that the row has an edge to column c.
inline constexpr int kTileRows = 64, kTileCols = 32, kTileInts = kTileCols + kTileRows;

// One direction of the graph with its plan. Forward: rows are destinations, indices are sources.
// Reverse: rows are sources, indices are destinations. Every row either has exactly one work item with slot =
// kWhole, and perhaps others with kJoins, or one Split. A row without edges has an item with begin == end.
struct Csr {
  const int32_t* indices;  // [E]
  const int32_t* eids;   // [E] position of each edge in the user's order, or null if the orders are the same
  const Item* items;     // [num_items]
  const Split* splits;   // [num_splits]
  const int32_t* tiles;  // [chunks, kTileInts], or null for a plan on rows. With tiles a work item is a run
                         // of chunks of a window: row is the window's first row, [begin, end) are chunks,
                         // slot is the first row's slot
  int64_t num_items;
  int64_t num_splits;
  int64_t num_slots;  // partial-result slots of all split rows
  int64_t num_rows;
  int32_t packed;  // CUDA: each sub-warp (lanes.cuh) takes a row of its own, instead of a warp per row
  int32_t heads_per_tile;  // CUDA: the most heads that a warp computes at a time; 0: as many as fit its lanes
  // Source partitions are ranges of sources whose features fit the cache; rows are cut where their neighbours
  // pass from one to the next. num_parts (CUDA): if there are work items with kJoins, the number of
  // partitions, which are launched one after the other; 0 means one launch. part_items: how many work items
  // each partition has. A row that is not split has at most one of them, so that no two work items add to it
  // at the same time.
  int32_t num_parts;
  int32_t part_items[kMostParts];
};

// Rounds of dropout's random number generator (math.h): the fewest with which it passes all statistical tests
// of the suite BigCrush.
inline constexpr int kPhiloxRounds = 7;

// Options on edges, all in the user's edge order. They turn the raw score (see ForwardParams) into s:
//   z = gate * raw (+ bias)      s = LeakyReLU(z) (+ bias)      s = -inf where mask is false
struct EdgeOptions {
  const void* bias;     // [E, H] T, or acc if bias_is_acc; or null
  const void* gate;     // [E, gate_heads] T, or acc if gate_is_acc; or null: 1
  const uint8_t* mask;  // [E, mask_heads] 0 or 1; or null: 1
  const void* weight;   // [E, weight_heads] T, or acc if weight_is_acc; or null: 1
  const void* feat;     // [E, H, D] T, or null; added to the key, to the value, or to both
  const int64_t* seed;  // [1], the seed of the dropout mask; or null: no dropout
  int32_t bias_is_acc, gate_is_acc, weight_is_acc;
  int32_t gate_heads, mask_heads, weight_heads;  // 1 or H
  int32_t bias_after;                            // the bias is added after the LeakyReLU
  int32_t feat_in_key, feat_in_value;
  uint32_t dropout_threshold;  // an edge is dropped when its 32 random bits are below this
  double dropout_scale;        // 1 / (1 - p); 0 when p = 1
  bool scalars() const { return bias || gate || mask || weight || seed; }
  bool any() const { return feat || scalars(); }
};

// Edge features x_ij whose projection e_ij = W x_ij is not computed per edge, but moved to the nodes (dot
// attention on CUDA in 16 bits). The other symbols are those of ForwardParams and BackwardParams below.
//   raw_ij = scale (q_i . k_j + r_i . x_ij), r_i = W^T q_i      out_i += W a_i, a_i = sum_j w m alpha x_ij
// Backward, with s_i = W^T g_i:
//   dalpha_ij = f_ij (g_i . v_j + s_i . x_ij)      grad_query_i += scale W b_i, b_i = sum_j grad_raw_ij x_ij
struct EdgeAttr {
  const void* x;       // [E, dim] T, user's edge order; or null
  int32_t dim, width;  // width: dim, rounded up to a multiple of 8
  // W [H, columns, features] T, padded with zeros to the columns of a head's lanes and to a multiple of 16
  // features, and permuted to the order in which tensor cores hold it in registers (_factors in
  // dfgnn/engine/edge_projection.py): `onto` for W^T q and W^T g, `back` for W a and W b. The indices of a
  // column and of a feature are split into digits; "t 4" is a digit t with 4 values, and the last digit
  // counts ones. The lists in brackets are the dimensions of the permuted array:
  const void* onto;    // column = (block, t 4, s 2, j 2, e 2), feature = (step, i 2, g 8):
                       //   [H, step, block, s, g, t, j, i, e]
  const void* back;    // column = (group, g 8, word, i 2), feature = (step, t 4, j 2, e 2):
                       //   [H, group, step, word, g, t, j, i, e]
  void* sums;          // a, or in backward b: [N_dst, H, width] T, 0 beyond dim; or null
  void* partial;       // [csr.num_slots, H, width] acc, scratch: the same sums over row chunks
  int32_t keep_edges;  // whether the pass over sources replaces alpha and ds of each edge, which it reads in
                       // BackwardParams::handed, by f alpha and grad_raw
};

struct Shape {
  int64_t num_dst, num_src, num_edges;
  int32_t heads;      // H
  int32_t dim;        // D; equal to value_dim, except for dot on CPUs
  int32_t value_dim;  // Dv
};

// With the query q_i of destination i, and the key k_j and the value v_j of source j:
// out_i = sum_j w_ij m_ij alpha_ij (v_j + e_ij), alpha_ij = exp((s_ij - max_i) - log_sum_i),
// max_i = max_j s_ij, log_sum_i = log sum_j exp(s_ij - max_i)
//
// From EdgeOptions come s_ij, the weight w_ij, dropout's factor m_ij and the features e_ij, which are in the
// formula of the value only with feat_in_value, and in that of the key only with feat_in_key:
//   additive:    raw_ij = alpha_src[j] + alpha_dst[i]; feat never in the key
//   dot:         raw_ij = scale * q_i . (k_j + e_ij)
//   additive_v2: raw_ij = attn . LeakyReLU(v_j + x_dst[i] + e_ij); x_dst is `query`, feat never in the value;
//                negative_slope is the inner one, and the LeakyReLU of EdgeOptions is the identity
// A row without mass (no edges, or all scores -inf) has out = 0, max = +inf and log_sum = 0, so that
// alpha = 0. max and log_sum are stored apart, because their sum would lose log_sum where max is large.
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
  double scale;           // dot: the factor of q . k

  const void* out_bias;  // [H, Dv] T, added to out; or null

  void* out;            // [N_dst, H, Dv] T
  void* stats;          // [N_dst, H, 2] acc: max, log_sum
  void* positive;       // additive: [N_dst, H, Dv] T, sum of w m alpha v over edges with z > 0; or null
  void* positive_mass;  // additive: [N_dst, H] acc, sum of alpha over edges with z > 0; or null
  void* attention;      // [E, H] acc, w m alpha in the user's edge order; or null

  // Scratch for split rows.
  void* partial_out;       // [csr.num_slots, H, Dv] acc
  void* partial_positive;  // [csr.num_slots, H, Dv] acc, or null like positive
  void* partial_stats;     // [csr.num_slots, H, 3] acc: max, sum of exp(s - max), its part with z > 0

  EdgeAttr attr;
};

// CUDA: if grad_attn has more than kAttnAtOnce partial sums, they are first added up to kAttnSums sums.
inline constexpr int kAttnSums = 64, kAttnAtOnce = 512;

// With g = grad_out, gamma = grad_attention, f_ij = w_ij m_ij, L' the derivative of LeakyReLU:
//   delta_i = g_i . (out_i - out_bias) + sum_j attention_ij gamma_ij      (the sum only with grad_attention)
//   dalpha_ij = f_ij (g_i . (v_j + e_ij) + gamma_ij)
//   ds_ij = alpha_ij (dalpha_ij - delta_i), or exactly 0 if the edge has all of its row's weight
//   dz_ij = ds_ij L'(z_ij)      grad_raw_ij = gate_ij dz_ij, the gradient of raw_ij ("d raw")
//   grad_value[j] = sum_i f alpha g_i
//   additive:
//     grad_alpha_src[j] = sum_i grad_raw_ij
//     grad_alpha_dst[i] = sum_j grad_raw_ij
//        = (1 - slope) (g_i . positive_i - delta_i positive_mass_i)  without grad_attention and gate
//   dot:
//     grad_query[i] = scale sum_j grad_raw_ij (k_j + e_ij)      grad_key[j] = scale sum_i grad_raw_ij q_i
//   additive_v2, with u = v_j + x_dst[i] + e_ij:
//     grad_query[i] = attn sum_j grad_raw_ij L'(u)      grad_value[j] += attn sum_i grad_raw_ij L'(u)
//     grad_attn = sum_ij grad_raw_ij LeakyReLU(u)
//   grad_bias_ij = dz_ij, or ds_ij with bias_after      grad_gate_ij = dz_ij raw_ij
//   grad_weight_ij = m_ij alpha_ij (g_i . (v_j + e_ij) + gamma_ij)
//   grad_feat_ij = f_ij alpha_ij g_i (in the value) + grad_raw_ij scale q_i, or grad_raw_ij attn L'(u) (in
//   the key)
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
  const void* out_bias;  // [H, Dv] T, which was added to out; or null
  const void* stats;     // [N_dst, H, 2] acc, of forward
  // Whether a launch sees only some of the terms of the softmax that gave out and stats: edges are missing in
  // csr (processes share the graph), the softmax has a sink (one more score per head, which belongs to no
  // edge), or (CUDA) the launch takes one source partition. Delta is then not corrected by the residual
  // (cuda/attention/backward_steps.cuh).
  int32_t part_of_rows;
  // additive: positive and positive_mass as in ForwardParams, if grad_alpha_dst is wanted without
  // grad_attention and gate; or null
  const void* positive;
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
  int64_t attn_parts;    // what attention_parts of the backend returns
  void* attn_total;      // CUDA: [H, D] acc: the sum of the partial sums in grad_attn
  void* attn_sums;       // CUDA: [kAttnSums, H, D] acc, scratch for more than kAttnAtOnce parts
  void* grad_bias;       // [E, H] acc, user's edge order; or null
  void* grad_gate;       // [E, H] acc, user's edge order; or null
  void* grad_weight;     // [E, H] acc, user's edge order; or null
  void* grad_feat;       // [E, H, D] T, user's edge order; or null
  void* grad_raw;        // additive: [E, H] acc, grad_raw_ij in the user's edge order, if grad_alpha_dst is
                         // computed as the sum of grad_raw_ij over each row, which grad_attention and a gate
                         // require; or null

  // Scratch.
  void* node_stats;  // [N_dst, H, 4] acc: alpha_dst or slope attn . x_dst (dot: unused), max, log_sum, delta;
                     // with handed, [N_dst, H]: the delta residual (docs/internals/glossary.md)
  void* partial_query;  // dot, additive_v2: [csr.num_slots, H, D] acc
  void* partial_key;    // dot: [reverse.num_slots, H, D] acc
  void* partial_value;  // [reverse.num_slots, H, Dv] acc
  void* partial_alpha;  // additive: [reverse.num_slots, H] acc
  void* row_sums;       // [N_dst, H] acc, with attention: sum_j attention_ij gamma_ij
  void* partial_sums;   // [csr.num_slots, H] acc: partial results of row_sums, and of the sums of grad_raw
  // dot on CUDA: [E, H, 2] acc, user's edge order: alpha and ds of each edge, which the pass over
  // destinations saves for the one over sources; or null.
  void* handed;

  EdgeAttr attr;
};

// The plain products over the edges of row i with neighbours j; `csr` may be either direction of a graph:
// sddmm: edge_out[eid, h] = row_feat[i, h] . feat[j, h];  spmm: out[i, h] = sum_j weight[eid, h] feat[j, h]
struct ProductParams {
  DType dtype;
  Shape shape;  // num_dst rows, num_src neighbours; dim = value_dim
  Csr csr;
  const void* feat;      // [N_src, H, D] T
  const void* row_feat;  // sddmm: [N_dst, H, D] T
  const void* weight;    // spmm: [E, H] T, user's edge order
  void* edge_out;        // sddmm: [E, H] T, user's edge order
  void* out;             // spmm: [N_dst, H, D] T
  void* partial_out;     // spmm: [csr.num_slots, H, D] acc, scratch: partial results of split rows
};

// Arguments of the kernels that make a plan's work items and splits on the device. Without by_length and with
// one source partition, work items are in row order: first all row chunks of split rows but the first chunk
// of each, then one work item per row. Otherwise source partitions follow one another, and with by_length
// longer work items come first in each. The same rows always give the same order. Unless `exact`, the arrays
// are as large as can be necessary: unused work items have row < 0 and lie at the beginning in row order,
// else at the end; unused splits have no slots.
struct PlanParams {
  const int64_t* indptr;  // [num_rows + 1]
  int64_t num_rows;
  int32_t max_edges;  // the maximum edges per work item
  int32_t by_length;
  int32_t parts;           // source partitions
  const int32_t* indices;  // [E], read if parts > 1: columns below num_cols, ascending in every row
  int64_t num_cols;
  // How many rows an entry of indptr has: 1, or for tiles kTileRows. With tiles an entry is a window, what
  // indptr counts are chunks of tiles instead of edges, and so is max_edges.
  int32_t stride;
  int64_t last_row;  // number of rows of the graph, whose last window may be incomplete
  int32_t exact;     // whether num_items and num_splits are what the plan needs, not upper bounds
  Item* items;       // [num_items]: num_rows + front
  int64_t num_items;
  int64_t front;  // an upper bound of the work items beyond one per row
  Split* splits;  // [num_splits]
  int64_t num_splits;
  int32_t* counts;  // [plan_counts]: three results, which are the work items beyond one per entry of indptr,
                    // and the slots and the splits, both divided by `stride`; then scratch
};
// by_length sorts work items into this number of buckets by their length (cuda/plan/items.cu).
inline constexpr int kPlanBuckets = 128;

// Degrees below this have a bin each in the histogram (Degrees in dfgnn/sparse/csr.py).
inline constexpr int kDegreeBins = 2048;

}  // namespace dfgnn
