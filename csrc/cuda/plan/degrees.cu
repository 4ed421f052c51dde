// The statistics by which the planner chooses a schedule: degrees, their quantiles, and descending indices
// (docs/internals/glossary.md). The results are those of tensor operations in dfgnn/plan, but take few
// launches and no waiting.
#include "degrees.cuh"

namespace dfgnn::cuda {
namespace {

// Arguments of degrees_kernel: one or two directions of a graph.
struct Both {
  Degrees of[2];
};

// blockIdx.y: the direction.
__global__ void __launch_bounds__(kPlanThreads) degrees_kernel(const Both both) {
  count_degrees(both.of[blockIdx.y], blockIdx.x, gridDim.x);
}

// Counts descending indices: all pairs of neighbouring edges whose columns descend, less those of which the
// second edge begins a row.
__global__ void __launch_bounds__(kPlanThreads)
    falls_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                 unsigned long long* falls) {
  const int64_t first = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kPlanThreads;
  long long count = 0;
#pragma unroll 8
  for (int64_t e = first + 1; e < num_edges; e += step) count += indices[e] < indices[e - 1];
  for (int64_t row = first; row < num_rows; row += step) {
    const int64_t begin = indptr[row];
    if (begin > 0 && begin < indptr[row + 1]) count -= indices[begin] < indices[begin - 1];
  }
  for (int o = 16; o > 0; o /= 2) count += __shfl_xor_sync(kAll, count, o);
  if ((threadIdx.x & 31) == 0 && count) atomicAdd(falls, static_cast<unsigned long long>(count));
}

// The grid of a kernel whose blocks all add to the same sums: few blocks, because atomic additions to one
// address are serial.
dim3 few_blocks(int64_t work) {
  const int64_t most = 2 * device().multiprocessors;
  return dim3(unsigned(std::clamp<int64_t>((work + kPlanThreads - 1) / kPlanThreads, 1, most)));
}

}  // namespace

const char* degrees(const Degrees* directions, int count, bool zeroed, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  Both both;
  int64_t rows = 0;
  for (int k = 0; k < count; ++k) {
    both.of[k] = directions[k], rows = std::max(rows, directions[k].num_rows);
    if (!zeroed) cudaMemsetAsync(directions[k].scratch, 0, kDegreeScratch * sizeof(int64_t), s);
  }
  degrees_kernel<<<dim3(few_blocks(rows).x, unsigned(count)), kPlanThreads, 0, s>>>(both);
  return last_error();
}

const char* falls(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                  int64_t* count, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(count, 0, sizeof(int64_t), s);
  // Most warps have nothing to add, so that there may be as many blocks as fill the device.
  const dim3 grid(4 * few_blocks(num_edges + num_rows).x);
  falls_kernel<<<grid, kPlanThreads, 0, s>>>(indptr, indices, num_rows, num_edges,
                                             reinterpret_cast<unsigned long long*>(count));
  return last_error();
}

}  // namespace dfgnn::cuda
