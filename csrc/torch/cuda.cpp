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

  static bool has_tiles(Score score, DType dtype, const Shape& s) {
    return score != Score::additive_v2 && (dtype == DType::f16 || dtype == DType::bf16) &&
           (s.dim == 16 || s.dim == 32 || s.dim == 64 || s.dim == 128);
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
  static constexpr bool kAddsBias = false;
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

  static std::tuple<Tensor, Tensor, Tensor> plan_rows(Tensor indptr, int64_t num_edges, int64_t max_edges,
                                                      bool by_length) {
    const Scope scope(indptr);
    const Checker check("dfgnn::plan_rows", indptr);
    check.tensor("indptr", indptr, {-1}, {ScalarType::Long});
    check.require(indptr.size(0) > 0 && indptr.is_contiguous(),
                  "indptr: expected a contiguous one, not empty");
    check.require(num_edges >= 0 && max_edges > 0 && max_edges < (int64_t(1) << 31),
                  "num_edges, max_edges: expected counts");
    const int64_t rows = indptr.size(0) - 1, more = num_edges / max_edges;
    const ScalarType i32 = ScalarType::Int;
    Tensor items = make(indptr, {rows + more, 4}, i32), splits = make(indptr, {more, 4}, i32),
           counts = make(indptr, {kPlanCounts}, i32);
    PlanParams p{};
    p.indptr = static_cast<const int64_t*>(data(indptr)), p.num_rows = rows;
    p.max_edges = int32_t(max_edges), p.by_length = by_length;
    p.items = static_cast<Item*>(items.mutable_data_ptr()), p.num_items = rows + more, p.front = more;
    p.splits = static_cast<Split*>(splits.mutable_data_ptr()), p.num_splits = more;
    p.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
    launched(cuda::plan_rows(p, stream(indptr)));
    return {items, splits, counts};
  }

  static Tensor degrees(Tensor indptr) {
    const Scope scope(indptr);
    const Checker check("dfgnn::degrees", indptr);
    check.tensor("indptr", indptr, {-1}, {ScalarType::Long});
    check.require(indptr.size(0) > 0 && indptr.is_contiguous(),
                  "indptr: expected a contiguous one, not empty");
    Tensor sums = make(indptr, {kDegreeBins + 3}, ScalarType::Long);
    launched(cuda::degrees(static_cast<const int64_t*>(data(indptr)), indptr.size(0) - 1,
                           static_cast<int64_t*>(sums.mutable_data_ptr()), stream(indptr)));
    return sums;
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) {
  dfgnn::Attention<dfgnn::CudaBackend>::register_ops(m);
  m.impl("gather_sum", TORCH_BOX(&dfgnn::CudaBackend::gather_sum));
  m.impl("plan_rows", TORCH_BOX(&dfgnn::CudaBackend::plan_rows));
  m.impl("degrees", TORCH_BOX(&dfgnn::CudaBackend::degrees));
}
