#include "../dot.cuh"

namespace dfgnn::cuda {
template const char* dot_forward<__half>(const ForwardParams&, cudaStream_t);
template const char* dot_backward<__half>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
