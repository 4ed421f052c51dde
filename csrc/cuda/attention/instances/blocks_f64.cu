#include "../block_launch.cuh"

namespace dfgnn::cuda {
template void block_forward<double>(const BlockParams&, const BlockRanges&, cudaStream_t);
template void block_backward<double>(const BlockParams&, const BlockRanges&, cudaStream_t);
}  // namespace dfgnn::cuda
