// The operators, once for all backends: check, allocate, fill the parameter struct, launch.
// Backend offers `Scope(tensor)` (device guard), `check(checker, shape)` for layouts that it does not
// take, `check(checker, csr, num_edges)` for what it can tell of a plan, `has_tiles(score, dtype, shape)`,
// whether its forward adds the bias (`kAddsBias`), and `forward(params, tensor)` / `backward(params,
// tensor)`.
#pragma once

#include <cmath>
#include <tuple>

#include "checks.h"

namespace dfgnn {

// The list `plan` of the schemas.
struct PlanArgs {
  int64_t num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges;
};

template <class Backend>
struct Attention {
  static PlanArgs plan_args(const Checker& check, const Sizes& plan) {
    check.require(plan.size() == sizeof(PlanArgs) / sizeof(int64_t),
                  "plan: expected [num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges], got ",
                  to_string(plan));
    for (int64_t number : plan) check.count("plan", number);
    return {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]};
  }

  // One direction of a graph, of num_rows rows with neighbours below num_cols. What can be seen without
  // reading the tensors is checked, and by the CPU its items and splits; schemas.h says what is trusted.
  static Csr csr(const Checker& check, const char* name, const Tensor& indices, const OptTensor& eids,
                 const Tensor& items, const Tensor& splits, const Sizes& plan, const OptTensor& tiles,
                 int64_t num_rows, int64_t num_cols) {
    const ScalarType i32 = ScalarType::Int;
    check.tensor(name, indices, {-1}, {i32});
    check.tensor("eids", eids, {indices.size(0)}, {i32});
    check.tensor("items", items, {-1, 4}, {i32});
    check.tensor("splits", splits, {-1, 4}, {i32});
    check.tensor("tiles", tiles, {-1, kTileInts}, {i32});
    check.require(indices.is_contiguous() && items.is_contiguous() && splits.is_contiguous() &&
                      (!eids || eids->is_contiguous()) && (!tiles || tiles->is_contiguous()),
                  "the graph's tensors: expected contiguous ones");
    const PlanArgs args = plan_args(check, plan);
    const int64_t num_edges = indices.size(0), num_items = items.size(0), num_splits = splits.size(0);
    check.require(args.num_rows == num_rows && args.num_cols == num_cols && args.num_edges == num_edges, name,
                  ": expected the graph of the plan, of ", args.num_rows, " rows, ", args.num_cols,
                  " columns and ", args.num_edges, " edges, got ", num_rows, ", ", num_cols, " and ",
                  num_edges);
    check.require(num_edges == 0 || (num_rows > 0 && num_cols > 0), name, ": edges without nodes");
    const int64_t rows_per_item = tiles ? kTileRows : 1;
    check.count("items", num_items);
    check.require(num_items * rows_per_item >= num_rows, "items: expected one or more for each of ", num_rows,
                  " rows, got ", num_items);
    check.require(num_splits <= args.num_slots && args.num_slots <= 2 * num_items * rows_per_item,
                  "plan: expected slots for ", num_splits, " split rows, of ", num_items, " items, got ",
                  args.num_slots);
    check.require(args.packed <= 1, "plan: expected packed = 0 or 1, got ", args.packed);
    check.require(!tiles || tiles->size(0) <= std::max<int64_t>(num_edges, 1),
                  "tiles: expected at most one chunk per edge");
    Csr c{};
    c.indices = static_cast<const int32_t*>(data(indices));
    c.eids = static_cast<const int32_t*>(data(eids));
    c.items = static_cast<const Item*>(data(items));
    c.splits = static_cast<const Split*>(data(splits));
    c.tiles = static_cast<const int32_t*>(data(tiles));
    c.num_items = num_items;
    c.num_splits = num_splits;
    c.num_slots = args.num_slots;
    c.num_rows = num_rows;
    c.packed = static_cast<int32_t>(args.packed);
    c.heads_per_tile = static_cast<int32_t>(args.heads_per_tile);
    Backend::check(check, c, num_edges);
    return c;
  }

  static Csr reverse_csr(const Checker& check, const OptTensor& rev_indices, const OptTensor& rev_eids,
                         const OptTensor& rev_items, const OptTensor& rev_splits, const Sizes& plan,
                         const OptTensor& tiles, const Shape& shape) {
    check.require(rev_indices && rev_items && rev_splits, "backward needs the reverse CSR and its plan");
    const Csr c = csr(check, "rev_indices", *rev_indices, rev_eids, *rev_items, *rev_splits, plan, tiles,
                      shape.num_src, shape.num_dst);
    check.require(rev_indices->size(0) == shape.num_edges, "rev_indices: expected ", shape.num_edges,
                  " edges, got ", rev_indices->size(0));
    return c;
  }

  // Whether the call can take the tiles that its plan has.
  template <class Params>
  static void check_tiles(const Checker& check, const Params& p, const Csr& csr) {
    if (!csr.tiles) return;
    check.require(
        Backend::has_tiles(p.score, p.dtype, p.shape),
        "tiles: expected additive or dot attention in 16 bits on CUDA, with heads of 16, 32, 64 or 128");
    check.require(!p.edge.any(), "tiles: expected no edge tensors and no dropout");
  }

  // Positions in `flags` and `need` of the schemas.
  enum Flag : int64_t { kBiasAfter = 1, kFeatInKey = 2, kFeatInValue = 4 };
  enum Need : int64_t { kNeedDst = 1, kNeedBias = 2, kNeedGate = 4, kNeedWeight = 8, kNeedFeat = 16 };

  // The arguments that forward and backward share, in the order of the schemas.
  struct Inputs {
    int64_t score;
    Tensor value;
    OptTensor src, dst, attn, bias, gate, mask, weight, feat, seed, out_bias;
    int64_t num_dst;
    double negative_slope, scale, dropout_p;
    int64_t flags;

    int64_t num_src() const { return value.size(0); }
    int64_t heads() const { return value.size(1); }
    int64_t value_dim() const { return value.size(2); }
    int64_t dim() const { return Score(score) == Score::dot ? src->size(2) : value_dim(); }
    ScalarType type() const { return value.scalar_type(); }
    ScalarType acc() const { return acc_type(type()); }
  };

  // Checks them, makes them dense, and fills what ForwardParams and BackwardParams have in common.
  template <class Params>
  static void fill(const Checker& check, Inputs& in, Params& p, const Tensor& indices) {
    const ScalarType type = in.type(), acc = in.acc();
    check.require(in.score >= 0 && in.score <= 2, "score: expected 0 (additive), 1 (dot) or 2 (additive_v2)");
    check.count("num_dst", in.num_dst);
    check.require(in.flags >= 0 && in.flags < 2 * kFeatInValue, "flags: unknown ones: ", in.flags);
    check.tensor("value", in.value, {-1, -1, -1}, {type});
    for (int k = 0; k < 3; ++k) check.count("value: sizes", in.value.size(k));
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    const int64_t n = in.num_src(), m = in.num_dst, h = in.heads(), dv = in.value_dim(),
                  edges = indices.size(0);
    p.score = Score(in.score);
    p.dtype = dtype_of(check.op(), in.value);
    if (p.score == Score::additive) {
      check.require(in.src && !in.attn, "additive: expected src and dst terms only");
      check.tensor("src", in.src, {n, h}, {acc});
      check.tensor("dst", in.dst, {m, h}, {acc});
    } else if (p.score == Score::dot) {
      check.require(in.src && in.dst && !in.attn, "dot: expected src (key) and dst (query)");
      check.tensor("src", in.src, {n, h, -1}, {type});
      check.tensor("dst", in.dst, {m, h, in.src->size(2)}, {type});
    } else {
      check.require(!in.src && in.dst && in.attn, "additive_v2: expected dst and attn");
      check.tensor("dst", in.dst, {m, h, dv}, {type});
      check.tensor("attn", in.attn, {h, dv}, {type});
    }
    const int64_t d = in.dim();
    check.count("src: head size", d);
    p.shape = {m, n, edges, int32_t(h), int32_t(d), int32_t(dv)};
    Backend::check(check, p.shape, p.dtype);
    check.tensor("out_bias", in.out_bias, {h, dv}, {type});
    in.value = dense(in.value);
    for (OptTensor* t :
         {&in.src, &in.dst, &in.attn, &in.bias, &in.gate, &in.mask, &in.weight, &in.feat, &in.out_bias})
      *t = dense(*t);
    p.edge = options(check, in, edges, h, d, dv);
    p.value = data(in.value);
    (p.score == Score::additive ? p.alpha_src : p.key) = data(in.src);
    (p.score == Score::additive ? p.alpha_dst : p.query) = data(in.dst);
    p.attn = data(in.attn);
    p.negative_slope = in.negative_slope;
    p.scale = in.scale;
  }

  static EdgeOptions options(const Checker& check, const Inputs& in, int64_t edges, int64_t heads,
                             int64_t dim, int64_t value_dim) {
    const ScalarType type = in.type(), acc = in.acc();
    const auto columns = [&](const char* name, const OptTensor& t, std::initializer_list<ScalarType> types) {
      check.tensor(name, t, {edges, -1}, types);
      STD_TORCH_CHECK(!t || t->size(1) == 1 || t->size(1) == heads, check.op(), ": ", name,
                      ": expected 1 or num_heads columns");
      return t ? int32_t(t->size(1)) : 1;
    };
    const double p = in.dropout_p;
    check.tensor("edge_bias", in.bias, {edges, heads}, {type, acc});
    check.tensor("seed", in.seed, {1}, {ScalarType::Long});
    check.require(p >= 0 && p <= 1, "dropout_p: expected a probability in [0, 1]");
    EdgeOptions e{};
    e.gate_heads = columns("edge_gate", in.gate, {type, acc});
    e.mask_heads = columns("edge_mask", in.mask, {ScalarType::Bool});
    e.weight_heads = columns("edge_weight", in.weight, {type, acc});
    e.bias = data(in.bias), e.gate = data(in.gate), e.weight = data(in.weight), e.feat = data(in.feat);
    e.mask = static_cast<const uint8_t*>(data(in.mask));
    e.seed = p > 0 ? static_cast<const int64_t*>(data(in.seed)) : nullptr;
    check.require(p == 0 || e.seed, "seed: needed when dropout_p > 0");
    e.bias_is_acc = in.bias && in.bias->scalar_type() == acc;
    e.gate_is_acc = in.gate && in.gate->scalar_type() == acc;
    e.weight_is_acc = in.weight && in.weight->scalar_type() == acc;
    e.bias_after = bool(in.flags & kBiasAfter);
    if (in.feat) {
      e.feat_in_key = bool(in.flags & kFeatInKey), e.feat_in_value = bool(in.flags & kFeatInValue);
      check.require(e.feat_in_key || e.feat_in_value, "edge_feat: expected a flag that says where it goes");
      check.require(!e.feat_in_key || Score(in.score) != Score::additive, "edge_feat: additive has no key");
      check.require(!e.feat_in_value || Score(in.score) != Score::additive_v2,
                    "edge_feat: additive_v2 takes it in the key only");
      check.require(!e.feat_in_key || !e.feat_in_value || dim == value_dim,
                    "edge_feat: expected keys and values of one size");
      check.tensor("edge_feat", in.feat, {edges, heads, e.feat_in_key ? dim : value_dim}, {type});
    }
    e.dropout_threshold = static_cast<uint32_t>(std::min(std::floor(p * 4294967296.0), 4294967295.0));
    e.dropout_scale = p < 1 ? 1 / (1 - p) : 0;
    return e;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
      int64_t score, Tensor value, OptTensor src, OptTensor dst, OptTensor attn, OptTensor edge_bias,
      OptTensor edge_gate, OptTensor edge_mask, OptTensor edge_weight, OptTensor edge_feat, OptTensor seed,
      OptTensor out_bias, Tensor indices, OptTensor eids, Tensor items, Tensor splits, Sizes plan, OptTensor,
      OptTensor, OptTensor, OptTensor, Sizes, OptTensor tiles, OptTensor, int64_t num_dst,
      double negative_slope, double scale, double dropout_p, int64_t flags, bool return_attention,
      bool save_positive) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attention_forward", value);
    Inputs in{score,     value,          src,         dst,       attn, edge_bias,
              edge_gate, edge_mask,      edge_weight, edge_feat, seed, out_bias,
              num_dst,   negative_slope, scale,       dropout_p, flags};
    ForwardParams p{};
    fill(check, in, p, indices);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, tiles, num_dst, in.num_src());
    check_tiles(check, p, p.csr);
    check.require(!tiles || !return_attention, "tiles: expected no returned attention");
    check.require(!save_positive || p.score == Score::additive, "save_positive: additive only");

    const ScalarType type = in.type(), acc = in.acc();
    const int64_t h = in.heads(), dv = in.value_dim(), slots = p.csr.num_slots;
    Tensor out = make(value, {num_dst, h, dv}, type), stats = make(value, {num_dst, h, 2}, acc);
    Tensor positive = optional(p.positive, save_positive, value, {num_dst, h, dv}, type);
    Tensor mass = optional(p.positive_mass, save_positive, value, {num_dst, h}, acc);
    Tensor attention = optional(p.attention, return_attention, value, {indices.size(0), h}, acc);
    p.out = out.mutable_data_ptr(), p.stats = stats.mutable_data_ptr(), p.out_bias = data(in.out_bias);
    const OptTensor partial_out = scratch(p.partial_out, slots, value, {slots, h, dv}, acc);
    const OptTensor partial_stats = scratch(p.partial_stats, slots, value, {slots, h, 3}, acc);
    const OptTensor partial_positive =
        scratch(p.partial_positive, slots && save_positive, value, {slots, h, dv}, acc);
    Backend::forward(p, value);
    if (out_bias && !Backend::kAddsBias)
      out =
          allocate(out, sizes_of(out), type, [&] { return torch::stable::subtract(out, *in.out_bias, -1); });
    return {out, stats, positive, mass, attention};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      Tensor grad_out, OptTensor grad_attention, int64_t score, Tensor value, OptTensor src, OptTensor dst,
      OptTensor attn, OptTensor edge_bias, OptTensor edge_gate, OptTensor edge_mask, OptTensor edge_weight,
      OptTensor edge_feat, OptTensor seed, OptTensor out_bias, Tensor out, Tensor stats, OptTensor positive,
      OptTensor positive_mass, OptTensor attention, Tensor indices, OptTensor eids, Tensor items,
      Tensor splits, Sizes plan, OptTensor rev_indices, OptTensor rev_eids, OptTensor rev_items,
      OptTensor rev_splits, Sizes rev_plan, OptTensor tiles, OptTensor rev_tiles, double negative_slope,
      double scale, double dropout_p, int64_t flags, int64_t need) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attention_backward", value);
    check.tensor("grad_out", grad_out, {-1, -1, -1}, {value.scalar_type()});
    const int64_t m = grad_out.size(0), edges = indices.size(0);
    check.require(need >= 0 && need < 2 * kNeedFeat, "need: unknown bits: ", need);
    Inputs in{score,     value, src,      dst, attn,           edge_bias, edge_gate, edge_mask, edge_weight,
              edge_feat, seed,  out_bias, m,   negative_slope, scale,     dropout_p, flags};
    BackwardParams p{};
    fill(check, in, p, indices);
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t n = in.num_src(), h = in.heads(), d = in.dim(), dv = in.value_dim();
    check.tensor("grad_out", grad_out, {m, h, dv}, {type});
    check.tensor("out", out, {m, h, dv}, {type});
    check.tensor("stats", stats, {m, h, 2}, {acc});
    check.tensor("grad_attention", grad_attention, {edges, h}, {acc});
    check.tensor("attention", attention, {edges, h}, {acc});
    check.require(!attention || grad_attention, "attention: expected only with grad_attention");
    const bool additive = p.score == Score::additive, dot = p.score == Score::dot;
    const bool need_dst = !additive || (dst && (need & kNeedDst));
    const bool sum_rows = additive && need_dst && (grad_attention || edge_gate);
    const bool from_positive = additive && need_dst && !sum_rows;
    check.require(!from_positive || (positive && positive_mass), "positive: needed for the gradient of dst");
    if (from_positive) {
      check.tensor("positive", positive, {m, h, dv}, {type});
      check.tensor("positive_mass", positive_mass, {m, h}, {acc});
    }
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, tiles, m, n);
    p.reverse =
        reverse_csr(check, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, rev_tiles, p.shape);
    check_tiles(check, p, p.csr);
    check_tiles(check, p, p.reverse);
    check.require(!(tiles || rev_tiles) || !grad_attention, "tiles: expected no gradient of the attention");
    out = dense(out), stats = dense(stats), grad_out = dense(grad_out);
    p.out = data(out), p.out_bias = data(in.out_bias), p.stats = data(stats), p.grad_out = data(grad_out);
    if (from_positive) {
      positive = dense(positive), positive_mass = dense(positive_mass);
      p.positive = data(positive), p.positive_mass = data(positive_mass);
    }
    attention = dense(attention), grad_attention = dense(grad_attention);
    p.attention = data(attention), p.grad_attention = data(grad_attention);

    p.attn_parts = dot || additive || !edges ? 0 : Backend::attention_parts(p);
    Tensor grad_value = make(value, {n, h, dv}, type);
    p.grad_value = grad_value.mutable_data_ptr();
    const Sizes src_size = additive ? Sizes{n, h} : Sizes{n, h, d},
                dst_size = additive ? Sizes{m, h} : Sizes{m, h, d};
    Tensor grad_src = optional(additive ? p.grad_alpha_src : p.grad_key, additive || dot, value, src_size,
                               additive ? acc : type);
    Tensor grad_dst = optional(additive ? p.grad_alpha_dst : p.grad_query, need_dst, value, dst_size,
                               additive ? acc : type);
    Tensor grad_attn = make(value, {p.attn_parts, h, dv}, acc);
    p.grad_attn = grad_attn.mutable_data_ptr();
    const bool fold = Backend::kSumsAttention && p.attn_parts;
    Tensor attn_sums = optional(p.attn_sums, fold, value, {kAttnSums, h, dv}, acc);
    Tensor grad_bias = optional(p.grad_bias, edge_bias && (need & kNeedBias), value, {edges, h}, acc);
    Tensor grad_gate = optional(p.grad_gate, edge_gate && (need & kNeedGate), value, {edges, h}, acc);
    Tensor grad_weight = optional(p.grad_weight, edge_weight && (need & kNeedWeight), value, {edges, h}, acc);
    const Sizes feat_size = edge_feat ? sizes_of(*edge_feat) : Sizes{0};
    Tensor grad_feat = optional(p.grad_feat, edge_feat && (need & kNeedFeat), value, feat_size, type);
    if (edges == 0) {
      for (Tensor* t : {&grad_value, &grad_src, &grad_dst})
        if (t->numel()) *t = torch::stable::zero_(*t);
      return {grad_value, grad_src, grad_dst, grad_attn, grad_bias, grad_gate, grad_weight, grad_feat};
    }

    const OptTensor grad_raw = scratch(p.grad_raw, sum_rows, value, {edges, h}, acc);
    const Tensor node_stats = make(value, {m, h, 4}, acc);
    p.node_stats = node_stats.mutable_data_ptr();
    const bool sums = attention.has_value() || sum_rows;
    const OptTensor row_sums = scratch(p.row_sums, attention.has_value(), value, {m, h}, acc);
    const OptTensor partial_sums = scratch(p.partial_sums, sums, value, {p.csr.num_slots, h}, acc);
    const int64_t slots = p.csr.num_slots, rev_slots = p.reverse.num_slots;
    const OptTensor partial_query = scratch(p.partial_query, slots && !additive, value, {slots, h, d}, acc);
    const OptTensor partial_key = scratch(p.partial_key, rev_slots && dot, value, {rev_slots, h, d}, acc);
    const OptTensor partial_value = scratch(p.partial_value, rev_slots, value, {rev_slots, h, dv}, acc);
    const OptTensor partial_alpha =
        scratch(p.partial_alpha, rev_slots && additive, value, {rev_slots, h}, acc);
    Backend::backward(p, value);
    if (fold) grad_attn = attn_sums;
    return {grad_value, grad_src, grad_dst, grad_attn, grad_bias, grad_gate, grad_weight, grad_feat};
  }

  static ProductParams product(const Checker& check, const Tensor& feat, int64_t num_rows,
                               const Tensor& indices, const OptTensor& eids, const Tensor& items,
                               const Tensor& splits, const Sizes& plan) {
    check.tensor("feat", feat, {-1, -1, -1}, {feat.scalar_type()});
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    check.count("num_rows", num_rows);
    for (int k = 0; k < 3; ++k) check.count("feat: sizes", feat.size(k));
    ProductParams p{};
    p.dtype = dtype_of(check.op(), feat);
    p.shape = {num_rows,
               feat.size(0),
               indices.size(0),
               int32_t(feat.size(1)),
               int32_t(feat.size(2)),
               int32_t(feat.size(2))};
    Backend::check(check, p.shape, p.dtype);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, {}, num_rows, feat.size(0));
    p.feat = data(feat);
    return p;
  }

  static Tensor sddmm(Tensor row_feat, Tensor feat, Tensor indices, OptTensor eids, Tensor items,
                      Tensor splits, Sizes plan) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::sddmm", feat);
    feat = dense(feat), row_feat = dense(row_feat);
    ProductParams p = product(check, feat, row_feat.size(0), indices, eids, items, splits, plan);
    check.tensor("row_feat", row_feat, {-1, feat.size(1), feat.size(2)}, {feat.scalar_type()});
    Tensor out = make(feat, {indices.size(0), feat.size(1)}, feat.scalar_type());
    p.row_feat = data(row_feat), p.edge_out = out.mutable_data_ptr();
    if (indices.size(0)) Backend::sddmm(p, feat);
    return out;
  }

  static Tensor spmm(Tensor weight, Tensor feat, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
                     Sizes plan, int64_t num_rows) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::spmm", feat);
    feat = dense(feat), weight = dense(weight);
    ProductParams p = product(check, feat, num_rows, indices, eids, items, splits, plan);
    check.tensor("weight", weight, {indices.size(0), feat.size(1)}, {feat.scalar_type()});
    Tensor out = make(feat, {num_rows, feat.size(1), feat.size(2)}, feat.scalar_type());
    const int64_t slots = p.csr.num_slots;
    const OptTensor partial = scratch(p.partial_out, slots, feat, {slots, feat.size(1), feat.size(2)},
                                      acc_type(feat.scalar_type()));
    p.weight = data(weight), p.out = out.mutable_data_ptr();
    Backend::spmm(p, feat);
    return out;
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("attention_forward", TORCH_BOX(&forward));
    m.impl("attention_backward", TORCH_BOX(&backward));
    m.impl("sddmm", TORCH_BOX(&sddmm));
    m.impl("spmm", TORCH_BOX(&spmm));
  }
};

}  // namespace dfgnn
