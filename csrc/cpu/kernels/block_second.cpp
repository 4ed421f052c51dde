// The backward of the backward of attention within blocks (core/blocks.h). tau and rho are sums over a whole
// row: where a block's keys are a single tile, they are computed with it, else by a step before (SUMS).
#include "block_pairs.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

template <class T, bool SUMS>
class Second {
  using A = Acc<T>;
  using V = Vec<A, kLanes<A>>;
  static constexpr int W = kLanes<A>;

 public:
  Second(const BlockParams& p, int64_t most_rows)
      : p_(p),
        wide_(padded<A>(p.dim)),
        value_wide_(padded<A>(p.value_dim)),
        query_(area<A>(kRows, p.dim)),
        a_(area<A>(kRows, p.dim)),
        grad_(area<A>(kRows, p.value_dim)),
        key_(area<A>(kKeys, p.dim)),
        c_(area<A>(kKeys, p.dim)),
        value_(area<A>(kKeys, p.value_dim)),
        e_(area<A>(kKeys, p.value_dim)),
        keys_(int64_t(kKeys) * p.dim),
        cs_(int64_t(kKeys) * p.dim),
        values_(int64_t(kKeys) * p.value_dim),
        es_(int64_t(kKeys) * p.value_dim),
        bias_(kKeys),
        f_(kKeys),
        weight_(kRows * kKeys),
        slope_(kRows * kKeys),
        t_(kRows * kKeys),
        u_(kRows * kKeys),
        of_query_(area<A>(most_rows, p.dim)),
        of_grad_(area<A>(most_rows, p.value_dim)),
        of_keys_(p.dim, p.value_dim),
        sums_(2 * most_rows) {}

  void run(const BlockTask& task, bool sums_known) {
    const int head = task.head, heads = p_.heads;
    const HeadRows<T> query(p_.query, heads, p_.dim, head), a(p_.of_query, heads, p_.dim, head),
        grad(p_.grad_out, heads, p_.value_dim, head), key(p_.key, heads, p_.dim, head),
        c(p_.of_key, heads, p_.dim, head), value(p_.value, heads, p_.value_dim, head),
        e(p_.of_value, heads, p_.value_dim, head);
    const int64_t rows = task.row_end - task.row_begin;
    const A scale = A(p_.scale);
    A *tau = static_cast<A*>(p_.tau), *rho = static_cast<A*>(p_.rho);
    if (SUMS) sums_.clear(2 * rows);
    if (!SUMS && task.to_rows) of_query_.clear(rows * wide_), of_grad_.clear(rows * value_wide_);
    for_pieces(task.key_begin, task.key_end, kKeys, [&](int64_t first, int64_t count) {
      const int64_t columns = padded<A>(count);
      const auto load = [&](const HeadRows<T>& x, A* to, A* transposed) {
        x.copy(first, count, 1, to);
        x.transpose(to, count, columns, transposed);
      };
      load(key, key_, keys_), load(c, c_, cs_), load(value, value_, values_), load(e, e_, es_);
      copy_numbers<A>(p_.key_bias, first, count, columns, heads, head, -kInfinity<A>, bias_);
      copy_numbers<A>(p_.of_bias, first, count, columns, heads, head, A(0), f_);
      if (!SUMS && task.to_keys) of_keys_.begin(count, columns);
      for_pieces(task.row_begin, task.row_end, kRows, [&](int64_t row, int64_t some) {
        if (!SUMS && task.to_keys) of_keys_.before(row - task.row_begin);
        query.copy(row, some, scale, query_);
        a.copy(row, some, scale, a_);
        grad.copy(row, some, 1, grad_);
        products(columns, some);
        for (int64_t r = 0; r < some; ++r) {
          const int64_t row_head = (row + r) * heads + head, at = row - task.row_begin + r;
          Sums found = weights(r * columns, columns, row_head);
          if (SUMS) {
            sums_[2 * at] += found.tau, sums_[2 * at + 1] += found.rho;
            continue;
          }
          if (sums_known) {
            found = {tau[row_head], rho[row_head]};
          } else {
            found.rho = whole_rho(found, row_head);
            if (task.to_rows) tau[row_head] = found.tau;
          }
          finish(r * columns, columns, found, task.to_keys);
        }
        if (SUMS) return;
        add(task, row - task.row_begin, some, count, columns);
      });
      if (SUMS || !task.to_keys) return;
      of_keys_.end(rows);
      write_rows<T>(of_keys_.key, count, first, 1, p_.grad_key, heads, p_.dim, head);
      write_rows<T>(of_keys_.value, count, first, 1, p_.grad_value, heads, p_.value_dim, head);
      if (p_.grad_bias)
        for (int64_t j = 0; j < count; ++j)
          static_cast<A*>(p_.grad_bias)[(first + j) * heads + head] = of_keys_.bias[j];
    });
    if (SUMS)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row_head = (task.row_begin + r) * heads + head;
        tau[row_head] = sums_[2 * r], rho[row_head] = whole_rho({sums_[2 * r], sums_[2 * r + 1]}, row_head);
      }
    if (SUMS || !task.to_rows) return;
    if (task.key_begin == task.key_end)
      for (int64_t r = task.row_begin; r < task.row_end; ++r) tau[r * heads + head] = 0;
    write_rows<T>(of_query_, rows, task.row_begin, scale, p_.grad_query, heads, p_.dim, head);
    write_rows<T>(of_grad_, rows, task.row_begin, 1, p_.grad_grad_out, heads, p_.value_dim, head);
  }

 private:
  struct Sums {
    A tau, rho;
  };

  // rho_i of a row (formulas: core/blocks.h), once `sums` are those over all its keys.
  A whole_rho(Sums sums, int64_t row_head) const {
    return p_.grad_log_sum ? sums.rho - sums.tau * static_cast<const A*>(p_.grad_log_sum)[row_head]
                           : sums.rho;
  }

  // The products of a tile: scores, g . v, t without f, and u.
  void products(int64_t columns, int64_t some) {
    const Strided<A> query{query_, wide_, 1}, a{a_, wide_, 1}, grad{grad_, value_wide_, 1};
    multiply<A>(weight_, columns, query, keys_, columns, some, columns, p_.dim, false);
    multiply<A>(slope_, columns, grad, values_, columns, some, columns, p_.value_dim, false);
    multiply<A>(t_, columns, a, keys_, columns, some, columns, p_.dim, false);
    multiply<A>(t_, columns, query, cs_, columns, some, columns, p_.dim, true);
    multiply<A>(u_, columns, grad, es_, columns, some, columns, p_.value_dim, false);
  }

  // Makes weight P, slope dS, and t complete, of a row that begins at `at`. Returns the row's sums in this
  // tile.
  Sums weights(int64_t at, int64_t columns, int64_t row_head) {
    const A *stats = static_cast<const A*>(p_.stats) + 2 * row_head,
            delta = static_cast<const A*>(p_.delta)[row_head];
    A *weight = weight_ + at, *slope = slope_ + at, *t = t_ + at, *u = u_ + at;
    weights_of<A>(weight, bias_, columns, stats[0], stats[1]);
    V tau{}, rho{};
    for (int64_t j = 0; j < columns; j += W) {
      const V w = load_vector<V>(weight + j), ds = w * (load_vector<V>(slope + j) - delta),
              whole = load_vector<V>(t + j) + load_vector<V>(f_ + j);
      store_vector(slope + j, ds);
      store_vector(t + j, whole);
      tau += w * whole;
      rho += ds * whole + w * load_vector<V>(u + j);
    }
    return {sum<A, W>(tau), sum<A, W>(rho)};
  }

  // Makes u x, and t y.
  void finish(int64_t at, int64_t columns, Sums sums, bool to_keys) {
    A *weight = weight_ + at, *slope = slope_ + at, *t = t_ + at, *u = u_ + at;
    for (int64_t j = 0; j < columns; j += W) {
      const V w = load_vector<V>(weight + j), shifted = load_vector<V>(t + j) - sums.tau,
              x = load_vector<V>(slope + j) * shifted + w * (load_vector<V>(u + j) - sums.rho);
      store_vector(u + j, x);
      store_vector(t + j, w * shifted);
      if (to_keys) store_vector(of_keys_.bias + j, load_vector<V>(of_keys_.bias + j) + x);
    }
  }

  // Adds a tile to the gradients.
  void add(const BlockTask& task, int64_t row, int64_t some, int64_t count, int64_t columns) {
    if (task.to_rows) {
      A *of_query = of_query_ + row * wide_, *of_grad = of_grad_ + row * value_wide_;
      multiply<A>(of_query, wide_, {u_, columns, 1}, key_, wide_, some, wide_, count, true);
      multiply<A>(of_query, wide_, {slope_, columns, 1}, c_, wide_, some, wide_, count, true);
      multiply<A>(of_grad, value_wide_, {t_, columns, 1}, value_, value_wide_, some, value_wide_, count,
                  true);
      multiply<A>(of_grad, value_wide_, {weight_, columns, 1}, e_, value_wide_, some, value_wide_, count,
                  true);
    }
    if (task.to_keys) {
      multiply<A>(of_keys_.key, wide_, {u_, 1, columns}, query_, wide_, count, wide_, some, true);
      multiply<A>(of_keys_.key, wide_, {slope_, 1, columns}, a_, wide_, count, wide_, some, true);
      multiply<A>(of_keys_.value, value_wide_, {t_, 1, columns}, grad_, value_wide_, count, value_wide_, some,
                  true);
    }
  }

  const BlockParams& p_;
  const int64_t wide_, value_wide_;
  Buffer<A> query_, a_, grad_, key_, c_, value_, e_, keys_, cs_, values_, es_, bias_, f_, weight_, slope_, t_,
      u_, of_query_, of_grad_;
  OfKeys<A> of_keys_;
  Buffer<A> sums_;
};

}  // namespace

void block_second(const BlockParams& p, const BlockTask* tasks, int64_t count, int64_t most_rows, bool sums) {
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (sums) {
      Second<T, true> second(p, most_rows);
      for (int64_t k = 0; k < count; ++k) second.run(tasks[k], false);
    } else {
      Second<T, false> second(p, most_rows);
      for (int64_t k = 0; k < count; ++k) second.run(tasks[k], !tasks[k].one_tile);
    }
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
