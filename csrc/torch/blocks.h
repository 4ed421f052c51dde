// The operators of attention within blocks (core/blocks.h). A Backend has
//   Scope           as that of attention.h
//   offsets         (check, name, tensor, end): the offsets as kernels take them, checked where that does not
//                   wait for a device
//   block_attention (params, pass, a tensor): runs a pass; block_items(params): elements of its scratch
//   `items`
#pragma once

#include "../core/blocks.h"
#include "checks.h"

namespace dfgnn {

template <class Backend>
struct BlockAttention {
  // The arguments that all operators have, checked, and the tensors that own their memory.
  struct Call {
    const Checker check;
    Tensor query, key, value, offsets, key_offsets;
    OptTensor key_bias;
    BlockParams p{};

    Call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& of_rows,
         const Tensor& of_keys, const OptTensor& bias, double scale)
        : check(op, q), query(dense(q)), key(dense(k)), value(dense(v)), key_bias(dense(bias)) {
      const ScalarType type = query.scalar_type();
      check.tensor("query", query, {-1, -1, -1}, {type});
      const int64_t heads = query.size(1), dim = query.size(2);
      check.tensor("key", key, {-1, heads, dim}, {type});
      check.tensor("value", value, {key.size(0), heads, -1}, {type});
      check.tensor("key_bias", key_bias, {key.size(0), heads}, {acc_type(type)});
      check.tensor("offsets", of_rows, {-1}, {ScalarType::Int, ScalarType::Long});
      check.require(of_rows.size(0) > 0, "offsets: expected at least one element");
      check.tensor("key_offsets", of_keys, {of_rows.size(0)}, {ScalarType::Int, ScalarType::Long});
      p.dtype = dtype_of(op, query);
      for (int64_t size : {query.size(0), key.size(0), of_rows.size(0), heads, dim, value.size(2)})
        check.count("sizes", size);
      check.require(heads > 0 && dim > 0 && value.size(2) > 0, "expected at least one head of one element");
      p.num_rows = query.size(0), p.num_keys = key.size(0), p.num_blocks = of_rows.size(0) - 1;
      p.heads = int32_t(heads), p.dim = int32_t(dim), p.value_dim = int32_t(value.size(2)), p.scale = scale;
      offsets = Backend::offsets(check, "offsets", of_rows, p.num_rows);
      key_offsets = Backend::offsets(check, "key_offsets", of_keys, p.num_keys);
      p.offsets = data(offsets), p.key_offsets = data(key_offsets);
      p.offsets_are_long = offsets.scalar_type() == ScalarType::Long;
      p.key_offsets_are_long = key_offsets.scalar_type() == ScalarType::Long;
      p.query = data(query), p.key = data(key), p.value = data(value), p.key_bias = data(key_bias);
    }
    ScalarType type() const { return query.scalar_type(); }
    ScalarType acc() const { return acc_type(type()); }
    Tensor made(void*& where, const Sizes& sizes, ScalarType dtype) const {
      Tensor t = make(query, sizes, dtype);
      where = t.mutable_data_ptr();
      return t;
    }
    void run(BlockPass pass, Workspace& scratch) {
      scratch.add(p.items, Backend::block_items(p), {Backend::block_items(p)}, ScalarType::Int);
      const OptTensor memory = scratch.make(query);
      Backend::block_attention(p, pass, query);
    }
  };

  // The gradients of query, key, value and key_bias, which backward and second write.
  struct Gradients {
    Tensor query, key, value, bias;
    Gradients(Call& c, bool need_bias)
        : query(c.made(c.p.grad_query, {c.p.num_rows, c.p.heads, c.p.dim}, c.type())),
          key(c.made(c.p.grad_key, {c.p.num_keys, c.p.heads, c.p.dim}, c.type())),
          value(c.made(c.p.grad_value, {c.p.num_keys, c.p.heads, c.p.value_dim}, c.type())),
          bias(c.made(c.p.grad_bias, need_bias ? Sizes{c.p.num_keys, c.p.heads} : Sizes{0}, c.acc())) {
      if (!need_bias) c.p.grad_bias = nullptr;
    }
  };

  // What backward and second get beside the arguments of forward.
  struct Saved {
    Tensor grad_out, out, stats;
    OptTensor grad_log_sum;
    Saved(Call& c, const Tensor& grad, const OptTensor& of_sum, const Tensor& result,
          const Tensor& statistics)
        : grad_out(dense(grad)), out(dense(result)), stats(dense(statistics)), grad_log_sum(dense(of_sum)) {
      BlockParams& p = c.p;
      c.check.tensor("grad_out", grad_out, {p.num_rows, p.heads, p.value_dim}, {c.type()});
      c.check.tensor("grad_log_sum", grad_log_sum, {p.num_rows, p.heads}, {c.acc()});
      c.check.tensor("out", out, {p.num_rows, p.heads, p.value_dim}, {c.type()});
      c.check.tensor("stats", stats, {p.num_rows, p.heads, 2}, {c.acc()});
      p.grad_out = data(grad_out), p.grad_log_sum = data(grad_log_sum);
      p.out = const_cast<void*>(data(out)), p.stats = const_cast<void*>(data(stats));  // read alone
    }
  };

  static std::tuple<Tensor, Tensor> forward(Tensor query, Tensor key, Tensor value, Tensor offsets,
                                            Tensor key_offsets, OptTensor key_bias, double scale) {
    const typename Backend::Scope scope(query);
    Call c("dfgnn::block_attention_forward", query, key, value, offsets, key_offsets, key_bias, scale);
    Tensor out = c.made(c.p.out, {c.p.num_rows, c.p.heads, c.p.value_dim}, c.type());
    Tensor stats = c.made(c.p.stats, {c.p.num_rows, c.p.heads, 2}, c.acc());
    Workspace scratch;
    if (c.p.num_rows) c.run(BlockPass::forward, scratch);
    return {out, stats};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad_out, OptTensor grad_log_sum,
                                                             Tensor query, Tensor key, Tensor value,
                                                             Tensor offsets, Tensor key_offsets,
                                                             OptTensor key_bias, Tensor out, Tensor stats,
                                                             double scale, bool need_bias) {
    const typename Backend::Scope scope(query);
    Call c("dfgnn::block_attention_backward", query, key, value, offsets, key_offsets, key_bias, scale);
    const Saved saved(c, grad_out, grad_log_sum, out, stats);
    const Gradients g(c, need_bias);
    Workspace scratch;
    scratch.add(c.p.delta, true, {c.p.num_rows, c.p.heads, 4}, c.acc());
    c.run(BlockPass::backward, scratch);
    return {g.query, g.key, g.value, g.bias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> second(
      Tensor grad_out, OptTensor grad_log_sum, Tensor query, Tensor key, Tensor value, Tensor offsets,
      Tensor key_offsets, OptTensor key_bias, Tensor out, Tensor stats, Tensor of_query, Tensor of_key,
      Tensor of_value, OptTensor of_bias, double scale, bool need_bias) {
    const typename Backend::Scope scope(query);
    Call c("dfgnn::block_attention_second", query, key, value, offsets, key_offsets, key_bias, scale);
    BlockParams& p = c.p;
    const Saved saved(c, grad_out, grad_log_sum, out, stats);
    of_query = dense(of_query), of_key = dense(of_key), of_value = dense(of_value), of_bias = dense(of_bias);
    c.check.tensor("of_query", of_query, {p.num_rows, p.heads, p.dim}, {c.type()});
    c.check.tensor("of_key", of_key, {p.num_keys, p.heads, p.dim}, {c.type()});
    c.check.tensor("of_value", of_value, {p.num_keys, p.heads, p.value_dim}, {c.type()});
    c.check.tensor("of_bias", of_bias, {p.num_keys, p.heads}, {c.acc()});
    p.of_query = data(of_query), p.of_key = data(of_key), p.of_value = data(of_value),
    p.of_bias = data(of_bias);
    const Gradients g(c, need_bias);
    Tensor of_grad = c.made(p.grad_grad_out, {p.num_rows, p.heads, p.value_dim}, c.type());
    Tensor tau = c.made(p.tau, {p.num_rows, p.heads}, c.acc());
    Workspace scratch;
    scratch.add(p.delta, true, {p.num_rows, p.heads, 4}, c.acc());
    scratch.add(p.rho, true, {p.num_rows, p.heads}, c.acc());
    c.run(BlockPass::second, scratch);
    return {of_grad, tau, g.query, g.key, g.value, g.bias};
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("block_attention_forward", TORCH_BOX(&forward));
    m.impl("block_attention_backward", TORCH_BOX(&backward));
    m.impl("block_attention_second", TORCH_BOX(&second));
  }
};

}  // namespace dfgnn
