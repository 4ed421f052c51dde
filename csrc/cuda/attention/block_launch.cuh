// Launchers of attention within blocks for one dtype: the passes of tiles.cuh over windows of rows.
#pragma once

#include "block_passes.cuh"
#include "tiles.cuh"

namespace dfgnn::cuda {

// Calls f with the size of heads as a constant.
template <typename T, class F>
void with_block_size(int dim, F f) {
  if (dim == 16) return f(std::integral_constant<int, 16>{});
  if (dim == 32) return f(std::integral_constant<int, 32>{});
  if (dim == 64) return f(std::integral_constant<int, 64>{});
  if constexpr (sizeof(T) < 8) return f(std::integral_constant<int, 128>{});
}

template <typename T, Pass PASS>
void launch_blocks(const BlockTileParams& p, int dim, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  with_block_size<T>(dim, [&](auto size) {
    constexpr int D = decltype(size)::value, BYTES = LayoutOf<T, D>::BYTES;
    const auto kernel = block_kernel<T, D, PASS>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    cuda::launch(stream, dim3(unsigned((p.num_rows + kTileRows - 1) / kTileRows), unsigned(p.heads)),
                 kTileThreads, BYTES, kernel, p);
  });
}

inline BlockTileParams block_params(const BlockParams& b, int64_t num_rows, const int2* ranges) {
  BlockTileParams p{};
  p.num_rows = int32_t(num_rows), p.heads = b.heads, p.ranges = ranges;
  p.scale = float(b.scale), p.exact_scale = b.scale;
  return p;
}

template <typename T>
void block_forward(const BlockParams& b, const BlockRanges& ranges, cudaStream_t stream) {
  BlockTileParams p = block_params(b, b.num_rows, ranges.rows);
  p.a = b.query, p.c = b.key, p.d = b.value, p.col_stats = b.key_bias;
  p.out_d = b.out, p.stats = static_cast<RowStats<float>*>(b.stats);
  launch_blocks<T, Pass::forward>(p, b.dim, stream);
}

template <typename T>
void block_backward(const BlockParams& b, const BlockRanges& ranges, cudaStream_t stream) {
  BlockTileParams p = block_params(b, b.num_rows, ranges.rows);
  p.a = b.query, p.b = b.grad_out, p.c = b.key, p.d = b.value, p.col_stats = b.key_bias;
  p.row_stats = static_cast<const RowStats<float>*>(b.stats), p.out = b.out;
  p.node_stats = static_cast<NodeStats<float>*>(b.delta), p.grad_log_sum = b.grad_log_sum;
  p.out_c = b.grad_query;
  launch_blocks<T, Pass::destinations>(p, b.dim, stream);

  BlockTileParams of_keys = block_params(b, b.num_keys, ranges.keys);
  of_keys.a = b.key, of_keys.b = b.value, of_keys.c = b.query, of_keys.d = b.grad_out;
  of_keys.row_term = static_cast<const float*>(b.key_bias), of_keys.col_stats = b.delta;
  of_keys.out_c = b.grad_key, of_keys.out_d = b.grad_value,
  of_keys.row_sum = static_cast<float*>(b.grad_bias);
  launch_blocks<T, Pass::sources>(of_keys, b.dim, stream);
}

}  // namespace dfgnn::cuda
