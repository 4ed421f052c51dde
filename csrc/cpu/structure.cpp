// Sorts edges, transposes CSRs and makes work items on the CPU: see cpu/structure.h.
#include "cpu/structure.h"

#include <algorithm>
#include <memory>

namespace dfgnn::cpu {
namespace {

constexpr int64_t kEdgesPerThread = int64_t(1) << 16;  // the fewest edges per thread of a sort
constexpr int64_t kRowsPerThread = int64_t(1) << 14;   // the fewest rows per thread of make_items

// Node ids of type T.
template <class T>
struct Strided {
  explicit Strided(const Ids& ids) : data(static_cast<const T*>(ids.data)), stride(ids.stride) {}
  int64_t operator[](int64_t e) const { return data[e * stride]; }
  const T* data;
  int64_t stride;
};

// Calls body with both arrays in their types, so that each combination of types has a loop of its own.
template <class Body>
auto with_types(const Ids& a, const Ids& b, const Body& body) {
  if (a.is_int64)
    return b.is_int64 ? body(Strided<int64_t>(a), Strided<int64_t>(b))
                      : body(Strided<int64_t>(a), Strided<int32_t>(b));
  return b.is_int64 ? body(Strided<int32_t>(a), Strided<int64_t>(b))
                    : body(Strided<int32_t>(a), Strided<int32_t>(b));
}

// The ids of one end of the edges, in the order of the edges. take() extends the range [low, high] of ids;
// follow() finds out whether they are sorted.
struct Side {
  void take(int64_t id) {
    low = std::min(low, id);
    high = std::max(high, id);
  }
  void follow(int64_t id) {
    sorted &= id >= last;
    last = id;
  }
  int64_t low = INT64_MAX, high = INT64_MIN, last = INT64_MIN;
  bool sorted = true;
};

// Calls body(begin, end, part) for `parts` ranges of [0, n), on as many threads.
template <class Body>
void in_parts(const Parallel& parallel, int64_t n, int64_t parts, const Body& body) {
  if (parts == 1) return body(int64_t(0), n, int64_t(0));
  struct Call {
    const Body& body;
    int64_t n, parts;
  } call{body, n, parts};
  const auto run = [](int64_t first, int64_t last, void* p) {
    const Call& c = *static_cast<Call*>(p);
    for (int64_t part = first; part < last; ++part)
      c.body(c.n / c.parts * part + std::min(c.n % c.parts, part),
             c.n / c.parts * (part + 1) + std::min(c.n % c.parts, part + 1), part);
  };
  parallel.run(0, parts, 1, run, &call);
}

// Sorts edges by row, stably. edges.visit(begin, end, f) calls f(row, col, id) for a range of edges, in
// order. Each of the first num_loops rows keeps one position free at its end. Returns false, before writing
// out of bounds, if a row is not below num_rows.
//
// While edges are placed, indptr[r + 1] is the position of the next edge of row r. With several threads, each
// takes a range of the edges and has such positions of its own, which follow those of the ranges before it.
template <class Edges>
bool sort_by_row(const Edges& edges, int64_t num_edges, int64_t num_rows, int64_t num_loops, int64_t* indptr,
                 int32_t* indices, int32_t* eids, const Parallel& parallel) {
  // A thread clears and reads a counter per row, which only pays with enough edges.
  const int64_t parts = std::max<int64_t>(
      1, std::min({int64_t(parallel.num_threads), num_edges / kEdgesPerThread, num_edges / (num_rows + 1)}));
  std::fill(indptr, indptr + num_rows + 1, 0);
  std::unique_ptr<int32_t[]> more;  // [parts - 1, num_rows] counters; the first thread's are in indptr
  if (parts > 1) more.reset(new int32_t[(parts - 1) * num_rows]);
  std::unique_ptr<bool[]> bad(new bool[parts]());

  in_parts(parallel, num_edges, parts, [&](int64_t begin, int64_t end, int64_t part) {
    bool outside = false;
    const auto count = [&](auto* counter) {
      edges.visit(begin, end, [&](int64_t row, int64_t, int64_t) {
        if (uint64_t(row) < uint64_t(num_rows))
          ++counter[row];
        else
          outside = true;
      });
    };
    if (part == 0) {
      count(indptr + 1);
    } else {
      int32_t* counter = more.get() + (part - 1) * num_rows;
      std::fill(counter, counter + num_rows, 0);
      count(counter);
    }
    bad[part] = outside;
  });
  if (std::any_of(bad.get(), bad.get() + parts, [](bool b) { return b; })) return false;

  // Replaces the number of edges that a thread has in a row by the position of the first of them.
  int64_t place = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t first = indptr[row + 1];
    indptr[row + 1] = place;
    place += first;
    for (int64_t part = 1; part < parts; ++part) {
      int32_t& counter = more[(part - 1) * num_rows + row];
      const int32_t here = counter;
      counter = int32_t(place);  // below 2**31, because the number of edges is
      place += here;
    }
    place += row < num_loops;
  }

  in_parts(parallel, num_edges, parts, [&](int64_t begin, int64_t end, int64_t part) {
    const auto fill = [&](auto* next) {
      if (eids)
        edges.visit(begin, end, [&](int64_t row, int64_t col, int64_t id) {
          const int64_t to = next[row]++;
          indices[to] = int32_t(col);
          eids[to] = int32_t(id);
        });
      else
        edges.visit(begin, end,
                    [&](int64_t row, int64_t col, int64_t) { indices[next[row]++] = int32_t(col); });
    };
    if (part == 0)
      fill(indptr + 1);
    else
      fill(more.get() + (part - 1) * num_rows);
  });
  if (parts > 1) {  // the last thread has counted up to the ends of the rows
    const int32_t* last = more.get() + (parts - 2) * num_rows;
    for (int64_t row = 0; row < num_rows; ++row) indptr[row + 1] = last[row];
  }
  return true;
}

// Edges for sort_by_row: (rows[e], cols[e]) with id e; with a map, (rows[map[e]], cols[map[e]]) with id e.
template <class Rows, class Cols>
struct CooEdges {
  template <class F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    if (map)
      for (int64_t e = begin; e < end; ++e) f(rows[map[e]], cols[map[e]], e);
    else
      for (int64_t e = begin; e < end; ++e) f(rows[e], cols[e], e);
  }
  Rows rows;
  Cols cols;
  const int64_t* map;
};

// Edges for sort_by_row: those of a CSR, with rows and columns exchanged.
struct CsrEdges {
  template <class F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    if (begin == end) return;
    int64_t row = std::upper_bound(csr.indptr, csr.indptr + csr.num_rows + 1, begin) - csr.indptr - 1;
    for (int64_t e = begin; e < end; ++row) {
      const int64_t stop = std::min(csr.indptr[row + 1], end);
      for (; e < stop; ++e) f(csr.indices[e], row, csr.eids ? csr.eids[e] : e);
    }
  }
  const Transposition& csr;
};

// Whether indptr ascends from 0 to num_edges.
bool rises(const int64_t* indptr, int64_t num_rows, int64_t num_edges) {
  bool falls = indptr[0] != 0 || indptr[num_rows] != num_edges;
  for (int64_t row = 0; row < num_rows; ++row) falls |= indptr[row + 1] < indptr[row];
  return !falls;
}

// Whether the edge ids of one direction, `a`, lead to the same edges in the other one, `b`, which has no ids:
// an id is a position in b. If the work items of b are not in the order of its edges, some rows of b are not
// compared.
bool same_edges(const Csr& a, const Csr& b, int64_t num_edges) {
  const int64_t count = std::min<int64_t>(a.num_items, 16);
  const Item* end = b.items + b.num_items;
  for (int64_t k = 0; k < count; ++k) {
    const Item& item = a.items[a.num_items / count * k];
    const int64_t p = item.begin;
    if (p >= item.end || p >= num_edges) continue;
    const int64_t id = a.eids ? a.eids[p] : p;
    if (id < 0 || id >= num_edges || b.indices[id] != item.row) return false;
    // Finds the work item of b that contains the edge, if b's items are in the order of the edges.
    const auto begins_after = [](int64_t edge, const Item& other) { return edge < other.begin; };
    const Item* next = std::upper_bound(b.items, end, id, begins_after);
    if (next == b.items) continue;
    const Item& found = *(next - 1);
    if (found.begin <= id && id < found.end && found.row != a.indices[p]) return false;
  }
  return true;
}

}  // namespace

Coo read_coo(const Ids& src, const Ids& dst, int64_t num_edges, bool with_loops) {
  if (num_edges == 0) return {0, -1, 0, -1, 0, true, true};
  return with_types(src, dst, [&](auto sources, auto targets) -> Coo {
    Side s, d;
    int64_t num_kept = num_edges;
    if (with_loops) {
      num_kept = 0;
      for (int64_t e = 0; e < num_edges; ++e) {
        const int64_t j = sources[e], i = targets[e];
        s.take(j), d.take(i);
        if (i == j) continue;
        s.follow(j), d.follow(i);
        ++num_kept;
      }
      // The first appended loop is that of node 0: ids before it must not be larger.
      s.sorted &= s.last <= 0, d.sorted &= d.last <= 0;
    } else {
      for (int64_t e = 0; e < num_edges; ++e) {
        const int64_t j = sources[e], i = targets[e];
        s.take(j), d.take(i);
        s.follow(j), d.follow(i);
      }
    }
    return {s.low, s.high, d.low, d.high, num_kept, s.sorted, d.sorted};
  });
}

void find_kept(const Ids& src, const Ids& dst, int64_t num_edges, int64_t* edge_map) {
  with_types(src, dst, [&](auto sources, auto targets) {
    for (int64_t e = 0; e < num_edges; ++e)
      if (sources[e] != targets[e]) *edge_map++ = e;
  });
}

void sort_coo(const CooSort& p, const Parallel& parallel) {
  with_types(p.rows, p.cols, [&](auto rows, auto cols) {
    const CooEdges<decltype(rows), decltype(cols)> edges{rows, cols, p.edge_map};
    int64_t* end = p.indptr + 1;  // end[row]: where the row's edges end, before its appended loop
    if (p.sorted) {
      std::fill(p.indptr, p.indptr + p.num_rows + 1, 0);
      edges.visit(0, p.num_kept, [&](int64_t row, int64_t, int64_t) { ++end[row]; });
      for (int64_t row = 0, place = 0; row < p.num_rows; ++row) {
        const int64_t count = end[row];
        end[row] = place + count;
        place += count + (row < p.num_loops);
      }
      if (p.indices) {
        int32_t* to = p.indices;
        edges.visit(0, p.num_kept, [&](int64_t, int64_t col, int64_t) { *to++ = int32_t(col); });
      }
    } else {
      sort_by_row(edges, p.num_kept, p.num_rows, p.num_loops, p.indptr, p.indices, p.eids, parallel);
    }
    for (int64_t row = 0; row < p.num_loops; ++row) {
      const int64_t place = end[row]++;
      p.indices[place] = int32_t(row);
      if (p.eids) p.eids[place] = int32_t(p.num_kept + row);
    }
  });
}

const char* transpose(const Transposition& p, const Parallel& parallel) {
  if (!rises(p.indptr, p.num_rows, p.num_edges))
    return "indptr: expected values that rise from 0 to the number of edges";
  if (!sort_by_row(CsrEdges{p}, p.num_edges, p.num_cols, 0, p.new_indptr, p.new_indices, p.new_eids,
                   parallel))
    return "indices: expected values in [0, num_cols)";
  return nullptr;
}

bool same_edges(const BackwardParams& p, bool uses_ids) {
  uses_ids |= p.edge.any() || p.grad_attention;
  if (!uses_ids || (p.csr.eids && p.reverse.eids)) return true;
  return p.reverse.eids ? same_edges(p.reverse, p.csr, p.shape.num_edges)
                        : same_edges(p.csr, p.reverse, p.shape.num_edges);
}

RowPlan count_items(const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t max_edges) {
  RowPlan plan{num_rows, 0, 0};
  if (!rises(indptr, num_rows, num_edges)) return {-1, 0, 0};
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t degree = indptr[row + 1] - indptr[row];
    if (degree <= max_edges) continue;
    const int64_t pieces = (degree + max_edges - 1) / max_edges;
    plan.num_items += pieces - 1;
    plan.num_slots += pieces;
    ++plan.num_splits;
  }
  return plan;
}

void make_items(const int64_t* indptr, int64_t num_rows, int64_t max_edges, const RowPlan& plan, Item* items,
                Split* splits, const Parallel& parallel) {
  const auto whole = [&](int64_t row, Item& item) {
    item = {int32_t(row), int32_t(indptr[row]), int32_t(indptr[row + 1]), -1};
  };
  if (plan.num_splits == 0) {
    const int64_t parts = std::min<int64_t>(parallel.num_threads, num_rows / kRowsPerThread);
    return in_parts(parallel, num_rows, std::max<int64_t>(parts, 1),
                    [&](int64_t begin, int64_t end, int64_t) {
                      for (int64_t row = begin; row < end; ++row) whole(row, items[row]);
                    });
  }
  int32_t slot = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t stop = indptr[row + 1], degree = stop - indptr[row];
    if (degree <= max_edges) {
      whole(row, *items++);
      continue;
    }
    const int64_t pieces = (degree + max_edges - 1) / max_edges, length = (degree + pieces - 1) / pieces;
    *splits++ = {int32_t(row), slot, int32_t(slot + pieces), 1};
    for (int64_t begin = indptr[row]; begin < stop; begin += length)
      *items++ = {int32_t(row), int32_t(begin), int32_t(std::min(begin + length, stop)), slot++};
  }
}

}  // namespace dfgnn::cpu
