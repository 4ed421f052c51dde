// A CPU graph that cpu_structure.cpp has made. cpu.cpp stores it under a number, as graph_handle does.
#pragma once

#include "checks.h"

namespace dfgnn {

struct CpuGraph {
  int64_t num_src, num_edges;
  Csr csr, reverse;
  bool has_reverse;
  std::vector<Tensor> held;  // the tensors that own the pointers' memory
};
int64_t keep_on_cpu(const CpuGraph&);

}  // namespace dfgnn
