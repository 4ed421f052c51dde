#include "../block_launch.cuh"

namespace dfgnn::cuda {
template void block_forward<float>(const BlockParams&, const BlockRanges&, cudaStream_t);
template void block_backward<float>(const BlockParams&, const BlockRanges&, cudaStream_t);
}  // namespace dfgnn::cuda
