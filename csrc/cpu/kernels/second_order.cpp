// Second derivatives of attention on the CPU: the backward of its backward, in two passes. The pass over the
// destinations (second_destinations.cpp) gathers keys, values and the cotangents of their gradients. Of these
// it computes four products per edge and head (raw, t_raw, p and u of second_edges.h), then the sums of each
// row, and it saves three scalars per edge and head: A, R and M of second_edges.h. The pass over the sources
// (second_sources.cpp) gathers rows of the destinations and adds them up, weighted by these scalars.
//
// Rows of up to kMostEdges edges are processed in groups, whose gathered feature rows stay in cache. Longer
// rows are processed in blocks of as many edges. Their sums can only be weighted when delta, tau and kappa of
// all edges are known: the pass over the destinations gathers a block's feature rows first for the four
// products, which it saves, and once more for the sums. For a split row, threads process its chunks in three
// steps: each is done for all chunks before the next one begins.
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
