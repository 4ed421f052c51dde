#include "../additive_launch.cuh"

namespace dfgnn::cuda {
template const char* additive_forward<__half>(const ForwardParams&, cudaStream_t);
template const char* additive_backward<__half>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
