// Launchers of the scores that are sums over the columns of two rows: dot (Graph Transformer) and additive_v2
// (GATv2).
#pragma once

#include "backward_pair.cuh"
#include "forward.cuh"
#include "tail_launch.cuh"

namespace dfgnn::cuda {

template <typename T, Score SCORE>
const char* pair_forward(const ForwardParams& p, cudaStream_t stream) {
  if (p.csr.num_items == 0) return nullptr;
  if constexpr (kHasTiles<T, SCORE>) {
    if (p.csr.tiles) {
      tile_forward<T, SCORE>(p, stream);
      finish_forward<T>(p, stream);
      return last_error();
    }
  }
  const Edges edges = edges_of(p.edge, p.attention);
  with_config<T>(p.shape.value_dim, [&](auto config) {
    using C = decltype(config);
    const Launch<C> launch(p.shape, p.shape.value_dim, p.csr);
    constexpr int B = kRowsInFlight<C>;
    const auto kernel = edges == Edges::none      ? forward_kernel<C, SCORE, Edges::none, false, B>
                        : edges == Edges::scalars ? forward_kernel<C, SCORE, Edges::scalars, false, B>
                                                  : forward_kernel<C, SCORE, Edges::features, false, B>;
    kernel<<<launch.grid, kThreads, launch.shared, stream>>>(p, launch.tiling);
  });
  finish_forward<T>(p, stream);
  return last_error();
}

template <typename T, Score SCORE>
const char* pair_backward(const BackwardParams& p, cudaStream_t stream) {
  using A = Acc<T>;
  constexpr bool V2 = SCORE == Score::additive_v2;
  const int heads = p.shape.heads, dim = p.shape.value_dim;
  if (p.row_sums)
    row_sums<A>(p.csr, heads, p.attention, p.grad_attention, p.row_sums, p.partial_sums, stream);
  const Edges edges = edges_of(p.edge, p.grad_attention);
  with_config<T>(dim, [&](auto config) {
    using C = decltype(config);
    constexpr int B = kRowsInFlight<C>;
    const auto destinations = [&] {
      if constexpr (kHasTiles<T, SCORE>) {
        if (p.csr.tiles) return tile_destinations<T>(p, stream);
      }
      const Launch<C> launch(p.shape, dim, p.csr, V2 ? kItemsV2 : kItems);
      const auto kernel = edges == Edges::none      ? pair_kernel<C, SCORE, false, Edges::none, B>
                          : edges == Edges::scalars ? pair_kernel<C, SCORE, false, Edges::scalars, B>
                                                    : pair_kernel<C, SCORE, false, Edges::features, B>;
      kernel<<<launch.grid, kThreads, launch.shared, stream>>>(p, launch.tiling);
    };
    const auto sources = [&] {
      if constexpr (kHasTiles<T, SCORE>) {
        if (p.reverse.tiles) return tile_sources<T, SCORE>(p, stream);
      }
      const Launch<C> launch(p.shape, dim, p.reverse, V2 ? kItemsV2 : kItems);
      BackwardParams q = p;  // its partial sums of grad_attn follow those of the pass over destinations
      if (V2) {
        const int64_t parts = Launch<C>(p.shape, dim, p.csr, kItemsV2).grid.x;
        q.grad_attn = static_cast<A*>(p.grad_attn) + parts * heads * dim;
      }
      const auto kernel = edges == Edges::none      ? pair_kernel<C, SCORE, true, Edges::none, B>
                          : edges == Edges::scalars ? pair_kernel<C, SCORE, true, Edges::scalars, B>
                                                    : pair_kernel<C, SCORE, true, Edges::features, B>;
      kernel<<<launch.grid, kThreads, launch.shared, stream>>>(q, launch.tiling);
    };
    if (p.csr.num_items) destinations();
    if (p.reverse.num_items) sources();
  });
  if (V2)
    sum_parts_kernel<A><<<dim3(kAttnSums, (heads * dim + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        static_cast<const A*>(p.grad_attn), p.attn_parts, heads * dim, static_cast<A*>(p.attn_sums));
  merge_rows<T>(p.csr, p.shape, dim, p.partial_query, p.grad_query, V2 ? 1 : p.scale, stream);
  if (!V2) merge_rows<T>(p.reverse, p.shape, dim, p.partial_key, p.grad_key, p.scale, stream);
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_value, p.grad_value, 1, stream);
  return last_error();
}

}  // namespace dfgnn::cuda
