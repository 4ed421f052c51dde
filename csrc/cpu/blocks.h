// Attention among all pairs within blocks (core/blocks.h). A task is a range of a block's queries and one of
// its keys, for one head. A short block is one task; of a long one, each range of queries is a task and, in
// passes with gradients of keys, each range of keys another. Which it is depends on the block's lengths
// alone, so that sums run in the same order whatever the number of threads.
#pragma once

#include "core/blocks.h"
#include "engine.h"

namespace dfgnn::cpu {

struct BlockTask {
  int64_t row_begin, row_end, key_begin, key_end;
  int32_t head;
  bool to_rows, to_keys;  // whether it writes results of its queries, of its keys
  bool one_tile;          // whether the block's keys are one tile (kBlockKeys)
};

// A tile has kBlockRows queries and kBlockKeys keys. A task has at most kTaskRows queries, unless it writes
// results of keys alone.
constexpr int kBlockRows = 64, kBlockKeys = 128, kTaskRows = 512;

// offsets and key_offsets must be int64, ascend, begin at 0 or later and end with the rows or before.
void block_attention(const BlockParams&, BlockPass, const Parallel&);

}  // namespace dfgnn::cpu
