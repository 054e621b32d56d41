// CUDA blocks on a CPU, for tests: every thread is a fiber, and a seeded scheduler switches between them in random order
// wherever a kernel synchronises. What a missing barrier would leave to chance on a GPU then goes wrong for some seed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace emulator {

constexpr int STACK = 64 << 10, SHARED = 256 << 10, LANES = 32, BARRIERS = 16, PATIENCE = 1000000;

struct Copy {
  void* to;
  const void* from;
};

// what a thread waits for: *value >= needed
struct Wait {
  const uint64_t* value = nullptr;
  uint64_t needed = 0;
};

struct Fiber {
  jmp_buf place;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  Wait wait;
  bool started = false, done = false;
  uint64_t exchanges = 0;
  std::vector<Copy> copies;
};

struct Warp {
  uint32_t slots[2][LANES][8];
  uint64_t arrived[2] = {0, 0};
};

struct Named {
  int arrived = 0;
  uint64_t completed = 0;
  bool any = false, result = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Named named[BARRIERS];
  ucontext_t never;
  jmp_buf scheduler;
  int current = 0;
  std::function<void()> body;
};

inline Block* block;
inline int missing;  // which wait the kernels leave out; 0: none
inline int conflicts;  // reads of 8x8 matrices, rows of which lie in the same banks
inline std::mt19937 order;
inline uint3 thread_index, block_index;
inline dim3 block_size, grid_size;
alignas(128) inline unsigned char shared_memory[SHARED];

// Lets others go first, and at least until *value >= needed.
inline void wait_for(const uint64_t* value, uint64_t needed) {
  Fiber& own = block->fibers[block->current];
  own.wait = {value, needed};
  if (!_setjmp(own.place)) _longjmp(block->scheduler, 1);
}

inline void enter() {
  block->body();
  block->fibers[block->current].done = true;
  _longjmp(block->scheduler, 1);
}

inline void resume(int i) {
  Fiber& fiber = block->fibers[i];
  block->current = i;
  thread_index.x = i;
  if (_setjmp(block->scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void run_block(int threads, std::function<void()> body) {
  Block own;
  block = &own;
  own.fibers.resize(threads);
  own.warps.resize(threads / LANES);
  own.body = std::move(body);
  // bits that are NaN as float and as bf16, and a huge integer
  memset(shared_memory, 0xff, SHARED);
  for (Fiber& fiber : own.fibers) {
    getcontext(&fiber.start);
    fiber.stack = std::make_unique<char[]>(STACK);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = &own.never;
    makecontext(&fiber.start, enter, 0);
  }
  // a warp's chance to move in a round is 1, 1/8 or 1/64: one for the first so many warps, one for the others, one apart
  const auto speed = [] { return (1u << order() % 3 * 3) - 1; };
  std::vector<unsigned> slowness(own.warps.size(), speed());
  std::fill(slowness.begin(), slowness.begin() + order() % own.warps.size(), speed());
  slowness[order() % own.warps.size()] = speed();
  int left = threads;
  for (int idle = 0; left > 0; ++idle) {
    if (idle == PATIENCE) abort();  // every thread waits
    const int warp = order() % own.warps.size(), shift = order() % LANES;
    if (order() & slowness[warp]) continue;
    // now and then only some lanes, so that a warp's lanes are apart too
    const int lanes = order() % 4 ? LANES : order() % LANES;
    for (int lane = 0; lane < lanes; ++lane) {
      const int i = warp * LANES + (lane + shift) % LANES;
      Fiber& fiber = own.fibers[i];
      if (fiber.done || (fiber.wait.value && *fiber.wait.value < fiber.wait.needed)) continue;
      idle = 0;
      resume(i);
      left -= fiber.done;
    }
  }
}

// Values of all lanes of the calling warp, which meet here.
template <typename T>
const T* exchange(const T& mine, T (&all)[LANES]) {
  static_assert(sizeof(T) <= 32);
  Fiber& own = block->fibers[block->current];
  Warp& warp = block->warps[block->current / LANES];
  const uint64_t turn = own.exchanges++, side = turn % 2, needed = LANES * (turn / 2 + 1);
  memcpy(warp.slots[side][block->current % LANES], &mine, sizeof(T));
  ++warp.arrived[side];
  wait_for(&warp.arrived[side], needed);
  for (int lane = 0; lane < LANES; ++lane) memcpy(&all[lane], warp.slots[side][lane], sizeof(T));
  return all;
}

inline bool meet(int id, int threads, bool mine) {
  Named& named = block->named[id];
  named.any |= mine;
  const uint64_t needed = named.completed + 1;
  if (++named.arrived == threads) {
    named.result = named.any;
    named.any = false;
    named.arrived = 0;
    ++named.completed;
  }
  wait_for(&named.completed, needed);
  return named.result;
}

template <typename... Args>
int launch(void (*kernel)(Args...), dim3 grid, int threads, const Args&... args) {
  grid_size = grid;
  block_size = dim3(threads);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        block_index = make_uint3(x, y, z);
        run_block(threads, [&] { kernel(args...); });
      }
    }
  }
  return 0;
}

inline int lane() { return block->current % LANES; }

}  // namespace emulator

extern "C" inline __attribute__((used)) void emulator_order(unsigned seed, int missing) {
  emulator::order.seed(seed);
  emulator::missing = missing;
}
extern "C" inline __attribute__((used)) int emulator_conflicts() { return emulator::conflicts; }

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size
#define __launch_bounds__(...)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetErrorString(...) "no device"

inline void __syncthreads() { emulator::meet(0, emulator::block_size.x, false); }
inline void __syncwarp() {
  int all[32];
  emulator::exchange(0, all);
}
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  T all[32];
  return emulator::exchange(x, all)[from & 31];
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  T all[32];
  return emulator::exchange(x, all)[emulator::lane() ^ mask];
}
inline unsigned __ballot_sync(unsigned, bool x) {
  int all[32];
  emulator::exchange<int>(x, all);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i] != 0) << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __reduce_add_sync(unsigned, int x) {
  int all[32], sum = 0;
  emulator::exchange(x, all);
  for (int i = 0; i < 32; ++i) sum += all[i];
  return sum;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
T __ldg(const T* p) { return *p; }
template <typename T>
T __ldcs(const T* p) { return *p; }
template <typename T>
void __stcs(T* p, T x) { *p = x; }
inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline int __double2loint(double x) { int64_t y; memcpy(&y, &x, 8); return static_cast<int>(y); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::min;
