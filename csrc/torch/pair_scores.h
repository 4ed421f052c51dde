// The CPU operators pair_scores and pair_sums (core/pair_scores.h). A Backend is that of attention.h, with
// `pair_scores(params)`, `pair_sums(params)`, and `pair_parts(csr)`, the number of partial sums of of_proj.
#pragma once

#include "../core/pair_scores.h"
#include "graphs.h"

namespace dfgnn {

template <class Backend>
struct PairScores {
  // Checks the graph and the arguments that both operators share, and returns them. like: a tensor of the
  // type that all but `positive` have.
  static PairScoreParams fill(const Checker& check, const Tensor& like, int64_t heads, int64_t dim,
                              const Tensor& indices, const OptTensor& eids, const Tensor& items,
                              const Tensor& splits, const Sizes& plan, int64_t num_rows, int64_t num_cols,
                              double slope) {
    const ScalarType type = like.scalar_type();
    check.require(type == ScalarType::Float || type == ScalarType::Double,
                  "expected tensors of float32 or float64");
    check.count("num_rows", num_rows), check.count("num_cols", num_cols);
    check.count("heads", heads), check.count("dim", dim);
    check.head("rows", heads, dim);
    check.require(dim % kPairColumns == 0, "expected heads of a multiple of ", kPairColumns, " columns");
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    PairScoreParams p{};
    p.dtype = dtype_of(check.op(), like);
    p.num_rows = num_rows, p.num_cols = num_cols, p.num_edges = indices.size(0);
    p.heads = int32_t(heads), p.dim = int32_t(dim), p.slope = slope;
    p.csr =
        Graphs<Backend>::csr(check, "indices", indices, eids, items, splits, plan, {}, num_rows, num_cols);
    check.require(p.csr.num_parts == 0, "plan: expected items in one part");
    return p;
  }

  // Checks the attributes [E, attrs], the projection [H D, attrs] or both, and fills them into p.
  static void set_edges(const Checker& check, const Tensor& like, PairScoreParams& p, OptTensor& attr,
                        OptTensor& proj) {
    if (!attr && !proj) return;
    const int64_t attrs = attr ? (attr->dim() == 2 ? attr->size(1) : -1) : proj->size(-1);
    check.tensor("attr", attr, {p.num_edges, attrs}, {like.scalar_type()});
    check.tensor("proj", proj, {int64_t(p.heads) * p.dim, attrs}, {like.scalar_type()});
    check.count("attributes", attrs);
    p.attrs = int32_t(attrs);
    attr = dense(attr), proj = dense(proj);
    p.attr = data(attr), p.proj = data(proj);
  }

  static std::tuple<Tensor, Tensor> scores(OptTensor cols, OptTensor rows, OptTensor attn, OptTensor attr,
                                           OptTensor proj, OptTensor positive, Tensor indices, OptTensor eids,
                                           Tensor items, Tensor splits, Sizes plan, int64_t num_rows,
                                           int64_t num_cols, int64_t heads, int64_t dim, double slope) {
    const OptTensor given = cols ? cols : rows ? rows : proj;
    const Tensor& like = given ? *given : indices;
    const typename Backend::Scope scope(like);
    const Checker check("dfgnn::pair_scores", like);
    const ScalarType type = like.scalar_type();
    PairScoreParams p =
        fill(check, like, heads, dim, indices, eids, items, splits, plan, num_rows, num_cols, slope);
    check.tensor("cols", cols, {num_cols, heads, dim}, {type});
    check.tensor("rows", rows, {num_rows, heads, dim}, {type});
    check.tensor("attn", attn, {heads, dim}, {type});
    check.tensor("positive", positive, {p.num_edges, heads, dim}, {ScalarType::Bool});
    check.require(bool(attr) == bool(proj), "attr, proj: expected both or none");
    set_edges(check, like, p, attr, proj);
    cols = dense(cols), rows = dense(rows), attn = dense(attn), positive = dense(positive);
    p.cols = data(cols), p.rows = data(rows), p.attn = data(attn);
    p.positive = static_cast<const uint8_t*>(data(positive));
    Tensor score = make(like, {p.num_edges, heads}, type);
    Tensor made = make(like, {positive ? 0 : p.num_edges, heads, dim}, ScalarType::Bool);
    p.score = score.mutable_data_ptr();
    p.new_positive = static_cast<uint8_t*>(made.mutable_data_ptr());
    if (p.num_edges) Backend::pair_scores(p);
    return {score, made};
  }

  static std::tuple<Tensor, Tensor, Tensor> sums(Tensor weight, Tensor positive, OptTensor attr,
                                                 OptTensor proj, Tensor indices, OptTensor eids, Tensor items,
                                                 Tensor splits, Sizes plan, int64_t num_rows,
                                                 int64_t num_cols, double slope) {
    const typename Backend::Scope scope(weight);
    const Checker check("dfgnn::pair_sums", weight);
    const ScalarType type = weight.scalar_type();
    check.tensor("positive", positive, {indices.size(0), -1, -1}, {ScalarType::Bool});
    const int64_t heads = positive.size(1), dim = positive.size(2);
    PairScoreParams p =
        fill(check, weight, heads, dim, indices, eids, items, splits, plan, num_rows, num_cols, slope);
    check.tensor("weight", weight, {p.num_edges, heads}, {type});
    set_edges(check, weight, p, attr, proj);
    weight = dense(weight), positive = dense(positive);
    p.weight = data(weight), p.positive = static_cast<const uint8_t*>(data(positive));
    p.parts = Backend::pair_parts(p.csr);
    const int64_t attrs = p.attrs, slots = p.csr.num_slots;
    Tensor out = make(weight, {num_rows, heads, dim}, type);
    Tensor of_attr = make(weight, {proj ? p.num_edges : 0, attrs}, type);
    Tensor of_proj = make(weight, {attr ? p.parts : 0, heads * dim, attrs}, type);
    p.out = out.mutable_data_ptr();
    p.of_attr = proj ? of_attr.mutable_data_ptr() : nullptr;
    p.of_proj = attr ? of_proj.mutable_data_ptr() : nullptr;
    Workspace scratch;
    scratch.add(p.partial_out, slots, {slots, heads, dim}, type);
    const OptTensor memory = scratch.make(weight);
    Backend::pair_sums(p);
    return {out, of_attr, of_proj};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("pair_scores", TORCH_BOX(&scores));
    m.impl("pair_sums", TORCH_BOX(&sums));
  }
};

}  // namespace dfgnn
