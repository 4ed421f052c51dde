// Items and splits, on the device: what dfgnn/schedule does with tensors on the CPU. Every block counts what
// its rows have, the counts of all blocks are added up, and every block puts its own behind those before it:
// no place depends on which block comes first.
#include "scan.cuh"

namespace dfgnn::cuda {
namespace {

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

__device__ __host__ __forceinline__ bool in_row_order(const PlanParams& p) {
  return !p.by_length && p.parts == 1;
}

// What is counted: slots and split rows, and where items are ordered, per part and bucket those in it. In
// scratch lie, behind the three results, the totals, and then of each count the blocks' one by one, which
// become sums over the blocks before.
enum { kSlots, kSplits, kFirstBucket };
__device__ __host__ __forceinline__ int64_t num_counted(const PlanParams& p) {
  return kFirstBucket + (in_row_order(p) ? 0 : int64_t(p.parts) * kBuckets);
}
__device__ __forceinline__ int32_t* totals(const PlanParams& p) { return p.counts + 3; }
__device__ __forceinline__ int32_t* of_blocks(const PlanParams& p, int64_t which, int64_t blocks) {
  return totals(p) + num_counted(p) + which * blocks;
}
__device__ __forceinline__ int64_t bucket_number(int part, int bucket) {
  return kFirstBucket + int64_t(part) * kBuckets + bucket;
}

__global__ void __launch_bounds__(kPlanThreads) count_kernel(const PlanParams p) {
  __shared__ int buckets[kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  Cursor cursor(p, ok ? row : 0);
  int pieces = 0;
  for (int part = 0; part < p.parts; ++part) {
    const Pieces own = cursor.next(p, part);
    if (ok) pieces += own.count;
    if (in_row_order(p)) break;
    if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
    __syncthreads();
    if (ok && own.count) atomicAdd(&buckets[p.by_length ? bucket_of(own.length) : 0], own.count);
    __syncthreads();
    if (threadIdx.x < kBuckets)
      of_blocks(p, bucket_number(part, threadIdx.x), gridDim.x)[blockIdx.x] = buckets[threadIdx.x];
    __syncthreads();
  }
  int slots, splits;
  sum_before(pieces > 1 ? pieces : 0, slots), sum_before(int(pieces > 1), splits);
  if (threadIdx.x == 0) {
    of_blocks(p, kSlots, gridDim.x)[blockIdx.x] = slots;
    of_blocks(p, kSplits, gridDim.x)[blockIdx.x] = splits;
  }
}

// A block per count.
__global__ void __launch_bounds__(kPlanThreads) add_up_kernel(const PlanParams p, int64_t blocks) {
  int32_t* values = of_blocks(p, blockIdx.x, blocks);
  int before = 0, total;
  for (int64_t first = 0; first < blocks; first += kPlanThreads, before += total) {
    const int64_t at = first + threadIdx.x;
    const int sum = before + sum_before(at < blocks ? values[at] : 0, total);
    if (at < blocks) values[at] = sum;
  }
  if (threadIdx.x == 0) totals(p)[blockIdx.x] = before;
}

// Where a row's slots and its split are, among all.
struct Cut {
  int slot, split;
  // All threads of a block call it; pieces: 0 for a row that there is not.
  __device__ __forceinline__ Cut(const PlanParams& p, int64_t row, int pieces) {
    int total;
    slot = of_blocks(p, kSlots, gridDim.x)[blockIdx.x] + sum_before(pieces > 1 ? pieces : 0, total);
    split = of_blocks(p, kSplits, gridDim.x)[blockIdx.x] + sum_before(int(pieces > 1), total);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      p.counts[0] = totals(p)[kSlots] - totals(p)[kSplits];
      p.counts[1] = totals(p)[kSlots], p.counts[2] = totals(p)[kSplits];
    }
    if (pieces <= 1 || int64_t(split + 1) * p.stride > p.num_splits) return;
    Split* splits = p.splits + int64_t(split) * p.stride;
    const int first = int(row) * p.stride;
    for (int r = 0; r < p.stride && first + r < p.last_row; ++r)
      splits[r] = {first + r, slot * p.stride + r, (slot + pieces) * p.stride, p.stride};
  }
};

__device__ __forceinline__ void put(const PlanParams& p, int64_t at, const Pieces& pieces, int64_t row, int k,
                                    int slot) {
  if (at >= 0 && at < p.num_items)
    p.items[at] = pieces.item(int(row) * p.stride, k, slot < 0 ? -1 : slot * p.stride);
}

// In row order, but kNear rows at a time by falling length: packed warps wait for the longest of their rows.
// SPLITS: there may be some.
constexpr int kNear = 64;
static_assert(kPlanThreads % kNear == 0);
template <bool SPLITS>
__global__ void __launch_bounds__(kPlanThreads) natural_kernel(const PlanParams p) {
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  const Pieces pieces = Cursor(p, ok ? row : 0).next(p, 0);
  int64_t place = row;
  if (p.stride == 1) {
    __shared__ int lengths[kPlanThreads];
    const int own = ok ? pieces.length : -1, me = int(threadIdx.x), first = me / kNear * kNear;
    lengths[me] = own;
    __syncthreads();
    place -= me - first;
#pragma unroll 8
    for (int other = first; other < first + kNear; ++other)
      place += lengths[other] > own || (lengths[other] == own && other < me);
  }
  if constexpr (SPLITS) {
    const Cut cut(p, row, ok ? pieces.count : 0);
    if (!ok) return;
    const bool split = pieces.count > 1;
    put(p, p.front + place, pieces, row, 0, split ? cut.slot : -1);
    // One fewer than slots per split row; at the end of the front.
    const int64_t begin = p.front - (totals(p)[kSlots] - totals(p)[kSplits]) + cut.slot - cut.split;
    for (int k = 1; k < pieces.count; ++k) put(p, begin + k - 1, pieces, row, k, cut.slot + k);
  } else {
    if (ok) put(p, p.front + place, pieces, row, 0, -1);
  }
}

// Part by part; in a part by falling length, or as the rows are.
__global__ void __launch_bounds__(kPlanThreads) ordered_kernel(const PlanParams p) {
  constexpr int kRanks = kPlanThreads / 32;
  __shared__ int start[kBuckets], counts[kRanks][kBuckets];
  const int64_t row = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const bool ok = row < p.num_rows;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  int all = 0;
  if (ok) {
    Cursor cursor(p, row);
    for (int part = 0; part < p.parts; ++part) all += cursor.next(p, part).count;
  }
  const Cut cut(p, row, all);
  int slot = all > 1 ? cut.slot : -1;

  Cursor cursor(p, ok ? row : 0);
  const int own = kBuckets - 1 - int(threadIdx.x);  // this thread's bucket, the longest first
  int before = 0;
  for (int part = 0; part < p.parts; ++part) {
    int total;
    const int begin = before + sum_before(own >= 0 ? totals(p)[bucket_number(part, own)] : 0, total);
    if (own >= 0) {
      start[own] = begin + of_blocks(p, bucket_number(part, own), gridDim.x)[blockIdx.x];
      for (int w = 0; w < kRanks; ++w) counts[w][own] = 0;
    }
    __syncthreads();
    const Pieces pieces = cursor.next(p, part);
    const int bucket = p.by_length ? bucket_of(pieces.length) : 0, count = ok ? pieces.count : 0;
    int rank = 0, of_warp = 0;
#pragma unroll 8
    for (int o = 0; o < 32; ++o) {
      const int others = __shfl_sync(kAll, count, o), place = __shfl_sync(kAll, bucket, o);
      if (place != bucket) continue;
      of_warp += others;
      if (o < lane) rank += others;
    }
    counts[warp][bucket] = of_warp;
    __syncthreads();
    for (int w = 0; w < warp; ++w) rank += counts[w][bucket];
    for (int k = 0; k < count; ++k)
      put(p, int64_t(start[bucket]) + rank + k, pieces, row, k, slot < 0 ? -1 : slot + k);
    if (slot >= 0) slot += count;
    before += total;
  }
}

}  // namespace

int64_t plan_counts(const PlanParams& p) {
  return 3 + num_counted(p) * (1 + int64_t(blocks_of(p.num_rows, kPlanThreads).x));
}

const char* plan_rows(const PlanParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (!p.exact) {
    cudaMemsetAsync(p.items, 0xff, p.num_items * sizeof(Item), s);
    cudaMemsetAsync(p.splits, 0, p.num_splits * sizeof(Split), s);
    if (p.num_rows == 0) cudaMemsetAsync(p.counts, 0, 3 * sizeof(int32_t), s);
  }
  if (p.num_rows == 0) return last_error();
  const dim3 grid = blocks_of(p.num_rows, kPlanThreads);
  if (p.exact && p.num_splits == 0 && in_row_order(p)) {
    natural_kernel<false><<<grid, kPlanThreads, 0, s>>>(p);
    return last_error();
  }
  count_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  add_up_kernel<<<unsigned(num_counted(p)), kPlanThreads, 0, s>>>(p, grid.x);
  if (in_row_order(p)) {
    natural_kernel<true><<<grid, kPlanThreads, 0, s>>>(p);
  } else {
    ordered_kernel<<<grid, kPlanThreads, 0, s>>>(p);
  }
  return last_error();
}

}  // namespace dfgnn::cuda
