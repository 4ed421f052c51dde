#include "../block_second.cuh"

namespace dfgnn::cuda {
template void block_second<double>(const BlockParams&, const BlockRanges&, cudaStream_t);
}  // namespace dfgnn::cuda
