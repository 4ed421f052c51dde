// The CPU engine: fused attention over a graph, forward and backward.
//
// Plain data in, nothing out but the arrays that the parameters name; no torch. Threads are handed
// in. Results do not depend on the number of threads: every sum has an order that the plan fixes.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace dfgnn::cpu {

// run(begin, end, grain, fn, ctx) calls fn on disjoint ranges that cover [begin, end), in parallel.
using RangeFn = void (*)(int64_t begin, int64_t end, void* ctx);
// Whether short rows are worked on in groups (kernels/groups.h); automatic: by the plan and the shape.
enum class RowWay { automatic, grouped, single };
// Mean degree of a plan's items below which short rows are grouped, as measured: alone, a row costs most
// where it has many heads. Mirrored in dfgnn/plan/cost.py, for plans that are printed.
constexpr int64_t forward_degree(int64_t heads) { return 24 + 8 * heads; }
constexpr int64_t backward_degree(int64_t heads) { return 2 + 6 * heads; }
struct Parallel {
  void (*run)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* ctx);
  int num_threads;
  RowWay way = RowWay::automatic;
};

// The environment variable DFGNN_CPU_ROWS, "grouped" or "single", decides the way of rows instead, for tests.
// Items of a plan come in natural order: rows ascending, `begin` never decreasing.
void forward(const ForwardParams&, const Parallel&);
// edges: scratch of edge_scratch() numbers of the accumulators' type, or null.
void backward(const BackwardParams&, const Parallel&, void* edges);
void sddmm(const ProductParams&, const Parallel&);
void spmm(const ProductParams&, const Parallel&);

// How much memory of edges, [E, 2, H], keeps the pass over the sources from computing again what the one over
// the destinations did: weight and gradient of every edge and head. 0 where it would exceed the gradients of
// the nodes' features, is of no use, or the edges' ids are not given.
int64_t edge_scratch(const BackwardParams&);

// Whether items and splits name rows, edges and slots that there are.
bool in_range(const Csr&, int64_t num_edges);

// How many partial sums of grad_attn backward writes for this plan (BackwardParams::attn_parts).
int64_t attention_parts(const Csr&);

// The instruction set in use: "base", "avx2" or "avx512". The environment variable DFGNN_CPU_ISA
// forces one; std::runtime_error if this processor or this build does not have it.
const char* isa();

}  // namespace dfgnn::cpu
