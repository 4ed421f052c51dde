// How attention within blocks is divided into tasks (blocks.h).
#include "blocks.h"

#include <algorithm>

#include "block_tasks.h"

namespace dfgnn::cpu {

namespace {

// Calls f(first row, last row, first key, last key) for every block, and for the rows and keys before the
// first block and behind the last one, which have no partners.
template <class F>
void for_blocks(const BlockParams& p, F f) {
  const auto *rows = static_cast<const int64_t*>(p.offsets),
             *keys = static_cast<const int64_t*>(p.key_offsets);
  const int64_t last = p.num_blocks;
  f(0, rows[0], 0, 0), f(0, 0, 0, keys[0]);
  for (int64_t b = 0; b < last; ++b) f(rows[b], rows[b + 1], keys[b], keys[b + 1]);
  f(rows[last], p.num_rows, 0, 0), f(0, 0, keys[last], p.num_keys);
}

}  // namespace

BlockWork block_work(const BlockParams& p, bool of_rows, bool of_keys, bool long_rows_alone, int parts) {
  BlockWork work;
  std::vector<int64_t> costs;
  const auto add = [&](int64_t row, int64_t row_end, int64_t key, int64_t key_end, bool to_rows, bool to_keys,
                       bool one_tile) {
    // The constant and the sum are about what copying rows costs compared with the products of a pair.
    const int64_t rows = row_end - row, keys = key_end - key, cost = rows * keys + 32 * (rows + keys) + 256;
    for (int32_t head = 0; head < p.heads; ++head) {
      work.tasks.push_back({row, row_end, key, key_end, head, to_rows, to_keys, one_tile});
      costs.push_back(cost);
    }
    if (to_rows) work.most_rows = std::max(work.most_rows, rows);
  };
  for_blocks(p, [&](int64_t row, int64_t row_end, int64_t key, int64_t key_end) {
    const int64_t rows = row_end - row, keys = key_end - key;
    const bool one_tile = keys <= kBlockKeys;
    if (long_rows_alone && one_tile) return;
    if (rows == 0 && (!of_keys || keys == 0)) return;
    if (rows <= kTaskRows && (!of_keys || keys <= kTaskRows))
      return add(row, row_end, key, key_end, of_rows, of_keys, one_tile);
    for (int64_t r = row; of_rows && r < row_end; r += kTaskRows)
      add(r, std::min(r + kTaskRows, row_end), key, key_end, true, false, one_tile);
    for (int64_t k = key; of_keys && k < key_end; k += kBlockKeys)
      add(row, row_end, k, std::min(k + kBlockKeys, key_end), false, true, one_tile);
  });
  int64_t total = 0, passed = 0;
  for (const int64_t cost : costs) total += cost;
  work.cuts = {0};
  for (size_t k = 0; k < costs.size(); ++k) {
    passed += costs[k];
    if (passed >= total * int64_t(work.cuts.size()) / parts && int(work.cuts.size()) < parts)
      work.cuts.push_back(int64_t(k) + 1);
  }
  work.cuts.push_back(int64_t(costs.size()));
  return work;
}

}  // namespace dfgnn::cpu
