// Makes both CSRs of a graph from its edges (structure.h). A first pass over the edges, `read`, finds ranges
// of node ids and counts the edges that are kept. A second one, `number`, gives these their ids and writes
// two sort keys for each. One stable sort of all keys orders both directions, and write_rows writes the CSRs.
// For a small graph all this is one cooperative launch, because launches dominate; else several kernels.
#include <climits>
#include <cub/device/device_radix_sort.cuh>
#include <mutex>
#include <vector>

#include "../cooperative.cuh"
#include "../plan/degrees.cuh"

namespace dfgnn::cuda {
namespace {

// Indices of the numbers that describe a set of edges (kEdgeNumbers in structure.h, in the same order).
enum { kSrcLow, kSrcHigh, kDstLow, kDstHigh, kKept, kSrcFalls, kDstFalls };
static_assert(kDstFalls + 1 == kEdgeNumbers);

__device__ __forceinline__ int64_t load(const Ids& ids, int64_t e) {
  const int64_t at = e * ids.stride;
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[at] : static_cast<const int32_t*>(ids.data)[at];
}

__device__ __forceinline__ bool is_kept(const StructureParams& p, int64_t src, int64_t dst) {
  const bool inside = src >= 0 && src < p.num_src && dst >= 0 && dst < p.num_dst;
  return inside && !(p.with_loops && src == dst);
}

// `joined` returns a number that describes the union of two sets of edges, from its values a and b for each
// set; of_no_edges returns its value for an empty set. which: the number's index, such as kSrcLow.
__device__ __forceinline__ int64_t joined(int which, int64_t a, int64_t b) {
  if (which == kSrcLow || which == kDstLow) return min(a, b);
  if (which == kSrcHigh || which == kDstHigh) return max(a, b);
  return a + b;
}
__device__ __forceinline__ int64_t of_no_edges(int which) {
  if (which == kSrcLow || which == kDstLow) return LLONG_MAX;
  if (which == kSrcHigh || which == kDstHigh) return LLONG_MIN;
  return 0;
}

// `own` describes the edges of each thread. In thread 0 it is replaced by the numbers that describe all edges
// of the block; in other threads it is undefined afterwards.
__device__ __forceinline__ void join_block(int64_t (&own)[kEdgeNumbers]) {
  constexpr int kWarps = kPlanThreads / 32;
  __shared__ int64_t warps[kEdgeNumbers][kWarps];
  const auto join_warp = [&](int lanes) {
#pragma unroll
    for (int k = 0; k < kEdgeNumbers; ++k)
      for (int o = lanes / 2; o > 0; o /= 2)
        own[k] = joined(k, own[k], int64_t(__shfl_xor_sync(kAll, (long long)own[k], o)));
  };
  join_warp(32);
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (int k = 0; k < kEdgeNumbers; ++k) warps[k][threadIdx.x / 32] = own[k];
  __syncthreads();
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int k = 0; k < kEdgeNumbers; ++k) own[k] = warps[k][threadIdx.x % kWarps];
  join_warp(kWarps);
}

// This block takes the given edges begin ... end - 1.
struct Run {
  int64_t begin, end;
  __device__ __forceinline__ Run(const StructureParams& p) {
    const int64_t each = (p.num_given + gridDim.x - 1) / gridDim.x;
    begin = min(blockIdx.x * each, p.num_given), end = min(begin + each, p.num_given);
  }
};

// Writes the extremes and counts (kEdgeNumbers) of this block's edges to p.parts.
__device__ __forceinline__ void read(const StructureParams& p) {
  int64_t own[kEdgeNumbers];
  for (int k = 0; k < kEdgeNumbers; ++k) own[k] = of_no_edges(k);
  const Run run(p);
  for (int64_t e = run.begin + threadIdx.x; e < run.end; e += kPlanThreads) {
    const int64_t src = load(p.src, e), dst = load(p.dst, e);
    own[kSrcLow] = min(own[kSrcLow], src), own[kSrcHigh] = max(own[kSrcHigh], src);
    own[kDstLow] = min(own[kDstLow], dst), own[kDstHigh] = max(own[kDstHigh], dst);
    own[kKept] += is_kept(p, src, dst);
    if (e > 0) own[kSrcFalls] += src < load(p.src, e - 1), own[kDstFalls] += dst < load(p.dst, e - 1);
  }
  join_block(own);
  if (threadIdx.x == 0)
    for (int k = 0; k < kEdgeNumbers; ++k)
      static_cast<int64_t*>(p.parts)[blockIdx.x * kEdgeNumbers + k] = own[k];
}

// How many bits of a key are for a destination, or for num_dst, which dropped edges have in its place.
__device__ __host__ __forceinline__ int dst_bits(const StructureParams& p) {
  int bits = 1;
  while (p.num_dst >> bits) ++bits;
  return bits;
}

// The smallest key that an edge of this row can have, among the keys by source or those by destination.
__device__ __forceinline__ uint64_t row_key(const StructureParams& p, bool by_src, int64_t row) {
  return by_src ? uint64_t(row + 1) << dst_bits(p) : uint64_t(row);
}

// Writes an edge's two sort keys, each with its id. In the order of keys come the rows by destination,
// dropped edges, the rows by source, and dropped edges again. Within a source edges are ordered by
// destination, so that indices rise, or with as_given in the given order.
__device__ __forceinline__ void put(const StructureParams& p, bool as_given, int64_t id, int64_t src,
                                    int64_t dst) {
  auto* keys = static_cast<uint64_t*>(p.keys[0]);
  auto* places = static_cast<int32_t*>(p.places[0]);
  auto* ends = static_cast<int32_t*>(p.ends);
  const int64_t room = p.room;
  keys[id] = row_key(p, false, dst), keys[room + id] = row_key(p, true, src) | uint64_t(as_given ? 0 : dst);
  places[id] = places[room + id] = int32_t(id);
  ends[id] = int32_t(src), ends[room + id] = int32_t(dst);
}

// Gives the kept edges their ids, and writes the keys of all edges. Dropped edges have ids, too, the last
// ones, and keys that are sorted behind all rows. counts: arrays of the degrees of destinations and of
// sources, which this function increments; or two nulls.
__device__ __forceinline__ void number(const StructureParams& p, int32_t* const (&counts)[2]) {
  const auto* parts = static_cast<const int64_t*>(p.parts);
  int64_t mine = 0, kept = 0;
  bool src_falls = false, dst_falls = false;
  for (int64_t b = threadIdx.x; b < gridDim.x; b += kPlanThreads) {
    const int64_t found = parts[b * kEdgeNumbers + kKept];
    kept += found;
    if (b < blockIdx.x) mine += found;
    src_falls = src_falls || parts[b * kEdgeNumbers + kSrcFalls];
    dst_falls = dst_falls || parts[b * kEdgeNumbers + kDstFalls];
  }
  const bool as_given = !__syncthreads_or(src_falls) && __syncthreads_or(dst_falls) && !p.with_loops;
  int64_t before, num_kept;
  sum_before(mine, before), sum_before(kept, num_kept);

  const Run run(p);
  for (int64_t first = run.begin; first < run.end; first += kPlanThreads) {
    const int64_t e = first + threadIdx.x;
    int64_t src = 0, dst = 0;
    bool keep = false;
    if (e < run.end) src = load(p.src, e), dst = load(p.dst, e), keep = is_kept(p, src, dst);
    int total;
    const int64_t id = before + sum_before(int(keep), total);
    if (keep) {
      put(p, as_given, id, src, dst);
      if (counts[0]) atomicAdd(counts[0] + dst, 1), atomicAdd(counts[1] + src, 1);
      if (p.edge_map) p.edge_map[id] = e;
    } else if (e < run.end) {
      put(p, as_given, p.room - 1 - (e - id), p.num_src, p.num_dst);  // e - id: edges dropped before edge e
    }
    before += total;
  }
  const int64_t first = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kPlanThreads;
  for (int64_t i = first; i < p.num_loops; i += step) {
    put(p, as_given, num_kept + i, i, i);
    if (counts[0]) atomicAdd(counts[0] + i, 1), atomicAdd(counts[1] + i, 1);
    if (p.edge_map) p.edge_map[num_kept + i] = -1;
  }
  for (int64_t k = first; k < 2 * kDegreeScratch; k += step) static_cast<int64_t*>(p.degrees)[k] = 0;

  // The first block combines the numbers of all blocks.
  if (blockIdx.x > 0) return;
  int64_t own[kEdgeNumbers];
  for (int k = 0; k < kEdgeNumbers; ++k) {
    own[k] = of_no_edges(k);
    for (int64_t b = threadIdx.x; b < gridDim.x; b += kPlanThreads)
      own[k] = joined(k, own[k], parts[b * kEdgeNumbers + k]);
  }
  join_block(own);
  if (threadIdx.x > 0) return;
  for (int k = 0; k < kEdgeNumbers; ++k)
    p.numbers[k] = p.num_given || k > kDstHigh ? own[k] : k == kSrcLow || k == kDstLow ? 0 : -1;
  if (!p.done) return;
  __threadfence_system();
  *static_cast<volatile int64_t*>(p.done) = 1;
}

// How many of the sorted keys [0, count) are below `key`.
__device__ __forceinline__ int64_t below(const uint64_t* keys, int64_t count, uint64_t key) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Writes the CSR of a direction (side 0: by destination, 1: by source) from its keys, which are in
// p.keys[sorted]. It is called by `blocks` blocks, of which this is number `block`.
__device__ __forceinline__ void write_rows(const StructureParams& p, int side, int sorted, int64_t block,
                                           int64_t blocks) {
  const int64_t room = p.room, num_rows = side ? p.num_src : p.num_dst;
  const auto* keys = static_cast<const uint64_t*>(p.keys[sorted]) + side * room;
  const auto* places = static_cast<const int32_t*>(p.places[sorted]) + side * room;
  const auto* ends = static_cast<const int32_t*>(p.ends) + side * room;
  const int64_t num_cols = side ? p.num_dst : p.num_src;
  for (int64_t at = block * kPlanThreads + threadIdx.x; at < room || at <= num_rows;
       at += blocks * kPlanThreads) {
    if (at < room) {
      const int32_t id = places[at];
      p.eids[side][at] = id;
      // Dropped edges are in no row, but kernels may prefetch the rows at their indices: these must exist.
      p.indices[side][at] = min(ends[id], max(int32_t(num_cols) - 1, 0));
    }
    if (at <= num_rows) p.indptr[side][at] = below(keys, room, row_key(p, side, at));
  }
}

// The arguments by which degrees of a direction are counted. counts: Degrees::counts.
__device__ __host__ __forceinline__ Degrees degrees_of(const StructureParams& p, int side,
                                                       const int32_t* counts) {
  return {p.indptr[side],
          side ? p.num_src : p.num_dst,
          static_cast<int64_t*>(p.degrees) + side * kDegreeScratch,
          p.numbers + kEdgeNumbers + side * kDegreeNumbers,
          counts,
          p.done ? p.done + 1 + side : nullptr};
}

// How many bits of a key are used. The source is stored as source + 1, and num_src stands for dropped edges.
int bits_of(const StructureParams& p) {
  int bits = dst_bits(p);
  for (int64_t rest = p.num_src + 1; rest; rest /= 2) ++bits;
  return bits;
}

// ---- in one kernel ------------------------------------------------------------------------------------

// The size of a graph is here its number of edges, loops included, or of rows if these are more. A block of a
// cluster takes up to kEachOfCluster of them, because each edge has two keys, a block of a grid about
// kEachOfGrid. Up to the size kMostTogether one kernel is faster than several.
constexpr int64_t kEachOfCluster = kMostKeys / 2, kEachOfGrid = 1024, kMostTogether = int64_t(1) << 18;

// How many blocks the one kernel has, half of them for each direction; 0 if the graph is too large for it.
unsigned blocks_together(const StructureParams& p) {
  const int64_t work = std::max({p.room, p.num_src, p.num_dst});
  for (unsigned blocks = 2; blocks <= kMostOfCluster; blocks *= 2)
    if (work <= blocks * kEachOfCluster) return blocks;
  const int64_t most = std::min(device().multiprocessors, kMostEdgeBlocks) / 2;
  if (work > std::min(kMostTogether, most * kMostKeys)) return 0;
  return 2 * unsigned(std::min<int64_t>(blocks_of(work, 2 * kEachOfGrid).x, most));
}

// Arguments of together_kernel.
struct Together {
  StructureParams params;
  int bits;  // of a key
};

// Blocks: OfCluster or OfGrid (cooperative.cuh). p.sorting holds the degrees of the destinations, those of
// the sources, and the scratch of sort_together.
template <class Blocks>
__global__ void __launch_bounds__(kPlanThreads) together_kernel(const Together of) {
  const StructureParams& p = of.params;
  const Blocks all_blocks;
  const int side = blockIdx.x % 2;
  const unsigned block = blockIdx.x / 2, blocks = gridDim.x / 2;
  auto* by_dst = static_cast<int32_t*>(p.sorting);
  int32_t* const counts[] = {by_dst, by_dst + p.num_dst};
  int32_t* digits = counts[1] + p.num_src;
  for (int64_t k = int64_t(blockIdx.x) * kPlanThreads + threadIdx.x; k < p.num_dst + p.num_src;
       k += int64_t(gridDim.x) * kPlanThreads)
    by_dst[k] = 0;
  read(p);
  all_blocks.sync();
  number(p, counts);
  all_blocks.sync();
  count_degrees(degrees_of(p, side, counts[side]), block,
                blocks);  // before the sort, because the host waits for the degrees
  uint64_t* const keys[] = {static_cast<uint64_t*>(p.keys[0]), static_cast<uint64_t*>(p.keys[1])};
  int32_t* const places[] = {static_cast<int32_t*>(p.places[0]), static_cast<int32_t*>(p.places[1])};
  const int sorted = sort_together(all_blocks, keys, places, int(2 * p.room), of.bits, digits);
  write_rows(p, side, sorted, block, blocks);
}

// ---- in several kernels -------------------------------------------------------------------------------

__global__ void __launch_bounds__(kPlanThreads) read_kernel(const StructureParams p) { read(p); }
__global__ void __launch_bounds__(kPlanThreads) number_kernel(const StructureParams p) {
  number(p, {nullptr, nullptr});
}
// blockIdx.y: the direction. `sort` leaves the sorted keys in keys[1].
__global__ void __launch_bounds__(kPlanThreads) rows_kernel(const StructureParams p) {
  write_rows(p, blockIdx.y, 1, blockIdx.x, gridDim.x);
}

// Sorts keys[0] and places[0] into keys[1] and places[1], with `bytes` bytes of scratch at `memory`. With
// memory = null it only sets `bytes` to what it needs.
cudaError_t sort(const StructureParams& p, void* memory, size_t& bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(
      memory, bytes, static_cast<const uint64_t*>(p.keys[0]), static_cast<uint64_t*>(p.keys[1]),
      static_cast<const int32_t*>(p.places[0]), static_cast<int32_t*>(p.places[1]),
      static_cast<uint32_t>(2 * p.room), 0, bits_of(p), stream);
}

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

const char* sorting_bytes(const StructureParams& p, size_t& bytes) {
  const unsigned together = blocks_together(p);
  bytes = together ? (size_t(p.num_dst + p.num_src) + together * kDigits) * sizeof(int32_t) : 0;
  return together ? nullptr : text_of(sort(p, nullptr, bytes, nullptr));
}

const char* structure(const StructureParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (const unsigned together = blocks_together(p)) {
    launch_together(s, dim3(together), together_kernel<OfCluster>, together_kernel<OfGrid>,
                    Together{p, bits_of(p)});
    return last_error();
  }
  constexpr int64_t kEach = 4 * kPlanThreads;  // edges per block
  const int64_t work = std::max(p.room, int64_t(2 * kDegreeScratch));
  const auto blocks = unsigned(std::clamp<int64_t>((work + kEach - 1) / kEach, 1, kMostEdgeBlocks));
  read_kernel<<<blocks, kPlanThreads, 0, s>>>(p);
  number_kernel<<<blocks, kPlanThreads, 0, s>>>(p);
  if (p.room > 0) {
    size_t bytes = p.sorting_bytes;
    if (const char* error = text_of(sort(p, p.sorting, bytes, s))) return error;
  }
  const int64_t most = std::max(p.room, std::max(p.num_src, p.num_dst) + 1);
  rows_kernel<<<dim3(blocks_of(most, kPlanThreads).x, 2), kPlanThreads, 0, s>>>(p);
  const Degrees both[] = {degrees_of(p, 0, nullptr), degrees_of(p, 1, nullptr)};
  return degrees(both, 2, true, stream);
}

// ---- numbers for the host -----------------------------------------------------------------------------

// A pool of pinned memory for the numbers and for the flags that tell when they are complete.
class HostNumbers::Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed, because CUDA may have shut down before
    return *pool;
  }
  int64_t* take(cudaError_t& error) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        int64_t* found = free_.back();
        free_.pop_back();
        return found;
      }
    }
    void* made = nullptr;
    error =
        cudaHostAlloc(&made, (kStructureNumbers + kStructureParts) * sizeof(int64_t), cudaHostAllocPortable);
    return static_cast<int64_t*>(made);
  }
  void put_back(int64_t* numbers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(numbers);
  }

 private:
  std::mutex mutex_;
  std::vector<int64_t*> free_;
};

HostNumbers::HostNumbers() {
  cudaError_t error = cudaSuccess;
  numbers_ = Pool::get().take(error);
  error_ = text_of(error);
  if (numbers_) std::fill_n(done(), kStructureParts, 0);
}
HostNumbers::~HostNumbers() {
  if (numbers_) Pool::get().put_back(numbers_);
}
const char* HostNumbers::wait(void* stream) {
  // Polls for about as long as a small graph takes if nothing else is in the stream; only then waits for the
  // stream.
  for (int spin = 0; spin < (1 << 17); ++spin) {
    int64_t parts = 0;
    for (int k = 0; k < kStructureParts; ++k) parts += __atomic_load_n(done() + k, __ATOMIC_ACQUIRE);
    if (parts == kStructureParts) return nullptr;
  }
  return text_of(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

}  // namespace dfgnn::cuda
