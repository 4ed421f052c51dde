// Launchers of the tile schedule. They set the operands and results of a pass (TileParams in tile_edges.cuh).
#pragma once

#include "../launch.cuh"
#include "tiles.cuh"

namespace dfgnn::cuda {

template <typename T, Score SCORE, Pass PASS, bool POSITIVE>
void launch_tiles(const TileParams& p, int dim, cudaStream_t stream) {
  const auto launch = [&](auto size) {
    constexpr int D = decltype(size)::value;
    const auto kernel = tile_kernel<T, D, SCORE, PASS, POSITIVE>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, TileLayout<D>::BYTES);
    cuda::launch(stream, dim3(unsigned(p.num_items), unsigned(p.heads)), kTileThreads, TileLayout<D>::BYTES,
                 kernel, p);
  };
  switch (dim) {
    case 8:
      return launch(std::integral_constant<int, 8>{});
    case 16:
      return launch(std::integral_constant<int, 16>{});
    case 32:
      return launch(std::integral_constant<int, 32>{});
    case 64:
      return launch(std::integral_constant<int, 64>{});
    default:
      return launch(std::integral_constant<int, 128>{});
  }
}

inline TileParams tile_params(const Csr& csr, const Shape& shape, int64_t num_rows) {
  TileParams p{};
  p.items = csr.items, p.tiles = csr.tiles, p.num_items = csr.num_items;
  p.num_rows = int32_t(num_rows), p.heads = shape.heads;
  return p;
}

template <typename T, Score SCORE>
void tile_forward(const ForwardParams& f, cudaStream_t stream) {
  TileParams p = tile_params(f.csr, f.shape, f.shape.num_dst);
  p.a = f.query, p.c = f.key, p.d = f.value;
  p.row_term = static_cast<const float*>(f.alpha_dst), p.col_stats = f.alpha_src;
  p.slope = float(f.negative_slope), p.scale = float(f.scale);
  p.out_d = f.out, p.positive = f.positive, p.out_bias = f.out_bias;
  p.stats = static_cast<RowStats<float>*>(f.stats), p.mass = static_cast<float*>(f.positive_mass);
  p.part_d = static_cast<float*>(f.partial_out), p.part_positive = static_cast<float*>(f.partial_positive);
  p.part_stats = static_cast<Softmax<float, true>*>(f.partial_stats);
  const int dim = f.shape.value_dim;
  if (SCORE == Score::additive && f.positive) {
    launch_tiles<T, SCORE, Pass::forward, SCORE == Score::additive>(p, dim, stream);
  } else {
    launch_tiles<T, SCORE, Pass::forward, false>(p, dim, stream);
  }
}

template <typename T>
void tile_destinations(const BackwardParams& f, cudaStream_t stream) {
  TileParams p = tile_params(f.csr, f.shape, f.shape.num_dst);
  p.a = f.query, p.b = f.grad_out, p.c = f.key, p.d = f.value;
  p.row_stats = static_cast<const RowStats<float>*>(f.stats), p.out = f.out, p.out_bias = f.out_bias;
  p.node_stats = static_cast<NodeStats<float>*>(f.node_stats);
  p.scale = float(f.scale);
  p.out_c = f.grad_query, p.part_c = static_cast<float*>(f.partial_query);
  launch_tiles<T, Score::dot, Pass::destinations, false>(p, f.shape.value_dim, stream);
}

template <typename T, Score SCORE>
void tile_sources(const BackwardParams& f, cudaStream_t stream) {
  TileParams p = tile_params(f.reverse, f.shape, f.shape.num_src);
  p.a = f.key, p.b = f.value, p.c = f.query, p.d = f.grad_out;
  p.row_term = static_cast<const float*>(f.alpha_src), p.col_stats = f.node_stats;
  p.slope = float(f.negative_slope), p.scale = float(f.scale);
  p.out_c = f.grad_key, p.part_c = static_cast<float*>(f.partial_key);
  p.out_d = f.grad_value, p.part_d = static_cast<float*>(f.partial_value);
  p.row_sum = static_cast<float*>(f.grad_alpha_src), p.part_sum = static_cast<float*>(f.partial_alpha);
  launch_tiles<T, SCORE, Pass::sources, false>(p, f.shape.value_dim, stream);
}

}  // namespace dfgnn::cuda
