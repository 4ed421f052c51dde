// Softmax and sums over groups of rows, which an index gives: see cpu/by_index.h.
#include "kernels.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

constexpr int64_t kPerThread = 1 << 15;  // the fewest elements per thread
constexpr int64_t kBlockNumbers = 2048;  // the elements of a block of rows, which fit in the L1 cache

// What a thread processes: of the rows [begin, end) those whose groups are in [low, low + span); or, if `all`
// is set, all rows of [begin, end).
struct Part {
  int64_t begin, end;
  uint64_t low, span;
  bool all;
};

// Divides the rows and their groups among threads, into `parts_` parts. I: the type of the index; C: the
// number of columns, or 0 if it is known at run time only.
template <class A, class I, int C>
class Groups {
 public:
  Groups(const ByIndexParams& p, const Parallel& parallel)
      : p_(p), parallel_(parallel), index_(static_cast<const I*>(p.index)) {
    const int64_t most = p.num_rows * columns() / kPerThread + 1;
    parts_ = most < parallel.num_threads ? most : parallel.num_threads;
  }

  int64_t columns() const { return C ? C : p_.columns; }

  // Calls body(part) for parts such that all rows of a group are in the same part. If apart(), a part is a
  // range of rows. Otherwise every part reads the index of all rows, and takes the rows of a range of groups.
  template <class Body>
  void by_groups(const Body& body) const {
    parallel_range(parallel_, parts_, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        if (parts_ == 1 || p_.index_rises) {
          body(Part{boundary(k), boundary(k + 1), 0, 0, true});
        } else {
          const int64_t low = p_.num_groups * k / parts_, high = p_.num_groups * (k + 1) / parts_;
          body(Part{0, p_.num_rows, uint64_t(low), uint64_t(high - low), false});
        }
      }
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
    const int64_t step = kBlockNumbers / columns() + 1;
    for (; begin < end; begin += step) body(begin, begin + step < end ? begin + step : end);
  }

  // Calls f(row, at) for the rows of a part. at: position of the first column of the row's group in an array
  // [num_groups, columns].
  template <class F>
  [[gnu::always_inline]] void each(const Part& part, const F& f) const {
    if (part.all)
      for (int64_t e = part.begin; e < part.end; ++e) f(e, int64_t(index_[e]) * columns());
    else
      for (int64_t e = part.begin; e < part.end; ++e)
        if (uint64_t(index_[e]) - part.low < part.span) f(e, int64_t(index_[e]) * columns());
  }

 private:
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

// If Groups::apart(), each thread takes all steps for its rows. Otherwise threads wait for each other after
// each step: the maxima of groups, exponentials of rows, their sums by groups, and the quotients.
template <class A, class I, int C>
void softmax_as(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<A, I, C> groups(p, parallel);
  const int64_t columns = groups.columns(), size = p.num_groups * columns;
  const A* score = static_cast<const A*>(p.rows);
  A* out = static_cast<A*>(p.out);
  Buffer<A> high(size), sum(size);
  fill<A>(high, size, -kInfinity<A>);
  fill<A>(sum, size, 0);
  const auto maxima = [&](const Part& part) {
    groups.each(part, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c) high[at + c] = larger(high[at + c], score[e * columns + c]);
    });
  };
  const auto exp_of = [&](int64_t begin, int64_t end) {
    groups.each({begin, end, 0, 0, true}, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c) {
        A m = high[at + c];
        if (p.masked && m == -kInfinity<A>) m = 0;
        out[e * columns + c] = score[e * columns + c] - m;
      }
    });
    exponentials(out + begin * columns, (end - begin) * columns);
  };
  const auto sums = [&](const Part& part) {
    groups.each(part, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c) sum[at + c] += out[e * columns + c];
    });
  };
  const auto divide = [&](int64_t begin, int64_t end) {
    groups.each({begin, end, 0, 0, true}, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c) {
        const A s = sum[at + c];
        out[e * columns + c] = p.masked && s == 0 ? A(0) : out[e * columns + c] / s;
      }
    });
  };
  if (groups.apart()) {
    groups.by_groups([&](const Part& part) {
      maxima(part);
      groups.blocks(part.begin, part.end, [&](int64_t begin, int64_t end) {
        exp_of(begin, end);
        sums({begin, end, 0, 0, true});
      });
      divide(part.begin, part.end);
    });
    return;
  }
  groups.by_groups(maxima);
  groups.by_rows([&](int64_t begin, int64_t end) { groups.blocks(begin, end, exp_of); });
  groups.by_groups(sums);
  groups.by_rows(divide);
}

template <class A, class I, int C>
void softmax_backward_as(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<A, I, C> groups(p, parallel);
  const int64_t columns = groups.columns(), size = p.num_groups * columns;
  const A *grad = static_cast<const A*>(p.rows), *result = static_cast<const A*>(p.result);
  A* out = static_cast<A*>(p.out);
  Buffer<A> dot(size);
  fill<A>(dot, size, 0);
  const auto dots = [&](const Part& part) {
    groups.each(part, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c) dot[at + c] += result[e * columns + c] * grad[e * columns + c];
    });
  };
  const auto gradient = [&](int64_t begin, int64_t end) {
    groups.each({begin, end, 0, 0, true}, [&](int64_t e, int64_t at) {
      for (int64_t c = 0; c < columns; ++c)
        out[e * columns + c] = result[e * columns + c] * (grad[e * columns + c] - dot[at + c]);
    });
  };
  if (groups.apart()) {
    groups.by_groups([&](const Part& part) {
      dots(part);
      gradient(part.begin, part.end);
    });
    return;
  }
  groups.by_groups(dots);
  groups.by_rows(gradient);
}

template <class A, class I, int C, bool gathered>
void sum_of(const ByIndexParams& p, const Parallel& parallel) {
  const Groups<A, I, C> groups(p, parallel);
  const int64_t columns = groups.columns();
  const A* rows = static_cast<const A*>(p.rows);
  const I* source = static_cast<const I*>(p.source);
  A* out = static_cast<A*>(p.out);
  parallel_range(parallel, p.num_groups, kPerThread / columns + 1, [&](int64_t begin, int64_t end) {
    fill<A>(out + begin * columns, (end - begin) * columns, 0);
  });
  groups.by_groups([&](const Part& part) {
    groups.each(part, [&](int64_t e, int64_t at) {
      A* __restrict to = out + at;
      const A* __restrict from = rows + (gathered ? int64_t(source[e]) : e) * columns;
      for (int64_t c = 0; c < columns; ++c) to[c] += from[c];
    });
  });
}

template <class A, class I, int C>
void sum_as(const ByIndexParams& p, const Parallel& parallel) {
  p.source ? sum_of<A, I, C, true>(p, parallel) : sum_of<A, I, C, false>(p, parallel);
}

// Calls f(an object of the rows' type, an object of the index's type, an integral constant). The constant is
// the number of columns if kernels are compiled for that number, else 0.
template <class F>
void with_types(const ByIndexParams& p, const F& f) {
  const auto with_columns = [&](auto type, auto id) {
    switch (p.columns) {
      case 1:
        return f(type, id, std::integral_constant<int, 1>());
      case 2:
        return f(type, id, std::integral_constant<int, 2>());
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
  with_types(p, [&](auto type, auto id, auto columns) {
    softmax_as<decltype(type), decltype(id), columns.value>(p, parallel);
  });
}

void index_softmax_backward(const ByIndexParams& p, const Parallel& parallel) {
  with_types(p, [&](auto type, auto id, auto columns) {
    softmax_backward_as<decltype(type), decltype(id), columns.value>(p, parallel);
  });
}

void index_sum(const ByIndexParams& p, const Parallel& parallel) {
  with_types(p, [&](auto type, auto id, auto columns) {
    sum_as<decltype(type), decltype(id), columns.value>(p, parallel);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
