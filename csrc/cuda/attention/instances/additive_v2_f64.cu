#include "../pair_launch.cuh"

namespace dfgnn::cuda {
template const char* pair_forward<double, Score::additive_v2>(const ForwardParams&, cudaStream_t);
template const char* pair_backward<double, Score::additive_v2>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
