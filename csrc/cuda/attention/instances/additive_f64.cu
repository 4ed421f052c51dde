#include "../additive_launch.cuh"

namespace dfgnn::cuda {
template const char* additive_forward<double>(const ForwardParams&, cudaStream_t);
template const char* additive_backward<double>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
