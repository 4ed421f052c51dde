// Score terms of additive attention, alpha_src and alpha_dst, and their gradients. core/terms.h defines the
// arguments and formulas.
#include "head_sums.h"
#include "kernels.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// Writes to `to` the attention vector p.vectors[k] [H, vector_dim] as accumulators [H, dim], padded with
// zeros. k: 0 for that of alpha_src, 1 for that of alpha_dst.
template <class T>
void unpack_vector(const TermsParams& p, int k, Acc<T>* to) {
  using A = Acc<T>;
  for (int h = 0; h < p.heads; ++h)
    for (int d = 0; d < p.dim; ++d) {
      const int64_t at = int64_t(h) * p.vector_dim + d;
      A x = 0;
      if (d < p.vector_dim)
        x = p.vectors_are_acc ? static_cast<const A*>(p.vectors[k])[at]
                              : load<T, 1>(static_cast<const T*>(p.vectors[k]) + at);
      to[int64_t(h) * p.dim + d] = x;
    }
}

template <class T>
void terms_as(const TermsParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int64_t size = int64_t(p.heads) * p.dim;
  Buffer<A> vectors(2 * size);
  for (int k = 0; k < 2; ++k) unpack_vector<T>(p, k, vectors + k * size);
  const int64_t most = kColumnsAtOnce / (size > 0 ? size : 1) + 1;
  parallel_range(parallel, p.num_rows[0], kRowsPerThread, [&](int64_t first, int64_t last) {
    const HeadSums<A> head_sums(p.heads, p.dim);
    Buffer<A> sums(most * p.heads);
    for (int64_t n = first; n < last; n += most)
      for (int k = 0; k < 2; ++k) {
        const int64_t end = n + most < last ? n + most : last,
                      count = (end < p.num_rows[k] ? end : p.num_rows[k]) - n;
        if (count <= 0) continue;
        const A* const vector = vectors + k * size;
        head_sums(
            [&](const auto& add) __attribute__((always_inline)) {
              const T* row = static_cast<const T*>(p.feat) + n * size;
              for (int64_t r = 0; r < count; ++r, row += size)
                add([&](auto width, int at, const auto& own, auto total) __attribute__((always_inline)) {
                  constexpr int W = width.value;
                  return total + own(load<T, W>(row + at)) * load_vector<Vec<A, W>>(vector + at);
                });
            },
            sums);
        __builtin_memcpy(static_cast<A*>(p.terms[k]) + n * p.heads, sums,
                         std::size_t(count) * p.heads * sizeof(A));
      }
  });
}

// For the rows [first, last) and V vectors of columns from `at` on: adds to grad_feat the gradient by way of
// the terms, and writes to `sums` [kTermsSums, H, dim] the sums of TermsBackwardParams over these rows.
// vectors: both attention vectors as accumulators, [2, H, dim]. head_of: the head of each column. wide:
// whether each vector of columns is within one head.
template <class T, int W, int V, bool wide>
void some_columns(const TermsBackwardParams& q, const Bits<Acc<T>>* head_of, const Acc<T>* vectors,
                  int64_t first, int64_t last, int64_t at, Acc<T>* sums) {
  using A = Acc<T>;
  using X = Vec<A, W>;
  const TermsParams& p = q.of;
  const int heads = p.heads;
  const int64_t size = int64_t(heads) * p.dim;
  X of_src[V], of_dst[V], sum[V] = {}, sum2[V] = {}, total[V] = {};
  Vec<Bits<A>, W> lanes[V];
  int64_t head[V];
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) {
    head[k] = head_of[at + k * W];
    lanes[k] = load_vector<Vec<Bits<A>, W>>(head_of + at + k * W) - Bits<A>(head[k]);
    of_src[k] = load_vector<X>(vectors + at + k * W), of_dst[k] = load_vector<X>(vectors + size + at + k * W);
  }
  Buffer<A> padded(heads + W);
  // Returns row n of `terms` [rows, H], which are gradients of terms, so that W elements can be read from any
  // head on: in place, or near the end of the array as a copy in `padded`.
  const auto row_of = [&](const void* terms, int64_t n, int64_t rows, A* padded)
                          __attribute__((always_inline)) {
                            const A* row = static_cast<const A*>(terms) + n * heads;
                            if (wide || (n + 1) * heads + W <= rows * heads) return row;
                            __builtin_memcpy(padded, row, std::size_t(heads) * sizeof(A));
                            return static_cast<const A*>(padded);
                          };
  // Returns for each column of vector k the entry of its head in row [H].
  const auto of_columns = [&](const A* row, int k) __attribute__((always_inline)) -> X {
    if constexpr (wide)
      return splat<A, W>(row[head[k]]);
    else
      return spread<A, W>(row + head[k], lanes[k]);
  };
  // Processes the rows [begin, end). both: whether these have both terms, as those below num_rows[1] have;
  // the others have alpha_src alone.
  const auto walk = [&](int64_t begin, int64_t end, auto both) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t here = n * size + at;
      const T* const x = static_cast<const T*>(p.feat) + here;
      T* const grad = static_cast<T*>(q.grad_feat) + here;
      X result[V];
      const A* row = row_of(q.grad_terms[0], n, p.num_rows[0], padded);
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) {
        const X u = of_columns(row, k);
        sum[k] += u * load<T, W>(x + k * W);
        result[k] = u * of_src[k];
      }
      if constexpr (both.value) {
        row = row_of(q.grad_terms[1], n, p.num_rows[1], padded);
#pragma GCC unroll 4
        for (int k = 0; k < V; ++k) {
          const X w = of_columns(row, k);
          sum2[k] += w * load<T, W>(x + k * W);
          result[k] += w * of_dst[k];
        }
        if (q.grad_out)
#pragma GCC unroll 4
          for (int k = 0; k < V; ++k)
            total[k] += load<T, W>(static_cast<const T*>(q.grad_out) + here + k * W);
      }
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) store<T, W>(grad + k * W, load<T, W>(grad + k * W) + result[k]);
    }
  };
  const int64_t shared = last < p.num_rows[1] ? last : first < p.num_rows[1] ? p.num_rows[1] : first;
  walk(first, shared, std::true_type());
  walk(shared, last, std::false_type());
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) {
    store_vector(sums + at + k * W, sum[k]);
    store_vector(sums + size + at + k * W, sum2[k]);
    store_vector(sums + 2 * size + at + k * W, total[k]);
  }
}

// Calls some_columns for the columns of [H, dim] from `at` to the last one, with narrower vectors at the end.
template <class T, int W = kLanes<Acc<T>>>
void some_rows(const TermsBackwardParams& q, const Bits<Acc<T>>* head_of, const Acc<T>* vectors,
               int64_t first, int64_t last, Acc<T>* sums, int64_t at = 0) {
  using A = Acc<T>;
  constexpr int V = kVectorBytes == 64 ? 4 : 2;  // vectors per tile, which 32 or 16 registers can hold
  const int64_t size = int64_t(q.of.heads) * q.of.dim;
  const bool wide = W == 1 || q.of.heads == 1 || (at % W == 0 && q.of.dim % W == 0);
  const auto tile = [&](auto vectors_of_tile) {
    constexpr int N = vectors_of_tile.value;
    for (; at + N * W <= size; at += N * W)
      wide ? some_columns<T, W, N, true>(q, head_of, vectors, first, last, at, sums)
           : some_columns<T, W, N, W == 1>(q, head_of, vectors, first, last, at, sums);
  };
  tile(std::integral_constant<int, V>());
  tile(std::integral_constant<int, 1>());
  if constexpr (W > 1)
    if (at < size)
      some_rows<T, (W / 2 * sizeof(A) < 16 ? 1 : W / 2)>(q, head_of, vectors, first, last, sums, at);
}

template <class T>
void terms_backward_as(const TermsBackwardParams& q, const Parallel& parallel) {
  using A = Acc<T>;
  const TermsParams& p = q.of;
  const int64_t size = int64_t(p.heads) * p.dim, rows = p.num_rows[0];
  Buffer<A> vectors(2 * size);
  for (int k = 0; k < 2; ++k) unpack_vector<T>(p, k, vectors + k * size);
  Buffer<Bits<A>> head_of(size);
  for (int64_t c = 0; c < size; ++c) head_of[c] = Bits<A>(c / p.dim);
  A* partial = static_cast<A*>(q.partial);
  parallel_range(parallel, q.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      some_rows<T>(q, head_of, vectors, rows * k / q.parts, rows * (k + 1) / q.parts,
                   partial + k * kTermsSums * size);
  });
  for (int k = 0; k < kTermsSums; ++k) {
    if (!q.sums[k]) continue;
    for (int h = 0; h < p.heads; ++h)
      for (int d = 0; d < p.vector_dim; ++d) {
        A sum = 0;
        const int64_t c = k * size + int64_t(h) * p.dim + d, at = int64_t(h) * p.vector_dim + d;
        for (int64_t part = 0; part < q.parts; ++part) sum += partial[part * kTermsSums * size + c];
        if (k < 2 && p.vectors_are_acc)
          static_cast<A*>(q.sums[k])[at] = sum;
        else
          store<T, 1>(static_cast<T*>(q.sums[k]) + at, sum);
      }
  }
}

}  // namespace

void terms(const TermsParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { terms_as<decltype(type)>(p, parallel); });
}

void terms_backward(const TermsBackwardParams& p, const Parallel& parallel) {
  with_type(p.of.dtype, [&](auto type) { terms_backward_as<decltype(type)>(p, parallel); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
