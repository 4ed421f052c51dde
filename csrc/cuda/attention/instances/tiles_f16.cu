#include "../tile_launch.cuh"

namespace dfgnn::cuda {
template void tile_forward<__half, Score::additive>(const ForwardParams&, cudaStream_t);
template void tile_forward<__half, Score::dot>(const ForwardParams&, cudaStream_t);
template void tile_destinations<__half>(const BackwardParams&, cudaStream_t);
template void tile_sources<__half, Score::additive>(const BackwardParams&, cudaStream_t);
template void tile_sources<__half, Score::dot>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
