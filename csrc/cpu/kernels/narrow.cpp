// Conversions of arrays between float16 or bfloat16 and float.
#include "columns.h"
#include "kernels.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class F>
void with_narrow(DType type, const F& f) {
  type == DType::f16 ? f(Half{}) : f(BFloat16{});
}

}  // namespace

void widen(const void* from, DType type, int64_t n, float* to) {
  with_narrow(
      type, [&](auto narrow) { to_accumulators(static_cast<const decltype(narrow)*>(from), n, false, to); });
}

void narrow(const float* from, DType type, int64_t n, void* to) {
  with_narrow(type, [&](auto narrow) {
    using T = decltype(narrow);
    for_columns<float>(n, [&](auto width, int64_t i) {
      constexpr int W = width.value;
      store<T, W>(static_cast<T*>(to) + i, load_vector<Vec<float, W>>(from + i));
    });
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
