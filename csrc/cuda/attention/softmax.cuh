// The online softmax of a row, and the statistics of it that are saved for backward.
#pragma once

#include <cstring>

#include "../vec.cuh"

namespace dfgnn::cuda {

// What forward saves of a row and head. It is two numbers, because max + log_sum would round log_sum away
// where max is large. `minus` rounds score - max on its own, so that it is exactly 0 for equal numbers.
template <typename A>
struct RowStats {
  A max, log_sum;  // max = +inf marks a row without mass: no edges, or all scores -inf
  __device__ __forceinline__ A alpha(A score) const { return exponential(minus(score, max) - log_sum); }
};

// What the passes over sources need of a destination and head, in one aligned load.
template <typename A>
struct alignas(16) NodeStats {
  A term;  // additive: alpha_dst; additive_v2: slope attn . x_i; dot: unused
  RowStats<A> row;
  A delta;
};
static_assert(sizeof(NodeStats<float>) == 16 && sizeof(NodeStats<double>) == 32);

// Loads statistics that this launch does not write, through the read-only cache.
template <typename A>
__device__ __forceinline__ NodeStats<A> load_stats(const NodeStats<A>* at) {
  Raw raw[sizeof(NodeStats<A>) / 16];
#pragma unroll
  for (int k = 0; k < int(sizeof(raw) / 16); ++k)
    raw[k] = load_raw(reinterpret_cast<const char*>(at) + 16 * k);
  NodeStats<A> s;
  memcpy(&s, raw, sizeof(s));
  return s;
}
__device__ __forceinline__ RowStats<float> load_stats(const RowStats<float>* at) {
  const float2 v = __ldg(reinterpret_cast<const float2*>(at));
  return {v.x, v.y};
}
__device__ __forceinline__ RowStats<double> load_stats(const RowStats<double>* at) {
  const double2 v = __ldg(reinterpret_cast<const double2*>(at));
  return {v.x, v.y};
}

// Reads statistics that an earlier launch wrote and this launch writes, too: past the L1 cache (read_raw).
template <typename A>
__device__ __forceinline__ RowStats<A> read_stats(const RowStats<A>* at) {
  return {read_number(&at->max), read_number(&at->log_sum)};
}

// Online softmax of a row, or of a part of it. top: the largest score so far; mass: the sum of exp(score -
// top); positive, with POSITIVE: the same over edges with z > 0. Two parts of a row can be merged exactly. A
// kernel's sums of neighbours' rows have the same exponentials as weights: they must be multiplied by what
// `raise` returns.
template <typename A, bool POSITIVE>
struct Softmax {
  A top = -infinity<A>(), mass = 0, positive = 0;

  // By what exponentials relative to `from` are multiplied, to be relative to `to`.
  __device__ __forceinline__ static A factor(A from, A to) {
    return from == to ? A(1) : exponential(from - to);  // both may be -inf
  }
  // Adds an edge with the exponential e of its score.
  __device__ __forceinline__ void add(A e, bool is_positive) {
    mass += e;
    if constexpr (POSITIVE) positive += is_positive ? e : A(0);
  }
  // Raises the maximum to at least `peak`. Returns the factor for sums of rows; mass and positive are scaled.
  __device__ __forceinline__ A raise(A peak) {
    const A risen = max(top, peak), shrink = factor(top, risen);
    top = risen;
    mass *= shrink;
    if constexpr (POSITIVE) positive *= shrink;
    return shrink;
  }
  // Adds another part of the row. Returns the factor for the sums of this part; `theirs` becomes the factor
  // for the sums of the other part.
  __device__ __forceinline__ A merge(const Softmax& other, A& theirs) {
    const A ours = raise(other.top);
    theirs = factor(other.top, top);
    mass += other.mass * theirs;
    if constexpr (POSITIVE) positive += other.positive * theirs;
    return ours;
  }
  // Adds a part of the row that an earlier launch finished. Returns the factor for its normalised results;
  // `ours` becomes the factor for the sums of this part. Both are still to be multiplied by norm().
  __device__ __forceinline__ A join(const RowStats<A>& before, A& ours) {
    if (before.max == infinity<A>()) return ours = 1, A(0);  // that part had no mass
    const Softmax other{before.max, exponential(before.log_sum), A(0)};
    A theirs;
    ours = merge(other, theirs);
    return other.mass * theirs;
  }
  // What is subtracted from scores: the maximum, or 0 while there is no score.
  __device__ __forceinline__ A reference() const { return top == -infinity<A>() ? A(0) : top; }
  // 1 / mass, by which sums are normalised; 0 for a row without mass.
  __device__ __forceinline__ A norm() const { return mass == 0 ? A(0) : A(1) / mass; }
  // What is saved for backward.
  __device__ __forceinline__ RowStats<A> stats() const {
    if (mass == 0) return {infinity<A>(), A(0)};
    return {top, logarithm(mass)};
  }
};

}  // namespace dfgnn::cuda
