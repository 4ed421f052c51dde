// Loops over the entries of a lane's small arrays. They are unrolled, so that indices are constants and the
// arrays stay in registers.
#pragma once

namespace dfgnn::cuda {

// Calls f(0), ..., f(N - 1).
template <int N, class F>
__device__ __forceinline__ void repeat(F f) {
#pragma unroll
  for (int k = 0; k < N; ++k) f(k);
}
// Calls f(k, c) for all k < N and c < M.
template <int N, int M, class F>
__device__ __forceinline__ void repeat(F f) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
#pragma unroll
    for (int c = 0; c < M; ++c) f(k, c);
  }
}

template <typename A, int N>
__device__ __forceinline__ void copy(A (&to)[N], const A (&from)[N]) {
  repeat<N>([&](int k) { to[k] = from[k]; });
}
template <typename A, int N, int M>
__device__ __forceinline__ void zero(A (&x)[N][M]) {
  repeat<N, M>([&](int k, int c) { x[k][c] = 0; });
}
template <typename A, int N, int M>
__device__ __forceinline__ void scale(A (&x)[N][M], A factor) {
  repeat<N, M>([&](int k, int c) { x[k][c] *= factor; });
}

}  // namespace dfgnn::cuda
