// Attention within blocks (blocks.h): the columns of each row, and the choice of the kernels.
#include "block_passes.cuh"
#include "blocks.h"

namespace dfgnn::cuda {
namespace {

constexpr int kRangeThreads = 256;

// Offsets of rows, of which none is taken beyond them.
struct Offsets {
  const void* data;
  bool is_long;
  int count;  // of blocks, one less than of offsets
  int end;    // of rows

  __device__ __forceinline__ int operator[](int b) const {
    const int64_t x = is_long ? __ldg(static_cast<const long long*>(data) + b)
                              : int64_t(__ldg(static_cast<const int*>(data) + b));
    return int(min(max(x, int64_t(0)), int64_t(end)));
  }
};

// The rows by `columns` of the block that has row r by `rows`; none where no block has it.
__device__ __forceinline__ int2 range_of(int r, const Offsets& rows, const Offsets& columns) {
  int low = -1, high = rows.count;  // offset `low` is r or less, and offset `high` more, or those at the ends
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (rows[middle] <= r) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (low < 0 || r >= rows[high]) {
    const int none = columns[low < 0 ? 0 : columns.count];
    return make_int2(none, none);
  }
  return make_int2(columns[low], columns[high]);
}

__global__ void __launch_bounds__(kRangeThreads)
    ranges_kernel(Offsets rows, Offsets columns, int2* of_rows, int2* of_columns) {
  follow();
  const int at = blockIdx.x * kRangeThreads + threadIdx.x;
  if (at < rows.end) {
    of_rows[at] = range_of(at, rows, columns);
  } else if (of_columns && at - rows.end < columns.end) {
    of_columns[at - rows.end] = range_of(at - rows.end, columns, rows);
  }
}

template <typename T>
void run(const BlockParams& p, BlockPass pass, const BlockRanges& ranges, cudaStream_t stream) {
  if (pass == BlockPass::forward) return block_forward<T>(p, ranges, stream);
  if (pass == BlockPass::backward) return block_backward<T>(p, ranges, stream);
  if constexpr (sizeof(T) >= 4) block_second<T>(p, ranges, stream);
}

}  // namespace

const char* block_attention(const BlockParams& p, BlockPass pass, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Offsets rows = {p.offsets, p.offsets_are_long, int(p.num_blocks), int(p.num_rows)};
  const Offsets keys = {p.key_offsets, p.key_offsets_are_long, int(p.num_blocks), int(p.num_keys)};
  int2* const of_rows = static_cast<int2*>(p.items);
  // Where queries and keys have the same blocks, their ranges are the same.
  const bool same = p.offsets == p.key_offsets && p.num_rows == p.num_keys;
  int2* const of_keys = same ? of_rows : of_rows + p.num_rows;
  const bool both = !same && pass != BlockPass::forward;
  const int64_t count = p.num_rows + (both ? p.num_keys : 0);
  if (count == 0) return nullptr;
  launch(s, blocks_of(count, kRangeThreads), kRangeThreads, 0, ranges_kernel, rows, keys, of_rows,
         both ? of_keys : static_cast<int2*>(nullptr));
  with_type(p.dtype, [&](auto type) { run<decltype(type)>(p, pass, {of_rows, of_keys}, s); });
  return last_error();
}

}  // namespace dfgnn::cuda
