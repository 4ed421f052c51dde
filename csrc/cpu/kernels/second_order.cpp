// The backward of the backward: a pass over the destinations, which gathers keys, values and their cotangents
// for four products per edge and then for the sums of a row, and leaves three numbers per edge and head; and
// a pass over the sources, which gathers rows of the destinations and adds them up with these.
//
// Rows of up to EdgeMajor::kEdges edges go in groups and are worked on where they are in cache. Of longer
// rows the four products are kept, a block of edges at a time, and rows are gathered twice. The pieces of a
// split row are gone through together, by all threads.
#include "cpu/second_order.h"

#include "merge.h"
#include "second_edges.h"
#include "second_rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

void second_order(const SecondParams&, const Parallel&);
int64_t second_numbers(const Csr&);

namespace {

constexpr int kMostEdges = EdgeMajor::kEdges;

// Consecutive whole rows of at most kMostEdges edges together, or a block of a longer row.
class Groups {
 public:
  explicit Groups(int64_t columns) : most_rows_(int(larger<int64_t>(1, 4096 / larger<int64_t>(columns, 1)))) {
    if (most_rows_ > kMostRows) most_rows_ = kMostRows;
  }
  int most_rows() const { return most_rows_; }

  // Calls rows(group) for groups of the items [first, last), and row(item) for longer ones and pieces.
  template <class OfRows, class OfRow>
  void walk(const Csr& csr, int64_t first, int64_t last, const OfRows& of_rows, const OfRow& of_row) {
    for (int64_t k = first; k < last;) {
      if (fits(csr.items[k])) {
        const Group group = from(csr.items + k, last - k);
        of_rows(group);
        k += group.rows;
      } else {
        of_row(csr.items[k++]);
      }
    }
  }

  // Calls f(group, is the first) for the blocks of an item, one for an item without edges.
  template <class F>
  void each_block(const Item& item, const F& f) {
    for (int32_t begin = item.begin; begin == item.begin || begin < item.end; begin += kMostEdges) {
      const int32_t end = item.end - begin < kMostEdges ? item.end : begin + kMostEdges;
      const Item block{item.row, begin, end, item.slot};
      __builtin_memset(row_of_, 0, sizeof row_of_);
      f(Group{&block, 1, end - begin, item.row, begin, row_of_}, begin == item.begin);
    }
  }

 private:
  static bool fits(const Item& item) { return item.slot < 0 && item.end - item.begin <= kMostEdges; }

  Group from(const Item* items, int64_t count) {
    int rows = 1;
    while (rows < count && rows < most_rows_ && fits(items[rows]) && items[rows].row == items[0].row + rows &&
           items[rows].begin == items[rows - 1].end && items[rows].end - items[0].begin <= kMostEdges)
      ++rows;
    for (int r = 0; r < rows; ++r)
      for (int e = items[r].begin; e < items[r].end; ++e) row_of_[e - items[0].begin] = r;
    return {items, rows, items[rows - 1].end - items[0].begin, items[0].row, items[0].begin, row_of_};
  }

  int most_rows_;
  int32_t row_of_[kMostEdges];
};

// Rows [N, size] as accumulators, those of a group at a time: where they are, or a copy; zeros where there
// are none.
template <class T>
class OwnRows {
 public:
  using A = Acc<T>;
  OwnRows(const void* data, int64_t size, int most_rows)
      : data_(static_cast<const T*>(data)),
        size_(size),
        rows_(data && std::is_same_v<T, A> ? 0 : size * most_rows) {
    if (!data) rows_.clear(size * most_rows);
  }
  const A* of(const Group& group) {
    if (!data_) return rows_;
    const T* rows = data_ + group.row * size_;
    if constexpr (std::is_same_v<T, A>) {
      return rows;
    } else {
      to_accumulators(rows, group.rows * size_, false, rows_);
      return rows_;
    }
  }

 private:
  const T* data_;
  int64_t size_;
  Buffer<A> rows_;
};

// Sums of rows that a group gives, [rows, size], and the total of the blocks of a longer row.
template <class A>
class Sums {
 public:
  Sums(int64_t size, int most_rows) : size_(size), rows_(size * most_rows), total_(size) {}
  A* rows() const { return rows_; }
  operator A*() const { return rows_; }
  A* total() const { return total_; }
  int64_t size() const { return size_; }

  template <class T>
  void write(const Group& group, void* result) const {
    if (result) copy(rows_, group.rows * size_, static_cast<T*>(result) + group.row * size_);
  }
  void add(bool first) {
    if (first) total_.clear(size_);
    for (int64_t d = 0; d < size_; ++d) total_[d] += rows_[d];
  }
  // The total, to the item's row or slot.
  template <class T>
  void write(const Item& item, void* result, void* partial) const {
    if (!result) return;
    if (item.slot < 0)
      copy(total_, size_, static_cast<T*>(result) + item.row * size_);
    else
      copy(total_, size_, static_cast<A*>(partial) + item.slot * size_);
  }

 private:
  template <class T>
  static void copy(const A* from, int64_t n, T* to) {
    for_columns<A>(n, [&](auto width, int64_t i) {
      store<T, width.value>(to + i, load_vector<Vec<A, width.value>>(from + i));
    });
  }
  int64_t size_;
  Buffer<A> rows_, total_;
};

// What both passes have of a call.
template <class T>
class Call {
 public:
  using A = Acc<T>;
  explicit Call(const SecondParams& p)
      : p(p),
        size{p.shape.heads, p.shape.dim, p.shape.value_dim},
        row(int64_t(size.heads) * size.dim),
        value_row(int64_t(size.heads) * size.value_dim),
        stride(second_numbers(p.csr)),
        width_(row_shape<A>(1, size.dim < size.value_dim ? size.dim : size.value_dim).width),
        zeros_(larger(row, value_row)),
        vectors_(2 * row) {
    zeros_.clear(larger(row, value_row));
    if (p.score != Score::additive_v2) return;
    to_accumulators(static_cast<const T*>(p.attn), row, false, vectors_);
    if (p.of_attn)
      __builtin_memcpy(vectors_ + row, p.of_attn, row * sizeof(A));
    else
      __builtin_memset(vectors_ + row, 0, row * sizeof(A));
  }

  const SecondParams& p;
  HeadSizes size;
  int64_t row, value_row;  // columns of keys, of values
  int64_t stride;          // numbers that are kept of an edge and head

  bool pairs() const { return p.score == Score::additive_v2; }
  Vectors<A> vectors() const { return {vectors_, vectors_ + row, A(p.negative_slope)}; }
  A* numbers() const { return static_cast<A*>(p.numbers); }

  Table<T> table(const void* data, int64_t columns) const {
    return data ? Table<T>{static_cast<const T*>(data), columns} : Table<T>{zeros_, 0};
  }
  // Calls f(vector width, whether there are features of edges).
  template <class F>
  void with(const F& f) const {
    with_width<A>(
        width_, [&](auto width) { p.edge.feat ? f(width, std::true_type()) : f(width, std::false_type()); });
  }

 private:
  int width_;
  Buffer<T> zeros_;
  Buffer<A> vectors_;
};

// ---- over the destinations -----------------------------------------------------------------------------

template <class T>
class Destination {
 public:
  using A = Acc<T>;

  // attn: [H, D], to which the rows' part of the gradient is added; or null
  Destination(const Call<T>& call, A* attn)
      : call_(call),
        p_(call.p),
        attn_(attn),
        groups(larger(call.row, call.value_row)),
        block_(p_.csr, p_.edge, p_.shape),
        edges_(p_, groups.most_rows()),
        from_(gathering(call)),
        query_(additive() ? nullptr : p_.query, keyed(), groups.most_rows()),
        of_query_(additive() ? nullptr : p_.of_dst, keyed(), groups.most_rows()),
        grad_(p_.grad_out, call.value_row, groups.most_rows()),
        of_dst_(additive() ? call.size.heads : call.row, groups.most_rows()),
        of_grad_(call.value_row, groups.most_rows()),
        of_attn_(call.pairs() ? call.row : 0, groups.most_rows()),
        row_sums_(int64_t(kSecondSums) * call.size.heads) {}

  // Rows of at most a block.
  void operator()(const Group& group) {
    A* const sums = edges_.sums();
    start(group);
    multiply(group);
    edges_.weigh(block_, group), edges_.sum(block_, group);
    edges_.divide(group.rows, sums);
    edges_.centre(block_, group, sums), edges_.sum_moments(group);
    finish(group, sums);
    of_dst_.template write<T>(group, additive() ? nullptr : p_.grad_dst);
    if (additive()) of_dst_.template write<A>(group, p_.grad_dst);
    of_grad_.template write<T>(group, p_.grad_grad_out);
  }

  // A longer row.
  void operator()(const Item& item) {
    if (item.slot >= 0) return;
    measure(item, row_sums_);
    edges_.divide(1, row_sums_);
    add_moments(item, row_sums_);
    settle(item, row_sums_);
  }

  // The same in steps, for the pieces of a split row: sums over the item's edges, then with the row's means.
  void measure(const Item& item, A* sums) {
    __builtin_memset(sums, 0, sizeof(A) * kSecondSums * call_.size.heads);
    groups.each_block(item, [&](const Group& group, bool) {
      start(group);
      multiply(group);
      scatter<EdgeMajor, 4>(edges_.raw(), edges_.size(), block_.eid, block_.n, edges_.heads(),
                            call_.numbers());
      edges_.weigh(block_, group), edges_.sum(block_, group), edges_.add(0, 3, sums);
    });
  }
  void add_moments(const Item& item, A* sums) {
    groups.each_block(item, [&](const Group& group, bool) {
      again(group, sums);
      edges_.sum_moments(group), edges_.add(3, 4, sums);
    });
  }
  void settle(const Item& item, const A* sums) {
    groups.each_block(item, [&](const Group& group, bool first) {
      again(group, sums);
      finish(group, sums);
      of_dst_.add(first), of_grad_.add(first);
    });
    of_dst_.template write<T>(item, additive() ? nullptr : p_.grad_dst, p_.partial_query);
    if (additive()) of_dst_.template write<A>(item, p_.grad_dst, p_.partial_query);
    of_grad_.template write<T>(item, p_.grad_grad_out, p_.partial_out);
  }

 private:
  const Call<T>& call_;
  const SecondParams& p_;
  A* attn_;

 public:
  Groups groups;

 private:
  bool additive() const { return p_.score == Score::additive; }
  int64_t keyed() const { return additive() ? 0 : call_.row; }

  static Gathering<T> gathering(const Call<T>& call) {
    const SecondParams& p = call.p;
    const bool dot = p.score == Score::dot;
    const void *in_key = p.edge.feat_in_key ? p.edge.feat : nullptr,
               *in_value = p.edge.feat_in_value ? p.edge.feat : nullptr;
    return {call.table(dot ? p.key : nullptr, call.row),
            call.table(dot ? p.of_src : nullptr, call.row),
            call.table(p.value, call.value_row),
            call.table(p.of_value, call.value_row),
            call.table(in_key, call.row),
            call.table(in_key ? p.of_feat : nullptr, call.row),
            call.table(in_value, call.value_row),
            call.table(in_value ? p.of_feat : nullptr, call.value_row)};
  }

  Edges<T> edges(bool fresh) const {
    const int64_t limit = fresh ? block_.limit : 0;
    Edges<T> edges{
        block_.index, block_.eid, {block_.index, limit}, {block_.eids_ahead(), p_.csr.eids ? limit : 0}};
    if (!limit) return edges;
    edges.nodes.add(from_.key, call_.row), edges.nodes.add(from_.of_key, call_.row);
    edges.nodes.add(from_.value, call_.value_row), edges.nodes.add(from_.of_value, call_.value_row);
    const bool key = p_.edge.feat_in_key;
    edges.features.add(key ? from_.key_feat : from_.value_feat, key ? call_.row : call_.value_row);
    edges.features.add(key ? from_.of_key_feat : from_.of_value_feat, key ? call_.row : call_.value_row);
    return edges;
  }

  void start(const Group& group) {
    block_.load(group.begin, group.begin + group.n, true);
    to_ = {query_.of(group), of_query_.of(group), grad_.of(group)};
  }

  // The products of rows, as SecondEdges takes them.
  void multiply(const Group& group) {
    const Edges<T> edges = this->edges(true);
    A* const products = edges_.products();
    call_.with([&](auto width, auto feat) {
      constexpr int W = width.value;
      constexpr bool with_feat = feat.value;
      if (call_.pairs())
        products_of_pairs<T, W, with_feat>(group, edges, from_, to_, call_.vectors(), call_.size, products);
      else if (additive())
        products_of_dot<T, W, false, with_feat>(group, edges, from_, to_, call_.size, products);
      else
        products_of_dot<T, W, true, with_feat>(group, edges, from_, to_, call_.size, products);
    });
    edges_.take(block_);
    if (!additive()) return;
    add_ends(group, p_.alpha_src, p_.alpha_dst, edges_.raw());
    add_ends(group, p_.of_src, p_.of_dst, edges_.t_raw());
  }

  // The sum of a number per head of both ends of each edge; either may be null.
  void add_ends(const Group& group, const void* of_src, const void* of_dst, A* out) const {
    const int heads = call_.size.heads;
    if (of_src)
      gather<EdgeMajor>(static_cast<const A*>(of_src), block_.index, block_.n, block_.limit, heads, heads,
                        out, 0);
    if (!of_dst) return;
    const A* rows = static_cast<const A*>(of_dst) + group.row * heads;
    group.each_edge([&](int r, int e) {
      for (int h = 0; h < heads; ++h)
        out[e * heads + h] = (of_src ? out[e * heads + h] : 0) + rows[r * heads + h];
    });
  }

  // What measure() did, from what it kept.
  void again(const Group& group, const A* sums) {
    start(group);
    gather<EdgeMajor, 4>(call_.numbers(), block_.eid, block_.n, 0, edges_.heads(), 4 * edges_.heads(),
                         edges_.raw(), edges_.size());
    edges_.weigh(block_, group);
    edges_.centre(block_, group, sums);
  }

  // The numbers of the edges, and with them the sums of rows.
  void finish(const Group& group, const A* sums) {
    edges_.settle(block_, group, sums);
    if (call_.stride == 3)
      scatter<EdgeMajor, 3>(edges_.of_p(), edges_.size(), block_.eid, block_.n, edges_.heads(),
                            call_.numbers());
    else
      scatter<EdgeMajor, 4>(edges_.of_p(), edges_.size(), block_.eid, block_.n, edges_.heads(),
                            call_.numbers());
    const Edges<T> edges = this->edges(false);
    const Factors<A> by{edges_.of_p(), edges_.of_raw(), edges_.of_t(), edges_.share()};
    T* const of_feat = static_cast<T*>(p_.grad_feat);
    call_.with([&](auto width, auto feat) {
      constexpr int W = width.value;
      if (call_.pairs())
        return sums_of_pairs<T, W, feat.value>(group, edges, from_, to_, call_.vectors(), call_.size, by,
                                               of_dst_, of_grad_, of_attn_, of_feat);
      const bool key = p_.edge.feat_in_key, value = p_.edge.feat_in_value;
      const auto sum = [&](bool keys, bool values) {
        sums_of_dot<T, W, feat.value>(group, edges, from_, to_, call_.size, by, keys && key, values && value,
                                      keys ? of_dst_.rows() : nullptr, values ? of_grad_.rows() : nullptr,
                                      (keys && key) || (values && value) ? of_feat : nullptr);
      };
      if (additive()) return sum(false, true);
      if (call_.size.dim == call_.size.value_dim) return sum(true, true);
      sum(true, false), sum(false, true);
    });
    if (additive()) edges_.sum_raw(group, of_dst_);
    if (!attn_) return;
    for (int r = 0; r < group.rows; ++r)
      for (int64_t d = 0; d < call_.row; ++d) attn_[d] += of_attn_[r * call_.row + d];
  }

  EdgeBlock<T, EdgeMajor> block_;
  SecondEdges<T> edges_;
  Gathering<T> from_;
  OwnRows<T> query_, of_query_, grad_;
  Destinations<A> to_{};
  Sums<A> of_dst_, of_grad_, of_attn_;
  Buffer<A> row_sums_;
};

// Calls f(pass, item, its number) for the pieces of split rows; make(): a pass.
template <class Make, class F>
void each_piece(const Csr& csr, const Parallel& parallel, const Make& make, const F& f) {
  parallel_items(parallel, csr, [&](int64_t first, int64_t last) {
    while (first < last && csr.items[first].slot < 0) ++first;
    if (first == last) return;
    auto pass = make();
    for (int64_t k = first; k < last; ++k)
      if (csr.items[k].slot >= 0) f(pass, csr.items[k]);
  });
}

// The pieces of split rows, step by step. attn: [H, D], to which all of them add; or null.
template <class T>
void run_pieces(const Call<T>& call, const Parallel& parallel, Acc<T>* attn) {
  using A = Acc<T>;
  const SecondParams& p = call.p;
  const int heads = call.size.heads, row = kSecondSums * heads;
  A* const sums = static_cast<A*>(p.partial_sums);
  const auto at = [&](const Item& item) { return sums + int64_t(item.slot) * row; };
  // The sums `first` ... `last` of a row's pieces, to each of them.
  const auto merge = [&](int first, int last) {
    for (int64_t k = 0; k < p.csr.num_splits; ++k) {
      const Split& split = p.csr.splits[k];
      for (int i = first * heads; i < last * heads; ++i) {
        A total = 0;
        for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot) total += sums[slot * row + i];
        for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot) sums[slot * row + i] = total;
      }
    }
  };
  const auto make = [&] { return Destination<T>(call, nullptr); };
  each_piece(p.csr, parallel, make, [&](auto& pass, const Item& item) { pass.measure(item, at(item)); });
  merge(0, 3);
  {
    const SecondEdges<T> edges(p, 1);
    for (int64_t slot = 0; slot < p.csr.num_slots; ++slot) edges.divide(1, sums + slot * row);
  }
  each_piece(p.csr, parallel, make, [&](auto& pass, const Item& item) { pass.add_moments(item, at(item)); });
  merge(3, 4);
  Buffer<A> parts(attn ? p.csr.num_slots * call.row : 0);
  if (attn) parts.clear(p.csr.num_slots * call.row);
  parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Item& item = p.csr.items[k];
      if (item.slot < 0) continue;
      Destination<T> pass(call, attn ? parts + item.slot * call.row : nullptr);
      pass.settle(item, at(item));
    }
  });
  if (attn)
    for (int64_t slot = 0; slot < p.csr.num_slots; ++slot)
      for (int64_t d = 0; d < call.row; ++d) attn[d] += parts[slot * call.row + d];
}

template <class T>
void run_destinations(const Call<T>& call, const Parallel& parallel) {
  using A = Acc<T>;
  const SecondParams& p = call.p;
  const auto run = [&](int64_t first, int64_t last, A* attn) {
    Destination<T> pass(call, attn);
    pass.groups.walk(
        p.csr, first, last, [&](const Group& group) { pass(group); }, [&](const Item& item) { pass(item); });
  };
  A* const attn = static_cast<A*>(p.grad_attn);
  if (attn) {
    const Chunks parts(p.csr, p.attn_parts);
    parallel_range(parallel, parts.count(), 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        __builtin_memset(attn + k * call.row, 0, call.row * sizeof(A));
        run(parts.boundary(k), parts.boundary(k + 1), attn + k * call.row);
      }
    });
  } else {
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) { run(first, last, nullptr); });
  }
  if (p.csr.num_splits == 0) return;
  run_pieces(call, parallel, attn);
  const int heads = call.size.heads;
  if (p.score == Score::additive && p.grad_dst)
    merge_splits<A>(p.csr, parallel, heads, 1, p.partial_query, p.grad_dst);
  else if (p.score != Score::additive)
    merge_splits<T>(p.csr, parallel, heads, call.size.dim, p.partial_query, p.grad_dst);
  merge_splits<T>(p.csr, parallel, heads, call.size.value_dim, p.partial_out, p.grad_grad_out);
}

// ---- over the sources ----------------------------------------------------------------------------------

template <class T>
class Source {
 public:
  using A = Acc<T>;

  explicit Source(const Call<T>& call)
      : groups(larger(call.row, call.value_row)),
        call_(call),
        p_(call.p),
        block_(p_.reverse, kNoOptions, p_.shape),
        edges_(p_, groups.most_rows()),
        grad_(call.table(p_.grad_out, call.value_row)),
        query_(call.table(additive() ? nullptr : p_.query, call.row)),
        of_query_(call.table(additive() ? nullptr : p_.of_dst, call.row)),
        feat_(call.table(p_.edge.feat_in_key ? p_.edge.feat : nullptr, call.row)),
        fixed_(call.pairs() ? p_.value : nullptr, call.pairs() ? call.row : 0, groups.most_rows()),
        of_value_(call.value_row, groups.most_rows()),
        of_key_(call.pairs() ? 0
                : additive() ? call.size.heads
                             : call.row,
                groups.most_rows()) {}

  void operator()(const Group& group) {
    add(group);
    of_value_.template write<T>(group, p_.grad_value);
    if (additive())
      of_key_.template write<A>(group, p_.grad_src);
    else
      of_key_.template write<T>(group, p_.grad_src);
  }
  // Longer rows, and pieces.
  void operator()(const Item& item) {
    groups.each_block(item, [&](const Group& group, bool first) {
      add(group);
      of_value_.add(first), of_key_.add(first);
    });
    of_value_.template write<T>(item, p_.grad_value, p_.partial_value);
    if (additive())
      of_key_.template write<A>(item, p_.grad_src, p_.partial_key);
    else
      of_key_.template write<T>(item, p_.grad_src, p_.partial_key);
  }

  Groups groups;

 private:
  bool additive() const { return p_.score == Score::additive; }

  Edges<T> edges() const {
    const int64_t limit = block_.limit;
    Edges<T> edges{
        block_.index, block_.eid, {block_.index, limit}, {block_.eids_ahead(), p_.reverse.eids ? limit : 0}};
    if (!limit) return edges;
    edges.nodes.add(grad_, call_.value_row), edges.nodes.add(query_, call_.row);
    if (!call_.pairs()) edges.nodes.add(of_query_, call_.row);
    if (call_.pairs()) edges.features.add(feat_, call_.row);
    return edges;
  }

  void add(const Group& group) {
    block_.load(group.begin, group.begin + group.n, true);
    gather<EdgeMajor, 3>(call_.numbers(), block_.eids_ahead(), block_.n, block_.eids_limit(), edges_.heads(),
                         call_.stride * edges_.heads(), edges_.of_p(), edges_.size());
    const Edges<T> edges = this->edges();
    const Factors<A> by{edges_.of_p(), edges_.of_raw(), edges_.of_t(), nullptr};
    const HeadSizes& size = call_.size;
    call_.with([&](auto width, auto feat) {
      constexpr int W = width.value;
      if (call_.pairs())
        return sums_of_pairs_back<T, W, feat.value>(group, edges, grad_, query_, feat_, fixed_.of(group),
                                                    call_.vectors(), size.heads, size.dim, by, of_value_);
      const bool both = !additive() && size.dim == size.value_dim;
      sums_of_destinations<T, W>(group, edges, grad_, query_, of_query_, size.heads, size.value_dim, by,
                                 of_value_, both ? of_key_.rows() : nullptr);
      if (!both && !additive())
        sums_of_destinations<T, W>(group, edges, grad_, query_, of_query_, size.heads, size.dim, by, nullptr,
                                   of_key_);
    });
    if (additive()) edges_.sum_raw(group, of_key_);
  }

  const Call<T>& call_;
  const SecondParams& p_;
  EdgeBlock<T, EdgeMajor> block_;
  SecondEdges<T> edges_;
  Table<T> grad_, query_, of_query_, feat_;
  OwnRows<T> fixed_;
  Sums<A> of_value_, of_key_;
};

template <class T>
void run_sources(const Call<T>& call, const Parallel& parallel) {
  using A = Acc<T>;
  const SecondParams& p = call.p;
  parallel_items(parallel, p.reverse, [&](int64_t first, int64_t last) {
    Source<T> pass(call);
    pass.groups.walk(
        p.reverse, first, last, [&](const Group& group) { pass(group); },
        [&](const Item& item) { pass(item); });
  });
  const int heads = call.size.heads;
  merge_splits<T>(p.reverse, parallel, heads, call.size.value_dim, p.partial_value, p.grad_value);
  if (p.score == Score::additive) merge_splits<A>(p.reverse, parallel, heads, 1, p.partial_key, p.grad_src);
  if (p.score == Score::dot)
    merge_splits<T>(p.reverse, parallel, heads, call.size.dim, p.partial_key, p.grad_src);
}

}  // namespace

int64_t second_numbers(const Csr& destinations) {
  bool longer = destinations.num_splits > 0;
  for (int64_t k = 0; k < destinations.num_items; ++k)
    longer |= destinations.items[k].end - destinations.items[k].begin > kMostEdges;
  return longer ? 4 : 3;
}

void second_order(const SecondParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) {
    const Call<decltype(type)> call(p);
    run_destinations(call, parallel);
    run_sources(call, parallel);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
