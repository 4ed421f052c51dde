// Registers the schemas of all operators, and their CPU backend (attention.h says what a Backend is).
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <exception>

#include "../core/layout.h"
#include "../cpu/checksum.h"
#include "../cpu/edge_products.h"
#include "../cpu/edge_terms.h"
#include "../cpu/engine.h"
#include "../cpu/pair_scores.h"
#include "../cpu/second_order.h"
#include "../cpu/structure.h"
#include "../cpu/terms.h"
#include "cpu_graph.h"
#include "edge_products.h"
#include "edge_terms.h"
#include "layer.h"
#include "pair_scores.h"
#include "parallel.h"
#include "planned.h"
#include "products.h"
#include "projected.h"
#include "schemas.h"
#include "second_order.h"

namespace dfgnn {
namespace {

struct CpuBackend {
  struct Scope {
    explicit Scope(const Tensor&) {}
  };

  static void check(const Checker&, const Shape&, DType) {}
  static void check(const Checker& check, const Csr& csr, int64_t num_edges) {
    check.require(cpu::in_range(csr, num_edges),
                  "items, splits: expected those of the plan, got rows, edges or slots out of range");
  }

  static void forward(const ForwardParams& p, const Tensor&) { cpu::forward(p, parallel()); }
  static void backward(const BackwardParams& p, const Tensor& like) {
    Tensor edges = make(like, {cpu::edge_scratch(p)}, acc_type(like.scalar_type()));
    STD_TORCH_CHECK(
        cpu::same_edges(p, edges.numel() > 0),
        "dfgnn::attention_backward: eids, rev_eids: expected those of both directions, or none only of "
        "one whose edges are in the user's order, got different edges under one number");
    cpu::backward(p, parallel(), edges.numel() ? edges.mutable_data_ptr() : nullptr);
  }
  static bool has_tiles(Score, DType, const Shape&) { return false; }
  static bool projects(DType, const Shape&, int64_t) { return false; }
  static bool hands_over(const BackwardParams&) { return false; }
  static constexpr bool kSumsAttention = false;  // see attention.h
  static int64_t attention_parts(const BackwardParams& p) { return cpu::attention_parts(p.csr); }
  static void terms(const TermsParams& p, const Tensor&) { cpu::terms(p, parallel()); }
  static void terms_backward(const TermsBackwardParams& p, const Tensor&) {
    cpu::terms_backward(p, parallel());
  }
  static int64_t terms_parts(const TermsParams& p) { return cpu::terms_parts(p); }

  static constexpr bool kWidens = false;  // see linear.h
  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
  }
  static void addmm(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), c.get(), a.get(), b.get(), 1, 1));
  }
  static constexpr auto cat = aoti_torch_cpu_cat;
  static void baddbmm(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_baddbmm_out(out.get(), c.get(), a.get(), b.get(), 1, 1));
  }
  static void bmm(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(out.get(), a.get(), b.get()));
  }
  static void sddmm(const ProductParams& p, const Tensor&) { cpu::sddmm(p, parallel()); }
  static void spmm(const ProductParams& p, const Tensor&) { cpu::spmm(p, parallel()); }

  static constexpr int64_t kRowBytes = 1;  // see edge_terms.h
  static void edge_dot(const EdgeTermParams& p, const Tensor&) { cpu::edge_dot(p, parallel()); }
  static void edge_sum(const EdgeTermParams& p, const Tensor&) { cpu::edge_sum(p, parallel()); }
  static void edge_outer(const EdgeTermParams& p, const Tensor&) { cpu::edge_outer(p, parallel()); }

  static int64_t second_parts(const SecondParams& p) { return cpu::attention_parts(p.csr); }
  static void second_scratch(SecondParams& p, Workspace& scratch) {
    const Shape& s = p.shape;
    const ScalarType acc = p.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
    const int64_t slots = p.csr.num_slots, back = p.reverse.num_slots, heads = s.heads,
                  dim = p.score == Score::additive ? 1 : s.dim;
    scratch.add(p.numbers, true, {s.num_edges, cpu::second_numbers(p.csr), heads}, acc);
    scratch.add(p.partial_sums, slots, {slots, cpu::kSecondSums, heads}, acc);
    scratch.add(p.partial_query, slots, {slots, heads, dim}, acc);
    scratch.add(p.partial_out, slots, {slots, heads, s.value_dim}, acc);
    scratch.add(p.partial_key, back, {back, heads, dim}, acc);
    scratch.add(p.partial_value, back, {back, heads, s.value_dim}, acc);
  }
  static void second_order(const SecondParams& p, const Tensor&) { cpu::second_order(p, parallel()); }
  static void edge_products(const EdgeProductParams& p) { cpu::edge_products(p, parallel()); }
  static void edge_products_backward(const EdgeProductParams& p) {
    cpu::edge_products_backward(p, parallel());
  }
  static void pair_scores(const PairScoreParams& p) { cpu::pair_scores(p, parallel()); }
  static void pair_sums(const PairScoreParams& p) { cpu::pair_sums(p, parallel()); }
  static int64_t pair_parts(const Csr& csr) { return cpu::pair_parts(csr); }
};

// The operator `constants` (schemas.h).
std::string constants() {
  using A = Attention<CpuBackend>;
  const std::pair<const char*, int64_t> all[] = {
      {"score_additive", int64_t(Score::additive)},
      {"score_dot", int64_t(Score::dot)},
      {"score_additive_v2", int64_t(Score::additive_v2)},
      {"flag_bias_after", A::kBiasAfter},
      {"flag_feat_in_key", A::kFeatInKey},
      {"flag_feat_in_value", A::kFeatInValue},
      {"flag_part_of_rows", A::kPartOfRows},
      {"flag_ids_elsewhere", A::kIdsElsewhere},
      {"need_dst", A::kNeedDst},
      {"need_bias", A::kNeedBias},
      {"need_gate", A::kNeedGate},
      {"need_weight", A::kNeedWeight},
      {"need_feat", A::kNeedFeat},
      {"plan_numbers", sizeof(PlanArgs) / sizeof(int64_t)},
      {"tile_rows", kTileRows},
      {"tile_cols", kTileCols},
      {"warp", kWarp},
      {"load_bytes", kLoadBytes},
      {"degree_bins", kDegreeBins},
      {"most_ids", kMostIds},
      {"joins", kJoins},
      {"most_parts", kMostParts},
      {"wide_bytes", kWideBytes},
      {"group_forward_1", cpu::forward_degree(1)},
      {"group_forward_8", cpu::forward_degree(8)},
      {"group_backward_1", cpu::backward_degree(1)},
      {"group_backward_8", cpu::backward_degree(8)},
  };
  std::string text;
  const auto add = [&](const std::string& name, int64_t value) {
    text += name + "=" + std::to_string(value) + ";";
  };
  for (const auto& [name, value] : all) add(name, value);
  for (int heads : {1, 2})
    for (int bytes : {2, 4, 8})
      for (int dim = 1; dim <= 1024; dim *= 2)
        add("lanes_" + std::to_string(heads) + "_" + std::to_string(bytes) + "_" + std::to_string(dim),
            lanes_per_head(heads, dim, bytes));
  return text;
}

}  // namespace

int64_t keep_on_cpu(const CpuGraph& made) {
  using P = Graphs<CpuBackend>;
  return P::keep(std::make_shared<P::Graph>(P::Graph{{made.csr.num_rows, made.num_src, made.num_edges},
                                                     made.held.front().device(),
                                                     made.csr,
                                                     made.reverse,
                                                     made.has_reverse,
                                                     made.held}));
}

}  // namespace dfgnn

STABLE_TORCH_LIBRARY(dfgnn, m) {
  for (const char* schema :
       {dfgnn::kForward, dfgnn::kBackward, dfgnn::kSddmm, dfgnn::kSpmm, dfgnn::kEdgeDot, dfgnn::kEdgeSum,
        dfgnn::kEdgeOuter, dfgnn::kSecondOrder, dfgnn::kEdgeProducts, dfgnn::kEdgeProductsBackward,
        dfgnn::kPairScores, dfgnn::kPairSums, dfgnn::kProjectionGrad, dfgnn::kMergeParts, dfgnn::kGatherSum,
        dfgnn::kConstants})
    m.def(schema);
  for (const char* schema : dfgnn::kByIndex) m.def(schema);
  for (const char* schema : dfgnn::kBlocks) m.def(schema);
  for (const char* schema : dfgnn::kPlanning) m.def(schema);
  for (const char* schema : dfgnn::kPlanned) m.def(schema);
  m.def(dfgnn::layer_call_schema().c_str());
  for (const char* schema : {dfgnn::kLayer, dfgnn::kLayerBackward}) m.def(schema);
}

// These operators have no tensor argument from which the dispatcher could choose a backend.
STABLE_TORCH_LIBRARY_IMPL(dfgnn, CompositeExplicitAutograd, m) {
  m.impl("constants", TORCH_BOX(&dfgnn::constants));
  m.impl("layer_call", &dfgnn::write_layer_call);
}

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) {
  dfgnn::Attention<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::ProjectedAttention<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::GatAttention<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::Layers<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::Planned<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::Products<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::EdgeTerms<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::SecondOrder<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::EdgeProducts<dfgnn::CpuBackend>::register_ops(m);
  dfgnn::PairScores<dfgnn::CpuBackend>::register_ops(m);
}

extern "C" __attribute__((visibility("default"))) void dfgnn_drop_graph_cpu(int64_t number) {
  dfgnn::Graphs<dfgnn::CpuBackend>::drop_graph(number);
}

// Returns a checksum of `bytes` bytes, never 0, by which Python notices that a tensor's contents have
// changed; or 0 if no memory was left to compute it. It is a plain C function, whose calls cost less than
// those of operators, because every call of a layer calls it. It must not throw: its caller is not C++.
extern "C" __attribute__((visibility("default"))) uint64_t dfgnn_checksum_cpu(const void* data,
                                                                              int64_t bytes) {
  try {
    return std::max<uint64_t>(1, dfgnn::cpu::checksum(data, bytes, dfgnn::parallel()));
  } catch (const std::exception&) {
    return 0;
  }
}
