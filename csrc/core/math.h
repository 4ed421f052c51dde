// Scalar functions that CPU and CUDA kernels share: LeakyReLU, and dropout's random numbers.
#pragma once

#include <cstdint>

#include "params.h"

#ifdef __CUDACC__
#define DFGNN_HD __host__ __device__ __forceinline__
#else
#define DFGNN_HD inline
#endif

namespace dfgnn {

// LeakyReLU(z), and its derivative with respect to z. slope: the factor of negative z.
template <typename A>
DFGNN_HD A leaky_relu(A z, A slope) {
  return z > A(0) ? z : slope * z;
}
template <typename A>
DFGNN_HD A leaky_relu_grad(A z, A slope) {
  return z > A(0) ? A(1) : slope;
}

// Four words of 32 random bits each.
struct Random4 {
  uint32_t x[4];
};

// Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the random words of a
// key, which is the seed, and a counter c0 ... c3.
DFGNN_HD Random4 philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0;
    const uint64_t b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The 32 random bits of edge `eid` (position in the user's order) and head `head`. They do not depend on
// schedule, backend or direction, so that backward can compute the mask of forward again. One call of philox
// returns the words of four heads.
DFGNN_HD uint32_t dropout_bits(uint64_t seed, uint32_t eid, uint32_t head) {
  const Random4 r = philox(seed, eid, 0, head >> 2, 0);
  const uint32_t lane = head & 3;
  return lane == 0 ? r.x[0] : lane == 1 ? r.x[1] : lane == 2 ? r.x[2] : r.x[3];
}

}  // namespace dfgnn
