// A call of the operators `layer` and `layer_backward` (layer.h): its arguments, checked, and the memory of
// what forward computes for backward.
#pragma once

#include "../core/layout.h"
#include "gat.h"
#include "layer_call.h"
#include "linear.h"

namespace dfgnn {

template <class Backend>
struct CheckedLayer {
  using Base = Attention<Backend>;
  using Gat = GatAttention<Backend>;
  using Inputs = typename Base::Inputs;

  // A linear projection: its features, weight [width, F] and bias [width], and the memory of its rows.
  // Without x the layer has none.
  struct Projection {
    const Tensor* x = nullptr;
    const Tensor* weight = nullptr;
    const OptTensor* bias = nullptr;
    void* rows = nullptr;                                 // [n, padded_width]
    void *ready_weight = nullptr, *ready_bias = nullptr;  // cast and padded; null where the given ones do
  };

  // A term of an additive score that is computed without rows of heads: attn . (weight x) = (attn weight) .
  // x. Without x the layer has none.
  struct Term {
    const Tensor* x = nullptr;
    const Tensor* weight = nullptr;
    const Tensor* attn = nullptr;
    void* folded = nullptr;  // attn weight, [H, features of x], in the dtype of x
    int64_t features() const { return x->size(1); }
  };

  // A call whose arguments have been checked, and where in one tensor of memory everything lies that forward
  // computes for backward beside the result.
  struct Layer {
    const LayerCall& c;
    const Checker check;
    std::shared_ptr<const typename Base::Graph> graph;
    const Score score;
    const ScalarType type, acc;
    const int64_t n, m, edges;
    HeadLayout heads;
    Projection value, key, query, skip, edge;
    Term of_dst, of_edges;  // of_dst: of an additive score whose destinations have a projection of their own
    const OptTensor* bias =
        nullptr;             // what the attention adds to its result: out_bias, or the bias of `skip`
    bool is_result = false;  // whether the attention's result is the layer's
    // Whether forward projects to value, key and query, and whether also to the skip connection, by one
    // batched product.
    bool together = false, skip_together = false;

    Workspace memory;
    OptTensor held;  // the tensor with this memory, in the dtype of x
    void *attn = nullptr, *ready_bias = nullptr, *scores = nullptr, *alpha_src = nullptr,
         *alpha_dst = nullptr, *stats = nullptr, *positive = nullptr, *positive_mass = nullptr,
         *out = nullptr;

    Layer(const LayerCall& call, const char* op, bool backward)
        : c(call),
          check(op, c.x),
          graph(Base::stored(check, c.graph, c.x, backward)),
          score(Score(c.score)),
          type(c.x.scalar_type()),
          acc(acc_type(type)),
          n(graph->sizes[1]),
          m(graph->sizes[0]),
          edges(graph->sizes[2]) {
      check.require(c.score >= 0 && c.score <= 2, "score: expected 0 (additive), 1 (dot) or 2 (additive_v2)");
      dtype_of(op, c.x);
      check.tensor("x", c.x, {n, -1}, {type});
      check.tensor("x_dst", c.x_dst, {m, -1}, {type});
      const Tensor& weight = *c.value_weight;
      check.require(weight.dim() == 2 && c.heads > 0 && weight.size(0) > 0 && weight.size(0) % c.heads == 0,
                    "value_weight: expected [heads * size, features] with ", c.heads, " heads");
      check.require(!c.src && !c.dst, "src, dst: expected only without value_weight");
      heads.heads = c.heads, heads.size = weight.size(0) / c.heads;
      heads.padding = c.padding;
      check.require(c.padding >= 0 && c.padding < kLoadBytes, "padding: expected less than a load of ",
                    kLoadBytes, " bytes, got ", c.padding);
      // The destinations are the first sources where they have no features of their own.
      check.require(c.x_dst || n == m || (!c.query_weight && !c.skip_weight && m <= n),
                    "x_dst: needed where destinations are projected and are not the sources");
      const Tensor* const x_dst = c.x_dst ? &*c.x_dst : &c.x;
      value = projection("value", c.x, c.value_weight, c.value_bias);
      key = projection("key", c.x, c.key_weight, c.key_bias);
      if (score != Score::additive) query = projection("query", *x_dst, c.query_weight, c.query_bias);
      skip = projection("skip", *x_dst, c.skip_weight, c.skip_bias);
      vectors();
      if (score == Score::additive && c.query_weight)
        of_dst = term("query", *x_dst, c.query_weight, c.attn_dst);
      if (c.edge_attr) {
        check.require(c.edge_weight.has_value(), "edge_weight: needed with edge_attr");
        check.tensor("edge_attr", *c.edge_attr, {edges, -1}, {c.edge_attr->scalar_type()});
        if (score != Score::additive)
          edge = projection("edge", *c.edge_attr, c.edge_weight, c.edge_bias);
        else
          of_edges = term("edge", *c.edge_attr, c.edge_weight, c.attn_edge);
      }
      choose_together();
      const bool same = c.dtype == type;
      const OptTensor& own = c.out_bias || skip_together ? c.out_bias : c.skip_bias;
      if (same && own && (!c.out_bias || c.out_bias->scalar_type() == type)) bias = &own;
      is_result = same && !heads.padding && !skip.x && bool(bias) == bool(own);
      lay_out();
    }

    // Checks a projection. Its weights may have the accumulation type: autocast leaves them so.
    Projection projection(const char* name, const Tensor& x, const OptTensor& weight, const OptTensor& bias) {
      if (!weight) return {};
      check.tensor(name, weight, {heads.width(), x.size(1)}, {type, acc});
      check.tensor(name, bias, {heads.width()}, {type, acc});
      check.require(x.scalar_type() == type, name, ": expected features of the dtype of x");
      return {&x, &*weight, &bias};
    }

    // A small product takes a GPU as long as its sums over the features take, however few its columns are.
    // So three of the same features take three times as long as a batch of them; two take less than a batch
    // and what puts their weights side by side.
    void choose_together() {
      const auto fits = [&](const Projection& p) {
        return p.x == value.x && p.weight->scalar_type() == value.weight->scalar_type() &&
               bool(*p.bias) == bool(*value.bias);
      };
      together = n * heads.width() <= c.most_joined && fits(key) && fits(query);
      skip_together = together && !heads.padding && fits(skip);
    }

    void vectors() {
      const bool additive = score == Score::additive;
      check.require(c.attn.has_value() == (score != Score::dot) && c.attn_dst.has_value() == additive,
                    "attn, attn_dst: expected those of the score");
      for (const OptTensor* t : {&c.attn, &c.attn_dst, &c.attn_edge, &c.out_bias})
        check.require(!*t || ((*t)->numel() == heads.width() && (*t)->device() == c.x.device()),
                      "attention vectors, out_bias: expected ", heads.width(),
                      " elements, heads of one size, on the device of x");
    }

    // Checks a term of an additive score. Those of edges may have another dtype than the features.
    Term term(const char* name, const Tensor& x, const OptTensor& weight, const OptTensor& attn) {
      const ScalarType own = x.scalar_type();
      check.require(weight && attn, name, ": an additive score needs a weight and an attention vector");
      check.require(own == type || (own == acc && c.edge_attr && &x == &*c.edge_attr), name,
                    ": expected features of the dtype of x, or edge_attr in the type of sums");
      check.tensor(name, *weight, {heads.width(), x.size(1)}, {own});
      check.require(attn->scalar_type() == own, name,
                    ": expected an attention vector of the features' dtype");
      return {&x, &*weight, &*attn};
    }

    void lay_out() {
      const int64_t wide = heads.padded_width(), head = heads.size + heads.padding;
      // Arrays of one kind follow each other: those of a batched product are equally far apart.
      const bool skip_in_result = !skip_together;
      Projection* const all[] = {&value, &key, &query, &skip, &edge};
      for (Projection* p : all)
        if (p->x) memory.add(p->rows, !(p == &skip && skip_in_result), {p->x->size(0), wide}, type);
      for (Projection* p : all) {
        if (!p->x) continue;
        const bool padded = heads.padding && p != &skip;
        memory.add(p->ready_weight, padded || p->weight->scalar_type() != type,
                   {padded ? wide : heads.width(), p->weight->size(1)}, type);
      }
      for (Projection* p : all) {
        if (!p->x) continue;
        const bool added = *p->bias && !(p == &skip && skip_in_result);
        memory.add(p->ready_bias, added && (heads.padding || (**p->bias).scalar_type() != type), {wide},
                   type);
      }
      const bool vector = score == Score::additive_v2;
      memory.add(attn, vector && (heads.padding || c.attn->scalar_type() != type), {wide}, type);
      memory.add(ready_bias, bias && (heads.padding || (**bias).scalar_type() != type), {wide}, type);
      memory.add(scores, of_edges.x, {edges, heads.heads}, of_edges.x ? of_edges.x->scalar_type() : type);
      for (Term* t : {&of_dst, &of_edges})
        if (t->x) memory.add(t->folded, true, {heads.heads, t->features()}, t->x->scalar_type());
      const bool additive = score == Score::additive, sums = additive && c.train;
      memory.add(alpha_src, additive, {n, heads.heads}, acc);
      memory.add(alpha_dst, additive, {m, heads.heads}, acc);
      memory.add(stats, true, {m, heads.heads, 2}, acc);
      memory.add(positive_mass, sums, {m, heads.heads}, acc);
      memory.add(positive, sums, {m, heads.heads, head}, type);
      memory.add(out, !is_result, {m, heads.heads, head}, type);
    }

    // ---- tensors on this memory ----

    // The pointers point into `held`, a tensor of as many bytes as `memory` needs.
    void place(const Tensor& tensor) {
      held = tensor;
      memory.place(const_cast<void*>(tensor.const_data_ptr()));
    }
    int64_t elements() const { return memory.bytes() / bytes_of(type); }
    Tensor on(void* where, Dims sizes, ScalarType dtype) const {
      return dtype == type ? view_at(*held, where, sizes) : on_memory(where, c.x, sizes, dtype);
    }
    Tensor rows(const Projection& p) const {
      return on(p.rows, {p.x->size(0), heads.heads, heads.size + heads.padding}, type);
    }
    Tensor folded(const Term& t) const {
      return on(t.folded, {heads.heads, t.features()}, t.x->scalar_type());
    }
    Tensor weight(const Projection& p) const {
      if (!p.ready_weight) return *p.weight;
      const int64_t count = &p == &skip ? heads.width() : heads.padded_width();
      return on(p.ready_weight, {count, p.weight->size(1)}, type);
    }
    // A vector of [width] elements as a kernel takes it: `ready`, or as it was given.
    Tensor by_head(const Tensor& given, void* ready) const {
      const int64_t head = heads.size + heads.padding;
      return ready ? on(ready, {heads.heads, head}, type) : reshaped(dense(given), {heads.heads, head});
    }
    Tensor attention_out() const { return on(out, {m, heads.heads, heads.size + heads.padding}, type); }

    // The arguments of the attention.
    Inputs inputs() const {
      Inputs in{};
      in.score = c.score, in.value = rows(value), in.seed = c.seed;
      if (score == Score::dot) in.src = key.x ? rows(key) : in.value;
      if (score != Score::additive)
        in.dst = query.x ? rows(query) : n == m ? in.value : first_rows(in.value, m);
      if (score == Score::additive_v2) in.attn = by_head(*c.attn, attn);
      if (edge.x) in.feat = rows(edge), in.flags = Base::kFeatInKey;
      if (edge.x && score == Score::dot) in.flags |= Base::kFeatInValue;
      if (of_edges.x) in.bias = on(scores, {edges, heads.heads}, of_edges.x->scalar_type());
      if (bias) in.out_bias = by_head(**bias, ready_bias);
      in.num_dst = m, in.negative_slope = c.negative_slope, in.scale = c.scale, in.dropout_p = c.dropout_p;
      in.unwritten = c.unwritten, in.of_layer = true;
      return in;
    }
    template <class Params>
    Inputs fill(Params& p) const {
      Inputs in = inputs();
      Base::fill(check, in, p, edges, true);
      p.csr = graph->csr, p.stats = stats, p.positive = positive, p.positive_mass = positive_mass;
      if (score == Score::additive) p.alpha_src = alpha_src, p.alpha_dst = alpha_dst;
      return in;
    }
    // The terms that are made of the value's rows: without those of the destinations if `of_dst` has these.
    TermsParams terms(const Tensor& feat) const {
      TermsParams t = Gat::terms_params(check, feat, flat(*c.attn), flat(*c.attn_dst), of_dst.x ? 0 : m);
      t.terms[0] = alpha_src, t.terms[1] = alpha_dst;
      return t;
    }
    // An attention vector as [H, D].
    Tensor flat(const Tensor& vector) const { return reshaped(dense(vector), {heads.heads, heads.size}); }
  };
};

}  // namespace dfgnn
