// The CUDA backend of the operators. The CPU library, which is loaded first, registers the schemas.
#include "cuda.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../cuda/attention/merge_parts.h"
#include "../cuda/attention/terms.h"
#include "../cuda/edges/edge_terms.h"
#include "../cuda/engine.h"
#include "../cuda/second_order/second_order.h"
#include "edge_terms.h"
#include "layer.h"
#include "planned.h"
#include "products.h"
#include "projected.h"
#include "second_order.h"

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

  static void check(const Checker&, const Csr&, int64_t) {
  }  // reading the work items would wait for the device

  static bool has_tiles(Score score, DType dtype, const Shape& s) {
    return score != Score::additive_v2 && (dtype == DType::f16 || dtype == DType::bf16) &&
           (s.dim == 8 || s.dim == 16 || s.dim == 32 || s.dim == 64 || s.dim == 128);
  }

  static bool projects(DType dtype, const Shape& s, int64_t dim) { return cuda::projects(dtype, s, dim); }

  static void forward(const ForwardParams& p, const Tensor& t) { launched(cuda::forward(p, stream_of(t))); }
  static void backward(const BackwardParams& p, const Tensor& t) {
    launched(cuda::backward(p, stream_of(t)));
  }
  // Whether backward saves per-edge alpha and ds (BackwardParams::handed), which only dot attention does.
  // With features of the edges it always does. Else it does if all of these hold:
  //   - at least one direction of the graph has edge ids, by which `handed` is indexed;
  //   - neither direction has tiles;
  //   - neither has source partitions, which are separate launches;
  //   - these scalars and the partial results of split rows together take at most kMostScratch times the
  //     memory of one feature array, whose number of rows is taken as the mean of the numbers of destinations
  //     and sources.
  static constexpr int64_t kMostScratch = 3;
  static bool hands_over(const BackwardParams& p) {
    const Shape& s = p.shape;
    if (p.score != Score::dot || p.edge.feat) return p.score == Score::dot;
    if (!p.csr.eids && !p.reverse.eids) return false;  // `handed` is by edge id
    for (const Csr* csr : {&p.csr, &p.reverse})
      if (csr->tiles || csr->num_parts) return false;
    const int64_t bytes = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
    const int64_t acc = std::max<int64_t>(bytes, 4), columns = int64_t(s.heads) * s.dim;
    const int64_t rows = p.csr.num_slots + 2 * p.reverse.num_slots;
    return s.num_edges * s.heads * 2 * acc + rows * columns * acc <=
           kMostScratch * (s.num_dst + s.num_src) / 2 * columns * bytes;
  }
  static constexpr bool kSumsAttention = true;  // see attention.h
  static int64_t attention_parts(const BackwardParams& p) { return cuda::attention_parts(p); }
  static void terms(const TermsParams& p, const Tensor& t) { launched(cuda::terms(p, stream_of(t))); }
  static void terms_backward(const TermsBackwardParams& p, const Tensor& t) {
    launched(cuda::terms_backward(p, stream_of(t)));
  }
  static int64_t terms_parts(const TermsParams& p) { return cuda::terms_parts(p); }

  static constexpr bool kWidens = true;  // see linear.h
  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
  }
  static void addmm(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), c.get(), a.get(), b.get(), 1, 1));
  }
  static constexpr auto cat = aoti_torch_cuda_cat;
  static void baddbmm(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_baddbmm_out(out.get(), c.get(), a.get(), b.get(), 1, 1));
  }
  static void bmm(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_bmm_out(out.get(), a.get(), b.get()));
  }
  static void sddmm(const ProductParams& p, const Tensor& t) { launched(cuda::sddmm(p, stream_of(t))); }
  static void spmm(const ProductParams& p, const Tensor& t) { launched(cuda::spmm(p, stream_of(t))); }

  static constexpr int64_t kRowBytes = 16;  // see edge_terms.h
  static void edge_dot(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_dot(p, stream_of(t)));
  }
  static void edge_sum(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_sum(p, stream_of(t)));
  }
  static void edge_outer(const EdgeTermParams& p, const Tensor& t) {
    launched(cuda::edge_outer(p, stream_of(t)));
  }

  static int64_t second_parts(const SecondParams& p) { return cuda::second_parts(p); }
  static void second_scratch(SecondParams& p, Workspace& scratch) {
    const Shape& s = p.shape;
    const ScalarType acc = p.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
    const auto cut = [](const Csr& csr) { return csr.num_splits || csr.num_parts; };
    scratch.add(p.numbers, true, {s.num_edges, s.heads, 4}, acc);
    scratch.add(p.ranges, cut(p.csr), {s.num_dst, 2}, ScalarType::Int);
    scratch.add(p.reverse_ranges, cut(p.reverse), {s.num_src, 2}, ScalarType::Int);
  }
  static void second_order(const SecondParams& p, const Tensor& t) {
    launched(cuda::second_order(p, stream_of(t)));
  }

  // The operator cut_graph: calls cut_rows for one direction or, if the reverse CSR is given, for both, and
  // then graph_handle, which stores the graph. how, rev_how: the last four arguments of the operator cut_rows
  // (max_edges, by_length, more, num_splits), then Csr::packed; without the reverse CSR, rev_how is
  // [num_src].
  static std::tuple<int64_t, Tensor, Tensor, OptTensor, OptTensor> cut_graph(
      Tensor indptr, Tensor indices, OptTensor eids, Sizes how, OptTensor rev_indptr, OptTensor rev_indices,
      OptTensor rev_eids, Sizes rev_how) {
    const Scope scope(indptr);
    const Checker check("dfgnn::cut_graph", indptr);
    const bool backward = rev_indptr && rev_indices;
    check.require(how.size() == 5 && (!backward || rev_how.size() == 5),
                  "how: expected [max_edges, by_length, more, num_splits, packed]");
    std::vector<Cuttable> directions{{indptr, indices, how[0], how[1] != 0, how[2], how[3]}};
    const int64_t rows = indptr.size(0) - 1, edges = indices.size(0);
    Sizes rev_plan;
    int64_t cols = 0;
    if (backward) {
      directions.push_back({*rev_indptr, *rev_indices, rev_how[0], rev_how[1] != 0, rev_how[2], rev_how[3]});
      cols = rev_indptr->size(0) - 1;
      rev_plan = {rev_how[2] + rev_how[3], rev_how[4], 0, cols, rows, edges};
    } else {
      check.require(rev_how.size() == 1, "rev_how: expected [num_src] without the reverse CSR");
      cols = rev_how[0];
    }
    const std::vector<Cut> cut = cut_rows(check, directions);
    const Tensor &items = cut[0].items, &splits = cut[0].splits;
    OptTensor rev_items, rev_splits;
    if (backward) rev_items = cut[1].items, rev_splits = cut[1].splits;
    const Sizes plan{how[2] + how[3], how[4], 0, rows, cols, edges};
    const int64_t number = Graphs<CudaBackend>::graph_handle(
        indices, eids, items, splits, plan, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, {}, {});
    return {number, items, splits, rev_items, rev_splits};
  }

  static Tensor projection_grad(Tensor query, Tensor query_sums, Tensor grad, Tensor grad_sums,
                                double scale) {
    const Scope scope(query);
    const Checker check("dfgnn::projection_grad", query);
    const ScalarType type = query.scalar_type();
    check.tensor("query", query, {-1, -1, -1}, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
    const int64_t n = query.size(0), heads = query.size(1), dim = query.size(2), width = query_sums.size(2);
    check.tensor("grad", grad, {n, heads, dim}, {type});
    check.tensor("query_sums", query_sums, {n, heads, -1}, {type});
    check.tensor("grad_sums", grad_sums, {n, heads, width}, {type});
    const int64_t load = 16 / bytes_of(type);
    check.require(heads > 0 && dim > 0 && width > 0 && dim % load == 0 && width % load == 0,
                  "expected heads, and rows and sums of whole loads of 16 bytes, got ", heads, ", ", dim,
                  " and ", width, " elements");
    check.require(heads * dim * width < kMostIds, "expected a projection of less than 2**31 elements");
    query = dense(query), query_sums = dense(query_sums), grad = dense(grad), grad_sums = dense(grad_sums);
    ProjectionGradParams p{dtype_of(check.op(), query),
                           n,
                           int32_t(heads),
                           int32_t(dim),
                           int32_t(width),
                           scale,
                           {data(query), data(grad)},
                           {data(query_sums), data(grad_sums)}};
    p.parts = cuda::projection_parts(p);
    const Tensor partial = make(query, {p.parts, heads, dim, width}, acc_type(type));
    Tensor out = make(query, {heads, dim, width}, type);
    p.partial = partial.mutable_data_ptr(), p.out = out.mutable_data_ptr();
    launched(cuda::projection_grad(p, stream_of(query)));
    return out;
  }

  static std::tuple<Tensor, Tensor, Tensor> merge_parts(Tensor own, Tensor own_stats, Tensor halo,
                                                        Tensor halo_stats) {
    const Scope scope(own);
    const Checker check("dfgnn::merge_parts", own);
    const ScalarType type = own.scalar_type(), acc = acc_type(type);
    check.tensor("own", own, {-1, -1, -1}, {type});
    const int64_t n = own.size(0), heads = own.size(1), dim = own.size(2);
    check.tensor("halo", halo, {n, heads, dim}, {type});
    for (const Tensor& stats : {own_stats, halo_stats}) check.tensor("stats", stats, {n, heads, 2}, {acc});
    check.require(dim * bytes_of(type) % 16 == 0, "own: expected heads of a multiple of 16 bytes, got ", dim,
                  " elements");
    own = dense(own), halo = dense(halo), own_stats = dense(own_stats), halo_stats = dense(halo_stats);
    Tensor out = make(own, {n, heads, dim}, type), stats = make(own, {n, heads, 2}, acc),
           weight = make(own, {n, heads}, acc);
    const cuda::MergeParams p{dtype_of(check.op(), own),
                              n,
                              int32_t(heads),
                              int32_t(dim),
                              {data(own), data(halo)},
                              {data(own_stats), data(halo_stats)},
                              out.mutable_data_ptr(),
                              stats.mutable_data_ptr(),
                              weight.mutable_data_ptr()};
    launched(cuda::merge(p, stream_of(own)));
    return {out, stats, weight};
  }

  // Returns sums of neighbours' rows without weights: the baseline that benchmarks compare attention with.
  static Tensor gather_sum(Tensor feat, Tensor indices, Tensor items, Tensor splits, Sizes plan,
                           int64_t num_dst) {
    const Scope scope(feat);
    const Checker check("dfgnn::gather_sum", feat);
    const ScalarType type = feat.scalar_type();
    check.tensor("feat", feat, {-1, -1}, {type});
    const int64_t n = feat.size(0), d = feat.size(1);
    const Tensor heads = torch::stable::view(dense(feat), {n, 1, d});
    using Rows = Products<CudaBackend>;
    ProductParams p =
        Rows::product(check, heads, Rows::side_of(check, heads, num_dst, indices, {}, items, splits, plan));
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
  dfgnn::Attention<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::ProjectedAttention<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::GatAttention<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::Layers<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::Planned<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::Products<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::EdgeTerms<dfgnn::CudaBackend>::register_ops(m);
  dfgnn::SecondOrder<dfgnn::CudaBackend>::register_ops(m);
  m.impl("cut_graph", TORCH_BOX(&dfgnn::CudaBackend::cut_graph));
  m.impl("projection_grad", TORCH_BOX(&dfgnn::CudaBackend::projection_grad));
  m.impl("merge_parts", TORCH_BOX(&dfgnn::CudaBackend::merge_parts));
  m.impl("gather_sum", TORCH_BOX(&dfgnn::CudaBackend::gather_sum));
}

extern "C" __attribute__((visibility("default"))) void dfgnn_drop_graph_cuda(int64_t number) {
  dfgnn::Graphs<dfgnn::CudaBackend>::drop_graph(number);
}
