#include "../tiles.cuh"

namespace dfgnn::cuda {
template void tile_forward<float, Score::additive>(const ForwardParams&, cudaStream_t);
template void tile_forward<float, Score::dot>(const ForwardParams&, cudaStream_t);
template void tile_destinations<float>(const BackwardParams&, cudaStream_t);
template void tile_sources<float, Score::additive>(const BackwardParams&, cudaStream_t);
template void tile_sources<float, Score::dot>(const BackwardParams&, cudaStream_t);
}  // namespace dfgnn::cuda
