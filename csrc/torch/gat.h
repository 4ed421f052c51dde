// The operators score_terms, which computes the terms alpha_src and alpha_dst of the additive score (core/
// terms.h), and gat, which is additive attention including these terms, as a GAT layer has it; and their
// backward. A Backend is that of attention.h, with `terms(params, tensor)` and `terms_backward(params,
// tensor)`, which launch, and `terms_parts(params)`, the number of partial sums of the latter.
#pragma once

#include "../core/terms.h"
#include "attention.h"
#include "linear.h"

namespace dfgnn {

template <class Backend>
struct GatAttention {
  using Base = Attention<Backend>;
  using Gradients = typename Base::Gradients;
  using Inputs = typename Base::Inputs;
  using DstGradient = typename Base::DstGradient;

  // ---- score terms -----------------------------------------------------------------------------

  // Returns feat as [rows, heads, size], dense. The argument may also be a layer's [rows, heads * size]; the
  // number of heads is that of attn [.., heads, vector size].
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

  // Whether attn is [heads, size], after dimensions of size 1.
  static bool are_vectors(const Tensor& attn, int64_t heads, int64_t size) {
    const int64_t dims = attn.dim();
    return dims >= 2 && attn.size(dims - 2) == heads && attn.size(dims - 1) == size &&
           attn.numel() == heads * size;
  }

  // Checks the arguments of score_terms and returns them. feat: as by_heads returns it; its first num_dst
  // rows are the destinations.
  static TermsParams terms_params(const Checker& check, const Tensor& feat, const Tensor& attn_src,
                                  const Tensor& attn_dst, int64_t num_dst) {
    const ScalarType type = feat.scalar_type(), acc = acc_type(type), vectors = attn_src.scalar_type();
    check.tensor("feat", feat, {-1, -1, -1}, {type});
    for (int k = 0; k < 3; ++k) check.count("feat: sizes", feat.size(k));
    const int64_t heads = feat.size(1), size = attn_src.size(attn_src.dim() - 1);
    check.head("feat", heads, feat.size(2)), check.head("attn_src", heads, size);
    check.require(vectors == type || vectors == acc, "attn_src: expected feat's dtype or the type of sums");
    for (const Tensor* attn : {&attn_src, &attn_dst})
      if (!are_vectors(*attn, heads, size) || attn->scalar_type() != vectors ||
          attn->device() != feat.device())
        check.require(false, "attn_src, attn_dst: expected [", heads, ", ", size,
                      "] of one dtype on feat's device, got ", to_string(sizes_of(*attn)), " of ",
                      torch::headeronly::toString(attn->scalar_type()));
    // A head of feat may have more columns than its vector, so that it fills the loads of a kernel, which are
    // of 16 bytes at most: eight numbers.
    check.require(size <= feat.size(2) && feat.size(2) - size < 8,
                  "attn_src: expected vectors no longer than feat's heads, of ", feat.size(2),
                  " columns, and at most 7 shorter, got ", size);
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

  // The gradients of attn_src, attn_dst and bias.
  struct VectorGradients {
    Tensor src, dst;
    OptTensor bias;
  };
  // Adds the partial sums of the backward of score_terms, for q.of, to the arrays of a call.
  static void add_terms_partial(TermsBackwardParams& q, Workspace& scratch, const Tensor& feat) {
    q.parts = Backend::terms_parts(q.of);
    scratch.add(q.partial, true, {q.parts, kTermsSums, int64_t(q.of.heads) * q.of.dim},
                acc_type(feat.scalar_type()));
  }
  // Launches the backward of score_terms: adds the gradient of feat to q.grad_feat, and returns the gradients
  // of the vectors. bias: the layer's bias, or none; its gradient is the sum of q.grad_out over the nodes.
  // together: the gradients may be parts of one tensor. q.partial: null, or placed by the caller.
  static VectorGradients run_terms_backward(const Tensor& feat, const Tensor& attn_src,
                                            const Tensor& attn_dst, TermsBackwardParams& q,
                                            const OptTensor& bias, bool together = false) {
    const ScalarType vectors = attn_src.scalar_type(), type = feat.scalar_type();
    const int64_t size = attn_src.numel(), count = !together ? 0 : bias && type == vectors ? 3 : 2;
    const OptTensor all = together ? OptTensor(make(feat, {count, size}, vectors)) : OptTensor();
    const auto part = [&](const Tensor& like, int64_t k) {
      const Sizes sizes = sizes_of(like);
      if (!all) return make(feat, sizes, vectors);
      Sizes strides(sizes.size());
      int64_t step = 1;
      for (size_t j = sizes.size(); j-- > 0; step *= sizes[j]) strides[j] = step;
      return strided(*all, sizes, strides, k * size);
    };
    VectorGradients g{part(attn_src, 0), part(attn_dst, 1), {}};
    if (count == 3) {
      g.bias = part(*bias, 2);
      q.sums[2] = g.bias->mutable_data_ptr();
    } else {
      const Sizes of_bias = bias ? sizes_of(*bias) : Sizes{};
      g.bias = optional(q.sums[2], bias.has_value(), feat, of_bias, type);
    }
    q.sums[0] = g.src.mutable_data_ptr(), q.sums[1] = g.dst.mutable_data_ptr();
    OptTensor partial;
    if (!q.partial) {
      Workspace scratch;
      add_terms_partial(q, scratch, feat);
      partial = scratch.make(feat);
    }
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

  // ---- attention with score terms ----------------------------------------------------------------

  // Lays out the arrays that gat saves for backward: those that attend saves, and the score terms. train:
  // whether it saves `positive` (params.h), which backward needs.
  template <class Params>
  static Workspace gat_kept(const Checker& check, Params& p, const Inputs& in, bool train) {
    Workspace all = Base::kept(check, p, in, train);
    all.add(Base::place(p.alpha_src), true, {in.num_src(), in.heads()}, in.acc());
    all.add(Base::place(p.alpha_dst), true, {in.num_dst, in.heads()}, in.acc());
    return all;
  }

  // Checks gat's arguments except the vectors, fills them and the forward CSR into `p`, and returns them.
  template <class Params>
  static Inputs gat_inputs(const Checker& check, Params& p, const typename Base::Graph& graph,
                           const Tensor& feat, const OptTensor& seed, const OptTensor& out_bias,
                           double negative_slope, double dropout_p) {
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
    const auto graph = Base::graph_of(check, number, feat, false);
    ForwardParams p{};
    const Inputs in = gat_inputs(check, p, *graph, feat, seed, out_bias, negative_slope, dropout_p);
    TermsParams t = terms_params(check, feat, attn_src, attn_dst, in.num_dst);
    const OptTensor memory = gat_kept(check, p, in, train).make(feat);
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
    const auto graph = Base::graph_of(check, number, feat, true);
    BackwardParams p{};
    const Inputs in = gat_inputs(check, p, *graph, feat, seed, out_bias, negative_slope, dropout_p);
    OptTensor none;
    Base::fill_backward(check, in, p, grad_out, out, none, none);
    Base::read(check, gat_kept(check, p, in, true), memory);
    p.reverse = graph->reverse;
    // {need, sum_rows, from_positive}: gat has neither a gate nor grad_attention, which would need sum_rows.
    const DstGradient of_dst{true, false, true};
    const Gradients g = Base::run_backward(check, in, p, of_dst, Base::kNeedDst);
    TermsBackwardParams q{};
    q.of = terms_params(check, feat, attn_src, attn_dst, in.num_dst);
    q.grad_terms[0] = data(g.src), q.grad_terms[1] = data(g.dst);
    q.grad_out = out_bias ? p.grad_out : nullptr;
    Tensor grad_feat = *g.value;
    q.grad_feat = grad_feat.mutable_data_ptr();
    const VectorGradients v = run_terms_backward(feat, attn_src, attn_dst, q, out_bias);
    if (flat) grad_feat = reshaped(grad_feat, {in.num_src(), in.heads() * in.value_dim()});
    return {grad_feat, v.src, v.dst, v.bias};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("score_terms", TORCH_BOX(&score_terms));
    m.impl("score_terms_backward", TORCH_BOX(&score_terms_backward));
    m.impl("gat", TORCH_BOX(&gat));
    m.impl("gat_backward", TORCH_BOX(&gat_backward));
  }
};

}  // namespace dfgnn
