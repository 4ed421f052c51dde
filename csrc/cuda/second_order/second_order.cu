// The backward of attention's backward: finds where the edges of each row begin and end, if rows have several
// work items, and launches the passes for a type of features.
#include "launch_second.cuh"

namespace dfgnn::cuda {
namespace {

// Extends the range of each work item's row, {mirrored(begin), end} (teams.cuh), to the item's edges. Items
// are read as int4, of which x, y and z are row, begin and end; an item is unused if row < 0.
__global__ void __launch_bounds__(kThreads) ranges_kernel(const Csr csr, int2* ranges) {
  follow();
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= csr.num_items) return;
  const int4 item = __ldg(reinterpret_cast<const int4*>(csr.items) + k);
  if (item.x < 0) return;
  atomicMax(&ranges[item.x].x, mirrored(item.y));
  atomicMax(&ranges[item.x].y, item.z);
}

// Sets ranges [rows, 2]. `ranges` is null if each row is one work item, which then has the row's range.
void find_ranges(const Csr& csr, void* ranges, cudaStream_t stream) {
  if (!ranges || !csr.num_items) return;
  cudaMemsetAsync(ranges, 0, csr.num_rows * sizeof(int2), stream);
  launch(stream, blocks_of(csr.num_items, kThreads), kThreads, 0, ranges_kernel, csr,
         static_cast<int2*>(ranges));
}

}  // namespace

// These are compiled in second_*.cu.
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
