// The backward of the backward of attention within blocks (core/blocks.h), in 32 and 64 bits, of the parts
// that the passes of tiles.cuh are made of. A block of threads takes a window of 64 rows and one head: of
// queries, whose columns it reads twice, first for tau and rho, or of keys. Columns are loaded chunk by chunk
// without overlap, because four arrays of them leave no shared memory for it.
//
// Names from other files: those that tiles.cuh lists.
#pragma once

#include "block_launch.cuh"

namespace dfgnn::cuda {

struct SecondTileParams : BlockTileParams {
  const void *rows[4], *columns[4];  // of queries: q, a, g; of keys: k, c, v, e
  const void *bias, *of_bias;        // b and f [M, H], or null: 0
  void *tau, *rho;                   // [N, H], which the pass over queries writes, and that over keys reads
  // The results are out_c (of query or key), out_d (of grad_out or value) and, of keys, row_sum (of bias).
};

template <typename T, int D, bool OF_KEYS>
struct SecondLayout {
  static constexpr int ROW_ARRAYS = OF_KEYS ? 4 : 3, COLUMN_ARRAYS = OF_KEYS ? 3 : 4;
  static constexpr int ROWS = kTileRows * kHalves<T, D> * 2, COLUMNS = kTileCols * kHalves<T, D> * 2;
  static constexpr int FIRST_COLUMN = ROW_ARRAYS * ROWS, STATS = FIRST_COLUMN + COLUMN_ARRAYS * COLUMNS;
  static constexpr int OWN = STATS + 5 * kTileCols * int(sizeof(T));
  static constexpr int BYTES = OWN > LayoutOf<T, D>::BYTES ? OWN : LayoutOf<T, D>::BYTES;
};

// A query's numbers, of which log_sum is in the unit kUnit.
template <typename A>
struct QueryStats {
  A max, log_sum, delta, tau, rho;
};

template <typename T, int D, bool OF_KEYS>
__global__ void __launch_bounds__(kTileThreads, 1) second_kernel(const __grid_constant__ SecondTileParams p) {
  using A = T;
  using L = SecondLayout<T, D, OF_KEYS>;
  constexpr int C = kHalves<T, D> / 8, V = kVec<T>, N = kTileCols / 8, SOME = 2;
  follow();
  extern __shared__ __align__(128) char shared[];
  const TilePlace<T, D> me(p, shared, true);
  TileRows<T, D, kInBlocks, OF_KEYS ? Pass::sources : Pass::destinations> rows;
  rows.load(me);
  __syncthreads();  // the rows' deltas were in shared memory, too

  // Starts copies of `count` rows of an array, row r of which is node_of(r).
  const auto copy = [&](const void* from, int to, int count, auto node_of) {
    for (int at = me.thread; at < count * C; at += kTileThreads)
      copy_async<16>(me.smem + to + piece_of<T, kHalves<T, D>>(at / C, at % C),
                     me.element(from, node_of(at / C)) + at % C * V);
  };
  repeat<L::ROW_ARRAYS>(
      [&](int k) { copy(p.rows[k], k * L::ROWS, kTileRows, [&](int r) { return me.row_of(r); }); });
  commit_copies();
  RowOperand<T, D, false> row[L::ROW_ARRAYS];
  repeat<L::ROW_ARRAYS>([&](int k) { row[k].init(me.smem + k * L::ROWS, me.warp, me.lane); });
  const auto column = [&](int k) { return me.smem + L::FIRST_COLUMN + k * L::COLUMNS; };

  A of_bias[2] = {};  // f of the rows
  QueryStats<A> query[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (OF_KEYS) {
      of_bias[i] = p.of_bias ? static_cast<const A*>(p.of_bias)[rows.row_head[i]] : A(0);
    } else {
      query[i] = {rows.top[i], rows.log_sum[i], rows.delta[i], A(0), A(0)};
    }
  }
  A* const stats = reinterpret_cast<A*>(shared + L::STATS);
  const A scale = scale_of<A>(p);
  A first_sum[D / 8][4] = {}, second_sum[D / 8][4] = {}, bias_sum[2] = {};

  constexpr int SWEEPS = OF_KEYS ? 1 : 2;
#pragma unroll 1
  for (int sweep = 0; sweep < SWEEPS; ++sweep) {
    const bool sums_alone = !OF_KEYS && sweep == 0;
#pragma unroll 1
    for (int chunk = 0; chunk < me.item.end; ++chunk) {
      const int first_column = me.first_column + chunk * kTileCols;
      const auto node_of = [&](int c) { return min(first_column + c, me.last_column); };
      __syncthreads();  // until no warp reads the chunk before
      repeat<L::COLUMN_ARRAYS>(
          [&](int k) { copy(p.columns[k], L::FIRST_COLUMN + k * L::COLUMNS, kTileCols, node_of); });
      commit_copies();
      if (me.thread < kTileCols) {
        const int64_t at = int64_t(node_of(me.thread)) * me.heads + me.head;
        A* to = stats + me.thread;
        if constexpr (OF_KEYS) {
          const NodeStats<A> of = load_stats(static_cast<const NodeStats<A>*>(p.col_stats) + at);
          to[0] = of.row.max, to[kTileCols] = of.row.log_sum * kUnit<A>, to[2 * kTileCols] = of.delta;
          to[3 * kTileCols] = static_cast<const A*>(p.tau)[at],
                 to[4 * kTileCols] = static_cast<const A*>(p.rho)[at];
        } else {
          to[0] = p.bias ? static_cast<const A*>(p.bias)[at] : A(0);
          to[kTileCols] = p.of_bias ? static_cast<const A*>(p.of_bias)[at] : A(0);
        }
      }
      wait_copies<0>();
      __syncthreads();
      uint32_t mask[2];
      repeat<2>([&](int i) {
        mask[i] = bits_below(rows.range[i].y - first_column) & ~bits_below(rows.range[i].x - first_column);
      });
      if (!__any_sync(kAll, (mask[0] | mask[1]) != 0)) continue;

#pragma unroll 1
      for (int first = 0; first < N; first += SOME) {
        A w[SOME][4] = {}, ds[SOME][4] = {}, t[SOME][4] = {}, u[SOME][4] = {};
        const auto times = [&](A(&to)[SOME][4], int r, int c) {
          row[r].times(to, column(c), me.warp, me.lane, first);
        };
        if constexpr (OF_KEYS) {
          times(w, 0, 0), times(ds, 2, 2), times(t, 0, 1), times(t, 1, 0), times(u, 3, 2);
        } else {
          times(w, 0, 0), times(ds, 2, 2), times(t, 1, 0), times(t, 0, 1), times(u, 2, 3);
        }
        repeat<SOME, 4>([&](int m, int e) {
          const int i = e >> 1, at = 8 * (first + m) + 2 * me.t + (e & 1);
          QueryStats<A> of = query[i];
          A bias = rows.term[i], f = of_bias[i];
          if constexpr (OF_KEYS) {
            of = {stats[at], stats[kTileCols + at], stats[2 * kTileCols + at], stats[3 * kTileCols + at],
                  stats[4 * kTileCols + at]};
          } else {
            bias = stats[at], f = stats[kTileCols + at];
          }
          const A x = minus(fma(w[m][e], scale, bias), of.max);
          const bool exists = (mask[i] >> at) & 1;
          const A weight = exists ? exp_unit(fma(x, kUnit<A>, -of.log_sum)) : A(0);
          const A slope = weight * (ds[m][e] - of.delta), whole = fma(t[m][e], scale, f);
          if (sums_alone) {
            query[i].tau += weight * whole;
            query[i].rho += slope * whole + weight * u[m][e];
          } else {
            const A shifted = whole - of.tau;
            w[m][e] = weight, ds[m][e] = slope, t[m][e] = weight * shifted;
            u[m][e] = slope * shifted + weight * (u[m][e] - of.rho);
            bias_sum[i] += u[m][e];
          }
        });
        if (sums_alone) continue;
        const Packed<T, SOME> of_x(u), of_slope(ds), of_y(t), of_weight(w);
        add_columns<T, D>(first_sum, of_x, column(0), me.lane, first);
        add_columns<T, D>(first_sum, of_slope, column(1), me.lane, first);
        add_columns<T, D>(second_sum, of_y, column(2), me.lane, first);
        if constexpr (!OF_KEYS) add_columns<T, D>(second_sum, of_weight, column(3), me.lane, first);
      }
    }
    if constexpr (!OF_KEYS) {
      if (!sums_alone) break;
      repeat<2>([&](int i) {
        QueryStats<A>& of = query[i];
        of.tau = quad_sum(of.tau), of.rho = quad_sum(of.rho);
        if (p.grad_log_sum) of.rho -= of.tau * static_cast<const A*>(p.grad_log_sum)[rows.row_head[i]];
        if (me.t == 0 && rows.ok[i]) {
          static_cast<A*>(p.tau)[rows.row_head[i]] = of.tau;
          static_cast<A*>(p.rho)[rows.row_head[i]] = of.rho;
        }
      });
    }
  }

  wait_copies<0>();  // of the rows, where there are no columns
  __syncthreads();
  const A factor[2] = {scale, scale}, one[2] = {A(1), A(1)};
  store_sums(me, first_sum, factor, p.out_c, nullptr);
  store_sums(me, second_sum, one, p.out_d, nullptr);
  if constexpr (OF_KEYS) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const A sum = quad_sum(bias_sum[i]);
      if (me.t == 0 && rows.ok[i] && p.row_sum) reinterpret_cast<A*>(p.row_sum)[rows.row_head[i]] = sum;
    }
  }
}

template <typename T, bool OF_KEYS>
void launch_second(const SecondTileParams& p, int dim, cudaStream_t stream) {
  with_block_size<T>(dim, [&](auto size) {
    constexpr int D = decltype(size)::value, BYTES = SecondLayout<T, D, OF_KEYS>::BYTES;
    const auto kernel = second_kernel<T, D, OF_KEYS>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    cuda::launch(stream, dim3(unsigned((p.num_rows + kTileRows - 1) / kTileRows), unsigned(p.heads)),
                 kTileThreads, BYTES, kernel, p);
  });
}

template <typename T>
void block_second(const BlockParams& b, const BlockRanges& ranges, cudaStream_t stream) {
  SecondTileParams p{};
  static_cast<BlockTileParams&>(p) = block_params(b, b.num_rows, ranges.rows);
  const void *queries[] = {b.query, b.of_query, b.grad_out}, *keys[] = {b.key, b.of_key, b.value, b.of_value};
  std::copy_n(queries, 3, p.rows), std::copy_n(keys, 4, p.columns);
  p.b = b.grad_out, p.out = b.out, p.row_stats = static_cast<const RowStats<float>*>(b.stats);
  p.node_stats = static_cast<NodeStats<float>*>(b.delta), p.grad_log_sum = b.grad_log_sum;
  p.bias = b.key_bias, p.of_bias = b.of_bias, p.tau = b.tau, p.rho = b.rho;
  p.out_c = b.grad_query, p.out_d = b.grad_grad_out;
  if (p.num_rows) launch_second<T, false>(p, b.dim, stream);

  SecondTileParams of_keys{};
  static_cast<BlockTileParams&>(of_keys) = block_params(b, b.num_keys, ranges.keys);
  std::copy_n(keys, 4, of_keys.rows), std::copy_n(queries, 3, of_keys.columns);
  of_keys.row_term = static_cast<const float*>(b.key_bias), of_keys.col_stats = b.delta;
  of_keys.of_bias = b.of_bias, of_keys.tau = b.tau, of_keys.rho = b.rho;
  of_keys.out_c = b.grad_key, of_keys.out_d = b.grad_value,
  of_keys.row_sum = static_cast<float*>(b.grad_bias);
  if (of_keys.num_rows) launch_second<T, true>(of_keys, b.dim, stream);
}

}  // namespace dfgnn::cuda
