// The main loop of a warp over the edges of its work items, a chunk of edges per iteration. Loads are issued
// ahead of their use: the indices of the next iteration (in an item's last iteration, those of the next
// item), and what Ahead names.
//
// The hardware tracks a warp's pending loads with six scoreboards. An instruction waits for a scoreboard, not
// for a load, and loads whose results are used after a branch, or in the next iteration, share one. Where the
// rows of an iteration are loaded at the end of the iteration before, the first use of a row therefore waits
// for all of them, and for the next indices. Where they are loaded at the beginning of their iteration,
// scores wait for their own loads alone. Which is better depends on registers, and was measured kernel by
// kernel.
#pragma once

#include <type_traits>

#include "lanes.cuh"

namespace dfgnn::cuda {

// How the lanes of a head share the edges of an iteration: lane hl owns the edges s * LPH + hl % PERIOD, for
// s < SLOTS.
template <class C, int CHUNK>
struct OwnEdges {
  static constexpr int SHARE = share_of(CHUNK), PERIOD = period_of(CHUNK, C::LPH), SLOTS = SHARE / PERIOD;
  // Edge u < SHARE of the iteration exists if u < left(rest), where the sub-warp has `rest` edges of the row
  // left. The minimum matters only where CHUNK was rounded up, so that lanes have slots for edges beyond it.
  static __device__ __forceinline__ int left(int rest) { return SHARE > CHUNK ? min(rest, CHUNK) : rest; }
};

// Position in the CSR of the edge that this lane owns in slot s of the iteration that begins with edge
// `done`. Past the end it is the last edge, and for a sub-warp without edges beside others that have some, it
// is any edge: loads then need no predicate, and only the additions are left out.
template <class C, int CHUNK>
__device__ __forceinline__ int position(const Place<C>& me, const Range& range, int done, int s) {
  constexpr int PERIOD = period_of(CHUNK, C::LPH);
  const int k = min(done + s * C::LPH + me.hl % PERIOD, range.count - 1);
  return max(range.first + k * me.stride, 0);
}
// index = the neighbours of the own edges of work item n in the iteration that begins with edge `done`. Where
// the item has no such edge in any sub-warp: those in the first iteration of the next item, if this has
// edges. EIDS: the second half of `index` = the edges' ids. `me` must be at item n.
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
// Loads and returns the id of the edge that this lane owns in slot s.
template <class C, int CHUNK>
__device__ __forceinline__ int fetch_eid(const Place<C>& me, const Csr& csr, int done, int s) {
  return edge_id(csr, position<C, CHUNK>(me, me, done, s));
}
// Returns the id of the edge that this lane owns in slot s. EIDS: it was loaded with the neighbours and is in
// `index`.
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

// Calls f with true_type where all sub-warps have a full chunk of edges left, else with false_type.
template <int CHUNK, class F>
__device__ __forceinline__ void whole_or_not(int left, F f) {
  if (__all_sync(kAll, left >= CHUNK)) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

// What is loaded ahead of the work item, or of the iteration, that needs it.
//   none: the indices alone
//   own: an item's own row, before the results of the item before it are written
//   rows: the neighbours' rows of an iteration, at the end of the iteration before it; those of an item's
//     first iteration, before the item's own row is waited for
//   all: both, and the rows of an item's first iteration before the results of the item before are written
enum class Ahead { none, own, rows, all };

// The main loop over all work items of a warp. A kernel passes what it does:
//   load_item()          issues the loads of the item that `me` is at
//   load_edges()         issues the loads of an iteration: the rows of the neighbours in `index`
//   begin(row, n)        begins the n-th item: sets its sums to 0, copies what load_item() loaded
//   open()               unpacks the item's own row; with Ahead::rows it is called for items with edges only
//   iterate(done, left)  computes the sub-warp's edges from `done` on: CHUNK of them, or `left` if these are
//                        fewer
//   finish(row, slot)    writes the item's results; `me` is at the next item already, and load_item() may
//                        have been called for that one
template <int CHUNK, Ahead AHEAD, bool EIDS = false, class C, int S, class LoadItem, class LoadEdges,
          class Begin, class Open, class Iterate, class Finish>
__device__ __forceinline__ void main_loop(Place<C>& me, const Csr& csr, int items, int (&index)[S],
                                          LoadItem load_item, LoadEdges load_edges, Begin begin, Open open,
                                          Iterate iterate, Finish finish) {
  constexpr bool ALL = AHEAD == Ahead::all, ROWS = AHEAD == Ahead::rows, OWN = AHEAD == Ahead::own || ALL;
  constexpr bool IN_ITS_ITERATION = !ALL && !ROWS;  // rows are loaded in the iteration that uses them
  int next[S] = {};
  me.take(0);
  const auto fetch_from = [&](int n, int done) { fetch<C, CHUNK, EIDS>(me, csr, n, done, next); };
  const auto load_ahead = [&] {
    if constexpr (OWN) load_item();
    if constexpr (!IN_ITS_ITERATION) copy(index, next);
    if constexpr (ALL) {
      if (me.any(0)) load_edges();
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
      // If open() were also called for items without edges, the compiler would move it in front of the loads.
      if (more) load_edges();
      fetch_from(n, CHUNK);
      if (more) open();
    } else {
      if (IN_ITS_ITERATION && !more) fetch_from(n, CHUNK);
      open();
    }
    for (int done = 0; more;) {
      if constexpr (IN_ITS_ITERATION) {
        copy(index, next);
        fetch_from(n, done + CHUNK);
        load_edges();
      }
      iterate(done, me.count - done);
      done += CHUNK;
      more = me.any(done);
      if (!IN_ITS_ITERATION && more) {
        copy(index, next);
        load_edges();
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
