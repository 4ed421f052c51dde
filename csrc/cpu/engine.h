// The CPU engine: fused attention over a graph, forward and backward.
//
// It reads and writes only the arrays that the parameters name, and does not know torch: the caller passes a
// function that runs threads. Results do not depend on the number of threads, because the plan fixes the
// order of every sum.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace dfgnn::cpu {

using RangeFn = void (*)(int64_t begin, int64_t end, void* ctx);
// Whether short rows are processed in groups (kernels/groups.h). automatic: the plan and the shape decide.
enum class RowWay { automatic, grouped, single };
// Short rows are grouped if the mean number of edges of a plan's work items is below forward_degree, in
// backward below backward_degree. The values are measured: the more heads, the more a row costs that is
// processed alone. dfgnn/plan/cost.py repeats them to print plans.
constexpr int64_t forward_degree(int64_t heads) { return 24 + 8 * heads; }
constexpr int64_t backward_degree(int64_t heads) { return heads > 1 ? 2 + 6 * heads : 12; }
// The caller's threads. run(begin, end, grain, fn, ctx) calls fn(first, last, ctx) in parallel on disjoint
// ranges that cover [begin, end), of at least `grain` elements; ctx is any pointer.
struct Parallel {
  void (*run)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* ctx);
  int num_threads;
  RowWay way = RowWay::automatic;
};

// For tests, the environment variable DFGNN_CPU_ROWS, "grouped" or "single", overrides Parallel::way. The
// work items of a plan must have ascending rows and a `begin` that never decreases.
void forward(const ForwardParams&, const Parallel&);
// edges: scratch of edge_scratch() accumulators, or null.
void backward(const BackwardParams&, const Parallel&, void* edges);
void sddmm(const ProductParams&, const Parallel&);
void spmm(const ProductParams&, const Parallel&);

// Returns how many accumulators backward's scratch `edges` [E, 2, H] has. In it the pass over the
// destinations saves f alpha and grad_raw of each edge and head (params.h) for the pass over the sources,
// which would otherwise compute them again. Returns 0, for no scratch, if it would be larger than the
// gradients of the nodes' features (with dot also of the edges' features), for the additive score, whose
// backward has one pass over edges, and without Csr::eids.
int64_t edge_scratch(const BackwardParams&);

// Whether items and splits refer to existing rows, edges and slots, and the plan has no source partitions,
// which only CUDA kernels support.
bool in_range(const Csr&, int64_t num_edges);

// How many partial sums of grad_attn backward writes for this plan (BackwardParams::attn_parts).
int64_t attention_parts(const Csr&);

// Returns the instruction set in use: "base", "avx2" or "avx512". The environment variable DFGNN_CPU_ISA
// selects one; if this processor or this build does not have it, std::runtime_error is thrown.
const char* isa();

}  // namespace dfgnn::cpu
