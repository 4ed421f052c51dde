// Kernels of core/edge_terms.h: products of low-dimensional edge features with rows. 2^k lanes of a warp take
// a work item. They take pairs of an edge and a head (edge_dot) or of an edge and a column (edge_outer), so
// that they read contiguous memory; in edge_sum a lane takes a head and 16 bytes of columns, over all edges
// of the work item. There is no shared memory: what the lanes of a work item share comes from L1.
// merge_rows_kernel (attention/epilogue.cuh) merges split rows of edge_sum.
#include "../attention/epilogue_launch.cuh"
#include "edge_terms.h"

namespace dfgnn::cuda {
namespace {

// What a thread takes: a work item, and its index among the lanes that share this item.
struct Lane {
  Item item;
  int index, lanes;
  bool ok;  // whether the item exists: an unused one has row < 0
  __device__ __forceinline__ Lane(const Csr& csr, int lanes_log2) : lanes(1 << lanes_log2) {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    index = int(thread & (lanes - 1));
    ok = (thread >> lanes_log2) < csr.num_items;
    if (!ok) return;
    const int4 raw = __ldg(reinterpret_cast<const int4*>(csr.items) + (thread >> lanes_log2));
    item = {raw.x, raw.y, raw.z, raw.w};
    ok = item.row >= 0;
  }
};

// Iterates over the pairs of an edge `at` of the work item and a k < n that a lane takes, without a division
// per pair. Pairs are numbered at * n + k, and the lanes take them in turn.
struct Pairs {
  int at, k, step_at, step, n;
  __device__ __forceinline__ Pairs(const Lane& me, int n_)
      : at(me.index / n_), k(me.index % n_), step_at(me.lanes / n_), step(me.lanes % n_), n(n_) {}
  __device__ __forceinline__ void next() {
    at += step_at, k += step;
    if (k >= n) k -= n, ++at;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) edge_dot_kernel(const EdgeTermParams p, const int lanes_log2) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const Lane me(p.csr, lanes_log2);
  if (!me.ok) return;
  const T* row = static_cast<const T*>(p.rows) + me.item.row * p.row_stride;
  const int edges = me.item.end - me.item.begin;
  for (Pairs pair(me, p.heads); pair.at < edges; pair.next()) {
    const int head = pair.k;
    const int64_t eid = edge_id(p.csr, me.item.begin + pair.at);
    const T *r = row + head * p.head_stride, *x = static_cast<const T*>(p.attr) + eid * p.dim;
    A sum = 0;
    for (int c = 0; c < p.dim; c += V) {
      A f[V];
      Pack<T>::unpack(load_raw(r + c), f);
      repeat<V>([&](int v) {
        if (c + v < p.dim) sum += f[v] * A(x[c + v]);
      });
    }
    static_cast<A*>(p.edge_out)[eid * p.heads + head] = sum * A(p.scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) edge_outer_kernel(const EdgeTermParams p, const int lanes_log2) {
  using A = Acc<T>;
  const Lane me(p.csr, lanes_log2);
  if (!me.ok) return;
  const T* row = static_cast<const T*>(p.rows) + me.item.row * p.row_stride;
  const int edges = me.item.end - me.item.begin;
  for (Pairs pair(me, p.dim); pair.at < edges; pair.next()) {
    const int c = pair.k;
    const int64_t eid = edge_id(p.csr, me.item.begin + pair.at);
    const A* w = static_cast<const A*>(p.weight) + eid * p.heads;
    A sum = 0;
#pragma unroll 4
    for (int h = 0; h < p.heads; ++h) sum += w[h] * A(row[h * p.head_stride + c]);
    static_cast<T*>(p.edge_out)[eid * p.dim + c] = T(sum * A(p.scale));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) edge_sum_kernel(const EdgeTermParams p, const int lanes_log2) {
  using A = Acc<T>;
  constexpr int V = kVec<T>;
  const Lane me(p.csr, lanes_log2);
  if (!me.ok) return;
  const int work = p.heads * (p.width / V);
  for (int k = me.index; k < work; k += me.lanes) {
    const int head = k % p.heads, first = k / p.heads * V;
    A sum[V] = {};
#pragma unroll 2
    for (int at = me.item.begin; at < me.item.end; ++at) {
      const int64_t eid = edge_id(p.csr, at);
      const A w = static_cast<const A*>(p.weight)[eid * p.heads + head];
      const T* x = static_cast<const T*>(p.attr) + eid * p.dim + first;
      repeat<V>([&](int v) {
        if (first + v < p.dim) sum[v] += w * A(x[v]);
      });
    }
    const int64_t column = int64_t(head) * p.width + first, size = int64_t(p.heads) * p.width;
    if (me.item.slot < 0) {
      store_raw(static_cast<T*>(p.out) + me.item.row * size + column, Pack<T>::pack(sum));
    } else {
      A* to = static_cast<A*>(p.partial_out) + me.item.slot * size + column;
      repeat<V>([&](int v) { to[v] = sum[v]; });
    }
  }
}

// log2 of the lanes per work item. work: how many lanes the average work item can use.
int lanes_log2(double work) {
  int log2 = 0;
  while (log2 < 5 && double(1 << log2) < work) ++log2;
  return log2;
}

// Calls kernel(grid, log2 of the lanes per work item), unless there are no work items.
template <class Launch>
const char* launch(const EdgeTermParams& p, double work, const Launch& kernel) {
  if (p.csr.num_items == 0) return nullptr;
  const int log2 = lanes_log2(work);
  kernel(blocks_of(p.csr.num_items << log2, kThreads), log2);
  return last_error();
}

double edges_per_item(const EdgeTermParams& p) { return double(p.num_edges) / double(p.csr.num_items); }

}  // namespace

const char* edge_dot(const EdgeTermParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    // On average a lane takes two to four pairs of an edge and a head, or more if all 32 lanes are in use.
    return launch(p, edges_per_item(p) * p.heads / 4,
                  [&](dim3 grid, int lanes) { edge_dot_kernel<T><<<grid, kThreads, 0, s>>>(p, lanes); });
  });
}

const char* edge_outer(const EdgeTermParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    // On average a lane takes one or two pairs of an edge and a column, or more if all 32 lanes are in use.
    return launch(p, edges_per_item(p) * p.dim / 2,
                  [&](dim3 grid, int lanes) { edge_outer_kernel<T><<<grid, kThreads, 0, s>>>(p, lanes); });
  });
}

const char* edge_sum(const EdgeTermParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const char* error = launch(p, p.heads * (p.width / kVec<T>), [&](dim3 grid, int lanes) {
      edge_sum_kernel<T><<<grid, kThreads, 0, s>>>(p, lanes);
    });
    const Shape shape{p.num_rows, p.num_rows, p.num_edges, p.heads, p.width, p.width};
    merge_rows<T>(p.csr, shape, p.width, p.partial_out, p.out, 1, s);
    return error ? error : last_error();
  });
}

}  // namespace dfgnn::cuda
