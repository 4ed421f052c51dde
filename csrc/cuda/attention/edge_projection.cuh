// Low-dimensional features x of the edges. W x is not computed per edge; the rows of the nodes are multiplied
// by W instead (EdgeAttr in params.h). Before the main loop W^T y is computed of each row's y, which is its
// query or its grad_out, because y . (W x) = (W^T y) . x. After the loop W is multiplied with the row's sum
// of x: weighted by f alpha in forward (a), by grad_raw in backward (b). The LPH lanes of a head share an
// edge's features: lane hl holds FEATS of them, hl, hl + LPH, .... So each edge costs a lane FEATS more
// products for its score, and as many for the sum.
#pragma once

#include "../mma.cuh"
#include "main_loop.cuh"

namespace dfgnn::cuda {

// A lane's share of the features of an edge. ON = false: there are no features, and nothing but the
// constructor is called.
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
    // Lanes without a feature load the first one, which has no effect: their W^T y is 0, and their sums are
    // not stored.
    base = static_cast<const char*>(attr.x) + (hl < attr.dim ? hl : 0) * sizeof(T);
    keep(base);
    keep(row_bytes);
    repeat<F>([&](int f) { shift[f] = hl + f * C::LPH < attr.dim ? f * C::LPH * uint32_t(sizeof(T)) : 0; });
  }

  // Issues the loads x of the features of an iteration's edges, whose ids are in the second half of `index`.
  template <int B, int S>
  __device__ __forceinline__ void load(const int (&index)[S], T (&x)[B][F]) const {
    repeat<B>([&](int u) {
      const int eid = of_lane<C::LPH>(index[S / 2 + u / C::LPH], u % C::LPH);
      const char* row = at_row(base, eid, row_bytes);
      repeat<F>([&](int f) { x[u][f] = __ldg(reinterpret_cast<const T*>(row + (f ? shift[f] : 0))); });
    });
  }
  // x = this lane's features of a row of shared memory (NodeProducts); 0 where there is no such feature.
  __device__ __forceinline__ void load_row(const float* row, A (&x)[F]) const {
    repeat<F>([&](int f) {
      const int c = hl + f * C::LPH;
      // Rows are padded to a multiple of 16 features: below 16 there is nothing to test.
      x[f] = F * C::LPH <= 16 || c < p.dim ? A(row[c]) : A(0);
    });
  }
  // Returns sum + this lane's part of the product of W^T y (`onto`) with an edge's features x.
  __device__ __forceinline__ A dot(const A (&onto)[F], const T (&x)[F], A sum) const {
    repeat<F>([&](int f) { sum += onto[f] * A(x[f]); });
    return sum;
  }
  // sum += w x
  __device__ __forceinline__ void axpy(A (&sum)[F], A w, const T (&x)[F]) const {
    repeat<F>([&](int f) { sum[f] += w * A(x[f]); });
  }
  // Stores factor times the sums x of a whole row in its row of shared memory; those of a row chunk,
  // unscaled, in its partial-result slot, with zeros up to p.width.
  __device__ __forceinline__ void store_row(const Place<C>& me, const A (&x)[F], A factor, int slot,
                                            float* shared_row) const {
    __syncwarp();  // until other sub-warps have read W^T y in shared_row, which is overwritten
    if (!me.writes || slot == me.kNoItem) return;
    if (slot < 0) {
      repeat<F>([&](int f) {
        if (hl + f * C::LPH < p.dim) shared_row[hl + f * C::LPH] = x[f] * factor;
      });
      return;
    }
    A* const to = static_cast<A*>(p.partial) + (int64_t(slot) * me.heads + me.head) * p.width;
    repeat<F>([&](int f) {
      const int c = hl + f * C::LPH;
      if (c < p.width) to[c] = c < p.dim ? x[f] : A(0);
    });
  }
};

// The shape of the products below: how many rows a product takes, and how many features.
inline constexpr int kProductRows = 8, kProductFeats = 16;
// The number of features, padded to a multiple of kProductFeats.
__host__ __device__ constexpr int product_width(int dim) {
  return (dim + kProductFeats - 1) / kProductFeats * kProductFeats;
}

// Products of W with the rows of a warp's work items, by tensor cores, eight rows at a time: W^T y of nodes'
// rows y before the main loop, W a of the sums a after it. W is the left operand of m16n8k16, in the order of
// its registers (EdgeAttr); the rows y or a are the columns of the right one. Columns of a head and features
// are numbered in the product such that a lane loads and stores 16 bytes of a node's row at a time (8 where
// GROUP is 32). The lane's number is 4 g + t.
template <class C>
struct NodeProducts {
  using T = typename C::T;
  static constexpr int HEADS = 32 / C::LPH;                  // of a warp, at most
  static constexpr int BLOCKS = C::COLS / 32;                // blocks of 32 columns of a head, for W^T y
  static constexpr int GROUP = C::COLS < 64 ? C::COLS : 64;  // columns that one step of W a computes
  static constexpr int GROUPS = C::COLS / GROUP, WORDS = GROUP / 16;  // a lane's words of a row in a group

  const EdgeAttr& p;
  // items: how many a warp, or (packed) each sub-warp has; rows: those of all the warp's items. heads,
  // first_head: how many heads a sub-warp covers, and their first; all_heads: H. dim: D. width: p.dim, the
  // number of features, padded (product_width).
  const int4* records;  // of the warp's items, as in Place
  int items, rows, heads, first_head, all_heads, dim, width;
  int lane, g, t;

  __device__ __forceinline__ NodeProducts(const EdgeAttr& attr, const Shape& s, const int4* records_,
                                          int items_, int rows_, int heads_)
      : p(attr),
        records(records_),
        items(items_),
        rows(rows_),
        heads(heads_),
        first_head(blockIdx.y * heads_),
        all_heads(s.heads),
        dim(s.value_dim),
        width(product_width(attr.dim)),
        lane(threadIdx.x & 31),
        g(lane / 4),
        t(lane % 4) {}

  // For the rows of this warp's work items.
  __device__ __forceinline__ NodeProducts(const Place<C>& me, const Tiling& tiling, const Shape& s,
                                          const EdgeAttr& attr)
      : NodeProducts(attr, s, &me.record(0) - (me.packed ? me.sub * (tiling.items + 1) : 0), tiling.items,
                     tiling.items * (me.packed ? me.num_sub : 1), tiling.heads_per_tile) {}

  // This warp's share of shared memory, after the records: ARRAYS arrays [rows, heads, width].
  template <int ARRAYS>
  __device__ __forceinline__ float* shared() const {
    extern __shared__ int4 item_records[];
    return reinterpret_cast<float*>(item_records + kWarps * (rows + rows / items)) +
           (threadIdx.x >> 5) * ARRAYS * size();
  }
  // Elements of one of these arrays.
  __device__ __forceinline__ int size() const { return rows * heads * width; }

  // row_of returns the row of the warp's m-th item; if packed, the items of one sub-warp are counted after
  // those of another. there: whether there is such an item.
  struct Row {
    int row, slot;
    bool there;
  };
  __device__ __forceinline__ Row row_of(int m) const {
    const int at = min(m, rows - 1), sub = at / items;
    const int4 record = records[at + sub];  // each sub-warp's records end with an empty one
    return {record.z, record.w, m < rows && record.w != Place<C>::kNoItem};
  }
  // Whether there is such a head, counted from first_head.
  __device__ __forceinline__ bool has(int head) const {
    return head < heads && first_head + head < all_heads;
  }
  // a = the lane's registers of the at-th 16 x 16 block in w, which is p.onto or p.back.
  static __device__ __forceinline__ void load_factor(const void* w, int at, int lane, uint32_t (&a)[4]) {
    const Raw raw = load_raw(static_cast<const uint4*>(w) + (at * 32 + lane));
    repeat<4>([&](int k) { a[k] = raw.x[k]; });
  }

  // to [rows, heads, width] = W^T y of the warp's rows of y [N, H, D].
  __device__ __forceinline__ void onto(const void* y, float* to) const {
    const int steps = width / kProductFeats;
#pragma unroll 1
    for (int m0 = 0; m0 < rows; m0 += kProductRows) {
      const Row mine = row_of(m0 + g);
      const T* from = static_cast<const T*>(y) + (int64_t(mine.row) * all_heads + first_head) * dim;
      Raw raw[HEADS][BLOCKS];
      repeat<HEADS, BLOCKS>([&](int h, int b) {
        const int column = b * 32 + t * 8;
        raw[h][b] = {};
        if (mine.there && has(h) && column < dim) raw[h][b] = load_raw(from + h * dim + column);
      });
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        repeat<HEADS>([&](int h) {
          if (!has(h)) return;
          float c[4] = {};
          const int first = ((first_head + h) * steps + step) * BLOCKS;
          repeat<BLOCKS, 2>([&](int b, int s) {
            uint32_t w[4];
            load_factor(p.onto, (first + b) * 2 + s, lane, w);
            multiply<T>(c, w, raw[h][b].x[2 * s], raw[h][b].x[2 * s + 1]);
          });
          repeat<4>([&](int k) {
            const int m = m0 + 2 * t + k % 2;
            if (m < rows) to[(m * heads + h) * width + step * kProductFeats + k / 2 * 8 + g] = c[k];
          });
        });
      }
    }
  }

  // Adds factor W a to the warp's rows of y [N, H, D] that are not split, for the sums a in shared memory
  // (`from`). Also writes a to `sums` [N, H, p.width], unless this is null. What y holds was written by this
  // warp, or by an earlier launch; therefore no barrier of the block is needed, only loads past the L1 cache.
  __device__ __forceinline__ void back(const float* from, void* y, float factor, void* sums) const {
    const int steps = width / kProductFeats;
#pragma unroll 1
    for (int m0 = 0; m0 < rows; m0 += kProductRows) {
      uint32_t old[HEADS][GROUPS][2][WORDS] = {};
      uint32_t* to[2];
      bool there[2];
      const Row mine = row_of(m0 + g);
      const bool keeps = sums && mine.there && mine.slot < 0;
      T* const kept = static_cast<T*>(sums) + (int64_t(mine.row) * all_heads + first_head) * p.width + 4 * t;
      repeat<2>([&](int j) {
        const Row row = row_of(m0 + 2 * t + j);
        there[j] = row.there && row.slot < 0;
        to[j] = reinterpret_cast<uint32_t*>(static_cast<T*>(y) +
                                            (int64_t(row.row) * all_heads + first_head) * dim);
      });
      // Calls f(head, group, row j, address) for the words of y that this lane updates, of two rows.
      const auto each = [&](auto f) {
        repeat<HEADS, GROUPS>([&](int h, int n) {
          repeat<2>([&](int j) {
            const int column = n * GROUP + g * (2 * WORDS);
            if (there[j] && has(h) && column < dim) f(h, n, j, to[j] + (h * dim + column) / 2);
          });
        });
      };
      each([&](int h, int n, int j, const uint32_t* at) {
        if constexpr (WORDS == 4) {
          const Raw raw = read_raw(at);
          repeat<4>([&](int k) { old[h][n][j][k] = raw.x[k]; });
        } else {
          const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(at));
          old[h][n][j][0] = raw.x, old[h][n][j][1] = raw.y;
        }
      });
      repeat<HEADS, GROUPS>([&](int h, int n) {
        if (!has(h)) return;
        float c[WORDS][4];
        repeat<WORDS, 2>([&](int k, int j) {
          const float2 before = unpack_two<T>(old[h][n][j][k]);
          c[k][j] = before.x, c[k][2 + j] = before.y;
        });
        const float* a = from + (min(m0 + g, rows - 1) * heads + h) * width + 4 * t;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          const float4 v = *reinterpret_cast<const float4*>(a + step * kProductFeats);
          const int feat = step * kProductFeats;
          if (n == 0 && keeps && feat + 4 * t < p.width)
            *reinterpret_cast<uint2*>(kept + h * p.width + feat) =
                make_uint2(pack_two<T>(v.x, v.y), pack_two<T>(v.z, v.w));
          const uint32_t b0 = pack_two<T>(factor * v.x, factor * v.y);
          const uint32_t b1 = pack_two<T>(factor * v.z, factor * v.w);
          const int first = (((first_head + h) * GROUPS + n) * steps + step) * WORDS;
          repeat<WORDS>([&](int k) {
            uint32_t w[4];
            load_factor(p.back, first + k, lane, w);
            multiply<T>(c[k], w, b0, b1);
          });
        }
        repeat<WORDS, 2>([&](int k, int j) { old[h][n][j][k] = pack_two<T>(c[k][j], c[k][2 + j]); });
      });
      each([&](int h, int n, int j, uint32_t* at) {
        if constexpr (WORDS == 4) {
          store_raw(at, {{old[h][n][j][0], old[h][n][j][1], old[h][n][j][2], old[h][n][j][3]}});
        } else {
          *reinterpret_cast<uint2*>(at) = make_uint2(old[h][n][j][0], old[h][n][j][1]);
        }
      });
    }
  }
};

// Where in NodeProducts' arrays of shared memory the rows of a lane's items and head are. Only this, and not
// NodeProducts, stays in registers during the main loop. row(n, k): that of the n-th item in the k-th array.
template <class C>
struct ItemFeatures {
  uint32_t first = 0, stride = 0, array = 0;  // bytes
  ItemFeatures() = default;
  __device__ __forceinline__ ItemFeatures(const Place<C>& me, const NodeProducts<C>& products,
                                          const float* at)
      : stride(products.heads * products.width * uint32_t(sizeof(float))),
        array(products.size() * uint32_t(sizeof(float))) {
    const int skipped = me.packed ? me.sub * products.items * products.heads : 0;
    first = shared_address(at + (skipped + me.head - products.first_head) * products.width);
    keep(first);
  }
  __device__ __forceinline__ float* row(int n, int k = 0) const {
    return static_cast<float*>(__cvta_shared_to_generic(first + n * stride + k * array));
  }
};

// Adds factor W a to the split rows of y [N, H, D] after they were merged, where a is a row of p.sums. A warp
// takes 8 split rows, blockIdx.y is a group of `heads` heads. The warp writes records, as Place does, and
// copies the rows of p.sums to shared memory, because NodeProducts reads both there.
template <class C>
__global__ void __launch_bounds__(kThreads)
    project_splits_kernel(const EdgeAttr p, const Shape shape, const Csr csr, int heads, void* y,
                          double factor) {
  follow();
  using T = typename C::T;
  extern __shared__ int4 item_records[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int4* const records = item_records + warp * (kProductRows + 1);
  const int64_t split = (int64_t(blockIdx.x) * kWarps + warp) * kProductRows + lane;
  if (lane < kProductRows) {
    const bool there = split < csr.num_splits && csr.splits[split].slot_begin < csr.splits[split].slot_end;
    records[lane] = make_int4(0, 0, there ? csr.splits[split].row : 0, there ? kWhole : Place<C>::kNoItem);
  }
  __syncwarp();
  const NodeProducts<C> products(p, shape, records, kProductRows, kProductRows, heads);
  float* const a =
      reinterpret_cast<float*>(item_records + kWarps * (kProductRows + 1)) + warp * products.size();
  const T* const sums = static_cast<const T*>(p.sums);
  for (int k = lane; k < products.size(); k += 32) {
    const int c = k % products.width, head = k / products.width % heads;
    const auto row = products.row_of(k / products.width / heads);
    a[k] = row.there && products.has(head) && c < p.width
               ? float(sums[(int64_t(row.row) * shape.heads + products.first_head + head) * p.width + c])
               : 0.0f;
  }
  __syncwarp();
  products.back(a, y, float(factor), nullptr);
}

}  // namespace dfgnn::cuda
