// CUDA backend of the operators. The schemas come with the CPU library, which is loaded first.
#include "cuda.h"

#include "../cuda/edge_terms.h"
#include "../cuda/engine.h"
#include "../cuda/terms.h"
#include "edge_terms.h"
#include "planned.h"

namespace dfgnn {
namespace {

struct CudaBackend {
  using Scope = CudaScope;

  static void check(const Checker& check, const Shape& s, DType dtype) {
    const int bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
    check.require(s.dim == s.value_dim,
                  "head sizes of query and value: expected equal ones on CUDA (pad them)");
    check.require(s.dim * bytes % 16 == 0, "head size: expected a multiple of 16 bytes on CUDA (pad it)");
    check.require(s.dim > 0 && s.heads > 0, "features: expected at least one head of at least one element");
  }

  static void check(const Checker&, const Csr&, int64_t) {}  // items are on the device

  static bool has_tiles(Score score, DType dtype, const Shape& s) {
    return score != Score::additive_v2 && (dtype == DType::f16 || dtype == DType::bf16) &&
           (s.dim == 16 || s.dim == 32 || s.dim == 64 || s.dim == 128);
  }

  static bool projects(DType dtype, const Shape& s, int64_t dim) { return cuda::projects(dtype, s, dim); }

  static void forward(const ForwardParams& p, const Tensor& t) { launched(cuda::forward(p, stream_of(t))); }
  static void backward(const BackwardParams& p, const Tensor& t) {
    launched(cuda::backward(p, stream_of(t)));
  }
  static constexpr bool kSumsAttention = true;
  static constexpr bool kAddsBias = false;
  static int64_t attention_parts(const BackwardParams& p) { return cuda::attention_parts(p); }
  static void terms(const TermsParams& p, const Tensor& t) { launched(cuda::terms(p, stream_of(t))); }
  static void terms_backward(const TermsBackwardParams& p, const Tensor& t) {
    launched(cuda::terms_backward(p, stream_of(t)));
  }
  static int64_t terms_parts(const TermsParams& p) { return cuda::terms_parts(p); }
  static void sddmm(const ProductParams& p, const Tensor& t) { launched(cuda::sddmm(p, stream_of(t))); }
  static void spmm(const ProductParams& p, const Tensor& t) { launched(cuda::spmm(p, stream_of(t))); }

  static constexpr int64_t kRowBytes = 16;
  static void edge_dot(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_dot(p, stream_of(t)));
  }
  static void edge_sum(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_sum(p, stream_of(t)));
  }
  static void edge_outer(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_outer(p, stream_of(t)));
  }

  // Plain neighbour sum, the yardstick of the benchmarks.
  static Tensor gather_sum(Tensor feat, Tensor indices, Tensor items, Tensor splits, Sizes plan,
                           int64_t num_dst) {
    const Scope scope(feat);
    const Checker check("dfgnn::gather_sum", feat);
    const ScalarType type = feat.scalar_type();
    check.tensor("feat", feat, {-1, -1}, {type});
    const int64_t n = feat.size(0), d = feat.size(1);
    const Tensor heads = torch::stable::view(dense(feat), {n, 1, d});
    ProductParams p =
        Attention<CudaBackend>::product(check, heads, num_dst, indices, {}, items, splits, plan);
    Tensor out = make(feat, {num_dst, d}, type);
    const Tensor partial = make(feat, {p.csr.num_slots, d}, acc_type(type));
    p.out = out.mutable_data_ptr(), p.partial_out = partial.mutable_data_ptr();
    launched(cuda::spmm(p, stream_of(feat)));
    return out;
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) {
  dfgnn::Planned<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::EdgeTerms<dfgnn::CudaBackend>::register_ops(m);
  m.impl("gather_sum", TORCH_BOX(&dfgnn::CudaBackend::gather_sum));
}

extern "C" __attribute__((visibility("default"))) void dfgnn_drop_graph_cuda(int64_t number) {
  dfgnn::Planned<dfgnn::CudaBackend>::drop_graph(number);
}
