// Options on edges (EdgeOptions in params.h): how they are read, and how they turn an edge's raw score into
// its score. "Scalars" are all options but features: bias, gate, mask, weight and dropout.
#pragma once

#include "../../core/math.h"
#include "../../core/params.h"
#include "../vec.cuh"

namespace dfgnn::cuda {

// Which options on edges a kernel is compiled for: none, scalars per edge, feature rows of the edges, or
// projected features (EdgeAttr), the last two without or with scalars per edge.
enum class Edges { none, scalars, features, features_scalars, projected, projected_scalars };
constexpr bool projects(Edges edges) { return edges >= Edges::projected; }
constexpr bool has_features(Edges edges) {
  return edges == Edges::features || edges == Edges::features_scalars;
}
constexpr bool has_options(Edges edges) {
  return edges != Edges::none && edges != Edges::features && edges != Edges::projected;
}

// The options of one edge and head.
template <typename T>
struct EdgeReader {
  using A = Acc<T>;
  const EdgeOptions& o;
  int heads, head;
  uint64_t seed;
  // Whether any of bias, gate, mask and weight is given: one test per edge in place of four. Else the only
  // option on scalars is dropout.
  bool tensors;

  __device__ __forceinline__ EdgeReader(const EdgeOptions& options, int heads_, int head_)
      : o(options),
        heads(heads_),
        head(head_),
        seed(options.seed ? uint64_t(*options.seed) : 0),
        tensors(options.bias || options.gate || options.mask || options.weight) {}

  // Returns element `at` of an array of A, if is_acc, or of T.
  static __device__ __forceinline__ A read(const void* x, int64_t at, bool is_acc) {
    return is_acc ? static_cast<const A*>(x)[at] : A(static_cast<const T*>(x)[at]);
  }
  // Returns the element of the edge in x [E, columns], and of the head unless columns = 1; `otherwise` if x
  // is null.
  __device__ __forceinline__ A column(const void* x, int eid, int columns, bool is_acc, A otherwise) const {
    return x ? read(x, int64_t(eid) * columns + (columns > 1 ? head : 0), is_acc) : otherwise;
  }
  __device__ __forceinline__ A bias(int eid) const { return column(o.bias, eid, heads, o.bias_is_acc, A(0)); }
  __device__ __forceinline__ A gate(int eid) const {
    return column(o.gate, eid, o.gate_heads, o.gate_is_acc, A(1));
  }
  __device__ __forceinline__ A weight(int eid) const {
    return tensors ? column(o.weight, eid, o.weight_heads, o.weight_is_acc, A(1)) : A(1);
  }
  __device__ __forceinline__ bool masked(int eid) const {
    return o.mask && !o.mask[int64_t(eid) * o.mask_heads + (o.mask_heads > 1 ? head : 0)];
  }
  // Dropout's factor: 0 or 1 / (1 - p).
  __device__ __forceinline__ A mask(int eid) const {
    if (!o.seed) return A(1);
    return dropout_bits(seed, uint32_t(eid), uint32_t(head)) >= o.dropout_threshold ? A(o.dropout_scale)
                                                                                    : A(0);
  }
};

// Returns the id of the edge at a position of the CSR: its position in the user's order.
__device__ __forceinline__ int edge_id(const Csr& csr, int position) {
  return csr.eids ? __ldg(csr.eids + position) : position;
}

// Draws the dropout mask of a lane's SLOTS edges; all lanes of a warp must take part. One run of Philox
// yields the random words of one edge for four heads. Where a lane owns several edges, but no more than four,
// and the sub-warp has those four heads, each lane runs it once (`together`): the lanes of the four heads
// take different edges, and factor() shuffles the results.
template <typename T, bool EDGE, int LPH, int SLOTS>
struct Dropout {
  using A = Acc<T>;
  bool together;
  int head;
  // If `together`, this lane drew for one of its edges, that of slot `turn`, and for four heads, of which its
  // own head is one (head / 4 * 4 + k, k < 4). Bit k says that the k-th of them drops the edge; factor()
  // fetches the bits from the lane that drew for a slot. Else bit s says that the lane's head drops its edge
  // of slot s.
  uint32_t dropped = 0;
  A kept = 1;
  // eid_at(s): the id of the lane's edge in slot s
  template <class EidAt>
  __device__ __forceinline__ Dropout(const EdgeReader<T>& edge, int heads_per_tile, EidAt eid_at)
      : together(SLOTS > 1 && SLOTS <= 4 && heads_per_tile >= 4), head(edge.head) {
    if (!EDGE || !edge.o.seed) return;
    kept = A(edge.o.dropout_scale);
    const uint32_t threshold = edge.o.dropout_threshold;
    if (together) {
      const int turn = int(threadIdx.x & 31) / LPH % SLOTS;
      const Random4 words = philox(edge.seed, uint32_t(eid_at(turn)), 0, uint32_t(head) >> 2, 0);
      repeat<4>([&](int k) { dropped |= uint32_t(words.x[k] < threshold) << k; });
    } else {
      repeat<SLOTS>([&](int s) {
        const uint32_t bits = dropout_bits(edge.seed, uint32_t(eid_at(s)), uint32_t(head));
        dropped |= uint32_t(bits < threshold) << s;
      });
    }
  }
  // Dropout's factor of the lane's edge s: 0 or 1 / (1 - p).
  __device__ __forceinline__ A factor(int s) const {
    uint32_t found = dropped;
    if constexpr (EDGE && SLOTS > 1) {
      const int lane = threadIdx.x & 31, first = lane - lane / LPH % 4 * LPH;
      found = __shfl_sync(0xffffffffu, dropped, together ? first + s * LPH : lane);
      found >>= together ? head & 3 : s;
    }
    return found & 1 ? A(0) : kept;
  }
};

// Turns the raw score into the score (EdgeOptions in params.h), and keeps what backward needs: LeakyReLU'(z),
// the gate, and whether z > 0. negative_slope: of the LeakyReLU after the raw score. The fused multiply-add
// is written out, so that forward and backward round alike.
template <typename T, bool EDGE>
struct EdgeScore {
  using A = Acc<T>;
  A score, slope, gate;  // slope: LeakyReLU'(z)
  bool positive;         // z > 0
  __device__ __forceinline__ EdgeScore(const EdgeReader<T>& edge, A raw, A negative_slope, int eid) {
    const bool tensors = EDGE && edge.tensors;
    A z = raw, bias = 0;
    gate = 1;
    if (tensors) {
      gate = edge.gate(eid);
      bias = edge.bias(eid);
      z = fma(raw, gate, edge.o.bias_after ? A(0) : bias);
    }
    positive = z > 0;
    slope = leaky_relu_grad(z, negative_slope);
    score = leaky_relu(z, negative_slope);
    if (tensors) {
      if (edge.o.bias_after) score = plus(score, bias);
      if (edge.masked(eid)) score = -infinity<A>();
    }
  }
};

}  // namespace dfgnn::cuda
