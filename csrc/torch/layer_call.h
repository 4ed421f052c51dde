// The arguments of the operators `layer` and `layer_backward` (layer.h), declared once: the schemas, the
// struct that the kernels read, and the named tuples in Python (dfgnn/runtime/arguments.py) follow from the
// two lists.
#pragma once

#include <string>

#include "checks.h"

namespace dfgnn {

// Type and name of what is not a tensor. graph: a number that graph_handle returned. heads: H; D is the size
// of a head, padding how many zeros kernels need after it. most_joined: gradients of projections of the same
// features are one product if each has at most this number of elements. dtype: that of the result. unwritten:
// the graph has a fixed capacity, so that kernels do not write the rows of unused edges. train: whether
// `layer_backward` may follow.
#define DFGNN_LAYER_NUMBERS(FIELD) \
  FIELD(int64_t, graph)            \
  FIELD(int64_t, score)            \
  FIELD(int64_t, heads)            \
  FIELD(int64_t, padding)          \
  FIELD(int64_t, most_joined)      \
  FIELD(double, negative_slope)    \
  FIELD(double, scale)             \
  FIELD(double, dropout_p)         \
  FIELD(ScalarType, dtype)         \
  FIELD(bool, unwritten)           \
  FIELD(bool, train)

// x [num_src, F] are the sources' features, x_dst [num_dst, F_dst] those of the destinations: x or its first
// rows if missing. After the features of each projection come its weight [H D, F] and bias [H D]. Value and
// key project the sources, query and skip the destinations; without key or query the value's rows are taken.
// The query of an additive score has no bias and a term of the score alone.
// skip is added to the result. edge_attr [E, F_e] is projected, too. attn, attn_dst and attn_edge are vectors
// of H D elements: GAT has those of sources, destinations and edges, GATv2 has one. out_bias [H D] is added
// to the result. seed, int64 [1], is that of dropout.
#define DFGNN_LAYER_TENSORS(FIELD) \
  FIELD(Tensor, x)                 \
  FIELD(OptTensor, x_dst)          \
  FIELD(Tensor, value_weight)      \
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
  FIELD(OptTensor, seed)

struct LayerCall {
#define DFGNN_MEMBER(type, name) type name;
  DFGNN_LAYER_NUMBERS(DFGNN_MEMBER)
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
};

// The gradients of a call's tensors, and the bits by which `need` asks for them.
struct LayerGradients {
#define DFGNN_MEMBER(type, name) OptTensor name;
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
};
struct LayerNeed {
#define DFGNN_MEMBER(type, name) bool name;
  DFGNN_LAYER_TENSORS(DFGNN_MEMBER)
#undef DFGNN_MEMBER
  explicit LayerNeed(int64_t bits) {
#define DFGNN_BIT(type, name) name = bits & 1, bits >>= 1;
    DFGNN_LAYER_TENSORS(DFGNN_BIT)
#undef DFGNN_BIT
  }
};

namespace schema_type {
inline const char* of(int64_t*) { return "int"; }
inline const char* of(double*) { return "float"; }
inline const char* of(bool*) { return "bool"; }
inline const char* of(ScalarType*) { return "ScalarType"; }
inline const char* of(Tensor*) { return "Tensor"; }
inline const char* of(OptTensor*) { return "Tensor?"; }
}  // namespace schema_type

// The arguments in a schema: the numbers, then the tensors.
inline std::string layer_arguments() {
  std::string text;
#define DFGNN_ARGUMENT(type, name) \
  text += std::string(text.empty() ? "" : ", ") + schema_type::of(static_cast<type*>(nullptr)) + " " #name;
  DFGNN_LAYER_NUMBERS(DFGNN_ARGUMENT)
  DFGNN_LAYER_TENSORS(DFGNN_ARGUMENT)
#undef DFGNN_ARGUMENT
  return text;
}

// `kept`, which exists if `train`, is the memory of what backward reads beside the arguments. If reads_result
// it also reads the result, as its argument `out`.
inline std::string layer_schema() {
  return "layer(" + layer_arguments() + ") -> (Tensor result, Tensor? kept, bool reads_result)";
}
inline std::string layer_backward_schema() {
  std::string results;
#define DFGNN_RESULT(type, name) results += std::string(results.empty() ? "" : ", ") + "Tensor? grad_" #name;
  DFGNN_LAYER_TENSORS(DFGNN_RESULT)
#undef DFGNN_RESULT
  return "layer_backward(" + layer_arguments() + ", Tensor grad, Tensor? out, Tensor kept, int need) -> (" +
         results + ")";
}

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
  LayerCall call() {
    LayerCall c{
#define DFGNN_READ(type, name) read<type>(),
        DFGNN_LAYER_NUMBERS(DFGNN_READ) DFGNN_LAYER_TENSORS(DFGNN_READ)
#undef DFGNN_READ
    };
    return c;
  }
  void gradients(const LayerGradients& g) {
#define DFGNN_WRITE(type, name) write(g.name);
    DFGNN_LAYER_TENSORS(DFGNN_WRITE)
#undef DFGNN_WRITE
  }
};

}  // namespace dfgnn
