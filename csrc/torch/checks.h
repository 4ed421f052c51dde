// Argument checks of the operators, and helpers for tensors. They use torch's stable ABI, so that one build
// serves several versions of PyTorch. Error messages name the operator, the argument, what was expected and
// what was passed.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/params.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // PyTorch 2.11 has TORCH_ERROR_CODE_CHECK instead
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace dfgnn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// Sizes or strides that a caller passes: those of a list in braces or of a vector, which must live meanwhile.
// No memory is allocated for them, because small calls would feel it.
class Dims {
 public:
  Dims(std::initializer_list<int64_t> list) : count_(list.size()) { data_ = list.begin(); }
  Dims(const int64_t* data, size_t count) : data_(data), count_(count) {}
  Dims(const Sizes& sizes) : data_(sizes.data()), count_(sizes.size()) {}
  const int64_t* data() const { return data_; }
  size_t size() const { return count_; }
  int64_t operator[](size_t k) const { return data_[k]; }
  Sizes sizes() const { return Sizes(data_, data_ + count_); }

 private:
  const int64_t* data_;
  size_t count_;
};

inline constexpr int64_t kMostIds = int64_t(1) << 31;  // counts and ids are below this: kernels use int32
inline constexpr int kMostDims = 4;                    // the most dimensions of tensors that `make` allocates

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

// The checks in a call of the operator `op`. All tensors must be on the device of `reference`.
class Checker {
 public:
  Checker(const char* op, const Tensor& reference) : op_(op), device_(reference.device()) {}

  // Checks that t has this shape (-1 matches any size), one of the dtypes, and the device of the reference.
  void tensor(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
              std::initializer_list<ScalarType> dtypes) const {
    bool same = t.dim() == int64_t(shape.size());
    int64_t k = 0;
    for (int64_t size : shape) {
      same = same && (size < 0 || t.size(k) == size);
      ++k;
    }
    STD_TORCH_CHECK(same, op_, ": ", name, ": expected shape ", to_string(Sizes(shape)), ", got ",
                    to_string(sizes_of(t)));
    bool known = false;
    const ScalarType got = t.scalar_type();
    for (ScalarType dtype : dtypes) known = known || got == dtype;
    STD_TORCH_CHECK(known, op_, ": ", name, ": unexpected dtype ", torch::headeronly::toString(got));
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
  // Checks that a count is not negative and fits the 32-bit integers that kernels use for counts.
  void count(const char* name, int64_t value) const {
    require(value >= 0 && value < kMostIds, name, ": expected a number in [0, 2**31), got ", value);
  }

  // Checks that there is a head and that it has a column: no kernel has a loop for none.
  void head(const char* name, int64_t heads, int64_t size) const {
    require(heads > 0 && size > 0, name, ": expected at least one head of at least one column, got ", heads,
            " heads of ", size, " columns");
  }

  const char* op() const { return op_; }

 private:
  const char* op_;
  torch::stable::Device device_;
};

// Returns the dtype of features t, or raises an error if kernels do not support it.
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

// The accumulation type (params.h).
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
    case ScalarType::Byte:
      return 1;
    default:
      return 4;
  }
}

// Returns make(), which allocates a tensor of this device, shape and dtype, and reports a failure as lack of
// memory: the stable ABI does not say why an allocation failed, but sizes were checked before. On CUDA,
// dfgnn/runtime/ops.py turns the error into OutOfMemoryError.
template <class Make>
Tensor allocate(const Tensor& like, Dims sizes, ScalarType dtype, const Make& make) {
  try {
    return make();
  } catch (const std::exception&) {
    double bytes = double(bytes_of(dtype));
    for (size_t k = 0; k < sizes.size(); ++k) bytes *= double(sizes[k]);
    STD_TORCH_CHECK(false, "dfgnn: ", like.is_cuda() ? "CUDA" : "CPU", " out of memory: no ",
                    bytes / (1 << 30), " GiB for a tensor of shape ", to_string(sizes.sizes()), " and dtype ",
                    torch::headeronly::toString(dtype));
  }
}

// Returns t if it is contiguous with 16-byte alignment, which kernels need to load 16 bytes at a time; else a
// copy.
inline Tensor dense(const Tensor& t) {
  const auto copied = [&](const auto& copy) {
    const Sizes sizes = sizes_of(t);
    return allocate(t, sizes, t.scalar_type(), copy);
  };
  Tensor c = t.is_contiguous() ? t : copied([&] { return torch::stable::contiguous(t); });
  if (reinterpret_cast<uintptr_t>(c.const_data_ptr()) % 16 == 0) return c;
  return copied([&] { return torch::stable::clone(c); });
}
inline OptTensor dense(const OptTensor& t) { return t ? OptTensor(dense(*t)) : t; }

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const OptTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// Returns an uninitialised tensor on the device of `like`. It calls the ABI's C function, which takes half
// the time of new_empty, because it goes around the dispatcher.
inline Tensor make(const Tensor& like, Dims sizes, ScalarType dtype) {
  return allocate(like, sizes, dtype, [&] {
    int64_t strides[kMostDims], step = 1;
    for (size_t k = sizes.size(); k-- > 0; step *= std::max<int64_t>(sizes[k], 1)) strides[k] = step;
    int32_t device = 0, index = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
    const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides, type, device, index, &made));
    return Tensor(made);
  });
}
// Returns a view of t, which must be dense, in another shape. Autograd does not know that it is a view.
inline Tensor reshaped(const Tensor& t, Dims sizes) {
  int64_t strides[kMostDims], step = 1;
  for (size_t k = sizes.size(); k-- > 0; step *= std::max<int64_t>(sizes[k], 1)) strides[k] = step;
  AtenTensorHandle made = nullptr;  // the function below adds its argument 0 to the storage offset of t
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), int64_t(sizes.size()), sizes.data(), strides, 0, &made));
  return Tensor(made);
}

// Returns a dense view at this place in the memory of t, which is dense, in the dtype of t.
inline Tensor view_at(const Tensor& t, const void* where, Dims sizes) {
  int64_t strides[kMostDims], step = 1;
  for (size_t k = sizes.size(); k-- > 0; step *= std::max<int64_t>(sizes[k], 1)) strides[k] = step;
  const int64_t bytes = static_cast<const char*>(where) - static_cast<const char*>(t.const_data_ptr());
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.data(), strides, bytes / bytes_of(t.scalar_type()), &made));
  return Tensor(made);
}

// For arrays that not every call needs: if `wanted`, allocates and returns a tensor and sets `where` to its
// memory; else returns none and sets `where` to null.
inline OptTensor optional(void*& where, bool wanted, const Tensor& like, Dims sizes, ScalarType dtype) {
  where = nullptr;
  if (!wanted) return std::nullopt;
  Tensor t = make(like, sizes, dtype);
  where = t.mutable_data_ptr();
  return t;
}
// Returns t, or an empty tensor if there is none, for operators whose schemas do not return optional tensors.
inline Tensor or_empty(const OptTensor& t, const Tensor& like, ScalarType dtype) {
  return t ? *t : make(like, {0}, dtype);
}

// Several arrays of one call in one allocation, each aligned to kAlign bytes: add() them, then make() their
// memory, or place() them into memory that exists.
class Workspace {
 public:
  static constexpr int64_t kAlign = 256;

  // Sets `where` to null and, if `wanted`, adds an array. make() or place() then set `where` to the array's
  // memory: this pointer must still exist when they are called.
  void add(void*& where, bool wanted, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    where = nullptr;
    if (!wanted) return;
    int64_t bytes = bytes_of(dtype);
    for (int64_t size : sizes) bytes *= size;
    arrays_.at(count_++) = {&where, bytes_};
    bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
  }
  int64_t bytes() const { return bytes_; }
  // Returns a new tensor that holds all arrays, or none if there are no arrays. dtype: its own, not theirs.
  OptTensor make(const Tensor& like, ScalarType dtype = ScalarType::Byte) const {
    if (!count_) return std::nullopt;
    Tensor t = dfgnn::make(like, {bytes_ / bytes_of(dtype)}, dtype);
    place(t.mutable_data_ptr());
    return t;
  }
  void place(void* memory) const {
    for (int k = 0; k < count_; ++k) *arrays_[k].where = static_cast<char*>(memory) + arrays_[k].offset;
  }

 private:
  struct Array {
    void** where;
    int64_t offset;
  };
  std::array<Array, 24> arrays_;  // no caller adds more than 24
  int count_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace dfgnn
