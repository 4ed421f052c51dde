#include "../dot.cuh"

namespace dfgnn::cuda {
template const char* dot_forward<double>(const ForwardParams&, cudaStream_t);
template const char* dot_backward<double>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
