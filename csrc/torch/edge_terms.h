// The operators edge_dot, edge_sum and edge_outer (core/edge_terms.h), as a template over backends. A Backend
// is that of attention.h, with edge_dot, edge_sum and edge_outer (params, tensor), which launch, and
// `kRowBytes`: the bytes of a head's row of `rows` must be a multiple of this.
#pragma once

#include <algorithm>

#include "../core/edge_terms.h"
#include "graphs.h"

namespace dfgnn {

template <class Backend>
struct EdgeTerms {
  // Checks the arguments that the three operators share, and returns them. dim: features of an edge; width:
  // the last size of `rows`.
  static EdgeTermParams fill(const Checker& check, ScalarType type, DType dtype, int64_t num_rows,
                             int64_t heads, int64_t dim, int64_t width, const Csr& csr, int64_t num_edges) {
    check.count("num_rows", num_rows);
    check.count("heads", heads);
    check.count("width", width);
    check.head("rows", heads, width), check.head("attr", heads, dim);
    check.require(dim <= width, "edge features: expected at most the ", width, " columns of a row, got ",
                  dim);
    check.require(width * bytes_of(type) % Backend::kRowBytes == 0, "width: expected a multiple of ",
                  Backend::kRowBytes, " bytes, got ", width, " elements");
    EdgeTermParams p{};
    p.dtype = dtype;
    p.num_rows = num_rows, p.num_edges = num_edges;
    p.heads = int32_t(heads), p.dim = int32_t(dim), p.width = int32_t(width), p.scale = 1;
    check.require(csr.num_rows == num_rows, "rows: expected ", csr.num_rows,
                  ", one for each of the graph's, ", "got ", num_rows);
    check.require(csr.num_parts == 0 && !csr.tiles, "plan: expected items in one part, and no tiles");
    p.csr = csr;
    return p;
  }
  // These operators read no rows of the neighbours, so that there is no number of neighbours with which the
  // plan's could be compared.
  static Csr csr_of(const Checker& check, const Tensor& indices, const OptTensor& eids, const Tensor& items,
                    const Tensor& splits, const Sizes& plan) {
    check.tensor("indices", indices, {-1}, {ScalarType::Int});
    const PlanArgs args = Graphs<Backend>::plan_args(check, plan);
    return Graphs<Backend>::csr(check, "indices", indices, eids, items, splits, plan, {}, args.num_rows,
                                args.num_cols);
  }

  // Sets the rows of `p`, and returns the tensor that owns them: `given`, or a copy if its heads are
  // not contiguous or not aligned.
  static Tensor set_rows(EdgeTermParams& p, const Tensor& given) {
    const int64_t grid = std::max<int64_t>(Backend::kRowBytes / bytes_of(given.scalar_type()), 1);
    const auto fits = [&](int64_t k) { return given.stride(k) % grid == 0 && given.stride(k) >= 0; };
    const bool as_is = given.stride(2) == 1 && fits(0) && fits(1) &&
                       reinterpret_cast<uintptr_t>(given.const_data_ptr()) % 16 == 0;
    const Tensor rows = as_is ? given : dense(given);
    p.rows = data(rows), p.row_stride = rows.stride(0), p.head_stride = rows.stride(1);
    return rows;
  }

  // ---- the operators on a graph of `edges` edges. unwritten: rows of unused edges are to be zero -------

  static Tensor dot_on(const Csr& csr, int64_t edges, Tensor rows, Tensor attr, double scale,
                       bool unwritten = false) {
    const Checker check("dfgnn::edge_dot", rows);
    const ScalarType type = rows.scalar_type();
    check.tensor("rows", rows, {-1, -1, -1}, {type});
    check.tensor("attr", attr, {edges, -1}, {type});
    EdgeTermParams p = fill(check, type, dtype_of(check.op(), rows), rows.size(0), rows.size(1), attr.size(1),
                            rows.size(2), csr, edges);
    attr = dense(attr), rows = set_rows(p, rows);
    Tensor out = make(rows, {edges, rows.size(1)}, acc_type(type));
    if (unwritten) out = torch::stable::zero_(out);
    p.attr = data(attr), p.edge_out = out.mutable_data_ptr(), p.scale = scale;
    if (p.num_edges) Backend::edge_dot(p, rows);
    return out;
  }

  static Tensor sum_on(const Csr& csr, int64_t edges, Tensor weight, Tensor attr, int64_t num_rows,
                       int64_t width) {
    const Checker check("dfgnn::edge_sum", attr);
    const ScalarType type = attr.scalar_type(), acc = acc_type(type);
    check.tensor("weight", weight, {edges, -1}, {acc});
    check.tensor("attr", attr, {edges, -1}, {type});
    const int64_t heads = weight.size(1);
    EdgeTermParams p =
        fill(check, type, dtype_of(check.op(), attr), num_rows, heads, attr.size(1), width, csr, edges);
    attr = dense(attr), weight = dense(weight);
    Tensor out = make(attr, {num_rows, heads, width}, type);
    const int64_t slots = p.csr.num_slots;
    Workspace scratch;
    scratch.add(p.partial_out, slots, {slots, heads, width}, acc);
    const OptTensor memory = scratch.make(attr);
    p.attr = data(attr), p.weight = data(weight), p.out = out.mutable_data_ptr();
    Backend::edge_sum(p, attr);
    return out;
  }

  static Tensor outer_on(const Csr& csr, int64_t edges, Tensor weight, Tensor rows, int64_t dim, double scale,
                         bool unwritten = false) {
    const Checker check("dfgnn::edge_outer", rows);
    const ScalarType type = rows.scalar_type();
    check.tensor("rows", rows, {-1, -1, -1}, {type});
    check.tensor("weight", weight, {edges, rows.size(1)}, {acc_type(type)});
    EdgeTermParams p = fill(check, type, dtype_of(check.op(), rows), rows.size(0), rows.size(1), dim,
                            rows.size(2), csr, edges);
    weight = dense(weight), rows = set_rows(p, rows);
    Tensor out = make(rows, {edges, dim}, type);
    if (unwritten) out = torch::stable::zero_(out);
    p.weight = data(weight), p.edge_out = out.mutable_data_ptr(), p.scale = scale;
    if (p.num_edges) Backend::edge_outer(p, rows);
    return out;
  }

  // ---- the operators on a graph's tensors ------------------------------------------------------

  static Tensor dot(Tensor rows, Tensor attr, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
                    Sizes plan, double scale) {
    const typename Backend::Scope scope(rows);
    const Csr csr = csr_of(Checker("dfgnn::edge_dot", rows), indices, eids, items, splits, plan);
    return dot_on(csr, indices.size(0), rows, attr, scale);
  }
  static Tensor sum(Tensor weight, Tensor attr, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
                    Sizes plan, int64_t num_rows, int64_t width) {
    const typename Backend::Scope scope(attr);
    const Csr csr = csr_of(Checker("dfgnn::edge_sum", attr), indices, eids, items, splits, plan);
    return sum_on(csr, indices.size(0), weight, attr, num_rows, width);
  }
  static Tensor outer(Tensor weight, Tensor rows, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
                      Sizes plan, int64_t dim, double scale) {
    const typename Backend::Scope scope(rows);
    const Csr csr = csr_of(Checker("dfgnn::edge_outer", rows), indices, eids, items, splits, plan);
    return outer_on(csr, indices.size(0), weight, rows, dim, scale);
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("edge_dot", TORCH_BOX(&dot));
    m.impl("edge_sum", TORCH_BOX(&sum));
    m.impl("edge_outer", TORCH_BOX(&outer));
  }
};

}  // namespace dfgnn
