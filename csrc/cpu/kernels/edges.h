// The edges of a block (rows.h) and their options, as arrays with an entry per edge and head in one of two
// orders, HeadMajor or EdgeMajor, which share elementwise code. Loops over whole vectors also compute lanes
// beyond the last entry, whose contents are undefined and not used.
#pragma once

#include "rows.h"

namespace dfgnn::cpu::DFGNN_ISA {

// Features of at most this number of bytes, which the second level of cache holds, are not prefetched.
constexpr int64_t kNear = 1 << 20;
// Rows of a table [E, H] or [N, H] are prefetched this number of edges ahead.
constexpr int kTableAhead = 32;

// Edges of one row, with entry (h, e) at h * kBlock + e: the lanes of a vector are edges.
struct HeadMajor {
  static constexpr int kEdges = kBlock;
  static constexpr int at(int, int h, int e) { return h * kBlock + e; }
  // Calls f(i) for vectors of W entries that cover all heads of n edges. i: a vector's first entry.
  template <int W, class F>
  [[gnu::always_inline]] static inline void each(int heads, int n, const F& f) {
    for (int h = 0; h < heads; ++h)
      for (int e = 0; e < n; e += W) f(h * kBlock + e);
  }
};

// Edges of several rows, with entry (h, e) at e * H + h: a vector runs over heads, edges and rows.
struct EdgeMajor {
  static constexpr int kEdges = 2 * kBlock;
  static constexpr int at(int heads, int h, int e) { return e * heads + h; }
  template <int W, class F>
  [[gnu::always_inline]] static inline void each(int heads, int n, const F& f) {
    for (int i = 0; i < n * heads; i += W) f(i);
  }
};

// Returns W adjacent entries at p, which are features, accumulators or flags, as accumulators.
template <class A, int W, class S>
static inline Vec<A, W> load_as(const S* p) {
  if constexpr (sizeof(S) > 1)
    return load<S, W>(p);
  else if constexpr (W > 1)
    return __builtin_convertvector(load_vector<Vec<S, W>>(p), Vec<A, W>);
  else
    return *p;
}

// out_k(h, e) = table[index[e]][k * H + h] for n edges and K arrays out_k in the given order, which begin at
// out + k * next. stride: the number of entries of a row of the table. limit: how many entries of `index` may
// be read in order to prefetch; 0 turns prefetching off.
template <class Order, int K = 1, class S, class A>
static inline void gather(const S* table, const int32_t* index, int n, int64_t limit, int heads,
                          int64_t stride, A* out, int64_t next) {
  const auto row = [&](int e) __attribute__((always_inline)) {
    if (e + kTableAhead < limit) __builtin_prefetch(table + index[e + kTableAhead] * stride);
    return table + index[e] * stride;
  };
  if constexpr (std::is_same_v<Order, EdgeMajor>) {
    const RowShape shape = row_shape<A>(1, heads);
    with_width<A>(shape.width, [&](auto width) {
      constexpr int W = width.value;
      for (int e = 0; e < n; ++e) {
        const S* from = row(e);
        for (int v = 0; v < shape.vectors; ++v) {
          const int h = feature(shape, v, W);
#pragma GCC unroll 4
          for (int k = 0; k < K; ++k)
            store_vector(out + k * next + e * heads + h, load_as<A, W>(from + k * heads + h));
        }
      }
    });
  } else {
    const auto copy = [&](auto heads) {
      for (int e = 0; e < n; ++e) {
        const S* from = row(e);
        for (int k = 0; k < K; ++k)
          for (int h = 0; h < heads; ++h) out[k * next + h * kBlock + e] = load<S, 1>(from + k * heads + h);
      }
    };
    if (heads == 1)
      copy(std::integral_constant<int, 1>());
    else if (heads == 4)
      copy(std::integral_constant<int, 4>());
    else
      copy(heads);
  }
}

// The reverse of gather: table[index[e]][k * H + h] = in_k(h, e). A row of the table has K * H entries.
template <class Order, int K = 1, class A, class S>
static inline void scatter(const A* in, int64_t next, const int32_t* index, int n, int heads, S* table) {
  const int64_t stride = int64_t(K) * heads;
  if constexpr (std::is_same_v<Order, EdgeMajor>) {
    const RowShape shape = row_shape<A>(1, heads);
    with_width<A>(shape.width, [&](auto width) {
      constexpr int W = width.value;
      for (int e = 0; e < n; ++e)
        for (int v = 0; v < shape.vectors; ++v) {
          const int h = feature(shape, v, W);
#pragma GCC unroll 4
          for (int k = 0; k < K; ++k)
            store<S, W>(table + index[e] * stride + k * heads + h,
                        load_vector<Vec<A, W>>(in + k * next + e * heads + h));
        }
    });
  } else {
    for (int e = 0; e < n; ++e)
      for (int k = 0; k < K; ++k)
        for (int h = 0; h < heads; ++h)
          store<S, 1>(table + index[e] * stride + k * heads + h, in[k * next + h * kBlock + e]);
  }
}

// Calls f(begin, end, whether it is the first) for the blocks, of at most kBlock edges, of a work item.
template <class F>
[[gnu::always_inline]] static inline void for_blocks(const Item& item, const F& f) {
  for (int64_t e = item.begin; e < item.end; e += kBlock)
    f(e, e + kBlock < item.end ? e + kBlock : int64_t(item.end), e == item.begin);
}

// Calls f(i, mask) for vectors that cover the n edges of head h in head-major order. i: a vector's first
// entry; mask: set in lanes that are edges, not in those beyond edge n.
template <class A, class F>
[[gnu::always_inline]] static inline void for_edges(int h, int n, const F& f) {
  for (int e = 0; e < n; e += kLanes<A>) f(h * kBlock + e, before<A, kLanes<A>>(e, n));
}

// Returns the product of b and the lower 32 bits of each lane of a.
template <int W>
static inline Vec<uint64_t, W> multiply_low(Vec<uint64_t, W> a, uint64_t b) {
#if defined(__AVX512F__)
  if constexpr (W == 8)
    return bit_cast<Vec<uint64_t, W>>(
        _mm512_maskz_mul_epu32(0xff, bit_cast<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  if constexpr (W == 4)
    return bit_cast<Vec<uint64_t, W>>(_mm256_mul_epu32(bit_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#endif
  return (a & 0xffffffffu) * b;
}

// Writes dropout's factors of n edges, 0 or dropout_scale, to `out`. It computes dropout_bits of core/math.h
// with an edge per lane, for four heads at a time. In each lane of 64 bits, only the lower 32 have a meaning.
template <class Order, class A>
static void dropout_mask(const EdgeOptions& options, int heads, const int32_t* eid, int n, A* out) {
  constexpr int W = kLanes<uint64_t>;
  using U = Vec<uint64_t, W>;
  const uint64_t seed = uint64_t(*options.seed);
  const A scale = A(options.dropout_scale);
  uint32_t bits[4][Order::kEdges];
  for (int head = 0; head < heads; head += 4) {
    for (int e = 0; e < n; e += W) {
      U c0 = __builtin_convertvector(load_vector<Vec<uint32_t, W>>(eid + e), U), c1{}, c2 = U{} + head / 4,
        c3{};
      uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
      for (int round = 0; round < kPhiloxRounds; ++round) {
        const U a = multiply_low<W>(c0, 0xD2511F53u), b = multiply_low<W>(c2, 0xCD9E8D57u);
        c0 = (b >> 32) ^ c1 ^ k0;
        c1 = b;
        c2 = (a >> 32) ^ c3 ^ k1;
        c3 = a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      const U lanes[4] = {c0, c1, c2, c3};
      for (int k = 0; k < 4; ++k)
        store_vector(bits[k] + e, __builtin_convertvector(lanes[k], Vec<uint32_t, W>));
    }
    for (int k = 0; k < 4 && head + k < heads; ++k)
      for (int e = 0; e < n; ++e)
        out[Order::at(heads, head + k, e)] = bits[k][e] < options.dropout_threshold ? 0 : scale;
  }
}

constexpr EdgeOptions kNoOptions{};

// The edges of a block and their options. load() or locate() choose the block. Its numbers are accumulators:
// what is computed of them is compiled once for all types of features with these.
template <class A, class Order = HeadMajor>
class EdgeBlock {
 public:
  using V = Vec<A, kLanes<A>>;

  // type: that of the features
  EdgeBlock(const Csr& csr, const EdgeOptions& options, const Shape& shape, DType type)
      : csr_(csr),
        options_(options),
        type_(type),
        ahead_(far(shape, type) ? shape.num_edges : 0),
        heads_(shape.heads),
        values_(int64_t(5) * heads_ * Order::kEdges) {}

  int n;                       // number of edges
  const int32_t* index;        // [n]: the row that each edge gathers
  int64_t limit;               // how many entries of `index` may be read in order to prefetch; 0: none
  int32_t eid[Order::kEdges];  // the edges' positions in the user's order, if load() was asked for them

  // Factors of the edges as arrays of the block, or null for 1. dropout: 0 or dropout_scale; factor: edge
  // weight times dropout. load() sets these two, transform() sets gate.
  const A *dropout = nullptr, *factor = nullptr, *gate = nullptr;

  // Loads the edges [begin, end) of the CSR, their dropout and weights, and their positions in the user's
  // order if `eids` or any option is set.
  [[gnu::noinline]] void load(int64_t begin, int64_t end, bool eids) {
    locate(begin, end, eids);
    if (options_.seed) {
      dropout_mask<Order>(options_, heads_, eid, n, array(0));
      dropout = factor = array(0);
    }
    if (options_.weight) {
      factor = read(options_.weight, options_.weight_is_acc, options_.weight_heads, array(1));
      if (dropout) update(array(1), [&](V w, int i) { return w * load_vector<V>(dropout + i); });
    }
  }

  // Does the same as load(), without dropout and weights.
  void locate(int64_t begin, int64_t end, bool eids) {
    n = int(end - begin), index = csr_.indices + begin, limit = ahead_ ? ahead_ - begin : 0;
    if (eids || options_.any())
      for (int e = 0; e < n; ++e) eid[e] = csr_.eids ? csr_.eids[begin + e] : int32_t(begin) + e;
    dropout = factor = gate = nullptr;
  }

  // Calls f(array) for the arrays of the options that EdgeGradients::settle reads. f may change the pointer.
  // with_dropout: whether settle reads `dropout`, as it does for the gradient of the weight.
  template <class F>
  void each_setting(bool with_dropout, F&& f) {
    if (options_.seed || options_.weight) f(factor);
    if (options_.gate) f(gate);
    if (!options_.seed || !with_dropout) return;
    if (options_.weight)
      f(dropout);
    else
      dropout = factor;  // without weights they are one array, and f may have changed the pointer to it
  }

  // Returns an array of the edges' positions in the user's order, followed by those of later edges. Of it
  // eids_limit() entries may be read.
  const int32_t* eids_ahead() const { return csr_.eids ? csr_.eids + (index - csr_.indices) : eid; }
  int64_t eids_limit() const { return csr_.eids ? limit : n; }

  // Replaces raw scores by z = gate * raw (+ bias, if it is added before the LeakyReLU: EdgeOptions). Also
  // reads the options that score() applies.
  [[gnu::noinline]] void transform(A* z) {
    gate = bias_after_ = mask_ = nullptr;
    if (options_.gate) {
      gate = read(options_.gate, options_.gate_is_acc, options_.gate_heads, array(2));
      update(z, [&](V v, int i) { return v * load_vector<V>(gate + i); });
    }
    if (options_.bias) {
      const A* bias = read(options_.bias, options_.bias_is_acc, heads_, array(3));
      if (options_.bias_after)
        bias_after_ = bias;
      else
        update(z, [&](V v, int i) { return v + load_vector<V>(bias + i); });
    }
    if (options_.mask) mask_ = read(options_.mask, options_.mask_heads, array(4));
  }

  // Returns the scores at i from `activated` = LeakyReLU(z): adds the bias if it comes after the LeakyReLU
  // (EdgeOptions::bias_after), and gives -inf where the mask is 0. transform() must have been called before.
  V score(V activated, int i) const {
    if (bias_after_) activated += load_vector<V>(bias_after_ + i);
    if (mask_) activated = load_vector<V>(mask_ + i) != 0 ? activated : V{} - kInfinity<A>;
    return activated;
  }

  bool bias_after() const { return options_.bias_after; }

  // Calls f(i) for vectors that cover the block's entries. i: a vector's first entry.
  template <class F>
  [[gnu::always_inline]] void each(const F& f) const {
    Order::template each<kLanes<A>>(heads_, n, f);
  }

  // Replaces all entries x[i] by f(x[i], i), a vector at a time.
  template <class F>
  [[gnu::always_inline]] void update(A* x, const F& f) const {
    each([&](int i) __attribute__((always_inline)) { store_vector(x + i, f(load_vector<V>(x + i), i)); });
  }

 private:
  // Whether the features of the nodes exceed the second level of cache, so that prefetching pays.
  static bool far(const Shape& s, DType type) {
    const int64_t size = type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2;
    const int64_t nodes = s.num_src > s.num_dst ? s.num_src : s.num_dst;
    return nodes * s.heads * (s.dim > s.value_dim ? s.dim : s.value_dim) * size > kNear;
  }

  A* array(int k) { return values_ + int64_t(k) * heads_ * Order::kEdges; }

  // Copies the rows of the block's edges from a table [E, heads] to the array `out`, and returns it. heads:
  // H, or 1 for a table whose entries hold for all heads of an edge.
  template <class S>
  const A* read(const S* table, int heads, A* out) {
    if (heads == heads_) {
      gather<Order>(table, eid, n, 0, heads, heads, out, 0);
    } else {
      for (int e = 0; e < n; ++e) {
        const A x = load_as<A, 1>(table + eid[e]);
        for (int h = 0; h < heads_; ++h) out[Order::at(heads_, h, e)] = x;
      }
    }
    return out;
  }
  const A* read(const void* table, bool is_acc, int heads, A* out) {
    if constexpr (sizeof(A) == 4) {
      if (!is_acc && type_ == DType::f16) return read(static_cast<const Half*>(table), heads, out);
      if (!is_acc && type_ == DType::bf16) return read(static_cast<const BFloat16*>(table), heads, out);
    }
    return read(static_cast<const A*>(table), heads, out);
  }

  const Csr& csr_;
  const EdgeOptions& options_;
  DType type_;
  int64_t ahead_;  // the number of edges of the CSR, or 0 to prefetch nothing
  int heads_;
  Buffer<A> values_;  // five arrays: dropout, weight, gate, bias, mask
  // Arrays for score(), or null: the bias, if it is added after the LeakyReLU, and the mask.
  const A *bias_after_, *mask_;
};

}  // namespace dfgnn::cpu::DFGNN_ISA
