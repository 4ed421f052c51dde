// Scores of GATv2 with projected edge attributes, and the sums of which their derivatives consist
// (pair_scores and pair_sums of core/pair_scores.h, which defines u, v, x, W, m, s and sigma). Edges are
// processed in blocks, so that the projection W x of a block's attributes stays in cache.
#include "ahead.h"
#include "kernels.h"
#include "merge.h"

namespace dfgnn::cpu::DFGNN_ISA {

namespace {

constexpr int kMost = 64;           // the most edges of a block
constexpr int64_t kMostParts = 64;  // the most that pair_parts() returns

// Returns the lanes of the widest vectors, of at least 16 bytes, that divide a head; 1 if none does.
template <class A>
int lanes_of(int dim) {
  int width = kLanes<A>;
  while (dim % width && width * int(sizeof(A)) > 16) width /= 2;
  return dim % width ? 1 : width;
}

// Returns `size`, rounded up to a multiple of W.
template <int W>
int padded(int size) {
  return (size + W - 1) / W * W;
}

// load_flags returns W flags, which are bytes of 0 or 1, as integers; store_flags writes for each lane the
// flag x > 0. They use intrinsics, because gcc converts the lanes of vectors of bytes one by one, which takes
// longer than all other work.
template <class A, int W>
[[gnu::always_inline]] inline Vec<Bits<A>, W> load_flags(const uint8_t* p) {
  if constexpr (W == 1) {
    return *p;
  } else {
    using V = Vec<Bits<A>, W>;
#if defined(__AVX512F__)
    if constexpr (W == 16) return bit_cast<V>(_mm512_maskz_cvtepu8_epi32(kAll, load_vector<__m128i>(p)));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8 && sizeof(A) == 4)
      return bit_cast<V>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_vector<int64_t>(p))));
    if constexpr (W == 4 && sizeof(A) == 4)
      return bit_cast<V>(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load_vector<int32_t>(p))));
#endif
    return __builtin_convertvector(load_vector<Vec<uint8_t, W>>(p), V);
  }
}

template <class A, int W>
[[gnu::always_inline]] inline void store_flags(uint8_t* p, Vec<A, W> x) {
  if constexpr (W == 1) {
    *p = x > 0;
  } else {
    const auto flags = (x > 0) & 1;
#if defined(__AVX512F__)
    if constexpr (W == 16) return store_vector(p, _mm512_maskz_cvtepi32_epi8(kAll, bit_cast<__m512i>(flags)));
#endif
#if defined(__AVX2__)
    const auto narrow = [](__m128i low, __m128i high) {
      const __m128i words = _mm_packs_epi32(low, high);
      return _mm_packs_epi16(words, words);
    };
    if constexpr (W == 8 && sizeof(A) == 4) {
      const auto all = bit_cast<__m256i>(flags);
      return store_vector(
          p, _mm_cvtsi128_si64(narrow(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1))));
    }
    if constexpr (W == 4 && sizeof(A) == 4)
      return store_vector(p, _mm_cvtsi128_si32(narrow(bit_cast<__m128i>(flags), bit_cast<__m128i>(flags))));
#endif
    store_vector(p, __builtin_convertvector(flags, Vec<uint8_t, W>));
  }
}

// Computes a tile of the result c of multiply(), below: R rows and V vectors of columns. a, b and c begin at
// the tile's first row, column, and element.
template <class A, int W, int R, int V>
[[gnu::always_inline]] inline void multiply_tile(int inner, const A* a, const A* b, int cols, A* c) {
  using X = Vec<A, W>;
  X sums[R][V] = {};
  for (int k = 0; k < inner; ++k, b += cols) {
    X row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) row[v] = load_vector<X>(b + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const X factor = splat<A, W>(a[r * inner + k]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] += factor * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store_vector(c + r * cols + v * W, sums[r][v]);
}

// Computes R rows of c, in tiles.
template <class A, int W, int R>
void multiply_rows(int inner, const A* a, const A* b, int cols, A* c) {
  int at = 0;
  for (; at + 2 * W <= cols; at += 2 * W) multiply_tile<A, W, R, 2>(inner, a, b + at, cols, c + at);
  for (; at < cols; at += W) multiply_tile<A, W, R, 1>(inner, a, b + at, cols, c + at);
}

// Matrix product c = a b with a [rows, inner], b [inner, cols] and c [rows, cols]. W divides cols.
template <class A, int W>
void multiply(int rows, int inner, int cols, const A* a, const A* b, A* c) {
  const int size = rows / 4 * 4;
  for (int r = 0; r < size; r += 4, a += 4 * inner, c += int64_t(4) * cols)
    multiply_rows<A, W, 4>(inner, a, b, cols, c);
  for (int r = size; r < rows; ++r, a += inner, c += cols) multiply_rows<A, W, 1>(inner, a, b, cols, c);
}

// pair_scores. A block is kMost consecutive edges, whichever rows they belong to.
template <class A, int W>
class Scores {
  using V = Vec<A, W>;

 public:
  explicit Scores(const PairScoreParams& p)
      : p_(p),
        size_(p.heads * p.dim),
        zeros_(size_),
        attn_(size_),
        proj_(int64_t(p.attrs) * size_),
        attr_(int64_t(p.attrs) * kMost),
        terms_(int64_t(size_) * kMost) {
    zeros_.clear(size_);
    const A *attn = static_cast<const A*>(p.attn), *proj = static_cast<const A*>(p.proj);
    for (int c = 0; c < size_; ++c) {
      attn_[c] = attn ? attn[c] : A(1);
      for (int k = 0; k < p.attrs; ++k) proj_[k * size_ + c] = proj[int64_t(c) * p.attrs + k];
    }
    if (!p.attrs) terms_.clear(int64_t(size_) * kMost);
  }

  void operator()(int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Item& item = p_.csr.items[k];
      for (int64_t e = item.begin; e < item.end; ++e) {
        row_[n_] = rows(p_.rows, item.row), col_[n_] = rows(p_.cols, p_.csr.indices[e]);
        eid_[n_] = p_.csr.eids ? p_.csr.eids[e] : e;
        if (p_.cols) prefetch(col_[n_], size_ * sizeof(A));
        if (++n_ == kMost) block();
      }
    }
    block();
  }

 private:
  // Returns a row of a table [N, H, D], or a row of zeros if the table is null.
  const A* rows(const void* table, int64_t row) const {
    return table ? static_cast<const A*>(table) + row * size_ : static_cast<const A*>(zeros_);
  }

  // Computes the scores of the n_ edges collected so far, and begins the next block.
  void block() {
    if (p_.attrs) {
      const A* attr = static_cast<const A*>(p_.attr);
      for (int e = 0; e < n_; ++e)
        __builtin_memcpy(attr_ + e * p_.attrs, attr + eid_[e] * p_.attrs, p_.attrs * sizeof(A));
      multiply<A, W>(n_, p_.attrs, size_, attr_, proj_, terms_);
    }
    for (int e = 0; e < n_; ++e) p_.positive ? edge<true>(e) : edge<false>(e);
    n_ = 0;
  }

  // Computes the scores of edge e of the block. given: whether the caller has passed `positive`; else it is
  // written to new_positive.
  template <bool given>
  void edge(int e) {
    A* const score = static_cast<A*>(p_.score) + eid_[e] * p_.heads;
    int h = 0;
    for (; h + 4 <= p_.heads; h += 4) {
      const V sums[4] = {head<given>(e, h), head<given>(e, h + 1), head<given>(e, h + 2),
                         head<given>(e, h + 3)};
      sum4<A, W>(sums, score + h);
    }
    for (; h < p_.heads; ++h) score[h] = sum<A, W>(head<given>(e, h));
  }

  // Returns the sum over head h of attn sigma m as a vector, whose lanes are still to be added up.
  template <bool given>
  [[gnu::always_inline]] V head(int e, int h) {
    const A *u = col_[e], *v = row_[e], *projected = terms_ + int64_t(e) * size_, *a = attn_;
    const uint8_t* flags = given ? p_.positive + eid_[e] * size_ : nullptr;
    uint8_t* to = given ? nullptr : p_.new_positive + eid_[e] * size_;
    const A slope = A(p_.slope);
    V total{};
    for (int c = h * p_.dim, end = c + p_.dim; c < end; c += W) {
      const V m = load_vector<V>(u + c) + load_vector<V>(v + c) + load_vector<V>(projected + c);
      if constexpr (given) {
        total += load_vector<V>(a + c) * (load_flags<A, W>(flags + c) != 0 ? m : m * slope);
      } else {
        total += load_vector<V>(a + c) * (m > 0 ? m : m * slope);
        store_flags<A, W>(to + c, m);
      }
    }
    return total;
  }

  const PairScoreParams& p_;
  int size_, n_ = 0;  // H D; the number of edges in the block so far
  // [H D]; [H D]; the transpose of W, [attrs, H D]; x of the block's edges; W x of the block's edges
  Buffer<A> zeros_, attn_, proj_, attr_, terms_;
  const A *row_[kMost], *col_[kMost];  // v and u of the block's edges
  int64_t eid_[kMost];                 // their positions in the user's order
};

// pair_sums: the sums of s over each row's edges, W^T s of each edge, and the sum of s x^T over all edges.
// The slope sigma has two values, so that the slopes of a group of kGroup adjacent columns have 2^kGroup
// combinations. table_ has, for each group of columns and combination, the sum of the group's rows of W times
// their slopes: an edge's W^T s is the sum of its groups' entries, each times the weight of its head. For s
// x^T, an edge adds x times this weight to the same entries of a second table, found_, which finish()
// multiplies by the slopes.
template <class A, int W>
class RowSums {
  using V = Vec<A, W>;
  static constexpr int kGroup = kPairColumns, kKinds = 1 << kGroup;

 public:
  // of_proj: [H D, attrs], which finish() writes; or null.
  RowSums(const PairScoreParams& p, A* of_proj)
      : p_(p),
        of_proj_(of_proj),
        size_(p.heads * p.dim),
        groups_(products() ? size_ / kGroup : 0),
        width_(padded<W>(p.attrs)),
        sums_(size_),
        attr_(2 * width_),
        table_(p.of_attr ? int64_t(groups_) * kKinds * width_ : 0),
        found_(of_proj ? int64_t(groups_) * kKinds * width_ : 0),
        at_(groups_) {
    attr_.clear(2 * width_);
    if (of_proj) found_.clear(int64_t(groups_) * kKinds * width_);
    if (p.of_attr) fill_table();
  }

  void operator()(const Item& item) {
    sums_.clear(size_);
    for (int64_t e = item.begin; e < item.end;) {
      const int count = int(item.end - e < kMost ? item.end - e : kMost);
      for (int k = 0; k < count; ++k) eid_[k] = p_.csr.eids ? p_.csr.eids[e + k] : e + k;
      add(count);
      if (products())
        for (int k = 0; k < count; ++k) multiply_edge(eid_[k]);
      e += count;
    }
    A* const to = item.slot < 0 ? static_cast<A*>(p_.out) + item.row * size_
                                : static_cast<A*>(p_.partial_out) + item.slot * size_;
    __builtin_memcpy(to, sums_, size_ * sizeof(A));
  }

  // Writes of_proj from found_, after the last work item.
  void finish() const {
    if (!of_proj_) return;
    for (int c = 0; c < size_; ++c)
      for (int k = 0; k < p_.attrs; ++k) {
        A total = 0;
        for (int kind = 0; kind < kKinds; ++kind)
          total += slope(kind, c % kGroup) * found_[entry(c / kGroup, kind) + k];
        of_proj_[int64_t(c) * p_.attrs + k] = total;
      }
  }

 private:
  // Whether W^T s or s x^T is wanted.
  bool products() const { return p_.of_attr || of_proj_; }
  // Return where the entry of a group and kind begins in a table, and the slope of a group's column. kind: a
  // combination of slopes, of which bit c is set if the slope of the group's column c is 1.
  int64_t entry(int group, int kind) const { return (int64_t(group) * kKinds + kind) * width_; }
  A slope(int kind, int column) const { return kind >> column & 1 ? A(1) : A(p_.slope); }

  void fill_table() {
    const A* proj = static_cast<const A*>(p_.proj);
    table_.clear(int64_t(groups_) * kKinds * width_);
    for (int c = 0; c < size_; ++c)
      for (int kind = 0; kind < kKinds; ++kind) {
        A* const to = table_ + entry(c / kGroup, kind);
        for (int k = 0; k < p_.attrs; ++k) to[k] += slope(kind, c % kGroup) * proj[int64_t(c) * p_.attrs + k];
      }
  }

  // Adds s of the first `count` edges of eid_ to the row's sums.
  void add(int count) {
    const A *weight = static_cast<const A*>(p_.weight), slope = A(p_.slope);
    for (int h = 0; h < p_.heads; ++h)
      for (int c = h * p_.dim; c < (h + 1) * p_.dim; c += W) {
        V total{};
        for (int e = 0; e < count; ++e) {
          const V r = splat<A, W>(weight[eid_[e] * p_.heads + h]);
          total += load_flags<A, W>(p_.positive + eid_[e] * size_ + c) != 0 ? r : r * slope;
        }
        store_vector(sums_ + c, load_vector<V>(sums_ + c) + total);
      }
  }

  // For an edge: writes W^T s, if that is wanted, and adds its part of s x^T to found_, if that is wanted.
  void multiply_edge(int64_t eid) {
    const uint8_t* flags = p_.positive + eid * size_;
    for (int g = 0; g < groups_; ++g) {
      uint32_t four;
      __builtin_memcpy(&four, flags + g * kGroup, sizeof four);
      at_[g] = entry(g, four * 0x10204080u >> 28);  // kind: the lowest bits of four flags, side by side
    }
    A* const made = attr_ + width_;
    const int64_t bytes = p_.attrs * sizeof(A);
    if (of_proj_) __builtin_memcpy(attr_, static_cast<const A*>(p_.attr) + eid * p_.attrs, bytes);
    for (int k = 0; k < width_;)
      if (k + 2 * W <= width_)
        multiply_columns<2>(eid, k, made), k += 2 * W;
      else
        multiply_columns<1>(eid, k, made), k += W;
    if (p_.of_attr) __builtin_memcpy(static_cast<A*>(p_.of_attr) + eid * p_.attrs, made, bytes);
  }

  // Does the same as multiply_edge for N vectors of attributes, from attribute k on. W^T s is written to
  // made[k ...].
  template <int N>
  void multiply_columns(int64_t eid, int k, A* made) {
    if (p_.of_attr && of_proj_) return multiply_columns<N, true, true>(eid, k, made);
    p_.of_attr ? multiply_columns<N, true, false>(eid, k, made)
               : multiply_columns<N, false, true>(eid, k, made);
  }

  template <int N, bool attr, bool proj>
  void multiply_columns(int64_t eid, int k, A* made) {
    const A* weight = static_cast<const A*>(p_.weight) + eid * p_.heads;
    V total[N] = {}, x[N];
    for (int n = 0; n < N; ++n) x[n] = load_vector<V>(attr_ + k + n * W);
    // Local copies of members, which the compiler would read again after each store of a vector.
    const int of_head = p_.dim / kGroup, heads = p_.heads;
    const int64_t* entries = at_;
    const A* const table = table_ + k;
    A* const found = found_ + k;
    for (int h = 0; h < heads; ++h) {
      const V r = splat<A, W>(weight[h]);
      V sum[N] = {}, more[N];
      for (int n = 0; n < N; ++n) more[n] = r * x[n];
      for (int g = 0; g < of_head; ++g) {
        const int64_t at = *entries++;
        for (int n = 0; n < N; ++n) {
          if constexpr (attr) sum[n] += load_vector<V>(table + at + n * W);
          if constexpr (proj) store_vector(found + at + n * W, load_vector<V>(found + at + n * W) + more[n]);
        }
      }
      for (int n = 0; n < N; ++n) total[n] += r * sum[n];
    }
    for (int n = 0; n < N; ++n) store_vector(made + k + n * W, total[n]);
  }

  const PairScoreParams& p_;
  A* of_proj_;
  int size_, groups_, width_;  // H D; the number of groups of columns; attributes, padded to whole vectors
  Buffer<A> sums_;             // [H D]: a row's sums of s, which become `out`
  Buffer<A> attr_;             // [2, width]: an edge's attributes x, and behind them W^T s
  Buffer<A> table_, found_;    // [groups, kKinds, width], at entry(group, kind)
  Buffer<int64_t> at_;         // [groups]: where the entries of an edge's groups begin in table_ and found_
  int64_t eid_[kMost];         // positions of some of a row's edges in the user's order
};

template <class A, int W>
void sums_as(const PairScoreParams& p, const Parallel& parallel) {
  const Chunks parts(p.csr, kMostParts);
  parallel_range(parallel, parts.count(), 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const int64_t size = int64_t(p.heads) * p.dim * p.attrs;
      RowSums<A, W> sums(p, p.of_proj ? static_cast<A*>(p.of_proj) + k * size : nullptr);
      for (int64_t i = parts.boundary(k); i < parts.boundary(k + 1); ++i) sums(p.csr.items[i]);
      sums.finish();
    }
  });
  merge_splits<A>(p.csr, parallel, p.heads, p.dim, p.partial_out, p.out);
}

// Calls f(an object of p.dtype, the width of vectors as a constant). Callers refuse other types than f32 and
// f64.
template <class F>
void with_lanes(const PairScoreParams& p, const F& f) {
  if (p.dtype == DType::f64)
    return with_width<double>(lanes_of<double>(p.dim), [&](auto width) { f(double(), width); });
  with_width<float>(lanes_of<float>(p.dim), [&](auto width) { f(float(), width); });
}

}  // namespace

void pair_scores(const PairScoreParams& p, const Parallel& parallel) {
  with_lanes(p, [&](auto type, auto width) {
    parallel_items(parallel, p.csr, [&](int64_t first, int64_t last) {
      Scores<decltype(type), width.value> scores(p);
      scores(first, last);
    });
  });
}

void pair_sums(const PairScoreParams& p, const Parallel& parallel) {
  with_lanes(p, [&](auto type, auto width) { sums_as<decltype(type), width.value>(p, parallel); });
}

int64_t pair_parts(const Csr& csr) { return Chunks(csr, kMostParts).count(); }

}  // namespace dfgnn::cpu::DFGNN_ISA
