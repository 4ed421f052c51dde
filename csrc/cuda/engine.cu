// The launchers of attention, which choose the kernels for a score and a dtype.
#include "launch.cuh"

namespace dfgnn::cuda {

const char* forward(const ForwardParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    switch (p.score) {
      case Score::additive:
        return additive_forward<T>(p, s);
      case Score::dot:
        return pair_forward<T, Score::dot>(p, s);
      default:
        return pair_forward<T, Score::additive_v2>(p, s);
    }
  });
}

const char* backward(const BackwardParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    switch (p.score) {
      case Score::additive:
        return additive_backward<T>(p, s);
      case Score::dot:
        return pair_backward<T, Score::dot>(p, s);
      default:
        return pair_backward<T, Score::additive_v2>(p, s);
    }
  });
}

bool projects(DType dtype, const Shape& shape, int64_t features) {
  return with_type(dtype, [&](auto t) {
    bool found = false;
    with_config<decltype(t)>(shape.heads, shape.value_dim, [&](auto config) {
      using C = decltype(config);
      found = kProjects<C> && features > 0 && features <= C::LPH * C::FEATS;
    });
    return found;
  });
}

int64_t attention_parts(const BackwardParams& p) {
  return with_type(p.dtype, [&](auto t) {
    int64_t parts = 0;
    with_config<decltype(t)>(p.shape.heads, p.shape.value_dim, [&](auto config) {
      using L = Launch<decltype(config)>;
      const int dim = p.shape.value_dim;
      const auto count = [&](const Csr& part) { parts += L(p.shape, dim, part, items_v2(part)).grid.x; };
      for_each_part(p.csr, count);
      for_each_part(p.reverse, count);
    });
    return parts;
  });
}

}  // namespace dfgnn::cuda
