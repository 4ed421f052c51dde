#include "launch_second.cuh"

namespace dfgnn::cuda {
template void second_order_of<double>(const SecondParams&, cudaStream_t);
}  // namespace dfgnn::cuda
