// The operators `layer` and `layer_backward`: a whole attention layer in one call each (layer_call.h has the
// arguments). Forward projects the features, computes score terms and attention, and adds bias and skip
// connection; backward gives the gradients of all of them. A Backend is that of gat.h and linear.h.
#pragma once

#include "checked_layer.h"

namespace dfgnn {

template <class Backend>
struct Layers {
  using Base = Attention<Backend>;
  using Gat = GatAttention<Backend>;
  using Product = Linear<Backend>;
  using Inputs = typename Base::Inputs;

  using Layer = typename CheckedLayer<Backend>::Layer;
  using Projection = typename CheckedLayer<Backend>::Projection;

  // ---- forward ---------------------------------------------------------------------------------

  // A projection's weight and bias, as the product takes them.
  static Tensor ready_weight(const Layer& l, const Projection& p) {
    Tensor weight = l.weight(p);
    if (p.ready_weight) l.heads.pad_weight(weight, *p.weight);
    return weight;
  }
  static OptTensor ready_bias(const Layer& l, const Projection& p) {
    if (!p.ready_bias) return *p.bias;
    Tensor ready = l.on(p.ready_bias, {1, l.heads.padded_width()}, l.type);
    l.heads.pad_rows(ready, reshaped(dense(**p.bias), {1, l.heads.width()}));
    return reshaped(ready, {l.heads.padded_width()});
  }

  static void project(const Layer& l) {
    std::vector<const Projection*> batch, alone{&l.value, &l.key, &l.query};
    if (l.together) std::swap(batch, alone);
    if (l.skip_together) batch.push_back(&l.skip);
    alone.push_back(&l.edge);
    if (!batch.empty() && l.n) project(l, batch);
    for (const Projection* p : alone) {
      if (!p->x) continue;
      const Tensor weight = ready_weight(l, *p);
      Tensor rows = l.on(p->rows, {p->x->size(0), l.heads.padded_width()}, l.type);
      Product::apply(rows, *p->x, weight, ready_bias(l, *p));
    }
  }

  // Projections of the same features, as one batched product, because kernels take rows without gaps.
  static void project(const Layer& l, const std::vector<const Projection*>& batch) {
    const int64_t count = int64_t(batch.size()), width = l.heads.padded_width();
    const Tensor& x = *batch[0]->x;
    const int64_t features = x.size(1);
    std::vector<Tensor> weights, biases;
    for (const Projection* p : batch) {
      weights.push_back(ready_weight(l, *p));
      if (*p->bias) biases.push_back(*ready_bias(l, *p));
    }
    const auto distance = [&](void* Projection::* array) {
      return (static_cast<char*>(batch[1]->*array) - static_cast<char*>(batch[0]->*array)) / bytes_of(l.type);
    };
    const bool ready = batch[0]->ready_weight;
    const Tensor weight = ready ? weights[0] : Product::cat(weights, 0);
    const Tensor onto =
        strided(weight, {count, features, width},
                {ready ? distance(&Projection::ready_weight) : width * features, 1, features});
    const Tensor same = strided(x, {count, l.n, features}, {0, x.stride(0), x.stride(1)});
    const Tensor rows = strided(l.on(batch[0]->rows, {l.n, width}, l.type), {count, l.n, width},
                                {distance(&Projection::rows), width, 1});
    if (biases.empty())
      Backend::bmm(rows, same, onto);
    else
      Backend::baddbmm(rows, reshaped(Product::cat(biases, 0), {count, 1, width}), same, onto);
  }

  // Writes a vector of [width] elements where the attention reads it.
  static void make_ready(const Layer& l, const Tensor& vector, void* where) {
    if (!where) return;
    Tensor ready = l.on(where, {1, l.heads.padded_width()}, l.type);
    l.heads.pad_rows(ready, reshaped(dense(vector), {1, l.heads.width()}));
  }

  // Computes a term of an additive score, [rows of its features, H].
  static void score(const Layer& l, const typename CheckedLayer<Backend>::Term& t, const Tensor& to) {
    const int64_t h = l.heads.heads, size = l.heads.size, features = t.features();
    const Tensor folded = l.folded(t);
    Backend::bmm(reshaped(folded, {h, 1, features}), reshaped(dense(*t.attn), {h, 1, size}),
                 reshaped(dense(*t.weight), {h, size, features}));
    if (to.scalar_type() == folded.scalar_type()) {
      Backend::mm(to, *t.x, transposed(folded));
    } else {
      copy(to, Product::product(*t.x, transposed(folded), to.scalar_type()));
    }
  }

  static std::tuple<Tensor, OptTensor, bool> forward(const LayerCall& c) {
    if (!c.value_weight) return function(c);
    const typename Backend::Scope scope(c.x);
    Layer l(c, "dfgnn::layer", false);
    const Tensor memory = make(c.x, {l.elements()}, l.type);
    l.place(memory);
    project(l);
    if (l.attn) make_ready(l, *c.attn, l.attn);
    if (l.bias) make_ready(l, **l.bias, l.ready_bias);
    if (l.of_edges.x)
      score(l, l.of_edges, l.on(l.scores, {l.edges, l.heads.heads}, c.edge_attr->scalar_type()));
    if (l.of_dst.x) score(l, l.of_dst, l.on(l.alpha_dst, {l.m, l.heads.heads}, l.acc));
    ForwardParams p{};
    const Inputs in = l.fill(p);
    if (l.score == Score::additive) Backend::terms(l.terms(in.value), c.x);
    const OptTensor into = l.is_result ? OptTensor() : OptTensor(l.attention_out());
    const Tensor out = Base::run_forward(l.check, in, p, false, into).out;
    const Tensor result = l.is_result ? reshaped(out, {l.m, l.heads.width()}) : finished(l, out);
    return {result, c.train ? OptTensor(memory) : OptTensor(), l.is_result};
  }

  // The layer's result from the attention's.
  static Tensor finished(const Layer& l, const Tensor& out) {
    const LayerCall& c = l.c;
    const Sizes sizes{l.m, l.heads.width()};
    // The attention's result is read again in backward, so that nothing is added in its place.
    const bool dense_out = c.dtype == l.type && !l.heads.padding;
    Tensor result = dense_out ? reshaped(out, sizes) : make(out, sizes, c.dtype);
    if (!dense_out) {
      HeadLayout dense_heads = l.heads;
      dense_heads.padding = 0;
      copy(dense_heads.without_padding(result), l.heads.without_padding(out));
    }
    if (l.skip_together) {
      result = added(result, l.on(l.skip.rows, sizes, l.type));
    } else if (l.skip.x) {
      if (l.skip.ready_weight) copy(l.weight(l.skip), *l.skip.weight);
      const Tensor onto = transposed(l.weight(l.skip));
      if (c.dtype == l.type) {
        Tensor sum = dense_out ? make(out, sizes, c.dtype) : result;
        Backend::addmm(sum, result, *l.skip.x, onto);
        result = sum;
      } else {
        Tensor rows = make(out, {l.m, l.heads.width()}, l.type);
        Backend::mm(rows, *l.skip.x, onto);
        result = added(result, rows);
      }
      if (c.skip_bias && l.bias != &c.skip_bias) result = added(result, *c.skip_bias);
    }
    if (c.out_bias && l.bias != &c.out_bias)
      result = added(result, reshaped(dense(*c.out_bias), {l.heads.width()}));
    return as_type(result, c.dtype);
  }

  // ---- backward --------------------------------------------------------------------------------

  // A projection whose gradients are wanted: the gradient of its rows, [n, padded_width] or, in the skip
  // connection, [n, width]; and where the gradients go.
  struct Part {
    const Projection* of;
    Tensor grad;
    HeadLayout heads;
    bool need_weight, need_bias, need_x;
    OptTensor *weight, *bias, *x;
  };

  static LayerGradients backward(const LayerCall& c, const Tensor& grad, OptTensor out, const Tensor& kept,
                                 const LayerNeed& need) {
    if (!c.value_weight) return function_backward(c, grad, out, kept, need);
    const typename Backend::Scope scope(c.x);
    Layer l(c, "dfgnn::layer_backward", true);
    LayerGradients found;
    l.check.require(c.train, "train: expected a call of `layer` for training");
    l.check.tensor("grad", grad, {l.m, l.heads.width()}, {c.dtype});
    l.check.tensor("kept", kept, {l.elements()}, {l.type});
    l.check.require(kept.is_contiguous() && reinterpret_cast<uintptr_t>(kept.const_data_ptr()) % 16 == 0,
                    "kept: expected it as it was returned");
    l.place(kept);
    const Tensor flat = dense(as_type(grad, l.type));
    Tensor padded = flat;
    if (l.heads.padding) {
      padded = make(flat, {l.m, l.heads.padded_width()}, l.type);
      l.heads.pad_rows(padded, flat);
    }
    const int64_t head = l.heads.size + l.heads.padding;
    l.check.require(out.has_value() || !l.is_result, "out: needed where it is the result");
    Tensor attended = l.is_result ? reshaped(dense(*out), {l.m, l.heads.heads, head}) : l.attention_out();
    Tensor grad_out = reshaped(padded, {l.m, l.heads.heads, head});

    BackwardParams p{};
    const Inputs in = l.fill(p);
    OptTensor none;
    Base::fill_backward(l.check, in, p, grad_out, attended, none, none);
    p.reverse = l.graph->reverse;
    const bool additive = l.score == Score::additive;
    const bool need_edges =
        c.edge_attr && (need.edge_attr || need.edge_weight || need.edge_bias || need.attn_edge);
    // {need, sum_rows, from_positive}: a layer has no gate and no gradient of the attention.
    const typename Base::DstGradient of_dst{true, false, additive};
    int64_t of_edges = 0;
    if (need_edges) of_edges = additive ? Base::kNeedBias : Base::kNeedFeat;
    TermsBackwardParams of_terms{};
    Workspace scratch;
    if (additive) {
      of_terms.of = l.terms(in.value);
      Gat::add_terms_partial(of_terms, scratch, in.value);
    }
    typename Base::Gradients g =
        Base::run_backward(l.check, in, p, of_dst, Base::kNeedDst | of_edges, scratch);

    if (additive) {
      terms_backward(l, in, p, of_terms, g, need, found);
      if (need_edges)
        term_backward(l, l.of_edges, *g.bias, {need.edge_attr, need.edge_weight, need.attn_edge},
                      {&found.edge_attr, &found.edge_weight, &found.attn_edge});
      if (l.of_dst.x)
        term_backward(l, l.of_dst, on_memory(p.grad_alpha_dst, c.x, {l.m, l.heads.heads}, l.acc),
                      {c.x_dst ? need.x_dst : need.x, need.query_weight, need.attn_dst},
                      {c.x_dst ? &found.x_dst : &found.x, &found.query_weight, &found.attn_dst});
    }
    if (l.score == Score::additive_v2 && need.attn) found.attn = of_vector(l.heads, *g.attn, *c.attn);
    std::vector<Part> parts = parts_of(l, g, flat, need, found);
    if (need_edges && l.edge.x)
      parts.push_back({&l.edge, rows(*g.feat), l.heads, need.edge_weight, need.edge_bias, need.edge_attr,
                       &found.edge_weight, &found.edge_bias, &found.edge_attr});
    OptTensor* const of_bias = need.out_bias && !found.out_bias ? &found.out_bias : nullptr;
    projections_backward(l, parts, flat, of_bias);
    if (of_bias && !*of_bias) *of_bias = sum_of_rows(flat, c.out_bias->scalar_type());
    return found;
  }

  // Gradients of rows, as a matrix.
  static Tensor rows(const Tensor& t) { return reshaped(t, {t.size(0), t.size(1) * t.size(2)}); }

  // Adds the gradient of the features through the score terms to g.value; the gradients of the vectors, and
  // of the bias if the attention added it.
  static void terms_backward(const Layer& l, const Inputs& in, const BackwardParams& p,
                             TermsBackwardParams& q, const typename Base::Gradients& g, const LayerNeed& need,
                             LayerGradients& found) {
    const LayerCall& c = l.c;
    q.grad_terms[0] = p.grad_alpha_src, q.grad_terms[1] = p.grad_alpha_dst;
    const bool sums_bias = need.out_bias && l.bias == &c.out_bias && !l.of_dst.x;
    q.grad_out = sums_bias ? p.grad_out : nullptr;
    Tensor grad_feat = *g.value;
    q.grad_feat = grad_feat.mutable_data_ptr();
    const auto made = Gat::run_terms_backward(in.value, *c.attn, *c.attn_dst, q,
                                              sums_bias ? c.out_bias : OptTensor(), true);
    if (need.attn) found.attn = made.src;
    if (need.attn_dst && !l.of_dst.x) found.attn_dst = made.dst;
    if (sums_bias) found.out_bias = made.bias;
  }

  // The gradients of a term's features, weight and vector, from that of the term, [rows of its features, H].
  static void term_backward(const Layer& l, const typename CheckedLayer<Backend>::Term& t,
                            const Tensor& of_term, std::array<bool, 3> need,
                            std::array<OptTensor*, 3> found) {
    const ScalarType type = t.x->scalar_type();
    const int64_t h = l.heads.heads, size = l.heads.size, features = t.features();
    const auto [need_x, need_weight, need_attn] = need;
    const auto [of_x, of_weight, of_attn] = found;
    const Tensor grad = as_type(of_term, type);
    if (need_x) Product::add_product(*of_x, grad, l.folded(t));
    if (!need_weight && !need_attn) return;
    const Tensor of_folded = Product::product(transposed(grad), *t.x, type), attn = dense(*t.attn);
    if (need_weight) {
      *of_weight = make(attn, {h * size, features}, type);
      Backend::bmm(reshaped(**of_weight, {h, size, features}), reshaped(attn, {h, size, 1}),
                   reshaped(of_folded, {h, 1, features}));
    }
    if (need_attn) {
      *of_attn = make(attn, sizes_of(attn), type);
      Backend::bmm(reshaped(**of_attn, {h, size, 1}), reshaped(dense(*t.weight), {h, size, features}),
                   reshaped(of_folded, {h, features, 1}));
    }
  }

  // The gradient of GATv2's vector from partial sums [parts, H, D], in the shape and dtype of `vector`.
  static Tensor of_vector(const HeadLayout& heads, const Tensor& parts, const Tensor& vector) {
    const int64_t wide = heads.padded_width();
    const Tensor by_part = reshaped(parts, {parts.size(0), wide});
    const Tensor sum = parts.size(0) == 1 ? by_part : sum_of_rows(by_part, parts.scalar_type());
    if (!heads.padding && sum.scalar_type() == vector.scalar_type()) return reshaped(sum, sizes_of(vector));
    Tensor made = make(vector, sizes_of(vector), vector.scalar_type());
    copy(reshaped(made, {1, heads.heads, heads.size}), heads.without_padding(reshaped(sum, {1, wide})));
    return made;
  }

  // The projections of nodes with the gradients of their rows. Where the layer has no projection for the key
  // or the query, the value was taken instead, whose gradient is then a sum.
  static std::vector<Part> parts_of(const Layer& l, typename Base::Gradients& g, const Tensor& flat,
                                    const LayerNeed& need, LayerGradients& found) {
    std::vector<Part> parts;
    const bool own_dst = l.c.x_dst.has_value();
    OptTensor* const of_dst = own_dst ? &found.x_dst : &found.x;
    const bool need_dst = own_dst ? need.x_dst : need.x;
    Tensor value = *g.value;
    if (l.score == Score::dot && !l.key.x) value = added(value, *g.src);
    if (l.score != Score::additive && !l.query.x) {
      if (l.n == l.m) {
        value = added(value, *g.dst);
      } else {
        const Tensor first = first_rows(value, l.m);
        copy(first, added(first, *g.dst));
      }
    }
    parts.push_back({&l.value, rows(value), l.heads, need.value_weight, need.value_bias, need.x,
                     &found.value_weight, &found.value_bias, &found.x});
    if (l.key.x)
      parts.push_back({&l.key, rows(*g.src), l.heads, need.key_weight, need.key_bias, need.x,
                       &found.key_weight, &found.key_bias, &found.x});
    if (l.query.x)
      parts.push_back({&l.query, rows(*g.dst), l.heads, need.query_weight, need.query_bias, need_dst,
                       &found.query_weight, &found.query_bias, of_dst});
    if (l.skip.x) {
      HeadLayout dense_heads = l.heads;
      dense_heads.padding = 0;
      parts.push_back({&l.skip, flat, dense_heads, need.skip_weight, need.skip_bias, need_dst,
                       &found.skip_weight, &found.skip_bias, of_dst});
    }
    return parts;
  }

  // flat: the gradient of the result; of_bias: where the gradient of its bias goes, or null if it is not
  // wanted.
  static void projections_backward(const Layer& l, const std::vector<Part>& parts, const Tensor& flat,
                                   OptTensor* of_bias) {
    std::vector<bool> done(parts.size());
    for (size_t k = 0; k < parts.size(); ++k) {
      if (done[k]) continue;
      std::vector<const Part*> same{&parts[k]};
      if (parts[k].grad.size(0) * l.heads.width() <= l.c.most_joined)
        for (size_t other = k + 1; other < parts.size(); ++other)
          if (parts[other].of->x == parts[k].of->x) same.push_back(&parts[other]), done[other] = true;
      if (same.size() == 1)
        alone(l, parts[k]);
      else
        joined(l, same, flat, of_bias);
    }
  }

  static void alone(const Layer& l, const Part& p) {
    if (p.need_weight)
      *p.weight = p.heads.cut(Product::product(transposed(p.grad), *p.of->x, p.of->weight->scalar_type()));
    if (p.need_bias) *p.bias = p.heads.cut(sum_of_rows(p.grad, (**p.of->bias).scalar_type()));
    if (p.need_x) Product::add_product(*p.x, p.grad, l.weight(*p.of));
  }

  // Gradients of projections of the same features: the gradients of their rows side by side, without padding,
  // are factors of one product.
  static void joined(const Layer& l, const std::vector<const Part*>& parts, const Tensor& flat,
                     OptTensor*& of_bias) {
    const int64_t width = l.heads.width(), count = int64_t(parts.size()), rows = parts[0]->grad.size(0);
    const bool padded = l.heads.padding;
    std::vector<Tensor> grads;
    bool need_weight = false, need_bias = false, need_x = false;
    for (const Part* p : parts) {
      grads.push_back(padded ? p->heads.without_padding(p->grad) : p->grad);
      need_weight = need_weight || p->need_weight, need_bias = need_bias || p->need_bias;
      need_x = need_x || p->need_x;
    }
    // The bias of the result has the gradient's sum, too.
    const bool with_result = of_bias && need_bias && rows == flat.size(0);
    if (with_result) grads.push_back(padded ? reshaped(flat, {rows, l.heads.heads, l.heads.size}) : flat);
    const int64_t all = width * int64_t(grads.size());
    const Tensor whole = reshaped(Product::cat(grads, 1), {rows, all});
    const Tensor together = strided(whole, {rows, count * width}, {all, 1});
    const Tensor& x = *parts[0]->of->x;
    const auto part_of = [&](const Tensor& t, int64_t k) {
      const int64_t columns = t.dim() == 2 ? t.size(1) : 1;
      return t.dim() == 2 ? strided(t, {width, columns}, {columns, 1}, k * width * columns)
                          : strided(t, {width}, {1}, k * width);
    };
    if (need_weight) {
      const Tensor made = Product::product(transposed(together), x, parts[0]->of->weight->scalar_type());
      for (int64_t k = 0; k < count; ++k)
        if (parts[k]->need_weight)
          *parts[k]->weight = as_type(part_of(made, k), parts[k]->of->weight->scalar_type());
    }
    if (need_bias) {
      const ScalarType dtype = (*parts[0]->of->bias) ? (**parts[0]->of->bias).scalar_type() : l.acc;
      const Tensor made = sum_of_rows(whole, dtype);
      for (int64_t k = 0; k < count; ++k)
        if (parts[k]->need_bias)
          *parts[k]->bias = as_type(part_of(made, k), (**parts[k]->of->bias).scalar_type());
      if (with_result)
        *of_bias = as_type(part_of(made, count), l.c.out_bias->scalar_type()), of_bias = nullptr;
    }
    if (need_x) {
      std::vector<Tensor> weights;
      for (const Part* p : parts) weights.push_back(*p->of->weight);
      Product::add_product(*parts[0]->x, together, as_type(Product::cat(weights, 0), l.type));
    }
  }

  // ---- functions: attention without projections ------------------------------------------------

  static std::tuple<Tensor, OptTensor, bool> function(const LayerCall& c) {
    const auto [out, kept, none] =
        Base::attend(c.graph, 0, c.score, c.x, c.src, c.dst, c.attn, {}, {}, {}, {}, {}, c.seed, {},
                     c.negative_slope, c.scale, c.dropout_p, 0, false, c.train && c.need_dst);
    return {out, c.train ? OptTensor(kept) : OptTensor(), true};
  }
  static LayerGradients function_backward(const LayerCall& c, const Tensor& grad, const OptTensor& out,
                                          const Tensor& kept, const LayerNeed& need) {
    STD_TORCH_CHECK(out.has_value(), "dfgnn::layer_backward: out: needed where it is the result");
    LayerGradients found;
    OptTensor parts;
    std::tie(found.x, found.src, found.dst, parts, std::ignore, std::ignore, std::ignore, std::ignore) =
        Base::attend_backward(c.graph, 0, grad, {}, c.score, c.x, c.src, c.dst, c.attn, {}, {}, {}, {}, {},
                              c.seed, {}, *out, kept, c.need_dst, {}, c.negative_slope, c.scale, c.dropout_p,
                              0, need.dst ? Base::kNeedDst : 0);
    if (need.attn) found.attn = of_vector({c.x.size(1), c.x.size(2), 0}, *parts, *c.attn);
    return found;
  }

  // ---- boxed kernels ---------------------------------------------------------------------------

  static void boxed_forward(StableIValue* stack, uint64_t, uint64_t) {
    BoxedStack in{stack}, out{stack};
    const LayerCall c = read_layer_call(in);
    auto [result, kept, reads_result] = forward(c);
    out.write(result), out.write(kept), out.write(reads_result);
  }
  static void boxed_backward(StableIValue* stack, uint64_t, uint64_t) {
    BoxedStack in{stack}, out{stack};
    const LayerCall c = read_layer_call(in);
    const Tensor grad = in.read<Tensor>();
    const OptTensor attended = in.read<OptTensor>();
    const Tensor kept = in.read<Tensor>();
    const LayerNeed need(c, in.read<int64_t>());
    out.write(wanted_gradients(c, need, backward(c, grad, attended, kept, need)));
  }

  static void register_ops(torch::stable::detail::StableLibrary& m) {
    m.impl("layer", &boxed_forward);
    m.impl("layer_backward", &boxed_backward);
  }
};

}  // namespace dfgnn
