// The commit of the step before, folded into this verify. While this block's part of the state lies in registers,
//
//     S <- 2^(G_n) S + sum over j on the path of 2^(G_n - G_j) k_j u_j^T        n the path's last node
//
// and the result goes back to memory: a block owns what it reads, so nobody waits. Same products and order of sums as
// commit.cu, so the state has the same bits.
#pragma once

#include "verify_types.cuh"

namespace tfm {

// This lane's node of the pending path, or -1: asked for first, since the copies below need it.
__device__ __forceinline__ int pending_node(const Pending& pending, int request, int lane) {
  if (lane >= pending.max_length) return -1;
  return static_cast<int>(pending.path[static_cast<int64_t>(request) * pending.max_length + lane]);
}

// Start the copies of the path's rows to shared memory and write its decays there; returns the path's length, the same
// for all. Sixteen threads serve a node.
template <typename S>
__device__ __forceinline__ int load_pending(S& s, const VerifyArgs& a, int node_of_lane, int tile, int head, int request,
                                            int thread) {
  constexpr int NODES = S::WORKERS / 16;  // served at once
  constexpr unsigned ALL = 0xffffffffu;
  const int length = __popc(__ballot_sync(ALL, node_of_lane >= 0));
  if (length == 0) return 0;
  const Pending& pending = a.pending;
  const int unit = thread % 16, h = min(unit / 4, GROUP - 1);
  const int64_t first = static_cast<int64_t>(request) * pending.rows, value_heads = a.heads * GROUP;
  const double* decays = pending.path_log_decay + head * GROUP + min(unit, GROUP - 1);
  const double last = decays[(first + __shfl_sync(ALL, node_of_lane, length - 1)) * value_heads];
  for (int start = 0; start < length; start += NODES) {
    const int p = start + thread / 16;
    const int64_t row = first + __shfl_sync(ALL, node_of_lane, min(p, length - 1));
    if (p >= length) continue;
    copy_async_16(&s.pending.keys[p][unit * 8], pending.k + (row * a.heads + head) * DIM + unit * 8, true);
    if (unit < GROUP * 4) {
      const float* u = pending.u + (row * value_heads + head * GROUP + h) * DIM + tile * TILE + unit % 4 * 4;
      copy_async_16(&s.pending.writes[p][unit * 4], u, true);
    }
    if (unit < GROUP) {
      s.pending.weights[unit][p] = exp_of(last - decays[row * value_heads]);
      if (p == 0) s.pending.gains[unit] = exp_of(last);
    }
  }
  return length;
}

// held[h][pass]: columns quarter.. + 3 of state row line + pass * LINES
template <int LINES, int PASSES, typename S>
__device__ __forceinline__ void apply_pending(float4 (&held)[GROUP][PASSES], const S& s, int length, int line,
                                              int quarter) {
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    const float gain = s.pending.gains[h];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      float4& x = held[h][pass];
      x = make_float4(gain * x.x, gain * x.y, gain * x.z, gain * x.w);
    }
  }
#pragma unroll 2
  for (int p = 0; p < length; ++p) {
    float keys[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      keys[pass] = __bfloat162float(s.pending.keys[p][min(line + pass * LINES, DIM - 1)]);
    }
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      const float weight = s.pending.weights[h][p];
      const float4 u = *reinterpret_cast<const float4*>(&s.pending.writes[p][h * TILE + quarter]);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) add_scaled(held[h][pass], weight * keys[pass], u);
    }
  }
}

}  // namespace tfm
