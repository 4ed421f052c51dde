// Scores of additive_v2 in 16 bits, as exact products by tensor cores. With the row o of a work item and the
// row c of a neighbour,
//   max(o + c, 0) = o + max(-o, c), so that
//   attn . LeakyReLU(o + c) = attn . o + slope attn . c + (1 - slope) attn . max(-o, c)
// and the derivative of LeakyReLU(o + c) is 1 where c > -o, else the slope (add_where_greater).
// All operands are 16-bit numbers as they are in memory; the maximum is taken of two columns at a time.
// Tensor cores multiply 16-bit numbers exactly and add in float32. Their operands are the registers that the
// rows were loaded into: the columns of a product may be in any order that both factors share. A quad is a
// group of four lanes, the lanes 4 q to 4 q + 3.
#pragma once

#include "../mma.cuh"
#include "lanes.cuh"

namespace dfgnn::cuda {

// Layouts whose quads belong to one head each, with four rows in flight.
template <class C, Score SCORE, Edges EDGES>
inline constexpr bool kQuads = SCORE == Score::additive_v2 && !has_features(EDGES) &&
                               sizeof(typename C::T) == 2 && C::NV == 1 && C::B == 4 && C::LPH >= 4;
// Launch bounds (blocks per multiprocessor) of kernels with these layouts, in place of kMinBlocks
// (lanes.cuh).
inline constexpr int kQuadBlocksForward = 7, kQuadBlocksDestinations = 5, kQuadBlocksSources = 4;

// Returns -x of 16-bit numbers, held in registers: without `keep` the compiler negates them again in every
// iteration.
__device__ __forceinline__ Raw negated(Raw x) {
  repeat<4>([&](int w) {
    x.x[w] ^= 0x80008000u;
    keep(x.x[w]);
  });
  return x;
}
// Returns the words of lane ^ 8, which is in the quad whose number is this quad's ^ 2.
__device__ __forceinline__ Raw turned(const Raw& x) {
  Raw y;
  repeat<4>([&](int w) { y.x[w] = __shfl_xor_sync(kAll, x.x[w], 8); });
  return y;
}
// Returns the larger one of x and y in each half of a word, which holds two 16-bit numbers.
template <typename T>
__device__ __forceinline__ uint32_t max_of_two(uint32_t x, uint32_t y) {
  uint32_t z;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  }
  return z;
}
// low += x if the low half of a is greater than that of b, high += x if the high half is greater.
template <typename T>
__device__ __forceinline__ void add_where_greater(uint32_t a, uint32_t b, float x, float& low, float& high) {
#if __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<T, __half>) {
    asm("{.reg .pred p, q; setp.gt.f16x2 p|q, %2, %3; @p add.f32 %0, %0, %4; @q add.f32 %1, %1, %4;}"
        : "+f"(low), "+f"(high)
        : "r"(a), "r"(b), "f"(x));
  } else {
    asm("{.reg .pred p, q; setp.gt.bf16x2 p|q, %2, %3; @p add.f32 %0, %0, %4; @q add.f32 %1, %1, %4;}"
        : "+f"(low), "+f"(high)
        : "r"(a), "r"(b), "f"(x));
  }
#else
  const float2 u = unpack_two<T>(a), v = unpack_two<T>(b);
  if (u.x > v.x) low += x;
  if (u.y > v.y) high += x;
#endif
}
// The same with two numbers x and x2, each with its own sums.
template <typename T>
__device__ __forceinline__ void add_where_greater(uint32_t a, uint32_t b, float x, float& low, float& high,
                                                  float x2, float& low2, float& high2) {
#if __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<T, __half>) {
    asm("{.reg .pred p, q; setp.gt.f16x2 p|q, %4, %5; @p add.f32 %0, %0, %6; @q add.f32 %1, %1, %6; "
        "@p add.f32 %2, %2, %7; @q add.f32 %3, %3, %7;}"
        : "+f"(low), "+f"(high), "+f"(low2), "+f"(high2)
        : "r"(a), "r"(b), "f"(x), "f"(x2));
  } else {
    asm("{.reg .pred p, q; setp.gt.bf16x2 p|q, %4, %5; @p add.f32 %0, %0, %6; @q add.f32 %1, %1, %6; "
        "@p add.f32 %2, %2, %7; @q add.f32 %3, %3, %7;}"
        : "+f"(low), "+f"(high), "+f"(low2), "+f"(high2)
        : "r"(a), "r"(b), "f"(x), "f"(x2));
  }
#else
  const float2 u = unpack_two<T>(a), v = unpack_two<T>(b);
  if (u.x > v.x) low += x, low2 += x2;
  if (u.y > v.y) high += x, high2 += x2;
#endif
}

// The products of a neighbour's row with two rows of each quad, over the quad's columns. The quads' rows are
// the left operand of the tensor cores, so that neighbours can be the right one as they were loaded. A result
// is the product of `first` or `second` of one quad with the neighbour's columns of another quad. Of the 8 x
// 8 results only those are used in which both are of the same columns: the diagonal or, for a row that was
// turned, that of quad q with quad q ^ 2.
struct QuadRows {
  uint32_t x[2][4];  // left operands of two products: the first and the second half of a lane's columns
  __device__ __forceinline__ void set(const Raw& first, const Raw& second) {
    repeat<2, 2>([&](int half, int k) {
      x[half][2 * k] = first.x[2 * half + k];
      x[half][2 * k + 1] = second.x[2 * half + k];
    });
  }
  // sums = products with the quads 2 t and 2 t + 1 of `row`, in lane 4 g + t: two of quad g's `first`, then
  // two of its `second`.
  template <typename T>
  __device__ __forceinline__ void multiply_by(const Raw& row, float (&sums)[4]) const {
    repeat<4>([&](int k) { sums[k] = 0; });
    repeat<2>([&](int half) { multiply<T>(sums, x[half], row.x[2 * half], row.x[2 * half + 1]); });
  }
};
// From QuadRows' results for four neighbours, selects those of neighbour hl % 4, and returns their sum over
// all columns of the head. odd and even: by neighbour, the products with quads of odd and of even number.
// TURNED: those of the last two neighbours are products with the row of quad ^ 2, so that they are in other
// lanes than those of the first two, and one shuffle moves two of them.
template <class C, bool TURNED = false>
__device__ __forceinline__ float of_own_edge(const float (&odd)[4], const float (&even)[4]) {
  const int lane = threadIdx.x & 31, quad = lane & 28, from = lane >> 3;
  float x[4], sum;
  repeat<4>([&](int e) { x[e] = lane & 4 ? odd[e] : even[e]; });
  if constexpr (TURNED) {
    const bool here = (lane & 3) == from;
    const int at = (lane & 2 ? quad ^ 8 : quad) + from;
    const float y = __shfl_sync(kAll, here ? x[0] : x[2], at), z = __shfl_sync(kAll, here ? x[1] : x[3], at);
    sum = lane & 1 ? z : y;
  } else {
    repeat<4>([&](int e) { x[e] = __shfl_sync(kAll, x[e], from, 4); });
    sum = lane & 2 ? (lane & 1 ? x[3] : x[2]) : (lane & 1 ? x[1] : x[0]);
  }
#pragma unroll
  for (int o = 4; o < C::LPH; o *= 2) sum += __shfl_xor_sync(kAll, sum, o);
  return sum;
}
// Returns the same sum for the products with the first row of QuadRows: sums[u] are the results of
// multiply_by for neighbour u.
template <class C>
__device__ __forceinline__ float first_of_own_edge(const float (&sums)[4][4]) {
  float odd[4], even[4];
  repeat<4>([&](int e) { even[e] = sums[e][0], odd[e] = sums[e][1]; });
  return of_own_edge<C>(odd, even);
}

}  // namespace dfgnn::cuda
