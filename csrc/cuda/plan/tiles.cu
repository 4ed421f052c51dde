// Builds block-sparse tiles (params.h, which defines windows and chunks) on the device, as
// dfgnn/plan/tiles.py does with tensors elsewhere. A block takes a window of kTileRows rows.
#include <climits>

#include "../scan.cuh"

namespace dfgnn::cuda {
namespace {

// The columns of a window are marked in a bitmap of kSpan bits, which covers kSpan consecutive columns at a
// time: first those from the window's least column on, then those from the least column beyond these on, and
// so on. The bitmap has kWords words, kWordsEach per thread.
constexpr int kWords = 4096, kSpan = 32 * kWords, kWordsEach = kWords / kPlanThreads;

// A window's edges and the bitmap, in shared memory. Its functions are called by all threads of the block.
struct Columns {
  // begin: position in the CSR of each row's first edge. cut: how many edges the window has in earlier rows.
  int begin[kTileRows], cut[kTileRows + 1];
  int next;  // the least column beyond the bitmap
  unsigned bits[kWords];

  // Sets begin and cut for a window. Of each row at most the first `most` edges count.
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

  // Calls f(column, row in the window) for every edge; the block's threads share the edges.
  template <class F>
  __device__ __forceinline__ void edges(const int32_t* indices, F f) const {
    constexpr int kAhead = 4;  // loads in flight per thread
    for (int64_t t = threadIdx.x; t < cut[kTileRows]; t += kAhead * kPlanThreads) {
      int row[kAhead], column[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64_t mine = t + k * kPlanThreads;
        row[k] = -1;
        if (mine >= cut[kTileRows]) continue;
        int r = 0;  // becomes the last row with cut[r] <= mine, by binary search
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

  // The bit of a column in a bitmap of the columns from `low` on; kSpan or more if the column has none.
  __device__ __forceinline__ static unsigned place(int column, int low) {
    return column < low ? unsigned(kSpan) : unsigned(column) - unsigned(low);
  }

  // Marks those of the window's columns that are in low ... low + kSpan - 1, and returns the least one
  // beyond, or INT_MAX.
  __device__ __forceinline__ int mark(const int32_t* indices, int low) {
    __syncthreads();  // wait until all threads have read the previous marks
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

  // Returns the least column of the window, or INT_MAX if it has no edges. Marks nothing, as all columns of
  // the bitmap are negative.
  __device__ __forceinline__ int first(const int32_t* indices) { return mark(indices, -kSpan); }
};

// For every step-th window: adds the numbers of its edges and of its distinct columns to `sums`, or, if
// `sums` is null, writes how many chunks the window has. most: at most this number of edges of a row count.
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

// Writes a window's chunks, which are 0 before. A column's rank among the window's distinct columns says in
// which chunk it is, and where.
__global__ void __launch_bounds__(kPlanThreads)
    tiles_kernel(const int64_t* indptr, const int32_t* indices, int64_t num_rows, const int64_t* offsets,
                 int32_t* chunks, int32_t* twice) {
  __shared__ Columns columns;
  __shared__ int rank_of[kWords];  // by word of the bitmap: the rank of its first marked column
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
  // The last chunk's columns are padded with its first one.
  const int used = count % kTileCols;
  int32_t* last = window + int64_t(count / kTileCols) * kTileInts;
  if (used && int(threadIdx.x) >= used && threadIdx.x < kTileCols) last[threadIdx.x] = last[0];
}

}  // namespace

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
