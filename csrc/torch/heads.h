// Between rows as layers have them, [n, heads * size], and as attention takes them, [n, heads, size]. All are
// views where the rows are contiguous.
#pragma once

#include "linear.h"

namespace dfgnn {

// `split_heads` turns a layer's feature rows [n, heads * size] into [n, heads, size], `join_heads` turns them
// back. heads = 0 says that the caller's rows are [n, heads, size] already: both leave them as they are.
inline void split_heads(const Checker& check, OptTensor& t, int64_t heads) {
  if (!heads || !t) return;
  check.require(heads > 0 && t->dim() == 2 && t->size(1) % heads == 0,
                "heads: expected tensors of two dimensions, and of a multiple of ", heads, " columns");
  t = reshaped(dense(*t), {t->size(0), heads, t->size(1) / heads});
}
inline void split_heads(const Checker& check, Tensor& t, int64_t heads) {
  OptTensor some = t;
  split_heads(check, some, heads);
  t = *some;
}
inline OptTensor join_heads(const OptTensor& t, int64_t heads) {
  if (!heads || !t || t->dim() < 3) return t;
  return reshaped(*t, {t->size(0), t->size(1) * t->size(2)});
}
// Reshapes vectors, one per head, to [heads, size], unless heads = 0.
inline OptTensor by_head(const Checker& check, const char* name, const OptTensor& t, int64_t heads) {
  if (!heads || !t) return t;
  check.require(t->numel() % heads == 0, name, ": expected a multiple of ", heads, " elements");
  return reshaped(dense(*t), {heads, t->numel() / heads});
}

}  // namespace dfgnn
