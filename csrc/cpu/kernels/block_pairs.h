// What the passes of attention within blocks share (cpu/blocks.h): a tile is kRows queries times kKeys keys
// of a task, whose scores and weights are dense matrices [rows, columns], where columns are the keys, padded
// to whole vectors. Padding has a bias of -inf, and so a weight of 0.
#pragma once

#include "blocked_sum.h"
#include "cpu/blocks.h"
#include "dense.h"

namespace dfgnn::cpu::DFGNN_ISA {

constexpr int kRows = kBlockRows, kKeys = kBlockKeys;  // multiples of every vector

template <class A>
static inline int64_t least(A a, A b) {
  return a < b ? a : b;
}

// The size of a buffer of `rows` rows of heads of `width` columns.
template <class A>
constexpr int64_t area(int64_t rows, int width) {
  return rows * padded<A>(width);
}

// Calls f(first, count) for the pieces of [begin, end) of at most `most` elements.
template <class F>
static inline void for_pieces(int64_t begin, int64_t end, int64_t most, F f) {
  for (int64_t first = begin; first < end; first += most) f(first, least(most, end - first));
}

// to[0, columns) = a number of each of `count` keys and one head, and `rest` behind them. x: [M, H], or null:
// 0.
template <class A>
static inline void copy_numbers(const void* x, int64_t first, int64_t count, int64_t columns, int heads,
                                int head, A rest, A* to) {
  const A* from = static_cast<const A*>(x);
  for (int64_t j = 0; j < count; ++j) to[j] = from ? from[(first + j) * heads + head] : A(0);
  for (int64_t j = count; j < columns; ++j) to[j] = rest;
}

// Turns scores of a row into weights, by the saved statistics of the row.
template <class A>
static inline void weights_of(A* score, const A* bias, int64_t columns, A top, A log_sum) {
  constexpr int W = kLanes<A>;
  using V = Vec<A, W>;
  for (int64_t j = 0; j < columns; j += W)
    store_vector(score + j,
                 exp<A, W>((load_vector<V>(score + j) + load_vector<V>(bias + j) - top) - log_sum));
}

// The gradients of a tile's keys, which are sums over the queries of a task, in blocks of them.
template <class A>
class OfKeys {
 public:
  OfKeys(int dim, int value_dim)
      : key(area<A>(kKeys, dim)),
        value(area<A>(kKeys, value_dim)),
        bias(kKeys),
        wide_(padded<A>(dim)),
        value_wide_(padded<A>(value_dim)),
        of_key_(area<A>(kKeys, dim)),
        of_value_(area<A>(kKeys, value_dim)),
        of_bias_(kKeys) {}

  void begin(int64_t count, int64_t columns) {
    key.clear(count * wide_), value.clear(count * value_wide_), bias.clear(columns);
    of_key_.resize(count * wide_), of_value_.resize(count * value_wide_), of_bias_.resize(columns);
  }
  // Before a tile is added. place: that of its first query in the task.
  void before(int64_t place) {
    of_key_.before(place, key), of_value_.before(place, value), of_bias_.before(place, bias);
  }
  void end(int64_t rows) { of_key_.end(rows, key), of_value_.end(rows, value), of_bias_.end(rows, bias); }

  Buffer<A> key, value, bias;

 private:
  using Sums = Blocks<A, kTaskRows>;  // which short tasks do not fill
  int64_t wide_, value_wide_;
  Sums of_key_, of_value_, of_bias_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
