// csrc/launch.h for the emulator.
#pragma once

#include "emulator.h"

namespace tfm {
template <typename... Args>
int launch(void (*kernel)(Args...), dim3 grid, int threads, int, cudaStream_t, const Args&... args) {
  return emulator::launch(kernel, grid, threads, args...);
}
}  // namespace tfm
