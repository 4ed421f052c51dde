// Launchers of the scores that are sums over the columns of two rows: dot (Graph Transformer) and additive_v2
// (GATv2).
#pragma once

#include "backward_dot.cuh"
#include "backward_gatv2.cuh"
#include "epilogue_launch.cuh"
#include "forward.cuh"

namespace dfgnn::cuda {

// How many bytes of shared memory the products of a block's rows with W take (NodeProducts), in `arrays`
// arrays.
template <class C>
int product_bytes(const Launch<C>& way, const Csr& csr, const EdgeAttr& attr, int arrays) {
  const Tiling& t = way.tiling;
  const int rows = t.items * (csr.packed ? 32 / t.lanes() : 1);
  return kWarps * rows * t.heads_per_tile * product_width(attr.dim) * arrays * int(sizeof(float));
}
// Adds factor * W * attr.sums to the split rows of y.
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

// For which edge options the kernels are compiled that serve feature rows of the edges without scalars: dot
// has such kernels, additive_v2 uses those with scalars.
template <Score SCORE>
inline constexpr Edges kFeatures = SCORE == Score::dot ? Edges::features : Edges::features_scalars;
// How many neighbours' rows are in flight where edges have feature rows: three where this leaves registers
// for more warps.
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
  if (p.attr.x) {  // merges a, the split rows' sums of features, as heads of `width` columns; then adds W a
    ForwardParams q = p;
    q.shape.value_dim = p.attr.width;
    q.out = p.attr.sums, q.partial_out = p.attr.partial, q.out_bias = nullptr;
    finish_forward<T>(q, stream);
    project_splits<T>(p.csr, p.shape, p.attr, p.out, 1, stream);
  }
  return last_error();
}

using BackwardKernel = void (*)(BackwardParams, Tiling);

// Returns the kernel of the pass over destinations for the edge options of a call. For dot with features of
// the edges, in rows or projected, it always saves alpha and ds of the edges for the pass over sources;
// without features it does if there is an array for them (p.handed).
template <class C, Score SCORE>
BackwardKernel destinations_kernel(const BackwardParams& p, Edges edges) {
  constexpr int B = C::B, F = kFeatureRows<C, SCORE>;
  const bool none = edges == Edges::none;
  if constexpr (SCORE == Score::additive_v2) {
    if (none) return gatv2_destinations_kernel<C, Edges::none, B>;
    if (edges == Edges::scalars) return gatv2_destinations_kernel<C, Edges::scalars, B>;
    return gatv2_destinations_kernel<C, Edges::features_scalars, F>;
  } else {
    if constexpr (kProjects<C>) {
      if (p.attr.x)
        return none ? dot_destinations_kernel<C, Edges::projected, B, true>
                    : dot_destinations_kernel<C, Edges::projected_scalars, B, true>;
    }
    if (edges == Edges::features) return dot_destinations_kernel<C, Edges::features, F, true>;
    if (edges == Edges::features_scalars) return dot_destinations_kernel<C, Edges::features_scalars, F, true>;
    if (p.handed)
      return none ? dot_destinations_kernel<C, Edges::none, B, true>
                  : dot_destinations_kernel<C, Edges::scalars, B, true>;
    return none ? dot_destinations_kernel<C, Edges::none, B, false>
                : dot_destinations_kernel<C, Edges::scalars, B, false>;
  }
}
// Returns the kernel of the pass over sources: for dot one that reads alpha and ds, if they are saved.
template <class C, Score SCORE>
BackwardKernel sources_kernel(const BackwardParams& p, Edges edges) {
  constexpr int B = C::B, F = kFeatureRows<C, SCORE, true>;
  const bool none = edges == Edges::none;
  if constexpr (SCORE == Score::additive_v2) {
    if (none) return gatv2_sources_kernel<C, Edges::none, B>;
    if (edges == Edges::scalars) return gatv2_sources_kernel<C, Edges::scalars, B>;
    return gatv2_sources_kernel<C, Edges::features_scalars, F>;
  } else {
    if constexpr (kProjects<C>) {
      if (p.attr.x)
        return none ? dot_saved_sources_kernel<C, Edges::projected, B>
                    : dot_saved_sources_kernel<C, Edges::projected_scalars, B>;
    }
    if (edges == Edges::features) return dot_saved_sources_kernel<C, Edges::features, F>;
    if (edges == Edges::features_scalars) return dot_saved_sources_kernel<C, Edges::features_scalars, F>;
    if (p.handed)
      return none ? dot_saved_sources_kernel<C, Edges::none, B>
                  : dot_saved_sources_kernel<C, Edges::scalars, B>;
    return none ? dot_sources_kernel<C, Edges::none, B> : dot_sources_kernel<C, Edges::scalars, B>;
  }
}

template <typename T, Score SCORE>
const char* pair_backward(const BackwardParams& p, cudaStream_t stream) {
  using A = Acc<T>;
  constexpr bool V2 = SCORE == Score::additive_v2;
  const int heads = p.shape.heads, dim = p.shape.value_dim;
  if (p.row_sums)
    row_sums<A>(p.csr, heads, p.attention, p.grad_attention, p.row_sums, p.partial_sums, stream);
  const Edges edges = edges_of(p.edge, p.grad_attention);
  with_config<T>(heads, dim, [&](auto config) {
    using C = decltype(config);
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
      const auto kernel = destinations_kernel<C, SCORE>(p, edges);
      for_each_part(p.csr, [&](const Csr& part) {
        BackwardParams q = p;
        q.csr = part;
        q.part_of_rows |= part.num_parts > 0;  // a source partition has only some edges of a row
        launch_part(kernel, q, part, p.attr.x);
      });
    };
    const auto sources = [&] {
      if constexpr (kHasTiles<T, SCORE>) {
        if (p.reverse.tiles) return tile_sources<T, SCORE>(p, stream);
      }
      const auto kernel = sources_kernel<C, SCORE>(p, edges);
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
