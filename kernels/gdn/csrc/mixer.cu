// What a GDN layer does around tree verify: before it, convolution over ancestors, SiLU, split, l2 norm and gates in one
// launch; after it, the gated norm. Everything is computed in fp32 from bf16 and rounded once.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "launch.h"
#include "tensor_core.cuh"

namespace {

constexpr int DIM = 128, WIDTH = 4, WARPS = 4, EACH = 2;  // EACH rows of a warp
constexpr int MAX_ROWS = 144, TOO_MANY_ROWS = -1;
constexpr float NORM_EPS = 1e-6f;

struct PrepareArgs {
  const __nv_bfloat16* mixed;    // [R, T, C], C = (2 H + HV) * DIM: q, k, v; rows mixed_stride apart
  const __nv_bfloat16* window;   // [R, WIDTH - 1, C] committed inputs, oldest first
  const __nv_bfloat16* weight;   // [C, WIDTH]
  const __nv_bfloat16* decay;    // [R, T, HV], rows decay_stride apart
  const __nv_bfloat16* write;    // [R, T, HV], rows write_stride apart
  const float* a_log;            // [HV]
  const float* dt_bias;          // [HV]
  const int64_t* parents;        // [R, T]; -2 is padding: q, k, v are 0
  __nv_bfloat16 *q, *k, *v;      // [R, T, heads, DIM]
  float *log_decay, *beta;       // [R, T, HV]
  int rows, heads, value_heads;
  int64_t mixed_stride, decay_stride, write_stride;  // elements
};

__device__ __forceinline__ float4 load4(const __nv_bfloat16* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                     __uint_as_float(raw.y & 0xffff0000u));
}

__device__ __forceinline__ void store4(__nv_bfloat16* to, float4 x) {
  const __nv_bfloat162 left = __floats2bfloat162_rn(x.x, x.y), right = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) =
      make_uint2(*reinterpret_cast<const uint32_t*>(&left), *reinterpret_cast<const uint32_t*>(&right));
}

__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// -exp(A_log) softplus(x), formed in log space: exp(A_log) may overflow where softplus underflows
__device__ __forceinline__ float log_decay_gate(float a_log, float x) {
  const float log_softplus = x < -20.0f ? x : logf(x > 20.0f ? x : log1pf(expf(x)));
  return -expf(a_log + log_softplus);
}

__device__ void gates(const PrepareArgs& a, int request, int block, int threads) {
  const int64_t base = static_cast<int64_t>(request) * a.rows * a.value_heads;
  const int i = block * threads + threadIdx.x;
  if (i >= a.rows * a.value_heads) return;
  const int head = i % a.value_heads;
  const int64_t row = static_cast<int64_t>(request) * a.rows + i / a.value_heads;
  const float x = __bfloat162float(a.decay[row * a.decay_stride + head]) + a.dt_bias[head];
  a.log_decay[base + i] = log_decay_gate(a.a_log[head], x);
  a.beta[base + i] = 1.0f / (1.0f + expf(-__bfloat162float(a.write[row * a.write_stride + head])));
}

// Grid (head of q, k, v in turn; groups of rows; request), and behind the heads the blocks of the gates.
__global__ void __launch_bounds__(WARPS * 32) prepare_kernel(const PrepareArgs a) {
  const int head = blockIdx.x, request = blockIdx.z, lane = threadIdx.x & 31;
  tfm::follow_previous_grid();
  const int all_heads = 2 * a.heads + a.value_heads;
  if (head >= all_heads) return gates(a, request, (head - all_heads) * gridDim.y + blockIdx.y, WARPS * 32);
  const int64_t channels = static_cast<int64_t>(all_heads) * DIM, channel = head * DIM + lane * 4;
  // looked up three deep: one trip to memory, not three
  __shared__ int parents[MAX_ROWS];
  for (int i = threadIdx.x; i < a.rows; i += WARPS * 32) {
    parents[i] = static_cast<int>(a.parents[static_cast<int64_t>(request) * a.rows + i]);
  }
  const int first = (blockIdx.y * WARPS + threadIdx.x / 32) * EACH;
  float4 taps[WIDTH], x[EACH][WIDTH];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float4 own = load4(a.weight + (channel + c) * WIDTH);  // oldest first
    const float taps_of[WIDTH] = {own.w, own.z, own.y, own.x};
#pragma unroll
    for (int back = 0; back < WIDTH; ++back) reinterpret_cast<float*>(&taps[back])[c] = taps_of[back];
  }
  __syncthreads();
  bool padding[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int at = first + i < a.rows ? first + i : -2;
    padding[i] = at < 0 || parents[at] == -2;
#pragma unroll
    for (int back = 0; back < WIDTH; ++back) {
      // above the root the window continues into the committed inputs: their newest is the root's parent
      const __nv_bfloat16* row = at >= 0 ? a.mixed + (static_cast<int64_t>(request) * a.rows + at) * a.mixed_stride
                                         : a.window + (request * (WIDTH - 1) + (WIDTH - 1 + at)) * channels;
      x[i][back] = padding[i] ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load4(row + channel);
      at = at >= 0 ? max(parents[at], -1) : at - 1;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i >= a.rows) return;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int back = WIDTH - 1; back >= 0; --back) {
      y.x = fmaf(x[i][back].x, taps[back].x, y.x);
      y.y = fmaf(x[i][back].y, taps[back].y, y.y);
      y.z = fmaf(x[i][back].z, taps[back].z, y.z);
      y.w = fmaf(x[i][back].w, taps[back].w, y.w);
    }
    y = make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
    const int64_t row = static_cast<int64_t>(request) * a.rows + first + i;
    if (head >= 2 * a.heads) {
      store4(a.v + (row * a.value_heads + head - 2 * a.heads) * DIM + lane * 4, y);
      continue;
    }
    float scale = rsqrtf(sum_warp(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w) + NORM_EPS);
    if (head < a.heads) scale *= 0.08838834764831845f;  // DIM^-1/2
    store4((head < a.heads ? a.q : a.k) + (row * a.heads + head % a.heads) * DIM + lane * 4,
           make_float4(scale * y.x, scale * y.y, scale * y.z, scale * y.w));
  }
}

// y = rms_norm(out) weight silu(gate) over DIM, a warp a row of one head; gate rows of all heads are gate_stride apart
__global__ void __launch_bounds__(WARPS * 32)
    norm_kernel(const __nv_bfloat16* out, const __nv_bfloat16* gate, const __nv_bfloat16* weight, __nv_bfloat16* y,
                float eps, int64_t count, int value_heads, int64_t gate_stride) {
  tfm::follow_previous_grid();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (row >= count) return;
  const int lane = threadIdx.x & 31;
  const int64_t at = row / value_heads * gate_stride + row % value_heads * DIM;
  const float4 x = load4(out + row * DIM + lane * 4), z = load4(gate + at + lane * 4);
  const float4 w = load4(weight + lane * 4);
  const float scale = rsqrtf(sum_warp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) / DIM + eps);
  store4(y + row * DIM + lane * 4, make_float4(scale * x.x * w.x * silu(z.x), scale * x.y * w.y * silu(z.y),
                                               scale * x.z * w.z * silu(z.z), scale * x.w * w.w * silu(z.w)));
}

}  // namespace

extern "C" {

int tfm_prepare(const void* mixed, const void* window, const void* weight, const void* decay, const void* write,
                const void* a_log, const void* dt_bias, const void* parents, void* q, void* k, void* v, void* log_decay,
                void* beta, int requests, int rows, int heads, int value_heads, int64_t mixed_stride,
                int64_t decay_stride, int64_t write_stride, void* stream) {
  using bf16 = __nv_bfloat16;
  const PrepareArgs args{static_cast<const bf16*>(mixed),
                         static_cast<const bf16*>(window),
                         static_cast<const bf16*>(weight),
                         static_cast<const bf16*>(decay),
                         static_cast<const bf16*>(write),
                         static_cast<const float*>(a_log),
                         static_cast<const float*>(dt_bias),
                         static_cast<const int64_t*>(parents),
                         static_cast<bf16*>(q),
                         static_cast<bf16*>(k),
                         static_cast<bf16*>(v),
                         static_cast<float*>(log_decay),
                         static_cast<float*>(beta),
                         rows,
                         heads,
                         value_heads,
                         mixed_stride,
                         decay_stride,
                         write_stride};
  if (rows > MAX_ROWS) return TOO_MANY_ROWS;
  const int groups = (rows + WARPS * EACH - 1) / (WARPS * EACH);
  const int gate_blocks = (rows * value_heads + WARPS * 32 - 1) / (WARPS * 32);
  const dim3 grid(2 * heads + value_heads + (gate_blocks + groups - 1) / groups, groups, requests);
  return tfm::launch(prepare_kernel, grid, WARPS * 32, 0, static_cast<cudaStream_t>(stream), args);
}

int tfm_gated_norm(const void* out, const void* gate, const void* weight, void* y, float eps, int64_t count,
                   int value_heads, int64_t gate_stride, void* stream) {
  using bf16 = __nv_bfloat16;
  return tfm::launch(norm_kernel, dim3((count + WARPS - 1) / WARPS), WARPS * 32, 0, static_cast<cudaStream_t>(stream),
                     static_cast<const bf16*>(out), static_cast<const bf16*>(gate), static_cast<const bf16*>(weight),
                     static_cast<bf16*>(y), eps, count, value_heads, gate_stride);
}
}
