// The operators that compiled code calls: attention, GAT's attention and products along edges, on a
// graph that an operator in Python has found (dfgnn/engine/compiler_graph.py). It gives them `plan`, int64
// [2] on the CPU: the graph's number, and whether it has a fixed capacity, so that kernels leave the rows of
// unused edges unwritten. Those rows are 0 in the results here. num_dst and num_edges, the graph's sizes,
// tell compilers the shapes of results.
#pragma once

#include "edge_terms.h"
#include "gat.h"
#include "layer_call.h"
#include "products.h"

namespace dfgnn {

template <class Backend>
struct Planned {
  using Base = Attention<Backend>;
  using Inputs = typename Base::Inputs;

  struct Plan {
    int64_t number;
    bool unwritten;

    explicit Plan(const Tensor& t) {
      STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == 2 && t.is_contiguous() && t.is_cpu() &&
                          t.scalar_type() == ScalarType::Long,
                      "dfgnn: plan: expected int64 [2] on the CPU");
      const int64_t* numbers = static_cast<const int64_t*>(t.const_data_ptr());
      number = numbers[0], unwritten = numbers[1];
    }
  };

  // num_edges: 0 if no result has a row per edge.
  static void check_sizes(const Checker& check, const typename Base::Graph& graph, int64_t num_dst,
                          int64_t num_edges) {
    check.require(num_dst == graph.sizes[0] && (num_edges == 0 || num_edges == graph.sizes[2]),
                  "plan: expected that of a graph of ", num_dst, " destinations and ", num_edges,
                  " edges, got ", graph.sizes[0], " and ", graph.sizes[2]);
  }

  // ---- attention -------------------------------------------------------------------------------

  static Inputs read_tensors(BoxedStack& args, int64_t num_dst) {
    Inputs in{};
    in.score = args.read<int64_t>(), in.value = args.read<Tensor>(), in.num_dst = num_dst;
    for (OptTensor* t : {&in.src, &in.dst, &in.attn, &in.bias, &in.gate, &in.mask, &in.weight, &in.feat,
                         &in.seed, &in.out_bias})
      *t = args.read<OptTensor>();
    return in;
  }
  static void read_numbers(BoxedStack& args, Inputs& in) {
    for (double* number : {&in.negative_slope, &in.scale, &in.dropout_p}) *number = args.read<double>();
    in.flags = args.read<int64_t>();
  }
  // Returns the graph; rows [n, heads * size] become [n, heads, size], unless `heads` is 0.
  static auto prepare(const Checker& check, Inputs& in, const Plan& plan, int64_t heads, int64_t num_edges,
                      bool backward) {
    split_heads(check, in.value, heads);
    if (Score(in.score) != Score::additive)
      split_heads(check, in.src, heads), split_heads(check, in.dst, heads);
    in.attn = by_head(check, "attn", in.attn, heads);
    in.out_bias = by_head(check, "out_bias", in.out_bias, heads);
    auto graph = Base::graph_of(check, plan.number, in.value, backward);
    check_sizes(check, *graph, in.num_dst, num_edges);
    in.unwritten = plan.unwritten;
    return graph;
  }

  static void attend(StableIValue* stack, uint64_t, uint64_t) {
    BoxedStack args{stack}, out{stack};
    const Tensor given = args.read<Tensor>();
    const int64_t num_dst = args.read<int64_t>(), num_edges = args.read<int64_t>(),
                  heads = args.read<int64_t>();
    Inputs in = read_tensors(args, num_dst);
    read_numbers(args, in);
    const bool return_attention = args.read<bool>(), save_positive = args.read<bool>();
    const Plan plan(given);
    const typename Backend::Scope scope(in.value);
    const Checker check("dfgnn::planned_attend", in.value);
    const auto graph = prepare(check, in, plan, heads, num_edges, false);
    ForwardParams p{};
    Base::fill(check, in, p, graph->sizes[2]);
    p.csr = graph->csr;
    const typename Base::Saved saved = Base::make_saved(check, p, in, save_positive);
    const typename Base::Outputs made = Base::run_forward(check, in, p, return_attention);
    out.write(*join_heads(made.out, heads)), out.write(*saved[0]), out.write(saved[2]);
    out.write(saved[1]), out.write(made.attention);
  }

  static void attend_backward(StableIValue* stack, uint64_t, uint64_t) {
    BoxedStack args{stack}, results{stack};
    const Tensor given = args.read<Tensor>();
    const int64_t num_dst = args.read<int64_t>(), num_edges = args.read<int64_t>(),
                  heads = args.read<int64_t>();
    Tensor grad_out = args.read<Tensor>();
    OptTensor grad_attention = args.read<OptTensor>();
    Inputs in = read_tensors(args, num_dst);
    Tensor out = args.read<Tensor>(), stats = args.read<Tensor>();
    const OptTensor positive = args.read<OptTensor>(), positive_mass = args.read<OptTensor>();
    OptTensor attention = args.read<OptTensor>();
    read_numbers(args, in);
    const int64_t need = args.read<int64_t>();
    const Plan plan(given);
    const typename Backend::Scope scope(in.value);
    const Checker check("dfgnn::planned_attend_backward", in.value);
    split_heads(check, grad_out, heads), split_heads(check, out, heads);
    const auto graph = prepare(check, in, plan, heads, num_edges, true);
    BackwardParams p{};
    typename Base::Saved saved{stats, positive_mass, positive};
    const auto read = [&](bool need_positive) {
      check.require(!need_positive || (positive && positive_mass), "positive: needed for dst's gradient");
      Base::read_saved(check, p, in, need_positive, saved);
    };
    const auto plans = [&] { p.csr = graph->csr, p.reverse = graph->reverse; };
    auto g = Base::backward_call(check, in, p, graph->sizes[2], grad_out, out, grad_attention, attention,
                                 need, read, plans);
    // Partial sums, whose number a compiler would not know.
    if (g.attn && g.attn->size(0) != 1) {
      const Sizes first{0};
      g.attn = torch::stable::sum(*g.attn, torch::headeronly::IntHeaderOnlyArrayRef(first), true, in.acc());
    }
    results.write(*join_heads(g.value, heads));
    for (const OptTensor& t : {g.src, g.dst}) results.write(join_heads(t, heads));
    for (const OptTensor& t : {g.attn, g.bias, g.gate, g.weight, g.feat}) results.write(t);
  }

  // ---- GAT -------------------------------------------------------------------------------------

  // The operator on a graph's number, behind (plan, num_dst, num_edges) in place of that number.
  template <void (*kernel)(StableIValue*, uint64_t, uint64_t)>
  static void by_number(StableIValue* stack, uint64_t num_args, uint64_t num_results) {
    const Plan plan(torch::stable::detail::to<Tensor>(stack[0]));
    stack[2] = torch::stable::detail::from(plan.number);
    kernel(stack + 2, num_args - 2, num_results);
    std::copy(stack + 2, stack + 2 + num_results, stack);
  }

  // ---- products of edges' features -------------------------------------------------------------

  static auto stored(const Tensor& like, const Plan& plan, int64_t num_dst, int64_t num_edges,
                     bool reverse = false) {
    const Checker check("dfgnn: plan", like);
    auto graph = Base::stored(check, plan.number, like, reverse);
    check_sizes(check, *graph, num_dst, num_edges);
    return graph;
  }
  static Tensor edge_dot(Tensor given, int64_t num_dst, int64_t num_edges, Tensor rows, Tensor attr,
                         double scale) {
    const typename Backend::Scope scope(rows);
    const Plan plan(given);
    const auto graph = stored(rows, plan, num_dst, num_edges);
    return EdgeTerms<Backend>::dot_on(graph->csr, graph->sizes[2], rows, attr, scale, plan.unwritten);
  }
  static Tensor edge_sum(Tensor given, int64_t num_dst, int64_t num_edges, Tensor weight, Tensor attr,
                         int64_t width) {
    const typename Backend::Scope scope(attr);
    const auto graph = stored(attr, Plan(given), num_dst, num_edges);
    return EdgeTerms<Backend>::sum_on(graph->csr, graph->sizes[2], weight, attr, num_dst, width);
  }
  static Tensor edge_outer(Tensor given, int64_t num_dst, int64_t num_edges, Tensor weight, Tensor rows,
                           int64_t dim, double scale) {
    const typename Backend::Scope scope(rows);
    const Plan plan(given);
    const auto graph = stored(rows, plan, num_dst, num_edges);
    return EdgeTerms<Backend>::outer_on(graph->csr, graph->sizes[2], weight, rows, dim, scale,
                                        plan.unwritten);
  }

  // ---- products of nodes' rows along edges. reverse: rows are sources -------------------------------------

  static typename Products<Backend>::Side side_of(const typename Base::Graph& graph, bool reverse) {
    return {reverse ? graph.reverse : graph.csr, graph.sizes[reverse], graph.sizes[!reverse], graph.sizes[2]};
  }
  static Tensor sddmm(Tensor given, int64_t num_dst, int64_t num_edges, Tensor rows, Tensor feat,
                      bool reverse) {
    const typename Backend::Scope scope(feat);
    const Plan plan(given);
    const auto graph = stored(feat, plan, num_dst, num_edges, reverse);
    const Checker check("dfgnn::planned_sddmm", feat);
    return Products<Backend>::sddmm_on(check, side_of(*graph, reverse), rows, feat, plan.unwritten);
  }
  static Tensor spmm(Tensor given, int64_t num_dst, int64_t num_edges, Tensor weight, Tensor feat,
                     bool reverse, int64_t num_rows) {
    const typename Backend::Scope scope(feat);
    const auto graph = stored(feat, Plan(given), num_dst, num_edges, reverse);
    const Checker check("dfgnn::planned_spmm", feat);
    const auto side = side_of(*graph, reverse);
    check.require(num_rows == side.num_rows, "num_rows: expected ", side.num_rows, ", got ", num_rows);
    return Products<Backend>::spmm_on(check, side, weight, feat);
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("planned_attend", &attend);
    m.impl("planned_attend_backward", &attend_backward);
    m.impl("planned_gat", &by_number<TORCH_BOX(&GatAttention<Backend>::gat)>);
    m.impl("planned_gat_backward", &by_number<TORCH_BOX(&GatAttention<Backend>::gat_backward)>);
    m.impl("planned_sddmm", TORCH_BOX(&sddmm));
    m.impl("planned_spmm", TORCH_BOX(&spmm));
    m.impl("planned_edge_dot", TORCH_BOX(&edge_dot));
    m.impl("planned_edge_sum", TORCH_BOX(&edge_sum));
    m.impl("planned_edge_outer", TORCH_BOX(&edge_outer));
  }
};

}  // namespace dfgnn
