// The committed inputs of the convolution, moved along an accepted path.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace tfm {

constexpr int WINDOW = 3;  // committed inputs: a convolution of width 4

// Path length, counted by every warp for itself.
__device__ __forceinline__ int count_nodes(const int64_t* path, int max_length) {
  int length = 0;
  for (int p = threadIdx.x % 32; p < max_length; p += 32) length += path[p] >= 0;
  return __reduce_add_sync(0xffffffffu, length);
}

// The window [R, WINDOW, units] becomes the newest WINDOW rows of cat([window, inputs of the path]); a thread a unit of 16
// bytes, whole warps. `inputs` [R, rows, ..] has its rows input_units apart.
__device__ __forceinline__ void move_window(uint4* window, const uint4* inputs, const int64_t* path, int max_length,
                                            int request, int unit, int rows, int units, int input_units) {
  const int length = count_nodes(path, max_length);
  if (length == 0 || unit >= units) return;
  window += static_cast<int64_t>(request) * WINDOW * units + unit;
  uint4 moved[WINDOW];
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) {
    const int from = length + i;
    moved[i] = from < WINDOW
                   ? window[from * static_cast<int64_t>(units)]
                   : inputs[(static_cast<int64_t>(request) * rows + path[from - WINDOW]) * input_units + unit];
  }
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) window[i * static_cast<int64_t>(units)] = moved[i];
}

}  // namespace tfm
