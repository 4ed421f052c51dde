// The operators of dot attention with features of the edges that are projected at the nodes (EdgeAttr in
// core/params.h). A Backend is that of attention.h, with `projects(dtype, shape, features)`, which says
// whether its kernels support this number of features.
#pragma once

#include "../core/layout.h"
#include "attention.h"

namespace dfgnn {

template <class Backend>
struct ProjectedAttention {
  using Base = Attention<Backend>;
  using Gradients = typename Base::Gradients;
  using Inputs = typename Base::Inputs;
  using Outputs = typename Base::Outputs;
  using DstGradient = typename Base::DstGradient;

  // The tensors of a call that own the memory to which its parameter struct points.
  struct Projected {
    Inputs in;
    std::shared_ptr<const typename Base::Graph> graph;
    Tensor attr;
  };
  // Checks the arguments that the two operators share, fills them into `p`, and returns their tensors.
  // backward: whether the graph needs its reverse CSR.
  template <class Params>
  static Projected projected(const Checker& check, Params& p, int64_t number, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& attr, const Tensor& onto,
                             const Tensor& back, const OptTensor& edge_bias, const OptTensor& edge_mask,
                             const OptTensor& edge_weight, const OptTensor& seed, const OptTensor& out_bias,
                             double scale, double dropout_p, bool backward) {
    Projected call{{}, Base::graph_of(check, number, value, backward), dense(attr)};
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
    const int64_t columns = lanes * (kLoadBytes / 2), steps = (dim + 15) / 16;  // a step is 16 features
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
    const OptTensor memory = Base::kept(check, p, in, false).make(value);
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
    Base::read(check, Base::kept(check, p, in, false), memory);
    p.reverse = call.graph->reverse;
    Tensor sums = make(value, {in.num_dst, in.heads(), p.attr.width}, in.type());
    Tensor edges = make(value, {p.shape.num_edges, in.heads(), 2}, in.acc());
    p.attr.sums = sums.mutable_data_ptr(), p.handed = edges.mutable_data_ptr();
    p.attr.keep_edges = keep_edges;
    const DstGradient of_dst = Base::dst_gradient(in, false, Base::kNeedDst);
    Gradients g = Base::run_backward(check, in, p, of_dst, Base::kNeedDst);
    if (p.shape.num_edges == 0) sums = torch::stable::zero_(sums);
    return {*g.value, *g.src, *g.dst, sums, edges};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("attend_projected", TORCH_BOX(&attend_projected));
    m.impl("attend_projected_backward", TORCH_BOX(&attend_projected_backward));
  }
};

}  // namespace dfgnn
