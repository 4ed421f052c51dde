// The operators sddmm (dot products of the feature rows of an edge's two nodes) and spmm (weighted sums of
// neighbours' feature rows): ProductParams in core/params.h. A Backend is that of attention.h, with
// `sddmm(params, tensor)` and `spmm(params, tensor)`, which launch.
#pragma once

#include "graphs.h"

namespace dfgnn {

template <class Backend>
struct Products {
  // One direction of a graph: its CSR and plan, and its sizes.
  struct Side {
    Csr csr;
    int64_t num_rows, num_cols, num_edges;
  };

  // Checks the arguments that both operators share, and returns them.
  static ProductParams product(const Checker& check, const Tensor& feat, const Side& side) {
    check.tensor("feat", feat, {side.num_cols, -1, -1}, {feat.scalar_type()});
    for (int k = 0; k < 3; ++k) check.count("feat: sizes", feat.size(k));
    check.head("feat", feat.size(1), feat.size(2));
    ProductParams p{};
    p.dtype = dtype_of(check.op(), feat);
    p.shape = {side.num_rows,         side.num_cols,         side.num_edges,
               int32_t(feat.size(1)), int32_t(feat.size(2)), int32_t(feat.size(2))};
    Backend::check(check, p.shape, p.dtype);
    p.csr = side.csr;
    Graphs<Backend>::check_parts(check, p.csr, p.dtype, p.shape);
    p.feat = data(feat);
    return p;
  }

  // ---- the operators on one direction of a graph. unwritten: rows of unused edges are to be zero
  // -----------

  static Tensor sddmm_on(const Checker& check, const Side& side, Tensor row_feat, Tensor feat,
                         bool unwritten = false) {
    feat = dense(feat), row_feat = dense(row_feat);
    ProductParams p = product(check, feat, side);
    check.tensor("row_feat", row_feat, {side.num_rows, feat.size(1), feat.size(2)}, {feat.scalar_type()});
    Tensor out = make(feat, {side.num_edges, feat.size(1)}, feat.scalar_type());
    if (unwritten) out = torch::stable::zero_(out);
    p.row_feat = data(row_feat), p.edge_out = out.mutable_data_ptr();
    if (side.num_edges) Backend::sddmm(p, feat);
    return out;
  }

  static Tensor spmm_on(const Checker& check, const Side& side, Tensor weight, Tensor feat) {
    feat = dense(feat), weight = dense(weight);
    ProductParams p = product(check, feat, side);
    check.tensor("weight", weight, {side.num_edges, feat.size(1)}, {feat.scalar_type()});
    Tensor out = make(feat, {side.num_rows, feat.size(1), feat.size(2)}, feat.scalar_type());
    const int64_t slots = p.csr.num_slots;
    const OptTensor partial = optional(p.partial_out, slots, feat, {slots, feat.size(1), feat.size(2)},
                                       acc_type(feat.scalar_type()));
    p.weight = data(weight), p.out = out.mutable_data_ptr();
    Backend::spmm(p, feat);
    return out;
  }

  // ---- the operators on a graph's tensors ------------------------------------------------------

  static Side side_of(const Checker& check, const Tensor& feat, int64_t num_rows, const Tensor& indices,
                      const OptTensor& eids, const Tensor& items, const Tensor& splits, const Sizes& plan) {
    check.tensor("feat", feat, {-1, -1, -1}, {feat.scalar_type()});
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    check.count("num_rows", num_rows);
    return {Graphs<Backend>::csr(check, "indices", indices, eids, items, splits, plan, {}, num_rows,
                                 feat.size(0)),
            num_rows, feat.size(0), indices.size(0)};
  }
  static Tensor sddmm(Tensor row_feat, Tensor feat, Tensor indices, OptTensor eids, Tensor items,
                      Tensor splits, Sizes plan) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::sddmm", feat);
    check.tensor("row_feat", row_feat, {-1, -1, -1}, {feat.scalar_type()});
    const Side side = side_of(check, feat, row_feat.size(0), indices, eids, items, splits, plan);
    return sddmm_on(check, side, row_feat, feat);
  }
  static Tensor spmm(Tensor weight, Tensor feat, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
                     Sizes plan, int64_t num_rows) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::spmm", feat);
    return spmm_on(check, side_of(check, feat, num_rows, indices, eids, items, splits, plan), weight, feat);
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("sddmm", TORCH_BOX(&sddmm));
    m.impl("spmm", TORCH_BOX(&spmm));
  }
};

}  // namespace dfgnn
