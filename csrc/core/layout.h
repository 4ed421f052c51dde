// How many lanes of a warp share a head; plans and the CUDA kernels' layouts (launch.cuh) both use it.
#pragma once

namespace dfgnn {

inline constexpr int kWarp = 32, kLoadBytes = 16;  // lanes of a warp; bytes that a lane loads at a time

// The number of lanes that share a head of `dim` elements of `bytes` each. A single lane takes a head that
// one load holds, unless there is only this head: then a warp of packed rows would take 32 rows, and wait for
// the longest of them. double has fewer layouts, because it serves for checking, not for speed.
constexpr int lanes_per_head(int heads, int dim, int bytes) {
  const int loads = (dim * bytes + kLoadBytes - 1) / kLoadBytes;
  if (bytes < 8 && loads == 1 && heads > 1) return 1;
  int lanes = bytes == 8 ? 4 : 2;
  while (lanes < loads && lanes < kWarp) lanes *= bytes == 8 ? 8 : 2;
  return lanes;
}

}  // namespace dfgnn
