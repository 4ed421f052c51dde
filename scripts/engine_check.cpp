// Compares the CPU engine, without torch, with plain loops in double precision: structure, forward and
// backward of the three scores, all feature types. For instruction sets whose processors are not at hand:
// cross_check_cpu.py.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/engine.h"
#include "cpu/structure.h"

using namespace dfgnn;
using Numbers = std::vector<double>;

namespace {

std::mt19937 generator(1);

// Exact in all types: eighths below 2.
Numbers numbers(int64_t count) {
  Numbers x(count);
  for (double& v : x) v = double(int(generator() % 32) - 16) / 8;
  return x;
}

int bytes_of(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }
DType acc_of(DType type) { return type == DType::f64 ? type : DType::f32; }

double half_to_double(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double x = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h >> 15 ? -x : x;
}

// An array of a type; of results it begins as nan.
struct Array {
  Array(DType type, int64_t count) : type(type), count(count), memory(count * bytes_of(type) + 64, 0xff) {}
  Array(DType type, const Numbers& x) : Array(type, int64_t(x.size())) {
    for (int64_t k = 0; k < count; ++k) put(k, x[k]);
  }
  void put(int64_t k, double x) {
    const float f = float(x);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t brain = bits >> 16,
                   half = x == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - (112u << 23)) >> 13);
    const void* from = type == DType::f64   ? static_cast<const void*>(&x)
                       : type == DType::f32 ? static_cast<const void*>(&f)
                       : type == DType::f16 ? &half
                                            : &brain;
    std::memcpy(memory.data() + k * bytes_of(type), from, bytes_of(type));
  }
  double get(int64_t k) const {
    double d;
    float f;
    uint16_t h;
    const unsigned char* at = memory.data() + k * bytes_of(type);
    if (type == DType::f64) return std::memcpy(&d, at, 8), d;
    if (type == DType::f32) return std::memcpy(&f, at, 4), f;
    std::memcpy(&h, at, 2);
    if (type == DType::f16) return half_to_double(h);
    const uint32_t bits = uint32_t(h) << 16;
    return std::memcpy(&f, &bits, 4), f;
  }
  operator void*() { return memory.data(); }
  DType type;
  int64_t count;
  std::vector<unsigned char> memory;
};

const cpu::Parallel kAlone{
    [](int64_t begin, int64_t end, int64_t, cpu::RangeFn fn, void* ctx) { fn(begin, end, ctx); }, 1};

// One direction of a graph and its plan.
struct Side {
  std::vector<int64_t> indptr;
  std::vector<int32_t> indices, eids;
  std::vector<Item> items;
  std::vector<Split> splits;
  Csr csr() {
    const int64_t n = indptr.size() - 1;
    const cpu::RowPlan plan = cpu::count_items(indptr.data(), n, indices.size(), 32);
    items.resize(plan.num_items), splits.resize(plan.num_splits);
    cpu::make_items(indptr.data(), n, 32, plan, items.data(), splits.data(), kAlone);
    Csr c{};
    c.indices = indices.data(), c.eids = eids.data(), c.items = items.data(), c.splits = splits.data();
    c.num_items = plan.num_items, c.num_splits = plan.num_splits, c.num_slots = plan.num_slots,
    c.num_rows = n;
    return c;
  }
};

int failures = 0;

void compare(const char* name, const char* what, Array& found, const Numbers& expected, double bound) {
  double scale = 1, error = 0;
  for (double x : expected) scale = std::max(scale, std::fabs(x));
  for (size_t k = 0; k < expected.size(); ++k) {
    const double difference = std::fabs(found.get(k) - expected[k]) / scale;
    error = difference <= error ? error : difference;  // a nan stays
  }
  if (error <= bound) return;
  ++failures;
  std::printf("%s: %s differs by %g, bound %g\n", name, what, error, bound);
}

void check(Score score, DType type, int heads, int dim) {
  const int64_t num_src = 61, num_dst = 53, E = 500, C = int64_t(heads) * dim;
  const double slope = score == Score::dot ? 1 : 0.25, scale = score == Score::dot ? 0.125 : 1;
  std::vector<int64_t> src(E), dst(E);
  for (int64_t e = 0; e < E; ++e)
    src[e] = generator() % num_src, dst[e] = e < 90 ? 7 : generator() % (num_dst - 2);
  Side forward, reverse;
  forward.indptr.resize(num_dst + 1), forward.indices.resize(E), forward.eids.resize(E);
  cpu::sort_coo({{dst.data(), 1, true},
                 {src.data(), 1, true},
                 E,
                 0,
                 num_dst,
                 false,
                 nullptr,
                 forward.indptr.data(),
                 forward.indices.data(),
                 forward.eids.data()},
                kAlone);
  reverse.indptr.resize(num_src + 1), reverse.indices.resize(E), reverse.eids.resize(E);
  if (cpu::transpose({forward.indptr.data(), forward.indices.data(), forward.eids.data(), num_dst, num_src, E,
                      reverse.indptr.data(), reverse.indices.data(), reverse.eids.data()},
                     kAlone))
    ++failures;
  const Csr csr = forward.csr(), back = reverse.csr();
  if (!cpu::in_range(csr, E) || !cpu::in_range(back, E)) ++failures;

  const DType acc = acc_of(type);
  const Numbers v = numbers(num_src * C), q = numbers(num_dst * C), k = numbers(num_src * C), a = numbers(C),
                as = numbers(num_src * heads), ad = numbers(num_dst * heads), g = numbers(num_dst * C);
  // Plain loops.
  Numbers out(num_dst * C), gv(num_src * C), gq(num_dst * C), gk(num_src * C), ga(C), gas(num_src * heads),
      gad(num_dst * heads), z(E * heads), alpha(E * heads);
  for (int h = 0; h < heads; ++h) {
    Numbers top(num_dst, -INFINITY), sum(num_dst), delta(num_dst);
    const auto leaky = [&](double u) { return u > 0 ? u : slope * u; };
    const auto activate = [&](double u) { return score == Score::additive ? leaky(u) : u; };
    for (int64_t e = 0; e < E; ++e) {
      const int64_t i = dst[e], j = src[e];
      double s = score == Score::additive ? as[j * heads + h] + ad[i * heads + h] : 0;
      for (int d = 0; d < dim && score != Score::additive; ++d) {
        const int64_t at = h * dim + d;
        s += score == Score::dot ? scale * q[i * C + at] * k[j * C + at]
                                 : a[at] * leaky(v[j * C + at] + q[i * C + at]);
      }
      z[e * heads + h] = s, top[i] = std::max(top[i], activate(s));
    }
    for (int64_t e = 0; e < E; ++e)
      sum[dst[e]] += alpha[e * heads + h] = std::exp(activate(z[e * heads + h]) - top[dst[e]]);
    for (int64_t e = 0; e < E; ++e) {
      alpha[e * heads + h] /= sum[dst[e]];
      for (int d = 0; d < dim; ++d)
        out[dst[e] * C + h * dim + d] += alpha[e * heads + h] * v[src[e] * C + h * dim + d];
    }
    for (int64_t i = 0; i < num_dst; ++i)
      for (int d = 0; d < dim; ++d) delta[i] += g[i * C + h * dim + d] * out[i * C + h * dim + d];
    for (int64_t e = 0; e < E; ++e) {
      const int64_t i = dst[e], j = src[e];
      const double w = alpha[e * heads + h];
      double t = 0;
      for (int d = 0; d < dim; ++d) t += g[i * C + h * dim + d] * v[j * C + h * dim + d];
      double draw = w * (t - delta[i]);
      if (score == Score::additive) {
        draw *= z[e * heads + h] > 0 ? 1 : slope;
        gas[j * heads + h] += draw, gad[i * heads + h] += draw;
      }
      for (int d = 0; d < dim; ++d) {
        const int64_t at = h * dim + d;
        gv[j * C + at] += w * g[i * C + at];
        if (score == Score::dot)
          gq[i * C + at] += scale * draw * k[j * C + at], gk[j * C + at] += scale * draw * q[i * C + at];
        if (score != Score::additive_v2) continue;
        const double u = v[j * C + at] + q[i * C + at], term = draw * a[at] * (u > 0 ? 1 : slope);
        gq[i * C + at] += term, gv[j * C + at] += term, ga[at] += draw * leaky(u);
      }
    }
  }

  // The engine.
  Array value(type, v), query(type, q), key(type, k), attn(type, a), alpha_src(acc, as), alpha_dst(acc, ad),
      grad(type, g), result(type, num_dst * C), stats(acc, num_dst * heads * 2), positive(type, num_dst * C),
      mass(acc, num_dst * heads), attention(acc, E * heads), partial(acc, csr.num_slots * C),
      partial2(acc, csr.num_slots * C), partial_stats(acc, csr.num_slots * heads * 3);
  ForwardParams f{};
  f.score = score, f.dtype = type, f.shape = {num_dst, num_src, E, heads, dim, dim}, f.csr = csr;
  f.value = value, f.negative_slope = slope, f.scale = scale;
  if (score == Score::additive)
    f.alpha_src = alpha_src, f.alpha_dst = alpha_dst, f.positive = positive, f.positive_mass = mass;
  else
    f.query = query;
  if (score == Score::dot) f.key = key;
  if (score == Score::additive_v2) f.attn = attn;
  f.out = result, f.stats = stats, f.attention = attention;
  f.partial_out = partial, f.partial_positive = partial2, f.partial_stats = partial_stats;
  cpu::forward(f, kAlone);

  Array grad_value(type, num_src * C), grad_query(type, num_dst * C), grad_key(type, num_src * C),
      grad_src(acc, num_src * heads), grad_dst(acc, num_dst * heads), node_stats(acc, num_dst * heads * 4),
      partial_query(acc, csr.num_slots * C), partial_key(acc, back.num_slots * C),
      partial_value(acc, back.num_slots * C), partial_alpha(acc, back.num_slots * heads),
      parts(acc, cpu::attention_parts(csr) * C);
  BackwardParams b{};
  b.score = score, b.dtype = type, b.shape = f.shape, b.csr = csr, b.reverse = back;
  b.value = value, b.alpha_src = f.alpha_src, b.alpha_dst = f.alpha_dst, b.query = f.query, b.key = f.key;
  b.attn = f.attn, b.negative_slope = slope, b.scale = scale, b.out = result, b.stats = stats;
  b.positive = f.positive, b.positive_mass = f.positive_mass, b.grad_out = grad, b.grad_value = grad_value;
  b.node_stats = node_stats, b.partial_query = partial_query, b.partial_key = partial_key;
  b.partial_value = partial_value, b.partial_alpha = partial_alpha;
  if (score == Score::additive) b.grad_alpha_src = grad_src, b.grad_alpha_dst = grad_dst;
  if (score != Score::additive) b.grad_query = grad_query;
  if (score == Score::dot) b.grad_key = grad_key;
  if (score == Score::additive_v2) b.grad_attn = parts, b.attn_parts = cpu::attention_parts(csr);
  Array edges(acc, cpu::edge_scratch(b));
  cpu::backward(b, kAlone, edges.count ? static_cast<void*>(edges) : nullptr);

  char name[80];
  const char* const scores[] = {"additive", "dot", "additive_v2"};
  const char* const types[] = {"f32", "f64", "f16", "bf16"};
  std::snprintf(name, sizeof name, "%s %s %dx%d", scores[int(score)], types[int(type)], heads, dim);
  const double bound = type == DType::f64   ? 1e-12
                       : type == DType::f32 ? 2e-6
                       : type == DType::f16 ? 2e-3
                                            : 1.5e-2;
  compare(name, "out", result, out, bound);
  compare(name, "attention", attention, alpha, bound);
  compare(name, "grad_value", grad_value, gv, bound);
  if (score == Score::additive) {
    compare(name, "grad_src", grad_src, gas, bound), compare(name, "grad_dst", grad_dst, gad, bound);
  } else {
    compare(name, "grad_query", grad_query, gq, bound);
  }
  if (score == Score::dot) compare(name, "grad_key", grad_key, gk, bound);
  if (score == Score::additive_v2) {
    Array sum(DType::f64, Numbers(C, 0.));
    for (int64_t part = 0; part < b.attn_parts; ++part)
      for (int64_t d = 0; d < C; ++d) sum.put(d, sum.get(d) + parts.get(part * C + d));
    compare(name, "grad_attn", sum, ga, bound);
  }
}

}  // namespace

int main() {
  const int shapes[][2] = {{8, 8}, {1, 7}, {4, 32}, {1, 64}, {3, 5}};
  int count = 0;
  for (const auto& shape : shapes)
    for (Score score : {Score::additive, Score::dot, Score::additive_v2})
      for (DType type : {DType::f32, DType::f64, DType::f16, DType::bf16})
        check(score, type, shape[0], shape[1]), ++count;
  std::printf("%s: %d cases, %d wrong\n", cpu::isa(), count, failures);
  return failures > 0;
}
