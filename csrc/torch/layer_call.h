// The arguments of the operators `layer` and `layer_backward` (layer.h), declared once: the schemas, the
// struct that the kernels read, and the named tuples in Python (dfgnn/runtime/arguments.py) follow from the
// two lists. Python writes what all calls of one kind have in common by `layer_call`, once, because each
// argument of an operator costs a small graph time: `layer` gets that, the graph and the tensors that exist.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "checks.h"

namespace dfgnn {

// Type and name of what is not a tensor. heads: H; D is the size
// of a head, padding how many zeros kernels need after it. most_joined: gradients of projections of the same
// features are one product if each has at most this number of elements. dtype: that of the result. unwritten:
// the graph has a fixed capacity, so that kernels do not write the rows of unused edges. train: whether
// `layer_backward` may follow. need_dst: whether that may be asked for the gradient of dst.
#define DFGNN_LAYER_NUMBERS(FIELD) \
  FIELD(int64_t, score)            \
  FIELD(int64_t, heads)            \
  FIELD(int64_t, padding)          \
  FIELD(int64_t, most_joined)      \
  FIELD(double, negative_slope)    \
  FIELD(double, scale)             \
  FIELD(double, dropout_p)         \
  FIELD(ScalarType, dtype)         \
  FIELD(bool, unwritten)           \
  FIELD(bool, train)               \
  FIELD(bool, need_dst)

// x [num_src, F] are the sources' features, x_dst [num_dst, F_dst] those of the destinations: x or its first
// rows if missing. After the features of each projection come its weight [H D, F] and bias [H D]. Value and
// key project the sources, query and skip the destinations; without key or query the value's rows are taken.
// The query of an additive score has no bias and a term of the score alone.
// skip is added to the result. edge_attr [E, F_e] is projected, too. attn, attn_dst and attn_edge are vectors
// of H D elements: GAT has those of sources, destinations and edges, GATv2 has one. out_bias [H D] is added
// to the result. seed, int64 [1], is that of dropout.
//
// Without value_weight it is no layer but a function: x are values [num_src, H, D]; src and dst are the
// score's inputs at source and destination, as in schemas.h.
#define DFGNN_LAYER_TENSORS(FIELD) \
  FIELD(Tensor, x)                 \
  FIELD(OptTensor, x_dst)          \
  FIELD(OptTensor, value_weight)   \
  FIELD(OptTensor, value_bias)     \
  FIELD(OptTensor, key_weight)     \
  FIELD(OptTensor, key_bias)       \
  FIELD(OptTensor, query_weight)   \
  FIELD(OptTensor, query_bias)     \
  FIELD(OptTensor, skip_weight)    \
  FIELD(OptTensor, skip_bias)      \
  FIELD(OptTensor, edge_attr)      \
  FIELD(OptTensor, edge_weight)    \
  FIELD(OptTensor, edge_bias)      \
  FIELD(OptTensor, attn)           \
  FIELD(OptTensor, attn_dst)       \
  FIELD(OptTensor, attn_edge)      \
  FIELD(OptTensor, out_bias)       \
  FIELD(OptTensor, src)            \
  FIELD(OptTensor, dst)            \
  FIELD(OptTensor, seed)

struct LayerCall {
  int64_t graph;  // a number that graph_handle returned
#define DFGNN_MEMBER(type, name) type name;
  DFGNN_LAYER_NUMBERS(DFGNN_MEMBER)
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
};

// The gradients of a call's tensors, and which of them are wanted.
struct LayerGradients {
#define DFGNN_MEMBER(type, name) OptTensor name;
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
};
struct LayerNeed {
#define DFGNN_MEMBER(type, name) bool name = false;
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
  // bits: one for each tensor of the call that exists, the first one's the lowest.
  LayerNeed(const LayerCall& c, int64_t bits) {
#define DFGNN_BIT(type, name) \
  if (exists(c.name)) name = bits & 1, bits >>= 1;
    DFGNN_LAYER_TENSORS(DFGNN_BIT)
#undef DFGNN_BIT
  }

 private:
  static bool exists(const Tensor&) { return true; }
  static bool exists(const OptTensor& t) { return t.has_value(); }
};

namespace schema_type {
inline const char* of(int64_t*) { return "int"; }
inline const char* of(double*) { return "float"; }
inline const char* of(bool*) { return "bool"; }
inline const char* of(ScalarType*) { return "ScalarType"; }
inline const char* of(Tensor*) { return "Tensor"; }
inline const char* of(OptTensor*) { return "Tensor?"; }
}  // namespace schema_type

// Makes the tensor `call` of these schemas, int64 on the CPU: the numbers, then a word with a bit for each
// tensor that the calls have.
inline std::string layer_call_schema() {
  std::string text;
#define DFGNN_ARGUMENT(type, name) \
  text += std::string(text.empty() ? "" : ", ") + schema_type::of(static_cast<type*>(nullptr)) + " " #name;
  DFGNN_LAYER_NUMBERS(DFGNN_ARGUMENT)
#undef DFGNN_ARGUMENT
#define DFGNN_ARGUMENT(type, name) text += ", bool " #name;
  DFGNN_LAYER_TENSORS(DFGNN_ARGUMENT)
#undef DFGNN_ARGUMENT
  return "layer_call(" + text + ") -> Tensor call";
}
// tensors: those that `call` says. `kept`, which exists if `train`, is the memory of what backward reads
// beside the arguments. If reads_result it also reads the result, as its argument `out`. need: bits of
// LayerNeed; the gradients are those of these tensors.
inline constexpr const char* kLayer =
    "layer(int graph, Tensor call, Tensor[] tensors)"
    " -> (Tensor result, Tensor? kept, bool reads_result)";
inline constexpr const char* kLayerBackward =
    "layer_backward(int graph, Tensor call, Tensor[] tensors, Tensor grad, Tensor? out, Tensor kept, int "
    "need)"
    " -> Tensor[] gradients";

// Arguments and results on the stack of a boxed kernel. What is read belongs to the reader.
struct BoxedStack {
  StableIValue* next;

  template <class T>
  T read() {
    return torch::stable::detail::to<T>(*next++);
  }
  template <class T>
  void write(T value) {
    *next++ = torch::stable::detail::from(std::move(value));
  }
};

// The words of `call`, one after the other.
class LayerWords {
 public:
  static constexpr int64_t kCount = 1
#define DFGNN_COUNT(type, name) +1
      DFGNN_LAYER_NUMBERS(DFGNN_COUNT)
#undef DFGNN_COUNT
      ;

  explicit LayerWords(const Tensor& call) {
    STD_TORCH_CHECK(call.dim() == 1 && call.size(0) == kCount && call.is_contiguous() && call.is_cpu() &&
                        call.scalar_type() == ScalarType::Long,
                    "dfgnn::layer: call: expected what layer_call returned");
    first_ = next_ = static_cast<const int64_t*>(call.const_data_ptr());
  }
  template <class T>
  T read() {
    const int64_t word = *next_++;
    if constexpr (std::is_same_v<T, double>) {
      double number;
      std::memcpy(&number, &word, sizeof number);
      return number;
    } else {
      return static_cast<T>(word);
    }
  }
  int64_t given() const { return first_[kCount - 1]; }
  template <class T>
  static int64_t word_of(T value) {
    int64_t word = 0;
    if constexpr (std::is_same_v<T, double>)
      std::memcpy(&word, &value, sizeof word);
    else
      word = static_cast<int64_t>(value);
    return word;
  }

 private:
  const int64_t *first_, *next_;
};

// The kernel of layer_call.
inline void write_layer_call(StableIValue* stack, uint64_t, uint64_t) {
  BoxedStack in{stack}, out{stack};
  int64_t words[] = {
#define DFGNN_WORD(type, name) LayerWords::word_of(in.read<type>()),
      DFGNN_LAYER_NUMBERS(DFGNN_WORD)
#undef DFGNN_WORD
          0};
  int64_t bit = 1;
#define DFGNN_BIT(type, name) words[LayerWords::kCount - 1] |= in.read<bool>() ? bit : 0, bit <<= 1;
  DFGNN_LAYER_TENSORS(DFGNN_BIT)
#undef DFGNN_BIT
  const int64_t size = LayerWords::kCount, step = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &step, aoti_torch_dtype_int64(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor made(handle);
  std::copy(std::begin(words), std::end(words), static_cast<int64_t*>(made.mutable_data_ptr()));
  out.write(std::move(made));
}

// Tensors by their places among all that a layer may have: `given` has a bit for each that exists.
class GivenTensors {
 public:
  GivenTensors(int64_t given, std::vector<Tensor> tensors) : given_(given), tensors_(std::move(tensors)) {}
  template <class T>
  T read() {
    const bool exists = given_ & 1;
    given_ >>= 1;
    if constexpr (!std::is_same_v<T, Tensor>)
      if (!exists) return T();
    STD_TORCH_CHECK(exists && next_ < tensors_.size(), "dfgnn::layer: tensors: expected those of `call`");
    return std::move(tensors_[next_++]);
  }

 private:
  int64_t given_;
  std::vector<Tensor> tensors_;
  size_t next_ = 0;
};

// The call that the first three arguments of `layer` and `layer_backward` describe.
inline LayerCall read_layer_call(BoxedStack& args) {
  const int64_t graph = args.read<int64_t>();
  const Tensor call = args.read<Tensor>();
  LayerWords words(call);
  GivenTensors tensors(words.given(), args.read<std::vector<Tensor>>());
  LayerCall c{graph,
#define DFGNN_READ(type, name) words.read<type>(),
              DFGNN_LAYER_NUMBERS(DFGNN_READ)
#undef DFGNN_READ
#define DFGNN_READ(type, name) tensors.read<type>(),
                  DFGNN_LAYER_TENSORS(DFGNN_READ)
#undef DFGNN_READ
  };
  return c;
}

// The gradients that are wanted, in the order of the tensors. A tensor that the result does not depend on
// has a gradient of zeros.
inline std::vector<Tensor> wanted_gradients(const LayerCall& c, const LayerNeed& need,
                                            const LayerGradients& found) {
  std::vector<Tensor> made;
  const auto add = [&](const OptTensor& like, OptTensor grad) {
    if (!grad) {
      grad = make(*like, sizes_of(*like), like->scalar_type());
      grad = torch::stable::zero_(*grad);
    }
    made.push_back(std::move(*grad));
  };
#define DFGNN_ADD(type, name) \
  if (need.name) add(c.name, found.name);
  DFGNN_LAYER_TENSORS(DFGNN_ADD)
#undef DFGNN_ADD
  return made;
}

}  // namespace dfgnn
