// CUDA backend of the operators. The schemas come with the CPU library, which is loaded first.
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/engine.h"
#include "attention.h"

namespace dfgnn {
namespace {

struct CudaBackend {
  struct Scope {
    explicit Scope(const Tensor& t) : guard(t.get_device_index()) {}
    torch::stable::accelerator::DeviceGuard guard;
  };

  static void check(const Checker& check, const Shape& s, DType dtype) {
    const int bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
    check.require(s.dim == s.value_dim,
                  "head sizes of query and value: expected equal ones on CUDA (pad them)");
    check.require(s.dim * bytes % 16 == 0, "head size: expected a multiple of 16 bytes on CUDA (pad it)");
    check.require(s.dim > 0 && s.heads > 0, "features: expected at least one head of at least one element");
  }

  static void* stream(const Tensor& t) {
    void* s = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &s));
    return s;
  }
  static void launched(const char* error) {
    STD_TORCH_CHECK(error == nullptr, "dfgnn: CUDA kernel: ", error);
  }

  static void forward(const ForwardParams& p, const Tensor& t) { launched(cuda::forward(p, stream(t))); }
  static void backward(const BackwardParams& p, const Tensor& t) { launched(cuda::backward(p, stream(t))); }
  static constexpr bool kSumsAttention = true;
  static int64_t attention_parts(const BackwardParams& p) { return cuda::attention_parts(p); }
  static void sddmm(const ProductParams& p, const Tensor& t) { launched(cuda::sddmm(p, stream(t))); }
  static void spmm(const ProductParams& p, const Tensor& t) { launched(cuda::spmm(p, stream(t))); }

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
    launched(cuda::spmm(p, stream(feat)));
    return out;
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) {
  dfgnn::Attention<dfgnn::CudaBackend>::register_ops(m);
  m.impl("gather_sum", TORCH_BOX(&dfgnn::CudaBackend::gather_sum));
}
