// Rows of several blocks in backward's pass over the destinations. The residual of delta, which is what delta
// lacks because `out` is rounded (EdgeGradients::guess in gradients.h), is known only after the last of a
// row's edges. Therefore the pass runs over these rows twice: first it computes scores and g . v, then sums.
// In between a few scalars per edge and head are saved, of one row at a time.
//
// The chunks of a split row may belong to different threads: Pieces runs over all chunks of a few rows, and
// then over the same chunks again. Their scalars are saved up to a limit, and computed again beyond it.
#pragma once

#include "gradients.h"
#include "schedule.h"

namespace dfgnn::cpu::DFGNN_ISA {

// The most scalars that chunks of split rows may save at a time, unless the gradients of query, key and value
// have more elements: then that number (run_pieces in backward.cpp).
constexpr int64_t kMostKept = int64_t(1) << 24;
// How many chunks of split rows per thread are processed together.
constexpr int64_t kPiecesPerThread = 4;

// Returns the number of blocks of a work item.
static inline int64_t num_blocks(const Item& item) { return (item.end - item.begin + kBlock - 1) / kBlock; }

// Functors for EdgeGradients::each_guess, which calls them with each array of a block, of `size` elements:
// SaveArrays copies the arrays to `to`, one behind the other, RestoreArrays restores them, CountArrays counts
// them. An array of constants is restored by letting its pointer point to the copy.
template <class A>
struct SaveArrays {
  A* to;
  int64_t size;
  void operator()(const A* array) {
    __builtin_memcpy(to, array, std::size_t(size) * sizeof(A));
    to += size;
  }
};
template <class A>
struct RestoreArrays {
  const A* from;
  int64_t size;
  void operator()(A* array) {
    __builtin_memcpy(array, from, std::size_t(size) * sizeof(A));
    from += size;
  }
  void operator()(const A*& array) {
    array = from;
    from += size;
  }
};
struct CountArrays {
  int count = 0;
  template <class Array>
  void operator()(const Array&) {
    ++count;
  }
};

// Processes the chunks of split rows in two runs, several rows at a time: enough rows for all threads, and
// few enough to be in cache for the second run. A chunk is named by its number k among those processed
// together.
template <class A>
class Pieces {
 public:
  // numbers: how many scalars a block saves. least: rows are taken until they have this number of chunks.
  // most: how many scalars may be saved at a time; those of further chunks are computed again.
  Pieces(const Csr& csr, int heads, int64_t numbers, int64_t least, int64_t most)
      : csr_(csr),
        heads_(heads),
        least_(least),
        items_(csr.num_slots),
        slots_(csr.num_slots),
        rests_(csr.num_slots * heads),
        kept_(0) {
    for (int64_t slot = 0; slot < csr.num_slots; ++slot) items_[slot] = -1;
    int64_t blocks = 1, longest = 1;
    for (int64_t k = 0; k < csr.num_items; ++k) {
      const Item& item = csr.items[k];
      if (item.slot < 0) continue;
      items_[item.slot] = k;
      blocks = num_blocks(item) > blocks ? num_blocks(item) : blocks;
    }
    for (int64_t k = 0; k < csr.num_splits; ++k) {
      const int64_t pieces = csr.splits[k].slot_end - csr.splits[k].slot_begin;
      longest = pieces > longest ? pieces : longest;
    }
    of_piece_ = blocks * numbers;
    const int64_t wanted = least + longest, room = most / of_piece_;
    num_kept_ = wanted < room ? wanted : room;
    kept_.replace(num_kept_ * of_piece_);
  }

  const Item& item(int64_t k) const { return csr_.items[items_[slots_[k]]]; }
  // The residuals of delta [H]: the first run writes what chunk k contributes, the second reads its row's
  // sum.
  A* rest(int64_t k) const { return rests_ + k * heads_; }
  // Where the scalars of chunk k are saved, or null if they are not.
  A* kept(int64_t k) const { return k < num_kept_ ? kept_ + k * of_piece_ : nullptr; }

  // For a few rows at a time: calls first(k) for all their chunks k, adds up rest() over each row, calls
  // whole(row, rest) for all rows, and then second(k) for the chunks.
  template <class First, class Whole, class Second>
  void walk(const Parallel& parallel, const First& first, const Whole& whole, const Second& second) {
    for (int64_t split = 0, end = 0; split < csr_.num_splits; split = end) {
      int64_t count = 0;
      for (end = split; end < csr_.num_splits && (end == split || count < least_); ++end)
        for (int64_t slot = csr_.splits[end].slot_begin; slot < csr_.splits[end].slot_end; ++slot)
          if (items_[slot] >= 0 && count < csr_.num_slots) slots_[count++] = slot;
      parallel_range(parallel, count, 1, first);
      for (int64_t k = split, piece = 0; k < end; ++k) {
        const int64_t from = piece;
        while (piece < count && slots_[piece] < csr_.splits[k].slot_end) ++piece;
        if (piece > from) whole(csr_.splits[k].row, sum_rests(from, piece));
      }
      parallel_range(parallel, count, 1, second);
    }
  }

 private:
  // Replaces the residuals of the chunks [first, last) by their sum, and returns it.
  const A* sum_rests(int64_t first, int64_t last) {
    for (int h = 0; h < heads_; ++h) {
      A sum = 0;
      for (int64_t k = first; k < last; ++k) sum += rest(k)[h];
      for (int64_t k = first; k < last; ++k) rest(k)[h] = sum;
    }
    return rest(first);
  }

  const Csr& csr_;
  int heads_;
  int64_t least_;          // rows are taken until they have this number of chunks
  int64_t of_piece_;       // the most scalars that a chunk saves
  int64_t num_kept_;       // how many of the chunks processed together save scalars
  Buffer<int64_t> items_;  // the work item of each slot, or -1
  Buffer<int64_t> slots_;  // the slots of the chunks being processed, by their number k
  Buffer<A> rests_;        // [chunks being processed, H]
  Buffer<A> kept_;         // [num_kept_, of_piece_]
};

}  // namespace dfgnn::cpu::DFGNN_ISA
