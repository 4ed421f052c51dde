#include "launch_second.cuh"

namespace dfgnn::cuda {
template void second_order_of<__nv_bfloat16>(const SecondParams&, cudaStream_t);
}  // namespace dfgnn::cuda
