// Weighted sums of neighbours' rows, in which every lane owns some columns: the second phase of an iteration
// (csrc/cuda/README.md).
#pragma once

#include "main_loop.cuh"

namespace dfgnn::cuda {

// The weights of the edges that a lane owns, and how the lanes that own columns get them. With POSITIVE there
// are two sums, over all edges and over those with z > 0 (for grad_alpha_dst). Where no weight can be
// negative (not SIGNED), the sign bit says whether z > 0, so that one shuffle serves both sums.
template <typename A_, int S, bool POSITIVE, bool SIGNED>
struct Weights {
  using A = A_;
  A all[S];
  A positive[POSITIVE && SIGNED ? S : 1];

  __device__ __forceinline__ void set(int s, A w, bool is_positive) {
    if constexpr (!POSITIVE) {
      all[s] = w;
    } else if constexpr (SIGNED) {
      all[s] = w;
      positive[s] = is_positive ? w : A(0);
    } else {
      all[s] = is_positive ? w : -w;
    }
  }
  // w, w_positive = the weights of the chunk's edge u, from the lane that owns it. All lanes must call this.
  template <int LPH>
  __device__ __forceinline__ void get(int u, A& w, A& w_positive) const {
    w = of_lane<LPH>(all[u / LPH], u % LPH);
    if constexpr (!POSITIVE) return;
    if constexpr (SIGNED) {
      w_positive = of_lane<LPH>(positive[u / LPH], u % LPH);
    } else {
      w_positive = max(w, A(0));
      w = abs(w);
    }
  }
};

// Issues the loads of the rows of the edges u0 .. u0 + B of a chunk. first: where in `index` their row
// numbers begin, which are neighbours or edge ids.
template <class C, int B, int S>
__device__ __forceinline__ void load_rows(const Rows<C>& source, const int u0, const int (&index)[S],
                                          Raw (&rows)[B][C::NV], const int first = 0) {
  repeat<B>([&](int u) {
    const int j = of_lane<C::LPH>(index[first + (u0 + u) / C::LPH], (u0 + u) % C::LPH);
    repeat<C::NV>([&](int k) { rows[u][k] = source.load(j, k); });
  });
}

// The default of add_rows for what else an edge adds: nothing.
struct NoMore {
  template <class... X>
  __device__ __forceinline__ void operator()(const X&...) const {}
};
// acc += w_u rows_u for the edges u0 .. u0 + B of a chunk that has `left` edges, and with POSITIVE
// acc_positive += the same over the edges with z > 0. FULL: all sub-warps have all these edges. ONES: all
// weights are 1. more(u, w_u, the second weight) adds what else belongs to an edge.
template <class C, bool FULL, bool POSITIVE, int B, bool ONES = false, class W, int NV2, class More = NoMore>
__device__ __forceinline__ void add_rows(const int u0, int left, const W& weights,
                                         const Raw (&rows)[B][C::NV], typename C::A (&acc)[C::NV][C::VEC],
                                         typename C::A (&acc_positive)[NV2][C::VEC],
                                         const More& more = More()) {
#pragma unroll
  for (int u = 0; u < B; ++u) {
    if (!FULL && !__any_sync(kAll, u0 + u < left)) break;
    typename C::A w = 1, w_positive = 0;
    if constexpr (!ONES) weights.template get<C::LPH>(u0 + u, w, w_positive);
    if (FULL || u0 + u < left) {
      repeat<C::NV>([&](int k) {
        axpy<typename C::T>(acc[k], w, rows[u][k]);
        if constexpr (POSITIVE) axpy<typename C::T>(acc_positive[k], w_positive, rows[u][k]);
      });
      more(u, w, w_positive);
    }
  }
}

// The same as add_rows for all edges of a chunk of CHUNK >= B edges. `rows` holds the first B rows, which
// were loaded before, so that their loads are in flight while scores are computed; further ones are loaded
// here.
template <class C, bool FULL, bool POSITIVE, int B, int CHUNK, bool ONES = false, int S, class W, int NV2>
__device__ __forceinline__ void add_chunk(const Rows<C>& source, int left, const int (&index)[S],
                                          const W& weights, Raw (&rows)[B][C::NV],
                                          typename C::A (&acc)[C::NV][C::VEC],
                                          typename C::A (&acc_positive)[NV2][C::VEC]) {
#pragma unroll
  for (int u0 = 0; u0 < CHUNK; u0 += B) {
    if (u0 > 0) {
      if (!FULL && !__any_sync(kAll, u0 < left)) break;
      load_rows<C, B>(source, u0, index, rows);
    }
    // Without FULL some sub-warp lacks an edge of the chunk, and so one of the last B: these need no vote.
    if (FULL || (u0 + B < CHUNK && __all_sync(kAll, u0 + B <= left))) {
      add_rows<C, true, POSITIVE, B, ONES>(u0, left, weights, rows, acc, acc_positive);
    } else {
      add_rows<C, false, POSITIVE, B, ONES>(u0, left, weights, rows, acc, acc_positive);
    }
  }
}

}  // namespace dfgnn::cuda
