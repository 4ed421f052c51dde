// The launcher that merges the results of two calls of attention over different edges of the same rows.
// cuda/engine.h says what launchers have in common.
#pragma once

#include "../../core/params.h"

namespace dfgnn::cuda {

// Call k gave outs[k], and stats[k] = [m_k, s_k] of each row and head; a row without edges has m = inf and
// s = 0. With the share of the second call, w = exp(m_1 - m + s_1 - s):
//   m = max(m_0, m_1)    s = log(exp(m_0 - m + s_0) + exp(m_1 - m + s_1))    out = (1 - w) outs[0] + w
//   outs[1]
struct MergeParams {
  DType dtype;
  int64_t num_rows;
  int32_t heads, dim;              // dim elements take a multiple of 16 bytes
  const void *outs[2], *stats[2];  // [N, H, D] T, [N, H, 2] acc
  void *out, *merged, *weight;     // [N, H, D] T, m and s [N, H, 2] acc, w [N, H] acc
};

const char* merge(const MergeParams& params, void* stream);

}  // namespace dfgnn::cuda
