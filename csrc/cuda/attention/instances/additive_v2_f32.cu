#include "../pair_launch.cuh"

namespace dfgnn::cuda {
template const char* pair_forward<float, Score::additive_v2>(const ForwardParams&, cudaStream_t);
template const char* pair_backward<float, Score::additive_v2>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
