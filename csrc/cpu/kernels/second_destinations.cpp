// Second derivatives of attention on the CPU: the pass over the destinations, as second_order.cpp describes
// it. Letters and scalars per edge: second_edges.h; feature rows: second_rows.h; groups and buffers:
// second_call.h.
#include "second_call.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T>
class Destination {
 public:
  using A = Acc<T>;

  // attn: [H, D], to which the rows' contribution to the gradient of GATv2's vector is added; or null
  Destination(const Call<T>& call, A* attn)
      : call_(call),
        p_(call.p),
        attn_(attn),
        groups(larger(call.row, call.value_row)),
        block_(p_.csr, p_.edge, p_.shape, p_.dtype),
        edges_(p_, groups.most_rows()),
        from_(gathering(call)),
        query_(additive() ? nullptr : p_.query, keyed(), groups.most_rows()),
        of_query_(additive() ? nullptr : p_.of_dst, keyed(), groups.most_rows()),
        grad_(p_.grad_out, call.value_row, groups.most_rows()),
        dst_sums_(additive() ? call.size.heads : call.row, groups.most_rows()),
        grad_sums_(call.value_row, groups.most_rows()),
        attn_sums_(call.pairs() ? call.row : 0, groups.most_rows()),
        row_sums_(int64_t(kSecondSums) * call.size.heads) {}

  // Processes a group of whole rows.
  void operator()(const Group& group) {
    A* const sums = edges_.sums();
    start(group);
    multiply(group);
    edges_.weigh(block_, group), edges_.sum(block_, group);
    edges_.divide(group.rows, sums);
    edges_.centre(block_, group, sums), edges_.sum_moments(group);
    finish(group, sums);
    dst_sums_.template write<T>(group, additive() ? nullptr : p_.grad_dst);
    if (additive()) dst_sums_.template write<A>(group, p_.grad_dst);
    grad_sums_.template write<T>(group, p_.grad_grad_out);
  }

  // Processes a row that does not fit in a group. Chunks of split rows are left to run_pieces().
  void operator()(const Item& item) {
    if (item.slot >= 0) return;
    measure(item, row_sums_);
    edges_.divide(1, row_sums_);
    add_moments(item, row_sums_);
    settle(item, row_sums_);
  }

  // A row of several blocks takes three steps. measure() computes the sums of alpha, alpha f p and alpha t,
  // of which SecondEdges::divide makes delta and tau; add_moments() computes kappa; settle() the gradients.
  // The chunks of a split row take a step together, and their sums are added up before the next one. sums:
  // [kSecondSums, H], of which measure() and add_moments() write what this item contributes; all else in it
  // is of the whole row.
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
      dst_sums_.add(first), grad_sums_.add(first);
    });
    dst_sums_.template write<T>(item, additive() ? nullptr : p_.grad_dst, p_.partial_query);
    if (additive()) dst_sums_.template write<A>(item, p_.grad_dst, p_.partial_query);
    grad_sums_.template write<T>(item, p_.grad_grad_out, p_.partial_out);
  }

 private:
  const Call<T>& call_;
  const SecondParams& p_;
  A* attn_;

 public:
  Groups groups;

 private:
  bool additive() const { return p_.score == Score::additive; }
  int64_t keyed() const { return additive() ? 0 : call_.row; }  // columns of a query or key; GAT has none

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

  // fresh: whether the feature rows of the group's edges are not in cache yet, so that they are to be
  // prefetched.
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

  DestinationRows<T> rows(const Group& group, bool fresh) const {
    return {call_.width, call_.feat(), group, edges(fresh), from_, to_, call_.vectors(), call_.size};
  }

  // Loads the group's edges, and the rows of its destinations.
  void start(const Group& group) {
    block_.load(group.begin, group.begin + group.n, true);
    to_ = {query_.of(group), of_query_.of(group), grad_.of(group)};
  }

  // Computes raw, t_raw, p (without gamma) and u of the group's edges, in edges_.
  void multiply(const Group& group) {
    if (call_.pairs())
      products_of_pairs(rows(group, true), edges_.products());
    else
      products_of_dot(rows(group, true), !additive(), edges_.products());
    edges_.take(block_);
    if (!additive()) return;
    add_ends(group, p_.alpha_src, p_.alpha_dst, edges_.raw());
    add_ends(group, p_.of_src, p_.of_dst, edges_.t_raw());
  }

  // out = src[source] + dst[destination], per edge and head. A table that is null counts as 0; if both are
  // null, `out` is not changed.
  void add_ends(const Group& group, const void* src, const void* dst, A* out) const {
    const int heads = call_.size.heads;
    if (src)
      gather<EdgeMajor>(static_cast<const A*>(src), block_.index, block_.n, block_.limit, heads, heads, out,
                        0);
    if (!dst) return;
    const A* rows = static_cast<const A*>(dst) + group.row * heads;
    group.each_edge([&](int r, int e) {
      for (int h = 0; h < heads; ++h)
        out[e * heads + h] = (src ? out[e * heads + h] : 0) + rows[r * heads + h];
    });
  }

  // Computes alpha, f p - delta, t - tau and y of a block from the products that measure() saved. sums: the
  // row's.
  void again(const Group& group, const A* sums) {
    start(group);
    gather<EdgeMajor, 4>(call_.numbers(), block_.eid, block_.n, 0, edges_.heads(), 4 * edges_.heads(),
                         edges_.raw(), edges_.size());
    edges_.weigh(block_, group);
    edges_.centre(block_, group, sums);
  }

  // Computes the factors of the edges, saves those that the pass over the sources reads, and computes the
  // sums of feature rows. If the scratch has four scalars per edge and head (second_numbers), by_u() is
  // saved, too, though nothing reads it, because scatter() writes all scalars of an entry.
  void finish(const Group& group, const A* sums) {
    edges_.settle(block_, group, sums);
    if (call_.stride == 3)
      scatter<EdgeMajor, 3>(edges_.by_p(), edges_.size(), block_.eid, block_.n, edges_.heads(),
                            call_.numbers());
    else
      scatter<EdgeMajor, 4>(edges_.by_p(), edges_.size(), block_.eid, block_.n, edges_.heads(),
                            call_.numbers());
    add_rows(group);
    if (additive()) edges_.sum_raw(group, dst_sums_);
    if (!attn_) return;
    for (int r = 0; r < group.rows; ++r)
      for (int64_t d = 0; d < call_.row; ++d) attn_[d] += attn_sums_[r * call_.row + d];
  }

  // Computes the sums of gathered feature rows, weighted by the factors, and the gradient of the edges'
  // features.
  void add_rows(const Group& group) {
    const DestinationRows<T> rows = this->rows(group, false);
    const Factors<A> by{edges_.by_p(), edges_.by_raw(), edges_.by_t_raw(), edges_.by_u()};
    T* const feat = static_cast<T*>(p_.grad_feat);
    if (call_.pairs()) return sums_of_pairs(rows, by, {dst_sums_, grad_sums_, attn_sums_, feat});
    const auto sum = [&](bool keys, bool values) {
      const bool key = keys && p_.edge.feat_in_key, value = values && p_.edge.feat_in_value;
      sums_of_dot(rows, by, key, value,
                  {keys ? dst_sums_.rows() : nullptr, values ? grad_sums_.rows() : nullptr, nullptr,
                   key || value ? feat : nullptr});
    };
    // GAT has no keys. One loop computes both sums if keys and values have the same length.
    if (additive()) return sum(false, true);
    if (call_.size.dim == call_.size.value_dim) return sum(true, true);
    sum(true, false), sum(false, true);
  }

  EdgeBlock<Acc<T>, EdgeMajor> block_;
  SecondEdges<Acc<T>> edges_;
  Gathering<T> from_;
  OwnRows<T> query_, of_query_, grad_;
  Destinations<A> to_{};
  Sums<A> dst_sums_, grad_sums_, attn_sums_;
  Buffer<A> row_sums_;  // [kSecondSums, H] of a longer row
};

// Calls f(pass, item) for the chunks of split rows, in parallel. pass: a Destination that make() returns.
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

// Processes split rows: each step is done for all chunks before the next begins. attn: as in Destination.
template <class T>
void run_pieces(const Call<T>& call, const Parallel& parallel, Acc<T>* attn) {
  using A = Acc<T>;
  const SecondParams& p = call.p;
  const int heads = call.size.heads, row = kSecondSums * heads;
  A* const sums = static_cast<A*>(p.partial_sums);
  const auto at = [&](const Item& item) { return sums + int64_t(item.slot) * row; };
  // Replaces the sums [first, last) of each chunk by those of its row.
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
    const SecondEdges<Acc<T>> edges(p, 1);
    for (int64_t slot = 0; slot < p.csr.num_slots; ++slot) edges.divide(1, sums + slot * row);
  }
  each_piece(p.csr, parallel, make, [&](auto& pass, const Item& item) { pass.add_moments(item, at(item)); });
  merge(3, 4);
  // Each chunk has its own part of the gradient of attn. The parts are then added up in the order of the
  // slots, so that the result does not depend on threads.
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

}  // namespace

template <class T>
void second_destinations(const Call<T>& call, const Parallel& parallel) {
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

template void second_destinations(const Call<float>&, const Parallel&);
template void second_destinations(const Call<double>&, const Parallel&);
template void second_destinations(const Call<Half>&, const Parallel&);
template void second_destinations(const Call<BFloat16>&, const Parallel&);

}  // namespace dfgnn::cpu::DFGNN_ISA
