// Forward of attention: one pass over the work items of the destinations. Short rows are processed in groups
// (group_forward.h), other rows and chunks of split rows alone: for a block of edges at a time, the scores of
// all heads, an online softmax, and the weighted sum of the gathered values are computed. Then the chunks of
// split rows are merged.
//
// Steps of a row alone (Worker), per block:
//   1. Compute raw scores of all heads, of which the options on edges make z.
//   2. Compute scores, softmax weights and the row's softmax so far, head by head.
//   3. Add up the values, weighted so. If a maximum has risen, earlier sums are first scaled to the new one.
// and at the end of the row:
//   4. Write the sums, divided by those of the exponentials; or the partial result of a chunk.
//
// z, the score s and the options on edges: core/params.h. L is LeakyReLU.
// Words, vectors, pack and unpack: rows.h. Names from other files:
// group_forward.h:
//   Outputs o            the results of ForwardParams, with their types
//   origin_of            what is subtracted from scores: their maximum, or 0 if it is -inf
//   GroupWorker          does for groups what Worker, below, does for items
// groups.h, schedule.h, engine.h:
//   Grouping             which items are grouped: takes(item); walk: calls one function for groups, another
//                        for other items
//   forward_degree       the mean number of edges per work item below which rows are grouped
//   parallel_items       calls a function on ranges of items of equal cost in parallel; parallel_range does
//                        so on any range
// edges.h:
//   EdgeBlock block_     a block's edges. load(begin, end, whether positions are wanted); n: their number;
//                        index: the gathered rows; eid: positions in the user's order; factor: edge weight
//                        times dropout, null for 1
//   block_.transform(z)  turns raw scores into z. block_.score(L(z), i) returns scores: it adds the bias if
//                        this comes after the LeakyReLU, and gives -inf where EdgeOptions::mask is 0
//   for_blocks(item, f)  calls f(begin, end, whether it is the first) for the item's blocks
//   for_edges<A>         (h, n, f): calls f(i, lanes) for vectors of n edges of head h; lanes beyond edge n
//                        are not set in the mask `lanes`
//   gather, scatter      copy rows of a table [E, H] to an array of a block, and back
// gathered.h:
//   Gathered values_     the rows x of a block's neighbours, to which edge features are added if there are
//                        any (Feat::gathered). After load, aggregate(block, w, w2, a, a2, first): a += sum
//                        of w x, a2 += sum of w2 x
// scores.h, group_scores.h:
//   Score                fix(row): sets the row; raw(block, z): raw scores; activate(z): L(z).
//                        kGathersValues: raw reads the values' rows
// merge.h:
//   PartialSum           a packed sum of partial results: add(row, factor) adds one, packed() is the sum
#include "group_forward.h"
#include "kernels.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

// The online softmax of a row or work item, per head: the largest score so far; sum of exp(score - largest);
// positive, the part of this sum that edges with z > 0 have; and rescale, by which sums of earlier blocks are
// multiplied after a block with a larger score.
template <class A>
struct Softmax {
  int heads;
  Buffer<A> largest, sum, positive, rescale;

  explicit Softmax(int heads) : heads(heads), largest(heads), sum(heads), positive(heads), rescale(heads) {}

  void reset() {
    for (int h = 0; h < heads; ++h) largest[h] = -kInfinity<A>, sum[h] = positive[h] = 0;
  }

  // Adds a block: from z of its edges writes scores to s, exponentials times the edges' weights to w, and, if
  // `part` is wanted, to w2 the same but 0 where z <= 0. Returns whether earlier sums must be multiplied by
  // `rescale`.
  bool add(const EdgeBlock<A>& block, const Activation<A>& activation, bool part, const A* z, A* s, A* w,
           A* w2) {
    bool risen = false;
    for (int h = 0; h < heads; ++h) risen |= add_head(h, block, activation, part, z, s, w, w2);
    return risen;
  }

 private:
  using V = Vec<A, kLanes<A>>;

  bool add_head(int h, const EdgeBlock<A>& block, const Activation<A>& activation, bool part, const A* z,
                A* s, A* w, A* w2) {
    V top = splat<A, kLanes<A>>(-kInfinity<A>);
    for_edges<A>(h, block.n, [&](int i, auto inside) {
      const V activated = activation.activate(load_vector<V>(z + i));
      const V score = inside ? block.score(activated, i) : V{} - kInfinity<A>;
      store_vector(s + i, score);
      top = score > top ? score : top;
    });
    const A before = largest[h], now = larger(before, max<A, kLanes<A>>(top));
    const A origin = origin_of<A>(now);
    V total{}, above{};
    for_edges<A>(h, block.n, [&](int i, auto) {
      const V p = exp<A, kLanes<A>>(load_vector<V>(s + i) - origin);
      const V weight = block.factor ? p * load_vector<V>(block.factor + i) : p;
      total += p;
      store_vector(w + i, weight);
      if (part) {
        const auto leaks = load_vector<V>(z + i) <= 0;  // false for nan, which thus enters both sums
        above += leaks ? V{} : p;
        store_vector(w2 + i, leaks ? V{} : weight);
      }
    });
    const bool risen = now != before;
    const A factor = risen ? exp1(before - origin) : A(1);
    rescale[h] = factor;
    sum[h] = sum[h] * factor + cpu::DFGNN_ISA::sum<A, kLanes<A>>(total);
    positive[h] = positive[h] * factor + cpu::DFGNN_ISA::sum<A, kLanes<A>>(above);
    largest[h] = now;
    return risen;
  }
};

// Writes the results of a whole row.
template <class T>
class RowWriter {
 public:
  using A = Acc<T>;
  RowWriter(const Outputs<T>& o, const RowShape& shape)
      : o_(o), shape_(shape), factor_(shape.heads), bias_(o.bias ? shape.packed_size() : 0) {
    if (o.bias) pack(shape, o.bias, bias_);
  }

  // a: the packed sum of (edge weight times dropout) exp(score - largest) v; a2: that over edges with z > 0.
  // Their heads are divided by s.sum; where this is 0 they are replaced by 0.
  void operator()(int64_t row, const Softmax<A>& s, A* a, A* a2) {
    const int heads = shape_.heads;
    for (int h = 0; h < heads; ++h) {
      const bool empty = s.sum[h] == 0;  // no edges, or all scores are -inf; false if one is nan
      factor_[h] = empty ? A(0) : A(1) / s.sum[h];
      A* stats = o_.stats + (row * heads + h) * 2;
      stats[0] = empty ? kInfinity<A> : s.largest[h], stats[1] = empty ? A(0) : log(s.sum[h]);
      if (o_.positive_mass) o_.positive_mass[row * heads + h] = s.positive[h] * factor_[h];
      // The factor 0 alone would not do: 0 times a value that is not finite is nan.
      for (int d = h * shape_.packed; empty && d < (h + 1) * shape_.packed; ++d) {
        a[d] = 0;
        if (o_.positive) a2[d] = 0;
      }
    }
    unpack(shape_, a, factor_, o_.out + row * shape_.size(), o_.bias ? static_cast<A*>(bias_) : nullptr);
    if (o_.positive) unpack(shape_, a2, factor_, o_.positive + row * shape_.size());
  }

 private:
  const Outputs<T>& o_;
  const RowShape& shape_;
  Buffer<A> factor_, bias_;
};

// Processes work items that are not grouped, such as long rows and chunks of split rows.
template <class T, class Score>
class Worker {
 public:
  using A = Acc<T>;

  template <class MakeScore>
  Worker(const ForwardParams& p, const Outputs<T>& o, const MakeScore& make_score)
      : o_(o),
        values_(p.value, matrix_shape<T>(p.shape.heads, p.shape.value_dim, !p.edge.feat),
                p.edge.feat_in_value ? p.edge.feat : nullptr, Gathered<T>::Feat::gathered),
        score_(make_score()),
        block_(p.csr, p.edge, p.shape, p.dtype),
        softmax_(p.shape.heads),
        write_(o, values_.shape()),
        edges_(int64_t(4) * p.shape.heads * kBlock),
        a_(values_.shape().packed_size()),
        a2_(values_.shape().packed_size()) {}

  void operator()(const Item& item) {
    softmax_.reset();
    score_.fix(item.row);
    if (item.begin == item.end) {  // otherwise the first block overwrites them
      a_.clear(values_.shape().packed_size());
      a2_.clear(values_.shape().packed_size());
    }
    for_blocks(item, [&](int64_t begin, int64_t end, bool first) { block(begin, end, first); });
    // ---- 4. The results.
    if (item.slot < 0)
      write_(item.row, softmax_, a_, a2_);
    else
      keep_partial(item.slot);
  }

 private:
  void block(int64_t begin, int64_t end, bool first) {
    const int heads = values_.shape().heads, n = int(end - begin);
    A *z = edges_, *s = z + heads * kBlock, *w = s + heads * kBlock, *w2 = w + heads * kBlock;
    // ---- 1. Raw scores, and the options on edges.
    block_.load(begin, end, o_.attention != nullptr);
    score_.raw(block_, z);
    block_.transform(z);
    // ---- 2. Softmax weights.
    const bool rescale = softmax_.add(block_, score_, o_.positive, z, s, w, w2);
    // ---- 3. Weighted sums of the values.
    if (rescale && !first) {
      scale_heads<A>(values_.shape(), softmax_.rescale, a_);
      if (o_.positive) scale_heads<A>(values_.shape(), softmax_.rescale, a2_);
    }
    values_.load(block_, !Score::kGathersValues);  // else the score has gathered the same rows
    values_.aggregate(block_, w, o_.positive ? w2 : nullptr, a_, a2_, first);
    // The row's sum is not known yet: `attention` gets the scores, which finish_attention replaces.
    if (o_.attention) scatter<HeadMajor>(s, 0, block_.eid, n, heads, o_.attention);
  }

  // Writes the partial result of a chunk of a split row to its slot.
  void keep_partial(int64_t slot) {
    const RowShape& shape = values_.shape();
    unpack(shape, a_, nullptr, o_.partial_out + slot * shape.size());
    if (o_.positive) unpack(shape, a2_, nullptr, o_.partial_positive + slot * shape.size());
    for (int h = 0; h < shape.heads; ++h) {
      A* stats = o_.partial_stats + (slot * shape.heads + h) * 3;
      stats[0] = softmax_.largest[h], stats[1] = softmax_.sum[h], stats[2] = softmax_.positive[h];
    }
  }

  const Outputs<T>& o_;
  Gathered<T> values_;
  Score score_;
  EdgeBlock<Acc<T>> block_;
  Softmax<A> softmax_;
  RowWriter<T> write_;
  Buffer<A> edges_;   // four arrays: z, s, w and w2 of block()
  Buffer<A> a_, a2_;  // packed sums weighted by w and w2
};

// Merges the chunks of the split rows [first, last). A chunk's sums are relative to its own largest score:
// they are scaled to that of the row, and added up.
template <class T>
void merge_split_rows(const ForwardParams& p, const Outputs<T>& o, int64_t first, int64_t last) {
  using A = Acc<T>;
  const int heads = p.shape.heads;
  const RowShape shape = row_shape<A>(heads, p.shape.value_dim);
  Softmax<A> total(heads);
  RowWriter<T> write(o, shape);
  PartialSum<A> sum(shape), sum2(shape);
  for (int64_t k = first; k < last; ++k) {
    const Split& split = p.csr.splits[k];
    total.reset(), sum.reset(), sum2.reset();
    for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot)
      for (int h = 0; h < heads; ++h)
        total.largest[h] = larger(total.largest[h], o.partial_stats[(slot * heads + h) * 3]);
    for (int64_t slot = split.slot_begin; slot < split.slot_end; ++slot) {
      for (int h = 0; h < heads; ++h) {
        const A* stats = o.partial_stats + (slot * heads + h) * 3;
        const A factor = exp1(stats[0] - origin_of<A>(total.largest[h]));
        total.rescale[h] = factor;
        total.sum[h] += stats[1] * factor;
        total.positive[h] += stats[2] * factor;
      }
      sum.add(o.partial_out + slot * shape.size(), total.rescale);
      if (o.positive) sum2.add(o.partial_positive + slot * shape.size(), total.rescale);
    }
    write(split.row, total, sum.packed(), sum2.packed());
  }
}

// For the work items [first, last) that are not grouped: replaces the scores that Worker has left in the
// attention array by the attention.
template <class A>
void finish_attention(const ForwardParams& p, const Grouping& grouping, int64_t first, int64_t last) {
  using V = Vec<A, kLanes<A>>;
  const int heads = p.shape.heads;
  A* const attention = static_cast<A*>(p.attention);
  EdgeBlock<A> block(p.csr, p.edge, p.shape, p.dtype);
  Buffer<A> s(heads * kBlock);
  for (int64_t k = first; k < last; ++k) {
    const Item& item = p.csr.items[k];
    if (grouping.takes(item)) continue;
    for_blocks(item, [&](int64_t begin, int64_t end, bool) {
      block.load(begin, end, true);
      gather<HeadMajor>(attention, block.eid, block.n, 0, heads, heads, static_cast<A*>(s), 0);
      for (int h = 0; h < heads; ++h) {
        const A* stats = static_cast<const A*>(p.stats) + (int64_t(item.row) * heads + h) * 2;
        for_edges<A>(h, block.n, [&](int i, auto) {
          const V alpha = exp<A, kLanes<A>>((load_vector<V>(s + i) - stats[0]) - stats[1]);
          store_vector(s + i, block.factor ? alpha * load_vector<V>(block.factor + i) : alpha);
        });
      }
      scatter<HeadMajor, 1, A>(s, 0, block.eid, block.n, heads, attention);
    });
  }
}

// make_score() returns the object that computes scores of rows alone, make_group_score(most rows of a group)
// that for groups.
template <class T, class MakeScore, class MakeGroupScore>
void run(const ForwardParams& p, const Parallel& parallel, const MakeScore& make_score,
         const MakeGroupScore& make_group_score) {
  const Outputs<T> o(p);
  const Grouping grouping = Grouping::of<Acc<T>>(p, p.csr, parallel.way, forward_degree(p.shape.heads));
  parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
    grouping.walk(
        p.csr, first, last,
        [&](auto each) {
          each(GroupWorker<T, decltype(make_group_score(1))>(p, o, grouping, make_group_score));
        },
        [&](auto each) { each(Worker<T, decltype(make_score())>(p, o, make_score)); });
  });
  parallel_range(parallel, p.csr.num_splits, 1,
                 [&](int64_t first, int64_t last) { merge_split_rows<T>(p, o, first, last); });
  if (o.attention)
    parallel_items(parallel, p.csr,
                   [&](int64_t first, int64_t last) { finish_attention<Acc<T>>(p, grouping, first, last); });
}

template <class T>
void forward_as(const ForwardParams& p, const Parallel& parallel) {
  using A = Acc<T>;
  const int heads = p.shape.heads, dim = p.shape.dim;
  const RowShape shape = matrix_shape<T>(heads, dim, !p.edge.feat);
  const A slope = A(p.negative_slope), scale = A(p.scale);
  const void* feat = p.edge.feat_in_key ? p.edge.feat : nullptr;
  const auto side = Gathered<T>::Feat::gathered;
  const A *src = static_cast<const A*>(p.alpha_src), *dst = static_cast<const A*>(p.alpha_dst);
  switch (p.score) {
    case Score::additive:
      return run<T>(
          p, parallel, [&] { return AdditiveScore<T>(src, heads, dst, heads, slope); },
          [&](int) { return AdditiveGroupScore<T>(src, heads, dst, heads, slope); });
    case Score::dot:
      return run<T>(
          p, parallel, [&] { return DotScore<T>(p.key, p.query, shape, feat, side, scale, slope); },
          [&](int rows) { return DotGroupScore<T>(p.key, p.query, heads, dim, scale, slope, rows); });
    case Score::additive_v2:
      return run<T>(
          p, parallel, [&] { return AdditiveV2Score<T>(p.value, p.query, shape, feat, p.attn, slope); },
          [&](int rows) {
            return AdditiveV2GroupScore<T>(p.value, p.query, heads, dim, p.attn, slope, rows);
          });
  }
}

}  // namespace

void forward(const ForwardParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) { forward_as<decltype(type)>(p, parallel); });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
