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

void AsFloat::read(void*& array, int64_t n) {
  if (on_ && array) arrays_.push_back({&array, array, n, true, false});
}

void AsFloat::read(const void*& array, int64_t n) { read(const_cast<void*&>(array), n); }

void AsFloat::write(void*& array, int64_t n, bool also_read) {
  if (on_ && array) arrays_.push_back({&array, array, n, also_read, true});
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

void AsFloat::begin() {
  if (!on_) return;
  // Copies begin at lines of the cache, with at least a line between two: kernels may read a vector beyond
  // the end of an array.
  const auto size = [](const Array& array) { return (array.n + 31) / 16 * 16; };
  int64_t total = 0;
  for (const Array& array : arrays_) total += size(array);
  copies_.reset(new float[total + 16]);
  float* to = copies_.get() + (-reinterpret_cast<uintptr_t>(copies_.get()) % 64) / sizeof(float);
  use_huge_pages(to, total * int64_t(sizeof(float)));
  for (const Array& array : arrays_) {
    if (array.is_read)
      in_parallel(parallel_, array.n, [&](int64_t first, int64_t last) {
        widen(static_cast<const uint16_t*>(array.given) + first, type_, last - first, to + first);
      });
    *array.place = to;
    to += size(array);
  }
}

void AsFloat::end() const {
  for (const Array& array : arrays_)
    if (array.is_written)
      in_parallel(parallel_, array.n, [&](int64_t first, int64_t last) {
        narrow(static_cast<const float*>(*array.place) + first, type_, last - first,
               static_cast<uint16_t*>(array.given) + first);
      });
}

}  // namespace dfgnn::cpu
