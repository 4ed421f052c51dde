#include "../pair_launch.cuh"

namespace dfgnn::cuda {
template const char* pair_forward<__nv_bfloat16, Score::dot>(const ForwardParams&, cudaStream_t);
template const char* pair_backward<__nv_bfloat16, Score::dot>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
