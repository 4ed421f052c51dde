// Launches both passes of the backward of attention's backward, for one type of features. A team is the warp
// or block that takes a row (teams.cuh).
#pragma once

#include "../launch.cuh"
#include "destinations.cuh"
#include "second_order.h"
#include "sources.cuh"

namespace dfgnn::cuda {

// The most blocks per multiprocessor in GATv2's pass over the destinations, where each team writes a partial
// sum of grad_attn: kPartBlocks for teams that are warps, kPartTeams for teams that are blocks.
inline constexpr int kPartBlocks = 8, kPartTeams = 2;

// grid.x of a pass, for teams of `warps` warps. Teams of one warp take the rows that the plan does not split,
// larger teams those that it splits. with_parts: whether each team writes a partial sum, so that there should
// be few blocks.
inline dim3 blocks_of_teams(const Csr& csr, int warps, bool with_parts) {
  const int64_t blocks = warps == 1 ? blocks_of(csr.num_items, kWarps).x : csr.num_splits;
  const int64_t most = int64_t(device().multiprocessors) * (warps == 1 ? kPartBlocks : kPartTeams);
  return dim3(unsigned(with_parts ? std::min(blocks, most) : blocks));
}
// How many teams of `warps` warps, and so how many partial sums, GATv2's pass over the destinations has.
inline int64_t count_teams(const Csr& csr, int warps) {
  return int64_t(blocks_of_teams(csr, warps, true).x) * (warps == 1 ? kWarps : 1);
}

// Returns the fewest lanes whose loads of `vec` columns cover a head (32 at most), and how many such heads
// fit into a warp.
inline HeadTile head_tile(const Shape& s, int vec) {
  HeadTile tile{1, 1};
  while (tile.lanes < 32 && tile.lanes * vec < s.value_dim) tile.lanes *= 2;
  while (tile.heads < s.heads && tile.lanes * tile.heads < 32) tile.heads *= 2;
  return tile;
}

// Launches the part of a pass that teams of WARPS warps take, unless there are no rows for such teams.
template <typename T, Score SCORE, int WARPS>
void second_pass(const SecondParams& p, bool sources, cudaStream_t stream) {
  const HeadTile tile = head_tile(p.shape, kVec<T>);
  const Csr& csr = sources ? p.reverse : p.csr;
  dim3 grid = blocks_of_teams(csr, WARPS, SCORE == Score::additive_v2 && !sources);
  if (!grid.x) return;
  grid.y = blocks_of(p.shape.heads, tile.heads).x;
  const int threads = 32 * block_warps(WARPS);
  if (sources)
    launch(stream, grid, threads, 0, second_sources_kernel<T, SCORE, WARPS>, p, tile);
  else
    launch(stream, grid, threads, 0, second_destinations_kernel<T, SCORE, WARPS>, p, tile,
           WARPS == 1 ? int64_t(0) : count_teams(csr, 1));
}

// Launches the destinations' pass, whose factors the sources' pass reads, and then the sources' pass.
template <typename T, Score SCORE>
void second_passes(const SecondParams& p, cudaStream_t stream) {
  for (bool sources : {false, true}) {
    second_pass<T, SCORE, 1>(p, sources, stream);
    second_pass<T, SCORE, kTeamWarps>(p, sources, stream);
  }
}

// This is instantiated in second_*.cu.
template <typename T>
void second_order_of(const SecondParams& p, cudaStream_t stream) {
  if (p.score == Score::additive) return second_passes<T, Score::additive>(p, stream);
  if (p.score == Score::dot) return second_passes<T, Score::dot>(p, stream);
  second_passes<T, Score::additive_v2>(p, stream);
}

}  // namespace dfgnn::cuda
