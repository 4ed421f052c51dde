// Passes a planned graph from cpu_structure.cpp, which makes it, to cpu.cpp, which stores it under a number,
// as graph_handle does (graphs.h).
#pragma once

#include "checks.h"

namespace dfgnn {

struct CpuGraph {
  int64_t num_src, num_edges;
  Csr csr, reverse;
  bool has_reverse;
  std::vector<Tensor> held;  // the tensors that own the memory to which csr and reverse point
};
// Stores the graph, and returns its number.
int64_t keep_on_cpu(const CpuGraph&);

}  // namespace dfgnn
