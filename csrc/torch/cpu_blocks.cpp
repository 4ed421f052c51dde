// The operators of attention within blocks on the CPU.
#include <algorithm>

#include "../cpu/blocks.h"
#include "blocks.h"
#include "parallel.h"

namespace dfgnn {
namespace {

struct CpuBlocks {
  struct Scope {
    explicit Scope(const Tensor&) {}
  };

  static Tensor offsets(const Checker& check, const char* name, const Tensor& given, int64_t end) {
    const int64_t count = given.size(0);
    const Tensor from = given.is_contiguous() ? given : torch::stable::contiguous(given);
    Tensor to = make(from, {count}, ScalarType::Long);
    int64_t* x = static_cast<int64_t*>(to.mutable_data_ptr());
    const bool is_long = from.scalar_type() == ScalarType::Long;
    int64_t sum = 0, most = 0;
    for (int64_t b = 0; b < count; ++b) {
      x[b] =
          is_long ? static_cast<const int64_t*>(data(from))[b] : static_cast<const int32_t*>(data(from))[b];
      check.require(b == 0 || x[b] >= x[b - 1], name, ": expected numbers that never decrease, got ",
                    x[b - (b > 0)], " before ", x[b]);
      sum += x[b];
      most = b ? std::max(most, x[b] - x[b - 1]) : 0;
    }
    check.require(x[0] >= 0 && x[count - 1] <= end, name, ": expected numbers in [0, ", end, "], got ",
                  x[0] < 0 ? x[0] : x[count - 1]);
    // Rows need not be in a block, so that numbers of two other kinds would pass, with a wrong result.
    check.require(count != end || x[count - 1] == end || most > 1, name,
                  ": expected blocks + 1 numbers, got a batch vector");
    check.require(x[0] == 0 || sum != end, name, ": expected where blocks begin, got their sizes");
    return to;
  }
  static int64_t block_items(const BlockParams&) { return 0; }
  static void block_attention(const BlockParams& p, BlockPass pass, const Tensor&) {
    cpu::block_attention(p, pass, parallel());
  }
};

}  // namespace
}  // namespace dfgnn

STABLE_TORCH_LIBRARY_IMPL(dfgnn, CPU, m) { dfgnn::BlockAttention<dfgnn::CpuBlocks>::register_ops(m); }
