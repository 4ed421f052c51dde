// Backward of attention. First node_stats() computes delta of each destination from its own rows. Then the
// additive score takes one pass over edges, over the sources, which gathers grad_out. dot and additive_v2
// take two: over the destinations, which gathers keys and values, and over the sources, which gathers queries
// and grad_out.
//
// Steps of a row alone (FeatureRows), per block:
//   1. load: computes z of the edges and t = g . (v + e).
//   2. solve: computes the weights f alpha, and grad_raw (d raw), the gradient of the raw score. In the pass
//   over
//      the destinations these are two steps (except with BackwardParams::part_of_rows): guess, for all blocks
//      of a row, gives the residual of delta, which is what delta lacks because `out` is rounded; settle uses
//      it.
//   3. sum: adds up the gathered rows, weighted by f alpha and grad_raw, and writes the gradients of the
//   edges'
//      options and features.
// and at the end of the row:
//   4. write: writes the row's sums, or the partial result of a chunk.
//
// Words, vectors, pack and unpack: rows.h. Formulas, delta: core/params.h. Names from other files:
// gradients.h:
//   Arrays a                the arrays of BackwardParams, with their types; edges: scratch in which the pass
//                           over destinations saves f alpha and grad_raw, or null; whole_rows: whether rows
//                           have all their edges; per_edge(): whether arrays of edges besides the options are
//                           used
//   EdgeGradients edges_    a block's arrays: t() is g . (v + e), weight() is f alpha, grad_raw(). start
//   computes
//                           z; stats_of_row, stats_of_edges load max, log_sum and delta; solve: weight() and
//                           grad_raw()
//   edges_.guess            the first part of solve: writes ds to grad_raw(), whose sum over a row
//   (add_grad_raw) is
//                           the residual of delta, `rest`
//   edges_.settle           the second part of solve, after set_rest. correct adds `rest` to delta in
//                           node_stats
//   edges_.each_guess       calls f for the arrays that settle reads; SaveArrays, RestoreArrays,
//                           CountArrays: such f
//   edges_.keep, find       save weight() and grad_raw() in Arrays::edges, and read them
//   edges_.scatter_options  writes the gradients of the options on edges
// long_rows.h:
//   Pieces                  chunks of split rows, of some rows at a time. walk(first run, per row, second
//                           run) calls functions with the number k of a chunk. rest(k), kept(k): where its
//                           residual and its saved scalars are
//   num_blocks(item)        the number of blocks of a work item
// scores.h, gathered.h:
//   Score                   fix(row); load, raw(block, z); accumulate: adds to the gradient of the fixed row,
//                           which finish(sum) completes; scatter_feat: writes the gradient of edge features
//   Gathered values_        the neighbours' rows, with edge features added to them or to the fixed row
//                           (Feat). dots computes t, aggregate a weighted sum
// edges.h, groups.h, schedule.h:
//   EdgeBlock block_        a block's edges: load(begin, end, whether positions are wanted); locate does the
//                           same without reading options
//   Grouping                which work items are grouped; walk calls one function for groups, another one for
//                           other work items
//   Chunks                  divides work items into ranges of equal cost: boundary(k) is the first of range k
//   parallel_items          calls a function on ranges of work items in parallel; parallel_range: on any
//                           range
// merge.h, backward_additive.h:
//   write_sum               writes an item's packed sum to its row or its slot; merge_splits adds up the
//                           slots of split rows
//   node_stats              computes delta and the other statistics of the destinations
#include "backward_additive.h"
#include "group_backward.h"
#include "kernels.h"
#include "long_rows.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// Upper bound of attention_parts(), the number of partial sums of grad_attn.
constexpr int64_t kMostParts = 1024;

// One pass of backward for dot or additive_v2, for rows that are processed alone. Over the destinations
// (over_rows) it gathers keys and values, sums up grad_query and writes the edges' gradients. Over the
// sources it gathers queries and grad_out, and sums up grad_key and grad_value. With additive_v2 the value is
// also the key (kKeyIsValue).
template <class T, class Score>
class FeatureRows {
 public:
  using A = Acc<T>;
  using Feat = typename Gathered<T>::Feat;
  static constexpr bool kKeyIsValue = Score::kGathersValues;

  FeatureRows(const BackwardParams& p, const Arrays<T>& a, Score& score, bool over_rows)
      : p_(p),
        a_(a),
        over_rows_(over_rows),
        exact_(over_rows && a.whole_rows),
        given_(!over_rows && a.edges),
        heads_(p.shape.heads),
        score_(score),
        values_(over_rows ? a.value : a.grad_out, matrix_shape<T>(heads_, p.shape.value_dim, !p.edge.feat),
                p.edge.feat_in_value ? p.edge.feat : nullptr, over_rows ? Feat::gathered : Feat::fixed),
        fixed_(over_rows ? a.grad_out : a.value),
        block_(over_rows ? p.csr : p.reverse, given_ ? kNoOptions : p.edge, p.shape, p.dtype),
        edges_(a, heads_, over_rows),
        row_(values_.shape().packed_size()),
        score_sum_(score.shape().packed_size()),
        value_sum_(values_.shape().packed_size()),
        attn_sum_(kKeyIsValue ? score.shape().packed_size() : 0),
        rest_(heads_),
        kept_(0) {
    if (kKeyIsValue) attn_sum_.clear(score.shape().packed_size());
  }

  // Processes an item that is a whole row. Also one that is a chunk of a split row, but not if exact_ (the
  // residual of delta is subtracted, which needs all chunks of the row first): run_pieces() processes those.
  void operator()(const Item& item) {
    if (exact_ && item.slot >= 0) return;
    start(item);
    if (item.begin == item.end) {
      score_sum_.clear(score_.shape().packed_size());
      value_sum_.clear(values_.shape().packed_size());
    }
    if (exact_) {
      A* const kept = num_blocks(item) > 1 ? room(num_blocks(item) - 1) : nullptr;
      guess_blocks(item, rest_, kept);
      EdgeGradients<Acc<T>>::correct(a_, heads_, item.row, rest_);
      settle_blocks(item, rest_, kept);
    } else {
      for_blocks(item, [&](int64_t begin, int64_t end, bool first) {
        solve(begin, end);
        sum(first);
      });
    }
    write(item);
  }

  // The two runs over a chunk of a split row. rest: [H], the residual of delta, of which guess() writes what
  // the chunk's edges contribute; settle() reads that of the row. kept: where numbers() scalars of each of
  // the chunk's blocks are saved in between, or null.
  void guess(const Item& item, A* rest, A* kept) {
    start(item);
    guess_blocks(item, rest, kept);
  }
  void settle(const Item& item, const A* rest, const A* kept) {
    start(item);
    settle_blocks(item, rest, kept);
    write(item);
  }

  // Adds to attn [H, D] what the work items processed so far contribute to grad_attn, and forgets it.
  void add_attn(A* attn) {
    Buffer<A> sum(score_.shape().size());
    unpack(score_.shape(), attn_sum_, nullptr, static_cast<A*>(sum));
    for (int64_t d = 0; d < score_.shape().size(); ++d) attn[d] += sum[d];
    attn_sum_.clear(score_.shape().packed_size());
  }

  // Returns how many scalars are saved of a block between guess and settle.
  int64_t numbers() {
    CountArrays arrays;
    edges_.each_guess(score_, block_, arrays);
    return arrays.count * of_array();
  }

 private:
  void start(const Item& item) {
    score_.fix(item.row);
    pack(values_.shape(), fixed_ + item.row * values_.shape().size(), row_);
    if (over_rows_) edges_.stats_of_row(item);
  }

  // Step 4.
  void write(const Item& item) {
    score_.finish(score_sum_);
    if (over_rows_) {
      write_sum<T>(item, score_.shape(), score_sum_, p_.grad_query, p_.partial_query);
      return;
    }
    if (kKeyIsValue)
      for (int64_t d = 0; d < score_.shape().packed_size(); ++d) value_sum_[d] += score_sum_[d];
    else
      write_sum<T>(item, score_.shape(), score_sum_, p_.grad_key, p_.partial_key);
    write_sum<T>(item, values_.shape(), value_sum_, p_.grad_value, p_.partial_value);
  }

  // Step 1: loads a block, and computes z and t of its edges.
  [[gnu::noinline]] void load(int64_t begin, int64_t end) {
    block_.load(begin, end, a_.per_edge() || a_.edges);
    // Over the destinations dot's step 3 sums the keys: they are read last, so that they are in cache then.
    const bool scores_first = kKeyIsValue || !over_rows_;
    if (scores_first) edges_.start(score_, block_);
    values_.load(block_, !(kKeyIsValue && over_rows_));
    values_.dots(block_, row_, edges_.t());
    if (!scores_first) edges_.start(score_, block_);
  }

  // Steps 1 and 2; or, if the pass over the destinations has saved f alpha and grad_raw, reads these.
  void solve(int64_t begin, int64_t end) {
    if (given_) {
      block_.load(begin, end, true);
      edges_.find(block_);
      score_.load(block_);
      values_.load(block_, true);
      return;
    }
    load(begin, end);
    if (!over_rows_) edges_.stats_of_edges(block_);
    edges_.solve(score_, block_);
  }

  // The first run over a row or chunk. The scalars of a whole row's last block are not saved, because the
  // second run follows at once and finds them in edges_.
  [[gnu::noinline]] void guess_blocks(const Item& item, A* rest, A* kept) {
    for (int h = 0; h < heads_; ++h) rest[h] = 0;
    for_blocks(item, [&](int64_t begin, int64_t end, bool) {
      load(begin, end);
      edges_.guess(score_, block_);
      edges_.add_grad_raw(block_, rest);
      if (!kept || (item.slot < 0 && end == item.end)) return;
      edges_.each_guess(score_, block_, SaveArrays<A>{kept, of_array()});
      kept += numbers();
    });
  }

  // The second run. It goes from the last block to the first, because the feature rows that were read last
  // are in cache.
  void settle_blocks(const Item& item, const A* rest, const A* kept) {
    edges_.set_rest(item, rest);
    const int64_t last = num_blocks(item) - 1;
    const bool is_near = (item.end - item.begin) * score_.shape().size() * int64_t(sizeof(T)) <= kNear / 2;
    for (int64_t k = last; k >= 0; --k) {
      const int64_t begin = item.begin + k * kBlock, end = k == last ? item.end : begin + kBlock;
      if (kept && !(item.slot < 0 && k == last)) {
        block_.locate(begin, end, a_.per_edge() || a_.edges);
        if (is_near) block_.limit = 0;  // do not prefetch
        edges_.each_guess(score_, block_, RestoreArrays<A>{kept + k * numbers(), of_array()});
        score_.load(block_);
      } else if (item.slot >= 0) {
        load(begin, end);
        edges_.guess(score_, block_);
      }
      edges_.settle(score_, block_);
      sum(k == last);
    }
  }

  int64_t of_array() const { return int64_t(heads_) * kBlock; }

  // Returns space for the saved scalars of `blocks` blocks.
  A* room(int64_t blocks) {
    if (blocks > most_blocks_) {
      most_blocks_ = 2 * blocks;
      kept_.replace(most_blocks_ * numbers());
    }
    return kept_;
  }

  // Step 3: adds the block's edges to the sums, and over the destinations writes the edges' own gradients.
  void sum(bool first) {
    A* attn_sum = p_.grad_attn && over_rows_ ? static_cast<A*>(attn_sum_) : nullptr;
    score_.accumulate(block_, edges_.grad_raw(), score_sum_, attn_sum, first);
    if (!over_rows_) {
      values_.aggregate(block_, edges_.weight(), nullptr, value_sum_, nullptr, first);
    } else {
      if (a_.edges) edges_.keep(block_);
      edges_.scatter_options(block_);
      if (a_.grad_feat)
        score_.scatter_feat(block_, p_.edge.feat_in_key ? edges_.grad_raw() : nullptr,
                            p_.edge.feat_in_value ? edges_.weight() : nullptr, row_, values_.shape(),
                            a_.grad_feat);
    }
  }

  const BackwardParams& p_;
  const Arrays<T>& a_;
  bool over_rows_;
  // exact_: whether the residual of delta is subtracted, so that the gradients of a row's scores add up to 0.
  bool exact_;
  bool given_;  // whether the pass over the destinations has saved f alpha and grad_raw
  int heads_;
  Score& score_;
  Gathered<T> values_;
  const T* fixed_;
  EdgeBlock<Acc<T>> block_;
  EdgeGradients<Acc<T>> edges_;
  Buffer<A> row_;                               // packed: the item's row of fixed_
  Buffer<A> score_sum_, value_sum_, attn_sum_;  // packed sums over edges: of the item, the last of all items
  Buffer<A> rest_, kept_;                       // residual and saved scalars of a row that is not split
  int64_t most_blocks_ = 0;                     // the number of blocks that kept_ has space for
};

// The pass over the destinations for the chunks of split rows, in two runs: see long_rows.h.
template <class T, class MakeScore>
void run_pieces(const BackwardParams& p, const Arrays<T>& a, const Parallel& parallel,
                const MakeScore& make_score) {
  using A = Acc<T>;
  if (p.csr.num_splits == 0) return;
  const auto with_pass = [&](const auto& f) {
    auto score = make_score(true);
    FeatureRows<T, decltype(score)> pass(p, a, score, true);
    f(pass);
  };
  int64_t numbers = 0;
  with_pass([&](auto& pass) { numbers = pass.numbers(); });
  const Shape& s = p.shape;
  const int64_t features = s.heads * (s.num_src * (s.dim + s.value_dim) + s.num_dst * s.dim);
  Pieces<A> pieces(p.csr, s.heads, numbers, kPiecesPerThread * parallel.num_threads,
                   features > kMostKept ? features : kMostKept);
  const int64_t size = p.grad_attn ? int64_t(s.heads) * s.dim : 0;
  Buffer<A> attn(p.csr.num_slots * size);
  attn.clear(p.csr.num_slots * size);
  pieces.walk(
      parallel,
      [&](int64_t first, int64_t last) {
        with_pass([&](auto& pass) {
          for (int64_t k = first; k < last; ++k) pass.guess(pieces.item(k), pieces.rest(k), pieces.kept(k));
        });
      },
      [&](int64_t row, const A* rest) { EdgeGradients<Acc<T>>::correct(a, s.heads, row, rest); },
      [&](int64_t first, int64_t last) {
        with_pass([&](auto& pass) {
          for (int64_t k = first; k < last; ++k) {
            const Item& item = pieces.item(k);
            pass.settle(item, pieces.rest(k), pieces.kept(k));
            if (size > 0) pass.add_attn(attn + item.slot * size);
          }
        });
      });
  A* const total = static_cast<A*>(p.grad_attn);
  for (int64_t slot = 0; slot < p.csr.num_slots; ++slot)
    for (int64_t d = 0; d < size; ++d) total[d] += attn[slot * size + d];
}

// Both passes of dot or additive_v2. over_rows: the pass over the destinations, else that over the sources.
// make_score(over_rows) returns the object that computes the scores of rows that are processed alone,
// make_group_score(over_rows, most rows of a group) that for groups.
template <class T, class MakeScore, class MakeGroupScore>
void run_feature_rows(const BackwardParams& p, const Arrays<T>& a, const Parallel& parallel,
                      const MakeScore& make_score, const MakeGroupScore& make_group_score) {
  using A = Acc<T>;
  const Shape& shape = p.shape;
  // Processes the work items [first, last) of a pass. attn: [H, D], to which their contribution to grad_attn
  // is added, or null.
  const auto run_items = [&](bool over_rows, int64_t first, int64_t last, A* attn) {
    const Csr& csr = over_rows ? p.csr : p.reverse;
    const Grouping grouping = Grouping::of<A>(p, csr, parallel.way, backward_degree(p.shape.heads));
    grouping.walk(
        csr, first, last,
        [&](auto each) {
          auto score = make_group_score(over_rows, grouping.most_rows());
          each(FeatureGroups<T, decltype(score)>(p, a, grouping, score, over_rows, attn));
        },
        [&](auto each) {
          auto score = make_score(over_rows);
          FeatureRows<T, decltype(score)> pass(p, a, score, over_rows);
          each(pass);
          if (attn) pass.add_attn(attn);
        });
  };
  if (p.grad_attn) {
    const Chunks parts(p.csr, kMostParts);
    const int64_t size = int64_t(shape.heads) * shape.dim;
    parallel_range(parallel, parts.count(), 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        A* attn = static_cast<A*>(p.grad_attn) + k * size;
        for (int64_t d = 0; d < size; ++d) attn[d] = 0;
        run_items(true, parts.boundary(k), parts.boundary(k + 1), attn);
      }
    });
  } else {
    parallel_items(parallel, p.csr,
                   [&](int64_t first, int64_t last) { run_items(true, first, last, nullptr); });
  }
  if (a.whole_rows) run_pieces(p, a, parallel, make_score);
  parallel_items(parallel, p.reverse,
                 [&](int64_t first, int64_t last) { run_items(false, first, last, nullptr); });
  merge_splits<T>(p.csr, parallel, shape.heads, shape.dim, p.partial_query, p.grad_query);
  if (p.grad_key) merge_splits<T>(p.reverse, parallel, shape.heads, shape.dim, p.partial_key, p.grad_key);
}

template <class T>
void backward_as(const BackwardParams& p, const Parallel& parallel, void* edges) {
  using A = Acc<T>;
  using Feat = typename Gathered<T>::Feat;
  const Arrays<T> a(p, edges);
  const int heads = p.shape.heads;
  const RowShape shape = matrix_shape<T>(heads, p.shape.dim, !p.edge.feat);
  const void* feat = p.edge.feat_in_key ? p.edge.feat : nullptr;
  const A slope = A(p.negative_slope);
  node_stats(p, a, parallel);
  switch (p.score) {
    case Score::additive: {
      const Grouping grouping = Grouping::of<A>(p, p.reverse, parallel.way, backward_degree(heads),
                                                !AdditiveSources<T>::per_edge(p, a));
      parallel_items(parallel, p.reverse, [&](int64_t first, int64_t last) {
        grouping.walk(
            p.reverse, first, last, [&](auto each) { each(AdditiveGroups<T>(p, a, grouping)); },
            [&](auto each) { each(AdditiveSources<T>(p, a)); });
      });
      merge_splits<A>(p.reverse, parallel, heads, 1, p.partial_alpha, p.grad_alpha_src);
      if (a.grad_raw)
        sum_rows(p.csr, parallel, heads, a.partial_sums, a.grad_alpha_dst,
                 [&](int64_t e) { return a.grad_raw[e]; });
      break;
    }
    case Score::dot:
      run_feature_rows<T>(
          p, a, parallel,
          [&](bool over_rows) {
            return DotScore<T>(over_rows ? p.key : p.query, over_rows ? p.query : p.key, shape, feat,
                               over_rows ? Feat::gathered : Feat::fixed, A(p.scale), slope);
          },
          [&](bool over_rows, int rows) {
            return DotGroupScore<T>(over_rows ? p.key : p.query, over_rows ? p.query : p.key, heads,
                                    p.shape.dim, A(p.scale), slope, rows);
          });
      break;
    case Score::additive_v2:
      run_feature_rows<T>(
          p, a, parallel,
          [&](bool over_rows) {
            return AdditiveV2Score<T>(over_rows ? p.value : p.query, over_rows ? p.query : p.value, shape,
                                      feat, p.attn, slope);
          },
          [&](bool over_rows, int rows) {
            return AdditiveV2GroupScore<T>(over_rows ? p.value : p.query, over_rows ? p.query : p.value,
                                           heads, p.shape.dim, p.attn, slope, rows);
          });
      break;
  }
  merge_splits<T>(p.reverse, parallel, heads, p.shape.value_dim, p.partial_value, p.grad_value);
}

}  // namespace

void backward(const BackwardParams& p, const Parallel& parallel, void* edges) {
  with_type(p.dtype, [&](auto type) { backward_as<decltype(type)>(p, parallel, edges); });
}

int64_t attention_parts(const Csr& csr) { return Chunks(csr, kMostParts).count(); }

}  // namespace dfgnn::cpu::DFGNN_ISA
