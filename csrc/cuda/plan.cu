// Plans on the device: what dfgnn/schedule.py and dfgnn/tiles.py do with tensors on the CPU, in a few
// launches and without waiting. Where atomics decide places, these are places of items, splits and slots in
// memory.
#include <cuda_runtime.h>

#include <climits>

#include "launch.cuh"

namespace dfgnn::cuda {
namespace {

constexpr int kPlanThreads = 512;
// Blocks that add up what they have found: few, as additions to one place wait for each other.
constexpr int kPlanBlocks = 264;

// Sum of x over the threads before this one, and over all of the block, which all call it.
template <typename T>
__device__ __forceinline__ T sum_before(T x, T& total) {
  __shared__ T warps[kPlanThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  T sum = x;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const T other = __shfl_up_sync(kAll, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();  // the sums of the call before have been read
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  T before = sum - x;
  total = 0;
#pragma unroll
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before;
}

// ---- degrees -------------------------------------------------------------------------------------------

// Scratch: degrees below kDegreeBins one by one, then those above together; the largest degree, the sum of
// squares, and how many blocks are done. The last one finds the quantiles.
constexpr int kLargest = kDegreeBins + 1, kSquares = kDegreeBins + 2, kDone = kDegreeBins + 3;
static_assert(kDegreeScratch == kDone + 1);

__global__ void __launch_bounds__(kPlanThreads)
    degrees_kernel(const int64_t* indptr, int64_t num_rows, unsigned long long* scratch, int64_t* found) {
  __shared__ int bins[kDegreeBins + 1];
  __shared__ bool last;
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads) bins[b] = 0;
  __syncthreads();
  unsigned long long largest = 0, squares = 0;
  for (int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x; row < num_rows;
       row += int64_t(gridDim.x) * kPlanThreads) {
    const unsigned long long degree = indptr[row + 1] - indptr[row];
    largest = max(largest, degree);
    squares += degree * degree;
    atomicAdd(&bins[degree < kDegreeBins ? int(degree) : kDegreeBins], 1);
  }
  for (int o = 16; o > 0; o /= 2) {
    largest = max(largest, __shfl_xor_sync(kAll, largest, o));
    squares += __shfl_xor_sync(kAll, squares, o);
  }
  if ((threadIdx.x & 31) == 0) {
    atomicMax(&scratch[kLargest], largest);
    atomicAdd(&scratch[kSquares], squares);
  }
  __syncthreads();
  for (int b = threadIdx.x; b <= kDegreeBins; b += kPlanThreads)
    if (bins[b]) atomicAdd(&scratch[b], static_cast<unsigned long long>(bins[b]));

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&scratch[kDone], 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  constexpr int kEach = kDegreeBins / kPlanThreads;
  static_assert(kEach * kPlanThreads == kDegreeBins);
  unsigned long long count[kEach], own = 0, total;
  for (int k = 0; k < kEach; ++k) own += count[k] = __ldcg(&scratch[threadIdx.x * kEach + k]);
  unsigned long long below = sum_before(own, total);
  const unsigned long long half = (num_rows + 1) / 2, most = (num_rows * 99 + 99) / 100;
  if (threadIdx.x == 0) {
    found[0] = half > total ? kDegreeBins : 0;
    found[1] = most > total ? kDegreeBins : 0;
    found[2] = int64_t(count[0]);
    found[3] = int64_t(__ldcg(&scratch[kLargest]));
    found[4] = int64_t(__ldcg(&scratch[kSquares]));
  }
  __syncthreads();
  for (int k = 0; k < kEach; ++k) {
    const unsigned long long upto = below + count[k];
    if (below < half && half <= upto) found[0] = threadIdx.x * kEach + k;
    if (below < most && most <= upto) found[1] = threadIdx.x * kEach + k;
    below = upto;
  }
}

// How often an index is below the one before it, without those that begin a row: 0 if rows rise.
__global__ void __launch_bounds__(kPlanThreads)
    falls_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                 unsigned long long* falls) {
  const int64_t first = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kPlanThreads;
  long long count = 0;
#pragma unroll 8
  for (int64_t e = first + 1; e < num_edges; e += step) count += indices[e] < indices[e - 1];
  for (int64_t row = first; row < num_rows; row += step) {
    const int64_t begin = indptr[row];
    if (begin > 0 && begin < indptr[row + 1]) count -= indices[begin] < indices[begin - 1];
  }
  for (int o = 16; o > 0; o /= 2) count += __shfl_xor_sync(kAll, count, o);
  if ((threadIdx.x & 31) == 0 && count) atomicAdd(falls, static_cast<unsigned long long>(count));
}

// ---- items ---------------------------------------------------------------------------------------------

// Lengths are alike within a quarter of an octave.
constexpr int kBuckets = kPlanBuckets;
static_assert(kBuckets <= kPlanThreads);
__device__ __forceinline__ int bucket_of(int length) {
  const int log2 = 31 - __clz(max(length, 1));
  const int quarter = log2 >= 2 ? (length >> (log2 - 2)) & 3 : 0;
  return 4 * log2 + quarter;
}

// Pieces of a row's edges [begin, end).
struct Pieces {
  int64_t begin = 0, end = 0;
  int count = 0, length = 0;
  Pieces() = default;
  // always: a piece even where there is no edge
  __device__ __forceinline__ Pieces(int64_t begin, int64_t end, int max_edges, bool always)
      : begin(begin), end(end) {
    const int edges = int(end - begin);
    count = edges ? (edges - 1) / max_edges + 1 : always;
    length = count ? (edges - 1) / count + 1 : 0;
  }
  __device__ __forceinline__ Item item(int row, int k, int slot) const {
    const int64_t from = min(begin + int64_t(k) * length, end);
    return {row, int(from), int(min(from + length, end)), slot};
  }
};

// The parts of a row, one after the other: the neighbours of a row that is cut by its sources rise.
struct Cursor {
  int64_t begin, end;
  bool empty;
  __device__ __forceinline__ Cursor(const PlanParams& p, int64_t row)
      : begin(p.indptr[row]), end(p.indptr[row + 1]), empty(begin == end) {}
  __device__ __forceinline__ Pieces next(const PlanParams& p, int part) {
    const int64_t from = begin;
    begin = end;
    if (part + 1 < p.parts) {
      const int64_t bound = (p.num_cols * (part + 1) + p.parts - 1) / p.parts;
      int64_t low = from;
      while (low < begin) {
        const int64_t middle = (low + begin) / 2;
        if (p.indices[middle] < bound)
          low = middle + 1;
        else
          begin = middle;
      }
    }
    return Pieces(from, begin, p.max_edges, empty && part == 0);
  }
};

// Per part: how many items each bucket has, and how many of their places are taken.
__device__ __forceinline__ int32_t* bucket_counts(const PlanParams& p, int part) {
  return p.counts + 3 + int64_t(part) * 2 * kBuckets;
}

__global__ void __launch_bounds__(kPlanThreads) lengths_kernel(const PlanParams p) {
  __shared__ int buckets[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  Cursor cursor(p, ok ? row : 0);
  for (int part = 0; part < p.parts; ++part) {
    if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
    __syncthreads();
    const Pieces pieces = cursor.next(p, part);
    if (ok && pieces.count) atomicAdd(&buckets[p.by_length ? bucket_of(pieces.length) : 0], pieces.count);
    __syncthreads();
    if (threadIdx.x < kBuckets && buckets[threadIdx.x])
      atomicAdd(&bucket_counts(p, part)[threadIdx.x], buckets[threadIdx.x]);
    __syncthreads();
  }
}

// Slots and the split of a row of several pieces: the first slot, -1 for one piece.
__device__ __forceinline__ int split(const PlanParams& p, int row, int pieces) {
  if (pieces == 1) return -1;
  atomicAdd(&p.counts[0], pieces - 1);
  const int slot = atomicAdd(&p.counts[1], pieces);
  Split* splits = p.splits + int64_t(atomicAdd(&p.counts[2], 1)) * p.stride;
  for (int r = 0; r < p.stride && row * p.stride + r < p.last_row; ++r)
    splits[r] = {row * p.stride + r, slot * p.stride + r, (slot + pieces) * p.stride, p.stride};
  return slot;
}

__device__ __forceinline__ Item item_of(const PlanParams& p, const Pieces& pieces, int row, int k, int slot) {
  return pieces.item(row * p.stride, k, slot < 0 ? -1 : slot * p.stride);
}

// In row order, a split row's pieces but the first in front.
__global__ void __launch_bounds__(kPlanThreads) natural_kernel(const PlanParams p) {
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (row >= p.num_rows) return;
  const Pieces pieces = Cursor(p, row).next(p, 0);
  const int slot = split(p, int(row), pieces.count);
  p.items[p.front + row] = item_of(p, pieces, int(row), 0, slot);
  if (slot < 0) return;
  // One fewer than slots per split row: their places are taken from the end of the front.
  const int64_t end = p.front - atomicAdd(&p.counts[3], pieces.count - 1);
  for (int k = 1; k < pieces.count; ++k) p.items[end - k] = item_of(p, pieces, int(row), k, slot + k);
}

// Part by part; in a part by falling length, or the rows of a block together.
__global__ void __launch_bounds__(kPlanThreads) ordered_kernel(const PlanParams p) {
  __shared__ int start[kBuckets], taken[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  int slot = -1;
  if (ok) {
    Cursor all(p, row);
    int pieces = 0;
    for (int part = 0; part < p.parts; ++part) pieces += all.next(p, part).count;
    slot = split(p, int(row), pieces);
  }
  Cursor cursor(p, ok ? row : 0);
  const int own = kBuckets - 1 - int(threadIdx.x);  // this thread's bucket, the longest first
  int before = 0;
  for (int part = 0; part < p.parts; ++part) {
    int32_t* counts = bucket_counts(p, part);
    int total;
    const int begin = before + sum_before(own >= 0 ? counts[own] : 0, total);
    if (own >= 0) start[own] = begin, taken[own] = 0;
    __syncthreads();
    const Pieces pieces = cursor.next(p, part);
    const int bucket = p.by_length ? bucket_of(pieces.length) : 0;
    int rank = 0;
    if (ok && pieces.count) rank = atomicAdd(&taken[bucket], pieces.count);
    __syncthreads();
    if (own >= 0 && taken[own]) start[own] += atomicAdd(&counts[kBuckets + own], taken[own]);
    __syncthreads();
    if (ok) {
      for (int k = 0; k < pieces.count; ++k)
        p.items[int64_t(start[bucket]) + rank + k] =
            item_of(p, pieces, int(row), k, slot < 0 ? -1 : slot + k);
      if (slot >= 0) slot += pieces.count;
    }
    before += total;
  }
}

// ---- tiles ---------------------------------------------------------------------------------------------

// Columns of a window are marked in a bitmap of kSpan of them, from the least on that is not done.
constexpr int kWords = 4096, kSpan = 32 * kWords, kWordsEach = kWords / kPlanThreads;

struct Columns {
  int begin[kTileRows], cut[kTileRows + 1];
  int next;
  unsigned bits[kWords];

  // A window's rows; of every row at most `most` edges.
  __device__ __forceinline__ void read(const int64_t* indptr, int64_t num_rows, int64_t window, int most) {
    const int64_t row = window * kTileRows + threadIdx.x;
    int length = 0, total;
    if (threadIdx.x < kTileRows && row < num_rows) {
      const int64_t first = indptr[row];
      begin[threadIdx.x] = int(first);
      length = int(min(indptr[row + 1] - first, int64_t(most)));
    }
    const int before = sum_before(length, total);
    if (threadIdx.x <= kTileRows) cut[threadIdx.x] = before;
    __syncthreads();
  }

  // f(column, row in the window) of every edge, the block's threads together.
  template <class F>
  __device__ __forceinline__ void edges(const int32_t* indices, F f) const {
    constexpr int kAhead = 4;  // loads under way together
    for (int64_t t = threadIdx.x; t < cut[kTileRows]; t += kAhead * kPlanThreads) {
      int row[kAhead], column[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64_t mine = t + k * kPlanThreads;
        row[k] = -1;
        if (mine >= cut[kTileRows]) continue;
        int r = 0;
#pragma unroll
        for (int s = kTileRows / 2; s > 0; s /= 2)
          if (cut[r + s] <= mine) r += s;
        row[k] = r;
        column[k] = indices[begin[r] + int(mine - cut[r])];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (row[k] >= 0) f(column[k], row[k]);
    }
  }

  // Place of a column in the bitmap, or kSpan and more.
  __device__ __forceinline__ static unsigned place(int column, int low) {
    return column < low ? unsigned(kSpan) : unsigned(column) - unsigned(low);
  }

  // Marks the columns from `low` on and gives the least one beyond, or INT_MAX.
  __device__ __forceinline__ int mark(const int32_t* indices, int low) {
    __syncthreads();  // the marks before have been read
    for (int w = threadIdx.x; w < kWords; w += kPlanThreads) bits[w] = 0;
    if (threadIdx.x == 0) next = INT_MAX;
    __syncthreads();
    int beyond = INT_MAX;
    edges(indices, [&](int column, int) {
      const unsigned at = place(column, low);
      if (at < kSpan)
        atomicOr(&bits[at / 32], 1u << (at & 31));
      else if (column >= low)
        beyond = min(beyond, column);
    });
    for (int o = 16; o > 0; o /= 2) beyond = min(beyond, __shfl_xor_sync(kAll, beyond, o));
    if ((threadIdx.x & 31) == 0 && beyond < INT_MAX) atomicMin(&next, beyond);
    __syncthreads();
    return next;
  }

  // The first column of the window, or INT_MAX; marks nothing.
  __device__ __forceinline__ int first(const int32_t* indices) { return mark(indices, -kSpan); }
};

// Of every step-th window: edges and columns, added up in `sums`, or the number of chunks.
__global__ void __launch_bounds__(kPlanThreads)
    columns_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t step, int most,
                   unsigned long long* sums, int64_t* chunks) {
  __shared__ Columns columns;
  columns.read(indptr, num_rows, blockIdx.x * step, most);
  int count = 0;
  for (int low = columns.first(indices); low < INT_MAX;) {
    low = columns.mark(indices, low);
    int own = 0, total;
    for (int w = threadIdx.x; w < kWords; w += kPlanThreads) own += __popc(columns.bits[w]);
    sum_before(own, total);
    count += total;
  }
  if (threadIdx.x) return;
  if (sums) {
    atomicAdd(&sums[0], static_cast<unsigned long long>(columns.cut[kTileRows]));
    atomicAdd(&sums[1], static_cast<unsigned long long>(count));
  } else {
    chunks[blockIdx.x + 1] = (int64_t(count) + kTileCols - 1) / kTileCols;
    if (blockIdx.x == 0) chunks[0] = 0;
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    tiles_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, const int64_t* offsets,
                 int32_t* chunks, int32_t* twice) {
  __shared__ Columns columns;
  __shared__ int rank_of[kWords];  // of a word's first column
  columns.read(indptr, num_rows, blockIdx.x, INT_MAX);
  int32_t* window = chunks + offsets[blockIdx.x] * kTileInts;
  int count = 0;
  bool repeated = false;
  for (int low = columns.first(indices); low < INT_MAX;) {
    const int after = columns.mark(indices, low);
    int own = 0, total;
    const int from = threadIdx.x * kWordsEach;
    for (int w = from; w < from + kWordsEach; ++w) own += __popc(columns.bits[w]);
    int rank = count + sum_before(own, total);
    for (int w = from; w < from + kWordsEach; ++w) {
      rank_of[w] = rank;
      for (unsigned word = columns.bits[w]; word; word &= word - 1, ++rank)
        window[int64_t(rank / kTileCols) * kTileInts + rank % kTileCols] = low + 32 * w + __ffs(word) - 1;
    }
    __syncthreads();
    columns.edges(indices, [&](int column, int row) {
      const unsigned at = Columns::place(column, low);
      if (at >= kSpan) return;
      const int mine = rank_of[at / 32] + __popc(columns.bits[at / 32] & ((1u << (at & 31)) - 1));
      const int bit = int(1u << (mine % kTileCols));
      repeated |= atomicOr(&window[int64_t(mine / kTileCols) * kTileInts + kTileCols + row], bit) & bit;
    });
    count += total;
    low = after;
  }
  if (repeated) *twice = 1;
  __syncthreads();
  // The last chunk is filled up with its first column.
  const int used = count % kTileCols;
  int32_t* last = window + int64_t(count / kTileCols) * kTileInts;
  if (used && int(threadIdx.x) >= used && threadIdx.x < kTileCols) last[threadIdx.x] = last[0];
}

dim3 few_blocks(int64_t work) {
  return dim3(unsigned(std::clamp<int64_t>((work + kPlanThreads - 1) / kPlanThreads, 1, kPlanBlocks)));
}

}  // namespace

const char* degrees(const int64_t* indptr, int64_t num_rows, int64_t* scratch, int64_t* found, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(scratch, 0, kDegreeScratch * sizeof(int64_t), s);
  degrees_kernel<<<few_blocks(num_rows), kPlanThreads, 0, s>>>(
      indptr, num_rows, reinterpret_cast<unsigned long long*>(scratch), found);
  return last_error();
}

const char* falls(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t num_edges,
                  int64_t* count, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(count, 0, sizeof(int64_t), s);
  // Every edge is read, and hardly a block has something to add: as many as are resident.
  const dim3 grid(4 * few_blocks(num_edges + num_rows).x);
  falls_kernel<<<grid, kPlanThreads, 0, s>>>(indptr, indices, num_rows, num_edges,
                                             reinterpret_cast<unsigned long long*>(count));
  return last_error();
}

const char* plan_rows(const PlanParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(p.items, 0xff, p.num_items * sizeof(Item), s);
  cudaMemsetAsync(p.splits, 0, p.num_splits * sizeof(Split), s);
  cudaMemsetAsync(p.counts, 0, p.num_counts * sizeof(int32_t), s);
  if (p.num_rows == 0) return last_error();
  const dim3 grid = blocks_of(p.num_rows, kPlanThreads);
  if (p.by_length || p.parts > 1) {
    lengths_kernel<<<grid, kPlanThreads, 0, s>>>(p);
    ordered_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  } else {
    natural_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  }
  return last_error();
}

const char* sharing(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t step, int most,
                    int64_t* sums, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(sums, 0, 2 * sizeof(int64_t), s);
  if (num_rows)
    columns_kernel<<<blocks_of(num_rows, kTileRows * step), kPlanThreads, 0, s>>>(
        indptr, indices, num_rows, step, most, reinterpret_cast<unsigned long long*>(sums), nullptr);
  return last_error();
}

const char* tile_counts(const int64_t* indptr, const int32_t* indices, int64_t num_rows, int64_t* chunks,
                        void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (num_rows == 0) {
    cudaMemsetAsync(chunks, 0, sizeof(int64_t), s);
    return last_error();
  }
  columns_kernel<<<blocks_of(num_rows, kTileRows), kPlanThreads, 0, s>>>(indptr, indices, num_rows, 1,
                                                                         INT_MAX, nullptr, chunks);
  return last_error();
}

const char* tiles(const int64_t* indptr, const int32_t* indices, int64_t num_rows, const int64_t* offsets,
                  int64_t num_chunks, int32_t* chunks, int32_t* twice, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaMemsetAsync(chunks, 0, num_chunks * kTileInts * sizeof(int32_t), s);
  cudaMemsetAsync(twice, 0, sizeof(int32_t), s);
  if (num_rows && num_chunks)
    tiles_kernel<<<blocks_of(num_rows, kTileRows), kPlanThreads, 0, s>>>(indptr, indices, num_rows, offsets,
                                                                         chunks, twice);
  return last_error();
}

}  // namespace dfgnn::cuda
