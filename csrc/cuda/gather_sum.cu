// Plain neighbour sum: the yardstick. Same lanes, same items, nothing but index and row loads.
#include "launch.cuh"

namespace dfgnn::cuda {
namespace {

template <class C, int B>
__global__ void __launch_bounds__(kThreads) gather_sum_kernel(const GatherSumParams p, const Tiling t) {
  using A = typename C::A;
  constexpr int CHUNK = B > C::LPH ? B : C::LPH, SLOTS = CHUNK / C::LPH;
  const Place<C> me(t, p.shape, p.shape.value_dim, p.csr);
  const Rows<C> values = me.rows(p.value);
  A acc[C::NV][C::VEC] = {};
  const int steps = (me.span + CHUNK - 1) / CHUNK;
  int next[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) next[s] = fetch<C, CHUNK>(me, p.csr, 0, s);
  for (int step = 0; step < steps; ++step) {
    int index[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      index[s] = next[s];
      next[s] = fetch<C, CHUNK>(me, p.csr, step + 1, s);
    }
#pragma unroll
    for (int u0 = 0; u0 < CHUNK; u0 += B) {
      if (u0 >= me.span - step * CHUNK) break;
      Raw rows[B][C::NV];
      load_rows<C, B>(values, u0, index, rows);
#pragma unroll
      for (int u = 0; u < B; ++u) {
        if (u0 + u < me.count - step * CHUNK) {
#pragma unroll
          for (int k = 0; k < C::NV; ++k) axpy<typename C::T>(acc[k], A(1), rows[u][k]);
        }
      }
    }
  }
  if (!p.csr.packed && me.num_sub > 1) me.across(acc, t);
  me.store_row(p.out, p.partial_out, acc, A(1));
}

template <typename T>
const char* launch(const GatherSumParams& p, cudaStream_t stream) {
  if (p.csr.num_items == 0) return nullptr;
  with_config<T>(p.shape.value_dim, [&](auto config) {
    using C = decltype(config);
    const Launch<C> launch(p.shape, p.shape.value_dim, p.csr);
    gather_sum_kernel<C, kRowsInFlight<C>><<<launch.grid, kThreads, 0, stream>>>(p, launch.tiling);
  });
  merge_rows<T>(p.csr, p.shape, p.shape.value_dim, p.partial_out, p.out, 1, stream);
  return last_error();
}

}  // namespace

const char* gather_sum(const GatherSumParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  switch (p.dtype) {
    case DType::f32:
      return launch<float>(p, s);
    case DType::bf16:
      return launch<__nv_bfloat16>(p, s);
    case DType::f16:
      return launch<__half>(p, s);
    default:
      return "gather_sum: float32, float16 or bfloat16 expected";
  }
}

}  // namespace dfgnn::cuda
