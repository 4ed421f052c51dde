// The gradient of a projection of edge features that was moved to the nodes (core/edge_terms.h): for each
// head, grad_proj [D, width] = sum over nodes of scale x_0 y_0^T + x_1 y_1^T, with feature rows x_k [D] and
// sums of edge features y_k [width] of the node. A block computes kColumns columns (of D) and kFeats features
// (of width) of a head; its warps take nodes in turn, first for x_0 and y_0, then for x_1 and y_1. The warps'
// sums are added up in shared memory, the blocks' by a second kernel, in a fixed order. Each array is read
// once, except that blocks of other columns read y_k again, and blocks of other features x_k.
#include "../launch.cuh"
#include "../mma.cuh"
#include "edge_terms.h"

namespace dfgnn::cuda {
namespace {

// kMostSums: the most partial sums (ProjectionGradParams::parts).
constexpr int kColumns = 64, kFeats = 16, kMostSums = 128;

// Return a word of two 16-bit numbers: the low halves of a and b, or their high halves.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// A warp's sums of x y^T, kColumns x kFeats numbers in the registers of its lanes. add() adds the next ROWS
// rows: x and y point to the block's first column and feature in the first of these rows, x_stride and
// y_stride lead to the next row; rows, columns and feats are how many exist from there on. each(f) calls
// f(column, feature, sum) for the sums that this lane holds.
//
// In 16 bits tensor cores compute them: the instruction m16n8k16 (`multiply` in mma.cuh) sums over 16 rows,
// and 4 x 2 such products cover the block. Lane 4 g + t loads 8 columns and 2 features of each of 4 rows. The
// instruction's indices are assigned to rows, columns and features such that a lane needs only what it
// loaded: rows 4 t + ..., columns 8 g + ..., features 2 g + ....
template <typename T>
struct Products {
  static constexpr int ROWS = 16;
  float sum[4][2][4] = {};
  const int g = (threadIdx.x & 31) / 4, t = threadIdx.x % 4;

  __device__ __forceinline__ void add(const T* x, const T* y, int64_t x_stride, int64_t y_stride,
                                      int64_t rows, int columns, int feats) {
    Raw a[4];
    uint32_t b[4];
    repeat<4>([&](int k) {
      const int64_t i = 4 * t + k;
      a[k] = {}, b[k] = 0;
      if (i < rows && 8 * g < columns) a[k] = load_raw(x + i * x_stride + 8 * g);
      if (i < rows && 2 * g < feats)
        b[k] = __ldg(reinterpret_cast<const uint32_t*>(y + i * y_stride + 2 * g));
    });
    const uint32_t even[2] = {low_halves(b[0], b[1]), low_halves(b[2], b[3])};
    const uint32_t odd[2] = {high_halves(b[0], b[1]), high_halves(b[2], b[3])};
    repeat<4>([&](int m) {
      const uint32_t first[4] = {low_halves(a[0].x[m], a[1].x[m]), high_halves(a[0].x[m], a[1].x[m]),
                                 low_halves(a[2].x[m], a[3].x[m]), high_halves(a[2].x[m], a[3].x[m])};
      multiply<T>(sum[m][0], first, even[0], even[1]);
      multiply<T>(sum[m][1], first, odd[0], odd[1]);
    });
  }
  template <class F>
  __device__ __forceinline__ void each(F f) {
    repeat<4, 2>([&](int m, int n) {
      repeat<4>([&](int k) { f(8 * g + 2 * m + k / 2, 4 * t + 2 * (k % 2) + n, sum[m][n][k]); });
    });
  }
};

// For float32, one row after the other: a lane has 4 columns and half of the features.
template <>
struct Products<float> {
  static constexpr int ROWS = 4;
  float sum[4][8] = {};
  const int column = threadIdx.x % 16 * 4, feat = threadIdx.x / 16 % 2 * 8;

  __device__ __forceinline__ void add(const float* x, const float* y, int64_t x_stride, int64_t y_stride,
                                      int64_t rows, int columns, int feats) {
    float a[ROWS][4], b[ROWS][2][4];
    repeat<ROWS>([&](int k) {
      Raw raw{}, halves[2] = {};
      if (k < rows && column < columns) raw = load_raw(x + k * x_stride + column);
      repeat<2>([&](int n) {
        if (k < rows && feat + 4 * n < feats) halves[n] = load_raw(y + k * y_stride + feat + 4 * n);
        Pack<float>::unpack(halves[n], b[k][n]);
      });
      Pack<float>::unpack(raw, a[k]);
    });
    repeat<ROWS>(
        [&](int k) { repeat<4, 8>([&](int c, int f) { sum[c][f] += a[k][c] * b[k][f / 4][f % 4]; }); });
  }
  template <class F>
  __device__ __forceinline__ void each(F f) {
    repeat<4, 8>([&](int c, int n) { f(column + c, feat + n, sum[c][n]); });
  }
};

// Writes a partial sum per blockIdx.x. The grid is (parts, heads, groups of kColumns columns x groups of
// kFeats features). groups: how many groups of columns there are.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    products_kernel(const ProjectionGradParams p, const int groups) {
  follow();
  constexpr int ROWS = Products<T>::ROWS;
  const int warp = threadIdx.x >> 5, head = blockIdx.y;
  const int first_column = blockIdx.z % groups * kColumns, first_feat = blockIdx.z / groups * kFeats;
  const int columns = p.dim - first_column, feats = p.width - first_feat;
  const int64_t x_stride = int64_t(p.heads) * p.dim, y_stride = int64_t(p.heads) * p.width;
  Products<T> products;
  for (int k = 0; k < 2; ++k) {
    const T* const x = static_cast<const T*>(p.rows[k]) + int64_t(head) * p.dim + first_column;
    const T* const y = static_cast<const T*>(p.sums[k]) + int64_t(head) * p.width + first_feat;
#pragma unroll 2
    for (int64_t row = (int64_t(blockIdx.x) * kWarps + warp) * ROWS; row < p.num_rows;
         row += int64_t(gridDim.x) * kWarps * ROWS)
      products.add(x + row * x_stride, y + row * y_stride, x_stride, y_stride, p.num_rows - row, columns,
                   feats);
    if (k == 0) products.each([&](int, int, float& sum) { sum *= float(p.scale); });
  }

  __shared__ float shared[kWarps][kColumns][kFeats + 1];
  products.each([&](int d, int c, float sum) { shared[warp][d][c] = sum; });
  __syncthreads();
  float* const to = static_cast<float*>(p.partial) + (int64_t(blockIdx.x) * p.heads + head) * p.dim * p.width;
  for (int k = threadIdx.x; k < kColumns * kFeats; k += kThreads) {
    const int d = k / kFeats, c = k % kFeats;
    if (d >= columns || c >= feats) continue;
    float total = 0;
    repeat<kWarps>([&](int w) { total += shared[w][d][c]; });
    to[int64_t(first_column + d) * p.width + first_feat + c] = total;
  }
}

// Adds up the partial sums `parts` [num_parts, size].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const float* parts, int num_parts, int64_t size, T* sums) {
  follow();
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= size) return;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < num_parts; ++part) sum += parts[part * size + k];
  sums[k] = T(sum);
}

// How many blocks cover the columns of a head.
int groups_of(const ProjectionGradParams& p) { return (p.dim + kColumns - 1) / kColumns; }

}  // namespace

// This gives each multiprocessor about four blocks, but each warp at least 16 rows.
int64_t projection_parts(const ProjectionGradParams& p) {
  const int64_t wanted = int64_t(4) * device().multiprocessors / (int64_t(p.heads) * groups_of(p));
  return std::clamp<int64_t>(std::min(wanted, p.num_rows / (16 * kWarps)), 1, kMostSums);
}

const char* projection_grad(const ProjectionGradParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) < 8) {
      const int groups = groups_of(p), steps = (p.width + kFeats - 1) / kFeats;
      launch(s, dim3(unsigned(p.parts), p.heads, groups * steps), kThreads, 0, products_kernel<T>, p, groups);
      const int64_t size = int64_t(p.heads) * p.dim * p.width;
      launch(s, blocks_of(size, kThreads), kThreads, 0, join_kernel<T>, static_cast<const float*>(p.partial),
             int(p.parts), size, static_cast<T*>(p.out));
    }
    return last_error();
  });
}

}  // namespace dfgnn::cuda
