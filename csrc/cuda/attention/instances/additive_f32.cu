#include "../additive_launch.cuh"

namespace dfgnn::cuda {
template const char* additive_forward<float>(const ForwardParams&, cudaStream_t);
template const char* additive_backward<float>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
