// Vectors of W lanes on GCC/Clang vector extensions, and the feature types.
//
// The files of this folder are compiled once per instruction set, each into a namespace of its name. They use
// no inline functions of std::, because the linker would merge the copies of all instruction sets and might
// choose the one with AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "core/params.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// GCC has __builtin_shufflevector since version 12; __has_builtin, which tells, since 10.
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

namespace dfgnn::cpu::DFGNN_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccumulatorOf<T>::type;

template <class A, int W>
struct VectorOf {
  typedef A type __attribute__((vector_size(W * sizeof(A))));
};
template <class A>
struct VectorOf<A, 1> {
  using type = A;
};
template <class A, int W>
using Vec = typename VectorOf<A, W>::type;

// How many lanes the widest vector of accumulators has.
template <class A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

template <class A>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = int32_t;
};
template <>
struct BitsOf<double> {
  using type = int64_t;
};
template <class A>
using Bits = typename BitsOf<A>::type;

template <class To, class From>
static inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
static inline V load_vector(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
static inline void store_vector(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// The vector of the lanes I of a and b, counted on from a's last lane to b's first one.
template <int... I, class V>
[[gnu::always_inline]] static inline auto shuffled(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, I...);
#else
  constexpr int lanes = sizeof(V) / sizeof(a[0]);
  using A = std::decay_t<decltype(a[0])>;
  if constexpr (sizeof...(I) == lanes) {
    using Index = Vec<std::conditional_t<sizeof(A) == 4, int32_t, int64_t>, lanes>;
    return __builtin_shuffle(a, b, Index{I...});
  } else {
    return Vec<A, sizeof...(I)>{(I < lanes ? a[I % lanes] : b[I % lanes])...};
  }
#endif
}

template <class A, int W>
static inline Vec<A, W> splat(A a) {
  return a - Vec<A, W>{};  // preserves -0 and NaN
}

#if defined(__AVX512F__)
// A mask of all lanes. Masked intrinsics are used, because gcc 12 warns of uninitialised values in the
// others.
constexpr __mmask16 kAll = 0xffff;
#endif

// Conversions of 16-bit floats, in vectors of W >= 4 lanes. widen extends each lane's 16 bits to 32 by zeros.
// The first argument of to_float and from_float only names the 16-bit type.
template <int W>
static inline Vec<uint32_t, W> widen(Vec<uint16_t, W> v) {
#if defined(__AVX512F__)
  if constexpr (W == 16)
    return bit_cast<Vec<uint32_t, W>>(_mm512_maskz_cvtepu16_epi32(kAll, bit_cast<__m256i>(v)));
#endif
  return __builtin_convertvector(v, Vec<uint32_t, W>);
}

template <int W>
static inline Vec<float, W> to_float(BFloat16, Vec<uint16_t, W> v) {
  return bit_cast<Vec<float, W>>(widen<W>(v) << 16);
}

template <int W>
static inline Vec<uint16_t, W> from_float(BFloat16, Vec<float, W> v) {
  const auto u = bit_cast<Vec<uint32_t, W>>(v);
  const auto rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return __builtin_convertvector(v == v ? rounded : (u >> 16) | 0x40u, Vec<uint16_t, W>);
}

template <int W>
static inline Vec<float, W> to_float(Half, Vec<uint16_t, W> v) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return bit_cast<Vec<float, W>>(_mm512_maskz_cvtph_ps(kAll, bit_cast<__m256i>(v)));
#endif
#if defined(__F16C__)
  if constexpr (W == 8) return bit_cast<Vec<float, W>>(_mm256_cvtph_ps(bit_cast<__m128i>(v)));
  if constexpr (W == 4)
    return bit_cast<Vec<float, W>>(_mm_cvtph_ps(_mm_cvtsi64_si128(bit_cast<long long>(v))));
#endif
  // Shifting exponent and mantissa and scaling by 2^112 is right except for inf and nan, whose exponent is
  // set afterwards.
  const auto u = widen<W>(v);
  const auto magnitude = (u & 0x7fffu) << 13;
  auto f = bit_cast<Vec<uint32_t, W>>(bit_cast<Vec<float, W>>(magnitude) * 0x1p112f);
  f = magnitude >= (31u << 23) ? f | 0x7f800000u : f;
  return bit_cast<Vec<float, W>>(f | (u & 0x8000u) << 16);
}

template <int W>
static inline Vec<uint16_t, W> from_float(Half, Vec<float, W> v) {
#if defined(__AVX512F__)
  if constexpr (W == 16)
    return bit_cast<Vec<uint16_t, W>>(
        _mm512_maskz_cvtps_ph(kAll, bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  if constexpr (W == 8)
    return bit_cast<Vec<uint16_t, W>>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  if constexpr (W == 4)
    return bit_cast<Vec<uint16_t, W>>(
        _mm_cvtsi128_si64(_mm_cvtps_ph(bit_cast<__m128>(v), _MM_FROUND_TO_NEAREST_INT)));
#endif
  using U = Vec<uint32_t, W>;
  const U u = bit_cast<U>(v), m = u & 0x7fffffffu;
  const U normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  // Adding 0.5 aligns the mantissa with a subnormal's unit, 2^-24, and rounds.
  const U subnormal = bit_cast<U>(bit_cast<Vec<float, W>>(m) + 0.5f) - 0x3f000000u;
  U h = m < (113u << 23) ? subnormal : normal;
  h = m >= (143u << 23) ? U{} + 0x7c00u : h;
  h = m > 0x7f800000u ? U{} + 0x7e00u : h;
  return __builtin_convertvector(h | (u & 0x80000000u) >> 16, Vec<uint16_t, W>);
}

// Calls f with an object of the feature type that `type` names, for f to deduce the type.
template <class F>
static inline void with_type(DType type, const F& f) {
  switch (type) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
  }
}

// load returns W elements of type T as accumulators; store converts accumulators to T and writes them.
template <class T, int W>
static inline Vec<Acc<T>, W> load(const T* p) {
  if constexpr (sizeof(T) > 2) {
    return load_vector<Vec<T, W>>(p);
  } else if constexpr (sizeof(T) == 1) {  // a flag
    static_assert(W == 1);
    return *p;
  } else if constexpr (W < 4) {
    static_assert(W == 1);
    Vec<uint16_t, 4> v{};
    v[0] = p->bits;
    return to_float<4>(T{}, v)[0];
  } else {
    return to_float<W>(T{}, load_vector<Vec<uint16_t, W>>(p));
  }
}

template <class T, int W>
static inline void store(T* p, Vec<Acc<T>, W> v) {
  if constexpr (sizeof(T) > 2) {
    store_vector(p, v);
  } else if constexpr (W < 4) {
    static_assert(W == 1);
    p->bits = from_float<4>(T{}, splat<float, 4>(v))[0];
  } else {
    store_vector(p, from_float<W>(T{}, v));
  }
}

// Returns the vector whose lane l is x[lane[l]]. The entries of `lane` are below W; W elements of x are read.
template <class A, int W>
[[gnu::always_inline]] static inline Vec<A, W> spread(const A* x, Vec<Bits<A>, W> lane) {
#if defined(__AVX2__) && __has_builtin(__builtin_shuffle)
  if constexpr (W > 1) return __builtin_shuffle(load_vector<Vec<A, W>>(x), lane);
#endif
  Vec<A, W> out{};
  if constexpr (W == 1)
    out = x[lane];
  else
    for (int l = 0; l < W; ++l) out[l] = x[lane[l]];
  return out;
}

// A Pair is 2 W elements as two vectors, of the even and of the odd ones. Reading bfloat16 so takes one
// operation per vector, where a vector of adjacent elements takes two. kInPairs: whether T is read so.
template <class T>
constexpr bool kInPairs = std::is_same_v<T, BFloat16>;

template <class A, int W>
struct Pair {
  Vec<A, W> even, odd;
};

template <class T, int W, int... I>
static inline Pair<Acc<T>, W> load_pair(const T* p, std::integer_sequence<int, I...>) {
  using U = Vec<uint32_t, W>;
  using V = Vec<Acc<T>, W>;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const U u = load_vector<U>(p);
    return {bit_cast<V>(u << 16), bit_cast<V>(u & 0xffff0000u)};
  } else {
    const V a = load<T, W>(p), b = load<T, W>(p + W);
    return {shuffled<(2 * I)...>(a, b), shuffled<(2 * I + 1)...>(a, b)};
  }
}
template <class T, int W>
static inline Pair<Acc<T>, W> load_pair(const T* p) {
  return load_pair<T, W>(p, std::make_integer_sequence<int, W>());
}

template <class T, int W, int... I>
static inline void store_pair(T* p, Pair<Acc<T>, W> x, std::integer_sequence<int, I...>) {
  const auto low = shuffled<(I % 2 * W + I / 2)...>(x.even, x.odd);
  const auto high = shuffled<(I % 2 * W + I / 2 + W / 2)...>(x.even, x.odd);
  store<T, W>(p, low), store<T, W>(p + W, high);
}
template <class T, int W>
static inline void store_pair(T* p, Pair<Acc<T>, W> x) {
  store_pair<T, W>(p, x, std::make_integer_sequence<int, W>());
}

// store_interleaved writes a[0], b[0], a[1], b[1] ... to p; load_interleaved reads them back, a as `even` and
// b as `odd`.
template <class A, int W>
static inline void store_interleaved(A* p, Vec<A, W> a, Vec<A, W> b) {
  if constexpr (W == 1)
    p[0] = a, p[1] = b;
  else
    store_pair<A, W>(p, {a, b});
}
template <class A, int W>
static inline Pair<A, W> load_interleaved(const A* p) {
  if constexpr (W == 1)
    return {p[0], p[1]};
  else
    return load_pair<A, W>(p);
}

template <class A>
constexpr A kInfinity = A(__builtin_inf());

// LeakyReLU and its derivative.
template <class V, class A>
[[gnu::always_inline]] static inline V leaky_relu(V z, A slope) {
  return z > 0 ? z : z * slope;
}
template <class V, class A>
[[gnu::always_inline]] static inline V leaky_slope(V z, A slope) {
  return z > 0 ? V{} + 1 : V{} + slope;
}

template <class A, int W, int... I>
static inline Vec<A, W / 2> lower_half(Vec<A, W> v, std::integer_sequence<int, I...>) {
  return shuffled<I...>(v, v);
}
template <class A, int W, int... I>
static inline Vec<A, W / 2> upper_half(Vec<A, W> v, std::integer_sequence<int, I...>) {
  return shuffled<(I + W / 2)...>(v, v);
}

template <class A, int W>
static inline A sum(Vec<A, W> v) {
  if constexpr (W == 1) {
    return v;
  } else if constexpr (W == 2) {
    return v[0] + v[1];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, W / 2>();
    return sum<A, W / 2>(lower_half<A, W>(v, lanes) + upper_half<A, W>(v, lanes));
  }
}

// sum4(v, sums), after its helpers: sums[k] = sum of the lanes of v[k], k < 4. Halves, then quarters of the
// four vectors are added, side by side in one vector, so that one tree of additions serves all of them.
template <class A, int W, int... I>
static inline Vec<A, W> add_halves(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  constexpr int h = W / 2;  // lanes [0, h) of the result are from a, [h, W) from b
  return shuffled<(I < h ? I : I - h + W)...>(a, b) + shuffled<(I < h ? I + h : I + W)...>(a, b);
}
template <class A, int W, int... I>
static inline Vec<A, W> add_quarters(Vec<A, W> a, Vec<A, W> b, std::integer_sequence<int, I...>) {
  constexpr int q = W / 4;  // a and b hold two sums each, whose halves are added
  return shuffled<(I / q * 2 * q + I % q)...>(a, b) + shuffled<(I / q * 2 * q + I % q + q)...>(a, b);
}
template <class A, int W, int... I>
static inline Vec<A, W / 2> add_pairs(Vec<A, W> a, std::integer_sequence<int, I...>) {
  return shuffled<(2 * I)...>(a, a) + shuffled<(2 * I + 1)...>(a, a);
}
template <class A, int W>
static inline void store_sums(Vec<A, W> a, A* sums) {
  if constexpr (W == 4)
    store_vector(sums, a);
  else
    store_sums<A, W / 2>(add_pairs<A, W>(a, std::make_integer_sequence<int, W / 2>()), sums);
}
template <class A, int W>
static inline void sum4(const Vec<A, W>* v, A* sums) {
  if constexpr (W < 4) {
    for (int k = 0; k < 4; ++k) sums[k] = sum<A, W>(v[k]);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
    store_sums<A, W>(
        add_quarters<A, W>(add_halves<A, W>(v[0], v[1], lanes), add_halves<A, W>(v[2], v[3], lanes), lanes),
        sums);
  }
}

template <class A>
static inline A larger(A a, A b) {
  return a > b ? a : b;
}

// Returns the largest lane. It can miss lanes with NaN, which callers find in the sum of exponentials.
template <class A, int W>
static inline A max(Vec<A, W> v) {
  if constexpr (W == 2) {
    return larger(v[0], v[1]);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, W / 2>();
    const auto a = lower_half<A, W>(v, lanes), b = upper_half<A, W>(v, lanes);
    return max<A, W / 2>(a > b ? a : b);
  }
}

template <class A, int W, int... I>
static inline Vec<Bits<A>, W> iota(std::integer_sequence<int, I...>) {
  return Vec<Bits<A>, W>{I...};
}

// Lane l of the mask is set if begin + l < end.
template <class A, int W>
static inline Vec<Bits<A>, W> before(int begin, int end) {
  return iota<A, W>(std::make_integer_sequence<int, W>()) < Bits<A>(end - begin);
}

// Returns p 2^n. It multiplies by two powers, because 2^n itself may overflow or underflow where p 2^n does
// not.
template <class A, int W>
static inline Vec<A, W> scale_by_power(Vec<A, W> p, Vec<Bits<A>, W> n) {
  constexpr int mantissa = sizeof(A) == 4 ? 23 : 52, bias = sizeof(A) == 4 ? 127 : 1023;
  const auto half = n >> 1;
  const auto a = bit_cast<Vec<A, W>>((half + bias) << mantissa);
  const auto b = bit_cast<Vec<A, W>>((n - half + bias) << mantissa);
  return p * a * b;
}

// Does the same for an n that is given twice: as an accumulator, which AVX-512 has an instruction for, and as
// an integer in `bits`.
template <class A, int W>
static inline Vec<A, W> scale_by_power(Vec<A, W> p, Vec<A, W> n, Vec<Bits<A>, W> bits) {
#if defined(__AVX512F__)
  if constexpr (W == kLanes<A> && sizeof(A) == 4)
    return bit_cast<Vec<A, W>>(_mm512_maskz_scalef_ps(kAll, bit_cast<__m512>(p), bit_cast<__m512>(n)));
  if constexpr (W == kLanes<A> && sizeof(A) == 8)
    return bit_cast<Vec<A, W>>(
        _mm512_maskz_scalef_pd(__mmask8(kAll), bit_cast<__m512d>(p), bit_cast<__m512d>(n)));
#endif
  (void)n;
  return scale_by_power<A, W>(p, bits);
}

// at_least returns the larger of x and a bound, at_most the smaller; both return x if it is nan.
template <class A, int W>
static inline Vec<A, W> at_least(Vec<A, W> x, A bound) {
#if defined(__AVX512F__)
  if constexpr (W == kLanes<A> && sizeof(A) == 4)
    return bit_cast<Vec<A, W>>(_mm512_maskz_max_ps(kAll, _mm512_set1_ps(bound), bit_cast<__m512>(x)));
#elif defined(__AVX2__)
  if constexpr (W == kLanes<A> && sizeof(A) == 4)
    return bit_cast<Vec<A, W>>(_mm256_max_ps(_mm256_set1_ps(bound), bit_cast<__m256>(x)));
#endif
  return x < bound ? splat<A, W>(bound) : x;
}
template <class A, int W>
static inline Vec<A, W> at_most(Vec<A, W> x, A bound) {
#if defined(__AVX512F__)
  if constexpr (W == kLanes<A> && sizeof(A) == 4)
    return bit_cast<Vec<A, W>>(_mm512_maskz_min_ps(kAll, _mm512_set1_ps(bound), bit_cast<__m512>(x)));
#elif defined(__AVX2__)
  if constexpr (W == kLanes<A> && sizeof(A) == 4)
    return bit_cast<Vec<A, W>>(_mm256_min_ps(_mm256_set1_ps(bound), bit_cast<__m256>(x)));
#endif
  return x > bound ? splat<A, W>(bound) : x;
}

// Returns e^x = 2^n e^r, where x = n log 2 + r with |r| <= log(2) / 2, and e^r is a polynomial 1 + r + ...
// For float it is the one of degree 6 with the least relative error, below 2^-28; for double it is Taylor's,
// whose remainder is below 2^-57. exp(-inf) = 0, exp(+inf) = inf, exp(nan) = nan.
template <class A, int W>
[[gnu::always_inline]] static inline Vec<A, W> exp(Vec<A, W> x) {
  constexpr bool single = sizeof(A) == 4;
  constexpr A low = single ? A(-110) : A(-760), high = single ? A(90) : A(720);
  constexpr A round = single ? A(0x1.8p23) : A(0x1.8p52);  // adding it rounds to an integer in the mantissa
  constexpr A log2_high = single ? A(0x1.62e4p-1) : A(0x1.62e42fefa38p-1);
  constexpr A log2_low = single ? A(0x1.7f7d1cp-20) : A(0x1.ef35793c7673p-45);
  x = at_most<A, W>(at_least<A, W>(x, low), high);
  const Vec<A, W> shifted = x * A(0x1.71547652b82fep0) + round;
  const Vec<A, W> n = shifted - round;
  const Vec<A, W> r = (x - n * log2_high) - n * log2_low;
  constexpr double coefficients[] = {1.,
                                     1.,
                                     0x1.fffffb97a4a9cp-2,
                                     0x1.5554910417d76p-3,
                                     0x1.5558f2f6feeddp-5,
                                     0x1.123a1f5090d3fp-7,
                                     0x1.6a23cecb7e250p-10};
  constexpr double inverse_factorial[] = {
      1.,        1.,         1. / 2,      1. / 6,       1. / 24,       1. / 120,       1. / 720,
      1. / 5040, 1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800.};
  constexpr int degree = single ? 6 : 13;
  const auto coefficient = [&](int k) { return A(single ? coefficients[k] : inverse_factorial[k]); };
  Vec<A, W> p = splat<A, W>(coefficient(degree));
#pragma GCC unroll 16
  for (int k = degree - 1; k >= 0; --k) p = p * r + coefficient(k);
  return scale_by_power<A, W>(p, n, bit_cast<Vec<Bits<A>, W>>(shifted) - bit_cast<Bits<A>>(round));
}

// Returns log x of normal numbers: x = 2^n m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh(r) by its
// series in r = (m - 1) / (m + 1), whose remainder is below 2^-29 (float) and 2^-57 (double). log(inf) = inf,
// log(nan) = nan.
template <class A, int W>
static inline Vec<A, W> log(Vec<A, W> x) {
  constexpr bool single = sizeof(A) == 4;
  constexpr int mantissa = single ? 23 : 52;
  using B = Vec<Bits<A>, W>;
  using Unsigned = std::make_unsigned_t<Bits<A>>;  // because differences may wrap around in unused lanes
  const auto bits = bit_cast<Vec<Unsigned, W>>(x);
  const B n = bit_cast<B>(bits - bit_cast<Unsigned>(A(0x1.6a09e667f3bcdp-1))) >> mantissa;
  const Vec<A, W> m = bit_cast<Vec<A, W>>(bits - bit_cast<Vec<Unsigned, W>>(n << mantissa));
  const Vec<A, W> r = (m - 1) / (m + 1), square = r * r;
  constexpr int terms = single ? 5 : 11;
  Vec<A, W> p = splat<A, W>(A(1. / (2 * terms - 1)));
#pragma GCC unroll 16
  for (int k = terms - 2; k > 0; --k) p = p * square + A(1. / (2 * k + 1));
  constexpr A log2_high = single ? A(0x1.62e4p-1) : A(0x1.62e42fefa38p-1);
  constexpr A log2_low = single ? A(0x1.7f7d1cp-20) : A(0x1.ef35793c7673p-45);
  const Vec<A, W> e = __builtin_convertvector(n, Vec<A, W>), twice = r + r;
  const Vec<A, W> y = e * log2_high + (twice + (twice * square * p + e * log2_low));
  return x < kInfinity<A> ? y : x;
}

static inline float log(float x) { return __builtin_logf(x); }
static inline double log(double x) { return __builtin_log(x); }

// Returns the exponential of a scalar, by the polynomial of exp.
template <class A>
static inline A exp1(A x) {
  return exp<A, 16 / sizeof(A)>(splat<A, 16 / sizeof(A)>(x))[0];
}

// An array of `size` elements that lives as long as its scope. It has 64 bytes more, because loops over whole
// vectors read and write beyond the last element.
template <class A>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(make(size)) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator A*() const { return data_; }
  void clear(int64_t size) { __builtin_memset(data_, 0, std::size_t(size) * sizeof(A)); }
  // Changes the size, and discards the contents.
  void replace(int64_t size) {
    A* const next = make(size);
    ::operator delete(data_, std::align_val_t(64));
    data_ = next;
  }

 private:
  static A* make(int64_t size) {
    return static_cast<A*>(::operator new(std::size_t(size) * sizeof(A) + 64, std::align_val_t(64)));
  }
  A* data_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
