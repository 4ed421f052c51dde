// Backward that needs g . v of every edge. See params.h for the formulas.
#pragma once

#include "edge_projection.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace dfgnn::cuda {

template <class C, Score SCORE, bool SOURCES, Edges EDGES, bool HANDED>
constexpr int pair_blocks() {
  constexpr bool DOT = SCORE == Score::dot, V2 = SCORE == Score::additive_v2, FEAT = has_features(EDGES);
  if (kQuads<C, SCORE, EDGES>) return SOURCES ? kQuadBlocksSources : kQuadBlocksDestinations;
  constexpr Load LOAD = SOURCES && HANDED                                ? Load::sums
                        : DOT && SOURCES && EDGES == Edges::features     ? Load::sums
                        : DOT && SOURCES && FEAT                         ? Load::two_rows
                        : V2 && SOURCES && FEAT                          ? Load::most_rows
                        : FEAT || (projects(EDGES) && !SOURCES)          ? Load::many_rows
                        : SOURCES && (V2 || (DOT && C::LPH == 1))        ? Load::many_rows
                        : V2 && C::LPH == 1 && sizeof(typename C::T) > 2 ? Load::many_rows
                        : DOT || V2                                      ? Load::four_rows
                                                                         : Load::two_rows;
  return kMinBlocks<C, LOAD>;
}

// A row holds (a, b), its neighbours bring (c, d):
//   destinations (dot):    a = q_i, b = g_i;  c = k_j, d = v_j;  grad_query += draw c
//   sources (dot):         a = k_j, b = v_j;  c = q_i, d = g_i;  grad_key += draw c, grad_value += w d
//   destinations (v2):     a = x_i, b = g_i;  c = d = v_j;  u = a + c
//                          grad_query += draw attn L'(u)
//   sources (v2):          a = b = v_j;  c = x_i, d = g_i;  grad_value += draw attn L'(u) + w d
//   sources (additive):    b = v_j;  d = g_i;  grad_alpha_src += draw, grad_value += w d
// Edge features join c, u, d or b, whichever is the key or the value. Two partial dots per edge,
// scatter-reduced over the lanes of a head. HANDED (dot), or with features, own (dot) or projected ones, the
// destinations hand alpha and ds of the edges over to the sources, which then take neither scores nor
// features.
//
// delta. g . out is known before a row's edges are, but out is rounded: the destinations take it for the
// first guess delta0 and add up, with x = dalpha - delta0, what is left of it: rest = sum alpha x. As
//   sum alpha (x - rest) y = sum alpha x y - rest sum alpha y
// their gradient is right with a second sum of rows, and the pass over sources, which also writes the
// gradients of edge tensors, reads delta0 + rest. Rows in pieces keep delta0.
template <class C, Score SCORE, bool SOURCES, Edges EDGES, int B, bool HANDED = false>
__global__ void __launch_bounds__(kThreads, (pair_blocks<C, SCORE, SOURCES, EDGES, HANDED>()))
    pair_kernel(const BackwardParams p, const Tiling t) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int LPH = C::LPH, NV = C::NV, VEC = C::VEC;
  constexpr bool DOT = SCORE == Score::dot, V2 = SCORE == Score::additive_v2, PAIR = DOT || V2;
  constexpr bool EDGE = has_options(EDGES), FEAT = has_features(EDGES), PROJ = projects(EDGES);
  constexpr bool HANDS = PROJ || (DOT && FEAT) || HANDED,
                 GIVEN = HANDS && SOURCES;  // alpha and ds of the edges are there
  static_assert(!HANDED || (DOT && !PROJ && !FEAT));
  constexpr bool QUADS = kQuads<C, SCORE, EDGES>;
  constexpr bool READS = FEAT && !GIVEN, KEYS = FEAT && !SOURCES;
  constexpr bool ONE = V2 && !SOURCES;               // c and d are one row
  constexpr bool LINEAR = !(V2 && SOURCES) || FEAT;  // else the statistics bring the linear part of the score
  constexpr bool NARROW = sizeof(T) == 2;
  constexpr Ahead AHEAD = !PAIR || (HANDED && SOURCES)                                  ? Ahead::all
                          : GIVEN                                                       ? Ahead::none
                          : DOT && NARROW && (FEAT || SOURCES || (LPH == 1 && !HANDED)) ? Ahead::rows
                          : V2 && !FEAT && (QUADS || !NARROW)                           ? Ahead::rows
                          : DOT && SOURCES                                              ? Ahead::own
                                                                                        : Ahead::none;
  constexpr int CHUNK = B, SHARE = share_of(CHUNK), PERIOD = period_of(CHUNK, LPH), SLOTS = SHARE / PERIOD;
  constexpr bool EIDS = PROJ || FEAT || HANDED || (EDGE && SLOTS == 1);
  constexpr bool EDGE_GRADS = EDGE && SOURCES && !GIVEN, CENTRED = !SOURCES;

  const Csr& csr = SOURCES ? p.reverse : p.csr;
  Place<C> me(t, p.shape, p.shape.value_dim, csr);
  const int own = me.hl % PERIOD;
  const EdgeReader<T> edge(p.edge, me.heads, me.head);
  const void* key = V2 ? p.value : p.key;
  const void* rows_a = SOURCES ? key : p.query;
  const void* rows_b = SOURCES ? p.value : p.grad_out;
  const void* rows_c = SOURCES ? p.query : key;
  const void* rows_d = SOURCES ? p.grad_out : p.value;
  const PairScore<C, SCORE, QUADS> pair(me, p.attn, A(p.negative_slope));
  A slope = V2 ? A(1) : A(p.negative_slope);
  keep(slope);
  // Over sources the scale is in the gradient of the features, too.
  A in_key = FEAT && p.edge.feat_in_key ? (GIVEN ? A(p.scale) : A(1)) : A(0);
  const A in_value = FEAT && p.edge.feat_in_value;
  keep(in_key);
  const Rows<C> source_c = me.rows(rows_c), source_d = me.rows(rows_d);
  const Rows<C> feats = me.rows(READS ? p.edge.feat : nullptr);
  const Terms<NodeStats<A>> node_stats = me.template terms<NodeStats<A>>(p.node_stats);
  const Terms<A> rests =
      me.template terms<A>(p.node_stats);  // in its place, where alpha and ds are handed over
  const AttrLanes<C, PROJ && !SOURCES> attr(me, p.attr);
  constexpr int F = PROJ && !SOURCES ? C::FEATS : 1;
  [[maybe_unused]] const auto numbers_of = [&](int eid) {
    return me.template at<EdgeNumbers<A>>(p.handed, eid);
  };
  // Of grad_attn, and those of the block; QUADS: in place of the registers.
  A share[V2 && !QUADS ? NV : 1][VEC] = {};
  __shared__ A shares[V2 ? kWarps : 1][NV * VEC][32];
  [[maybe_unused]] const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if constexpr (QUADS) repeat<VEC>([&](int v) { shares[warp][v][lane] = 0; });
  ItemFeatures<C> features;  // W^T q and then the sum of draw x; W^T g
  if constexpr (PROJ && !SOURCES) {
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    float* const to = products.template shared<2>();
    products.onto(p.query, to);
    products.onto(p.grad_out, to + products.size());
    features = {me, products, to};
    __syncwarp();
  }

  // What an item and a step of it need first.
  Raw row_a[NV], row_b[NV], row_out[NV];
  A row_term = 0;
  RowStats<A> next_stats = {};
  NodeStats<A> stats[SLOTS];
  A left_of_delta[GIVEN ? SLOTS : 1];
  int index[EIDS ? 2 * SLOTS : SLOTS] = {};  // neighbours, and with EIDS the edges' ids
  Raw c[PAIR && !ONE ? B : 1][NV], d[B][NV], e[READS ? B : 1][NV];
  T attrs[F > 1 ? B : 1][C::FEATS];
  EdgeNumbers<A> numbers[GIVEN ? SLOTS : 1];
  const auto load_item = [&] {
    if constexpr (GIVEN) return;
    if constexpr (PAIR) me.load_row(rows_a, row_a, me.row);
    me.load_row(rows_b, row_b, me.row);
    if constexpr (!PAIR) row_term = *me.template at<A>(p.alpha_src, me.row);
    if constexpr (!SOURCES) {
      me.load_row(p.out, row_out, me.row);
      next_stats = load_stats(me.template at<RowStats<A>>(p.stats, me.row));
    }
  };
  const auto load_step = [&] {
    if constexpr (READS) load_rows<C, B>(feats, 0, index, e, SLOTS);
    if constexpr (GIVEN) {
      repeat<SLOTS>([&](int s) {
        left_of_delta[s] = __ldg(rests.at(index[s]));
        numbers[s] = *numbers_of(index[SLOTS + s]);
      });
    } else if constexpr (SOURCES) {
      repeat<SLOTS>([&](int s) { stats[s] = load_stats(node_stats.at(index[s])); });
    }
    if constexpr (PAIR && !ONE) load_rows<C, B>(source_c, 0, index, c);
    load_rows<C, B>(source_d, 0, index, d);
    if constexpr (PROJ && !SOURCES) attr.load(index, attrs);
  };

  // The state of a row.
  int row, item;
  bool writes;
  RowStats<A> row_stats;
  // Numbers before the first row is opened, too: one without edges is not, and its zeros are multiplied by a.
  A a[PAIR ? NV : 1][VEC] = {}, b[NV][VEC], row_delta;
  Raw minus_a{};   // QUADS: -a
  QuadRows quads;  // QUADS: b and attn
  A acc_c[PAIR ? NV : 1][VEC], acc_d[SOURCES ? NV : 1][VEC], acc_attn[V2 && FEAT && SOURCES ? NV : 1][VEC];
  A acc_mass[CENTRED ? NV : 1][VEC];  // as acc_c, but of the weights
  A sum_raw, rest, sum_mass;
  A query_attr[C::FEATS], grad_attr[C::FEATS], acc_attr[1][C::FEATS], mass_attr[1][C::FEATS];
  const auto open = [&] {
    if constexpr (PAIR && !GIVEN) me.unpack_row(row_a, a, A(1));
    if constexpr (!GIVEN) me.unpack_row(row_b, b, A(1));
    if constexpr (PROJ && !SOURCES) {
      attr.load_row(features.row(item), query_attr);
      attr.load_row(features.row(item, 1), grad_attr);
    }
    if constexpr (V2) row_term = pair.linear(me, t, p.attn, a, rows_a, row);
    if constexpr (QUADS) {
      minus_a = negated(row_a[0]);
      quads.set(me.inside_or_zero(row_b[0]), pair.words);
    } else if constexpr (V2) {
      row_term *= pair.slope;
    }
    if constexpr (!SOURCES) {
      row_delta = 0;
      const Rows<C> bias = me.rows(p.out_bias);
      repeat<NV>([&](int k) {
        row_delta = dot<T>(b[k], row_out[k], row_delta);
        if (p.out_bias) row_delta -= dot<T>(b[k], bias.load(0, k), A(0));
      });
      row_delta = reduce_sum<LPH>(row_delta);
      if (C::WIDE && t.chunks > 1) {
        A far = me.far_dot(t, p.grad_out, row, p.out, row);
        if (p.out_bias) far -= me.far_dot(t, p.grad_out, row, p.out_bias, 0);
        row_delta += reduce_sum<LPH>(far);
      }
      if (p.row_sums) row_delta += *me.template at<A>(p.row_sums, row);
    }
  };
  const auto begin = [&](const int at, const int n) {
    row = at, item = n, row_stats = next_stats;
    writes = me.writes && me.slot_of(n) != me.kNoItem;
    row_delta = 0;
    zero(acc_c);
    zero(acc_d);
    zero(acc_attn);
    zero(acc_mass);
    zero(acc_attr);
    zero(mass_attr);
    sum_raw = rest = sum_mass = 0;
  };

  // What an edge brings to the score's columns: c, with the edge's features where they are in the key.
  const auto load_key = [&](int u, int k, A(&y)[VEC]) {
    Pack<T>::unpack(ONE ? d[u][k] : c[ONE ? 0 : u][k], y);
    if constexpr (READS) axpy<T>(y, in_key, e[READS ? u : 0][k]);
  };
  A keys[KEYS ? B : 1][NV][VEC];  // in place of c and e, once they are added up

  // Gradients by edge and column that features of the edges, or additive_v2, take; `draw`, `mass` and `w` of
  // the edge.
  [[maybe_unused]] const auto add_edge = [&](const int u, const A draw, const A mass, const A w,
                                             const int eid) {
    if constexpr (QUADS) {
      const Raw& key = ONE ? d[u][0] : c[ONE ? 0 : u][0];
      repeat<4>([&](int w) {
        A &low = acc_c[0][2 * w], &high = acc_c[0][2 * w + 1];
        if constexpr (CENTRED) {
          add_where_greater<T>(key.x[w], minus_a.x[w], draw, low, high, mass, acc_mass[0][2 * w],
                               acc_mass[0][2 * w + 1]);
        } else {
          add_where_greater<T>(key.x[w], minus_a.x[w], draw, low, high);
        }
      });
      return;
    }
    [[maybe_unused]] const A draw_negative = draw * pair.slope;
#pragma unroll
    for (int k = 0; k < NV; ++k) {
      [[maybe_unused]] A y[VEC], grad_feat[VEC];
      if constexpr (KEYS) {
        copy(y, keys[u][k]);
      } else if constexpr (PAIR) {
        load_key(u, k, y);
      }
      repeat<VEC>([&](int v) {
        if constexpr (DOT) {
          acc_c[k][v] += draw * y[v];
          if constexpr (CENTRED) acc_mass[k][v] += mass * y[v];
        } else if constexpr (V2) {
          const bool positive = a[k][v] + y[v] > 0;
          if (positive) acc_c[k][v] += draw;
          if constexpr (CENTRED) {
            if (positive) acc_mass[k][v] += mass;
          }
          if constexpr (FEAT && SOURCES) grad_feat[v] = positive ? draw : draw_negative;
        }
      });
      if constexpr (V2 && FEAT && SOURCES) {
        A f[VEC];
        Pack<T>::unpack(e[u][k], f);
        repeat<VEC>([&](int v) { acc_attn[k][v] += grad_feat[v] * f[v]; });
      }
      if constexpr (FEAT && SOURCES) {
        if constexpr (!V2) Pack<T>::unpack(d[u][k], grad_feat);
        if constexpr (DOT) repeat<VEC>([&](int v) { acc_d[k][v] += w * grad_feat[v]; });
        if (p.grad_feat) {
          repeat<VEC>([&](int v) {
            if constexpr (V2) {
              grad_feat[v] *= pair.numbers[V2 ? k : 0][v];
            } else if constexpr (DOT) {
              grad_feat[v] = in_key * draw * y[v] + in_value * w * grad_feat[v];
            } else {
              grad_feat[v] *= w;
            }
          });
          if (me.inside(k)) store_raw(me.address(p.grad_feat, eid, k), Pack<T>::pack(grad_feat));
        }
      }
    }
  };

  const auto step = [&](const int done, const int rest_of_row) {
    const int left = SHARE > CHUNK ? min(rest_of_row, CHUNK) : rest_of_row;
    // Two sums over columns for every edge, the score's and g . v, brought to the lanes that own the edges.
    A part_s[SHARE] = {}, part_t[SHARE] = {};
    if constexpr (QUADS) {
      float products[4][4];
      if constexpr (ONE) {
        part_s[0] = pair.template quad_sum<LINEAR>(quads, minus_a, d, products);
      } else {
        part_s[0] = pair.template quad_sum<LINEAR>(quads, minus_a, c, products);
        repeat<4>([&](int u) { quads.template multiply_by<T>(d[u][0], products[u]); });
      }
      part_t[0] = first_of_own_edge<C>(products);
    }
#pragma unroll
    for (int u = 0; u < B; ++u) {
      if constexpr (GIVEN || QUADS) break;
      part_t[u] = 0;
      typename PairScore<C, SCORE, QUADS>::Sum sum;
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        // attn is 0 there. Before rows are unpacked, or compilers would hold all of them in float32.
        if (!V2 && !KEYS && LPH > 1 && !me.inside(k)) continue;
        [[maybe_unused]] A y[VEC];
        if constexpr (PAIR) load_key(u, k, y);
        if constexpr (KEYS) copy(keys[u][k], y);
        const auto before = sum;
        const A before_t = part_t[u];
        if constexpr (PAIR) pair.template add<LINEAR>(k, a[k], y, sum);
        if constexpr (FEAT && !V2) {  // g is b over destinations, d over sources
          A value[VEC];
          if constexpr (SOURCES) {
            copy(value, b[k]);
          } else {
            Pack<T>::unpack(d[u][k], value);
          }
          axpy<T>(value, in_value, e[u][k]);
          if constexpr (SOURCES) {
            part_t[u] = dot<T>(value, d[u][k], part_t[u]);
          } else {
            repeat<VEC>([&](int v) { part_t[u] += b[k][v] * value[v]; });
          }
        } else {
          part_t[u] = dot<T>(b[k], d[u][k], part_t[u]);
        }
        if (DOT && KEYS && LPH > 1 && !me.inside(k)) sum = before, part_t[u] = before_t;  // without a branch
      }
      if (C::WIDE && t.chunks > 1) {
        const int j = __shfl_sync(kAll, index[u / LPH], u % LPH, LPH);
        int eid = 0;
        if constexpr (READS) eid = of_lane<LPH>(index[SLOTS + u / LPH], u % LPH);
        const void* in_c = in_key != 0 ? p.edge.feat : nullptr;
        const void* in_d = in_value != 0 ? p.edge.feat : nullptr;
        if constexpr (DOT && SOURCES) {
          sum.linear += me.far_dot(t, rows_c, j, rows_a, row, in_c, eid);
        } else if constexpr (PAIR) {
          pair.template add_far<LINEAR>(me, t, p.attn, rows_a, row, rows_c, j, in_c, eid, sum);
        }
        part_t[u] += SOURCES ? me.far_dot(t, rows_d, j, rows_b, row, in_d, eid)
                             : me.far_dot(t, rows_b, row, rows_d, j, in_d, eid);
      }
      if constexpr (PROJ) {
        sum.linear = attr.dot(query_attr, attrs[F > 1 ? u : 0], sum.linear);
        part_t[u] = attr.dot(grad_attr, attrs[F > 1 ? u : 0], part_t[u]);
      }
      part_s[u] = LINEAR ? pair.join(sum) : sum.positive;
    }
    if constexpr (PAIR && !GIVEN && !QUADS) reduce_scatter<SHARE, LPH>(part_s, me.hl);
    if constexpr (!GIVEN && !QUADS) reduce_scatter<SHARE, LPH>(part_t, me.hl);

    // alpha again, and the gradients of the edge and head.
    const auto eid_at = [&](int s) { return eid_of<C, CHUNK, EIDS>(me, csr, index, done, s); };
    const Dropout<T, EDGE, LPH, SLOTS> dropout(edge, t.heads_per_tile, eid_at);
    Weights<A, SLOTS, false, true> weights;
    Weights<A, SLOTS, CENTRED, true> grad_scores;  // and, over destinations, what `rest` takes from them
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const bool valid = s * LPH + own < left;
      const A mask = dropout.factor(s);
      if constexpr (GIVEN) {
        EdgeNumbers<A> now = {};
        int eid = 0;
        if (valid) {
          eid = index[SLOTS + s];
          const bool positive = PROJ || numbers[s].alpha > 0;
          const A alpha = abs(numbers[s].alpha), grad_score = numbers[s].grad - left_of_delta[s] * alpha;
          const A grad_z = positive ? grad_score : grad_score * slope;
          now = {alpha, grad_z};
          if constexpr (EDGE) now.alpha *= mask * edge.weight(eid);
          if constexpr (EDGE && !PROJ) {
            now.grad *= edge.gate(eid);
            if (me.head_ok && me.hl < PERIOD && me.chunk == 0) {
              const int64_t at = int64_t(eid) * me.heads + me.head;
              if (p.grad_bias) static_cast<A*>(p.grad_bias)[at] = p.edge.bias_after ? grad_score : grad_z;
              if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] *= grad_z;  // of what z was made
            }
          }
        }
        weights.set(s, now.alpha, true);
        grad_scores.set(s, now.grad, true);
        if (PROJ && p.attr.keep_edges) {
          __syncwarp();  // several lanes have read it
          if (valid && me.head_ok && me.hl < PERIOD) *numbers_of(eid) = now;
        }
        continue;
      }
      const RowStats<A> softmax = SOURCES ? stats[s].row : row_stats;
      const A delta = SOURCES ? stats[s].delta : row_delta;
      A raw = 0;
      if constexpr (SOURCES && !DOT) raw = row_term + stats[s].term;
      if constexpr (PAIR)
        raw = DOT       ? part_s[s] * A(p.scale)
              : !LINEAR ? fma(1 - pair.slope, part_s[s], raw)
              : QUADS   ? row_term + part_s[s]
                        : part_s[s];
      A dot_gv = part_t[s], factor = 1;
      int64_t at = 0;
      const bool named = EIDS || (EDGE && (edge.tensors || p.grad_attention || p.grad_raw));
      const int eid = named ? eid_at(s) : 0;
      if constexpr (EDGE) {
        if (valid) {
          at = int64_t(eid) * me.heads + me.head;
          factor = mask * edge.weight(eid);
          if (p.grad_attention) dot_gv += static_cast<const A*>(p.grad_attention)[at];
        }
      }
      const EdgeScore<T, EDGE> z(edge, raw, slope, eid);
      // Without a branch where a lane has several edges: their exponentials overlap.
      A alpha = SLOTS > 1 || valid ? softmax.alpha(z.score) : A(0);
      alpha = valid ? alpha : A(0);
      // An edge with all of its row's weight has no gradient, and rounding must not give it one. (alpha is 1
      // but for the rounding of scores that are joined of two parts.)
      const A dalpha = times(factor, dot_gv);
      const bool alone = softmax.log_sum == 0 && alpha > A(0.5);
      const A grad_score = valid ? alpha * (dalpha - (alone ? dalpha : delta)) : A(0);
      const A grad_z = grad_score * z.slope, grad_raw = grad_z * z.gate;
      weights.set(s, alpha * factor, true);
      grad_scores.set(s, grad_raw, true);
      sum_raw += grad_raw;
      if constexpr (CENTRED) {
        const A mass = alpha * z.slope * z.gate;
        grad_scores.positive[s] = mass;
        rest += grad_score;
        sum_mass += mass;
        if constexpr (HANDS) {
          if (valid && me.head_ok && me.hl < PERIOD && me.chunk == 0) {
            *numbers_of(eid) = {PROJ || z.positive ? alpha : -alpha, grad_score};
            if constexpr (EDGE && !PROJ) {
              if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] = raw;
              if (p.grad_weight) static_cast<A*>(p.grad_weight)[at] = mask * alpha * dot_gv;
            }
          }
        }
      }
      if constexpr (EDGE_GRADS) {
        if (valid && me.head_ok && me.hl < PERIOD && me.chunk == 0) {
          if (p.grad_bias) static_cast<A*>(p.grad_bias)[at] = p.edge.bias_after ? grad_score : grad_z;
          if (p.grad_gate) static_cast<A*>(p.grad_gate)[at] = grad_z * raw;
          if (p.grad_weight) static_cast<A*>(p.grad_weight)[at] = mask * alpha * dot_gv;
          if (p.grad_raw) static_cast<A*>(p.grad_raw)[at] = grad_raw;
        }
      }
    }

    // The sums of rows, and what has no sum: gradients of the edges' features.
    whole_or_not<CHUNK>(left, [&](auto whole) {
      constexpr bool FULL = decltype(whole)::value;
      if constexpr (SOURCES && !(DOT && FEAT)) add_rows<C, FULL, false, B>(0, left, weights, d, acc_d, acc_d);
      if constexpr (DOT && PROJ && !SOURCES) {
        add_rows<C, FULL, CENTRED, B>(0, left, grad_scores, c, acc_c, acc_mass, [&](int u, A draw, A mass) {
          attr.axpy(acc_attr[0], draw, attrs[F > 1 ? u : 0]);
          attr.axpy(mass_attr[0], mass, attrs[F > 1 ? u : 0]);
        });
      } else if constexpr (DOT && !FEAT) {
        add_rows<C, FULL, CENTRED, B>(0, left, grad_scores, c, acc_c, acc_mass);
      }
      if constexpr (V2 || FEAT) {
#pragma unroll
        for (int u = 0; u < B; ++u) {
          [[maybe_unused]] A draw, mass = 0, w = 0, unused;
          grad_scores.template get<LPH>(u, draw, mass);
          [[maybe_unused]] int eid = 0;
          if constexpr (FEAT && SOURCES) {
            weights.template get<LPH>(u, w, unused);
            eid = of_lane<LPH>(index[SLOTS + u / LPH], u % LPH);
          }
          if (FULL || u < left) add_edge(u, draw, mass, w, eid);
        }
      }
    });
  };

  const auto finish = [&](const int row, const int slot) {
    sum_raw = reduce_sum<PERIOD>(sum_raw);
    if (me.shared()) {
      if constexpr (PAIR) me.across(acc_c, t);
      if constexpr (SOURCES) me.across(acc_d, t);
      if constexpr (!DOT) sum_raw = me.across(sum_raw, t);
    }
    if constexpr (CENTRED) {
      rest = reduce_sum<PERIOD>(rest);
      if constexpr (V2) sum_mass = reduce_sum<PERIOD>(sum_mass);
      if (me.shared()) {
        me.across(acc_mass, t);
        rest = me.across(rest, t);
        if constexpr (V2) sum_mass = me.across(sum_mass, t);
      }
      if (slot >= 0 || p.part_of_rows) rest = 0;
      sum_raw -= rest * sum_mass;
      repeat<NV, VEC>([&](int k, int v) { acc_c[k][v] -= rest * acc_mass[k][v]; });
      if constexpr (PROJ) {
        repeat<F>([&](int f) {
          if (me.shared()) {
            acc_attr[0][f] = me.across(acc_attr[0][f], t);
            mass_attr[0][f] = me.across(mass_attr[0][f], t);
          }
          acc_attr[0][f] -= rest * mass_attr[0][f];
        });
        attr.store_row(me, acc_attr[0], A(1), slot, features.row(item));
      }
      if (writes && me.hl == 0 && me.chunk == 0) {
        if constexpr (HANDS) {
          *me.template at<A>(p.node_stats, row) = rest;
        } else {
          *me.template at<NodeStats<A>>(p.node_stats, row) = {QUADS ? pair.slope * row_term : row_term,
                                                              row_stats, row_delta + rest};
        }
      }
    }
    if constexpr (V2) {
      // sum draw L'(u) = slope sum draw + (1 - slope) sum_{u > 0} draw. As L(u) = u L'(u), grad_attn is the
      // sum of x_i times it over destinations, v_j times it over sources and e_ij times it over edges.
      repeat<NV>([&](int k) {
        A x[VEC], attn[VEC];
        if constexpr (QUADS) {
          Pack<T>::unpack(negated(minus_a), x);
        } else {
          copy(x, a[k]);
        }
        pair.attn(k, attn);
        repeat<VEC>([&](int v) {
          acc_c[k][v] = pair.slope * sum_raw + (1 - pair.slope) * acc_c[k][v];
          A& sum = QUADS ? shares[warp][v][lane] : share[QUADS ? 0 : k][v];
          if (writes) sum += x[v] * acc_c[k][v];
          if constexpr (FEAT && SOURCES) sum += acc_attn[k][v];
          acc_c[k][v] *= attn[v];
          if constexpr (SOURCES) acc_d[k][v] += acc_c[k][v];
        });
      });
    }
    const A scale = V2 ? A(1) : A(p.scale);
    if constexpr (!SOURCES) me.store_row(p.grad_query, p.partial_query, acc_c, scale, row, slot);
    if constexpr (DOT && SOURCES) me.store_row(p.grad_key, p.partial_key, acc_c, scale, row, slot);
    if constexpr (SOURCES) me.store_row(p.grad_value, p.partial_value, acc_d, A(1), row, slot);
    if constexpr (!PAIR) {
      if (writes && me.hl == 0 && me.chunk == 0) {
        if (slot < 0) {
          A* total = me.template at<A>(p.grad_alpha_src, row);
          *total = sum_raw + (me.joins(slot) ? read_number(total) : A(0));
        } else {
          *me.template at<A>(p.partial_alpha, slot) = sum_raw;
        }
      }
    }
  };
  walk<CHUNK, AHEAD, EIDS>(me, csr, t.items, index, load_item, load_step, begin, open, step, finish);
  if constexpr (PROJ && !SOURCES) {
    __syncwarp();
    const NodeProducts<C> products(me, t, p.shape, p.attr);
    products.back(products.template shared<2>(), p.grad_query, float(p.scale), p.attr.sums);
  }

  if constexpr (V2) {
    A total[NV][VEC];
    repeat<NV, VEC>(
        [&](int k, int v) { total[k][v] = QUADS ? shares[warp][v][lane] : share[QUADS ? 0 : k][v]; });
    store_share_of_block(me, t, total, shares, p.grad_attn);
  }
}

}  // namespace dfgnn::cuda
