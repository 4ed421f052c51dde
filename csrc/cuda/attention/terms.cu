// Score terms of additive attention from projected features, and their gradients: core/terms.h.
//
// Forward: blockIdx.y is a head. A group of `lanes` lanes takes a row at a time, a lane 16 bytes of it, or
// several times 16 where the head is wider. Of both attention vectors, each lane holds the columns of its
// first 16 bytes in registers over all its rows.
//
// Backward: threadIdx.x and blockIdx.y say which 16 bytes of columns a thread takes, threadIdx.y and
// blockIdx.x in which rows, every (gridDim.x blockDim.y)-th one. A block adds up its threads' sums in shared
// memory, and a second kernel adds up the blocks' sums in a fixed order. The pass reads feat, grad_out and
// grad_feat once, and writes grad_feat.
#include "../launch.cuh"
#include "terms.h"

namespace dfgnn::cuda {
namespace {

constexpr int kTermsThreads = 256;

// Element d of head `head` of attention vector k, 0 for src or 1 for dst; 0 in the padding.
template <typename T>
__device__ __forceinline__ Acc<T> vector_at(const TermsParams& p, int k, int head, int d) {
  if (d >= p.vector_dim) return 0;
  const int at = head * p.vector_dim + d;
  if (p.vectors_are_acc) return static_cast<const Acc<T>*>(p.vectors[k])[at];
  return Acc<T>(static_cast<const T*>(p.vectors[k])[at]);
}

template <typename T>
__global__ void __launch_bounds__(kTermsThreads) terms_kernel(const TermsParams p, const int lanes_log2) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), head = blockIdx.y;
  const int64_t step = int64_t(gridDim.x) * (kTermsThreads >> lanes_log2);
  A first[2][V];
#pragma unroll
  for (int k = 0; k < 2; ++k) repeat<V>([&](int c) { first[k][c] = vector_at<T>(p, k, head, lane * V + c); });
  // All lanes of a warp run the same number of iterations, because they shuffle in each.
  const int64_t from = int64_t(blockIdx.x) * (kTermsThreads >> lanes_log2);
  for (int64_t base = from; base < p.num_rows[0]; base += step) {
    const int64_t n = base + (threadIdx.x >> lanes_log2);
    A sum[2] = {};
    if (n < p.num_rows[0]) {
      const T* row = static_cast<const T*>(p.feat) + (n * p.heads + head) * p.dim;
      for (int d = lane * V; d < p.dim; d += lanes * V) {
        A x[V];
        Pack<T>::unpack(load_raw(row + d), x);
        if (d == lane * V)
          repeat<V>([&](int c) {
            sum[0] += x[c] * first[0][c];
            sum[1] += x[c] * first[1][c];
          });
        else
          repeat<V>([&](int c) {
            sum[0] += x[c] * vector_at<T>(p, 0, head, d + c);
            sum[1] += x[c] * vector_at<T>(p, 1, head, d + c);
          });
      }
    }
    for (int other = lanes / 2; other > 0; other /= 2) {
      sum[0] += __shfl_xor_sync(kAll, sum[0], other);
      sum[1] += __shfl_xor_sync(kAll, sum[1], other);
    }
    if (lane == 0) {
      if (n < p.num_rows[0]) static_cast<A*>(p.terms[0])[n * p.heads + head] = sum[0];
      if (n < p.num_rows[1]) static_cast<A*>(p.terms[1])[n * p.heads + head] = sum[1];
    }
  }
}

// Adds the part of the gradient that comes through the score terms to grad_feat, and writes the block's
// partial sums (TermsBackwardParams::partial). blockDim: (columns / V, rows).
template <typename T>
__global__ void __launch_bounds__(kTermsThreads) terms_backward_kernel(const TermsBackwardParams q) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const TermsParams& p = q.of;
  __shared__ A shared[kTermsThreads * V];
  const int size = p.heads * p.dim, column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  const bool inside = column < size;
  const int head = inside ? column / p.dim : 0;
  A vectors[2][V], sums[kTermsSums][V] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k)
    repeat<V>(
        [&](int c) { vectors[k][c] = inside ? vector_at<T>(p, k, head, column - head * p.dim + c) : A(0); });
  if (inside)
    for (int64_t n = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; n < p.num_rows[0];
         n += int64_t(gridDim.x) * blockDim.y) {
      // u, w: the gradients of the row's two terms. Rows from num_rows[1] on have no second term.
      const bool both = n < p.num_rows[1];
      const A u = static_cast<const A*>(q.grad_terms[0])[n * p.heads + head];
      const A w = both ? static_cast<const A*>(q.grad_terms[1])[n * p.heads + head] : A(0);
      const int64_t at = n * size + column;
      A x[V], grad[V];
      Pack<T>::unpack(load_raw(static_cast<const T*>(p.feat) + at), x);
      T* const to = static_cast<T*>(q.grad_feat) + at;
      const uint4 old = *reinterpret_cast<const uint4*>(to);  // not __ldg: this kernel writes it, too
      Pack<T>::unpack(Raw{{old.x, old.y, old.z, old.w}}, grad);
      repeat<V>([&](int c) {
        grad[c] += u * vectors[0][c] + w * vectors[1][c];
        sums[0][c] += u * x[c];
        sums[1][c] += w * x[c];
      });
      store_raw(to, Pack<T>::pack(grad));
      if (q.grad_out && both) {
        A g[V];
        Pack<T>::unpack(load_raw(static_cast<const T*>(q.grad_out) + at), g);
        repeat<V>([&](int c) { sums[2][c] += g[c]; });
      }
    }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kTermsSums; ++k) {
    if (k == 2 && !q.grad_out) break;
    __syncthreads();
    repeat<V>([&](int c) { shared[thread * V + c] = sums[k][c]; });
    __syncthreads();
    if (threadIdx.y == 0 && inside) {
      A total[V] = {};
      for (int y = 0; y < int(blockDim.y); ++y)
        repeat<V>([&](int c) { total[c] += shared[(y * blockDim.x + threadIdx.x) * V + c]; });
      A* const to = static_cast<A*>(q.partial) + (int64_t(blockIdx.x) * kTermsSums + k) * size + column;
      repeat<V>([&](int c) { to[c] = total[c]; });
    }
  }
}

// Adds up the blocks' partial sums. A block adds up 32 columns of one of the kTermsSums sums; each of its 8
// warps takes every 8th partial sum.
template <typename T>
__global__ void __launch_bounds__(kTermsThreads) terms_sums_kernel(const TermsBackwardParams q) {
  using A = Acc<T>;
  const TermsParams& p = q.of;
  __shared__ A shared[kTermsThreads];
  const int size = p.heads * p.dim, column = blockIdx.x * 32 + (threadIdx.x & 31), k = blockIdx.y;
  if (!q.sums[k]) return;
  A sum = 0;
  if (column < size)
    for (int64_t part = threadIdx.x / 32; part < q.parts; part += kTermsThreads / 32)
      sum += static_cast<const A*>(q.partial)[(part * kTermsSums + k) * size + column];
  shared[threadIdx.x] = sum;
  __syncthreads();
  const int head = column / p.dim, d = column - head * p.dim;
  if (threadIdx.x >= 32 || column >= size || d >= p.vector_dim) return;
  for (int other = 1; other < kTermsThreads / 32; ++other) sum += shared[threadIdx.x + 32 * other];
  const int at = head * p.vector_dim + d;
  if (k < 2 && p.vectors_are_acc)
    static_cast<A*>(q.sums[k])[at] = sum;
  else
    static_cast<T*>(q.sums[k])[at] = T(sum);
}

// The grid of terms_backward_kernel; blocks.x is also the number of partial sums.
struct BackwardGrid {
  dim3 blocks, threads;
  BackwardGrid(const TermsParams& p) {
    const int bytes = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
    const int loads = p.heads * p.dim * bytes / kLoadBytes;
    int columns = 1;
    while (columns < loads && columns < kTermsThreads / 2) columns *= 2;
    threads = dim3(columns, kTermsThreads / columns);
    blocks.y = unsigned((loads + columns - 1) / columns);
    // At least two rows per thread, and no more blocks than are resident at a time.
    const int64_t wanted = (p.num_rows[0] + 2 * threads.y - 1) / (2 * threads.y);
    const int64_t most = std::max<int64_t>(device().multiprocessors * 4 / blocks.y, 1);
    blocks.x = unsigned(std::min<int64_t>({wanted, most, kMostTermsParts}));
  }
};

}  // namespace

const char* terms(const TermsParams& p, void* stream) {
  if (p.num_rows[0] == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    int log2 = 0;
    while ((kVec<T> << log2) < p.dim && log2 < 5) ++log2;
    const int64_t rows = kTermsThreads >> log2, wanted = (p.num_rows[0] + rows - 1) / rows;
    const int64_t most = std::max<int64_t>(device().multiprocessors * 16 / p.heads, 1);
    const dim3 grid(unsigned(std::min(wanted, most)), p.heads);
    terms_kernel<T><<<grid, kTermsThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, log2);
    return last_error();
  });
}

int64_t terms_parts(const TermsParams& p) { return p.num_rows[0] ? BackwardGrid(p).blocks.x : 0; }

const char* terms_backward(const TermsBackwardParams& q, void* stream) {
  return with_type(q.of.dtype, [&](auto type) {
    using T = decltype(type);
    const auto s = static_cast<cudaStream_t>(stream);
    const BackwardGrid grid(q.of);
    if (q.parts) terms_backward_kernel<T><<<grid.blocks, grid.threads, 0, s>>>(q);
    const int size = q.of.heads * q.of.dim;
    terms_sums_kernel<T><<<dim3((size + 31) / 32, kTermsSums), kTermsThreads, 0, s>>>(q);
    return last_error();
  });
}

}  // namespace dfgnn::cuda
