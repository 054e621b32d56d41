// csrc/tensor_core.cuh for the emulator: its PTX as plain C++. What follows "one-shot" there is kept; the test appends it.
#pragma once

#include "emulator.h"

#ifndef TFM_DEFERRED
#define TFM_DEFERRED 0
#endif

namespace tfm {

constexpr int MAX_PENDING = 32;
constexpr double LOG2E = 1.4426950408889634;

inline float bf16_of(uint32_t pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); }

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Held {
    uint32_t a[4], b[2];
  } all[32];
  emulator::exchange(Held{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float left = bf16_of(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2);
      const float right = bf16_of(all[column * 4 + k % 8 / 2].b[k / 8], k % 2);
      sum = fmaf(left, right, sum);
    }
    d[i] += sum;
  }
}

inline void load_any(uint32_t (&r)[4], const void* row, bool transposed) {
  const void* all[32];
  emulator::exchange(row, all);
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    unsigned banks = 0;
    for (int line = 0; line < 8; ++line) banks |= 1u << (reinterpret_cast<uintptr_t>(all[i * 8 + line]) / 16 % 8);
    emulator::conflicts += banks != 0xff;
    uint16_t pair[2];
    for (int half = 0; half < 2; ++half) {
      const int line = transposed ? 2 * t + half : g, column = transposed ? g : 2 * t + half;
      pair[half] = static_cast<const uint16_t*>(all[i * 8 + line])[column];
    }
    r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
inline void load_matrices(uint32_t (&r)[4], const void* row) { load_any(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { load_any(r, row, true); }

inline uint32_t transpose_8x8(uint32_t x) {
  uint32_t all[32];
  emulator::exchange(x, all);
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  const auto at = [&](int row) { return all[row * 4 + g / 2] >> (g % 2 * 16) & 0xffffu; };
  return at(2 * t) | at(2 * t + 1) << 16;
}

// arrive when they are waited for, not before
inline void copy_async_16(void* to, const void* from, bool real) {
  emulator::block->fibers[emulator::block->current].copies.push_back({to, real ? from : nullptr});
}
inline void wait_copies() {
  auto& copies = emulator::block->fibers[emulator::block->current].copies;
  for (const auto& copy : copies) copy.from ? memcpy(copy.to, copy.from, 16) : memset(copy.to, 0, 16);
  copies.clear();
}

template <int TERMS>
void split_pair(float x, float y, uint32_t (&terms)[TERMS]) {
  for (int i = 0; i < TERMS; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    memcpy(&terms[i], &pair, 4);
    x -= bf16_of(terms[i], 0);
    y -= bf16_of(terms[i], 1);
  }
}

// low half: arrivals still missing; bit 32: complete. Memory that was never a barrier counts as complete.
inline void barrier_init(uint64_t* barrier, int arrivals) { *barrier = arrivals; }
inline void barrier_arrive(uint64_t* barrier) {
  if (--*barrier == 0) *barrier = 1ull << 32;
}
inline void barrier_wait(uint64_t* barrier) {
  emulator::wait_for(barrier, 1ull << 32);
}
inline void sync_warps(int barrier, int threads) { emulator::meet(barrier, threads, false); }
inline bool sync_warps_or(int barrier, int threads, bool mine) { return emulator::meet(barrier, threads, mine); }
inline void follow_previous_grid() {}
inline float exp2_fast(float x) { return std::exp2(x); }

