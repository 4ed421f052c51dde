// How the lanes of a warp share the work on its edges. The words, steps and names that all kernels on
// rows have in common: csrc/cuda/README.md.
//
// A *sub-warp* of `lanes` = heads_per_tile * LPH lanes covers the row of one neighbour: LPH lanes per head,
// NV loads of 16 bytes per lane. A warp holds 32 / lanes sub-warps. They take the edges of one row in turn,
// or (packed) each sub-warp takes a row of its own. A sub-warp computes CHUNK edges per iteration, in two
// phases:
//   scores, edge-parallel: lane hl of a head owns the edges hl, hl + LPH, ... of the chunk for its head, so
//     that an edge and head takes one index, one score and one exponential. Where a score is a sum over
//     columns, each lane of the head first adds up its own columns of every edge; reduce_scatter then adds up
//     the lanes' sums, each in the lane that owns the edge;
//   sums, feature-parallel: a lane owns columns. Weights and indices are shuffled from the lanes that own the
//     edges.
// Shared memory holds the records of the work items, with projected features the rows' products with W
// (NodeProducts), and in backward of additive_v2 the warps' shares of grad_attn: its size does not depend on
// the degrees of nodes. A warp takes several work items (main_loop.cuh) and reads all their records at the
// start.
#pragma once

#include "../../core/params.h"
#include "../accumulate.cuh"
#include "../vec.cuh"
#include "edge_options.cuh"

namespace dfgnn::cuda {

inline constexpr int kWarps = 4;  // warps of a block
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kAll = 0xffffffffu;

// Divides numbers below 2^31 by `value` >= 2, which is known when a kernel is launched, with a multiplication
// in place of a division.
struct Divisor {
  uint32_t value, multiplier;  // multiplier = ceil(2^(32 + shift) / value)
  int shift;
  Divisor() = default;
  explicit Divisor(uint32_t by) : value(by), shift(0) {
    while ((uint64_t(2) << shift) < by) ++shift;
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + by - 1) / by);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const { return __umulhi(x, multiplier) >> shift; }
};

// How work is distributed over the grid. Heads beyond one sub-warp go to grid.y, columns of a head beyond the
// LPH * NV loads of a sub-warp to grid.z. A window is a stretch of about as many blocks as are resident at a
// time, and the work items of a warp are one window apart: warps that run at the same time then take items
// that are near each other in the schedule's order, and where this order is by length, no warp gets long
// items only.
struct Tiling {
  int lanes_log2;      // log2 of the lanes of a sub-warp
  int heads_per_tile;  // heads of a sub-warp, lanes / LPH
  int chunks;          // grid.z: blocks that share the columns of a head, a chunk of columns each
  int items;           // work items of a warp, or (packed) of each of its sub-warps
  Divisor window;      // blocks of a window
  __host__ __device__ int lanes() const { return 1 << lanes_log2; }
};

// Keeps a value in a register. Without this the compiler computes it from the parameters again for every
// edge, or folds it where it is a constant.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(const char*& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void keep(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void keep(double& x) { asm volatile("" : "+d"(x)); }

// Returns x. Makes the compiler compute what depends on x again in every iteration: for addresses this costs
// less than registers that hold them over the loop.
__device__ __forceinline__ uint32_t again(uint32_t x) {
  keep(x);
  return x;
}
// base + row * bytes in one instruction. Written in C++, the product gets 64-bit factors within a loop.
template <typename P>
__device__ __forceinline__ P* at_row(P* base, uint32_t row, uint32_t bytes) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(row), "r"(bytes));
  return base + product;
}

// B: how many rows of neighbours a sub-warp has in flight. More of them would cost occupancy, which hides
// latency better (benchmarks/LOG.md).
template <typename T_, int LPH_, int NV_,
          int B_ = NV_ == 1   ? 4
                   : NV_ == 2 ? 2
                              : 1>
struct Config {
  using T = T_;
  using A = Acc<T>;
  static constexpr int LPH = LPH_, NV = NV_, B = B_, VEC = kVec<T>, COLS = LPH * NV * VEC;
  static constexpr bool WIDE = LPH == 32 && NV == 4;  // only these heads may be cut into chunks of columns
  static_assert(!WIDE || LPH * NV * 16 == kWideBytes);
  static constexpr int FEATS = LPH < 8 ? 16 / LPH : 2;  // projected features of an edge that a lane holds
};

// Layouts whose kernels take projected features (EdgeAttr). For float32 there are none: projecting at the
// nodes was no faster there (benchmarks/LOG.md).
template <class C>
inline constexpr bool kProjects = C::NV == 1 && C::LPH >= 4 && sizeof(typename C::T) == 2;

// A class of register need, which kMinBlocks goes by, named after about how many rows of T or A a lane holds
// beside the neighbours' rows in flight. sums: accumulators alone, as no score is computed; many_rows: five
// or more; most_rows: additive_v2 over sources with feature rows of the edges.
enum class Held { sums, one_row, two_rows, four_rows, many_rows, most_rows };

// How many blocks a multiprocessor must be able to hold, as measured. This caps registers, because occupancy
// hides latency better than registers do. Layouts with several loads per lane, and double, have no cap (1).
template <class C, Held HELD>
inline constexpr int kMinBlocks = C::NV > 1 || sizeof(typename C::T) == 8 ? 1
                                  : HELD == Held::most_rows               ? 3
                                  : HELD == Held::sums                    ? (C::LPH == 1 ? 4 : 6)
                                  // A head's only lane holds a score and statistics of every edge in flight.
                                  : C::LPH == 1                ? (HELD == Held::one_row     ? 5
                                                                  : HELD == Held::many_rows ? 3
                                                                                            : 4)
                                  : sizeof(typename C::T) == 4 ? (HELD == Held::many_rows   ? 5
                                                                  : HELD == Held::four_rows ? 6
                                                                                            : 8)
                                  : HELD == Held::one_row      ? 7
                                  : HELD == Held::many_rows    ? 4
                                                               : 5;

// How many edges are distributed over the lanes of a head: those of a chunk of edges, rounded up to a power
// of two.
constexpr int share_of(int chunk) {
  int n = 1;
  while (n < chunk) n *= 2;
  return n;
}
// How many lanes of a head own different edges of a chunk.
constexpr int period_of(int chunk, int lanes) { return share_of(chunk) < lanes ? share_of(chunk) : lanes; }

// Reduce-scatter of v over the LPH lanes of a head. Afterwards v[s] holds the total of entry s * LPH + hl (N
// >= LPH), or v[0] that of entry hl % N (N < LPH). Where N <= LPH it takes N - 1 + log2(LPH / N) shuffles
// rather than N log2 LPH.
template <int N, int LPH, typename A>
__device__ __forceinline__ void reduce_scatter(A (&v)[N], int hl) {
  constexpr int W = N < LPH ? N : LPH;
  constexpr int S = N / W;
#pragma unroll
  for (int o = W / 2; o > 0; o /= 2) {
    const bool upper = hl & o;
#pragma unroll
    for (int s = 0; s < S; ++s) {
#pragma unroll
      for (int w = 0; w < o; ++w) {
        const A low = v[s * 2 * o + w], high = v[s * 2 * o + w + o];
        const A keep = upper ? high : low, send = upper ? low : high;
        v[s * o + w] = keep + __shfl_xor_sync(kAll, send, o);
      }
    }
  }
#pragma unroll
  for (int o = W; o < LPH; o *= 2) {
#pragma unroll
    for (int s = 0; s < S; ++s) v[s] += __shfl_xor_sync(kAll, v[s], o);
  }
}

// Programmatic dependent launch: a kernel may start while the one before it in the stream ends. Every kernel
// that is launched in this way (launch.cuh) begins with this function (kernels on rows: Place's constructor),
// which waits until the results of the kernel before are written, and allows the next kernel to start.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns the value that v has in lane `lane` of the LPH lanes of a head.
template <int LPH, typename A>
__device__ __forceinline__ A of_lane(A v, int lane) {
  if constexpr (LPH == 1) return v;
  return __shfl_sync(kAll, v, lane, LPH);
}

// Returns the sum of v over WIDTH consecutive lanes, in all of them.
template <int WIDTH, typename A>
__device__ __forceinline__ A reduce_sum(A v) {
#pragma unroll
  for (int o = WIDTH / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAll, v, o);
  return v;
}
// Returns the maximum of v over WIDTH consecutive lanes, in all of them.
template <int WIDTH, typename A>
__device__ __forceinline__ A reduce_max(A v) {
#pragma unroll
  for (int o = WIDTH / 2; o > 0; o /= 2) v = max(v, __shfl_xor_sync(kAll, v, o));
  return v;
}

// This lane's columns of the rows of one array.
template <class C>
struct Rows {
  const char* base;
  uint32_t row_bytes;
  uint32_t shift[C::NV];  // bytes from the lane's first load to its k-th
  // Loads without a predicate: callers pass a row that exists, and do not use columns outside the head.
  __device__ __forceinline__ Raw load(int row, int k) const {
    return load_raw(at_row(base, row, row_bytes) + (k ? shift[k] : 0));
  }
};

// An array with an X per row and head, for this lane's head.
template <typename X>
struct Terms {
  const char* base;
  uint32_t row_bytes;
  __device__ __forceinline__ const X* at(int row) const {
    return reinterpret_cast<const X*>(at_row(base, row, row_bytes));
  }
};

// The edges of a work item that one sub-warp takes: those at the positions first + k * stride of the CSR, for
// k < count. The stride is Place::stride.
struct Range {
  int first, count;
};

// The place of a lane: its sub-warp, head and columns, and the work item that it is at.
template <class C>
struct Place : Range {
  using T = typename C::T;
  using A = typename C::A;

  // sub: which of the warp's num_sub = 1 << sub_log2 sub-warps. hl: the lane's number in its head. head: the
  // lane's head, or the last of `heads` where there is none (not head_ok). writes: this lane stores results
  // of the row. dim, row_bytes: columns of a head, bytes of a row. column, first_byte: where the lane's first
  // load begins, in the head and in the row. chunk: which chunk of columns of a wide head. row: the node of
  // the item that the place is at. packed: each sub-warp takes items of its own; stride: Range.
  int sub, num_sub, hl, head, heads;
  bool head_ok, writes;
  uint32_t row_bytes;
  int column, dim, chunk;
  uint32_t first_byte;
  int row, stride;
  int sub_log2;
  bool packed;
  uint32_t records;  // address in shared memory of the items' records: begin, length, row, slot
  static constexpr int kNoItem = -3;  // the slot in the record of an item that does not exist

  __device__ __forceinline__ Place(const Tiling& t, const Shape& s, int dim_, const Csr& csr) {
    follow();
    const int lane = threadIdx.x & 31;
    sub_log2 = 5 - t.lanes_log2;
    dim = dim_;
    heads = s.heads;
    num_sub = 1 << sub_log2;
    sub = lane >> t.lanes_log2;
    hl = lane % C::LPH;
    head = blockIdx.y * t.heads_per_tile + (lane & (t.lanes() - 1)) / C::LPH;
    head_ok = head < heads;
    if (!head_ok) head = heads - 1;
    chunk = blockIdx.z;
    column = chunk * C::COLS + hl * C::VEC;
    row_bytes = uint32_t(heads) * dim * uint32_t(sizeof(T));
    keep(row_bytes);
    // Lanes outside the head load its first column instead.
    first_byte = (uint32_t(head) * dim + (column < dim ? column : 0)) * uint32_t(sizeof(T));
    packed = csr.packed;
    stride = packed ? 1 : num_sub;
    writes = head_ok && (packed || sub == 0);

    // Each lane reads the record of one item of its warp or sub-warp. The record after the last one is empty,
    // because loads ahead look at the item after the last one.
    const int group = packed ? lane & ~(t.lanes() - 1) : 0, n = lane - group, warp = threadIdx.x >> 5;
    const unsigned turn = t.window.quotient(blockIdx.x), place = blockIdx.x - turn * t.window.value;
    int64_t index = (int64_t(turn * t.items + n) * t.window.value + place) * kWarps + warp;
    if (packed) index = (index << sub_log2) + sub;
    int4 record = make_int4(0, 0, 0, kNoItem);
    if (n < t.items && index < csr.num_items) {
      const int4 raw = __ldg(reinterpret_cast<const int4*>(csr.items) + index);
      if (raw.x >= 0)
        record = make_int4(raw.y, raw.z - raw.y, raw.x, raw.w);  // else the plan did not need this item
    }
    extern __shared__ int4 item_records[];
    int4* const own = item_records + (packed ? (warp << sub_log2) + sub : warp) * (t.items + 1);
    if (n <= t.items) own[n] = record;
    __syncwarp();
    records = uint32_t(__cvta_generic_to_shared(own));
    keep(records);
  }

  // The record of the n-th item of this lane's warp or (packed) sub-warp.
  __device__ __forceinline__ const int4& record(int n) const {
    return static_cast<const int4*>(__cvta_shared_to_generic(records))[n];
  }
  // The slot of the n-th item: of a partial result, or one of kWhole, kJoins and kNoItem.
  __device__ __forceinline__ int slot_of(int n) const { return record(n).w; }
  // The edges of the n-th item that this sub-warp takes.
  __device__ __forceinline__ Range range_of(int n) const {
    const int begin = record(n).x, length = record(n).y;
    return packed ? Range{begin, length} : Range{begin + sub, (length - sub + num_sub - 1) >> sub_log2};
  }
  // Moves this place to the n-th item.
  __device__ __forceinline__ void take(int n) {
    static_cast<Range&>(*this) = range_of(n);
    row = record(n).z;
  }
  // Whether some sub-warp has more than k edges of the item. It is a vote, which tells the compiler that the
  // lanes of the warp stay together.
  __device__ __forceinline__ bool any(int k) const { return __any_sync(kAll, count > k); }

  // Whether the k-th load of this lane lies inside the head.
  __device__ __forceinline__ bool inside(int k) const {
    return head_ok && column + k * C::LPH * C::VEC < dim;
  }

  // This lane's columns of the rows of `array`. Lanes outside the head load its first column instead.
  __device__ __forceinline__ Rows<C> rows(const void* array) const {
    Rows<C> r;
    r.base = static_cast<const char*>(array) + again(first_byte);
    keep(r.base);
    r.row_bytes = row_bytes;
    repeat<C::NV>([&](int k) { r.shift[k] = column + k * C::LPH * C::VEC < dim ? k * C::LPH * 16 : 0; });
    return r;
  }
  // The X of this lane's head in the rows of `array` [rows, H].
  template <typename X>
  __device__ __forceinline__ Terms<X> terms(const void* array) const {
    Terms<X> r{static_cast<const char*>(array) + head * int64_t(sizeof(X)), uint32_t(heads * sizeof(X))};
    keep(r.base);
    keep(r.row_bytes);
    return r;
  }
  // The address of the X of this lane's head in one row of `array` [rows, H].
  template <typename X>
  __device__ __forceinline__ X* at(void* array, int row) const {
    return reinterpret_cast<X*>(at_row(static_cast<char*>(array) + again(uint32_t(head * sizeof(X))), row,
                                       uint32_t(heads * sizeof(X))));
  }
  template <typename X>
  __device__ __forceinline__ const X* at(const void* array, int row) const {
    return at<X>(const_cast<void*>(array), row);
  }
  // The address of this lane's k-th load of a row.
  __device__ __forceinline__ char* address(void* array, int row, int k) const {
    return at_row(static_cast<char*>(array) + offset(k), row, row_bytes);
  }
  // Bytes from the beginning of a row to this lane's k-th load.
  __device__ __forceinline__ uint32_t offset(int k) const { return again(first_byte) + k * C::LPH * 16; }
  // x = this lane's columns of a row, as loaded.
  __device__ __forceinline__ void load_row(const void* array, Raw (&x)[C::NV], int row) const {
    const Rows<C> source = rows(array);
    repeat<C::NV>([&](int k) { x[k] = source.load(row, k); });
  }
  // x = factor * the loaded row, and 0 outside the head.
  __device__ __forceinline__ void unpack_row(const Raw (&raw)[C::NV], A (&x)[C::NV][C::VEC], A factor) const {
    repeat<C::NV>([&](int k) { Pack<T>::unpack(raw[k], x[k]); });
    repeat<C::NV, C::VEC>([&](int k, int c) { x[k][c] = inside(k) ? x[k][c] * factor : A(0); });
  }
  // Returns the loaded row, and 0 outside the head, without unpacking: for 16-bit layouts with one load.
  __device__ __forceinline__ Raw inside_or_zero(Raw raw) const {
    repeat<4>([&](int w) { raw.x[w] = inside(0) ? raw.x[w] : 0; });
    return raw;
  }
  // Whether a work item with this slot adds to what its row contains. In 16 bits plans have no such item,
  // because every addition would be rounded; the test of sizes leaves the code out.
  static __device__ __forceinline__ bool joins(int slot) { return sizeof(A) == sizeof(T) && slot == kJoins; }
  // Stores factor * x as row `row` of `array`, plus before * the row's contents where the work item joins
  // them; or, where the work item has a partial-result slot, x as that slot of `partial`, in the accumulation
  // type.
  __device__ __forceinline__ void store_row(void* array, void* partial, const A (&x)[C::NV][C::VEC], A factor,
                                            int row, int slot, A before = 1) const {
    if (!writes || slot == kNoItem) return;
#pragma unroll
    for (int k = 0; k < C::NV; ++k) {
      if (!inside(k)) continue;
      if (slot < 0) {
        A y[C::VEC];
        repeat<C::VEC>([&](int c) { y[c] = x[k][c] * factor; });
        if (joins(slot)) {
          A old[C::VEC];
          Pack<T>::unpack(read_raw(address(array, row, k)), old);
          repeat<C::VEC>([&](int c) { y[c] += before * old[c]; });
        }
        store_raw(address(array, row, k), Pack<T>::pack(y));
      } else {
        constexpr int WIDER = sizeof(A) / sizeof(T);
        A* p = reinterpret_cast<A*>(
            at_row(static_cast<char*>(partial) + uint64_t(offset(k)) * WIDER, slot, row_bytes * WIDER));
#pragma unroll
        for (int c = 0; c < C::VEC; c += 16 / sizeof(A)) {
          A y[16 / sizeof(A)];
          repeat<16 / sizeof(A)>([&](int e) { y[e] = x[k][c + e]; });
          store_raw(p + c, Pack<A>::pack(y));
        }
      }
    }
  }
  // Whether the sub-warps of a warp share a row.
  __device__ __forceinline__ bool shared() const { return !packed && num_sub > 1; }
  // Returns the sum of v over the sub-warps, in all of them.
  __device__ __forceinline__ A across(A v, const Tiling& t) const {
    for (int o = t.lanes(); o < 32; o *= 2) v += __shfl_xor_sync(kAll, v, o);
    return v;
  }
  // x = the sum of x over the sub-warps, in all of them.
  __device__ __forceinline__ void across(A (&x)[C::NV][C::VEC], const Tiling& t) const {
    for (int o = t.lanes(); o < 32; o *= 2)
      repeat<C::NV, C::VEC>([&](int k, int c) { x[k][c] += __shfl_xor_sync(kAll, x[k][c], o); });
  }
  // For a head that is wider than the registers: returns the sum of f(column) over this lane's share of the
  // columns that other blocks hold, a load of VEC columns at a time.
  template <class F>
  __device__ __forceinline__ A far_sum(const Tiling& t, F f) const {
    A sum = 0;
    for (int other = 0; other < t.chunks; ++other) {
      if (other == chunk || !head_ok) continue;
      for (int at = other * C::COLS + hl * C::VEC; at < min(dim, (other + 1) * C::COLS);
           at += C::LPH * C::VEC)
        sum += f(at);
    }
    return sum;
  }
  // x = columns [at, at + VEC) of this head in a row of `array`, or 0 where this is null.
  __device__ __forceinline__ void load_at(const void* array, int64_t row, int at, A (&x)[C::VEC]) const {
    if (array) {
      Pack<T>::unpack(load_raw(static_cast<const T*>(array) + (row * heads + head) * dim + at), x);
    } else {
      repeat<C::VEC>([&](int c) { x[c] = 0; });
    }
  }
  // Returns this lane's part of a . (b + e) in the columns that other blocks have. a, b, e: arrays of which
  // the given rows are taken; e, the edges' features, may be null.
  __device__ __forceinline__ A far_dot(const Tiling& t, const void* a, int64_t a_row, const void* b,
                                       int64_t b_row, const void* e = nullptr, int64_t e_row = 0) const {
    return far_sum(t, [&](int at) {
      A x[C::VEC], y[C::VEC], z[C::VEC], sum = 0;
      load_at(a, a_row, at, x);
      load_at(b, b_row, at, y);
      load_at(e, e_row, at, z);
      repeat<C::VEC>([&](int c) { sum += x[c] * (y[c] + z[c]); });
      return sum;
    });
  }
};

}  // namespace dfgnn::cuda
