// How lanes share the work on a row of the CSR (a node and its edges), in both passes of the backward of
// attention's backward.
//
// A *team* takes whole rows: it is a warp, or, for rows that the plan splits, a block of kTeamWarps warps.
// Its lanes share a row in two ways (Share):
//   by_columns: a head takes a power of two of lanes, each with 16 bytes of a feature row at a time. As many
//     heads as fit into a warp form a *tile*, and further heads go to grid.y. The lanes of one tile are a
//     *copy*: a warp holds 32 / (lanes of a head * heads of a tile) copies, and the copies of the team take
//     the row's edges in turn.
//   by_edges: a lane takes an edge and one of the tile's heads at a time.
// At the end the lanes' sums over their edges are added up over the team, in an order that depends on the
// shape and the plan alone.
#pragma once

#include "../../core/second_order_params.h"
#include "../attention/edge_options.cuh"
#include "../attention/lanes.cuh"

namespace dfgnn::cuda {

inline constexpr int kTeamWarps = 16;
// How many warps a block has, for teams of `team` warps: a team of one warp shares its block with others.
constexpr int block_warps(int team) { return team == 1 ? kWarps : team; }

struct HeadTile {
  int lanes, heads;  // lanes of a head; heads of a tile. Both are powers of two
};

// A row and its edges, which have the positions begin ... end - 1 in the CSR.
struct RowEdges {
  int row, begin, end;
};

// A row's range of edges is found from its work items (second_order.cu), and stored as {mirrored(begin),
// end}: the maxima of both over the work items, for which memory may start as zeros. mirrored is its own
// inverse.
__device__ __forceinline__ int mirrored(int begin) { return 0x7fffffff - begin; }

// How many of its edges a lane adds up before it adds their sum to the row's: in one sum over thousands of
// edges the rounding errors of all additions would accumulate.
inline constexpr int kAtOnce = 64;

// What a lane takes in one of the two ways: a head, and the edges slot, slot + slots, slot + 2 slots, ... of
// a row.
struct Share {
  int head, slot, slots;
  bool ok;  // whether the lane's head exists; else `head` is the last one, whose addresses are valid

  // Adds this lane's edges of a row to `sum`. The caller's f(at, part) adds the edge at position `at` of the
  // CSR to `part`, which starts at 0 and is added to `sum` after at most kAtOnce edges.
  template <class Sum, class F>
  __device__ __forceinline__ void add_edges(const RowEdges& row, Sum& sum, F f) const {
    for (int at = row.begin + slot; at < row.end;) {
      Sum part;
      for (int k = 0; k < kAtOnce && at < row.end; ++k, at += slots) f(at, part);
      sum += part;
    }
  }
};

// N sums, which start at 0.
template <typename A, int N>
struct Sums {
  A x[N] = {};
  __device__ __forceinline__ void operator+=(const Sums& other) {
    repeat<N>([&](int k) { x[k] += other.x[k]; });
  }
};

// This lane's place in its team of WARPS warps, and what the team does together.
template <typename T, int WARPS>
struct Team {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  int id;          // index of the team among those of the same heads (blockIdx.y)
  int lane, warp;  // index of the lane in its warp, and of the warp in the team
  HeadTile tile;
  int heads, dim;  // H; D, which equals Dv on CUDA and is a multiple of V: no load crosses the end of a head
  Share by_columns, by_edges;  // what this lane takes in either way (head of this file)
  int column, step;  // the first column of its head that the lane loads, and the distance to the next ones

  __device__ __forceinline__ Team(const Shape& s, HeadTile tile_)
      : lane(threadIdx.x & 31), tile(tile_), heads(s.heads), dim(s.value_dim) {
    const int own = threadIdx.x >> 5, covered = tile.lanes * tile.heads;  // covered: lanes of a copy
    warp = WARPS == 1 ? 0 : own;
    id = WARPS == 1 ? int(blockIdx.x) * kWarps + own : int(blockIdx.x);
    by_columns = share(lane / tile.lanes, covered);
    by_columns.slot = warp * by_columns.slots / WARPS + lane / covered;
    by_edges = share(lane, tile.heads);
    by_edges.slot = warp * by_edges.slots / WARPS + lane / tile.heads;
    column = lane % tile.lanes * V, step = tile.lanes * V;
  }
  // Waits for all lanes of the team, and makes what they wrote to memory visible to one another.
  __device__ __forceinline__ void sync() const {
    if constexpr (WARPS == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // Whether this lane writes results: its head exists, and the lane is in the first of the team's copies,
  // which all have the same sums after add_up_columns.
  __device__ __forceinline__ bool writes() const { return by_columns.ok && by_columns.slot == 0; }
  // The index at which this lane's head begins in the given row of an array [.., H, D].
  __device__ __forceinline__ int64_t head_of_row(int row) const {
    return (int64_t(row) * heads + by_columns.head) * dim;
  }

  // Replaces each x[k] by its sum over the lanes of the team, in all of its warps, whose indices differ by a
  // multiple of `period`. All lanes of the team must call it.
  template <int N>
  __device__ __forceinline__ void add_up(A (&x)[N], int period) const {
    for (int o = period; o < 32; o *= 2) repeat<N>([&](int k) { x[k] += __shfl_xor_sync(kAll, x[k], o); });
    if constexpr (WARPS > 1) {
      __shared__ A sums[WARPS][N][32];
      __syncthreads();
      repeat<N>([&](int k) { sums[warp][k][lane] = x[k]; });
      __syncthreads();
      repeat<N>([&](int k) {
        x[k] = 0;
        repeat<WARPS>([&](int w) { x[k] += sums[w][k][lane]; });
      });
    }
  }
  // Replaces each x[k] by its sum over the copies of the team: over the lanes that have the same head and
  // columns, but other edges. All lanes of the team must call it.
  template <int N>
  __device__ __forceinline__ void add_up_columns(A (&x)[N]) const {
    add_up(x, tile.lanes * tile.heads);
  }

  // Calls f(RowEdges) for the rows that this team takes: with WARPS = 1 these are rows that
  // the plan leaves whole, with kTeamWarps those that it splits; a launch deals them out to its teams.
  // ranges: {mirrored(begin), end} of each row, which replace begin and end of its work item; or null if each
  // row is one work item.
  template <class F>
  __device__ __forceinline__ void for_rows(const Csr& csr, const int2* ranges, F f) const {
    const int64_t count = WARPS == 1 ? csr.num_items : csr.num_splits;
    const int64_t teams = int64_t(gridDim.x) * (WARPS == 1 ? kWarps : 1);
    for (int64_t k = id; k < count; k += teams) {
      RowEdges row;
      if constexpr (WARPS == 1) {
        // An Item as int4: x, y, z, w are row, begin, end, slot; it is unused if row < 0. Each row that is
        // not split has one item with kWhole. Its items with kJoins are skipped: its range has their edges.
        const int4 item = __ldg(reinterpret_cast<const int4*>(csr.items) + k);
        if (item.x < 0 || item.w != kWhole) continue;
        row = {item.x, item.y, item.z};
      } else {
        const Split split = csr.splits[k];
        if (split.slot_begin == split.slot_end) continue;  // the split is unused
        row = {split.row, 0, 0};                           // `ranges`, which splits need, has the edges
      }
      if (ranges) {
        const int2 range = __ldg(ranges + row.row);
        row.begin = mirrored(range.x), row.end = range.y;
      }
      f(row);
    }
  }

 private:
  // Returns a lane's Share, in which the caller sets `slot`. head_lane: the lane's head, counted over the
  // warp; period: how many lanes take all heads of one edge.
  __device__ __forceinline__ Share share(int head_lane, int period) const {
    const int head = int(blockIdx.y) * tile.heads + head_lane % tile.heads;
    return {head < heads ? head : heads - 1, 0, 32 / period * WARPS, head < heads};
  }
};

// x = the kVec<T> elements of an array of T from index `at` on, as Acc<T>; zeros if the array is null.
template <typename T>
__device__ __forceinline__ void load_columns(const void* table, int64_t at, Acc<T> (&x)[kVec<T>]) {
  Raw raw{};
  if (table) raw = load_raw(static_cast<const T*>(table) + at);
  Pack<T>::unpack(raw, x);
}
// x = the kVec<T> elements of an array of Acc<T> from index `at` on; zeros if the array is null.
template <typename T>
__device__ __forceinline__ void load_acc_columns(const void* table, int64_t at, Acc<T> (&x)[kVec<T>]) {
  repeat<kVec<T>>([&](int v) { x[v] = table ? static_cast<const Acc<T>*>(table)[at + v] : Acc<T>(0); });
}
// Stores x, converted to T, as the kVec<T> elements of an array of T from index `at` on.
template <typename T>
__device__ __forceinline__ void store_columns(void* table, int64_t at, const Acc<T> (&x)[kVec<T>]) {
  store_raw(static_cast<T*>(table) + at, Pack<T>::pack(x));
}

}  // namespace dfgnn::cuda
