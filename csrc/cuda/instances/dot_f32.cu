#include "../dot.cuh"

namespace dfgnn::cuda {
template const char* dot_forward<float>(const ForwardParams&, cudaStream_t);
template const char* dot_backward<float>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
