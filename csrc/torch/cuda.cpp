// CUDA backend of the operators. The schemas come with the CPU library, which is loaded first.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>

#include "../cuda/edge_terms.h"
#include "../cuda/engine.h"
#include "../cuda/terms.h"
#include "edge_terms.h"
#include "planned.h"

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

  static void check(const Checker&, const Csr&, int64_t) {}  // items are on the device

  static bool has_tiles(Score score, DType dtype, const Shape& s) {
    return score != Score::additive_v2 && (dtype == DType::f16 || dtype == DType::bf16) &&
           (s.dim == 16 || s.dim == 32 || s.dim == 64 || s.dim == 128);
  }

  static void* stream(const Tensor& t) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &s));
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
  static void terms(const TermsParams& p, const Tensor& t) { launched(cuda::terms(p, stream(t))); }
  static void terms_backward(const TermsBackwardParams& p, const Tensor& t) {
    launched(cuda::terms_backward(p, stream(t)));
  }
  static int64_t terms_parts(const TermsParams& p) { return cuda::terms_parts(p); }
  static void sddmm(const ProductParams& p, const Tensor& t) { launched(cuda::sddmm(p, stream(t))); }
  static void spmm(const ProductParams& p, const Tensor& t) { launched(cuda::spmm(p, stream(t))); }

  static constexpr int64_t kRowBytes = 16;
  static void edge_dot(const EdgeTermParams& p, const Tensor& t) { launched(cuda::edge_dot(p, stream(t))); }
  static void edge_sum(const EdgeTermParams& p, const Tensor& t) { launched(cuda::edge_sum(p, stream(t))); }
  static void edge_outer(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_outer(p, stream(t)));
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
    launched(cuda::spmm(p, stream(feat)));
    return out;
  }

  static const int64_t* offsets(const Checker& check, const char* name, const Tensor& t) {
    check.tensor(name, t, {-1}, {ScalarType::Long});
    check.require(t.size(0) > 0 && t.is_contiguous(), name, ": expected a contiguous one, not empty");
    check.count(name, t.size(0) - 1);
    return static_cast<const int64_t*>(data(t));
  }
  // The neighbours of indptr's rows.
  static const int32_t* columns(const Checker& check, const Tensor& t, const Tensor& indptr) {
    check.tensor("indices", t, {-1}, {ScalarType::Int});
    check.require(t.is_contiguous(), "indices: expected contiguous ones");
    check.count("indices", t.size(0));
    check.require(t.size(0) == 0 || indptr.size(0) > 1, "indices: edges without rows");
    return static_cast<const int32_t*>(data(t));
  }
  static void check_windows(const Checker& check, const Tensor& offsets, int64_t num_rows) {
    const int64_t windows = (num_rows + kTileRows - 1) / kTileRows;
    check.require(offsets.size(0) - 1 == windows, "offsets: expected those of ", windows, " windows, got ",
                  offsets.size(0) - 1);
  }
  static int64_t* numbers(Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }

  // more: items beyond one per row that there can be.
  static std::tuple<Tensor, Tensor, Tensor> plan(const Checker& check, const Tensor& indptr, PlanParams p,
                                                 int64_t max_edges, int64_t more, int64_t num_splits) {
    check.require(max_edges > 0 && max_edges < kMostIds, "items: expected a bound in [1, 2**31), got ",
                  max_edges);
    const ScalarType i32 = ScalarType::Int;
    check.count("items: their number", indptr.size(0) - 1 + more);
    p.num_rows = indptr.size(0) - 1, p.max_edges = int32_t(max_edges);
    p.num_items = p.num_rows + more, p.front = more, p.num_splits = num_splits;
    p.num_counts = 3 + int64_t(p.parts) * 2 * kPlanBuckets;
    Tensor items = make(indptr, {p.num_items, 4}, i32), splits = make(indptr, {num_splits, 4}, i32),
           counts = make(indptr, {p.num_counts}, i32);
    p.items = static_cast<Item*>(items.mutable_data_ptr());
    p.splits = static_cast<Split*>(splits.mutable_data_ptr());
    p.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
    launched(cuda::plan_rows(p, stream(indptr)));
    return {items, splits, counts};
  }

  static std::tuple<Tensor, Tensor, Tensor> plan_rows(Tensor indptr, Tensor indices, int64_t num_cols,
                                                      int64_t parts, int64_t max_edges, bool by_length) {
    const Scope scope(indptr);
    const Checker check("dfgnn::plan_rows", indptr);
    check.require(parts > 0 && parts < 1000 && max_edges > 0,
                  "parts, max_edges: expected counts, of parts below ", "1000, got ", parts, " and ",
                  max_edges);
    check.count("num_cols", num_cols);
    PlanParams p{};
    p.indptr = offsets(check, "indptr", indptr), p.indices = columns(check, indices, indptr);
    p.num_cols = num_cols, p.parts = int32_t(parts), p.by_length = by_length;
    p.stride = 1, p.last_row = indptr.size(0) - 1;
    // An item takes an edge, but for a row's first one.
    const int64_t edges = indices.size(0), more = edges / max_edges;
    const int64_t cuts = std::min((parts - 1) * p.last_row, edges);
    return plan(check, indptr, p, max_edges, more + cuts, parts > 1 ? std::min(p.last_row, edges) : more);
  }

  static std::tuple<Tensor, Tensor, Tensor> plan_windows(Tensor chunks, int64_t num_chunks, int64_t num_rows,
                                                         int64_t max_chunks) {
    const Scope scope(chunks);
    const Checker check("dfgnn::plan_windows", chunks);
    PlanParams p{};
    p.indptr = offsets(check, "offsets", chunks);
    check.count("num_chunks", num_chunks);
    check.count("num_rows", num_rows);
    check.require(max_chunks > 0, "max_chunks: expected a count, got ", max_chunks);
    check_windows(check, chunks, num_rows);
    p.parts = 1, p.stride = kTileRows, p.last_row = num_rows;
    const int64_t more = num_chunks / max_chunks;
    return plan(check, chunks, p, max_chunks, more, more * kTileRows);
  }

  static Tensor degrees(Tensor indptr) {
    const Scope scope(indptr);
    const Checker check("dfgnn::degrees", indptr);
    const int64_t* begin = offsets(check, "indptr", indptr);
    Tensor scratch = make(indptr, {kDegreeScratch}, ScalarType::Long);
    Tensor found = make(indptr, {5}, ScalarType::Long);
    launched(cuda::degrees(begin, indptr.size(0) - 1, numbers(scratch), numbers(found), stream(indptr)));
    return found;
  }

  static Tensor falls(Tensor indptr, Tensor indices) {
    const Scope scope(indptr);
    const Checker check("dfgnn::falls", indptr);
    const int64_t* begin = offsets(check, "indptr", indptr);
    const int32_t* column = columns(check, indices, indptr);
    Tensor count = make(indptr, {1}, ScalarType::Long);
    launched(cuda::falls(begin, column, indptr.size(0) - 1, indices.size(0), numbers(count), stream(indptr)));
    return count;
  }

  static Tensor sharing(Tensor indptr, Tensor indices, int64_t step, int64_t most) {
    const Scope scope(indptr);
    const Checker check("dfgnn::sharing", indptr);
    const int64_t* begin = offsets(check, "indptr", indptr);
    const int32_t* column = columns(check, indices, indptr);
    check.require(step > 0 && step < kMostIds && most > 0 && most < (int64_t(1) << 25),
                  "step, most: expected counts, of edges below 2**25, got ", step, " and ", most);
    Tensor sums = make(indptr, {2}, ScalarType::Long);
    launched(
        cuda::sharing(begin, column, indptr.size(0) - 1, step, int(most), numbers(sums), stream(indptr)));
    return sums;
  }

  static Tensor tile_counts(Tensor indptr, Tensor indices) {
    const Scope scope(indptr);
    const Checker check("dfgnn::tile_counts", indptr);
    const int64_t* begin = offsets(check, "indptr", indptr);
    const int32_t* column = columns(check, indices, indptr);
    const int64_t rows = indptr.size(0) - 1;
    Tensor chunks = make(indptr, {(rows + kTileRows - 1) / kTileRows + 1}, ScalarType::Long);
    launched(cuda::tile_counts(begin, column, rows, numbers(chunks), stream(indptr)));
    return chunks;
  }

  static std::tuple<Tensor, Tensor> tiles(Tensor indptr, Tensor indices, Tensor first, int64_t num_chunks) {
    const Scope scope(indptr);
    const Checker check("dfgnn::tiles", indptr);
    const int64_t* begin = offsets(check, "indptr", indptr);
    const int32_t* column = columns(check, indices, indptr);
    const int64_t* chunk = offsets(check, "offsets", first);
    const int64_t rows = indptr.size(0) - 1;
    check_windows(check, first, rows);
    check.require(num_chunks >= 0 && num_chunks <= indices.size(0),
                  "num_chunks: expected at most one per edge, got ", num_chunks);
    Tensor chunks = make(indptr, {num_chunks, kTileInts}, ScalarType::Int);
    Tensor twice = make(indptr, {1}, ScalarType::Int);
    launched(cuda::tiles(begin, column, rows, chunk, num_chunks,
                         static_cast<int32_t*>(chunks.mutable_data_ptr()),
                         static_cast<int32_t*>(twice.mutable_data_ptr()), stream(indptr)));
    return {chunks, twice};
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) {
  dfgnn::Planned<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::EdgeTerms<dfgnn::CudaBackend>::register_ops(m);
  m.impl("gather_sum", TORCH_BOX(&dfgnn::CudaBackend::gather_sum));
  m.impl("plan_rows", TORCH_BOX(&dfgnn::CudaBackend::plan_rows));
  m.impl("plan_windows", TORCH_BOX(&dfgnn::CudaBackend::plan_windows));
  m.impl("degrees", TORCH_BOX(&dfgnn::CudaBackend::degrees));
  m.impl("falls", TORCH_BOX(&dfgnn::CudaBackend::falls));
  m.impl("sharing", TORCH_BOX(&dfgnn::CudaBackend::sharing));
  m.impl("tile_counts", TORCH_BOX(&dfgnn::CudaBackend::tile_counts));
  m.impl("tiles", TORCH_BOX(&dfgnn::CudaBackend::tiles));
}

extern "C" __attribute__((visibility("default"))) void dfgnn_drop_graph_cuda(int64_t number) {
  dfgnn::Planned<dfgnn::CudaBackend>::drop_graph(number);
}
