// Softmax and sums over groups of rows, which an index gives: see cpu/by_index.h.
#include "kernels.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

constexpr int64_t kPerThread = 1 << 15;  // the fewest elements per thread
constexpr int64_t kBlockNumbers = 2048;  // the elements of a block of rows, which fit in the L1 cache
constexpr int64_t kMostAdded = 1 << 14;  // the most rows that are added one after another in float

// How many rows of a group have been added since its sum was last moved to a total, and which total: -1 if
// there is none.
struct Added {
  int32_t rows, total;
};

// What a thread processes: of the rows [begin, end) those whose groups are in [low, low + span); or, if `all`
// is set, all rows of [begin, end).
struct Part {
  int64_t begin, end;
  uint64_t low, span;
  bool all;
};

// Divides the rows and their groups among threads, into `parts_` parts. I: the type of the index. Loops over
// rows are functions of their own, so that each is compiled once, and not for every place that runs it.
template <class I>
class Groups {
 public:
  Groups(const ByIndexParams& p, const Parallel& parallel)
      : p_(p), parallel_(parallel), index_(static_cast<const I*>(p.index)) {
    const int64_t most = p.num_rows * p.columns / kPerThread + 1;
    parts_ = most < parallel.num_threads ? most : parallel.num_threads;
  }

  // Calls body(part) for parts such that all rows of a group are in the same part. If apart(), a part is a
  // range of rows. Otherwise every part reads the index of all rows, and takes the rows of a range of groups.
  template <class Body>
  void by_groups(const Body& body) const {
    parallel_range(parallel_, parts_, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) body(part(k));
    });
  }
  // Calls body(begin, end) on ranges that cover all rows.
  template <class Body>
  void by_rows(const Body& body) const {
    parallel_range(parallel_, parts_, 1, [&](int64_t first, int64_t last) {
      body(p_.num_rows * first / parts_, p_.num_rows * last / parts_);
    });
  }
  // Whether the parts of by_groups are disjoint ranges of rows, so that a part can be finished on its own.
  bool apart() const { return parts_ == 1 || p_.index_rises; }

  // Calls body(begin, end) for the blocks of a range of rows.
  template <class Body>
  void blocks(int64_t begin, int64_t end, const Body& body) const {
    const int64_t step = kBlockNumbers / p_.columns + 1;
    for (; begin < end; begin += step) body(begin, begin + step < end ? begin + step : end);
  }

  // Whether a group of the part has more than `most` rows. Sets `added` of the part's groups to nothing if
  // so.
  [[gnu::noinline]] bool any_longer(const Part& part, int64_t most, Added* added) const {
    bool found = false;
    if (p_.index_rises) {
      for (int64_t e = part.begin; e + most < part.end; ++e) found |= index_[e] == index_[e + most];
    } else {
      const int64_t low = part.all ? 0 : int64_t(part.low),
                    span = part.all ? p_.num_groups : int64_t(part.span);
      for (int64_t k = low; k < low + span; ++k) added[k] = {0, -1};
      each(part, [&](int64_t, int64_t group) { ++added[group].rows; });
      for (int64_t k = low; k < low + span; ++k) found |= added[k].rows > most;
    }
    if (found) each(part, [&](int64_t, int64_t group) { added[group] = {0, -1}; });
    return found;
  }
  // Calls f(row, group) for the rows of a part.
  template <class F>
  [[gnu::always_inline]] void each(const Part& part, const F& f) const {
    const I* const index = index_;
    if (part.all)
      for (int64_t e = part.begin, end = part.end; e < end; ++e) f(e, int64_t(index[e]));
    else
      for (int64_t e = part.begin, end = part.end; e < end; ++e)
        if (uint64_t(index[e]) - part.low < part.span) f(e, int64_t(index[e]));
  }
  // Calls f(row, group) for a range of rows.
  template <class F>
  [[gnu::always_inline]] void each(int64_t begin, int64_t end, const F& f) const {
    const I* const index = index_;
    for (int64_t e = begin; e < end; ++e) f(e, int64_t(index[e]));
  }

 private:
  // Returns part k of by_groups.
  [[gnu::noinline]] Part part(int64_t k) const {
    if (apart()) return {boundary(k), boundary(k + 1), 0, 0, true};
    const int64_t low = p_.num_groups * k / parts_, high = p_.num_groups * (k + 1) / parts_;
    return {0, p_.num_rows, uint64_t(low), uint64_t(high - low), false};
  }
  // Returns the first row of part k, which is the first of its group. Only called if apart().
  int64_t boundary(int64_t k) const {
    int64_t e = p_.num_rows * k / parts_;
    if (k > 0 && k < parts_)
      while (e < p_.num_rows && e > 0 && index_[e] == index_[e - 1]) ++e;
    return e;
  }

  const ByIndexParams& p_;
  const Parallel& parallel_;
  const I* index_;
  int64_t parts_;
};

// The number of columns: C, or if that is 0 one that is known at run time only.
template <int C>
static inline int64_t number(const ByIndexParams& p) {
  return C ? C : p.columns;
}

template <class A>
void fill(A* to, int64_t size, A value) {
  for (int64_t k = 0; k < size; ++k) to[k] = value;
}

// Replaces the elements of x by their exponentials.
template <class A>
void exponentials(A* x, int64_t size) {
  constexpr int W = kLanes<A>;
  int64_t k = 0;
  for (; k + W <= size; k += W) store_vector(x + k, exp<A, W>(load_vector<Vec<A, W>>(x + k)));
  for (; k < size; ++k) x[k] = exp1(x[k]);
}

// The steps of a softmax: the maxima of groups, exponentials of rows, their sums by groups (of the type S),
// and the quotients.
template <class A, class I, int C>
[[gnu::noinline]] void find_maxima(const ByIndexParams& p, const Groups<I>& groups, const Part& part,
                                   A* high) {
  const int64_t columns = number<C>(p);
  const A* const score = static_cast<const A*>(p.rows);
  groups.each(part, [&](int64_t e, int64_t group) {
    for (int64_t c = 0; c < columns; ++c)
      high[group * columns + c] = larger(high[group * columns + c], score[e * columns + c]);
  });
}
template <class A, class I, int C>
[[gnu::noinline]] void take_exponentials(const ByIndexParams& p, const Groups<I>& groups, int64_t begin,
                                         int64_t end, const A* high) {
  const int64_t columns = number<C>(p);
  const A* const score = static_cast<const A*>(p.rows);
  A* const out = static_cast<A*>(p.out);
  const bool masked = p.masked;
  groups.each(begin, end, [&](int64_t e, int64_t group) {
    for (int64_t c = 0; c < columns; ++c) {
      A m = high[group * columns + c];
      if (masked && m == -kInfinity<A>) m = 0;
      out[e * columns + c] = score[e * columns + c] - m;
    }
  });
  exponentials(out + begin * columns, (end - begin) * columns);
}
template <class A, class I, int C, class S>
[[gnu::noinline]] void add_exponentials(const ByIndexParams& p, const Groups<I>& groups, const Part& part,
                                        S* sum) {
  const int64_t columns = number<C>(p);
  const A* const out = static_cast<const A*>(p.out);
  groups.each(part, [&](int64_t e, int64_t group) {
    for (int64_t c = 0; c < columns; ++c) sum[group * columns + c] += out[e * columns + c];
  });
}
template <class A, class I, int C, class S>
[[gnu::noinline]] void divide(const ByIndexParams& p, const Groups<I>& groups, int64_t begin, int64_t end,
                              const S* sum) {
  const int64_t columns = number<C>(p);
  A* const out = static_cast<A*>(p.out);
  const bool masked = p.masked;
  groups.each(begin, end, [&](int64_t e, int64_t group) {
    for (int64_t c = 0; c < columns; ++c) {
      const A s = A(sum[group * columns + c]);
      out[e * columns + c] = masked && s == 0 ? A(0) : out[e * columns + c] / s;
    }
  });
}

// If Groups::apart(), each thread takes all steps for its rows. Otherwise threads wait for each other after
// each step.
template <class A, class I, int C, class S>
void softmax_as(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<I> groups(p, parallel);
  const int64_t size = p.num_groups * number<C>(p);
  Buffer<A> high(size);
  Buffer<S> sum(size);
  fill<A>(high, size, -kInfinity<A>);
  fill<S>(sum, size, 0);
  const auto exp_of = [&](int64_t begin, int64_t end) {
    take_exponentials<A, I, C>(p, groups, begin, end, high);
  };
  if (groups.apart()) {
    groups.by_groups([&](const Part& part) {
      find_maxima<A, I, C>(p, groups, part, high);
      groups.blocks(part.begin, part.end, [&](int64_t begin, int64_t end) {
        exp_of(begin, end);
        add_exponentials<A, I, C, S>(p, groups, {begin, end, 0, 0, true}, sum);
      });
      divide<A, I, C, S>(p, groups, part.begin, part.end, sum);
    });
    return;
  }
  groups.by_groups([&](const Part& part) { find_maxima<A, I, C>(p, groups, part, high); });
  groups.by_rows([&](int64_t begin, int64_t end) { groups.blocks(begin, end, exp_of); });
  groups.by_groups([&](const Part& part) { add_exponentials<A, I, C, S>(p, groups, part, sum); });
  groups.by_rows([&](int64_t begin, int64_t end) { divide<A, I, C, S>(p, groups, begin, end, sum); });
}

// The steps of its backward: products of result and gradient, added up by groups, and the gradient.
template <class A, class I, int C, class S>
[[gnu::noinline]] void add_products(const ByIndexParams& p, const Groups<I>& groups, const Part& part,
                                    S* dot) {
  const int64_t columns = number<C>(p);
  const A *const grad = static_cast<const A*>(p.rows), *const result = static_cast<const A*>(p.result);
  groups.each(part, [&](int64_t e, int64_t group) {
    for (int64_t c = 0; c < columns; ++c)
      dot[group * columns + c] += result[e * columns + c] * grad[e * columns + c];
  });
}
template <class A, class S>
[[gnu::always_inline]] static inline void write_row(const A* __restrict result, const A* __restrict grad,
                                                    const S* __restrict dot, A* __restrict to,
                                                    int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) to[c] = result[c] * (grad[c] - A(dot[c]));
}
template <class A, class I, int C, class S>
[[gnu::noinline]] void write_gradient(const ByIndexParams& p, const Groups<I>& groups, int64_t begin,
                                      int64_t end, const S* dot) {
  const int64_t columns = number<C>(p);
  const A *const grad = static_cast<const A*>(p.rows), *const result = static_cast<const A*>(p.result);
  A* const out = static_cast<A*>(p.out);
  groups.each(begin, end, [&](int64_t e, int64_t group) {
    const int64_t at = e * columns;
    write_row(result + at, grad + at, dot + group * columns, out + at, columns);
  });
}

template <class A, class I, int C, class S>
void softmax_backward_as(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<I> groups(p, parallel);
  const int64_t size = p.num_groups * number<C>(p);
  Buffer<S> dot(size);
  fill<S>(dot, size, 0);
  const bool apart = groups.apart();
  groups.by_groups([&](const Part& part) {
    add_products<A, I, C, S>(p, groups, part, dot);
    if (apart) write_gradient<A, I, C, S>(p, groups, part.begin, part.end, dot);
  });
  if (!apart)
    groups.by_rows(
        [&](int64_t begin, int64_t end) { write_gradient<A, I, C, S>(p, groups, begin, end, dot); });
}

// The totals of a thread's long groups. A sum of floats stops growing at 2**24 equal terms, and is off by
// their number times 2**-24 in the worst case: so the sum of every kMostAdded rows is added to a double.
class Totals {
 public:
  // num_rows: of all groups together, which bounds the number of long groups.
  Totals(int64_t num_rows, int64_t columns)
      : columns_(columns), groups_(num_rows / kMostAdded), totals_(num_rows / kMostAdded * columns) {}

  // Moves the sum of a group to its total.
  void move(int64_t group, Added& added, float* sum) {
    if (added.total < 0) {
      added.total = int32_t(count_++);
      groups_[added.total] = group;
      fill<double>(totals_ + added.total * columns_, columns_, 0);
    }
    added.rows = 0;
    for (int64_t c = 0; c < columns_; ++c) totals_[added.total * columns_ + c] += sum[c], sum[c] = 0;
  }
  // Adds the totals to the sums of their groups.
  void end(float* out) const {
    for (int64_t k = 0; k < count_; ++k)
      for (int64_t c = 0; c < columns_; ++c) {
        float& sum = out[groups_[k] * columns_ + c];
        sum = float(totals_[k * columns_ + c] + sum);
      }
  }

 private:
  int64_t columns_, count_ = 0;
  Buffer<int64_t> groups_;
  Buffer<double> totals_;
};

// Sums of an index that rises: a group's sum stays in registers, and no wider sums are stored. That takes
// 0.4 to 0.7 of the time of `sum_of`, whose every addition waits for the one before to be stored.
template <class A, class I, int C, class S, bool gathered>
void sum_of_runs(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<I> groups(p, parallel);
  const A* rows = static_cast<const A*>(p.rows);
  const I *index = static_cast<const I*>(p.index), *source = static_cast<const I*>(p.source);
  A* out = static_cast<A*>(p.out);
  parallel_range(parallel, p.num_groups, kPerThread / C + 1,
                 [&](int64_t begin, int64_t end) { fill<A>(out + begin * C, (end - begin) * C, 0); });
  groups.by_groups([&](const Part& part) {
    for (int64_t e = part.begin; e < part.end;) {
      const int64_t group = index[e];
      S sum[C] = {};
      do {
        const A* from = rows + (gathered ? int64_t(source[e]) : e) * C;
        for (int c = 0; c < C; ++c) sum[c] += from[c];
      } while (++e < part.end && index[e] == group);
      for (int c = 0; c < C; ++c) out[group * C + c] = A(sum[c]);
    }
  });
}

// Adds a row to the sum of its group.
template <class A, class S>
[[gnu::always_inline]] static inline void add_row(const A* __restrict from, S* __restrict to,
                                                  int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) to[c] += from[c];
}

// Adds a part's rows to the sums of their groups.
template <class A, class I, int C, class S, bool gathered>
[[gnu::noinline]] void add_rows(const ByIndexParams& p, const Groups<I>& groups, const Part& part, S* sums) {
  const int64_t columns = number<C>(p);
  const A* const rows = static_cast<const A*>(p.rows);
  const I* const source = static_cast<const I*>(p.source);
  groups.each(part, [&](int64_t e, int64_t group) {
    add_row(rows + (gathered ? int64_t(source[e]) : e) * columns, sums + group * columns, columns);
  });
}

// Does the same with every kMostAdded rows of a group moved to a total.
template <class I>
[[gnu::noinline]] void add_long(const ByIndexParams& p, const Groups<I>& groups, const Part& part,
                                Added* added, float* sums) {
  const int64_t columns = p.columns;
  const float* const rows = static_cast<const float*>(p.rows);
  const I* const source = static_cast<const I*>(p.source);
  Totals totals(p.num_rows, columns);
  groups.each(part, [&](int64_t e, int64_t group) {
    float* const to = sums + group * columns;
    add_row(rows + (source ? int64_t(source[e]) : e) * columns, to, columns);
    if (++added[group].rows == kMostAdded) totals.move(group, added[group], to);
  });
  totals.end(static_cast<float*>(p.out));
}

template <class A, class S>
[[gnu::noinline]] void convert(const S* from, int64_t begin, int64_t end, A* to) {
  for (int64_t k = begin; k < end; ++k) to[k] = A(from[k]);
}

// Adds the rows to `out`, which is 0. Few columns are added up in double, many in float, except for groups of
// more than kMostAdded rows, for which rows have to be counted (Totals).
template <class A, class I, int C, class S, bool gathered>
void sum_of(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<I> groups(p, parallel);
  const int64_t columns = number<C>(p), size = p.num_groups * columns;
  A* out = static_cast<A*>(p.out);
  constexpr bool in_place = std::is_same_v<S, A>, counts = std::is_same_v<S, float>;
  Buffer<S> wide(in_place ? 0 : size);
  Buffer<Added> added(counts && p.num_rows > kMostAdded ? p.num_groups : 0);
  S* sums = wide;
  if constexpr (in_place) sums = out;
  const auto of_groups = [&](const auto& body) {
    parallel_range(parallel, p.num_groups, kPerThread / columns + 1, body);
  };
  of_groups([&](int64_t begin, int64_t end) { fill<S>(sums + begin * columns, (end - begin) * columns, 0); });
  groups.by_groups([&](const Part& part) {
    if constexpr (counts)
      if (p.num_rows > kMostAdded && groups.any_longer(part, kMostAdded, added))
        return add_long(p, groups, part, added, sums);
    add_rows<A, I, C, S, gathered>(p, groups, part, sums);
  });
  if constexpr (!in_place)
    of_groups([&](int64_t begin, int64_t end) { convert<A, S>(sums, begin * columns, end * columns, out); });
}

template <class A, class I, int C, class S>
void sum_as(const ByIndexParams& p, const Parallel& parallel) {
  if constexpr (C > 0)
    if (p.index_rises)
      return p.source ? sum_of_runs<A, I, C, S, true>(p, parallel)
                      : sum_of_runs<A, I, C, S, false>(p, parallel);
  // Of many columns rows are counted instead, because twice the memory would cost more.
  using Sum = std::conditional_t<C == 1 || C == 2, S, A>;
  p.source ? sum_of<A, I, C, Sum, true>(p, parallel) : sum_of<A, I, C, Sum, false>(p, parallel);
}

// Calls f(an object of the rows' type, one of the index's type, an integral constant, an object of the type
// of sums over groups). The constant is the number of columns if kernels are compiled for that number, else
// 0. Sums of floats are doubles if a group may have more than kMostAdded rows.
template <class F>
void with_types(const ByIndexParams& p, const F& given) {
  const auto f = [&](auto type, auto id, auto columns) {
    if (p.num_rows > kMostAdded)
      given(type, id, columns, double{});
    else
      given(type, id, columns, type);
  };
  const auto with_columns = [&](auto type, auto id) {
    switch (p.columns) {
      case 1:
        return f(type, id, std::integral_constant<int, 1>());
      case 2:
        return f(type, id, std::integral_constant<int, 2>());
      case 3:
        return f(type, id, std::integral_constant<int, 3>());
      case 4:
        return f(type, id, std::integral_constant<int, 4>());
      case 8:
        return f(type, id, std::integral_constant<int, 8>());
      default:
        return f(type, id, std::integral_constant<int, 0>());
    }
  };
  const auto with_index = [&](auto type) {
    p.index_is_long ? with_columns(type, int64_t{}) : with_columns(type, int32_t{});
  };
  p.dtype == DType::f64 ? with_index(double{}) : with_index(float{});
}

}  // namespace

void index_softmax(const ByIndexParams& p, const Parallel& parallel) {
  with_types(p, [&](auto type, auto id, auto columns, auto sum) {
    softmax_as<decltype(type), decltype(id), columns.value, decltype(sum)>(p, parallel);
  });
}

void index_softmax_backward(const ByIndexParams& p, const Parallel& parallel) {
  with_types(p, [&](auto type, auto id, auto columns, auto sum) {
    softmax_backward_as<decltype(type), decltype(id), columns.value, decltype(sum)>(p, parallel);
  });
}

void index_sum(const ByIndexParams& p, const Parallel& parallel) {
  with_types(p, [&](auto type, auto id, auto columns, auto sum) {
    sum_as<decltype(type), decltype(id), columns.value, decltype(sum)>(p, parallel);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
