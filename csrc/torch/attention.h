// The operators, once for all backends: check, allocate, fill the parameter struct, launch.
// Backend offers `Scope(tensor)` (device guard), `check(checker, shape)` for layouts that it does not
// take, and `forward(params, tensor)` / `backward(params, tensor)`.
#pragma once

#include <cmath>
#include <tuple>

#include "checks.h"

namespace dfgnn {

template <class Backend>
struct Attention {
  static Csr csr(const Checker& check, const char* name, const Tensor& indices, const OptTensor& eids,
                 const Tensor& items, const Tensor& splits, const Sizes& plan, int64_t num_rows) {
    const ScalarType i32 = ScalarType::Int;
    check.tensor(name, indices, {-1}, {i32});
    check.tensor("eids", eids, {indices.size(0)}, {i32});
    check.tensor("items", items, {-1, 4}, {i32});
    check.tensor("splits", splits, {-1, 4}, {i32});
    check.require(plan.size() == 2, "plan: expected [num_slots, packed]");
    check.require(indices.is_contiguous() && items.is_contiguous() && splits.is_contiguous() &&
                      (!eids || eids->is_contiguous()),
                  "the graph's tensors: expected contiguous ones");
    Csr c{};
    c.indices = static_cast<const int32_t*>(data(indices));
    c.eids = static_cast<const int32_t*>(data(eids));
    c.items = static_cast<const Item*>(data(items));
    c.splits = static_cast<const Split*>(data(splits));
    c.num_items = items.size(0);
    c.num_splits = splits.size(0);
    c.num_slots = plan[0];
    c.num_rows = num_rows;
    c.packed = static_cast<int32_t>(plan[1]);
    return c;
  }

  static Csr reverse_csr(const Checker& check, const Tensor& indices, const OptTensor& rev_indices,
                         const OptTensor& rev_eids, const OptTensor& rev_items, const OptTensor& rev_splits,
                         const Sizes& plan, int64_t num_rows) {
    check.require(rev_indices && rev_items && rev_splits, "backward needs the reverse CSR and its plan");
    check.require(rev_indices->size(0) == indices.size(0), "rev_indices: expected as many edges as indices");
    return csr(check, "rev_indices", *rev_indices, rev_eids, *rev_items, *rev_splits, plan, num_rows);
  }

  static EdgeOptions options(const Checker& check, const OptTensor& bias, const OptTensor& weight,
                             const OptTensor& seed, double p, ScalarType type, int64_t edges, int64_t heads) {
    const ScalarType acc = acc_type(type);
    check.tensor("edge_bias", bias, {edges, heads}, {type, acc});
    check.tensor("edge_weight", weight, {edges, -1}, {type, acc});
    check.tensor("seed", seed, {1}, {ScalarType::Long});
    check.require(!weight || weight->size(1) == 1 || weight->size(1) == heads,
                  "edge_weight: expected 1 or num_heads columns");
    check.require(p >= 0 && p <= 1, "dropout_p: expected a probability in [0, 1]");
    EdgeOptions e{};
    e.bias = data(bias);
    e.weight = data(weight);
    e.seed = p > 0 ? static_cast<const int64_t*>(data(seed)) : nullptr;
    check.require(p == 0 || e.seed, "seed: needed when dropout_p > 0");
    e.bias_is_acc = bias && bias->scalar_type() == acc;
    e.weight_is_acc = weight && weight->scalar_type() == acc;
    e.weight_heads = weight ? static_cast<int32_t>(weight->size(1)) : 1;
    e.dropout_threshold = static_cast<uint32_t>(std::min(std::floor(p * 4294967296.0), 4294967295.0));
    e.dropout_scale = p < 1 ? 1 / (1 - p) : 0;
    return e;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gat_forward(
      Tensor feat, Tensor alpha_src, OptTensor alpha_dst, OptTensor edge_bias, OptTensor edge_weight,
      OptTensor seed, OptTensor out_bias, Tensor indices, OptTensor eids, Tensor items, Tensor splits,
      Sizes plan, OptTensor, OptTensor, OptTensor, OptTensor, Sizes, int64_t num_dst, double negative_slope,
      double dropout_p, bool return_attention, bool save_positive) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::gat_forward", feat);
    const ScalarType type = feat.scalar_type(), acc = acc_type(type);
    check.require(num_dst >= 0, "num_dst: expected a number >= 0");
    check.tensor("feat", feat, {-1, -1, -1}, {type});
    const int64_t n = feat.size(0), h = feat.size(1), d = feat.size(2), edges = indices.size(0);
    check.tensor("alpha_src", alpha_src, {n, h}, {acc});
    check.tensor("alpha_dst", alpha_dst, {num_dst, h}, {acc});
    check.tensor("out_bias", out_bias, {h, d}, {type});
    feat = dense(feat), alpha_src = dense(alpha_src), alpha_dst = dense(alpha_dst);
    edge_bias = dense(edge_bias), edge_weight = dense(edge_weight);

    ForwardParams p{};
    p.score = Score::additive;
    p.dtype = dtype_of(check.op(), feat);
    p.shape = {num_dst, n, edges, int32_t(h), int32_t(d), int32_t(d)};
    Backend::check(check, p.shape, p.dtype);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, num_dst);
    p.edge = options(check, edge_bias, edge_weight, seed, dropout_p, type, edges, h);
    p.value = data(feat), p.alpha_src = data(alpha_src), p.alpha_dst = data(alpha_dst);
    p.negative_slope = negative_slope;
    const int64_t slots = p.csr.num_slots;
    Tensor out = make(feat, {num_dst, h, d}, type), lse = make(feat, {num_dst, h}, acc);
    Tensor positive = save_positive ? make(feat, {num_dst, h, d}, type) : nothing(feat, type);
    Tensor mass = save_positive ? make(feat, {num_dst, h}, acc) : nothing(feat, acc);
    Tensor attention = return_attention ? make(feat, {edges, h}, acc) : nothing(feat, acc);
    p.out = out.mutable_data_ptr(), p.lse = lse.mutable_data_ptr();
    if (save_positive) p.positive = positive.mutable_data_ptr(), p.positive_mass = mass.mutable_data_ptr();
    if (return_attention) p.attention = attention.mutable_data_ptr();
    OptTensor partial_out, partial_positive, partial_stats;
    if (slots) {
      partial_out = make(feat, {slots, h, d}, acc), partial_stats = make(feat, {slots, h, 3}, acc);
      p.partial_out = partial_out->mutable_data_ptr(), p.partial_stats = partial_stats->mutable_data_ptr();
      if (save_positive) {
        partial_positive = make(feat, {slots, h, d}, acc);
        p.partial_positive = partial_positive->mutable_data_ptr();
      }
    }
    Backend::forward(p, feat);
    if (out_bias) out = torch::stable::subtract(out, *out_bias, -1);
    return {out, lse, positive, mass, attention};
  }

  static std::tuple<Tensor, Tensor, Tensor> dot_forward(Tensor query, Tensor key, Tensor value,
                                                        OptTensor edge_bias, OptTensor edge_weight,
                                                        OptTensor seed, Tensor indices, OptTensor eids,
                                                        Tensor items, Tensor splits, Sizes plan, OptTensor,
                                                        OptTensor, OptTensor, OptTensor, Sizes, double scale,
                                                        double dropout_p, bool return_attention) {
    const typename Backend::Scope scope(query);
    const Checker check("dfgnn::dot_forward", query);
    const ScalarType type = query.scalar_type(), acc = acc_type(type);
    check.tensor("query", query, {-1, -1, -1}, {type});
    const int64_t m = query.size(0), h = query.size(1), d = query.size(2), edges = indices.size(0);
    check.tensor("key", key, {-1, h, d}, {type});
    const int64_t n = key.size(0);
    check.tensor("value", value, {n, h, -1}, {type});
    const int64_t dv = value.size(2);
    query = dense(query), key = dense(key), value = dense(value);
    edge_bias = dense(edge_bias), edge_weight = dense(edge_weight);

    ForwardParams p{};
    p.score = Score::dot;
    p.dtype = dtype_of(check.op(), query);
    p.shape = {m, n, edges, int32_t(h), int32_t(d), int32_t(dv)};
    Backend::check(check, p.shape, p.dtype);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, m);
    p.edge = options(check, edge_bias, edge_weight, seed, dropout_p, type, edges, h);
    p.query = data(query), p.key = data(key), p.value = data(value);
    p.scale = scale;
    const int64_t slots = p.csr.num_slots;
    Tensor out = make(query, {m, h, dv}, type), lse = make(query, {m, h}, acc);
    Tensor attention = return_attention ? make(query, {edges, h}, acc) : nothing(query, acc);
    p.out = out.mutable_data_ptr(), p.lse = lse.mutable_data_ptr();
    if (return_attention) p.attention = attention.mutable_data_ptr();
    OptTensor partial_out, partial_stats;
    if (slots) {
      partial_out = make(query, {slots, h, dv}, acc), partial_stats = make(query, {slots, h, 3}, acc);
      p.partial_out = partial_out->mutable_data_ptr(), p.partial_stats = partial_stats->mutable_data_ptr();
    }
    Backend::forward(p, query);
    return {out, lse, attention};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gat_backward(
      Tensor grad_out, OptTensor grad_attention, Tensor feat, Tensor alpha_src, OptTensor alpha_dst,
      OptTensor edge_bias, OptTensor edge_weight, OptTensor seed, OptTensor out_bias, Tensor out, Tensor lse,
      OptTensor positive, OptTensor positive_mass, OptTensor attention, Tensor indices, OptTensor eids,
      Tensor items, Tensor splits, Sizes plan, OptTensor rev_indices, OptTensor rev_eids, OptTensor rev_items,
      OptTensor rev_splits, Sizes rev_plan, double negative_slope, double dropout_p, bool need_alpha_dst,
      bool need_bias, bool need_weight) {
    const typename Backend::Scope scope(feat);
    const Checker check("dfgnn::gat_backward", feat);
    const ScalarType type = feat.scalar_type(), acc = acc_type(type);
    check.tensor("feat", feat, {-1, -1, -1}, {type});
    check.tensor("out", out, {-1, feat.size(1), feat.size(2)}, {type});
    const int64_t n = feat.size(0), h = feat.size(1), d = feat.size(2), m = out.size(0),
                  edges = indices.size(0);
    check.tensor("alpha_src", alpha_src, {n, h}, {acc});
    check.tensor("alpha_dst", alpha_dst, {m, h}, {acc});
    check.tensor("out_bias", out_bias, {h, d}, {type});
    check.tensor("lse", lse, {m, h}, {acc});
    check.tensor("grad_out", grad_out, {m, h, d}, {type});
    check.tensor("grad_attention", grad_attention, {edges, h}, {acc});
    check.require(!grad_attention || attention, "attention: needed with grad_attention");
    check.tensor("attention", attention, {edges, h}, {acc});
    const bool sum_rows = need_alpha_dst && grad_attention.has_value();
    const bool from_positive = need_alpha_dst && !sum_rows;
    check.require(!from_positive || (positive && positive_mass),
                  "positive: needed for the gradient of alpha_dst");
    if (from_positive) {
      check.tensor("positive", positive, {m, h, d}, {type});
      check.tensor("positive_mass", positive_mass, {m, h}, {acc});
    }
    feat = dense(feat), alpha_src = dense(alpha_src), alpha_dst = dense(alpha_dst), out = dense(out);
    lse = dense(lse), grad_out = dense(grad_out), edge_bias = dense(edge_bias),
    edge_weight = dense(edge_weight);
    if (from_positive) positive = dense(positive), positive_mass = dense(positive_mass);
    if (grad_attention) attention = dense(attention), grad_attention = dense(grad_attention);

    BackwardParams p{};
    p.score = Score::additive;
    p.dtype = dtype_of(check.op(), feat);
    p.shape = {m, n, edges, int32_t(h), int32_t(d), int32_t(d)};
    Backend::check(check, p.shape, p.dtype);
    p.edge = options(check, edge_bias, edge_weight, seed, dropout_p, type, edges, h);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, m);
    p.reverse = reverse_csr(check, indices, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, n);
    p.value = data(feat), p.alpha_src = data(alpha_src), p.alpha_dst = data(alpha_dst);
    p.negative_slope = negative_slope;
    out_bias = dense(out_bias);
    p.out = data(out), p.out_bias = data(out_bias), p.lse = data(lse), p.grad_out = data(grad_out);
    if (from_positive) p.positive = data(positive), p.positive_mass = data(positive_mass);
    if (grad_attention) p.attention = data(attention), p.grad_attention = data(grad_attention);

    if (edges == 0) {
      const auto zeros = [&](Sizes sizes, ScalarType t) { return torch::stable::new_zeros(feat, sizes, t); };
      return {zeros({n, h, d}, type), zeros({n, h}, acc), zeros({need_alpha_dst ? m : 0, h}, acc),
              zeros({0, h}, acc), zeros({0, h}, acc)};
    }
    Tensor grad_feat = make(feat, {n, h, d}, type), grad_alpha_src = make(feat, {n, h}, acc);
    Tensor grad_alpha_dst = need_alpha_dst ? make(feat, {m, h}, acc) : nothing(feat, acc);
    Tensor grad_bias = need_bias || sum_rows ? make(feat, {edges, h}, acc) : nothing(feat, acc);
    Tensor grad_weight = need_weight ? make(feat, {edges, h}, acc) : nothing(feat, acc);
    Tensor node_stats = make(feat, {m, h, 4}, acc);
    p.grad_value = grad_feat.mutable_data_ptr(), p.grad_alpha_src = grad_alpha_src.mutable_data_ptr();
    if (need_alpha_dst) p.grad_alpha_dst = grad_alpha_dst.mutable_data_ptr();
    if (need_bias || sum_rows) p.grad_bias = grad_bias.mutable_data_ptr();
    if (need_weight) p.grad_weight = grad_weight.mutable_data_ptr();
    p.node_stats = node_stats.mutable_data_ptr();
    OptTensor row_sums, partial_sums;
    if (grad_attention) {
      row_sums = make(feat, {m, h}, acc), partial_sums = make(feat, {p.csr.num_slots, h}, acc);
      p.row_sums = row_sums->mutable_data_ptr(), p.partial_sums = partial_sums->mutable_data_ptr();
    }
    OptTensor partial_value, partial_alpha;
    if (const int64_t slots = p.reverse.num_slots) {
      partial_value = make(feat, {slots, h, d}, acc), partial_alpha = make(feat, {slots, h}, acc);
      p.partial_value = partial_value->mutable_data_ptr(),
      p.partial_alpha = partial_alpha->mutable_data_ptr();
    }
    Backend::backward(p, feat);
    if (!need_bias) grad_bias = nothing(feat, acc);
    return {grad_feat, grad_alpha_src, grad_alpha_dst, grad_bias, grad_weight};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dot_backward(
      Tensor grad_out, OptTensor grad_attention, Tensor query, Tensor key, Tensor value, OptTensor edge_bias,
      OptTensor edge_weight, OptTensor seed, Tensor out, Tensor lse, OptTensor attention, Tensor indices,
      OptTensor eids, Tensor items, Tensor splits, Sizes plan, OptTensor rev_indices, OptTensor rev_eids,
      OptTensor rev_items, OptTensor rev_splits, Sizes rev_plan, double scale, double dropout_p,
      bool need_bias, bool need_weight) {
    const typename Backend::Scope scope(query);
    const Checker check("dfgnn::dot_backward", query);
    const ScalarType type = query.scalar_type(), acc = acc_type(type);
    check.tensor("query", query, {-1, -1, -1}, {type});
    const int64_t m = query.size(0), h = query.size(1), d = query.size(2), edges = indices.size(0);
    check.tensor("key", key, {-1, h, d}, {type});
    const int64_t n = key.size(0);
    check.tensor("value", value, {n, h, -1}, {type});
    const int64_t dv = value.size(2);
    check.tensor("out", out, {m, h, dv}, {type});
    check.tensor("lse", lse, {m, h}, {acc});
    check.tensor("grad_out", grad_out, {m, h, dv}, {type});
    check.tensor("grad_attention", grad_attention, {edges, h}, {acc});
    check.require(!grad_attention || attention, "attention: needed with grad_attention");
    check.tensor("attention", attention, {edges, h}, {acc});
    query = dense(query), key = dense(key), value = dense(value), out = dense(out), lse = dense(lse);
    grad_out = dense(grad_out), edge_bias = dense(edge_bias), edge_weight = dense(edge_weight);
    if (grad_attention) attention = dense(attention), grad_attention = dense(grad_attention);

    BackwardParams p{};
    p.score = Score::dot;
    p.dtype = dtype_of(check.op(), query);
    p.shape = {m, n, edges, int32_t(h), int32_t(d), int32_t(dv)};
    Backend::check(check, p.shape, p.dtype);
    p.edge = options(check, edge_bias, edge_weight, seed, dropout_p, type, edges, h);
    p.csr = csr(check, "indices", indices, eids, items, splits, plan, m);
    p.reverse = reverse_csr(check, indices, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, n);
    p.query = data(query), p.key = data(key), p.value = data(value);
    p.scale = scale;
    p.out = data(out), p.lse = data(lse), p.grad_out = data(grad_out);
    if (grad_attention) p.attention = data(attention), p.grad_attention = data(grad_attention);

    if (edges == 0) {
      const auto zeros = [&](Sizes sizes, ScalarType t) { return torch::stable::new_zeros(query, sizes, t); };
      return {zeros({m, h, d}, type), zeros({n, h, d}, type), zeros({n, h, dv}, type), zeros({0, h}, acc),
              zeros({0, h}, acc)};
    }
    Tensor grad_query = make(query, {m, h, d}, type), grad_key = make(query, {n, h, d}, type);
    Tensor grad_value = make(query, {n, h, dv}, type);
    Tensor grad_bias = need_bias ? make(query, {edges, h}, acc) : nothing(query, acc);
    Tensor grad_weight = need_weight ? make(query, {edges, h}, acc) : nothing(query, acc);
    Tensor node_stats = make(query, {m, h, 2}, acc);
    p.grad_query = grad_query.mutable_data_ptr(), p.grad_key = grad_key.mutable_data_ptr();
    p.grad_value = grad_value.mutable_data_ptr();
    if (need_bias) p.grad_bias = grad_bias.mutable_data_ptr();
    if (need_weight) p.grad_weight = grad_weight.mutable_data_ptr();
    p.node_stats = node_stats.mutable_data_ptr();
    OptTensor row_sums, partial_sums;
    if (grad_attention) {
      row_sums = make(query, {m, h}, acc), partial_sums = make(query, {p.csr.num_slots, h}, acc);
      p.row_sums = row_sums->mutable_data_ptr(), p.partial_sums = partial_sums->mutable_data_ptr();
    }
    OptTensor partial_query, partial_key, partial_value;
    if (const int64_t slots = p.csr.num_slots) {
      partial_query = make(query, {slots, h, d}, acc);
      p.partial_query = partial_query->mutable_data_ptr();
    }
    if (const int64_t slots = p.reverse.num_slots) {
      partial_key = make(query, {slots, h, d}, acc), partial_value = make(query, {slots, h, dv}, acc);
      p.partial_key = partial_key->mutable_data_ptr(), p.partial_value = partial_value->mutable_data_ptr();
    }
    Backend::backward(p, query);
    return {grad_query, grad_key, grad_value, grad_bias, grad_weight};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("gat_forward", TORCH_BOX(&gat_forward));
    m.impl("gat_backward", TORCH_BOX(&gat_backward));
    m.impl("dot_forward", TORCH_BOX(&dot_forward));
    m.impl("dot_backward", TORCH_BOX(&dot_backward));
  }
};

}  // namespace dfgnn
