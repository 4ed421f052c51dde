// Backward of attention within blocks (core/blocks.h).
#include "block_pairs.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

template <class T>
class Backward {
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr int W = kLanes<A>;

 public:
  Backward(const BlockParams& p, int64_t most_rows)
      : p_(p),
        query_(area<A>(kRows, p.dim)),
        grad_(area<A>(kRows, p.value_dim)),
        key_(area<A>(kKeys, p.dim)),
        value_(area<A>(kKeys, p.value_dim)),
        keys_(int64_t(kKeys) * p.dim),
        values_(int64_t(kKeys) * p.value_dim),
        bias_(kKeys),
        weight_(kRows * kKeys),
        slope_(kRows * kKeys),
        of_query_(area<A>(most_rows, p.dim)),
        of_keys_(p.dim, p.value_dim) {}

  void run(const BlockTask& task) {
    const int head = task.head, heads = p_.heads;
    const int64_t wide = padded<A>(p_.dim), value_wide = padded<A>(p_.value_dim);
    const HeadRows<T> query(p_.query, heads, p_.dim, head), key(p_.key, heads, p_.dim, head),
        value(p_.value, heads, p_.value_dim, head), grad(p_.grad_out, heads, p_.value_dim, head);
    const A *stats = static_cast<const A*>(p_.stats), *delta = static_cast<const A*>(p_.delta);
    const A scale = A(p_.scale);
    if (task.to_rows) of_query_.clear((task.row_end - task.row_begin) * wide);
    for_pieces(task.key_begin, task.key_end, kKeys, [&](int64_t first, int64_t count) {
      const int64_t columns = padded<A>(count);
      key.copy(first, count, 1, key_);
      key.transpose(key_, count, columns, keys_);
      value.copy(first, count, 1, value_);
      value.transpose(value_, count, columns, values_);
      copy_numbers<A>(p_.key_bias, first, count, columns, heads, head, -kInfinity<A>, bias_);
      if (task.to_keys) of_keys_.begin(count, columns);
      for_pieces(task.row_begin, task.row_end, kRows, [&](int64_t row, int64_t some) {
        if (task.to_keys) of_keys_.before(row - task.row_begin);
        query.copy(row, some, scale, query_);
        grad.copy(row, some, 1, grad_);
        multiply<A>(weight_, columns, {query_, wide, 1}, keys_, columns, some, columns, p_.dim, false);
        multiply<A>(slope_, columns, {grad_, value_wide, 1}, values_, columns, some, columns, p_.value_dim,
                    false);
        for (int64_t r = 0; r < some; ++r) {
          const int64_t row_head = (row + r) * heads + head;
          A *weight = weight_ + r * columns, *slope = slope_ + r * columns;
          weights_of<A>(weight, bias_, columns, stats[2 * row_head], stats[2 * row_head + 1]);
          for (int64_t j = 0; j < columns; j += W) {
            const V ds = load_vector<V>(weight + j) * (load_vector<V>(slope + j) - delta[row_head]);
            store_vector(slope + j, ds);
            if (task.to_keys) store_vector(of_keys_.bias + j, load_vector<V>(of_keys_.bias + j) + ds);
          }
        }
        if (task.to_rows)
          multiply<A>(of_query_ + (row - task.row_begin) * wide, wide, {slope_, columns, 1}, key_, wide, some,
                      wide, count, true);
        if (!task.to_keys) return;
        multiply<A>(of_keys_.key, wide, {slope_, 1, columns}, query_, wide, count, wide, some, true);
        multiply<A>(of_keys_.value, value_wide, {weight_, 1, columns}, grad_, value_wide, count, value_wide,
                    some, true);
      });
      if (!task.to_keys) return;
      of_keys_.end(task.row_end - task.row_begin);
      write_rows<T>(of_keys_.key, count, first, 1, p_.grad_key, heads, p_.dim, head);
      write_rows<T>(of_keys_.value, count, first, 1, p_.grad_value, heads, p_.value_dim, head);
      if (p_.grad_bias)
        for (int64_t j = 0; j < count; ++j)
          static_cast<A*>(p_.grad_bias)[(first + j) * heads + head] = of_keys_.bias[j];
    });
    if (task.to_rows)
      write_rows<T>(of_query_, task.row_end - task.row_begin, task.row_begin, scale, p_.grad_query, heads,
                    p_.dim, head);
  }

 private:
  const BlockParams& p_;
  Buffer<A> query_, grad_, key_, value_, keys_, values_, bias_, weight_, slope_, of_query_;
  OfKeys<A> of_keys_;
};

// delta of the rows [first, last).
template <class T>
void deltas(const BlockParams& p, int64_t first, int64_t last) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  const T *grad = static_cast<const T*>(p.grad_out), *out = static_cast<const T*>(p.out);
  const A* of_sum = static_cast<const A*>(p.grad_log_sum);
  A* delta = static_cast<A*>(p.delta);
  for (int64_t at = first * p.heads; at < last * p.heads; ++at) {
    const T *g = grad + at * p.value_dim, *o = out + at * p.value_dim;
    Vec<A, W> lanes{};
    int d = 0;
    for (; d + W <= p.value_dim; d += W) lanes += load<T, W>(g + d) * load<T, W>(o + d);
    A total = sum<A, W>(lanes);
    for (; d < p.value_dim; ++d) total += load<T, 1>(g + d) * load<T, 1>(o + d);
    delta[at] = total - (of_sum ? of_sum[at] : A(0));
  }
}

}  // namespace

void block_deltas(const BlockParams& p, int64_t first, int64_t last) {
  with_type(p.dtype, [&](auto type) { deltas<decltype(type)>(p, first, last); });
}

void block_backward(const BlockParams& p, const BlockTask* tasks, int64_t count, int64_t most_rows) {
  with_type(p.dtype, [&](auto type) {
    Backward<decltype(type)> backward(p, most_rows);
    for (int64_t k = 0; k < count; ++k) backward.run(tasks[k]);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
