// Argument checks and tensor helpers of the operators. Messages: op, argument, expected, got.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/params.h"

namespace dfgnn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

inline constexpr int64_t kMostIds = int64_t(1) << 31;

inline std::string to_string(const Sizes& sizes) {
  std::string text = "[";
  for (size_t k = 0; k < sizes.size(); ++k) text += (k ? ", " : "") + std::to_string(sizes[k]);
  return text + "]";
}

inline Sizes sizes_of(const Tensor& t) {
  Sizes sizes;
  for (int64_t k = 0; k < t.dim(); ++k) sizes.push_back(t.size(k));
  return sizes;
}

// Checks of one operator call: everything lives on one device and has the expected shape and type.
class Checker {
 public:
  Checker(const char* op, const Tensor& reference) : op_(op), device_(reference.device()) {}

  // A size of -1 matches anything.
  void tensor(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
              std::initializer_list<ScalarType> dtypes) const {
    const Sizes got = sizes_of(t);
    bool same = got.size() == shape.size();
    size_t k = 0;
    for (int64_t size : shape) {
      same = same && (size < 0 || got[k] == size);
      ++k;
    }
    STD_TORCH_CHECK(same, op_, ": ", name, ": expected shape ", to_string(Sizes(shape)), ", got ",
                    to_string(got));
    bool known = false;
    for (ScalarType dtype : dtypes) known = known || t.scalar_type() == dtype;
    STD_TORCH_CHECK(known, op_, ": ", name, ": unexpected dtype ",
                    torch::headeronly::toString(t.scalar_type()));
    STD_TORCH_CHECK(t.device() == device_, op_, ": ", name, ": on another device than the first argument");
  }
  void tensor(const char* name, const OptTensor& t, std::initializer_list<int64_t> shape,
              std::initializer_list<ScalarType> dtypes) const {
    if (t) tensor(name, *t, shape, dtypes);
  }
  template <class... Words>
  void require(bool ok, const Words&... words) const {
    STD_TORCH_CHECK(ok, op_, ": ", words...);
  }
  // Kernels count in 32 bits.
  void count(const char* name, int64_t value) const {
    require(value >= 0 && value < kMostIds, name, ": expected a number in [0, 2**31), got ", value);
  }

  const char* op() const { return op_; }

 private:
  const char* op_;
  torch::stable::Device device_;
};

inline DType dtype_of(const char* op, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      STD_TORCH_CHECK(false, op, ": features: expected float32, float64, float16 or bfloat16, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

inline ScalarType acc_type(ScalarType t) { return t == ScalarType::Double ? t : ScalarType::Float; }

inline int64_t bytes_of(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Bool:
      return 1;
    default:
      return 4;
  }
}

// What `make` returns: a new tensor like this. The stable ABI says that it failed, not why: by the time that
// sizes were checked, for want of memory. dfgnn/_ops.py makes torch.OutOfMemoryError of it on CUDA.
template <class Make>
Tensor allocate(const Tensor& like, const Sizes& sizes, ScalarType dtype, const Make& make) {
  try {
    return make();
  } catch (const std::exception&) {
    double bytes = double(bytes_of(dtype));
    for (int64_t size : sizes) bytes *= double(size);
    STD_TORCH_CHECK(false, "dfgnn: ", like.is_cuda() ? "CUDA" : "CPU", " out of memory: no ",
                    bytes / (1 << 30), " GiB for a tensor of shape ", to_string(sizes), " and dtype ",
                    torch::headeronly::toString(dtype));
  }
}

// Kernels load 16 bytes at a time: contiguous, and a view that starts off that grid is copied.
inline Tensor dense(const Tensor& t) {
  const auto copied = [&](const auto& copy) { return allocate(t, sizes_of(t), t.scalar_type(), copy); };
  Tensor c = t.is_contiguous() ? t : copied([&] { return torch::stable::contiguous(t); });
  if (reinterpret_cast<uintptr_t>(c.const_data_ptr()) % 16 == 0) return c;
  return copied([&] { return torch::stable::clone(c); });
}
inline OptTensor dense(const OptTensor& t) { return t ? OptTensor(dense(*t)) : t; }

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const OptTensor& t) { return t ? t->const_data_ptr() : nullptr; }

inline Tensor make(const Tensor& like, Sizes sizes, ScalarType dtype) {
  return allocate(like, sizes, dtype, [&] { return torch::stable::new_empty(like, sizes, dtype); });
}
// An array that not every call needs: where it is wanted, `where` points to it, else it is empty.
inline Tensor optional(void*& where, bool wanted, const Tensor& like, Sizes sizes, ScalarType dtype) {
  Tensor t = make(like, wanted ? sizes : Sizes{0}, dtype);
  where = wanted ? t.mutable_data_ptr() : nullptr;
  return t;
}
// The same for an array that no caller sees: it is not even made where it is not wanted.
inline OptTensor scratch(void*& where, bool wanted, const Tensor& like, Sizes sizes, ScalarType dtype) {
  where = nullptr;
  if (!wanted) return std::nullopt;
  Tensor t = make(like, std::move(sizes), dtype);
  where = t.mutable_data_ptr();
  return t;
}

}  // namespace dfgnn
