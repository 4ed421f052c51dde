// Launchers of the small kernels around the passes.
#pragma once

#include "launch.cuh"
#include "tails.cuh"

namespace dfgnn::cuda {

template <typename T>
void merge_rows(const Csr& csr, const Shape& shape, int dim, const void* partial, void* rows, double factor,
                cudaStream_t stream) {
  if (csr.num_splits == 0) return;
  const int per_block = 32 * MergePlace<Acc<T>>::VA;
  const dim3 grid(unsigned(csr.num_splits), (shape.heads * dim + per_block - 1) / per_block);
  launch(stream, grid, 32 * kMergeWarps, 0, merge_rows_kernel<T>, csr, shape, dim, partial, rows, factor);
}

template <typename A>
void merge_scalars(const Csr& csr, int heads, const void* partial, void* out, cudaStream_t stream) {
  if (csr.num_splits == 0) return;
  launch(stream, blocks_of(csr.num_splits * heads * 32, kThreads), kThreads, 0, merge_scalars_kernel<A>, csr,
         heads, static_cast<const A*>(partial), static_cast<A*>(out));
}

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

// total[column] = sum of parts[i, column]; by way of `sums` where there are many.
template <typename A>
void sum_parts(const void* parts, int64_t num_parts, int width, void* sums, void* total,
               cudaStream_t stream) {
  const auto run = [&](const void* from, int64_t count, unsigned runs, void* to) {
    const dim3 grid(runs, (width + 31) / 32), block(32, kSumRows);
    launch(stream, grid, block, 0, sum_parts_kernel<A>, static_cast<const A*>(from), count, width,
           static_cast<A*>(to));
  };
  if (sums) run(parts, num_parts, kAttnSums, sums);
  run(sums ? sums : parts, sums ? kAttnSums : num_parts, 1, total);
}

// Merge of split rows and returned attention, after a forward kernel.
template <typename T>
void finish_forward(const ForwardParams& p, cudaStream_t stream) {
  if (p.csr.num_splits) {
    const int per_block = 32 * MergePlace<Acc<T>>::VA;
    const dim3 grid(unsigned(p.csr.num_splits),
                    (p.shape.heads * p.shape.value_dim + per_block - 1) / per_block);
    launch(stream, grid, 32 * kMergeWarps, 0, merge_forward_kernel<T>, p);
  }
  if (p.attention) launch(stream, blocks_of(p.csr.num_items, kWarps), kThreads, 0, attention_kernel<T>, p);
}

}  // namespace dfgnn::cuda
