// Linear projections and what else a layer's operators compute with torch's own kernels, through the stable
// ABI. A Backend offers mm(out, a, b), addmm(out, c, a, b), bmm and baddbmm, which write products of
// matrices, or of batches of them (and c + a b), into `out`, and cat, which puts tensors side by side. These
// functions call torch's kernels for a device directly, without the dispatcher.
#pragma once

#include "checks.h"

namespace dfgnn {

// Returns a tensor on memory that the caller owns.
inline Tensor on_memory(void* memory, const Tensor& like, Dims sizes, ScalarType dtype) {
  int64_t strides[kMostDims], step = 1;
  for (size_t k = sizes.size(); k-- > 0; step *= std::max<int64_t>(sizes[k], 1)) strides[k] = step;
  int32_t device = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      memory, int64_t(sizes.size()), sizes.data(), strides, 0, type, device, index, &made));
  return Tensor(made);
}

// Returns a view of t with these sizes and strides, `offset` elements after its first one.
inline Tensor strided(const Tensor& t, Dims sizes, Dims strides, int64_t offset = 0) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), int64_t(sizes.size()), sizes.data(),
                                                               strides.data(), offset, &made));
  return Tensor(made);
}
// The transpose of a matrix, as a view.
inline Tensor transposed(const Tensor& t) {
  return strided(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
}
// The first rows of a tensor, as a view.
inline Tensor first_rows(const Tensor& t, int64_t count) {
  Sizes sizes = sizes_of(t), strides;
  for (int64_t k = 0; k < t.dim(); ++k) strides.push_back(t.stride(k));
  sizes[0] = count;
  return strided(t, sizes, strides);
}

// Copies elements, in the dtype of `to`. The sizes must be the same.
inline void copy(const Tensor& to, const Tensor& from) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), 0));
}
// Returns t in this dtype: t itself, or a copy.
inline Tensor as_type(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Tensor made = make(t, sizes_of(t), dtype);
  copy(made, t);
  return made;
}
// Returns a + b, a new tensor.
inline Tensor added(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// The sum of the rows of a matrix.
inline Tensor sum_of_rows(const Tensor& t, ScalarType dtype) {
  const Sizes first{0};
  return torch::stable::sum(t, torch::headeronly::IntHeaderOnlyArrayRef(first), false, dtype);
}

// How a row of heads lies in memory: `heads` of `size` elements, each followed by `padding` zeros, which
// CUDA's kernels need because they load 16 bytes at a time.
struct HeadLayout {
  int64_t heads = 0, size = 0, padding = 0;

  int64_t width() const { return heads * size; }
  int64_t padded_width() const { return heads * (size + padding); }

  // A view of padded rows [n, padded_width] as [n, heads, size].
  Tensor without_padding(const Tensor& rows) const {
    const int64_t head = size + padding;
    return strided(rows, {rows.size(0), heads, size}, {heads * head, head, 1});
  }
  // Writes rows [n, width], of any strides and dtype, into padded ones.
  void pad_rows(Tensor& to, const Tensor& rows) const {
    if (padding) to = torch::stable::zero_(to);
    copy(without_padding(to),
         strided(rows, {rows.size(0), heads, size}, {rows.stride(0), size * rows.stride(1), rows.stride(1)}));
  }
  // Writes a weight [width, F] into one of padded_width rows.
  void pad_weight(Tensor& to, const Tensor& weight) const {
    if (padding) to = torch::stable::zero_(to);
    const int64_t columns = weight.size(1), head = (size + padding) * columns;
    copy(strided(to, {heads, size, columns}, {head, columns, 1}),
         strided(weight, {heads, size, columns},
                 {size * weight.stride(0), weight.stride(0), weight.stride(1)}));
  }
  // The gradient [width, F] or [width] of a weight or bias from that of the padded one, which must be dense.
  Tensor cut(const Tensor& grad) const {
    if (!padding) return grad;
    const int64_t columns = grad.dim() == 2 ? grad.size(1) : 1, head = (size + padding) * columns;
    Tensor made = make(grad, {heads, size, columns}, grad.scalar_type());
    copy(made, strided(grad, {heads, size, columns}, {head, columns, 1}));
    return grad.dim() == 2 ? reshaped(made, {width(), columns}) : reshaped(made, {width()});
  }
};

template <class Backend>
struct Linear {
  // Writes x weight^T + bias. All have one dtype.
  static void apply(Tensor& out, const Tensor& x, const Tensor& weight, const OptTensor& bias) {
    const Tensor onto = transposed(weight);
    if (bias)
      Backend::addmm(out, *bias, x, onto);
    else
      Backend::mm(out, x, onto);
  }

  // Tensors side by side, in dimension `dim`.
  static Tensor cat(const std::vector<Tensor>& parts, int64_t dim) {
    std::vector<AtenTensorHandle> handles;
    for (const Tensor& part : parts) handles.push_back(part.get());
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(Backend::cat(handles.data(), int64_t(handles.size()), dim, &made));
    return Tensor(made);
  }

  // Returns a b in this dtype; on a GPU in one launch, also where the factors have 16 bits.
  static Tensor product(const Tensor& a, const Tensor& b, ScalarType dtype) {
    const ScalarType type = a.scalar_type();
    if (type != dtype && Backend::kWidens && dtype == ScalarType::Float) {
      std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                        torch::stable::detail::from(dtype)};
      STABLE_TORCH_ERROR_CODE_CHECK(
          torch_call_dispatcher("aten::mm", "dtype", stack.data(), TORCH_ABI_VERSION));
      return torch::stable::detail::to<Tensor>(stack[0]);
    }
    Tensor out = make(a, {a.size(0), b.size(1)}, type);
    Backend::mm(out, a, b);
    return as_type(out, dtype);
  }

  // Adds a b to `sum`, which becomes a new tensor if there is none yet.
  static void add_product(OptTensor& sum, const Tensor& a, const Tensor& b) {
    if (!sum) {
      sum = make(a, {a.size(0), b.size(1)}, a.scalar_type());
      Backend::mm(*sum, a, b);
    } else {
      Backend::addmm(*sum, *sum, a, b);
    }
  }
};

}  // namespace dfgnn
