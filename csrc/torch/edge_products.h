// The CPU operators edge_products and edge_products_backward (core/edge_products.h). A Backend is that of
// attention.h, with two functions of these names.
#pragma once

#include "../core/edge_products.h"
#include "graphs.h"

namespace dfgnn {

template <class Backend>
struct EdgeProducts {
  // Checks the arguments that both operators share, and returns them.
  static EdgeProductParams fill(const Checker& check, ScalarType type, const Tensor& rows, const Tensor& cols,
                                const Tensor& feat, const Tensor& indices, const OptTensor& eids,
                                const Tensor& items, const Tensor& splits, const Sizes& plan, double scale) {
    check.tensor("rows", rows, {-1, -1, -1}, {type});
    const int64_t heads = rows.size(1), dim = rows.size(2);
    check.tensor("cols", cols, {-1, heads, dim}, {type});
    check.tensor("feat", feat, {indices.size(0), heads, dim}, {type});
    check.count("heads", heads);
    check.count("dim", dim);
    check.head("rows", heads, dim);
    EdgeProductParams p{};
    p.dtype = dtype_of(check.op(), rows);
    p.num_rows = rows.size(0), p.num_cols = cols.size(0), p.num_edges = indices.size(0);
    p.heads = int32_t(heads), p.dim = int32_t(dim), p.scale = scale;
    p.csr = Graphs<Backend>::csr(check, "indices", indices, eids, items, splits, plan, {}, p.num_rows,
                                 p.num_cols);
    check.require(p.csr.num_parts == 0, "plan: expected items in one part");
    p.rows = data(rows), p.cols = data(cols), p.feat = data(feat);
    return p;
  }

  static std::tuple<Tensor, Tensor> products(Tensor rows, Tensor cols, Tensor feat, Tensor indices,
                                             OptTensor eids, Tensor items, Tensor splits, Sizes plan,
                                             double scale, bool with_products) {
    const typename Backend::Scope scope(rows);
    const Checker check("dfgnn::edge_products", rows);
    const ScalarType type = rows.scalar_type();
    rows = dense(rows), cols = dense(cols), feat = dense(feat);
    EdgeProductParams p = fill(check, type, rows, cols, feat, indices, eids, items, splits, plan, scale);
    Tensor score = make(rows, {p.num_edges, p.heads}, acc_type(type));
    Tensor found = make(rows, {with_products ? p.num_edges : 0, p.heads, p.dim}, type);
    p.score = score.mutable_data_ptr(), p.edge_out = with_products ? found.mutable_data_ptr() : nullptr;
    if (p.num_edges) Backend::edge_products(p);
    return {score, found};
  }

  static std::tuple<Tensor, Tensor> backward(Tensor weight, OptTensor edge_weight, Tensor rows, Tensor cols,
                                             Tensor feat, Tensor indices, OptTensor eids, Tensor items,
                                             Tensor splits, Sizes plan, double scale, bool need_feat) {
    const typename Backend::Scope scope(rows);
    const Checker check("dfgnn::edge_products_backward", rows);
    const ScalarType type = rows.scalar_type(), acc = acc_type(type);
    rows = dense(rows), cols = dense(cols), feat = dense(feat), weight = dense(weight);
    EdgeProductParams p = fill(check, type, rows, cols, feat, indices, eids, items, splits, plan, scale);
    check.tensor("weight", weight, {p.num_edges, p.heads}, {acc});
    check.tensor("edge_weight", edge_weight, {p.num_edges, p.heads, p.dim}, {type});
    if (edge_weight) edge_weight = dense(*edge_weight);
    Tensor out = make(rows, {p.num_rows, p.heads, p.dim}, type);
    Tensor of_feat = make(rows, {need_feat ? p.num_edges : 0, p.heads, p.dim}, type);
    const int64_t slots = p.csr.num_slots;
    Workspace scratch;
    scratch.add(p.partial_out, slots, {slots, p.heads, p.dim}, acc);
    const OptTensor memory = scratch.make(rows);
    p.weight = data(weight), p.edge_weight = edge_weight ? data(*edge_weight) : nullptr;
    p.out = out.mutable_data_ptr(), p.edge_out = need_feat ? of_feat.mutable_data_ptr() : nullptr;
    Backend::edge_products_backward(p);
    return {out, of_feat};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("edge_products", TORCH_BOX(&products));
    m.impl("edge_products_backward", TORCH_BOX(&backward));
  }
};

}  // namespace dfgnn
