// sddmm and spmm: the two products without a softmax between them. Mapping: lanes.cuh.
#include "launch.cuh"

namespace dfgnn::cuda {
namespace {

template <class C, bool WEIGHTED, int B>
__global__ void __launch_bounds__(kThreads) spmm_kernel(const ProductParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int CHUNK = B > C::LPH ? B : C::LPH, SLOTS = CHUNK / C::LPH;
  const Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const Rows<C> source = me.rows(p.feat);
  A acc[C::NV][C::VEC] = {};
  const int steps = (me.span + CHUNK - 1) / CHUNK;
  int next[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) next[s] = fetch<C, CHUNK>(me, p.csr, 0, s);
  for (int step = 0; step < steps; ++step) {
    int index[SLOTS];
    Weights<A, SLOTS, false, true> weights;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      index[s] = next[s];
      next[s] = fetch<C, CHUNK>(me, p.csr, step + 1, s);
      if constexpr (WEIGHTED) {
        const int64_t eid = fetch_eid<C, CHUNK>(me, p.csr, step, s);
        weights.set(s, A(static_cast<const T*>(p.weight)[eid * me.heads + me.head]), true);
      }
    }
#pragma unroll
    for (int u0 = 0; u0 < CHUNK; u0 += B) {
      if (u0 >= me.span - step * CHUNK) break;
      Raw rows[B][C::NV];
      load_rows<C, B>(source, u0, index, rows);
#pragma unroll
      for (int u = 0; u < B; ++u) {
        A w = 1, unused;
        if constexpr (WEIGHTED) weights.template get<C::LPH>(u0 + u, w, unused);
        if (u0 + u < me.count - step * CHUNK) {
#pragma unroll
          for (int k = 0; k < C::NV; ++k) axpy<T>(acc[k], w, rows[u][k]);
        }
      }
    }
  }
  if (!p.csr.packed && me.num_sub > 1) me.across(acc, t);
  me.store_row(p.out, p.partial_out, acc, A(1));
}

template <class C, int B>
__global__ void __launch_bounds__(kThreads) sddmm_kernel(const ProductParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int CHUNK = B, PERIOD = CHUNK < C::LPH ? CHUNK : C::LPH, SLOTS = CHUNK / PERIOD;
  const Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const Rows<C> source = me.rows(p.feat);
  A row[C::NV][C::VEC];
  me.load_row(p.row_feat, row, A(1));
  const int steps = (me.span + CHUNK - 1) / CHUNK, own = me.hl % PERIOD;
  for (int step = 0; step < steps; ++step) {
    int index[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) index[s] = fetch<C, CHUNK>(me, p.csr, step, s);
    Raw rows[B][C::NV];
    load_rows<C, B>(source, 0, index, rows);
    A part[B];
#pragma unroll
    for (int u = 0; u < B; ++u) {
      part[u] = 0;
#pragma unroll
      for (int k = 0; k < C::NV; ++k) part[u] = me.inside(k) ? dot<T>(row[k], rows[u][k], part[u]) : part[u];
      if (C::WIDE && t.chunks > 1) {
        const int j = __shfl_sync(kAll, index[u / C::LPH], u % C::LPH, C::LPH);
        part[u] += me.far_dot(t, p.row_feat, me.item.row, p.feat, j);
      }
    }
    reduce_scatter<CHUNK, C::LPH>(part, me.hl);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int k = step * CHUNK + s * C::LPH + own;
      if (k < me.count && me.head_ok && me.hl < PERIOD && me.chunk == 0)
        static_cast<T*>(p.edge_out)[int64_t(edge_id(p.csr, me.first + k * me.stride)) * me.heads + me.head] =
            T(part[s]);
    }
  }
}

}  // namespace

const char* spmm(const ProductParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.csr.num_items == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_config<T>(p.shape.value_dim, [&](auto config) {
      using C = decltype(config);
      const Launch<C> launch(p.shape, p.shape.value_dim, p.csr);
      const auto kernel =
          p.weight ? spmm_kernel<C, true, kRowsInFlight<C>> : spmm_kernel<C, false, kRowsInFlight<C>>;
      kernel<<<launch.grid, kThreads, 0, s>>>(p, launch.tiling);
    });
    merge_rows<T>(p.csr, p.shape, p.shape.value_dim, p.partial_out, p.out, 1, s);
    return last_error();
  });
}

const char* sddmm(const ProductParams& p, void* stream) {
  if (p.csr.num_items == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_config<T>(p.shape.value_dim, [&](auto config) {
      using C = decltype(config);
      const Launch<C> launch(p.shape, p.shape.value_dim, p.csr);
      sddmm_kernel<C, kRowsInFlight<C>>
          <<<launch.grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, launch.tiling);
    });
    return last_error();
  });
}

}  // namespace dfgnn::cuda
