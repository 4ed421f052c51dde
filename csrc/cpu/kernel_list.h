// The list of the kernels that every instruction set has. Of it are made their declarations, in a namespace
// per instruction set, and the tables of pointers to them in dispatch.cpp.
#pragma once

#include "blocks.h"
#include "by_index.h"
#include "checksum.h"
#include "edge_products.h"
#include "edge_terms.h"
#include "engine.h"
#include "pair_scores.h"
#include "second_order.h"
#include "terms.h"

// Expands to apply(type of the result, name, (types of the arguments)) for each kernel.
// clang-format off
#define DFGNN_KERNELS(apply)                                                       \
  apply(void, forward, (const ForwardParams&, const Parallel&))                    \
  apply(void, backward, (const BackwardParams&, const Parallel&, void*))           \
  apply(int64_t, attention_parts, (const Csr&))                                    \
  apply(int64_t, second_numbers, (const Csr&))                                     \
  apply(void, second_order, (const SecondParams&, const Parallel&))                \
  apply(void, sddmm, (const ProductParams&, const Parallel&))                      \
  apply(void, spmm, (const ProductParams&, const Parallel&))                       \
  apply(void, edge_dot, (const EdgeTermParams&, const Parallel&))                  \
  apply(void, edge_sum, (const EdgeTermParams&, const Parallel&))                  \
  apply(void, edge_outer, (const EdgeTermParams&, const Parallel&))                \
  apply(void, edge_products, (const EdgeProductParams&, const Parallel&))          \
  apply(void, edge_products_backward, (const EdgeProductParams&, const Parallel&)) \
  apply(void, pair_scores, (const PairScoreParams&, const Parallel&))              \
  apply(void, pair_sums, (const PairScoreParams&, const Parallel&))                \
  apply(int64_t, pair_parts, (const Csr&))                                         \
  apply(void, terms, (const TermsParams&, const Parallel&))                        \
  apply(void, terms_backward, (const TermsBackwardParams&, const Parallel&))       \
  apply(void, index_softmax, (const ByIndexParams&, const Parallel&))              \
  apply(void, index_softmax_backward, (const ByIndexParams&, const Parallel&))     \
  apply(void, index_sum, (const ByIndexParams&, const Parallel&))                  \
  apply(void, block_forward, (const BlockParams&, const BlockTask*, int64_t, int64_t))       \
  apply(void, block_deltas, (const BlockParams&, int64_t, int64_t))                          \
  apply(void, block_backward, (const BlockParams&, const BlockTask*, int64_t, int64_t))      \
  apply(void, block_second, (const BlockParams&, const BlockTask*, int64_t, int64_t, bool))  \
  apply(uint64_t, checksum, (const void*, int64_t))
// clang-format on

#define DFGNN_DECLARE(result, name, arguments) result name arguments;
