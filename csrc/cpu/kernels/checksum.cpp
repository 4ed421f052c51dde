// The checksum of consecutive bytes by one thread. cpu/dispatch.cpp combines those of a larger array.
#include "kernels.h"
#include "simd.h"

namespace dfgnn::cpu::DFGNN_ISA {
namespace {

constexpr int kWords = 32;  // how many words of 64 bits are processed at a time, as lanes of vectors
constexpr int64_t kBlock = kWords * sizeof(uint64_t);
// A multiplier of multiply-with-carry generators: p = kMultiplier 2^32 - 1 is prime.
constexpr uint64_t kMultiplier = 4294957665u;
// kOdd gives each lane another first value; kMix mixes the lanes' bits at the end.
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u, kMix = 0xff51afd7ed558ccdu;

// Adds a block's words to the lanes (by exclusive or), and multiplies each lane by 2^-32 modulo p, so that a
// word's factor depends on its position. This takes one product of 32 bits, which every instruction set has
// for vectors.
inline void absorb(uint64_t* lanes, const unsigned char* block) {
  for (int k = 0; k < kWords; ++k) {
    uint64_t word;
    __builtin_memcpy(&word, block + k * sizeof word, sizeof word);
    word ^= lanes[k];
    lanes[k] = (word & 0xffffffffu) * kMultiplier + (word >> 32);
  }
}

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) {
  const unsigned char* from = static_cast<const unsigned char*>(data);
  uint64_t lanes[kWords];
  for (int k = 0; k < kWords; ++k) lanes[k] = kOdd * (2 * k + 1);
  int64_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) absorb(lanes, from + at);
  if (at < bytes) {
    unsigned char rest[kBlock] = {};
    __builtin_memcpy(rest, from + at, bytes - at);
    absorb(lanes, rest);
  }
  uint64_t sum = bytes;
  for (int k = 0; k < kWords; ++k) {
    sum = (sum ^ lanes[k]) * kMix;
    sum ^= sum >> 33;
  }
  return sum;
}

}  // namespace dfgnn::cpu::DFGNN_ISA
