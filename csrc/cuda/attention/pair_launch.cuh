// Launchers of the scores that are sums over the columns of two rows: dot (Graph Transformer) and additive_v2
// (GATv2).
#pragma once

#include "backward_pair.cuh"
#include "epilogue_launch.cuh"
#include "forward.cuh"

namespace dfgnn::cuda {

// Bytes of shared memory for features of the rows of a block (NodeProducts).
template <class C>
int product_bytes(const Launch<C>& way, const Csr& csr, const EdgeAttr& attr, int arrays) {
  const Tiling& t = way.tiling;
  const int rows = t.items * (csr.packed ? 32 / t.lanes() : 1);
  return kWarps * rows * t.heads_per_tile * product_width(attr.dim) * arrays * int(sizeof(float));
}
// y += factor W sums in the split rows.
template <typename T>
void project_splits(const Csr& csr, const Shape& shape, const EdgeAttr& attr, void* y, double factor,
                    cudaStream_t stream) {
  if (csr.num_splits == 0) return;
  with_config<T>(shape.heads, shape.value_dim, [&](auto config) {
    using C = decltype(config);
    if constexpr (kProjects<C>) {
      const Launch<C> way(shape, shape.value_dim, csr);
      const int heads = way.tiling.heads_per_tile, rows = kWarps * kProductRows;
      const int shared = kWarps * (kProductRows + 1) * int(sizeof(int4)) +
                         rows * heads * product_width(attr.dim) * int(sizeof(float));
      launch(stream, dim3(blocks_of(csr.num_splits, rows).x, way.grid.y), kThreads, shared,
             project_splits_kernel<C>, attr, shape, csr, heads, y, factor);
    }
  });
}

// What features of edges alone are compiled for; with other options there is one kernel for both.
template <Score SCORE>
inline constexpr Edges kFeatures = SCORE == Score::dot ? Edges::features : Edges::features_scalars;
// Rows of each kind in flight with features: three, where that leaves registers for more warps.
template <class C, Score SCORE, bool SOURCES = false>
inline constexpr int kFeatureRows =
    SCORE == Score::dot && C::B > 3 && (SOURCES || sizeof(typename C::T) == 2) ? 3 : C::B;

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
  with_config<T>(p.shape.heads, p.shape.value_dim, [&](auto config) {
    using C = decltype(config);
    constexpr int B = C::B, F = kFeatureRows<C, SCORE>;
    auto kernel = edges == Edges::none       ? forward_kernel<C, SCORE, Edges::none, false, B>
                  : edges == Edges::scalars  ? forward_kernel<C, SCORE, Edges::scalars, false, B>
                  : edges == Edges::features ? forward_kernel<C, SCORE, kFeatures<SCORE>, false, F>
                                             : forward_kernel<C, SCORE, Edges::features_scalars, false, F>;
    if constexpr (SCORE == Score::dot && kProjects<C>) {
      if (p.attr.x)
        kernel = edges == Edges::none ? forward_kernel<C, SCORE, Edges::projected, false, B>
                                      : forward_kernel<C, SCORE, Edges::projected_scalars, false, B>;
    }
    for_each_part(p.csr, [&](const Csr& part) {
      ForwardParams q = p;
      q.csr = part;
      const Launch<C> way(p.shape, p.shape.value_dim, part, p.attr.x ? kItemsProjected : kItems);
      const int shared = way.shared + (p.attr.x ? product_bytes(way, part, p.attr, 1) : 0);
      launch(stream, way.grid, kThreads, shared, kernel, q, way.tiling);
    });
  });
  finish_forward<T>(p, stream);
  if (p.attr.x) {  // the sums of features of split rows, with the same statistics
    ForwardParams q = p;
    q.shape.value_dim = p.attr.width;
    q.out = p.attr.sums, q.partial_out = p.attr.partial, q.out_bias = nullptr;
    finish_forward<T>(q, stream);
    project_splits<T>(p.csr, p.shape, p.attr, p.out, 1, stream);
  }
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
  const bool handed = p.handed && !p.edge.feat && !p.attr.x;
  with_config<T>(heads, dim, [&](auto config) {
    using C = decltype(config);
    constexpr int B = C::B;
    int64_t attn_parts = 0;  // partial sums of grad_attn that the launches so far write
    const auto launch_part = [&](const auto kernel, BackwardParams q, const Csr& part, bool projects) {
      const Launch<C> way(p.shape, dim, part, projects ? kItemsProjected : V2 ? items_v2(part) : kItems);
      if (V2) q.grad_attn = static_cast<A*>(p.grad_attn) + attn_parts * heads * dim;
      attn_parts += way.grid.x;
      const int shared = way.shared + (projects ? product_bytes(way, part, p.attr, 2) : 0);
      launch(stream, way.grid, kThreads, shared, kernel, q, way.tiling);
    };
    const auto destinations = [&] {
      if constexpr (kHasTiles<T, SCORE>) {
        if (p.csr.tiles) return tile_destinations<T>(p, stream);
      }
      constexpr int F = kFeatureRows<C, SCORE>;
      auto kernel = edges == Edges::none       ? pair_kernel<C, SCORE, false, Edges::none, B>
                    : edges == Edges::scalars  ? pair_kernel<C, SCORE, false, Edges::scalars, B>
                    : edges == Edges::features ? pair_kernel<C, SCORE, false, kFeatures<SCORE>, F>
                                               : pair_kernel<C, SCORE, false, Edges::features_scalars, F>;
      if constexpr (SCORE == Score::dot && kProjects<C>) {
        if (p.attr.x)
          kernel = edges == Edges::none ? pair_kernel<C, SCORE, false, Edges::projected, B>
                                        : pair_kernel<C, SCORE, false, Edges::projected_scalars, B>;
      }
      if constexpr (SCORE == Score::dot) {
        if (handed)
          kernel = edges == Edges::none ? pair_kernel<C, SCORE, false, Edges::none, B, true>
                                        : pair_kernel<C, SCORE, false, Edges::scalars, B, true>;
      }
      for_each_part(p.csr, [&](const Csr& part) {
        BackwardParams q = p;
        q.csr = part;
        q.part_of_rows |= part.num_parts > 0;
        launch_part(kernel, q, part, p.attr.x);
      });
    };
    const auto sources = [&] {
      if constexpr (kHasTiles<T, SCORE>) {
        if (p.reverse.tiles) return tile_sources<T, SCORE>(p, stream);
      }
      constexpr int F = kFeatureRows<C, SCORE, true>;
      auto kernel = edges == Edges::none       ? pair_kernel<C, SCORE, true, Edges::none, B>
                    : edges == Edges::scalars  ? pair_kernel<C, SCORE, true, Edges::scalars, B>
                    : edges == Edges::features ? pair_kernel<C, SCORE, true, kFeatures<SCORE>, F>
                                               : pair_kernel<C, SCORE, true, Edges::features_scalars, F>;
      if constexpr (SCORE == Score::dot && kProjects<C>) {
        if (p.attr.x)
          kernel = edges == Edges::none ? pair_kernel<C, SCORE, true, Edges::projected, B>
                                        : pair_kernel<C, SCORE, true, Edges::projected_scalars, B>;
      }
      if constexpr (SCORE == Score::dot) {
        if (handed)
          kernel = edges == Edges::none ? pair_kernel<C, SCORE, true, Edges::none, B, true>
                                        : pair_kernel<C, SCORE, true, Edges::scalars, B, true>;
      }
      for_each_part(p.reverse, [&](const Csr& part) {
        BackwardParams q = p;
        q.reverse = part;
        launch_part(kernel, q, part, false);
      });
    };
    if (p.csr.num_items) destinations();
    if (p.reverse.num_items) sources();
  });
  if (V2) sum_parts<A>(p.grad_attn, p.attn_parts, heads * dim, p.attn_sums, p.attn_total, stream);
  merge_rows<T>(p.csr, p.shape, dim, p.partial_query, p.grad_query, V2 ? 1 : p.scale, stream);
  if (p.attr.x) {
    merge_rows<T>(p.csr, p.shape, p.attr.width, p.attr.partial, p.attr.sums, 1, stream);
    project_splits<T>(p.csr, p.shape, p.attr, p.grad_query, p.scale, stream);
  }
  if (!V2) merge_rows<T>(p.reverse, p.shape, dim, p.partial_key, p.grad_key, p.scale, stream);
  merge_rows<T>(p.reverse, p.shape, dim, p.partial_value, p.grad_value, 1, stream);
  return last_error();
}

}  // namespace dfgnn::cuda
