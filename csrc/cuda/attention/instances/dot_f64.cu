#include "../pair_launch.cuh"

namespace dfgnn::cuda {
template const char* pair_forward<double, Score::dot>(const ForwardParams&, cudaStream_t);
template const char* pair_backward<double, Score::dot>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
