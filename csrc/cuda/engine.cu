// Dispatch on family and dtype.
#include "launch.cuh"

namespace dfgnn::cuda {
namespace {

template <class F>
const char* with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
  }
  return "unknown dtype";
}

}  // namespace

const char* forward(const ForwardParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return p.score == Score::additive ? additive_forward<T>(p, s) : dot_forward<T>(p, s);
  });
}

const char* backward(const BackwardParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    return p.score == Score::additive ? additive_backward<T>(p, s) : dot_backward<T>(p, s);
  });
}

}  // namespace dfgnn::cuda
