// What a GDN layer does around tree verify: before it, convolution over ancestors, SiLU, split, l2 norm and gates in one
// launch; after it, the gated norm. Everything is computed in fp32 from bf16 and rounded once.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "launch.h"
#include "tensor_core.cuh"
#include "window.cuh"

namespace {

constexpr int DIM = 128, WIDTH = 4, WARPS = 4, EACH = 1;  // EACH rows of a warp
constexpr int MAX_ROWS = 144, TOO_MANY_ROWS = -1, TOO_LONG = -2;
constexpr float NORM_EPS = 1e-6f;

// The path that the step before accepted and that step's inputs of the convolution; max_length 0: nothing is pending.
struct PendingWindow {
  const int64_t* path;          // [R, max_length] nodes from the root down, then -1
  const __nv_bfloat16* inputs;  // [R, rows, C], rows `stride` apart
  int max_length, rows;
  int64_t stride;  // elements
};

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
  PendingWindow pending;
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

// The committed inputs that a node sees above the root, oldest first: those of the window, or of the pending path where
// one is, which the last launch of this layer (norm_kernel) moves into the window.
__device__ __forceinline__ void find_window(const __nv_bfloat16* (&above)[WIDTH - 1], const PrepareArgs& a, int request,
                                            int64_t channels, int lane) {
  int length = 0, node = -1;
  if (TFM_DEFERRED) {
    const PendingWindow& pending = a.pending;
    if (lane < pending.max_length) {
      node = static_cast<int>(pending.path[static_cast<int64_t>(request) * pending.max_length + lane]);
    }
    length = __popc(__ballot_sync(0xffffffffu, node >= 0));
  }
#pragma unroll
  for (int i = 0; i < WIDTH - 1; ++i) {
    const int from = length + i - (WIDTH - 1);  // on the path, or below 0 in the window
    above[i] = a.window + (static_cast<int64_t>(request) * (WIDTH - 1) + (WIDTH - 1 + from)) * channels;
    if (TFM_DEFERRED && from >= 0) {
      const int64_t row = static_cast<int64_t>(request) * a.pending.rows + __shfl_sync(0xffffffffu, node, from);
      above[i] = a.pending.inputs + row * a.pending.stride;
    }
  }
}

// Grid (head of q, k, v in turn; groups of rows; request), and behind the heads the blocks of the gates.
__global__ void __launch_bounds__(WARPS * 32) prepare_kernel(const PrepareArgs a) {
  const int head = blockIdx.x, request = blockIdx.z, lane = threadIdx.x & 31;
  const int all_heads = 2 * a.heads + a.value_heads;
  const int64_t channels = static_cast<int64_t>(all_heads) * DIM, channel = head * DIM + lane * 4;
  float4 taps[WIDTH], x[EACH][WIDTH];
  if (head < all_heads) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // weights: no kernel writes them, so they may be asked for before the previous grid has ended
      const float4 own = load4(a.weight + (channel + c) * WIDTH);  // oldest first
      const float taps_of[WIDTH] = {own.w, own.z, own.y, own.x};
#pragma unroll
      for (int back = 0; back < WIDTH; ++back) reinterpret_cast<float*>(&taps[back])[c] = taps_of[back];
    }
  }
  tfm::follow_previous_grid();
  if (head >= all_heads) return gates(a, request, (head - all_heads) * gridDim.y + blockIdx.y, WARPS * 32);
  const int first = (blockIdx.y * WARPS + threadIdx.x / 32) * EACH;
  // own rows are on their way while the parents are looked up; an ancestor's row then mostly lies in the L2 cache
  float4 own_rows[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t row = static_cast<int64_t>(request) * a.rows + min(first + i, a.rows - 1);
    own_rows[i] = load4(a.mixed + row * a.mixed_stride + channel);
  }
  // looked up three deep: one trip to memory, not three
  __shared__ int parents[MAX_ROWS];
  for (int i = threadIdx.x; i < a.rows; i += WARPS * 32) {
    parents[i] = static_cast<int>(a.parents[static_cast<int64_t>(request) * a.rows + i]);
  }
  const __nv_bfloat16* above[WIDTH - 1];
  find_window(above, a, request, channels, lane);
  __syncthreads();
  bool padding[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int at = first + i < a.rows ? first + i : -2;
    padding[i] = at < 0 || parents[at] == -2;
#pragma unroll
    for (int back = 0; back < WIDTH; ++back) {
      // above the root the window continues into the committed inputs: their newest is the root's parent
      const __nv_bfloat16* row = at >= 0    ? a.mixed + (static_cast<int64_t>(request) * a.rows + at) * a.mixed_stride
                                 : at == -1 ? above[2]
                                 : at == -2 ? above[1]
                                            : above[0];
      x[i][back] = padding[i] ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : back == 0 ? own_rows[i] : load4(row + channel);
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

// The window [R, WIDTH - 1, C] that the blocks behind the norm's move along the pending path: no launch of this layer
// reads it any more, and the next step's come later.
struct WindowMove {
  __nv_bfloat16* window;
  PendingWindow pending;
  int channels;
};

__device__ __forceinline__ void move_pending(const WindowMove& move, int64_t count) {
  const int units = move.channels / 8, slabs = (units + WARPS * 32 - 1) / (WARPS * 32);
  const int block = static_cast<int>(blockIdx.x - (count + WARPS - 1) / WARPS), request = block / slabs;
  const PendingWindow& pending = move.pending;
  tfm::move_window(reinterpret_cast<uint4*>(move.window), reinterpret_cast<const uint4*>(pending.inputs),
                   pending.path + static_cast<int64_t>(request) * pending.max_length, pending.max_length, request,
                   block % slabs * (WARPS * 32) + threadIdx.x, pending.rows, units,
                   static_cast<int>(pending.stride / 8));
}

// y = rms_norm(out) weight silu(gate) over DIM, a warp a row of one head; gate rows of all heads are gate_stride apart
__global__ void __launch_bounds__(WARPS * 32)
    norm_kernel(const __nv_bfloat16* out, const __nv_bfloat16* gate, const __nv_bfloat16* weight, __nv_bfloat16* y,
                float eps, int64_t count, int value_heads, int64_t gate_stride, const WindowMove move) {
  const int lane = threadIdx.x & 31;
  const float4 w = load4(weight + lane * 4);
  tfm::follow_previous_grid();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (TFM_DEFERRED && blockIdx.x >= (count + WARPS - 1) / WARPS) return move_pending(move, count);
  if (row >= count) return;
  const int64_t at = row / value_heads * gate_stride + row % value_heads * DIM;
  const float4 x = load4(out + row * DIM + lane * 4), z = load4(gate + at + lane * 4);
  const float scale = rsqrtf(sum_warp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) / DIM + eps);
  store4(y + row * DIM + lane * 4, make_float4(scale * x.x * w.x * silu(z.x), scale * x.y * w.y * silu(z.y),
                                               scale * x.z * w.z * silu(z.z), scale * x.w * w.w * silu(z.w)));
}

}  // namespace

extern "C" {

int tfm_prepare(const void* mixed, const void* window, const void* weight, const void* decay, const void* write,
                const void* a_log, const void* dt_bias, const void* parents, void* q, void* k, void* v, void* log_decay,
                void* beta, int requests, int rows, int heads, int value_heads, int64_t mixed_stride,
                int64_t decay_stride, int64_t write_stride, const void* pending_path, const void* pending_inputs,
                int pending_length, int pending_rows, int64_t pending_stride, void* stream) {
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
                         write_stride,
                         {static_cast<const int64_t*>(pending_path), static_cast<const bf16*>(pending_inputs),
                          pending_length, pending_rows, pending_stride}};
  if (rows > MAX_ROWS) return TOO_MANY_ROWS;
  if (pending_length > (TFM_DEFERRED ? tfm::MAX_PENDING : 0)) return TOO_LONG;
  const int groups = (rows + WARPS * EACH - 1) / (WARPS * EACH);
  const int gate_blocks = (rows * value_heads + WARPS * 32 - 1) / (WARPS * 32);
  const dim3 grid(2 * heads + value_heads + (gate_blocks + groups - 1) / groups, groups, requests);
  return tfm::launch(prepare_kernel, grid, WARPS * 32, 0, static_cast<cudaStream_t>(stream), args);
}

// Moves `window` [requests, WIDTH - 1, channels] too, where a path is pending.
int tfm_gated_norm(const void* out, const void* gate, const void* weight, void* y, float eps, int64_t count,
                   int value_heads, int64_t gate_stride, void* window, int requests, int channels,
                   const void* pending_path, const void* pending_inputs, int pending_length, int pending_rows,
                   int64_t pending_stride, void* stream) {
  using bf16 = __nv_bfloat16;
  if (pending_length > (TFM_DEFERRED ? tfm::MAX_PENDING : 0)) return TOO_LONG;
  const WindowMove move{static_cast<bf16*>(window),
                        {static_cast<const int64_t*>(pending_path), static_cast<const bf16*>(pending_inputs),
                         pending_length, pending_rows, pending_stride},
                        channels};
  const int slabs = (channels / 8 + WARPS * 32 - 1) / (WARPS * 32);
  const dim3 grid((count + WARPS - 1) / WARPS + (pending_length > 0 ? requests * slabs : 0));
  return tfm::launch(norm_kernel, grid, WARPS * 32, 0, static_cast<cudaStream_t>(stream),
                     static_cast<const bf16*>(out), static_cast<const bf16*>(gate), static_cast<const bf16*>(weight),
                     static_cast<bf16*>(y), eps, count, value_heads, gate_stride, move);
}
}
