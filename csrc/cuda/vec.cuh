// Loads and stores of 16 bytes of a feature row, and arithmetic on them in the accumulation type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "accumulate.cuh"

namespace dfgnn::cuda {

// Acc<T>: the accumulation type of T, double for double, else float.
template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using Acc = typename AccOf<T>::type;

template <typename T>
inline constexpr int kVec = 16 / sizeof(T);  // elements per load

// 16 bytes of a row, not yet converted.
struct alignas(16) Raw {
  uint32_t x[4];
};

__device__ __forceinline__ Raw load_raw(const void* p) {
  const uint4 v = __ldg(static_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
// Reads what an earlier launch wrote to an array that this launch also writes. The load bypasses the L1
// cache, which may hold old contents of a sector, from when another row in the sector was read.
__device__ __forceinline__ Raw read_raw(const void* p) {
  const uint4 v = __ldcg(static_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
// Reads one number in the same way as read_raw.
__device__ __forceinline__ float read_number(const float* p) { return __ldcg(p); }
__device__ __forceinline__ double read_number(const double* p) { return __ldcg(p); }
__device__ __forceinline__ void store_raw(void* p, const Raw& r) {
  *static_cast<uint4*>(p) = make_uint4(r.x[0], r.x[1], r.x[2], r.x[3]);
}

// Converts between Raw and kVec<T> numbers of the accumulation type: unpack(r, f) sets f, pack(f) rounds to
// T.
template <typename T>
struct Pack;

template <>
struct Pack<float> {
  static __device__ __forceinline__ void unpack(const Raw& r, float (&f)[4]) {
    repeat<4>([&](int k) { f[k] = __uint_as_float(r.x[k]); });
  }
  static __device__ __forceinline__ Raw pack(const float (&f)[4]) {
    Raw r;
    repeat<4>([&](int k) { r.x[k] = __float_as_uint(f[k]); });
    return r;
  }
};

template <>
struct Pack<double> {
  static __device__ __forceinline__ void unpack(const Raw& r, double (&f)[2]) {
    repeat<2>([&](int k) { f[k] = __hiloint2double(int(r.x[2 * k + 1]), int(r.x[2 * k])); });
  }
  static __device__ __forceinline__ Raw pack(const double (&f)[2]) {
    Raw r;
    repeat<2>([&](int k) {
      r.x[2 * k] = uint32_t(__double2loint(f[k]));
      r.x[2 * k + 1] = uint32_t(__double2hiint(f[k]));
    });
    return r;
  }
};

template <>
struct Pack<__nv_bfloat16> {
  static __device__ __forceinline__ void unpack(const Raw& r, float (&f)[8]) {
    repeat<4>([&](int k) {  // a bfloat16 is the upper half of a float32
      f[2 * k] = __uint_as_float(r.x[k] << 16);
      f[2 * k + 1] = __uint_as_float(r.x[k] & 0xffff0000u);
    });
  }
  static __device__ __forceinline__ Raw pack(const float (&f)[8]) {
    Raw r;
    repeat<4>([&](int k) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(f[2 * k], f[2 * k + 1]);
      r.x[k] = *reinterpret_cast<const uint32_t*>(&v);
    });
    return r;
  }
};

template <>
struct Pack<__half> {
  static __device__ __forceinline__ void unpack(const Raw& r, float (&f)[8]) {
    repeat<4>([&](int k) {
      const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&r.x[k]));
      f[2 * k] = v.x;
      f[2 * k + 1] = v.y;
    });
  }
  static __device__ __forceinline__ Raw pack(const float (&f)[8]) {
    Raw r;
    repeat<4>([&](int k) {
      const __half2 v = __floats2half2_rn(f[2 * k], f[2 * k + 1]);
      r.x[k] = *reinterpret_cast<const uint32_t*>(&v);
    });
    return r;
  }
};

// acc += w r, where r is unpacked first
template <typename T>
__device__ __forceinline__ void axpy(Acc<T> (&acc)[kVec<T>], Acc<T> w, const Raw& r) {
  Acc<T> f[kVec<T>];
  Pack<T>::unpack(r, f);
  repeat<kVec<T>>([&](int k) { acc[k] += w * f[k]; });
}

// Returns sum + a . r, where r is unpacked first
template <typename T>
__device__ __forceinline__ Acc<T> dot(const Acc<T> (&a)[kVec<T>], const Raw& r, Acc<T> sum) {
  Acc<T> f[kVec<T>];
  Pack<T>::unpack(r, f);
  repeat<kVec<T>>([&](int k) { sum += a[k] * f[k]; });
  return sum;
}

// exponential does not use the faster __expf, whose error has a bias that shows where gradients cancel; one
// exponential per edge and head costs little.
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
// Products, sums and differences that are rounded on their own. With plain operators the compiler would
// decide, kernel by kernel, whether to make them part of a fused multiply-add, and kernels that compute the
// same score would round it differently.
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double minus(double a, double b) { return __dsub_rn(a, b); }
template <typename A>
__device__ __forceinline__ A infinity() {
  return A(__int_as_float(0x7f800000));
}

}  // namespace dfgnn::cuda
