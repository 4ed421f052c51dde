// Launchers of the dot family (Graph Transformer).
#pragma once

#include "launch.cuh"

namespace dfgnn::cuda {

template <typename T>
const char* dot_forward(const ForwardParams& p, cudaStream_t stream) {
  if (p.csr.num_items == 0) return nullptr;
  const bool edge = p.edge.any() || p.attention;
  with_config<T>(p.shape.dim, [&](auto config) {
    using C = decltype(config);
    const Launch<C> launch(p.shape, p.shape.dim, p.csr);
    constexpr int B = kRowsInFlight<C>;
    const auto kernel =
        edge ? forward_kernel<C, Score::dot, true, false, B> : forward_kernel<C, Score::dot, false, false, B>;
    kernel<<<launch.grid, kThreads, 0, stream>>>(p, launch.tiling);
  });
  finish_forward<T>(p, stream);
  return last_error();
}

template <typename T>
const char* dot_backward(const BackwardParams& p, cudaStream_t stream) {
  using A = Acc<T>;
  const int heads = p.shape.heads, dim = p.shape.dim;
  if (p.grad_attention)
    row_sums<A>(p.csr, heads, p.attention, p.grad_attention, p.row_sums, p.partial_sums, stream);
  const bool edge = p.edge.any() || p.grad_attention || p.grad_bias || p.grad_weight;
  with_config<T>(dim, [&](auto config) {
    using C = decltype(config);
    constexpr int B = kRowsInFlight<C>;
    if (p.csr.num_items) {
      const Launch<C> launch(p.shape, dim, p.csr);
      const auto kernel =
          edge ? pair_kernel<C, Score::dot, false, true, B> : pair_kernel<C, Score::dot, false, false, B>;
      kernel<<<launch.grid, kThreads, 0, stream>>>(p, launch.tiling);
    }
    if (p.reverse.num_items) {
      const Launch<C> launch(p.shape, dim, p.reverse);
      const auto kernel =
          edge ? pair_kernel<C, Score::dot, true, true, B> : pair_kernel<C, Score::dot, true, false, B>;
      kernel<<<launch.grid, kThreads, 0, stream>>>(p, launch.tiling);
    }
  });
  merge_rows<T>(p.csr, p.shape, dim, p.partial_query, p.grad_query, p.scale, stream);
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_key, p.grad_key, p.scale, stream);
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_value, p.grad_value, 1, stream);
  return last_error();
}

}  // namespace dfgnn::cuda
