// Forward of attention within blocks (core/blocks.h): an online softmax over tiles of keys, as in
// FlashAttention (Dao et al. 2022, arXiv 2205.14135).
#include "block_pairs.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

template <class T>
class Forward {
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr int W = kLanes<A>;

 public:
  Forward(const BlockParams& p, int64_t most_rows)
      : p_(p),
        query_(area<A>(most_rows, p.dim)),
        key_(area<A>(kKeys, p.dim)),
        keys_(int64_t(kKeys) * p.dim),
        value_(area<A>(kKeys, p.value_dim)),
        bias_(kKeys),
        score_(kRows * kKeys),
        out_(area<A>(most_rows, p.value_dim)),
        top_(most_rows),
        mass_(most_rows) {}

  void run(const BlockTask& task) {
    const int64_t rows = task.row_end - task.row_begin;
    const int64_t wide = padded<A>(p_.dim), value_wide = padded<A>(p_.value_dim);
    const HeadRows<T> query(p_.query, p_.heads, p_.dim, task.head), key(p_.key, p_.heads, p_.dim, task.head),
        value(p_.value, p_.heads, p_.value_dim, task.head);
    query.copy(task.row_begin, rows, A(p_.scale), query_);
    out_.clear(rows * value_wide);
    for (int64_t r = 0; r < rows; ++r) top_[r] = -kInfinity<A>, mass_[r] = 0;
    for_pieces(task.key_begin, task.key_end, kKeys, [&](int64_t first, int64_t count) {
      const int64_t columns = padded<A>(count);
      key.copy(first, count, 1, key_);
      key.transpose(key_, count, columns, keys_);
      value.copy(first, count, 1, value_);
      copy_numbers<A>(p_.key_bias, first, count, columns, p_.heads, task.head, -kInfinity<A>, bias_);
      for_pieces(0, rows, kRows, [&](int64_t row, int64_t some) {
        multiply<A>(score_, columns, {query_ + row * wide, wide, 1}, keys_, columns, some, columns, p_.dim,
                    false);
        for (int64_t r = 0; r < some; ++r) softmax(score_ + r * columns, columns, row + r, value_wide);
        multiply<A>(out_ + row * value_wide, value_wide, {score_, columns, 1}, value_, value_wide, some,
                    value_wide, count, true);
      });
    });
    A* stats = static_cast<A*>(p_.stats);
    for (int64_t r = 0; r < rows; ++r) {
      const A mass = mass_[r], norm = mass == 0 ? A(0) : 1 / mass;
      for (int64_t d = 0; d < value_wide; d += W)
        store_vector(out_ + r * value_wide + d, load_vector<V>(out_ + r * value_wide + d) * norm);
      A* to = stats + ((task.row_begin + r) * p_.heads + task.head) * 2;
      to[0] = mass == 0 ? kInfinity<A> : top_[r], to[1] = mass == 0 ? A(0) : log(mass);
    }
    write_rows<T>(out_, rows, task.row_begin, 1, p_.out, p_.heads, p_.value_dim, task.head);
  }

 private:
  // Turns a row's scores into exponentials, and brings the row's sums to the new maximum.
  void softmax(A* score, int64_t columns, int64_t row, int64_t value_wide) {
    V largest = splat<A, W>(-kInfinity<A>);
    for (int64_t j = 0; j < columns; j += W) {
      const V s = load_vector<V>(score + j) + load_vector<V>(bias_ + j);
      store_vector(score + j, s);
      largest = s > largest ? s : largest;
    }
    const A before = top_[row], peak = max<A, W>(largest), top = larger(before, peak);
    const A reference = top == -kInfinity<A> ? A(0) : top;
    if (top > before) {
      const A shrink = before == -kInfinity<A> ? A(0) : exp1<A>(before - top);
      top_[row] = top;
      mass_[row] *= shrink;
      A* out = out_ + row * value_wide;
      for (int64_t d = 0; d < value_wide; d += W) store_vector(out + d, load_vector<V>(out + d) * shrink);
    }
    V mass{};
    for (int64_t j = 0; j < columns; j += W) {
      const V e = exp<A, W>(load_vector<V>(score + j) - reference);
      store_vector(score + j, e);
      mass += e;
    }
    mass_[row] += sum<A, W>(mass);
  }

  const BlockParams& p_;
  Buffer<A> query_, key_, keys_, value_, bias_, score_, out_, top_, mass_;
};

}  // namespace

void block_forward(const BlockParams& p, const BlockTask* tasks, int64_t count, int64_t most_rows) {
  with_type(p.dtype, [&](auto type) {
    Forward<decltype(type)> forward(p, most_rows);
    for (int64_t k = 0; k < count; ++k) forward.run(tasks[k]);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
