// The scores that are sums over the columns of two rows x and y, and what a lane adds to them for its
// columns.
//   dot:          x . y. Callers multiply it by the scale
//   additive_v2:  attn . LeakyReLU(x + y)
// As the scale comes last, x . y and y . x round alike: forward and the pass over sources, where the rows
// change places, get the same score.
#pragma once

#include "gather.cuh"
#include "quads.cuh"

namespace dfgnn::cuda {

template <class C, Score SCORE, bool QUADS = false>
struct PairScore {
  using A = typename C::A;
  static constexpr bool V2 = SCORE == Score::additive_v2;
  static constexpr int NV = V2 ? C::NV : 1;
  A numbers[QUADS ? 1 : NV][C::VEC];  // attn in the type of sums; unused with QUADS
  Raw words;                          // QUADS: attn in 16 bits, as it is in memory
  A slope;                            // of the LeakyReLU within additive_v2's sum

  __device__ __forceinline__ PairScore(const Place<C>& me, const void* attn_row, A negative_slope)
      : slope(negative_slope) {
    if constexpr (V2) {
      Raw raw[NV];
      me.load_row(attn_row, raw, 0);
      if constexpr (QUADS) {
        words = me.inside_or_zero(raw[0]);
      } else {
        me.unpack_row(raw, numbers, A(1));
      }
    }
    keep(slope);
  }
  // Sets x to attn, in the columns of this lane's k-th load.
  __device__ __forceinline__ void attn(int k, A (&x)[C::VEC]) const {
    if constexpr (QUADS) {
      Pack<typename C::T>::unpack(words, x);
    } else {
      copy(x, numbers[V2 ? k : 0]);
    }
  }

  // LeakyReLU(u) = slope u + (1 - slope) max(u, 0): the sums of attn u (linear) and of attn max(u, 0)
  // (positive) are added up separately and joined once per edge. LINEAR = false leaves the first sum out, for
  // callers that know slope attn . (x + y) already. dot has the linear sum only, of x y.
  struct Sum {
    A linear = 0, positive = 0;
  };
  // Adds the products of this lane's k-th load of the rows x and y to `sum`.
  template <bool LINEAR = true>
  __device__ __forceinline__ void add(int k, const A (&x)[C::VEC], const A (&y)[C::VEC], Sum& sum) const {
#pragma unroll
    for (int c = 0; c < C::VEC; ++c) {
      if constexpr (V2) {
        const A u = x[c] + y[c];
        if constexpr (LINEAR) sum.linear += numbers[k][c] * u;
        sum.positive += numbers[k][c] * max(u, A(0));
      } else {
        sum.linear += x[c] * y[c];
      }
    }
  }
  // Returns the score: slope linear + (1 - slope) positive, or for dot the linear sum.
  __device__ __forceinline__ A join(const Sum& sum) const {
    return V2 ? fma(slope, sum.linear, (1 - slope) * sum.positive) : sum.linear;
  }
  // QUADS (quads.cuh): with minus = -o and the rows of four neighbours c, returns for the lane's own edge,
  // one of these four,
  //   attn . LeakyReLU(o + c) - attn . o = slope attn . c + (1 - slope) attn . max(-o, c).
  // The second row of `quads` must be attn. first[u] gets the products of neighbour u with the first row of
  // `quads`. If LINEAR is false, only attn . max(-o, c) is returned, and `first` is not set. TURNED: as in
  // of_own_edge; the first row of `quads` is then attn, turned.
  template <bool LINEAR = true, bool TURNED = false>
  __device__ __forceinline__ A quad_sum(const QuadRows& quads, const Raw& minus, const Raw (&rows)[4][1],
                                        float (&first)[4][4]) const {
    using T = typename C::T;
    float odd[4], even[4];
    repeat<4>([&](int u) {
      Raw larger;
      repeat<4>([&](int w) { larger.x[w] = max_of_two<T>(minus.x[w], rows[u][0].x[w]); });
      float sums[4];
      quads.multiply_by<T>(larger, sums);
      const int at = TURNED && u >= 2 ? 0 : 2;
      even[u] = sums[at], odd[u] = sums[at + 1];
      if constexpr (LINEAR) {
        quads.multiply_by<T>(rows[u][0], first[u]);
        even[u] = fma(1 - slope, even[u], slope * first[u][at]);
        odd[u] = fma(1 - slope, odd[u], slope * first[u][at + 1]);
      }
    });
    return of_own_edge<C, TURNED>(odd, even);
  }
  // Returns quad_sum's result where `quads` has attn as both rows, the first one turned, and the caller does
  // not need the products with the first row.
  __device__ __forceinline__ A quad_score(const QuadRows& quads, const Raw& minus,
                                          const Raw (&rows)[4][1]) const {
    float unused[4][4];
    return quad_sum<true, true>(quads, minus, rows, unused);
  }
  // Returns attn . x over all columns of the head, in all its lanes. x: this lane's columns of a row of
  // `array`.
  __device__ __forceinline__ A linear(const Place<C>& me, const Tiling& t, const void* attn_row,
                                      const A (&x)[C::NV][C::VEC], const void* array, int64_t row) const {
    A sum = 0;
    repeat<C::NV>([&](int k) {
      A y[C::VEC];
      attn(k, y);
      repeat<C::VEC>([&](int c) { sum += y[c] * x[k][c]; });
    });
    if (C::WIDE && t.chunks > 1) sum += me.far_dot(t, attn_row, 0, array, row);
    return reduce_sum<C::LPH>(sum);
  }
  // Adds to `sum` this lane's part of the score of row a_row of array a and row b_row of b, in the columns of
  // a wide head that other blocks have. e, the edges' features in the key, may be null. Of far_sum only the
  // loop over columns is used, not its sum.
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

// Adds up the lanes' shares of grad_attn over the sub-warps of each warp, then over the block's warps through
// `shared`, and stores the sum as the block's row of `parts` [blocks, H, D].
template <class C>
__device__ __forceinline__ void store_share_of_block(const Place<C>& me, const Tiling& t,
                                                     typename C::A (&share)[C::NV][C::VEC],
                                                     typename C::A (&shared)[kWarps][C::NV * C::VEC][32],
                                                     void* parts) {
  using A = typename C::A;
  constexpr int NV = C::NV, VEC = C::VEC;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  me.across(share, t);
  if (warp) repeat<NV * VEC>([&](int k) { shared[warp][k][lane] = share[k / VEC][k % VEC]; });
  __syncthreads();
  if (warp || me.sub) return;
#pragma unroll
  for (int k = 0; k < NV; ++k) {
    if (!me.inside(k)) continue;
    A* out = static_cast<A*>(parts) + (int64_t(blockIdx.x) * me.heads + me.head) * me.dim + me.column +
             k * C::LPH * VEC;
    repeat<VEC>([&](int v) {
      A sum = share[k][v];
      repeat<kWarps - 1>([&](int w) { sum += shared[w + 1][k * VEC + v][lane]; });
      out[v] = sum;
    });
  }
}

}  // namespace dfgnn::cuda
