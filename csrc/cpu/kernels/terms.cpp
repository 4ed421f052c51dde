// Score terms of additive attention, and their gradients with the sums over nodes: core/terms.h.
#include "cpu/terms.h"

#include "rows.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// A vector [H, vector_dim] as accumulators [H, dim], with zeros behind.
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
  const RowShape shape = row_shape<A>(p.heads, p.dim);
  Buffer<A> plain(shape.size()), packed(2 * shape.packed_size());
  for (int k = 0; k < 2; ++k) {
    unpack_vector<T>(p, k, plain);
    pack(shape, static_cast<const A*>(plain), packed + k * shape.packed_size());
  }
  const A *vector = packed, *second = packed + shape.packed_size();
  parallel_range(parallel, p.num_rows[0], kRowsPerThread, [&](int64_t first, int64_t last) {
    with_width<A>(shape.width, [&](auto width) {
      constexpr int W = width.value;
      using V = Vec<A, W>;
      for (int64_t n = first; n < last; ++n) {
        const T* row = static_cast<const T*>(p.feat) + n * shape.size();
        const bool both = n < p.num_rows[1];
        for (int h = 0; h < p.heads; ++h) {
          V a{}, b{};
          for (int v = 0; v < shape.vectors; ++v) {
            const V x = load<T, W>(row + int64_t(h) * p.dim + feature(shape, v, W));
            const int64_t at = int64_t(h) * shape.packed + v * W;
            a += x * load_vector<V>(vector + at);
            b += x * load_vector<V>(second + at);
          }
          static_cast<A*>(p.terms[0])[n * p.heads + h] = sum<A, W>(a);
          if (both) static_cast<A*>(p.terms[1])[n * p.heads + h] = sum<A, W>(b);
        }
      }
    });
  });
}

// Sums over some rows, of columns [H, dim].
template <class T, int W>
void some_rows(const TermsBackwardParams& q, const Acc<T>* vectors, int64_t first, int64_t last,
               Acc<T>* sums) {
  using A = Acc<T>;
  const TermsParams& p = q.of;
  const int64_t size = int64_t(p.heads) * p.dim;
  for (int64_t c = 0; c < kTermsSums * size; ++c) sums[c] = 0;
  for (int64_t n = first; n < last; ++n) {
    const bool both = n < p.num_rows[1];
    for (int h = 0; h < p.heads; ++h) {
      const A u = static_cast<const A*>(q.grad_terms[0])[n * p.heads + h];
      const A w = both ? static_cast<const A*>(q.grad_terms[1])[n * p.heads + h] : A(0);
      const auto columns = [&](auto width, int d) {
        constexpr int N = width.value;
        using X = Vec<A, N>;
        const int64_t c = int64_t(h) * p.dim + d, at = n * size + c;
        T* grad = static_cast<T*>(q.grad_feat) + at;
        const X x = load<T, N>(static_cast<const T*>(p.feat) + at);
        store<T, N>(grad, load<T, N>(grad) +
                              (u * load_vector<X>(vectors + c) + w * load_vector<X>(vectors + size + c)));
        store_vector(sums + c, load_vector<X>(sums + c) + u * x);
        store_vector(sums + size + c, load_vector<X>(sums + size + c) + w * x);
        if (q.grad_out && both)
          store_vector(sums + 2 * size + c, load_vector<X>(sums + 2 * size + c) +
                                                load<T, N>(static_cast<const T*>(q.grad_out) + at));
      };
      int d = 0;
      for (; d + W <= p.dim; d += W) columns(std::integral_constant<int, W>(), d);
      for (; d < p.dim; ++d) columns(std::integral_constant<int, 1>(), d);
    }
  }
}

template <class T>
void terms_backward_as(const TermsBackwardParams& q, const Parallel& parallel) {
  using A = Acc<T>;
  const TermsParams& p = q.of;
  const int64_t size = int64_t(p.heads) * p.dim, rows = p.num_rows[0];
  Buffer<A> vectors(2 * size);
  for (int k = 0; k < 2; ++k) unpack_vector<T>(p, k, vectors + k * size);
  A* partial = static_cast<A*>(q.partial);
  parallel_range(parallel, q.parts, 1, [&](int64_t begin, int64_t end) {
    with_width<A>(row_shape<A>(p.heads, p.dim).width, [&](auto width) {
      for (int64_t k = begin; k < end; ++k)
        some_rows<T, width.value>(q, vectors, rows * k / q.parts, rows * (k + 1) / q.parts,
                                  partial + k * kTermsSums * size);
    });
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
