// The attention operators as a template over backends: they check arguments, allocate results, fill the
// parameter struct and launch. A Backend has `Scope(tensor)` (device guard), `check(checker, shape)`, which
// refuses layouts that it does not support, `check(checker, csr, num_edges)` for plans,
// `has_tiles(score, dtype, shape)`, `forward(params, tensor)` and `backward(params, tensor)`.
#pragma once

#include <cmath>
#include <tuple>

#include "checks.h"

namespace dfgnn {

// The list `plan` of the schemas; it may end with numbers of work items per source partition (Csr).
struct PlanArgs {
  int64_t num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges;
};
inline constexpr size_t kPlanArgs = sizeof(PlanArgs) / sizeof(int64_t);

template <class Backend>
struct Attention {
  static PlanArgs plan_args(const Checker& check, const Sizes& plan) {
    if (plan.size() < kPlanArgs || plan.size() > kPlanArgs + kMostParts)
      check.require(false,
                    "plan: expected [num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges] and "
                    "items of at most ",
                    kMostParts, " parts, got ", to_string(plan));
    for (int64_t number : plan) check.count("plan", number);
    return {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]};
  }

  // One direction of a graph, with num_rows rows and neighbours below num_cols. Everything that does not
  // need values is checked; the CPU also checks work items and splits. schemas.h says what is trusted.
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
    int64_t in_parts = 0;
    for (size_t k = kPlanArgs; k < plan.size(); ++k) {
      c.part_items[c.num_parts++] = static_cast<int32_t>(plan[k]);
      in_parts += plan[k];
    }
    check.require(c.num_parts == 0 || (in_parts == num_items && !tiles), "plan: expected parts of ",
                  num_items, " items, got ", in_parts);
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

  // Refuses work items that add to rows (kJoins) where sums cannot be added up in the rows themselves.
  static void check_parts(const Checker& check, const Csr& csr, DType dtype, const Shape& shape) {
    const int bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 0;
    check.require(csr.num_parts == 0 || (bytes && shape.value_dim * bytes <= kWideBytes),
                  "plan: expected parts only of float32 and float64 and heads of at most ", kWideBytes,
                  " bytes");
  }
  // Refuses a plan with tiles where the call cannot use them.
  template <class Params>
  static void check_plan(const Checker& check, const Params& p, const Csr& csr) {
    check_parts(check, csr, p.dtype, p.shape);
    if (!csr.tiles) return;
    check.require(
        Backend::has_tiles(p.score, p.dtype, p.shape),
        "tiles: expected additive or dot attention in 16 bits on CUDA, with heads of 8, 16, 32, 64 or 128");
    check.require(!p.edge.any(), "tiles: expected no edge tensors and no dropout");
  }

  // Bits of `flags` and `need` of the schemas.
  // kIdsElsewhere: edge ids are not positions in edge tensors, and the call has no edge tensors.
  enum Flag : int64_t {
    kBiasAfter = 1,
    kFeatInKey = 2,
    kFeatInValue = 4,
    kPartOfRows = 8,
    kIdsElsewhere = 16
  };
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

  // Checks the inputs, makes them dense, and fills the fields that ForwardParams and BackwardParams share.
  // own_terms: the caller computes src and dst of the additive score itself.
  template <class Params>
  static void fill(const Checker& check, Inputs& in, Params& p, int64_t edges, bool own_terms = false) {
    const ScalarType type = in.type(), acc = in.acc();
    check.require(in.score >= 0 && in.score <= 2, "score: expected 0 (additive), 1 (dot) or 2 (additive_v2)");
    check.count("num_dst", in.num_dst);
    check.require(in.flags >= 0 && in.flags < 2 * kIdsElsewhere, "flags: unknown ones: ", in.flags);
    check.require(!(in.flags & kIdsElsewhere) || !(in.bias || in.gate || in.mask || in.weight || in.feat),
                  "flags: expected no tensors on edges where ids are not their places");
    check.tensor("value", in.value, {-1, -1, -1}, {type});
    for (int k = 0; k < 3; ++k) check.count("value: sizes", in.value.size(k));
    const int64_t n = in.num_src(), m = in.num_dst, h = in.heads(), dv = in.value_dim();
    p.score = Score(in.score);
    p.dtype = dtype_of(check.op(), in.value);
    if (p.score == Score::additive) {
      check.require((in.src || own_terms) && !in.attn, "additive: expected src and dst terms only");
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

  // Launches forward. The caller has set `p`'s inputs, its plan and the pointers to what backward needs.
  struct Outputs {
    Tensor out;
    OptTensor attention;
  };
  static Outputs run_forward(const Checker& check, const Inputs& in, ForwardParams& p,
                             bool return_attention) {
    check_plan(check, p, p.csr);
    check.require(!p.csr.tiles || !return_attention, "tiles: expected no returned attention");
    const Tensor& value = in.value;
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t h = in.heads(), dv = in.value_dim(), slots = p.csr.num_slots;
    Tensor out = make(value, {in.num_dst, h, dv}, type);
    OptTensor attention = optional(p.attention, return_attention, value, {p.shape.num_edges, h}, acc);
    p.out = out.mutable_data_ptr(), p.out_bias = data(in.out_bias);
    Workspace scratch;
    scratch.add(p.partial_out, slots, {slots, h, dv}, acc);
    scratch.add(p.partial_stats, slots, {slots, h, 3}, acc);
    scratch.add(p.attr.partial, slots && p.attr.x, {slots, h, p.attr.width}, acc);
    scratch.add(p.partial_positive, slots && p.positive, {slots, h, dv}, acc);
    const OptTensor memory = scratch.make(value);
    Backend::forward(p, value);
    return {out, attention};
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
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    fill(check, in, p, indices.size(0));
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, tiles, num_dst, in.num_src());
    check.require(!save_positive || p.score == Score::additive, "save_positive: additive only");

    const ScalarType type = in.type(), acc = in.acc();
    const int64_t h = in.heads(), dv = in.value_dim();
    Tensor stats = make(value, {num_dst, h, 2}, acc);
    p.stats = stats.mutable_data_ptr();
    const OptTensor positive = optional(p.positive, save_positive, value, {num_dst, h, dv}, type);
    const OptTensor mass = optional(p.positive_mass, save_positive, value, {num_dst, h}, acc);
    const Outputs made = run_forward(check, in, p, return_attention);
    return {made.out, stats, or_empty(positive, value, type), or_empty(mass, value, acc),
            or_empty(made.attention, value, acc)};
  }

  // The requested gradients.
  struct Gradients {
    Tensor value;
    OptTensor src, dst, attn, bias, gate, weight, feat;
  };
  // How backward computes the gradient of dst of the additive score: from forward's sums over edges with z >
  // 0, or by a sum over each row's edges.
  struct WayOfDst {
    bool need, sum_rows, from_positive;
  };
  static WayOfDst way_of_dst(const Inputs& in, bool grad_attention, int64_t bits) {
    const bool additive = Score(in.score) == Score::additive;
    const bool need = !additive || (in.dst && (bits & kNeedDst));
    const bool sum_rows = additive && need && (grad_attention || in.gate);
    return {need, sum_rows, additive && need && !sum_rows};
  }

  // Checks backward's further arguments, and fills them in.
  static void fill_backward(const Checker& check, const Inputs& in, BackwardParams& p, Tensor& grad_out,
                            Tensor& out, OptTensor& grad_attention, OptTensor& attention) {
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t m = in.num_dst, h = in.heads(), dv = in.value_dim(), edges = p.shape.num_edges;
    check.tensor("grad_out", grad_out, {m, h, dv}, {type});
    check.tensor("out", out, {m, h, dv}, {type});
    check.tensor("grad_attention", grad_attention, {edges, h}, {acc});
    check.tensor("attention", attention, {edges, h}, {acc});
    check.require(!attention || grad_attention, "attention: expected only with grad_attention");
    out = dense(out), grad_out = dense(grad_out);
    p.part_of_rows = bool(in.flags & kPartOfRows);
    p.out = data(out), p.out_bias = data(in.out_bias), p.grad_out = data(grad_out);
    attention = dense(attention), grad_attention = dense(grad_attention);
    p.attention = data(attention), p.grad_attention = data(grad_attention);
  }

  // Launches backward, after the caller has set the inputs and plans of `p` and what forward saved.
  static Gradients run_backward(const Checker& check, const Inputs& in, BackwardParams& p,
                                const WayOfDst& way, int64_t need) {
    check_plan(check, p, p.csr);
    check_plan(check, p, p.reverse);
    const bool tiles = p.csr.tiles || p.reverse.tiles, sums = p.attention;
    check.require(!tiles || !p.grad_attention, "tiles: expected no gradient of the attention");
    const Tensor& value = in.value;
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t n = in.num_src(), m = in.num_dst, h = in.heads(), d = in.dim(), dv = in.value_dim(),
                  edges = p.shape.num_edges;
    const bool additive = p.score == Score::additive, dot = p.score == Score::dot;

    p.attn_parts = dot || additive || !edges ? 0 : Backend::attention_parts(p);
    Gradients g{make(value, {n, h, dv}, type)};
    p.grad_value = g.value.mutable_data_ptr();
    const Sizes src_size = additive ? Sizes{n, h} : Sizes{n, h, d},
                dst_size = additive ? Sizes{m, h} : Sizes{m, h, d};
    const ScalarType ends = additive ? acc : type;
    g.src = optional(additive ? p.grad_alpha_src : p.grad_key, additive || dot, value, src_size, ends);
    g.dst = optional(additive ? p.grad_alpha_dst : p.grad_query, way.need, value, dst_size, ends);
    const bool v2 = p.score == Score::additive_v2, fold = Backend::kSumsAttention && p.attn_parts;
    g.attn = optional(fold ? p.attn_total : p.grad_attn, v2, value, {fold ? 1 : p.attn_parts, h, dv}, acc);
    g.bias = optional(p.grad_bias, in.bias && (need & kNeedBias), value, {edges, h}, acc);
    g.gate = optional(p.grad_gate, in.gate && (need & kNeedGate), value, {edges, h}, acc);
    g.weight = optional(p.grad_weight, in.weight && (need & kNeedWeight), value, {edges, h}, acc);
    const bool need_feat = in.feat && (need & kNeedFeat);
    g.feat = optional(p.grad_feat, need_feat, value, need_feat ? sizes_of(*in.feat) : Sizes{}, type);
    if (edges == 0) {
      g.value = torch::stable::zero_(g.value);
      for (OptTensor* t : {&g.src, &g.dst})
        if (*t) *t = torch::stable::zero_(**t);
      return g;
    }

    const int64_t slots = p.csr.num_slots, rev_slots = p.reverse.num_slots;
    const bool hands_over = !p.handed && !(in.flags & kIdsElsewhere) && Backend::hands_over(p);
    Workspace scratch;
    scratch.add(p.node_stats, true, {m, h, hands_over || p.handed ? 1 : 4}, acc);
    if (hands_over) scratch.add(p.handed, true, {edges, h, 2}, acc);
    scratch.add(p.grad_raw, way.sum_rows, {edges, h}, acc);
    if (fold) scratch.add(p.grad_attn, true, {p.attn_parts, h, dv}, acc);
    scratch.add(p.attn_sums, fold && p.attn_parts > kAttnAtOnce, {kAttnSums, h, dv}, acc);
    scratch.add(p.row_sums, sums, {m, h}, acc);
    scratch.add(p.partial_sums, sums || way.sum_rows, {slots, h}, acc);
    scratch.add(p.partial_query, slots && !additive, {slots, h, d}, acc);
    scratch.add(p.partial_key, rev_slots && dot, {rev_slots, h, d}, acc);
    scratch.add(p.partial_value, rev_slots, {rev_slots, h, dv}, acc);
    scratch.add(p.partial_alpha, rev_slots && additive, {rev_slots, h}, acc);
    scratch.add(p.attr.partial, slots && p.attr.x, {slots, h, p.attr.width}, acc);
    const OptTensor memory = scratch.make(value);
    Backend::backward(p, value);
    return g;
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
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    const int64_t m = grad_out.size(0);
    check_need(check, need);
    Inputs in{score,     value, src,      dst, attn,           edge_bias, edge_gate, edge_mask, edge_weight,
              edge_feat, seed,  out_bias, m,   negative_slope, scale,     dropout_p, flags};
    BackwardParams p{};
    fill(check, in, p, indices.size(0));
    fill_backward(check, in, p, grad_out, out, grad_attention, attention);
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t h = in.heads(), dv = in.value_dim();
    check.tensor("stats", stats, {m, h, 2}, {acc});
    stats = dense(stats), p.stats = data(stats);
    const WayOfDst way = way_of_dst(in, grad_attention.has_value(), need);
    check.require(!way.from_positive || (positive && positive_mass),
                  "positive: needed for the gradient of dst");
    if (way.from_positive) {
      check.tensor("positive", positive, {m, h, dv}, {type});
      check.tensor("positive_mass", positive_mass, {m, h}, {acc});
      positive = dense(positive), positive_mass = dense(positive_mass);
      p.positive = data(positive), p.positive_mass = data(positive_mass);
    }
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, tiles, m, in.num_src());
    p.reverse =
        reverse_csr(check, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, rev_tiles, p.shape);
    const Gradients g = run_backward(check, in, p, way, need);
    const bool additive = p.score == Score::additive;
    const OptTensor attn_parts = g.attn ? g.attn : OptTensor(make(value, {0, h, dv}, acc));
    return {g.value,
            or_empty(g.src, value, type),
            or_empty(g.dst, value, additive ? acc : type),
            *attn_parts,
            or_empty(g.bias, value, acc),
            or_empty(g.gate, value, acc),
            or_empty(g.weight, value, acc),
            or_empty(g.feat, value, type)};
  }

  static void check_need(const Checker& check, int64_t need) {
    check.require(need >= 0 && need < 2 * kNeedFeat, "need: unknown bits: ", need);
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
    check_parts(check, p.csr, p.dtype, p.shape);
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
    const OptTensor partial = optional(p.partial_out, slots, feat, {slots, feat.size(1), feat.size(2)},
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
