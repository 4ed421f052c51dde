// What plans and CUDA's layouts (launch.cuh) agree on: how many lanes of a warp share a head.
#pragma once

namespace dfgnn {

inline constexpr int kWarp = 32, kLoadBytes = 16;  // of one load of a lane

// Of a head of `dim` elements of `bytes` each. One lane where a load holds the head and there are several: of
// a single one, rows would be too many for a warp. Double has few layouts: it is there for checking, not for
// speed.
constexpr int lanes_per_head(int heads, int dim, int bytes) {
  const int loads = (dim * bytes + kLoadBytes - 1) / kLoadBytes;
  if (bytes < 8 && loads == 1 && heads > 1) return 1;
  int lanes = bytes == 8 ? 4 : 2;
  while (lanes < loads && lanes < kWarp) lanes *= bytes == 8 ? 8 : 2;
  return lanes;
}

}  // namespace dfgnn
