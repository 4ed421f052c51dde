#include "../tile_launch.cuh"

namespace dfgnn::cuda {
template void tile_forward<__nv_bfloat16, Score::additive>(const ForwardParams&, cudaStream_t);
template void tile_forward<__nv_bfloat16, Score::dot>(const ForwardParams&, cudaStream_t);
template void tile_destinations<__nv_bfloat16>(const BackwardParams&, cudaStream_t);
template void tile_sources<__nv_bfloat16, Score::additive>(const BackwardParams&, cudaStream_t);
template void tile_sources<__nv_bfloat16, Score::dot>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
