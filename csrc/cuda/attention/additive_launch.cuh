// Launchers of the additive family (GAT).
#pragma once

#include "backward_gat.cuh"
#include "epilogue_launch.cuh"
#include "forward.cuh"

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
  with_config<T>(p.shape.heads, p.shape.value_dim, [&](auto config) {
    using C = decltype(config);
    const auto choose = [&](auto positive) {
      constexpr bool P = decltype(positive)::value;
      constexpr int B = C::B;
      return edges == Edges::none      ? forward_kernel<C, Score::additive, Edges::none, P, B>
             : edges == Edges::scalars ? forward_kernel<C, Score::additive, Edges::scalars, P, B>
                                       : forward_kernel<C, Score::additive, Edges::features_scalars, P, B>;
    };
    const auto kernel = p.positive ? choose(std::true_type{}) : choose(std::false_type{});
    for_each_part(p.csr, [&](const Csr& part) {
      ForwardParams q = p;
      q.csr = part;
      const Launch<C> way(p.shape, p.shape.value_dim, part);
      launch(stream, way.grid, kThreads, way.shared, kernel, q, way.tiling);
    });
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
  with_config<T>(heads, dim, [&](auto config) {
    using C = decltype(config);
    constexpr int kLanes = std::min(C::LPH * C::NV, 32);
    if (p.shape.num_dst)
      launch(stream, blocks_of(p.shape.num_dst * heads * kLanes, kThreads * kPairs), kThreads, 0,
             prepare_additive_kernel<T, kLanes>, p);
    if (p.reverse.num_items == 0) return;
    if constexpr (kHasTiles<T, Score::additive>) {
      if (p.reverse.tiles) return tile_sources<T, Score::additive>(p, stream);
    }
    constexpr int B = C::B;
    // Whether g . v of every edge is needed: additive_sources_kernel takes only heads that a warp's registers
    // hold, without gates, edge features, and gradients of edge tensors and of attention.
    const bool pairs =
        p.edge.gate || p.edge.feat || p.grad_bias || p.grad_weight || p.grad_attention || dim > C::COLS;
    const auto kernel = p.edge.feat    ? gat_edge_sources_kernel<C, Edges::features_scalars, B>
                        : pairs        ? gat_edge_sources_kernel<C, Edges::scalars, B>
                        : p.edge.any() ? additive_sources_kernel<C, true, B>
                                       : additive_sources_kernel<C, false, B>;
    for_each_part(p.reverse, [&](const Csr& part) {
      BackwardParams q = p;
      q.reverse = part;
      const Launch<C> way(p.shape, dim, part);
      launch(stream, way.grid, kThreads, way.shared, kernel, q, way.tiling);
    });
  });
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_value, p.grad_value, 1, stream);
  merge_scalars<A>(p.reverse, heads, p.partial_alpha, p.grad_alpha_src, stream);
  // With grad_raw, grad_alpha_dst is the sum of grad_raw over each row; else prepare_additive_kernel wrote
  // it.
  if (p.grad_raw) row_sums<A>(p.csr, heads, p.grad_raw, nullptr, p.grad_alpha_dst, p.partial_sums, stream);
  return last_error();
}

}  // namespace dfgnn::cuda
