// Second derivatives of attention on the CPU: the pass over the sources, as second_order.cpp describes it.
// Letters and scalars per edge: second_edges.h; feature rows: second_rows.h; groups and buffers:
// second_call.h.
#include "second_call.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

template <class T>
class Source {
 public:
  using A = Acc<T>;

  explicit Source(const Call<T>& call)
      : groups(larger(call.row, call.value_row)),
        call_(call),
        p_(call.p),
        block_(p_.reverse, kNoOptions, p_.shape, p_.dtype),
        edges_(p_, groups.most_rows()),
        grad_(call.table(p_.grad_out, call.value_row)),
        query_(call.table(additive() ? nullptr : p_.query, call.row)),
        of_query_(call.table(additive() ? nullptr : p_.of_dst, call.row)),
        feat_(call.table(p_.edge.feat_in_key ? p_.edge.feat : nullptr, call.row)),
        fixed_(call.pairs() ? p_.value : nullptr, call.pairs() ? call.row : 0, groups.most_rows()),
        value_sums_(call.value_row, groups.most_rows()),
        key_sums_(call.pairs() ? 0
                  : additive() ? call.size.heads
                               : call.row,
                  groups.most_rows()) {}

  // Processes a group of whole rows, whose edges fit together in a block.
  void operator()(const Group& group) {
    add(group);
    value_sums_.template write<T>(group, p_.grad_value);
    if (additive())
      key_sums_.template write<A>(group, p_.grad_src);
    else
      key_sums_.template write<T>(group, p_.grad_src);
  }
  // Processes a row that does not fit in a group, or a chunk of a split row.
  void operator()(const Item& item) {
    groups.each_block(item, [&](const Group& group, bool first) {
      add(group);
      value_sums_.add(first), key_sums_.add(first);
    });
    value_sums_.template write<T>(item, p_.grad_value, p_.partial_value);
    if (additive())
      key_sums_.template write<A>(item, p_.grad_src, p_.partial_key);
    else
      key_sums_.template write<T>(item, p_.grad_src, p_.partial_key);
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

  // Reads the factors A, R and M that the pass over the destinations has saved for the group's edges, and
  // writes the sums of the group's rows to value_sums_ and key_sums_.
  void add(const Group& group) {
    block_.load(group.begin, group.begin + group.n, true);
    gather<EdgeMajor, 3>(call_.numbers(), block_.eids_ahead(), block_.n, block_.eids_limit(), edges_.heads(),
                         call_.stride * edges_.heads(), edges_.by_p(), edges_.size());
    const HeadSizes& size = call_.size;
    const SourceRows<T> rows{call_.width, call_.feat(), group, edges(),         grad_,
                             query_,      of_query_,    feat_, call_.vectors(), size.heads};
    const Factors<A> by{edges_.by_p(), edges_.by_raw(), edges_.by_t_raw(), nullptr};
    if (call_.pairs()) return sums_of_pairs_back<T>(rows, size.dim, fixed_.of(group), by, value_sums_);
    // One loop computes both sums if their rows have the same length.
    const bool both = !additive() && size.dim == size.value_dim;
    sums_of_destinations<T>(rows, size.value_dim, by, value_sums_, both ? key_sums_.rows() : nullptr);
    if (!both && !additive()) sums_of_destinations<T>(rows, size.dim, by, nullptr, key_sums_);
    if (additive()) edges_.sum_raw(group, key_sums_);
  }

  const Call<T>& call_;
  const SecondParams& p_;
  EdgeBlock<Acc<T>, EdgeMajor> block_;
  SecondEdges<Acc<T>> edges_;
  Table<T> grad_, query_, of_query_, feat_;
  OwnRows<T> fixed_;
  Sums<A> value_sums_, key_sums_;
};

}  // namespace

template <class T>
void second_sources(const Call<T>& call, const Parallel& parallel) {
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

template void second_sources(const Call<float>&, const Parallel&);
template void second_sources(const Call<double>&, const Parallel&);
template void second_sources(const Call<Half>&, const Parallel&);
template void second_sources(const Call<BFloat16>&, const Parallel&);

}  // namespace dfgnn::cpu::DFGNN_ISA
