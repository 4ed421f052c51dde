// Launchers of the additive family (GAT).
#pragma once

#include "backward_additive.cuh"
#include "backward_pair.cuh"
#include "forward.cuh"
#include "tail_launch.cuh"

namespace dfgnn::cuda {

template <typename T>
const char* additive_forward(const ForwardParams& p, cudaStream_t stream) {
  if (p.csr.num_items == 0) return nullptr;
  if constexpr (kHasTiles<T, Score::additive>) {
    if (p.csr.tiles) {
      tile_forward<T, Score::additive>(p, stream);
      finish_forward<T>(p, stream);
      return last_error();
    }
  }
  const Edges edges = edges_of(p.edge, p.attention);
  with_config<T>(p.shape.value_dim, [&](auto config) {
    using C = decltype(config);
    const Launch<C> launch(p.shape, p.shape.value_dim, p.csr);
    const auto choose = [&](auto positive) {
      constexpr bool P = decltype(positive)::value;
      constexpr int B = kRowsInFlight<C>;
      return edges == Edges::none      ? forward_kernel<C, Score::additive, Edges::none, P, B>
             : edges == Edges::scalars ? forward_kernel<C, Score::additive, Edges::scalars, P, B>
                                       : forward_kernel<C, Score::additive, Edges::features, P, B>;
    };
    const auto kernel = p.positive ? choose(std::true_type{}) : choose(std::false_type{});
    kernel<<<launch.grid, kThreads, launch.shared, stream>>>(p, launch.tiling);
  });
  finish_forward<T>(p, stream);
  return last_error();
}

template <typename T>
const char* additive_backward(const BackwardParams& p, cudaStream_t stream) {
  using A = Acc<T>;
  const int heads = p.shape.heads, dim = p.shape.value_dim;
  if (p.row_sums)
    row_sums<A>(p.csr, heads, p.attention, p.grad_attention, p.row_sums, p.partial_sums, stream);
  with_config<T>(dim, [&](auto config) {
    using C = decltype(config);
    if (p.shape.num_dst)
      prepare_additive_kernel<T, C::LPH>
          <<<blocks_of(p.shape.num_dst * heads * C::LPH, kThreads * kPairs), kThreads, 0, stream>>>(p);
    if (p.reverse.num_items == 0) return;
    if constexpr (kHasTiles<T, Score::additive>) {
      if (p.reverse.tiles) return tile_sources<T, Score::additive>(p, stream);
    }
    const Launch<C> launch(p.shape, dim, p.reverse);
    constexpr int B = kRowsInFlight<C>;
    // The linear kernel knows only its own columns, takes a LeakyReLU' with two values and returns no
    // gradients of edge tensors.
    const bool pairs = p.edge.gate || p.edge.feat || p.grad_bias || p.grad_weight || p.grad_attention ||
                       launch.tiling.chunks > 1;
    const auto kernel = p.edge.feat    ? pair_kernel<C, Score::additive, true, Edges::features, B>
                        : pairs        ? pair_kernel<C, Score::additive, true, Edges::scalars, B>
                        : p.edge.any() ? additive_sources_kernel<C, true, B>
                                       : additive_sources_kernel<C, false, B>;
    kernel<<<launch.grid, kThreads, launch.shared, stream>>>(p, launch.tiling);
  });
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_value, p.grad_value, 1, stream);
  merge_scalars<A>(p.reverse, heads, p.partial_alpha, p.grad_alpha_src, stream);
  if (p.grad_raw) row_sums<A>(p.csr, heads, p.grad_raw, nullptr, p.grad_alpha_dst, p.partial_sums, stream);
  return last_error();
}

}  // namespace dfgnn::cuda
