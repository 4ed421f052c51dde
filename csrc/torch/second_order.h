// The operator attend_second_order, the backward of attention's backward (core/second_order_params.h): it
// checks, allocates and launches. of_x is the cotangent of the gradient of x. A Backend is that of
// attention.h, with `second_parts(params)`, the number of partial sums of grad_attn; `second_scratch(params,
// workspace)`, which adds the scratch that it needs to the workspace; and `second_order(params, tensor)`,
// which launches.
#pragma once

#include "../core/second_order_params.h"
#include "attention.h"

namespace dfgnn {

template <class Backend>
struct SecondOrder {
  using Base = Attention<Backend>;
  using Inputs = typename Base::Inputs;

  // The cotangents of_value, of_src, .... Each is optional.
  struct Cotangents {
    OptTensor value, src, dst, attn, bias, gate, weight, feat;
  };

  // Checks the cotangents, makes them dense, and fills them in.
  static void fill_cotangents(const Checker& check, const Inputs& in, SecondParams& p, Cotangents& of) {
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t n = in.num_src(), m = in.num_dst, h = in.heads(), d = in.dim(), dv = in.value_dim(),
                  edges = p.shape.num_edges;
    check.tensor("of_value", of.value, {n, h, dv}, {type});
    if (p.score == Score::additive) {
      check.tensor("of_src", of.src, {n, h}, {acc}), check.tensor("of_dst", of.dst, {m, h}, {acc});
    } else {
      check.require(p.score == Score::dot || !of.src, "of_src: expected none of additive_v2");
      check.tensor("of_src", of.src, {n, h, d}, {type}), check.tensor("of_dst", of.dst, {m, h, d}, {type});
    }
    check.require(p.score == Score::additive_v2 || !of.attn, "of_attn: expected of additive_v2 only");
    check.tensor("of_attn", of.attn, {h, d}, {acc});
    check.tensor("of_bias", of.bias, {edges, h}, {acc}), check.tensor("of_gate", of.gate, {edges, h}, {acc});
    check.tensor("of_weight", of.weight, {edges, h}, {acc});
    check.tensor("of_feat", of.feat, {edges, h, in.feat ? in.feat->size(2) : -1}, {type});
    check.require((in.bias || !of.bias) && (in.gate || !of.gate) && (in.weight || !of.weight) &&
                      (in.feat || !of.feat) && (in.dst || !of.dst),
                  "cotangents: expected those of gradients that there are");
    for (OptTensor* t : {&of.value, &of.src, &of.dst, &of.attn, &of.bias, &of.gate, &of.weight, &of.feat})
      *t = dense(*t);
    p.of_value = data(of.value), p.of_src = data(of.src), p.of_dst = data(of.dst), p.of_attn = data(of.attn);
    p.of_bias = data(of.bias), p.of_gate = data(of.gate), p.of_weight = data(of.weight);
    p.of_feat = data(of.feat);
  }

  static std::tuple<Tensor, OptTensor, Tensor, OptTensor, OptTensor, OptTensor, OptTensor, OptTensor,
                    OptTensor, OptTensor>
  run(int64_t number, Tensor grad_out, OptTensor grad_attention, int64_t score, Tensor value, OptTensor src,
      OptTensor dst, OptTensor attn, OptTensor edge_bias, OptTensor edge_gate, OptTensor edge_mask,
      OptTensor edge_weight, OptTensor edge_feat, OptTensor seed, OptTensor out_bias, Tensor stats,
      OptTensor of_value, OptTensor of_src, OptTensor of_dst, OptTensor of_attn, OptTensor of_bias,
      OptTensor of_gate, OptTensor of_weight, OptTensor of_feat, double negative_slope, double scale,
      double dropout_p, int64_t flags, int64_t need) {
    const typename Backend::Scope scope(value);
    const Checker check("dfgnn::attend_second_order", value);
    Base::check_need(check, need);
    const auto graph = Base::graph_of(check, number, value, true);
    Inputs in{score,           value,          src,         dst,       attn, edge_bias,
              edge_gate,       edge_mask,      edge_weight, edge_feat, seed, out_bias,
              graph->sizes[0], negative_slope, scale,       dropout_p, flags};
    SecondParams p{};
    Base::fill(check, in, p, graph->sizes[2]);
    p.csr = graph->csr, p.reverse = graph->reverse;
    check.require(!p.csr.tiles && !p.reverse.tiles, "graph: expected a plan on rows, got tiles");
    const ScalarType type = in.type(), acc = in.acc();
    const int64_t n = in.num_src(), m = in.num_dst, h = in.heads(), d = in.dim(), dv = in.value_dim(),
                  edges = p.shape.num_edges;
    check.tensor("grad_out", grad_out, {m, h, dv}, {type});
    check.tensor("grad_attention", grad_attention, {edges, h}, {acc});
    check.tensor("stats", stats, {m, h, 2}, {acc});
    grad_out = dense(grad_out), grad_attention = dense(grad_attention), stats = dense(stats);
    p.grad_out = data(grad_out), p.grad_attention = data(grad_attention), p.stats = data(stats);
    Cotangents of{of_value, of_src, of_dst, of_attn, of_bias, of_gate, of_weight, of_feat};
    fill_cotangents(check, in, p, of);

    const bool additive = p.score == Score::additive, dot = p.score == Score::dot;
    const Sizes src_size = additive ? Sizes{n, h} : Sizes{n, h, d},
                dst_size = additive ? Sizes{m, h} : Sizes{m, h, d};
    const ScalarType ends = additive ? acc : type;
    p.attn_parts = additive || dot ? 0 : Backend::second_parts(p);
    Tensor grad_grad_out = make(value, {m, h, dv}, type), grad_value = make(value, {n, h, dv}, type);
    p.grad_grad_out = grad_grad_out.mutable_data_ptr(), p.grad_value = grad_value.mutable_data_ptr();
    const auto of_edges = [&](void*& where, bool wanted) {
      return optional(where, wanted, value, {edges, h}, acc);
    };
    OptTensor grad_src = optional(p.grad_src, additive || dot, value, src_size, ends),
              grad_dst = optional(p.grad_dst, bool(in.dst), value, dst_size, ends),
              grad_attn = optional(p.grad_attn, !additive && !dot, value, {p.attn_parts, h, dv}, acc);
    OptTensor grad_gamma = of_edges(p.grad_grad_attention, bool(grad_attention)),
              grad_bias = of_edges(p.grad_bias, in.bias && (need & Base::kNeedBias)),
              grad_gate = of_edges(p.grad_gate, in.gate && (need & Base::kNeedGate)),
              grad_weight = of_edges(p.grad_weight, in.weight && (need & Base::kNeedWeight));
    const bool need_feat = in.feat && (need & Base::kNeedFeat);
    OptTensor grad_feat =
        optional(p.grad_feat, need_feat, value, need_feat ? sizes_of(*in.feat) : Sizes{}, type);

    Workspace scratch;
    Backend::second_scratch(p, scratch);
    const OptTensor memory = scratch.make(value);
    Backend::second_order(p, value);
    return {grad_grad_out, grad_gamma, grad_value, grad_src,    grad_dst,
            grad_attn,     grad_bias,  grad_gate,  grad_weight, grad_feat};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("attend_second_order", TORCH_BOX(&run));
  }
};

}  // namespace dfgnn
