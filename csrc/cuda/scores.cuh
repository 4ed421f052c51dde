// The scores that are sums over the columns of two rows: what a lane adds for its columns.
//   dot:          x . y, which the caller scales: the product that over sources is y . x is rounded alike
//   then additive_v2:  attn . LeakyReLU(x + y)
#pragma once

#include "gather.cuh"

namespace dfgnn::cuda {

template <class C, Score SCORE>
struct PairScore {
  using A = typename C::A;
  static constexpr bool V2 = SCORE == Score::additive_v2;
  static constexpr int NV = V2 ? C::NV : 1;
  A attn[NV][C::VEC];
  A slope;  // of the inner LeakyReLU

  __device__ __forceinline__ PairScore(const Place<C>& me, const void* attn_row, A negative_slope)
      : slope(negative_slope) {
    if constexpr (V2) {
      Raw raw[NV];
      me.load_row(attn_row, raw, 0);
      me.unpack_row(raw, attn, A(1));
    }
    keep(slope);
  }

  // LeakyReLU(u) = slope u + (1 - slope) max(u, 0): the two sums are added up apart and joined once per edge.
  // Where LINEAR is false the first one is left out, for callers that know slope attn . (x + y) already.
  struct Sum {
    A linear = 0, positive = 0;
  };
  template <bool LINEAR = true>
  __device__ __forceinline__ void add(int k, const A (&x)[C::VEC], const A (&y)[C::VEC], Sum& sum) const {
#pragma unroll
    for (int c = 0; c < C::VEC; ++c) {
      if constexpr (V2) {
        const A u = x[c] + y[c];
        if constexpr (LINEAR) sum.linear += attn[k][c] * u;
        sum.positive += attn[k][c] * max(u, A(0));
      } else {
        sum.linear += x[c] * y[c];
      }
    }
  }
  __device__ __forceinline__ A join(const Sum& sum) const {
    return V2 ? fma(slope, sum.linear, (1 - slope) * sum.positive) : sum.linear;
  }
  // slope attn . x over all columns of the head, for all its lanes; x: this lane's columns of a row of
  // `array`.
  __device__ __forceinline__ A linear(const Place<C>& me, const Tiling& t, const void* attn_row,
                                      const A (&x)[C::NV][C::VEC], const void* array, int64_t row) const {
    A sum = 0;
    repeat<C::NV, C::VEC>([&](int k, int c) { sum += attn[V2 ? k : 0][c] * x[k][c]; });
    if (C::WIDE && t.chunks > 1) sum += me.far_dot(t, attn_row, 0, array, row);
    return slope * reduce_sum<C::LPH>(sum);
  }
  // `add` for the other chunks of a wide head; e, the edge's features in the key, may be null.
  template <bool LINEAR = true>
  __device__ __forceinline__ void add_far(const Place<C>& me, const Tiling& t, const void* attn_row,
                                          const void* a, int64_t a_row, const void* b, int64_t b_row,
                                          const void* e, int64_t e_row, Sum& sum) const {
    if constexpr (V2) {
      me.far_sum(t, [&](int at) {
        A x[C::VEC], y[C::VEC], z[C::VEC], w[C::VEC];
        me.load_at(a, a_row, at, x);
        me.load_at(b, b_row, at, y);
        me.load_at(e, e_row, at, z);
        me.load_at(attn_row, 0, at, w);
#pragma unroll
        for (int c = 0; c < C::VEC; ++c) {
          const A u = x[c] + y[c] + z[c];
          if constexpr (LINEAR) sum.linear += w[c] * u;
          sum.positive += w[c] * max(u, A(0));
        }
        return A(0);
      });
    } else {
      sum.linear += me.far_dot(t, a, a_row, b, b_row, e, e_row);
    }
  }
};

}  // namespace dfgnn::cuda
