// A warp's way through the edges of its items, in steps of a chunk. What comes next travels meanwhile: an
// item's first indices are read during the last step of the one before, its first rows, where registers
// suffice (EARLY), before the results of that one are written.
//
// A wait names one of a warp's six counters of loads, not a load. With the rows of a step loaded at its
// begin (`none`), the wait for its indices, of which the first come from memory and the others from `next`,
// also waits for those of the next step, just asked for: `first` and `early`, which load rows behind the step
// before, do not.
#pragma once

#include <type_traits>

#include "lanes.cuh"

namespace dfgnn::cuda {

// Position in the CSR of the edge that this lane owns in slot s of the step from edge `done` on; past the
// end, of the last edge, and of some edge where a sub-warp has none while others have: loads need no
// predicate then, and only additions are left out.
template <class C, int CHUNK>
__device__ __forceinline__ int position(const Place<C>& me, const Range& range, int done, int s) {
  constexpr int PERIOD = period_of(CHUNK, C::LPH);
  const int k = min(done + s * C::LPH + me.hl % PERIOD, range.count - 1);
  return max(range.first + k * me.stride, 0);
}
// The neighbours of item n from edge `done` on, or if it has no more, of the next item. EIDS: and behind them
// the ids of the edges.
template <class C, int CHUNK, bool EIDS = false, int S>
__device__ __forceinline__ void fetch(const Place<C>& me, const Csr& csr, int n, int done, int (&index)[S]) {
  Range range = me;
  if (!me.any(done)) {
    range = me.range_of(n + 1);
    done = 0;
    if (!__any_sync(kAll, range.count > 0)) return;
  }
  constexpr int OWN = EIDS ? S / 2 : S;
  repeat<OWN>([&](int s) {
    const int at = position<C, CHUNK>(me, range, done, s);
    index[s] = __ldg(csr.indices + at);
    if constexpr (EIDS) index[OWN + s] = edge_id(csr, at);
  });
}
template <class C, int CHUNK>
__device__ __forceinline__ int fetch_eid(const Place<C>& me, const Csr& csr, int done, int s) {
  return edge_id(csr, position<C, CHUNK>(me, me, done, s));
}

// f(full): whether all sub-warps have a whole chunk of edges left, as a type.
template <int CHUNK, class F>
__device__ __forceinline__ void whole_or_not(int left, F f) {
  if (__all_sync(kAll, left >= CHUNK)) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

// When the rows of an item's first step are loaded: after its own row was waited for, before that, or before
// the results of the item before are written.
enum class Ahead { none, first, early };

// The pass over all items, of which a kernel says what is done:
//   load_item()        starts the loads of the item that `me` is at
//   load_step()        starts the loads of a step, of the neighbours `index`
//   begin(row, n)      the n-th item begins
//   open()             takes the item's own row; only of items with edges where it waits (AHEAD = first)
//   step(done, left)   its edges done ... done + CHUNK of the sub-warp; `left` are there
//   finish(row, slot)  the item's results are written; `me` is at the next one already
template <int CHUNK, Ahead AHEAD, bool EIDS = false, class C, int S, class LoadItem, class LoadStep,
          class Begin, class Open, class Step, class Finish>
__device__ __forceinline__ void walk(Place<C>& me, const Csr& csr, int items, int (&index)[S],
                                     LoadItem load_item, LoadStep load_step, Begin begin, Open open,
                                     Step step, Finish finish) {
  constexpr bool EARLY = AHEAD == Ahead::early, FIRST = AHEAD == Ahead::first;
  int next[S];
  const auto load_early = [&] {
    if constexpr (EARLY) {
      load_item();
      if (me.any(0)) load_step();
    }
  };
  me.take(0);
  fetch<C, CHUNK, EIDS>(me, csr, 0, 0, index);
  load_early();
  const auto fetch_next = [&](int n) { fetch<C, CHUNK, EIDS>(me, csr, n, CHUNK, next); };
  for (int n = 0; n < items;) {
    if constexpr (!FIRST) fetch_next(n);
    const int row = me.row;
    if constexpr (!EARLY) load_item();
    begin(row, n);
    bool more = me.any(0);
    if constexpr (FIRST) {
      // Loads share counters: what waits for the first indices would wait for the next ones, were these
      // ahead of it. With open() for the others, too, compilers would take it before the loads.
      if (more) load_step();
      fetch_next(n);
      if (more) open();
    } else {
      open();
    }
    for (int done = 0; more;) {
      if constexpr (AHEAD == Ahead::none) load_step();
      step(done, me.count - done);
      done += CHUNK;
      more = me.any(done);
      if (more) {
        copy(index, next);
        if constexpr (AHEAD != Ahead::none) load_step();
        fetch<C, CHUNK, EIDS>(me, csr, n, done + CHUNK, next);
      }
    }
    const int slot = me.slot_of(n);
    if (++n < items) {
      me.take(n);
      copy(index, next);
      load_early();
    }
    finish(row, slot);
  }
}

}  // namespace dfgnn::cuda
