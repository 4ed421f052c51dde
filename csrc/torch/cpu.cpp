// Schemas of all operators, and their CPU backend.
#include "../cpu/engine.h"
#include "attention.h"
#include "schemas.h"

namespace dfgnn {
namespace {

struct CpuBackend {
  struct Scope {
    explicit Scope(const Tensor&) {}
  };

  static void check(const Checker&, const Shape&, DType) {}

  static cpu::Parallel parallel() {
    const auto run = [](int64_t begin, int64_t end, int64_t grain, cpu::RangeFn fn, void* ctx) {
      STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, fn, ctx));
    };
    return {run, static_cast<int>(torch::stable::get_num_threads())};
  }

  static void forward(const ForwardParams& p, const Tensor&) { cpu::forward(p, parallel()); }
  static void backward(const BackwardParams& p, const Tensor&) { cpu::backward(p, parallel()); }
  static bool has_tiles(Score, DType, const Shape&) { return false; }
  static constexpr bool kSumsAttention = false;
  static constexpr bool kAddsBias = true;
  static int64_t attention_parts(const BackwardParams& p) { return cpu::attention_parts(p.csr); }
  static void sddmm(const ProductParams& p, const Tensor&) { cpu::sddmm(p, parallel()); }
  static void spmm(const ProductParams& p, const Tensor&) { cpu::spmm(p, parallel()); }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY(dfgnn, m) {
  for (const char* schema :
       {dfgnn::kForward, dfgnn::kBackward, dfgnn::kSddmm, dfgnn::kSpmm, dfgnn::kGatherSum})
    m.def(schema);
  for (const char* schema : dfgnn::kPlanning) m.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) { dfgnn::Attention<dfgnn::CpuBackend>::register_ops(m); }
