// Second derivatives of attention on the CPU: the backward of its backward, in two passes. The pass over the
// destinations (second_destinations.cpp) gathers keys, values and their cotangents, computes four products
// per edge and head, then the sums of each row, and saves three scalars per edge and head: A, R and M of
// second_edges.h. The pass over the sources (second_sources.cpp) gathers rows of the destinations and adds
// them up, weighted by these scalars.
//
// Rows of up to EdgeMajor::kEdges edges are processed in groups, whose gathered rows stay in cache. Longer
// rows are processed in blocks: the pass over the destinations saves the four products of each block, and
// gathers its rows twice. It processes the chunks of a split row together, by all threads, in three steps.
#include "kernels.h"
#include "second_call.h"

namespace dfgnn::cpu::DFGNN_ISA {

int64_t second_numbers(const Csr& destinations) {
  bool longer = destinations.num_splits > 0;
  for (int64_t k = 0; k < destinations.num_items; ++k)
    longer |= destinations.items[k].end - destinations.items[k].begin > kMostEdges;
  return longer ? 4 : 3;
}

void second_order(const SecondParams& p, const Parallel& parallel) {
  with_type(p.dtype, [&](auto type) {
    const Call<decltype(type)> call(p);
    second_destinations(call, parallel);
    second_sources(call, parallel);
  });
}

}  // namespace dfgnn::cpu::DFGNN_ISA
