// The backward of attention's backward: finds the ranges of rows, and calls the passes for a type.
#include "launch_second.cuh"

namespace dfgnn::cuda {
namespace {

// Adds each work item's edges to its row's range.
__global__ void __launch_bounds__(kThreads) ranges_kernel(const Csr csr, int2* ranges) {
  follow();
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= csr.num_items) return;
  const int4 item = __ldg(reinterpret_cast<const int4*>(csr.items) + k);
  if (item.x < 0) return;
  atomicMax(&ranges[item.x].x, mirrored(item.y));
  atomicMax(&ranges[item.x].y, item.z);
}

void find_ranges(const Csr& csr, void* ranges, cudaStream_t stream) {
  if (!ranges || !csr.num_items) return;
  cudaMemsetAsync(ranges, 0, csr.num_rows * sizeof(int2), stream);
  launch(stream, blocks_of(csr.num_items, kThreads), kThreads, 0, ranges_kernel, csr,
         static_cast<int2*>(ranges));
}

}  // namespace

// Compiled in second_*.cu.
extern template void second_order_of<float>(const SecondParams&, cudaStream_t);
extern template void second_order_of<double>(const SecondParams&, cudaStream_t);
extern template void second_order_of<__half>(const SecondParams&, cudaStream_t);
extern template void second_order_of<__nv_bfloat16>(const SecondParams&, cudaStream_t);

const char* second_order(const SecondParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  find_ranges(p.csr, p.ranges, s), find_ranges(p.reverse, p.reverse_ranges, s);
  with_type(p.dtype, [&](auto type) { second_order_of<decltype(type)>(p, s); });
  return last_error();
}

int64_t second_parts(const SecondParams& p) { return count_teams(p.csr, 1) + count_teams(p.csr, kTeamWarps); }

}  // namespace dfgnn::cuda
