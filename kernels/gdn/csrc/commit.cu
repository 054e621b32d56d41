// Commit of the accepted path of every layer in one launch, in place: the state and the window of the convolution.
//
//     S <- 2^(G_n) S + sum over j on the path of 2^(G_n - G_j) k_j u_j^T        n the path's last node
//
// Grid (slab, request, layer): a slab is 64 key rows of one value head's state, or 2,048 bytes of the window's rows.
// Each state is read once and written once; products and sums are fp32, the path's weights float64.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "launch.h"
#include "tensor_core.cuh"
#include "window.cuh"

namespace {

constexpr int DIM = 128, SLAB = 64, THREADS = 128, EACH = 16;  // EACH key rows of a thread
constexpr int CHUNK = 16;  // path nodes held in shared memory
constexpr int MAX_PATH = 144;
constexpr int TOO_LONG = -2;

using tfm::add_scaled;
using tfm::exp_of;

// One layer's tensors. Addresses are 64-bit integers, so that Python can fill the table.
struct Layer {
  float* state;                  // [R, HV, DIM, DIM]
  const __nv_bfloat16* k;        // [R, T, H, DIM]
  const float* u;                // [R, T, HV, DIM]
  const double* path_log_decay;  // [R, T, HV]
  uint4* window;                 // [R, tfm::WINDOW, C], any type, C bytes a multiple of 16
  const uint4* inputs;           // [R, T, C], rows input_units apart
};

__device__ void commit_state(const Layer& layer, const int64_t* path, int max_length, int request, int slab, int rows,
                             int heads, int value_heads) {
  __shared__ float keys[CHUNK][SLAB];
  __shared__ int64_t nodes[CHUNK];
  const int head = slab / (DIM / SLAB), first = slab % (DIM / SLAB) * SLAB;
  const int column = threadIdx.x % 32 * 4, row = threadIdx.x / 32 * EACH;
  float* state = layer.state + ((static_cast<int64_t>(request) * value_heads + head) * DIM + first + row) * DIM + column;
  // the state is on its way while the path is looked up
  float4 sum[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum[i] = __ldcs(reinterpret_cast<const float4*>(state + i * DIM));

  const int length = tfm::count_nodes(path, max_length);
  if (length == 0) return;
  const int64_t base = static_cast<int64_t>(request) * rows;
  const double last = layer.path_log_decay[(base + path[length - 1]) * value_heads + head];
  const float gain = exp_of(last);
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum[i] = make_float4(gain * sum[i].x, gain * sum[i].y, gain * sum[i].z, gain * sum[i].w);
  for (int start = 0; start < length; start += CHUNK) {
    const int count = min(CHUNK, length - start);
    for (int p = threadIdx.x / (SLAB / 4); p < count; p += THREADS / (SLAB / 4)) {
      const int part = threadIdx.x % (SLAB / 4) * 4, key_head = head / (value_heads / heads);
      const int64_t node = base + path[start + p];
      const uint2 k = *reinterpret_cast<const uint2*>(layer.k + (node * heads + key_head) * DIM + first + part);
      const float weight = exp_of(last - layer.path_log_decay[node * value_heads + head]);
      if (part == 0) nodes[p] = node;
      *reinterpret_cast<float4*>(&keys[p][part]) =
          make_float4(weight * __uint_as_float(k.x << 16), weight * __uint_as_float(k.x & 0xffff0000u),
                      weight * __uint_as_float(k.y << 16), weight * __uint_as_float(k.y & 0xffff0000u));
    }
    __syncthreads();
#pragma unroll 4
    for (int p = 0; p < count; ++p) {
      const float* row_of_u = layer.u + (nodes[p] * value_heads + head) * DIM + column;
      const float4 u = __ldg(reinterpret_cast<const float4*>(row_of_u));
#pragma unroll
      for (int i = 0; i < EACH; i += 4) {
        const float4 k = *reinterpret_cast<const float4*>(&keys[p][row + i]);
        add_scaled(sum[i], k.x, u);
        add_scaled(sum[i + 1], k.y, u);
        add_scaled(sum[i + 2], k.z, u);
        add_scaled(sum[i + 3], k.w, u);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) __stcs(reinterpret_cast<float4*>(state + i * DIM), sum[i]);
}

__global__ void __launch_bounds__(THREADS)
    commit_kernel(const Layer* layers, const int64_t* paths, int max_length, int rows, int heads, int value_heads,
                  int units, int input_units) {
  const int request = blockIdx.y;
  tfm::follow_previous_grid();
  const int64_t* path = paths + static_cast<int64_t>(request) * max_length;
  const Layer layer = layers[blockIdx.z];
  const int slabs = value_heads * (DIM / SLAB), slab = blockIdx.x;
  if (slab < slabs) {
    commit_state(layer, path, max_length, request, slab, rows, heads, value_heads);
  } else {
    tfm::move_window(layer.window, layer.inputs, path, max_length, request, (slab - slabs) * THREADS + threadIdx.x, rows,
                     units, input_units);
  }
}

}  // namespace

extern "C" int tfm_commit(const void* layers, int count, const void* paths, int requests, int max_length, int rows,
                          int heads, int value_heads, int window_bytes, int input_bytes, void* stream) {
  if (max_length > MAX_PATH) return TOO_LONG;
  const int units = window_bytes / 16;
  const dim3 grid(value_heads * (DIM / SLAB) + (units + THREADS - 1) / THREADS, requests, count);
  return tfm::launch(commit_kernel, grid, THREADS, 0, static_cast<cudaStream_t>(stream),
                     static_cast<const Layer*>(layers), static_cast<const int64_t*>(paths), max_length, rows, heads,
                     value_heads, units, input_bytes / 16);
}
