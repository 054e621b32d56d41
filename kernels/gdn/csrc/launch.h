// How every kernel here is launched.
#pragma once

#include <cuda_runtime.h>

#ifndef TFM_OVERLAP
#define TFM_OVERLAP 1  // 0: plain launches
#endif

namespace tfm {

// Launch `kernel` so that it may come up before the previous grid of the stream has finished (sm_90 and later); kernels
// call follow_previous_grid() before they read or write. Before sm_90 a plain launch. Returns a cudaError_t.
template <typename... Args>
int launch(void (*kernel)(Args...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = TFM_OVERLAP;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace tfm
