// Instructions for tensor cores: a warp's matrix products in 16 bits, asynchronous copies to shared memory,
// and loads of operands from it.
#pragma once

#include <type_traits>

#include "vec.cuh"

namespace dfgnn::cuda {

// The address of p within shared memory, as PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
// Starts a copy of 4, 8 or 16 bytes from global to shared memory.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
  }
}
// Makes one group of the copies that this thread started since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until no more than PENDING groups of copies of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// x = four 8 x 8 blocks of 16-bit numbers from shared memory, in the layout of the operands of `multiply`;
// lane l passes, as `at`, the address of row l % 8 of block l / 8. load_transposed: each block transposed.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
// c += a b, where a is [16, 16] and b is [16, 8], by the 32 lanes of a warp. In lane 4 g + t, c[e] is in row
// g + 8 (e / 2) and column 2 t + e % 2.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
// Numbers in single precision for the tensor cores, which take the upper 19 bits: the sum of two such
// numbers, of which the second is rounded (half a unit is added, and the rest is cut off by the tensor
// cores).
template <int N>
struct SplitFloats {
  uint32_t high[N], low[N];
  SplitFloats() = default;
  __device__ __forceinline__ explicit SplitFloats(const uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      high[i] = x[i] & 0xffffe000u;
      low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i])) + 0x1000u;
    }
  }
};
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// c += a b, where a is [16, 8] and b is [8, 8], nearly in single precision: of the four products of parts,
// the one of the two lower ones is left out (3xTF32: Ootomo and Yokota 2022, arXiv 2203.03341). c is laid out
// as above; a[0] and a[1] are of rows g and g + 8 and number t of the eight, a[2] and a[3] of number t + 4,
// b[0] and b[1] of these numbers and column g.
__device__ __forceinline__ void multiply(float (&c)[4], const SplitFloats<4>& a, const SplitFloats<2>& b) {
  multiply_tf32(c, a.low, b.high);
  multiply_tf32(c, a.high, b.low);
  multiply_tf32(c, a.high, b.high);
}
// c += a b in double precision, where a is [16, 4] and b is [4, 8]. a: rows g and g + 8, number t; b: number
// t, column g.
__device__ __forceinline__ void multiply(double (&c)[4], const double (&a)[2], double b) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
        : "d"(a[i]), "d"(b));
}
// One number from shared memory.
__device__ __forceinline__ uint32_t load_word(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ double load_double(uint32_t at) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at) : "memory");
  return x;
}
// Returns two numbers, rounded to T, in the low and the high half of a word. unpack_two is the reverse.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}
template <typename T>
__device__ __forceinline__ float2 unpack_two(uint32_t x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  } else {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
}
// kLog2E: log2 of e; kLn2: the natural logarithm of 2. exp2_fast returns 2^x, so that e^x is exp2_fast(x
// kLog2E). The instruction's error, 2^-22, is far below the rounding of 16-bit weights.
inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A number in the unit that kUnit stands for is in units of log 2 in single precision, and e^x is exp_unit(x
// kUnit). In double precision it is exact.
template <typename A>
inline constexpr A kUnit = kLog2E;
template <>
inline constexpr double kUnit<double> = 1;
__device__ __forceinline__ float exp_unit(float x) { return exp2_fast(x); }
__device__ __forceinline__ double exp_unit(double x) { return exp(x); }

}  // namespace dfgnn::cuda
