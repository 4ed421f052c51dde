#include "as_float.h"

#include "narrow.h"
#include "pages.h"

namespace dfgnn::cpu {

namespace {
constexpr int64_t kElements = int64_t(1) << 16;  // how many elements a thread converts at least

template <class F>
void in_parallel(const Parallel& parallel, int64_t n, const F& f) {
  const auto run = [](int64_t first, int64_t last, void* p) { (*static_cast<const F*>(p))(first, last); };
  if (n > 0) parallel.run(0, n, kElements, run, const_cast<F*>(&f));
}
}  // namespace

AsFloat::AsFloat(DType& type, const Parallel& parallel, DType also)
    : type_(type), on_(type == DType::f16 || type == also), parallel_(parallel) {
  if (on_) type = DType::f32;
}

float* AsFloat::copy(const void* array, int64_t n, bool filled) {
  constexpr int64_t kBeyond = 16;  // kernels may read a vector beyond the end
  copies_.emplace_back(new float[n + kBeyond]);
  float* const to = copies_.back().get();
  use_huge_pages(to, n * int64_t(sizeof(float)));
  if (filled)
    in_parallel(parallel_, n, [&](int64_t first, int64_t last) {
      widen(static_cast<const uint16_t*>(array) + first, type_, last - first, to + first);
    });
  return to;
}

void AsFloat::read(const void*& array, int64_t n) {
  if (on_ && array) array = copy(array, n, true);
}

void AsFloat::write(void*& array, int64_t n, bool also_read) {
  if (!on_ || !array) return;
  float* const from = copy(array, n, also_read);
  results_.push_back({from, array, n});
  array = from;
}

void AsFloat::read(EdgeOptions& edge, const Shape& shape) {
  if (!on_) return;
  const auto scalars = [&](const void*& array, int32_t& is_acc, int64_t heads) {
    if (!is_acc) read(array, shape.num_edges * heads);
    is_acc = 1;
  };
  scalars(edge.bias, edge.bias_is_acc, shape.heads);
  scalars(edge.gate, edge.gate_is_acc, edge.gate_heads);
  scalars(edge.weight, edge.weight_is_acc, edge.weight_heads);
  read(edge.feat, shape.num_edges * shape.heads * shape.dim);
}

void AsFloat::finish() const {
  for (const Result& result : results_)
    in_parallel(parallel_, result.n, [&](int64_t first, int64_t last) {
      narrow(result.from + first, type_, last - first, static_cast<uint16_t*>(result.to) + first);
    });
}

}  // namespace dfgnn::cpu
