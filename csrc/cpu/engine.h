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
// Short rows are grouped if the mean degree of a plan's items is below this. The values are measured: a row
// processed alone costs most with many heads. dfgnn/plan/cost.py repeats them to print plans.
constexpr int64_t forward_degree(int64_t heads) { return 24 + 8 * heads; }
constexpr int64_t backward_degree(int64_t heads) { return heads > 1 ? 2 + 6 * heads : 12; }
// The caller's threads. run(begin, end, grain, fn, ctx) calls fn(first, last, ctx) in parallel on disjoint
// ranges that cover [begin, end), of at least `grain` elements.
struct Parallel {
  void (*run)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* ctx);
  int num_threads;
  RowWay way = RowWay::automatic;
};

// For tests, the environment variable DFGNN_CPU_ROWS, "grouped" or "single", overrides Parallel::way. The
// items of a plan must have ascending rows and a `begin` that never decreases.
void forward(const ForwardParams&, const Parallel&);
// edges: scratch of edge_scratch() elements, or null.
void backward(const BackwardParams&, const Parallel&, void* edges);
void sddmm(const ProductParams&, const Parallel&);
void spmm(const ProductParams&, const Parallel&);

// How many elements the scratch [E, 2, H] has. In it the pass over the destinations saves each edge's weight
// and gradient for the pass over the sources, which would otherwise compute them again. It is 0 if the
// scratch would exceed the gradients of the nodes' features (with dot also those of the edges' features), if
// it would be of no use, or if there are no edge ids.
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
