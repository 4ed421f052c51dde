// A warp's way through the edges of its items, in steps of a chunk. What comes next travels meanwhile: the
// indices of the next step, an item's first ones during the last step of the one before, and what Ahead says.
//
// A wait names one of a warp's six counters of loads, not a load, and loads whose results are used behind a
// branch, or in the next turn of a loop, share one. With the rows of a step asked for behind the step before,
// what needs the first of them waits for all, and for the next indices. With all of a step asked for at its
// begin, scores are waited for alone. Which is better depends on registers, and was measured.
#pragma once

#include <type_traits>

#include "lanes.cuh"

namespace dfgnn::cuda {

// How the lanes of a head share the edges of an iteration: lane hl owns the edges s * LPH + hl % PERIOD, s <
// SLOTS.
template <class C, int CHUNK>
struct OwnEdges {
  static constexpr int SHARE = share_of(CHUNK), PERIOD = period_of(CHUNK, C::LPH), SLOTS = SHARE / PERIOD;
  // Edges of the iteration that exist, where `rest` edges of the row are left.
  static __device__ __forceinline__ int left(int rest) { return SHARE > CHUNK ? min(rest, CHUNK) : rest; }
};

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
// The id of the edge that this lane owns in slot s: EIDS, of those that came with `index`.
template <class C, int CHUNK, bool EIDS, int S>
__device__ __forceinline__ int eid_of(const Place<C>& me, const Csr& csr, const int (&index)[S], int done,
                                      int s) {
  if constexpr (EIDS) {
    int eid = index[S / 2];
    repeat<S / 2>([&](int k) { eid = k == s ? index[S / 2 + k] : eid; });
    return eid;
  } else {
    return fetch_eid<C, CHUNK>(me, csr, done, s);
  }
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

// What is asked for before the results of an item, or of a step, are there.
//   none: indices alone
//   own: the next item's own row, before the results of the one before are written
//   rows: a step's rows, behind the step before; of an item's first step, before its own row is waited for
//   all: both, and an item's first rows before the results of the one before are written
enum class Ahead { none, own, rows, all };

// The pass over all items, of which a kernel says what is done:
//   load_item()        starts the loads of the item that `me` is at
//   load_step()        starts the loads of a step, of the neighbours `index`
//   begin(row, n)      the n-th item begins
//   open()             takes the item's own row; only of items with edges where it waits (AHEAD = rows)
//   step(done, left)   its edges done ... done + CHUNK of the sub-warp; `left` are there
//   finish(row, slot)  the item's results are written; `me` is at the next one already
template <int CHUNK, Ahead AHEAD, bool EIDS = false, class C, int S, class LoadItem, class LoadStep,
          class Begin, class Open, class Step, class Finish>
__device__ __forceinline__ void walk(Place<C>& me, const Csr& csr, int items, int (&index)[S],
                                     LoadItem load_item, LoadStep load_step, Begin begin, Open open,
                                     Step step, Finish finish) {
  constexpr bool ALL = AHEAD == Ahead::all, ROWS = AHEAD == Ahead::rows, OWN = AHEAD == Ahead::own || ALL;
  constexpr bool AT_ONCE = !ALL && !ROWS;  // a step's indices are taken, the next ones and its rows asked for
  int next[S] = {};
  me.take(0);
  const auto fetch_from = [&](int n, int done) { fetch<C, CHUNK, EIDS>(me, csr, n, done, next); };
  const auto load_ahead = [&] {
    if constexpr (OWN) load_item();
    if constexpr (!AT_ONCE) copy(index, next);
    if constexpr (ALL) {
      if (me.any(0)) load_step();
    }
  };
  fetch_from(0, 0);
  load_ahead();
  for (int n = 0; n < items;) {
    const int row = me.row;
    bool more = me.any(0);
    if constexpr (ALL) fetch_from(n, CHUNK);
    if constexpr (!OWN) load_item();
    begin(row, n);
    if constexpr (ROWS) {
      // With open() for items without edges, too, compilers would take it before the loads.
      if (more) load_step();
      fetch_from(n, CHUNK);
      if (more) open();
    } else {
      if (AT_ONCE && !more) fetch_from(n, CHUNK);
      open();
    }
    for (int done = 0; more;) {
      if constexpr (AT_ONCE) {
        copy(index, next);
        fetch_from(n, done + CHUNK);
        load_step();
      }
      step(done, me.count - done);
      done += CHUNK;
      more = me.any(done);
      if (!AT_ONCE && more) {
        copy(index, next);
        load_step();
        fetch_from(n, done + CHUNK);
      }
    }
    const int slot = me.slot_of(n);
    if (++n < items) {
      me.take(n);
      load_ahead();
    }
    finish(row, slot);
  }
}

}  // namespace dfgnn::cuda
