// Makes the work items and splits of a plan (PlanParams in params.h) on the device, as dfgnn/plan does with
// tensors elsewhere. In `count` every block counts the work items and splits of its rows, in add_up prefix
// sums over blocks give their positions, and in put_all every block writes its own: the order does not depend
// on which block runs first. If the blocks of both directions fit on the device together, this is one
// cooperative launch, because launches dominate on small graphs. Row chunks are called pieces in names. For a
// plan of tiles, a row of p.indptr is a window of rows, and its edges are chunks of tiles.
#include "../cooperative.cuh"
#include "../graph/structure.h"

namespace dfgnn::cuda {
namespace {

// Work items are sorted by bucket, not by exact length: there are four buckets for each doubling of the
// length.
constexpr int kBuckets = kPlanBuckets;
static_assert(kBuckets <= kPlanThreads);
__device__ __forceinline__ int bucket_of(int length) {
  const int log2 = 31 - __clz(max(length, 1));
  const int quarter = log2 >= 2 ? (length >> (log2 - 2)) & 3 : 0;
  return 4 * log2 + quarter;
}

// The row chunks of a row's edges [begin, end), all of about the same length.
struct Pieces {
  int64_t begin = 0, end = 0;
  int count = 0, length = 0;
  Pieces() = default;
  // always: whether there is one row chunk even if there are no edges
  __device__ __forceinline__ Pieces(int64_t begin, int64_t end, int max_edges, bool always)
      : begin(begin), end(end) {
    const int edges = int(end - begin);
    count = edges ? (edges - 1) / max_edges + 1 : always;
    length = count ? (edges - 1) / count + 1 : 0;
  }
  // The work item of row chunk k.
  __device__ __forceinline__ Item item(int row, int k, int slot) const {
    const int64_t from = min(begin + int64_t(k) * length, end);
    return {row, int(from), int(min(from + length, end)), slot};
  }
};

// Iterates over the source partitions of a row, whose neighbours must be in rising order: next() returns the
// row chunks in the partition `part`. It finds the partition's last edge by binary search.
struct Cursor {
  int64_t begin, end;  // the edges that are left
  bool empty;          // whether the row has no edges
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

// Whether work items are in row order, not sorted by partition or length.
__device__ __host__ __forceinline__ bool in_row_order(const PlanParams& p) {
  return !p.by_length && p.parts == 1;
}

// There are num_counted(p) counts: of slots, of split rows and, unless work items are in row order, of the
// work items in each partition and bucket. PlanParams::counts begins with three results. Then come the totals
// of all counts, and then for each count a number per block (of_blocks): first that of the block's own rows,
// which add_up replaces by the sum over earlier blocks.
enum { kSlots, kSplits, kFirstBucket };
__device__ __host__ __forceinline__ int64_t num_counted(const PlanParams& p) {
  return kFirstBucket + (in_row_order(p) ? 0 : int64_t(p.parts) * kBuckets);
}
__device__ __forceinline__ int32_t* totals(const PlanParams& p) { return p.counts + 3; }
__device__ __forceinline__ int32_t* of_blocks(const PlanParams& p, int64_t which, int64_t blocks) {
  return totals(p) + num_counted(p) + which * blocks;
}
__device__ __host__ __forceinline__ int64_t num_blocks(const PlanParams& p) {
  return (p.num_rows + kPlanThreads - 1) / kPlanThreads;
}
// Whether no row has to be cut, so that nothing has to be counted: the caller knows that there are no splits.
__device__ __host__ __forceinline__ bool is_uncut(const PlanParams& p) {
  return p.exact && p.num_splits == 0 && in_row_order(p);
}
// The index, among the counts, of the count of work items in a partition and bucket.
__device__ __forceinline__ int64_t bucket_number(int part, int bucket) {
  return kFirstBucket + int64_t(part) * kBuckets + bucket;
}

// Writes the counts of this block's rows, of which each thread takes one.
__device__ __forceinline__ void count(const PlanParams& p) {
  if (is_uncut(p) || blockIdx.x >= num_blocks(p)) return;
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
      of_blocks(p, bucket_number(part, threadIdx.x), num_blocks(p))[blockIdx.x] = buckets[threadIdx.x];
    __syncthreads();
  }
  int slots, splits;
  sum_before(pieces > 1 ? pieces : 0, slots), sum_before(int(pieces > 1), splits);
  if (threadIdx.x == 0) {
    of_blocks(p, kSlots, num_blocks(p))[blockIdx.x] = slots;
    of_blocks(p, kSplits, num_blocks(p))[blockIdx.x] = splits;
  }
}

// Replaces each block's number of a count by the sum over the blocks before, and writes the totals.
__device__ __forceinline__ void add_up(const PlanParams& p) {
  if (is_uncut(p)) return;
  const int64_t blocks = num_blocks(p);
  if (blocks <= 32) {  // a warp per count
    constexpr int kWarps = kPlanThreads / 32;
    const int lane = threadIdx.x & 31;
    for (int64_t which = blockIdx.x * kWarps + threadIdx.x / 32; which < num_counted(p);
         which += gridDim.x * kWarps) {
      int32_t* values = of_blocks(p, which, blocks);
      const int own = lane < blocks ? values[lane] : 0;
      int sum = own;
      for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(kAll, sum, o);
        if (lane >= o) sum += other;
      }
      if (lane < blocks) values[lane] = sum - own;
      if (lane == 31) totals(p)[which] = sum;
    }
    return;
  }
  for (int64_t which = blockIdx.x; which < num_counted(p); which += gridDim.x) {
    int32_t* values = of_blocks(p, which, blocks);
    int before = 0, total;
    for (int64_t first = 0; first < blocks; first += kPlanThreads, before += total) {
      const int64_t at = first + threadIdx.x;
      const int sum = before + sum_before(at < blocks ? values[at] : 0, total);
      if (at < blocks) values[at] = sum;
    }
    if (threadIdx.x == 0) totals(p)[which] = before;
  }
}

// The positions of a row's first slot and of its split, if it has more than one row chunk. The constructor,
// which all threads of a block must call, also writes the split and, once, the results in PlanParams::counts.
// pieces: how many row chunks the row has; 0 for a thread without a row.
struct Cut {
  int slot, split;
  __device__ __forceinline__ Cut(const PlanParams& p, int64_t row, int pieces) {
    int total;
    slot = of_blocks(p, kSlots, num_blocks(p))[blockIdx.x] + sum_before(pieces > 1 ? pieces : 0, total);
    split = of_blocks(p, kSplits, num_blocks(p))[blockIdx.x] + sum_before(int(pieces > 1), total);
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

// Writes row chunk k of a row as work item number `at`, if p.items has room for it: its size is the caller's.
// slot: the chunk's slot, or -1 if the row is not split. row and slot are counted in units of p.stride.
__device__ __forceinline__ void put(const PlanParams& p, int64_t at, const Pieces& pieces, int64_t row, int k,
                                    int slot) {
  if (at >= 0 && at < p.num_items)
    p.items[at] = pieces.item(int(row) * p.stride, k, slot < 0 ? -1 : slot * p.stride);
}

// Writes work items in row order, but sorts kNear rows at a time by descending length (not with tiles, whose
// stride is not 1), because packed warps wait for the longest of their rows. SPLITS: there may be split rows.
constexpr int kNear = 64;
static_assert(kPlanThreads % kNear == 0);
template <bool SPLITS>
__device__ __forceinline__ void put_in_row_order(const PlanParams& p) {
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
    // All row chunks but the first of each row lie just before p.front, where the first chunks begin.
    const int64_t begin = p.front - (totals(p)[kSlots] - totals(p)[kSplits]) + cut.slot - cut.split;
    for (int k = 1; k < pieces.count; ++k) put(p, begin + k - 1, pieces, row, k, cut.slot + k);
  } else {
    if (ok) put(p, p.front + place, pieces, row, 0, -1);
  }
}

// Writes work items partition by partition, within a partition by descending length (by_length) or in row
// order. A thread has a row. Its chunks in a partition follow the work items of longer buckets (start), those
// of the same bucket in earlier blocks (in start, too), earlier warps (counts) and earlier lanes (rank).
__device__ __forceinline__ void put_in_order(const PlanParams& p) {
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
      start[own] = begin + of_blocks(p, bucket_number(part, own), num_blocks(p))[blockIdx.x];
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

__device__ __forceinline__ void put_all(const PlanParams& p) {
  if (blockIdx.x >= num_blocks(p)) return;
  if (is_uncut(p))
    put_in_row_order<false>(p);
  else if (in_row_order(p))
    put_in_row_order<true>(p);
  else
    put_in_order(p);
}

// Arguments of the kernels: one or two directions of a graph. blockIdx.y says which one a block takes.
struct Plans {
  PlanParams of[2];
};
__global__ void __launch_bounds__(kPlanThreads) uncut_kernel(const Plans plans) {
  if (blockIdx.x < num_blocks(plans.of[blockIdx.y])) put_in_row_order<false>(plans.of[blockIdx.y]);
}
__global__ void __launch_bounds__(kPlanThreads) count_kernel(const Plans plans) {
  count(plans.of[blockIdx.y]);
}
__global__ void __launch_bounds__(kPlanThreads) add_up_kernel(const Plans plans) {
  add_up(plans.of[blockIdx.y]);
}
__global__ void __launch_bounds__(kPlanThreads) put_kernel(const Plans plans) {
  put_all(plans.of[blockIdx.y]);
}
// Blocks: OfCluster or OfGrid (cooperative.cuh).
template <class Blocks>
__global__ void __launch_bounds__(kPlanThreads) together_kernel(const Plans plans) {
  const Blocks all_blocks;
  const PlanParams& p = plans.of[blockIdx.y];
  count(p);
  all_blocks.sync();
  add_up(p);
  all_blocks.sync();
  put_all(p);
}

}  // namespace

int64_t plan_counts(const PlanParams& p) { return 3 + num_counted(p) * (1 + num_blocks(p)); }

const char* plan_rows(const PlanParams& p, void* stream) { return plan_directions(&p, 1, stream); }

const char* plan_directions(const PlanParams* directions, int count, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  Plans plans{};
  int64_t blocks = 0, counted = 0;
  bool uncut = true;
  for (int k = 0; k < count; ++k) {
    const PlanParams& p = plans.of[k] = directions[k];
    if (!p.exact) {  // unused work items get row -1, unused splits no slots
      cudaMemsetAsync(p.items, 0xff, p.num_items * sizeof(Item), s);
      cudaMemsetAsync(p.splits, 0, p.num_splits * sizeof(Split), s);
      if (p.num_rows == 0) cudaMemsetAsync(p.counts, 0, 3 * sizeof(int32_t), s);
    }
    blocks = std::max(blocks, num_blocks(p)), counted = std::max(counted, num_counted(p));
    uncut = uncut && is_uncut(p);
  }
  if (blocks == 0) return last_error();
  const dim3 grid(static_cast<unsigned>(blocks), unsigned(count));
  if (uncut) {
    uncut_kernel<<<grid, kPlanThreads, 0, s>>>(plans);
  } else if (blocks * count <= device().multiprocessors) {
    dim3 together = grid;  // a cluster needs a power of two of blocks; further blocks only wait at barriers
    unsigned x = 1;
    while (x < grid.x) x *= 2;
    if (x * together.y <= kMostOfCluster) together.x = x;
    launch_together(s, together, together_kernel<OfCluster>, together_kernel<OfGrid>, plans);
  } else {
    count_kernel<<<grid, kPlanThreads, 0, s>>>(plans);
    add_up_kernel<<<dim3(unsigned(counted), unsigned(count)), kPlanThreads, 0, s>>>(plans);
    put_kernel<<<grid, kPlanThreads, 0, s>>>(plans);
  }
  return last_error();
}

}  // namespace dfgnn::cuda
