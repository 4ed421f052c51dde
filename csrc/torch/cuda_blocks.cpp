// The operators of attention within blocks on CUDA.
#include "../cuda/attention/blocks.h"
#include "blocks.h"
#include "cuda.h"

namespace dfgnn {
namespace {

struct CudaBlocks {
  using Scope = CudaScope;

  // The values are not read, because that would wait for the device.
  static Tensor offsets(const Checker&, const char*, const Tensor& given, int64_t) {
    return given.is_contiguous() ? given : torch::stable::contiguous(given);
  }
  static int64_t block_items(const BlockParams& p) { return 2 * (p.num_rows + p.num_keys); }
  static void block_attention(const BlockParams& p, BlockPass pass, const Tensor& like) {
    const Checker check("dfgnn::block_attention", like);
    const int most = p.dtype == DType::f64 ? 64 : 128;
    check.require(p.dim == p.value_dim,
                  "head sizes of query and value: expected equal ones on CUDA (pad them)");
    check.require((p.dim == 16 || p.dim == 32 || p.dim == 64 || p.dim == 128) && p.dim <= most,
                  "head size: expected 16, 32, 64 or, but for float64, 128 on CUDA (pad it), got ", p.dim);
    check.require(pass != BlockPass::second || p.dtype == DType::f32 || p.dtype == DType::f64,
                  "features: expected float32 or float64 for second derivatives on CUDA");
    launched(cuda::block_attention(p, pass, stream_of(like)));
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CUDA, m) { dfgnn::BlockAttention<dfgnn::CudaBlocks>::register_ops(m); }
