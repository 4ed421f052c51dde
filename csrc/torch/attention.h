// Attention's operators (schemas.h), as a template over backends: they check, allocate, fill the parameter
// struct and launch. attention_forward and attention_backward take the tensors of the graph; attend and
// attend_backward are those of eager calls, which name a graph by its number (graphs.h). In this folder n is
// num_src, m num_dst, h the number of heads, d the size of a head of queries and keys, dv that of values.
// A Backend offers, beside what graphs.h needs:
//   Scope(tensor)                  a guard that makes the tensor's device the current one
//   check(checker, shape, dtype)   raises an error for features that it does not support
//   has_tiles(score, dtype, shape) whether it has kernels for tiles
//   forward(params, tensor), backward(params, tensor)  launch, on the device of the tensor
//   attention_parts(params)        how many partial sums of grad_attn its backward writes
//   kSumsAttention                 whether its backward adds up these partial sums, in attn_total
//   hands_over(params)             whether its backward uses BackwardParams::handed
#pragma once

#include <cmath>
#include <tuple>

#include "graphs.h"
#include "heads.h"
#include "linear.h"
#include "narrow_terms.h"

namespace dfgnn {

template <class Backend>
struct Attention : Graphs<Backend> {
  using Graphs<Backend>::csr;
  using Graphs<Backend>::reverse_csr;
  using Graphs<Backend>::check_parts;
  using Graphs<Backend>::graph_of;

  // ---- arguments -------------------------------------------------------------------------------

  // Bits of `flags` and `need` in the schemas. kBiasAfter, kFeatInKey and kFeatInValue are bias_after,
  // feat_in_key and feat_in_value of EdgeOptions, kPartOfRows is part_of_rows of BackwardParams.
  // kIdsElsewhere: edge ids are not positions in edge tensors, so that a call with it must not have edge
  // tensors; ids then only identify edges for dropout. kNeed...: the caller needs this gradient.
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
    // The call of a whole layer: it makes an additive score's src and dst itself and reads their gradients by
    // `p` alone, and the gradients of value, src, dst and feat need not be tensors of their own.
    bool of_layer = false;
    bool unwritten = false;  // kernels may leave rows of the edges' results unwritten; they are to be zero

    int64_t num_src() const { return value.size(0); }
    int64_t heads() const { return value.size(1); }
    int64_t value_dim() const { return value.size(2); }
    int64_t dim() const { return Score(score) == Score::dot ? src->size(2) : value_dim(); }
    ScalarType type() const { return value.scalar_type(); }
    ScalarType acc() const { return acc_type(type()); }
  };

  // Checks the inputs, makes them dense, and fills the members that the parameter structs have in common.
  // edges: how many. of_layer: as in Inputs, so that `in` may lack an additive score's src and dst.
  template <class Params>
  static void fill(const Checker& check, Inputs& in, Params& p, int64_t edges, bool of_layer = false) {
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
      check.require((in.src || of_layer) && !in.attn, "additive: expected src and dst terms only");
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
    check.head("value", h, dv), check.head("src", h, d);
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

  // Checks the options on edges and returns them.
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

  // ---- what forward saves for backward beside `out` ---------------------------------------------

  // Calls f(pointer in p, name, whether the array exists, sizes, dtype) for every array that forward saves.
  // save_positive: whether `positive` and positive_mass (params.h) are among these. place() casts away the
  // const of these pointers in BackwardParams, so that f is the same for it and ForwardParams.
  template <class Params, class F>
  static void for_saved(const Checker& check, Params& p, const Inputs& in, bool save_positive, F f) {
    check.require(!save_positive || p.score == Score::additive, "save_positive: additive only");
    const int64_t m = in.num_dst, h = in.heads();
    f(place(p.stats), "stats", true, {m, h, 2}, in.acc());
    f(place(p.positive_mass), "positive_mass", save_positive, {m, h}, in.acc());
    f(place(p.positive), "positive", save_positive, {m, h, in.value_dim()}, in.type());
  }
  static void*& place(void*& where) { return where; }
  static void*& place(const void*& where) { return const_cast<void*&>(where); }

  // Eager calls save all arrays in one tensor of bytes, which the schemas call `kept`. kept() returns the
  // layout of the arrays in it, for forward to allocate. read() makes the pointers of backward point to the
  // arrays in `memory`, the tensor that forward returned.
  template <class Params>
  static Workspace kept(const Checker& check, Params& p, const Inputs& in, bool save_positive) {
    Workspace all;
    for_saved(check, p, in, save_positive,
              [&](void*& where, const char*, bool wanted, std::initializer_list<int64_t> sizes,
                  ScalarType dtype) { all.add(where, wanted, sizes, dtype); });
    return all;
  }
  static void read(const Checker& check, const Workspace& all, const Tensor& memory) {
    check.tensor("kept", memory, {all.bytes()}, {ScalarType::Byte});
    check.require(memory.is_contiguous() && reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 16 == 0,
                  "kept: expected it as it was returned");
    all.place(const_cast<void*>(memory.const_data_ptr()));  // backward only reads it
  }

  // Other calls save a tensor for each array: stats, positive_mass, positive. make_saved() allocates them;
  // read_saved() checks them in backward, and makes p point to them.
  using Saved = std::array<OptTensor, 3>;
  static Saved make_saved(const Checker& check, ForwardParams& p, const Inputs& in, bool save_positive) {
    Saved made;
    size_t k = 0;
    for_saved(check, p, in, save_positive,
              [&](void*& where, const char*, bool wanted, std::initializer_list<int64_t> sizes,
                  ScalarType dtype) { made[k++] = optional(where, wanted, in.value, sizes, dtype); });
    return made;
  }
  static void read_saved(const Checker& check, BackwardParams& p, const Inputs& in, bool has_positive,
                         Saved& given) {
    size_t k = 0;
    for_saved(check, p, in, has_positive,
              [&](void*& where, const char* name, bool wanted, std::initializer_list<int64_t> sizes,
                  ScalarType dtype) {
                OptTensor& t = given[k++];
                where = nullptr;
                if (!wanted) return;
                check.tensor(name, t, sizes, {dtype});
                t = dense(t), where = const_cast<void*>(data(t));
              });
  }

  // ---- forward ---------------------------------------------------------------------------------

  // Checks that the kernels for this call support the plan of a direction: its source partitions or tiles.
  template <class Params>
  static void check_plan(const Checker& check, const Params& p, const Csr& csr) {
    check_parts(check, csr, p.dtype, p.shape);
    if (!csr.tiles) return;
    check.require(
        Backend::has_tiles(p.score, p.dtype, p.shape),
        "tiles: expected additive or dot attention in 16 bits on CUDA, with heads of 8, 16, 32, 64 or 128");
    check.require(!p.edge.any(), "tiles: expected no edge tensors and no dropout");
    check.require(p.score != Score::dot || p.negative_slope == 1,
                  "tiles: expected no negative_slope in dot attention");
  }

  struct Outputs {
    Tensor out;
    OptTensor attention;
  };
  // Allocates the outputs and scratch, and launches forward. `p` must have its inputs, its plan and pointers
  // to what is saved. into: a tensor for `out`; none: a new one.
  static Outputs run_forward(const Checker& check, const Inputs& in, ForwardParams& p, bool return_attention,
                             const OptTensor& into = {}) {
    check_plan(check, p, p.csr);
    check.require(!p.csr.tiles || !return_attention, "tiles: expected no returned attention");
    const Tensor& value = in.value;
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t h = in.heads(), dv = in.value_dim(), slots = p.csr.num_slots;
    Tensor out = into ? *into : make(value, {in.num_dst, h, dv}, type);
    OptTensor attention = optional(p.attention, return_attention, value, {p.shape.num_edges, h}, acc);
    if (in.unwritten && attention) attention = torch::stable::zero_(*attention);
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

  // ---- backward --------------------------------------------------------------------------------

  // The results of backward: the gradients that exist for this call and were asked for.
  struct Gradients {
    OptTensor value;  // there always is one
    OptTensor src, dst, attn, bias, gate, weight, feat;
    OptTensor scratch;  // with the gradients of a layer's terms
  };
  // Whether the gradient of dst is needed and, if the score is additive, how backward computes it: sum_rows:
  // as the sum of grad_raw, the gradient of the raw score, over the edges of each row; from_positive: from
  // the sums over edges with z > 0 that forward saved (params.h).
  struct DstGradient {
    bool need, sum_rows, from_positive;
  };
  // grad_attention: whether there is one. bits: `need` of the schemas.
  static DstGradient dst_gradient(const Inputs& in, bool grad_attention, int64_t bits) {
    const bool additive = Score(in.score) == Score::additive;
    const bool need = !additive || (in.dst && (bits & kNeedDst));
    const bool sum_rows = additive && need && (grad_attention || in.gate);
    return {need, sum_rows, additive && need && !sum_rows};
  }

  // Checks the arguments that only backward has, makes them dense, and fills them into p.
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

  // Allocates the gradients and scratch, and launches backward. `p` must have its inputs, its plans and what
  // forward saved. scratch: arrays of the caller, which are placed if the graph has edges.
  static Gradients run_backward(const Checker& check, const Inputs& in, BackwardParams& p,
                                const DstGradient& of_dst, int64_t need, Workspace scratch = {}) {
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
    const bool in_scratch = in.of_layer && edges, need_feat = in.feat && (need & kNeedFeat);
    Gradients g;
    if (!in_scratch) {
      g.value = optional(p.grad_value, true, value, {n, h, dv}, type);
      if (additive) {
        g.src = optional(p.grad_alpha_src, true, value, {n, h}, acc);
        g.dst = optional(p.grad_alpha_dst, of_dst.need, value, {m, h}, acc);
      } else {
        g.src = optional(p.grad_key, dot, value, {n, h, d}, type);
        g.dst = optional(p.grad_query, of_dst.need, value, {m, h, d}, type);
      }
      g.feat = optional(p.grad_feat, need_feat, value, need_feat ? sizes_of(*in.feat) : Sizes{}, type);
    }
    // fold: the backend adds up the partial sums of grad_attn, which are scratch then; else the caller does.
    const bool v2 = p.score == Score::additive_v2, fold = Backend::kSumsAttention && p.attn_parts;
    g.attn = optional(fold ? p.attn_total : p.grad_attn, v2, value, {fold ? 1 : p.attn_parts, h, dv}, acc);
    g.bias = optional(p.grad_bias, in.bias && (need & kNeedBias), value, {edges, h}, acc);
    g.gate = optional(p.grad_gate, in.gate && (need & kNeedGate), value, {edges, h}, acc);
    g.weight = optional(p.grad_weight, in.weight && (need & kNeedWeight), value, {edges, h}, acc);
    const auto zero = [](OptTensor& t) {
      if (t) t = torch::stable::zero_(*t);
    };
    if (edges == 0) {
      for (OptTensor* t : {&g.value, &g.src, &g.dst}) zero(*t);
      return g;
    }

    const int64_t slots = p.csr.num_slots, rev_slots = p.reverse.num_slots;
    const bool hands_over = !p.handed && !(in.flags & kIdsElsewhere) && Backend::hands_over(p);
    if (in_scratch) {
      scratch.add(p.grad_value, true, {n, h, dv}, type);
      scratch.add(p.grad_key, dot, {n, h, d}, type);
      scratch.add(p.grad_query, !additive && of_dst.need, {m, h, d}, type);
      scratch.add(p.grad_feat, need_feat, {edges, h, d}, type);
      scratch.add(p.grad_alpha_src, additive, {n, h}, acc);
      scratch.add(p.grad_alpha_dst, additive && of_dst.need, {m, h}, acc);
    }
    scratch.add(p.node_stats, true, {m, h, hands_over || p.handed ? 1 : 4}, acc);
    if (hands_over) scratch.add(p.handed, true, {edges, h, 2}, acc);
    scratch.add(p.grad_raw, of_dst.sum_rows, {edges, h}, acc);
    if (fold) scratch.add(p.grad_attn, true, {p.attn_parts, h, dv}, acc);
    scratch.add(p.attn_sums, fold && p.attn_parts > kAttnAtOnce, {kAttnSums, h, dv}, acc);
    scratch.add(p.row_sums, sums, {m, h}, acc);
    scratch.add(p.partial_sums, sums || of_dst.sum_rows, {slots, h}, acc);
    scratch.add(p.partial_query, slots && !additive, {slots, h, d}, acc);
    scratch.add(p.partial_key, rev_slots && dot, {rev_slots, h, d}, acc);
    scratch.add(p.partial_value, rev_slots, {rev_slots, h, dv}, acc);
    scratch.add(p.partial_alpha, rev_slots && additive, {rev_slots, h}, acc);
    scratch.add(p.attr.partial, slots && p.attr.x, {slots, h, p.attr.width}, acc);
    g.scratch = scratch.make(value, type);
    if (in_scratch) {
      const auto on_scratch = [&](OptTensor& t, const void* where, const Dims& sizes) {
        if (where) t = view_at(*g.scratch, where, sizes);
      };
      on_scratch(g.value, p.grad_value, {n, h, dv});
      on_scratch(g.src, p.grad_key, {n, h, d});
      on_scratch(g.dst, p.grad_query, {m, h, d});
      on_scratch(g.feat, p.grad_feat, {edges, h, d});
    }
    if (in.unwritten) zero(g.bias), zero(g.gate), zero(g.weight), zero(g.feat);
    Backend::backward(p, value);
    return g;
  }

  static void check_need(const Checker& check, int64_t need) {
    check.require(need >= 0 && need < 2 * kNeedFeat, "need: unknown bits: ", need);
  }

  // What both backward operators share. read(need_positive) fills in what forward saved, plans() the graph.
  template <class Read, class Plans>
  static Gradients backward_call(const Checker& check, Inputs& in, BackwardParams& p, int64_t edges,
                                 Tensor& grad_out, Tensor& out, OptTensor& grad_attention,
                                 OptTensor& attention, int64_t need, Read read, Plans plans) {
    check_need(check, need);
    fill(check, in, p, edges);
    fill_backward(check, in, p, grad_out, out, grad_attention, attention);
    const DstGradient of_dst = dst_gradient(in, grad_attention.has_value(), need);
    read(of_dst.from_positive);
    plans();
    return run_backward(check, in, p, of_dst, need);
  }

  // ---- operators that take the graph's tensors ---------------------------------------------------

  // The unnamed parameters are the reverse CSR and its plan, which forward does not need.
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
    const Saved saved = make_saved(check, p, in, save_positive);
    const Outputs made = run_forward(check, in, p, return_attention);
    return {made.out, *saved[0], or_empty(saved[2], value, in.type()), or_empty(saved[1], value, in.acc()),
            or_empty(made.attention, value, in.acc())};
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
    Inputs in{score,     value, src,      dst, attn,           edge_bias, edge_gate, edge_mask, edge_weight,
              edge_feat, seed,  out_bias, m,   negative_slope, scale,     dropout_p, flags};
    BackwardParams p{};
    Saved saved{stats, positive_mass, positive};
    const auto read = [&](bool need_positive) {
      check.require(!need_positive || (positive && positive_mass),
                    "positive: needed for the gradient of dst");
      read_saved(check, p, in, need_positive, saved);
    };
    const auto plans = [&] {
      p.csr = csr(check, "indices", indices, eids, items, splits, plan, tiles, m, in.num_src());
      p.reverse =
          reverse_csr(check, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, rev_tiles, p.shape);
    };
    const Gradients g = backward_call(check, in, p, indices.size(0), grad_out, out, grad_attention, attention,
                                      need, read, plans);
    const ScalarType type = in.type(), acc = in.acc();
    const bool additive = p.score == Score::additive;
    const OptTensor attn_parts =
        g.attn ? g.attn : OptTensor(make(value, {0, in.heads(), in.value_dim()}, acc));
    return {*g.value,
            or_empty(g.src, value, type),
            or_empty(g.dst, value, additive ? acc : type),
            *attn_parts,
            or_empty(g.bias, value, acc),
            or_empty(g.gate, value, acc),
            or_empty(g.weight, value, acc),
            or_empty(g.feat, value, type)};
  }

  // ---- operators of eager calls ------------------------------------------------------------------

  static std::tuple<Tensor, Tensor, OptTensor> attend(
      int64_t number, int64_t heads, int64_t score, Tensor value, OptTensor src, OptTensor dst,
      OptTensor attn, OptTensor edge_bias, OptTensor edge_gate, OptTensor edge_mask, OptTensor edge_weight,
      OptTensor edge_feat, OptTensor seed, OptTensor out_bias, double negative_slope, double scale,
      double dropout_p, int64_t flags, bool return_attention, bool save_positive) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend", value);
    split_heads(check, value, heads);
    if (Score(score) != Score::additive) split_heads(check, src, heads), split_heads(check, dst, heads);
    attn = by_head(check, "attn", attn, heads), out_bias = by_head(check, "out_bias", out_bias, heads);
    const auto graph = graph_of(check, number, value, false);
    Inputs in{score,           value,          src,         dst,       attn, edge_bias,
              edge_gate,       edge_mask,      edge_weight, edge_feat, seed, out_bias,
              graph->sizes[0], negative_slope, scale,       dropout_p, flags};
    ForwardParams p{};
    check.tensor("value", value, {-1, -1, -1}, {value.scalar_type()});
    p.score = Score(score);
    Workspace all = kept(check, p, in, save_positive);
    const NarrowTerms<Inputs> terms(check, in, all);
    const OptTensor memory = all.make(value);
    terms.widen(in, true);
    fill(check, in, p, graph->sizes[2]);
    p.csr = graph->csr;
    const Outputs made = run_forward(check, in, p, return_attention);
    return {*join_heads(made.out, heads), *memory, made.attention};
  }

  static std::tuple<Tensor, OptTensor, OptTensor, OptTensor, OptTensor, OptTensor, OptTensor, OptTensor>
  attend_backward(int64_t number, int64_t heads, Tensor grad_out, OptTensor grad_attention, int64_t score,
                  Tensor value, OptTensor src, OptTensor dst, OptTensor attn, OptTensor edge_bias,
                  OptTensor edge_gate, OptTensor edge_mask, OptTensor edge_weight, OptTensor edge_feat,
                  OptTensor seed, OptTensor out_bias, Tensor out, Tensor memory, bool has_positive,
                  OptTensor attention, double negative_slope, double scale, double dropout_p, int64_t flags,
                  int64_t need) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend_backward", value);
    split_heads(check, value, heads), split_heads(check, grad_out, heads), split_heads(check, out, heads);
    if (Score(score) != Score::additive) split_heads(check, src, heads), split_heads(check, dst, heads);
    attn = by_head(check, "attn", attn, heads), out_bias = by_head(check, "out_bias", out_bias, heads);
    const auto graph = graph_of(check, number, value, true);
    Inputs in{score,           value,          src,         dst,       attn, edge_bias,
              edge_gate,       edge_mask,      edge_weight, edge_feat, seed, out_bias,
              graph->sizes[0], negative_slope, scale,       dropout_p, flags};
    BackwardParams p{};
    check.tensor("value", value, {-1, -1, -1}, {value.scalar_type()});
    p.score = Score(score);
    Workspace all = kept(check, p, in, has_positive);
    const NarrowTerms<Inputs> terms(check, in, all);
    read(check, all, memory);
    terms.widen(in, false);
    const auto read_kept = [&](bool need_positive) {
      check.require(!need_positive || has_positive, "kept: expected `positive` for the gradient of dst");
      if (!need_positive) p.positive = p.positive_mass = nullptr;
    };
    const auto plans = [&] { p.csr = graph->csr, p.reverse = graph->reverse; };
    const Gradients g = backward_call(check, in, p, graph->sizes[2], grad_out, out, grad_attention, attention,
                                      need, read_kept, plans);
    return {*join_heads(g.value, heads),
            terms.gradient(0, join_heads(g.src, heads)),
            terms.gradient(1, join_heads(g.dst, heads)),
            g.attn,
            g.bias,
            g.gate,
            g.weight,
            g.feat};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("attention_forward", TORCH_BOX(&forward));
    m.impl("attention_backward", TORCH_BOX(&backward));
    m.impl("graph_handle", TORCH_BOX(&Graphs<Backend>::graph_handle));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("attend_backward", TORCH_BOX(&attend_backward));
  }
};

}  // namespace dfgnn
