// Merges two calls of attention (merge.h) in one pass: a thread takes 16 bytes of a row's head, and the first
// of a head writes its statistics.
#include "../launch.cuh"
#include "merge_parts.h"

namespace dfgnn::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const MergeParams p, const int loads, const int64_t count) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  follow();
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= count) return;
  const int64_t head = k / loads, at = k * V;
  const A infinity = A(INFINITY);
  A top[2], mass[2];
  bool none[2];
  repeat<2>([&](int c) {
    const A* stats = static_cast<const A*>(p.stats[c]) + 2 * head;
    top[c] = stats[0], mass[c] = stats[1];
    none[c] = top[c] == infinity && mass[c] == 0;
    if (none[c]) top[c] = -infinity;
  });
  const A most = top[0] > top[1] ? top[0] : top[1];
  repeat<2>([&](int c) { mass[c] = none[c] ? A(0) : exponential(top[c] - most + mass[c]); });
  const A total = mass[0] + mass[1];
  const bool empty = none[0] && none[1];
  const A w = empty ? A(0) : mass[1] / total;
  A x[2][V];
  repeat<2>([&](int c) { Pack<T>::unpack(load_raw(static_cast<const T*>(p.outs[c]) + at), x[c]); });
  // Exact where w is 0 or 1.
  repeat<V>([&](int v) {
    const A step = x[1][v] - x[0][v];
    x[0][v] = w < A(0.5) ? x[0][v] + w * step : x[1][v] - (1 - w) * step;
  });
  store_raw(static_cast<T*>(p.out) + at, Pack<T>::pack(x[0]));
  if (k != head * loads) return;
  A* const merged = static_cast<A*>(p.merged) + 2 * head;
  merged[0] = empty ? infinity : most, merged[1] = empty ? A(0) : logarithm(total);
  static_cast<A*>(p.weight)[head] = w;
}

}  // namespace

const char* merge(const MergeParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const int loads = p.dim / kVec<T>;
    const int64_t count = p.num_rows * p.heads * loads;
    if (count)
      launch(static_cast<cudaStream_t>(stream), blocks_of(count, kThreads), kThreads, 0, merge_kernel<T>, p,
             loads, count);
    return last_error();
  });
}

}  // namespace dfgnn::cuda
