// Low-dimensional features of the edges, of which a row has a projection per head (EdgeAttr in params.h). The
// lanes of a head share them: lane hl has the features hl, hl + LPH, ..., so that a score takes a product or
// two more per lane before it is reduced, and a sum as many.
#pragma once

#include "walk.cuh"

namespace dfgnn::cuda {

// Where ON is false there are none, and it is never asked.
template <class C, bool ON>
struct AttrLanes {
  using T = typename C::T;
  using A = typename C::A;
  static constexpr int F = C::FEATS;

  const EdgeAttr& p;
  const char* base;  // of this lane's first feature
  uint32_t row_bytes;
  uint32_t shift[F];
  int hl;

  __device__ __forceinline__ AttrLanes(const Place<C>& me, const EdgeAttr& attr)
      : p(attr), row_bytes(uint32_t(attr.dim * sizeof(T))), hl(me.hl) {
    if constexpr (!ON) return;
    // Features that are not there are read as the first one, and their products are 0.
    base = static_cast<const char*>(attr.x) + (hl < attr.dim ? hl : 0) * sizeof(T);
    keep(base);
    keep(row_bytes);
    repeat<F>([&](int f) { shift[f] = hl + f * C::LPH < attr.dim ? f * C::LPH * uint32_t(sizeof(T)) : 0; });
  }

  // Of the edges that lanes own, all of the step's.
  template <int B, int S>
  __device__ __forceinline__ void load(const int (&eids)[S], T (&x)[B][F]) const {
    repeat<B>([&](int u) {
      const int eid = __shfl_sync(kAll, eids[u / C::LPH], u % C::LPH, C::LPH);
      const char* row = at_row(base, eid, row_bytes);
      repeat<F>([&](int f) { x[u][f] = *reinterpret_cast<const T*>(row + (f ? shift[f] : 0)); });
    });
  }
  // Of a row of [N, H, width]; 0 behind its end.
  __device__ __forceinline__ void load_row(const Place<C>& me, const void* rows, int row, A (&x)[F]) const {
    const T* from = static_cast<const T*>(rows) + int64_t(row) * p.row_stride + me.head * p.head_stride;
    repeat<F>([&](int f) {
      const int c = hl + f * C::LPH;
      x[f] = c < p.dim ? A(from[c]) : A(0);
    });
  }
  __device__ __forceinline__ A dot(const A (&rows)[F], const T (&x)[F], A sum) const {
    repeat<F>([&](int f) { sum += rows[f] * A(x[f]); });
    return sum;
  }
  __device__ __forceinline__ void axpy(A (&sum)[F], A w, const T (&x)[F]) const {
    repeat<F>([&](int f) { sum[f] += w * A(x[f]); });
  }
  // As Place::store_row, into rows [N, H, width] whose end is filled with zeros.
  __device__ __forceinline__ void store_row(const Place<C>& me, const A (&x)[F], A factor, int row, int slot,
                                            A before = 1) const {
    if (!me.writes || slot == me.kNoItem || me.chunk != 0) return;
    const int64_t first = (int64_t(slot < 0 ? row : slot) * me.heads + me.head) * p.width;
    repeat<F>([&](int f) {
      const int c = hl + f * C::LPH;
      if (c >= p.width) return;
      const A y = c < p.dim ? x[f] : A(0);
      if (slot < 0) {
        T* to = static_cast<T*>(p.sums) + first + c;
        *to = T(y * factor + (me.joins(slot) ? before * A(*to) : A(0)));
      } else {
        static_cast<A*>(p.partial)[first + c] = y;
      }
    });
  }
};

// What the pass over destinations leaves of an edge and head for the one over sources.
template <typename A>
struct alignas(2 * sizeof(A)) EdgeNumbers {
  A alpha, draw;
};

}  // namespace dfgnn::cuda
