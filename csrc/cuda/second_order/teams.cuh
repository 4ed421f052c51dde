// How lanes share the work on a row, in both passes of the backward of attention's backward.
//
// A team takes whole rows: it is a warp, or, for rows that the plan splits, a block of kTeamWarps warps. Its
// lanes share the work in two ways:
//   columns: a head takes a power of two of lanes, each with 16 bytes of columns at a time. As many heads as
//     fit into a warp form a tile, and further heads go to grid.y. The lanes of a tile cover an edge's rows,
//     and the tiles of the team take the row's edges in turn.
//   numbers: a lane has an edge and one of the tile's heads.
// Sums over edges are added up over the team at the end, in an order that depends on the shape and the plan
// alone.
#pragma once

#include "../../core/second_order.h"
#include "../attention/edge_options.cuh"
#include "../attention/lanes.cuh"

namespace dfgnn::cuda {

inline constexpr int kTeamWarps = 16;
// How many warps a block has: those of one team, or kWarps teams that are a warp each.
constexpr int block_warps(int team) { return team == 1 ? kWarps : team; }

struct HeadTile {
  int lanes, heads;  // lanes of a head; heads of a tile. Both are powers of two
};

// A row and its edges in a CSR.
struct RowEdges {
  int row, begin, end;
};

// A range of edges is stored as {mirrored(begin), end}. Both numbers only rise while work items are added, so
// that memory may start as zeros.
__device__ __forceinline__ int mirrored(int begin) { return 0x7fffffff - begin; }

// So many edges of a lane are added up before their sum is added to the row's: a sum of thousands of numbers,
// one after the other, would be rounded as often.
inline constexpr int kAtOnce = 64;

// A lane's head, and the edges that it takes: the slot-th one and every slots-th from there on.
struct Share {
  int head, slot, slots;
  bool ok;  // whether there is such a head

  // sum += the sum of what f(place of an edge, sum) adds, over this lane's edges of a row.
  template <class Sum, class F>
  __device__ __forceinline__ void add_edges(const RowEdges& row, Sum& sum, F f) const {
    for (int at = row.begin + slot; at < row.end;) {
      Sum part;
      for (int k = 0; k < kAtOnce && at < row.end; ++k, at += slots) f(at, part);
      sum += part;
    }
  }
};

// N sums, which begin as 0.
template <typename A, int N>
struct Numbers {
  A x[N] = {};
  __device__ __forceinline__ void operator+=(const Numbers& other) {
    repeat<N>([&](int k) { x[k] += other.x[k]; });
  }
};

template <typename T, int WARPS>
struct Team {
  using A = Acc<T>;
  static constexpr int V = kVec<T>;
  int number;  // of the team in the grid
  int lane, warp;
  HeadTile tile;
  int heads, dim;
  Share columns, numbers;
  int column, step;  // of the lane's loads

  __device__ __forceinline__ Team(const Shape& s, HeadTile tile_)
      : lane(threadIdx.x & 31), tile(tile_), heads(s.heads), dim(s.value_dim) {
    const int own = threadIdx.x >> 5, covered = tile.lanes * tile.heads;
    warp = WARPS == 1 ? 0 : own;
    number = WARPS == 1 ? int(blockIdx.x) * kWarps + own : int(blockIdx.x);
    columns = share(lane / tile.lanes, covered);
    columns.slot = warp * columns.slots / WARPS + lane / covered;
    numbers = share(lane, tile.heads);
    numbers.slot = warp * numbers.slots / WARPS + lane / tile.heads;
    column = lane % tile.lanes * V, step = tile.lanes * V;
  }
  __device__ __forceinline__ void sync() const {
    if constexpr (WARPS == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // Whether this lane writes what all of the team's lanes for its columns have in common.
  __device__ __forceinline__ bool writes() const { return columns.ok && columns.slot == 0; }
  // Elements before this lane's head in the given row of an array [.., H, D].
  __device__ __forceinline__ int64_t head_of_row(int row) const {
    return (int64_t(row) * heads + columns.head) * dim;
  }

  // Adds up x over the lanes of the team that differ by a multiple of `period`; all of them get the sum.
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
  template <int N>
  __device__ __forceinline__ void add_up_columns(A (&x)[N]) const {
    add_up(x, tile.lanes * tile.heads);
  }

  // Calls f(RowEdges) for the rows of the team: of those that the plan does not split, or of those that it
  // splits. ranges: [rows], where the edges of a row begin and end, or null if each row is one work item.
  template <class F>
  __device__ __forceinline__ void for_rows(const Csr& csr, const int2* ranges, F f) const {
    const int64_t count = WARPS == 1 ? csr.num_items : csr.num_splits;
    const int64_t teams = int64_t(gridDim.x) * (WARPS == 1 ? kWarps : 1);
    for (int64_t k = number; k < count; k += teams) {
      RowEdges row;
      if constexpr (WARPS == 1) {
        const int4 item = __ldg(reinterpret_cast<const int4*>(csr.items) + k);
        if (item.x < 0 || item.w != kWhole) continue;
        row = {item.x, item.y, item.z};
      } else {
        const Split split = csr.splits[k];
        if (split.slot_begin == split.slot_end) continue;
        row = {split.row, 0, 0};
      }
      if (ranges) {
        const int2 range = __ldg(ranges + row.row);
        row.begin = mirrored(range.x), row.end = range.y;
      }
      f(row);
    }
  }

 private:
  __device__ __forceinline__ Share share(int head_lane, int period) const {
    const int head = int(blockIdx.y) * tile.heads + head_lane % tile.heads;
    return {head < heads ? head : heads - 1, 0, 32 / period * WARPS, head < heads};
  }
};

// Loads 16 bytes of a table of T as numbers; zeros if there is no table.
template <typename T>
__device__ __forceinline__ void load_columns(const void* table, int64_t at, Acc<T> (&x)[kVec<T>]) {
  Raw raw{};
  if (table) raw = load_raw(static_cast<const T*>(table) + at);
  Pack<T>::unpack(raw, x);
}
// The same for a table in the accumulation type.
template <typename T>
__device__ __forceinline__ void load_numbers(const void* table, int64_t at, Acc<T> (&x)[kVec<T>]) {
  repeat<kVec<T>>([&](int v) { x[v] = table ? static_cast<const Acc<T>*>(table)[at + v] : Acc<T>(0); });
}
template <typename T>
__device__ __forceinline__ void store_columns(void* table, int64_t at, const Acc<T> (&x)[kVec<T>]) {
  store_raw(static_cast<T*>(table) + at, Pack<T>::pack(x));
}

}  // namespace dfgnn::cuda
