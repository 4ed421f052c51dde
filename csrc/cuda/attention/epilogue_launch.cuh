// Launchers of the small kernels before and after the passes.
#pragma once

#include "../launch.cuh"
#include "epilogue.cuh"

namespace dfgnn::cuda {

// How the blocks that merge split rows are launched. width: H D; numbers: values per lane in shared memory.
// Few split rows of many row chunks take many warps each. Where there are many split rows, they take so few
// that all warps can be resident at a time, or half of them where there is at least one slot for two warps.
template <typename A>
struct MergeLaunch {
  dim3 grid;
  int threads, shared;
  MergeLaunch(const Csr& csr, int width, int numbers) {
    const int per_block = 32 * MergePlace<A>::VA;
    grid = dim3(unsigned(csr.num_splits), unsigned((width + per_block - 1) / per_block));
    int warps = kMergeWarps;
    const int64_t resident = int64_t(device().multiprocessors) * (device().threads / 32);
    const auto most = [&] { return warps * csr.num_splits > 2 * csr.num_slots ? resident : 2 * resident; };
    while (warps > 1 && int64_t(grid.x) * grid.y * warps > most()) warps /= 2;
    threads = 32 * warps;
    shared = warps / 2 * numbers * 32 * int(sizeof(A));
  }
};

// Launches merge_rows_kernel, if there are split rows.
template <typename T>
void merge_rows(const Csr& csr, const Shape& shape, int dim, const void* partial, void* rows, double factor,
                cudaStream_t stream) {
  if (csr.num_splits == 0) return;
  const MergeLaunch<Acc<T>> at(csr, shape.heads * dim, MergePlace<Acc<T>>::VA);
  launch_carved(kLittleShared, stream, at.grid, at.threads, at.shared, merge_rows_kernel<T>, csr, shape, dim,
                partial, rows, factor);
}

// Launches merge_scalars_kernel, if there are split rows.
template <typename A>
void merge_scalars(const Csr& csr, int heads, const void* partial, void* out, cudaStream_t stream) {
  if (csr.num_splits == 0) return;
  launch(stream, blocks_of(csr.num_splits * heads * 32, kThreads), kThreads, 0, merge_scalars_kernel<A>, csr,
         heads, static_cast<const A*>(partial), static_cast<A*>(out));
}

// Launches row_sums_kernel, and merges the sums of split rows.
template <typename A>
void row_sums(const Csr& csr, int heads, const void* x, const void* y, void* out, void* partial,
              cudaStream_t stream) {
  if (csr.num_items == 0) return;
  for_each_part(csr, [&](const Csr& part) {
    launch(stream, blocks_of(part.num_items, kWarps), kThreads, 0, row_sums_kernel<A>, part, heads,
           static_cast<const A*>(x), static_cast<const A*>(y), static_cast<A*>(out),
           static_cast<A*>(partial));
  });
  merge_scalars<A>(csr, heads, partial, out, stream);
}

// total[column] = sum of parts[i, column]: in two launches, through `sums`, or in one if `sums` is null, as
// it is for few parts.
template <typename A>
void sum_parts(const void* parts, int64_t num_parts, int width, void* sums, void* total,
               cudaStream_t stream) {
  const auto run = [&](const void* from, int64_t count, unsigned ranges, void* to) {
    const dim3 grid(ranges, (width + 31) / 32), block(32, kSumRows);
    launch(stream, grid, block, 0, sum_parts_kernel<A>, static_cast<const A*>(from), count, width,
           static_cast<A*>(to));
  };
  if (sums) run(parts, num_parts, kAttnSums, sums);
  run(sums ? sums : parts, sums ? kAttnSums : num_parts, 1, total);
}

// Merges split rows and computes returned attention, after a forward kernel.
template <typename T>
void finish_forward(const ForwardParams& p, cudaStream_t stream) {
  if (p.csr.num_splits) {
    const MergeLaunch<Acc<T>> at(p.csr, p.shape.heads * p.shape.value_dim, merge_numbers<Acc<T>>(p.positive));
    launch_carved(kLittleShared, stream, at.grid, at.threads, at.shared, merge_forward_kernel<T>, p);
  }
  if (p.attention) launch(stream, blocks_of(p.csr.num_items, kWarps), kThreads, 0, attention_kernel<T>, p);
}

}  // namespace dfgnn::cuda
