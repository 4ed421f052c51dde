// The tasks of a step of attention within blocks (blocks.h).
#pragma once

#include <vector>

#include "blocks.h"

namespace dfgnn::cpu {

struct BlockWork {
  std::vector<BlockTask> tasks;
  std::vector<int64_t> cuts;  // where the parts of about equal cost begin, and the number of tasks
  int64_t most_rows = 0;      // the most queries of a task that writes results of them
};

// The tasks, in at most `parts` parts. of_rows, of_keys: whether the step computes results of queries, of
// keys. long_rows_alone: only blocks with more keys than a tile has take part.
BlockWork block_work(const BlockParams& p, bool of_rows, bool of_keys, bool long_rows_alone, int parts);

}  // namespace dfgnn::cpu
