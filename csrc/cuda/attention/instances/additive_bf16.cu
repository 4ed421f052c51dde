#include "../additive_launch.cuh"

namespace dfgnn::cuda {
template const char* additive_forward<__nv_bfloat16>(const ForwardParams&, cudaStream_t);
template const char* additive_backward<__nv_bfloat16>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
