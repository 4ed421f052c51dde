// Graphs of the CPU under a number: cpu_structure.cpp makes them, cpu.cpp keeps them beside those of
// graph_handle.
#pragma once

#include "checks.h"

namespace dfgnn {

struct CpuGraph {
  int64_t num_src, num_edges;
  Csr csr, reverse;
  bool has_reverse;
  std::vector<Tensor> held;  // what the pointers point into
};
int64_t keep_on_cpu(const CpuGraph&);

}  // namespace dfgnn
