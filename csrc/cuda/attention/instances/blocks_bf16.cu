#include "../block_launch.cuh"

namespace dfgnn::cuda {
template void block_forward<__nv_bfloat16>(const BlockParams&, const BlockRanges&, cudaStream_t);
template void block_backward<__nv_bfloat16>(const BlockParams&, const BlockRanges&, cudaStream_t);
}  // namespace dfgnn::cuda
