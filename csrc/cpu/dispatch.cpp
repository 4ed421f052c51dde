// The functions of engine.h and of the other headers of this folder: they call the kernels that were compiled
// for the best instruction set of this processor.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "block_tasks.h"
#include "kernel_list.h"
#include "pages.h"

namespace dfgnn::cpu {

namespace {

// How many rows, at least, a partial sum of the score terms' gradients covers.
constexpr int64_t kTermsRows = 256;

// Memory of more than kChecksumRun bytes is divided into runs of this size, and the result is the checksum of
// the runs' checksums. Each thread takes at least kChecksumRuns of them: one thread nearly saturates memory,
// and starting others takes longer than reading a few MB.
constexpr int64_t kChecksumRun = int64_t(1) << 20, kChecksumRuns = 32;

[[maybe_unused]] bool has_base() { return true; }
#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know f16c. The instruction is asked once, because in a virtual
// machine the host answers it, which takes longer than the kernels of a small graph.
[[maybe_unused]] bool has_f16c() {
  static const bool found = [] {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  }();
  return found;
}
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#define DFGNN_MEMBER(result, name, arguments) result(*name) arguments;
struct Kernels {
  const char* isa;
  bool (*supported)();
  DFGNN_KERNELS(DFGNN_MEMBER)
};

}  // namespace

// build_native.py defines DFGNN_ISAS(apply) as apply(avx512) apply(avx2) apply(base), or as those of them
// that it compiles. The kernels of an instruction set are in a namespace of its name, to which a table of
// pointers to them is added here.
// clang-format off
#define DFGNN_NAME(result, name, arguments) name,
#define DFGNN_TABLE(isa)                                                \
  namespace isa {                                                       \
  DFGNN_KERNELS(DFGNN_DECLARE)                                          \
  constexpr Kernels kTable{#isa, has_##isa, DFGNN_KERNELS(DFGNN_NAME)}; \
  }
// clang-format on
DFGNN_ISAS(DFGNN_TABLE)

namespace {

#define DFGNN_ENTRY(isa) isa::kTable,
constexpr Kernels kKernels[] = {DFGNN_ISAS(DFGNN_ENTRY)};

const Kernels& kernels() {
  const char* variable = std::getenv("DFGNN_CPU_ISA");
  const std::string forced = variable ? variable : "";
  std::string names;
  for (const Kernels& k : kKernels) {
    if (forced.empty() ? k.supported() : forced == k.isa) {
      if (k.supported()) return k;
      throw std::runtime_error("DFGNN_CPU_ISA=" + forced + ": this processor does not have it");
    }
    names += (names.empty() ? "" : ", ") + std::string(k.isa);
  }
  const std::string compiled = "the CPU library was compiled for " + names;
  if (forced.empty())
    throw std::runtime_error(compiled + " alone, which this processor does not have: compile it here again");
  if (forced == "base" || forced == "avx2" || forced == "avx512")
    throw std::runtime_error("DFGNN_CPU_ISA=" + forced + ": " + compiled +
                             " alone; with DFGNN_CPU_ISAS=all it is compiled for all");
  throw std::runtime_error("DFGNN_CPU_ISA: expected " + names + ", got '" + forced + "'");
}

// Returns `parallel` with the way of processing rows that DFGNN_CPU_ROWS forces, if it is set.
Parallel with_way(Parallel parallel) {
  const char* forced = std::getenv("DFGNN_CPU_ROWS");
  if (!forced || !*forced) return parallel;
  const std::string way = forced;
  if (way != "grouped" && way != "single")
    throw std::runtime_error("DFGNN_CPU_ROWS: expected grouped or single, got '" + way + "'");
  parallel.way = way == "grouped" ? RowWay::grouped : RowWay::single;
  return parallel;
}

}  // namespace

void forward(const ForwardParams& p, const Parallel& parallel) {
  const int64_t of_head = p.shape.heads * size_of(p.dtype);
  use_huge_pages(p.out, p.shape.num_dst * p.shape.value_dim * of_head);
  use_huge_pages(p.positive, p.shape.num_dst * p.shape.value_dim * of_head);
  use_huge_pages(p.attention, p.shape.num_edges * p.shape.heads * size_of_acc(p.dtype));
  kernels().forward(p, with_way(parallel));
}

int64_t edge_scratch(const BackwardParams& p) {
  // Backward of the additive score has no second pass over edges; without edge ids a second pass could not
  // find what the first one saved.
  if (p.score == Score::additive || (!p.csr.eids && !p.reverse.eids)) return 0;
  const Shape& s = p.shape;
  const int64_t src_columns = p.score == Score::dot ? int64_t(s.dim) + s.value_dim : s.value_dim,
                of_edges = p.grad_feat && p.score == Score::dot ? s.num_edges * s.dim : 0,
                columns = s.num_src * src_columns + s.num_dst * s.dim + of_edges, numbers = 2 * s.num_edges;
  return numbers * size_of_acc(p.dtype) <= columns * size_of(p.dtype) ? numbers * s.heads : 0;
}

void backward(const BackwardParams& p, const Parallel& parallel, void* edges) {
  const int64_t of_head = p.shape.heads * size_of(p.dtype);
  use_huge_pages(p.grad_value, p.shape.num_src * p.shape.value_dim * of_head);
  use_huge_pages(p.grad_query, p.shape.num_dst * p.shape.dim * of_head);
  use_huge_pages(p.grad_key, p.shape.num_src * p.shape.dim * of_head);
  use_huge_pages(p.grad_feat, p.shape.num_edges * p.shape.dim * of_head);
  const int64_t edge_heads = p.shape.num_edges * p.shape.heads * size_of_acc(p.dtype);
  for (void* of_edges : {p.grad_bias, p.grad_gate, p.grad_weight, p.grad_raw})
    use_huge_pages(of_edges, edge_heads);
  use_huge_pages(edges, 2 * edge_heads);
  kernels().backward(p, with_way(parallel), edges);
}

int64_t second_numbers(const Csr& destinations) { return kernels().second_numbers(destinations); }
void second_order(const SecondParams& p, const Parallel& parallel) {
  const int64_t of_head = p.shape.heads * size_of(p.dtype);
  use_huge_pages(p.grad_value, p.shape.num_src * p.shape.value_dim * of_head);
  use_huge_pages(p.grad_grad_out, p.shape.num_dst * p.shape.value_dim * of_head);
  use_huge_pages(p.grad_feat, p.shape.num_edges * p.shape.dim * of_head);
  use_huge_pages(p.numbers, p.shape.num_edges * p.shape.heads * 3 * size_of_acc(p.dtype));
  kernels().second_order(p, parallel);
}

void sddmm(const ProductParams& p, const Parallel& parallel) {
  use_huge_pages(p.edge_out, p.shape.num_edges * p.shape.heads * size_of(p.dtype));
  kernels().sddmm(p, parallel);
}
void spmm(const ProductParams& p, const Parallel& parallel) {
  use_huge_pages(p.out, p.shape.num_dst * p.shape.value_dim * p.shape.heads * size_of(p.dtype));
  kernels().spmm(p, parallel);
}
void edge_dot(const EdgeTermParams& p, const Parallel& parallel) {
  use_huge_pages(p.edge_out, p.num_edges * p.heads * size_of_acc(p.dtype));
  kernels().edge_dot(p, parallel);
}
void edge_sum(const EdgeTermParams& p, const Parallel& parallel) {
  use_huge_pages(p.out, p.num_rows * p.heads * p.width * size_of(p.dtype));
  kernels().edge_sum(p, parallel);
}
void edge_outer(const EdgeTermParams& p, const Parallel& parallel) {
  use_huge_pages(p.edge_out, p.num_edges * p.dim * size_of(p.dtype));
  kernels().edge_outer(p, parallel);
}
void edge_products(const EdgeProductParams& p, const Parallel& parallel) {
  const int64_t of_edges = p.num_edges * p.heads;
  use_huge_pages(p.score, of_edges * size_of_acc(p.dtype));
  use_huge_pages(p.edge_out, of_edges * p.dim * size_of(p.dtype));
  kernels().edge_products(p, parallel);
}
void edge_products_backward(const EdgeProductParams& p, const Parallel& parallel) {
  const int64_t of_row = int64_t(p.heads) * p.dim * size_of(p.dtype);
  use_huge_pages(p.out, p.num_rows * of_row);
  use_huge_pages(p.edge_out, p.num_edges * of_row);
  kernels().edge_products_backward(p, parallel);
}
void pair_scores(const PairScoreParams& p, const Parallel& parallel) {
  use_huge_pages(p.new_positive, p.num_edges * p.heads * p.dim);
  use_huge_pages(p.score, p.num_edges * p.heads * size_of(p.dtype));
  kernels().pair_scores(p, parallel);
}
void pair_sums(const PairScoreParams& p, const Parallel& parallel) {
  use_huge_pages(p.of_attr, p.num_edges * p.attrs * size_of(p.dtype));
  kernels().pair_sums(p, parallel);
}
int64_t pair_parts(const Csr& csr) { return kernels().pair_parts(csr); }
bool in_range(const Csr& csr, int64_t num_edges) {
  bool good = csr.num_parts == 0;  // no branches, so that the compiler vectorizes it
  for (int64_t k = 0; k < csr.num_items; ++k) {
    const Item& item = csr.items[k];
    good &= (item.row >= 0) & (item.row < csr.num_rows) & (item.begin >= 0) & (item.begin <= item.end) &
            (item.end <= num_edges) & (item.slot >= kWhole) & (item.slot < csr.num_slots);
  }
  for (int64_t k = 0; k < csr.num_splits; ++k) {
    const Split& split = csr.splits[k];
    good &= (split.row >= 0) & (split.row < csr.num_rows) & (split.slot_begin >= 0) &
            (split.slot_begin <= split.slot_end) & (split.slot_end <= csr.num_slots);
  }
  return good;
}

void terms(const TermsParams& p, const Parallel& parallel) { kernels().terms(p, parallel); }
void terms_backward(const TermsBackwardParams& p, const Parallel& parallel) {
  kernels().terms_backward(p, parallel);
}
// An eighth of kMostTermsParts is enough for the threads of a CPU.
int64_t terms_parts(const TermsParams& p) {
  return std::min<int64_t>((p.num_rows[0] + kTermsRows - 1) / kTermsRows, kMostTermsParts / 8);
}

uint64_t checksum(const void* data, int64_t bytes, const Parallel& parallel) {
  struct Call {
    const char* data;
    int64_t bytes;
    uint64_t (*run)(const void*, int64_t);
    std::vector<uint64_t> sums;
  } call{static_cast<const char*>(data), bytes, kernels().checksum, {}};
  if (bytes <= kChecksumRun) return call.run(data, bytes);
  call.sums.resize((bytes + kChecksumRun - 1) / kChecksumRun);
  const auto runs = [](int64_t first, int64_t last, void* p) {
    Call& c = *static_cast<Call*>(p);
    for (int64_t k = first; k < last; ++k) {
      const int64_t begin = k * kChecksumRun;
      c.sums[k] = c.run(c.data + begin, std::min(kChecksumRun, c.bytes - begin));
    }
  };
  parallel.run(0, call.sums.size(), kChecksumRuns, runs, &call);
  return call.run(call.sums.data(), call.sums.size() * sizeof(uint64_t));
}

template <class I>
static IndexRange range_of(const I* index, int64_t num_rows) {
  I low = index[0], high = index[0];
  bool rises = true;
  for (int64_t e = 1; e < num_rows; ++e) {  // no branches, so that the compiler vectorizes it
    low = std::min(low, index[e]), high = std::max(high, index[e]);
    rises &= index[e - 1] <= index[e];
  }
  return {int64_t(low), int64_t(high), rises};
}
IndexRange index_range(const void* index, bool is_long, int64_t num_rows) {
  if (num_rows == 0) return {0, -1, true};
  return is_long ? range_of(static_cast<const int64_t*>(index), num_rows)
                 : range_of(static_cast<const int32_t*>(index), num_rows);
}
void index_softmax(const ByIndexParams& p, const Parallel& parallel) {
  use_huge_pages(p.out, p.num_rows * p.columns * size_of(p.dtype));
  kernels().index_softmax(p, parallel);
}
void index_softmax_backward(const ByIndexParams& p, const Parallel& parallel) {
  use_huge_pages(p.out, p.num_rows * p.columns * size_of(p.dtype));
  kernels().index_softmax_backward(p, parallel);
}
void index_sum(const ByIndexParams& p, const Parallel& parallel) {
  use_huge_pages(p.out, p.num_groups * p.columns * size_of(p.dtype));
  kernels().index_sum(p, parallel);
}

namespace {
// Carries out a step: run(tasks, count, most_rows) does a part of its tasks.
template <class F>
void run_blocks(const BlockWork& work, const Parallel& parallel, const F& run) {
  struct Call {
    const BlockWork& work;
    const F& run;
  } call{work, run};
  const auto parts = [](int64_t first, int64_t last, void* p) {
    const Call& c = *static_cast<Call*>(p);
    const int64_t begin = c.work.cuts[first], end = c.work.cuts[last];
    if (begin < end) c.run(c.work.tasks.data() + begin, end - begin, c.work.most_rows);
  };
  if (!work.tasks.empty()) parallel.run(0, int64_t(work.cuts.size()) - 1, 1, parts, &call);
}
}  // namespace

void block_attention(const BlockParams& p, BlockPass pass, const Parallel& parallel) {
  const Kernels& k = kernels();
  const int threads = std::max(parallel.num_threads, 1);
  if (pass == BlockPass::forward) {
    use_huge_pages(p.out, p.num_rows * p.heads * p.value_dim * size_of(p.dtype));
    return run_blocks(block_work(p, true, false, false, threads), parallel,
                      [&](const BlockTask* tasks, int64_t count, int64_t most_rows) {
                        k.block_forward(p, tasks, count, most_rows);
                      });
  }
  struct Call {
    const BlockParams& p;
    const Kernels& k;
  } call{p, k};
  const auto deltas = [](int64_t first, int64_t last, void* c) {
    static_cast<Call*>(c)->k.block_deltas(static_cast<Call*>(c)->p, first, last);
  };
  if (p.num_rows) parallel.run(0, p.num_rows, 256, deltas, &call);
  if (pass == BlockPass::second)
    run_blocks(block_work(p, true, false, true, threads), parallel,
               [&](const BlockTask* tasks, int64_t count, int64_t most_rows) {
                 k.block_second(p, tasks, count, most_rows, true);
               });
  run_blocks(block_work(p, true, true, false, threads), parallel,
             [&](const BlockTask* tasks, int64_t count, int64_t most_rows) {
               if (pass == BlockPass::backward) {
                 k.block_backward(p, tasks, count, most_rows);
               } else {
                 k.block_second(p, tasks, count, most_rows, false);
               }
             });
}

int64_t attention_parts(const Csr& csr) { return kernels().attention_parts(csr); }
const char* isa() { return kernels().isa; }

}  // namespace dfgnn::cpu
