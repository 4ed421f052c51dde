// The operators of eager calls: those of attention.h, on a graph that was checked once and has a number, with
// everything that forward saves for backward in one tensor; and a fused layer's additive attention with its
// score terms. A Backend also has `terms(params, tensor)`, `terms_backward(params, tensor)`,
// `terms_parts(params)` and `projects(dtype, shape, features)`, whether its kernels support EdgeAttr.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "../core/layout.h"
#include "../core/terms.h"
#include "attention.h"

namespace dfgnn {

template <class Backend>
struct Planned : Attention<Backend> {
  using Base = Attention<Backend>;
  using typename Base::Gradients;
  using typename Base::Inputs;
  using typename Base::Outputs;
  using typename Base::WayOfDst;

  // A graph with its plans. The tensors own the memory that the structs point to.
  struct Graph {
    Sizes sizes;  // num_dst, num_src, num_edges
    torch::stable::Device device;
    Csr csr, reverse;
    bool has_reverse;
    std::vector<Tensor> held;
  };

  // ---- graphs by number ------------------------------------------------------------------------

  // Never destroyed, because tensors must not be freed after torch's static objects.
  struct Graphs {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<const Graph>> all;
    int64_t last = 0;
    static Graphs& get() {
      static Graphs* graphs = new Graphs;
      return *graphs;
    }
  };

  static int64_t graph_handle(Tensor indices, OptTensor eids, Tensor items, Tensor splits, Sizes plan,
                              OptTensor rev_indices, OptTensor rev_eids, OptTensor rev_items,
                              OptTensor rev_splits, Sizes rev_plan, OptTensor tiles, OptTensor rev_tiles) {
    const Checker check("dfgnn::graph_handle", indices);
    const PlanArgs args = Base::plan_args(check, plan);
    auto graph = std::make_shared<Graph>(Graph{{args.num_rows, args.num_cols, args.num_edges},
                                               indices.device(),
                                               {},
                                               {},
                                               rev_indices.has_value(),
                                               {}});
    graph->csr =
        Base::csr(check, "indices", indices, eids, items, splits, plan, tiles, args.num_rows, args.num_cols);
    if (graph->has_reverse) {
      Shape shape{};
      shape.num_dst = args.num_rows, shape.num_src = args.num_cols, shape.num_edges = args.num_edges;
      graph->reverse =
          Base::reverse_csr(check, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, rev_tiles, shape);
    }
    graph->held = {indices, items, splits};
    for (const OptTensor* t : {&eids, &rev_indices, &rev_eids, &rev_items, &rev_splits, &tiles, &rev_tiles})
      if (*t) graph->held.push_back(**t);
    return keep(std::move(graph));
  }

  static int64_t keep(std::shared_ptr<const Graph> graph) {
    Graphs& graphs = Graphs::get();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    graphs.all.emplace(++graphs.last, std::move(graph));
    return graphs.last;
  }

  // A plain C++ function, not an operator: finalizers call it, from any thread and under any mode.
  static void drop_graph(int64_t number) {
    std::shared_ptr<const Graph> dropped;  // so that its tensors are freed after the lock is released
    Graphs& graphs = Graphs::get();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    const auto found = graphs.all.find(number);
    if (found == graphs.all.end()) return;
    dropped = std::move(found->second);
    graphs.all.erase(found);
  }

  static std::shared_ptr<const Graph> graph_of(const Checker& check, int64_t number, const Tensor& value,
                                               bool backward) {
    std::shared_ptr<const Graph> graph;
    {
      Graphs& graphs = Graphs::get();
      const std::lock_guard<std::mutex> lock(graphs.mutex);
      const auto found = graphs.all.find(number);
      if (found != graphs.all.end()) graph = found->second;
    }
    check.require(bool(graph), "graph: expected a number that graph_handle gave, got ", number);
    check.require(graph->device == value.device(), "graph: expected one on the device of value");
    check.require(value.dim() == 3 && value.size(0) == graph->sizes[1], "value: expected shape [",
                  graph->sizes[1], ", heads, size]: a row for each source of the graph");
    check.require(!backward || graph->has_reverse, "graph: expected one with its reverse CSR");
    return graph;
  }

  // ---- attention -------------------------------------------------------------------------------

  // The arrays that forward saves for backward beside out, in one tensor.
  template <class Params>
  static Workspace kept(Params& p, const Inputs& in, bool save_positive) {
    Workspace all;
    const ScalarType acc = in.acc();
    const int64_t m = in.num_dst, h = in.heads(), dv = in.value_dim();
    all.add(place(p.stats), true, {m, h, 2}, acc);
    all.add(place(p.positive_mass), save_positive, {m, h}, acc);
    all.add(place(p.positive), save_positive, {m, h, dv}, in.type());
    return all;
  }
  static void*& place(void*& where) { return where; }
  static void*& place(const void*& where) { return const_cast<void*&>(where); }

  static void read(const Checker& check, const Workspace& all, const Tensor& memory) {
    check.tensor("kept", memory, {all.bytes()}, {ScalarType::Byte});
    check.require(memory.is_contiguous() && reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 16 == 0,
                  "kept: expected it as it was returned");
    all.place(const_cast<void*>(memory.const_data_ptr()));  // backward only reads it
  }

  // Views a layer's rows [n, heads * size] as [n, heads, size]; heads = 0: they have that shape already.
  static void split(const Checker& check, OptTensor& t, int64_t heads) {
    if (!heads || !t) return;
    check.require(heads > 0 && t->dim() == 2 && t->size(1) % heads == 0,
                  "heads: expected tensors of two dimensions, and of a multiple of ", heads, " columns");
    t = reshaped(dense(*t), {t->size(0), heads, t->size(1) / heads});
  }
  static void split(const Checker& check, Tensor& t, int64_t heads) {
    OptTensor some = t;
    split(check, some, heads);
    t = *some;
  }
  static OptTensor joined(const OptTensor& t, int64_t heads) {
    if (!heads || !t || t->dim() < 3) return t;
    return reshaped(*t, {t->size(0), t->size(1) * t->size(2)});
  }
  // A tensor of any shape as one vector per head.
  static OptTensor by_head(const Checker& check, const char* name, const OptTensor& t, int64_t heads) {
    if (!heads || !t) return t;
    check.require(t->numel() % heads == 0, name, ": expected a multiple of ", heads, " elements");
    return reshaped(dense(*t), {heads, t->numel() / heads});
  }

  static std::tuple<Tensor, Tensor, OptTensor> attend(
      int64_t number, int64_t heads, int64_t score, Tensor value, OptTensor src, OptTensor dst,
      OptTensor attn, OptTensor edge_bias, OptTensor edge_gate, OptTensor edge_mask, OptTensor edge_weight,
      OptTensor edge_feat, OptTensor seed, OptTensor out_bias, double negative_slope, double scale,
      double dropout_p, int64_t flags, bool return_attention, bool save_positive) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend", value);
    split(check, value, heads);
    if (Score(score) != Score::additive) split(check, src, heads), split(check, dst, heads);
    attn = by_head(check, "attn", attn, heads), out_bias = by_head(check, "out_bias", out_bias, heads);
    const auto graph = graph_of(check, number, value, false);
    Inputs in{score,           value,          src,         dst,       attn, edge_bias,
              edge_gate,       edge_mask,      edge_weight, edge_feat, seed, out_bias,
              graph->sizes[0], negative_slope, scale,       dropout_p, flags};
    ForwardParams p{};
    Base::fill(check, in, p, graph->sizes[2]);
    p.csr = graph->csr;
    check.require(!save_positive || p.score == Score::additive, "save_positive: additive only");
    const OptTensor memory = kept(p, in, save_positive).make(value);
    const Outputs made = Base::run_forward(check, in, p, return_attention);
    return {*joined(made.out, heads), *memory, made.attention};
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
    split(check, value, heads), split(check, grad_out, heads), split(check, out, heads);
    if (Score(score) != Score::additive) split(check, src, heads), split(check, dst, heads);
    attn = by_head(check, "attn", attn, heads), out_bias = by_head(check, "out_bias", out_bias, heads);
    const auto graph = graph_of(check, number, value, true);
    Base::check_need(check, need);
    Inputs in{score,           value,          src,         dst,       attn, edge_bias,
              edge_gate,       edge_mask,      edge_weight, edge_feat, seed, out_bias,
              graph->sizes[0], negative_slope, scale,       dropout_p, flags};
    BackwardParams p{};
    Base::fill(check, in, p, graph->sizes[2]);
    Base::fill_backward(check, in, p, grad_out, out, grad_attention, attention);
    const WayOfDst way = Base::way_of_dst(in, grad_attention.has_value(), need);
    check.require(!way.from_positive || has_positive, "kept: expected `positive` for the gradient of dst");
    read(check, kept(p, in, has_positive), memory);
    if (!way.from_positive) p.positive = p.positive_mass = nullptr;
    p.csr = graph->csr, p.reverse = graph->reverse;
    const Gradients g = Base::run_backward(check, in, p, way, need);
    return {*joined(g.value, heads),
            joined(g.src, heads),
            joined(g.dst, heads),
            g.attn,
            g.bias,
            g.gate,
            g.weight,
            g.feat};
  }

  // ---- dot attention with features of edges that are projected at the nodes ---------------------

  // The arguments that both operators share; it owns the memory that `p` points to.
  struct Projected {
    Inputs in;
    std::shared_ptr<const Graph> graph;
    Tensor attr;
  };
  template <class Params>
  static Projected projected(const Checker& check, Params& p, int64_t number, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& attr, const Tensor& onto,
                             const Tensor& back, const OptTensor& edge_bias, const OptTensor& edge_mask,
                             const OptTensor& edge_weight, const OptTensor& seed, const OptTensor& out_bias,
                             double scale, double dropout_p, bool backward) {
    Projected call{{}, graph_of(check, number, value, backward), dense(attr)};
    Inputs& in = call.in;
    in.score = int64_t(Score::dot), in.value = value, in.src = key, in.dst = query;
    in.bias = edge_bias, in.mask = edge_mask, in.weight = edge_weight, in.seed = seed, in.out_bias = out_bias;
    in.num_dst = call.graph->sizes[0], in.negative_slope = 1, in.scale = scale, in.dropout_p = dropout_p;
    Base::fill(check, in, p, call.graph->sizes[2]);
    p.csr = call.graph->csr;
    const ScalarType type = in.type();
    check.tensor("attr", call.attr, {call.graph->sizes[2], -1}, {type});
    const int64_t dim = call.attr.size(1);
    check.require(Backend::projects(p.dtype, p.shape, dim),
                  "attr: expected features that a head's lanes can share, got ", dim,
                  " features and heads of ", in.dim());
    const int lanes = lanes_per_head(int(in.heads()), int(in.dim()), 2);
    const int64_t columns = lanes * (kLoadBytes / 2), steps = (dim + 15) / 16;
    for (const Tensor* factor : {&onto, &back})
      check.tensor(factor == &onto ? "onto" : "back", *factor, {in.heads(), steps, columns * 16}, {type});
    check.require(onto.is_contiguous() && back.is_contiguous(), "onto, back: expected contiguous tensors");
    p.attr.x = data(call.attr), p.attr.dim = int32_t(dim), p.attr.width = int32_t((dim + 7) / 8 * 8);
    p.attr.onto = data(onto), p.attr.back = data(back);
    return call;
  }

  static std::tuple<Tensor, Tensor, Tensor> attend_projected(int64_t number, Tensor query, Tensor key,
                                                             Tensor value, Tensor attr, Tensor onto,
                                                             Tensor back, OptTensor edge_bias,
                                                             OptTensor edge_mask, OptTensor edge_weight,
                                                             OptTensor seed, OptTensor out_bias, double scale,
                                                             double dropout_p) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend_projected", value);
    ForwardParams p{};
    const Projected call = projected(check, p, number, query, key, value, attr, onto, back, edge_bias,
                                     edge_mask, edge_weight, seed, out_bias, scale, dropout_p, false);
    const Inputs& in = call.in;
    Tensor sums = make(value, {in.num_dst, in.heads(), p.attr.width}, in.type());
    p.attr.sums = sums.mutable_data_ptr();
    const OptTensor memory = kept(p, in, false).make(value);
    const Outputs made = Base::run_forward(check, in, p, false);
    if (p.shape.num_edges == 0) sums = torch::stable::zero_(sums);
    return {made.out, *memory, sums};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_projected_backward(
      int64_t number, Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attr, Tensor onto,
      Tensor back, OptTensor edge_bias, OptTensor edge_mask, OptTensor edge_weight, OptTensor seed,
      OptTensor out_bias, Tensor out, Tensor memory, double scale, double dropout_p, bool keep_edges) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend_projected_backward", value);
    BackwardParams p{};
    const Projected call = projected(check, p, number, query, key, value, attr, onto, back, edge_bias,
                                     edge_mask, edge_weight, seed, out_bias, scale, dropout_p, true);
    const Inputs& in = call.in;
    OptTensor none;
    Base::fill_backward(check, in, p, grad_out, out, none, none);
    read(check, kept(p, in, false), memory);
    p.reverse = call.graph->reverse;
    Tensor sums = make(value, {in.num_dst, in.heads(), p.attr.width}, in.type());
    Tensor edges = make(value, {p.shape.num_edges, in.heads(), 2}, in.acc());
    p.attr.sums = sums.mutable_data_ptr(), p.handed = edges.mutable_data_ptr();
    p.attr.keep_edges = keep_edges;
    const WayOfDst way = Base::way_of_dst(in, false, Base::kNeedDst);
    Gradients g = Base::run_backward(check, in, p, way, Base::kNeedDst);
    if (p.shape.num_edges == 0) sums = torch::stable::zero_(sums);
    return {g.value, *g.src, *g.dst, sums, edges};
  }

  // ---- additive attention of projected features ------------------------------------------------

  // feat, [rows, heads, size] or a layer's [rows, heads * size], in the former shape. attn: [.., heads,
  // vector size].
  static Tensor by_heads(const Checker& check, const char* name, const Tensor& feat, const Tensor& attn) {
    check.require(attn.dim() >= 2 && (feat.dim() == 2 || feat.dim() == 3), name,
                  ": expected two dimensions or three, and two or more of attn_src");
    const Tensor solid = dense(feat);
    if (feat.dim() == 3) return solid;
    const int64_t heads = attn.size(attn.dim() - 2);
    check.require(heads > 0 && feat.size(1) % heads == 0, name, ": expected rows of ", heads, " heads, got ",
                  feat.size(1), " columns");
    return reshaped(solid, {feat.size(0), heads, feat.size(1) / heads});
  }

  // feat: the result of by_heads, whose first num_dst rows are the destinations.
  static TermsParams terms_params(const Checker& check, const Tensor& feat, const Tensor& attn_src,
                                  const Tensor& attn_dst, int64_t num_dst) {
    const ScalarType type = feat.scalar_type(), acc = acc_type(type), vectors = attn_src.scalar_type();
    check.tensor("feat", feat, {-1, -1, -1}, {type});
    for (int k = 0; k < 3; ++k) check.count("feat: sizes", feat.size(k));
    const int64_t heads = feat.size(1), size = attn_src.size(attn_src.dim() - 1);
    check.require(vectors == type || vectors == acc, "attn_src: expected feat's dtype or the type of sums");
    for (const Tensor* attn : {&attn_src, &attn_dst})
      check.require(
          attn->numel() == heads * size && attn->scalar_type() == vectors && attn->device() == feat.device(),
          "attn_src, attn_dst: expected [", heads, ", ", size, "] of one dtype on feat's device");
    check.require(size <= feat.size(2), "attn_src: expected vectors no longer than feat's heads");
    check.require(num_dst >= 0 && num_dst <= feat.size(0), "num_dst: expected no more than feat's rows");
    check.require(heads * feat.size(2) < kMostIds, "feat: expected rows of less than 2**31 elements");
    TermsParams p{};
    p.dtype = dtype_of(check.op(), feat);
    p.num_rows[0] = feat.size(0), p.num_rows[1] = num_dst;
    p.heads = int32_t(heads), p.dim = int32_t(feat.size(2)), p.vector_dim = int32_t(size);
    p.vectors_are_acc = vectors == acc;
    p.feat = data(feat), p.vectors[0] = data(attn_src), p.vectors[1] = data(attn_dst);
    Backend::check(check, Shape{num_dst, feat.size(0), 0, p.heads, p.dim, p.dim}, p.dtype);
    return p;
  }

  static std::tuple<Tensor, Tensor> score_terms(Tensor feat, Tensor attn_src, Tensor attn_dst,
                                                int64_t num_dst) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::score_terms", feat);
    feat = by_heads(check, "feat", feat, attn_src), attn_src = dense(attn_src), attn_dst = dense(attn_dst);
    TermsParams p = terms_params(check, feat, attn_src, attn_dst, num_dst);
    const ScalarType acc = acc_type(feat.scalar_type());
    Tensor src = make(feat, {feat.size(0), feat.size(1)}, acc),
           dst = make(feat, {num_dst, feat.size(1)}, acc);
    p.terms[0] = src.mutable_data_ptr(), p.terms[1] = dst.mutable_data_ptr();
    Backend::terms(p, feat);
    return {src, dst};
  }

  struct VectorGradients {
    Tensor src, dst;
    OptTensor bias;
  };
  // Adds the terms' share to grad_feat. bias: the parameter whose gradient is the sum of grad_out, or none.
  static VectorGradients run_terms_backward(const Tensor& feat, const Tensor& attn_src,
                                            const Tensor& attn_dst, TermsBackwardParams& q,
                                            const OptTensor& bias) {
    const TermsParams& p = q.of;
    const ScalarType vectors = attn_src.scalar_type();
    VectorGradients g{make(feat, sizes_of(attn_src), vectors), make(feat, sizes_of(attn_dst), vectors), {}};
    g.bias =
        optional(q.sums[2], bias.has_value(), feat, bias ? sizes_of(*bias) : Sizes{}, feat.scalar_type());
    q.sums[0] = g.src.mutable_data_ptr(), q.sums[1] = g.dst.mutable_data_ptr();
    q.parts = Backend::terms_parts(p);
    const Tensor partial =
        make(feat, {q.parts, kTermsSums, int64_t(p.heads) * p.dim}, acc_type(feat.scalar_type()));
    q.partial = partial.mutable_data_ptr();
    Backend::terms_backward(q, feat);
    return g;
  }

  static std::tuple<Tensor, Tensor, Tensor> score_terms_backward(Tensor grad_src, Tensor grad_dst,
                                                                 Tensor feat, Tensor attn_src,
                                                                 Tensor attn_dst) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::score_terms_backward", feat);
    const Tensor given = feat;
    feat = by_heads(check, "feat", feat, attn_src), attn_src = dense(attn_src), attn_dst = dense(attn_dst);
    grad_src = dense(grad_src), grad_dst = dense(grad_dst);
    const ScalarType acc = acc_type(feat.scalar_type());
    check.tensor("grad_src", grad_src, {feat.size(0), feat.size(1)}, {acc});
    check.tensor("grad_dst", grad_dst, {-1, feat.size(1)}, {acc});
    TermsBackwardParams q{};
    q.of = terms_params(check, feat, attn_src, attn_dst, grad_dst.size(0));
    q.grad_terms[0] = data(grad_src), q.grad_terms[1] = data(grad_dst);
    Tensor grad_feat = make(feat, sizes_of(given), feat.scalar_type());
    grad_feat = torch::stable::zero_(grad_feat);
    q.grad_feat = grad_feat.mutable_data_ptr();
    const VectorGradients g = run_terms_backward(feat, attn_src, attn_dst, q, {});
    return {grad_feat, g.src, g.dst};
  }

  // The arrays that gat saves for backward: those of forward, and the terms.
  template <class Params>
  static Workspace gat_kept(Params& p, const Inputs& in, bool train) {
    Workspace all = kept(p, in, train);
    all.add(place(p.alpha_src), true, {in.num_src(), in.heads()}, in.acc());
    all.add(place(p.alpha_dst), true, {in.num_dst, in.heads()}, in.acc());
    return all;
  }

  template <class Params>
  static Inputs gat_inputs(const Checker& check, Params& p, const Graph& graph, const Tensor& feat,
                           const OptTensor& seed, const OptTensor& out_bias, double negative_slope,
                           double dropout_p) {
    Inputs in{};
    in.score = int64_t(Score::additive), in.value = feat, in.seed = seed;
    if (out_bias) {
      check.require(out_bias->numel() == feat.size(1) * feat.size(2), "out_bias: expected ",
                    feat.size(1) * feat.size(2), " elements, got ", out_bias->numel());
      in.out_bias = reshaped(dense(*out_bias), {feat.size(1), feat.size(2)});
    }
    in.num_dst = graph.sizes[0], in.negative_slope = negative_slope, in.scale = 1, in.dropout_p = dropout_p;
    Base::fill(check, in, p, graph.sizes[2], true);
    p.csr = graph.csr;
    return in;
  }

  static std::tuple<Tensor, Tensor> gat(int64_t number, Tensor feat, Tensor attn_src, Tensor attn_dst,
                                        OptTensor seed, OptTensor out_bias, double negative_slope,
                                        double dropout_p, bool train) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::gat", feat);
    const bool flat = feat.dim() == 2;
    feat = by_heads(check, "feat", feat, attn_src), attn_src = dense(attn_src), attn_dst = dense(attn_dst);
    const auto graph = graph_of(check, number, feat, false);
    ForwardParams p{};
    const Inputs in = gat_inputs(check, p, *graph, feat, seed, out_bias, negative_slope, dropout_p);
    TermsParams t = terms_params(check, feat, attn_src, attn_dst, in.num_dst);
    const OptTensor memory = gat_kept(p, in, train).make(feat);
    t.terms[0] = const_cast<void*>(p.alpha_src), t.terms[1] = const_cast<void*>(p.alpha_dst);
    Backend::terms(t, feat);
    Tensor out = Base::run_forward(check, in, p, false).out;
    if (flat) out = reshaped(out, {in.num_dst, in.heads() * in.value_dim()});
    return {out, *memory};
  }

  static std::tuple<Tensor, Tensor, Tensor, OptTensor> gat_backward(
      int64_t number, Tensor grad_out, Tensor feat, Tensor attn_src, Tensor attn_dst, OptTensor seed,
      OptTensor out_bias, Tensor out, Tensor memory, double negative_slope, double dropout_p) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::gat_backward", feat);
    const bool flat = feat.dim() == 2;
    feat = by_heads(check, "feat", feat, attn_src), attn_src = dense(attn_src), attn_dst = dense(attn_dst);
    grad_out = by_heads(check, "grad_out", grad_out, attn_src), out = by_heads(check, "out", out, attn_src);
    const auto graph = graph_of(check, number, feat, true);
    BackwardParams p{};
    const Inputs in = gat_inputs(check, p, *graph, feat, seed, out_bias, negative_slope, dropout_p);
    OptTensor none;
    Base::fill_backward(check, in, p, grad_out, out, none, none);
    read(check, gat_kept(p, in, true), memory);
    p.reverse = graph->reverse;
    const WayOfDst way{true, false, true};
    const Gradients g = Base::run_backward(check, in, p, way, Base::kNeedDst);
    TermsBackwardParams q{};
    q.of = terms_params(check, feat, attn_src, attn_dst, in.num_dst);
    q.grad_terms[0] = data(g.src), q.grad_terms[1] = data(g.dst);
    q.grad_out = out_bias ? p.grad_out : nullptr;
    Tensor grad_feat = g.value;
    q.grad_feat = grad_feat.mutable_data_ptr();
    const VectorGradients v = run_terms_backward(feat, attn_src, attn_dst, q, out_bias);
    if (flat) grad_feat = reshaped(grad_feat, {in.num_src(), in.heads() * in.value_dim()});
    return {grad_feat, v.src, v.dst, v.bias};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    Base::register_ops(m);
    m.impl("graph_handle", TORCH_BOX(&graph_handle));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("attend_backward", TORCH_BOX(&attend_backward));
    m.impl("attend_projected", TORCH_BOX(&attend_projected));
    m.impl("attend_projected_backward", TORCH_BOX(&attend_projected_backward));
    m.impl("score_terms", TORCH_BOX(&score_terms));
    m.impl("score_terms_backward", TORCH_BOX(&score_terms_backward));
    m.impl("gat", TORCH_BOX(&gat));
    m.impl("gat_backward", TORCH_BOX(&gat_backward));
  }
};

}  // namespace dfgnn
