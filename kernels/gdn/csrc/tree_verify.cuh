// Gated-DeltaNet tree verify in one launch: masked triangular solve over the tree, kernels/NOTES.md has the derivation.
//
// Grid (value tile, key head, request). A block owns 16 value columns of all GROUP value heads of one key head, so the
// Gram matrices are formed once for those heads. Rows are cut into blocks of 16; a warp owns one block of keys or of
// queries, and one or two more compute what depends on the tree alone. Measured on an H200, T = 16, 65, 128: 5.5, 9.2 and
// 14.6 us (results/published/kernels-h200).
//
//     M_ij  = [j < i] k_i.k_j            N_ij = [j <= i] q_i.k_j        "<": ancestor; the same for all heads
//     (I + diag(beta) M) U' = diag(beta) (V' - diag(gain) K S_0)        U = diag(e) U'
//     O = diag(e) (diag(gain) Q S_0 + N U')                             V' = diag(1 / e) V
//
// G is the path's log2 decay less its value c at node 0, cut into segments of SEGMENT: e_i = 2^(G_i + SEGMENT n_i) with
// n_i = floor(-G_i / SEGMENT), gain_i = 2^(c - SEGMENT n_i). Nothing overflows, whatever the decay. Where some n differs
// from 0, M and N are multiplied head by head by 2^(SEGMENT (n_j - n_i)): 1, 2^-SEGMENT, or 0 beyond one segment.
//
// Precision: k and q are bf16, so Gram products are exact up to fp32 accumulation. S_0, M, N, U' and the inverses of the
// diagonal blocks are split into TERMS bf16 terms (2: 16 bits of mantissa); the sums are fp32, the path sums float64.
#pragma once

#include "pending.cuh"
#include "row_blocks.cuh"
#include "tree_stage.cuh"

namespace tfm {

// Copy this block's keys, queries and values to shared memory and its state, split into terms.
template <int TERMS, typename S>
__device__ __forceinline__ void load_inputs(S& s, const VerifyArgs& a, int tile, int head, int request, int thread) {
  constexpr int LINES = S::WORKERS / 4, PASSES = (DIM + LINES - 1) / LINES;
  const int line = thread / 4, quarter = thread % 4 * 4;
  float* state = a.state + (static_cast<int64_t>(request) * a.heads + head) * (GROUP * DIM * DIM) + tile * TILE +
                 (line * DIM + quarter);
#if TFM_DEFERRED
  const int node_of_lane = pending_node(a.pending, request, thread & 31);
#endif
  float4 held[GROUP][PASSES];
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (line + pass * LINES < DIM) {
        const auto* from = reinterpret_cast<const float4*>(state + h * DIM * DIM + pass * LINES * DIM);
#if TFM_DEFERRED
        held[h][pass] = __ldcs(from);  // written below, so not through the read-only path
#else
        held[h][pass] = __ldg(from);
#endif
      }
    }
  }
  // offsets inside one request fit in 32 bits; rows behind the last are filled with zeros
  const int64_t corner = static_cast<int64_t>(request) * a.rows * a.heads + head;
  const __nv_bfloat16 *keys = a.k + corner * DIM, *queries = a.q + corner * DIM;
  const __nv_bfloat16* values = a.v + corner * (GROUP * DIM) + tile * TILE;
  constexpr int KEY_ROWS = S::WORKERS / 16, VALUE_ROWS = S::WORKERS / 8;
#pragma unroll
  for (int pass = 0; pass * KEY_ROWS < S::ROWS; ++pass) {
    const int row = thread / 16 + pass * KEY_ROWS, column = thread % 16 * 8;
    const uint32_t from = min(row, a.rows - 1) * (a.heads * DIM) + column;
    if (S::ROWS % KEY_ROWS == 0 || row < S::ROWS) {
      copy_async_16(&s.keys[row][column], keys + from, row < a.rows);
      copy_async_16(&s.queries[row][column], queries + from, row < a.rows);
    }
  }
#pragma unroll
  for (int pass = 0; pass * VALUE_ROWS < S::ROWS; ++pass) {
    const int row = thread / 8 + pass * VALUE_ROWS, part = thread % 8;
    const uint32_t from = min(row, a.rows - 1) * (a.heads * GROUP * DIM) + part / 2 * DIM + part % 2 * 8;
    if (part < GROUP * 2 && (S::ROWS % VALUE_ROWS == 0 || row < S::ROWS)) {
      copy_async_16(&s.values[row][part * 8], values + from, row < a.rows);
    }
  }
#if TFM_DEFERRED
  if (const int length = load_pending(s, a, node_of_lane, tile, head, request, thread)) {
    wait_copies();
    sync_warps(1, S::WORKERS);
    apply_pending<LINES>(held, s, length, line, quarter);
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if (line + pass * LINES < DIM) {
          __stcs(reinterpret_cast<float4*>(state + h * DIM * DIM + pass * LINES * DIM), held[h][pass]);
        }
      }
    }
  }
#endif
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (line + pass * LINES < DIM) {
        uint32_t left[TERMS], right[TERMS];
        split_pair<TERMS>(held[h][pass].x, held[h][pass].y, left);
        split_pair<TERMS>(held[h][pass].z, held[h][pass].w, right);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
          const int k = line + pass * LINES, column = h * TILE + quarter;
          *reinterpret_cast<uint2*>(&s.state[term][k / 8][column / 8][k % 8][column % 8]) =
              make_uint2(left[term], right[term]);
        }
      }
    }
  }
  wait_copies();
#ifdef TFM_WARP_GROUPS
  publish_stores();
#endif
  sync_warps(1, S::WORKERS);
}

template <int HEADS, typename S>
__device__ __forceinline__ void store_rows(const float (&acc)[2 * HEADS][4], const S& s, const VerifyArgs& a,
                                           bool is_key, int first_row, int first_head, int lane) {
  const int64_t row_length = static_cast<int64_t>(a.heads) * GROUP * DIM;
  const int64_t corner = static_cast<int64_t>(blockIdx.z) * a.rows * row_length +
                         (blockIdx.y * GROUP + first_head) * DIM + blockIdx.x * TILE + (lane & 3) * 2;
  const bool is_bf16 = !is_key && a.out_is_bf16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + (lane >> 2) + half * 8;
    if (row >= a.rows) continue;
    const int64_t at = corner + row * row_length;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float scale = s.scales[first_head + h][row].scale;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = scale * acc[2 * h + n][2 * half], y = scale * acc[2 * h + n][2 * half + 1];
        const int64_t to = at + h * DIM + n * 8;
        if (is_bf16) {
          *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + to) = __floats2bfloat162_rn(x, y);
        } else {
          *reinterpret_cast<float2*>((is_key ? a.u : static_cast<float*>(a.out)) + to) = make_float2(x, y);
        }
      }
    }
  }
}

template <int BLOCKS, int TERMS>
__global__ void __launch_bounds__(Shape<BLOCKS, TERMS>::THREADS, 1) tree_verify_kernel(const VerifyArgs a) {
  using S = Shared<BLOCKS, TERMS>;
  constexpr int HEADS = S::HEADS, PARTS = S::PARTS;
  extern __shared__ __align__(16) unsigned char memory[];
  S& s = *reinterpret_cast<S*>(memory);
  const int tile = blockIdx.x, head = blockIdx.y, request = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  follow_previous_grid();

  if (threadIdx.x >= S::WORKERS) {
    const int thread = threadIdx.x - S::WORKERS;
    if (thread < BLOCKS * PARTS) barrier_init(&s.ready[thread], 32);
    if (thread == 0) barrier_init(&s.scaled, S::TREE);
    tree_stage(s, a, head, request, tile == 0, thread);
    // every thread for its own scales
    barrier_arrive(&s.scaled);
    return;
  }
  const int part = warp % PARTS, order = warp / PARTS;
  const bool is_key = order < BLOCKS;
  // queries in reverse: a late block has more work, and warps go round the four schedulers
  const int block = is_key ? order : 2 * BLOCKS - 1 - order;
  const int first_row = block * BLOCK, first_head = part * HEADS;

  load_inputs<TERMS>(s, a, tile, head, request, threadIdx.x);

  uint32_t own[8][4];
  float acc[2 * HEADS][4], c[2][4];
  load_rows(own, is_key ? &s.keys[first_row] : &s.queries[first_row], lane);
#ifdef TFM_WARP_GROUPS
  if constexpr (S::GROUPED > 0) {
    if (warp < S::GROUPED) {
      multiply_state_grouped<TERMS>(acc, own, s);
    } else {
      multiply_state<HEADS, TERMS>(acc, own, s, first_head, lane);
    }
  } else {
    multiply_state<HEADS, TERMS>(acc, own, s, first_head, lane);
  }
#else
  multiply_state<HEADS, TERMS>(acc, own, s, first_head, lane);
#endif
  if (is_key) gram_block(c, own, &s.keys[first_row], lane);

  const bool segmented = sync_warps_or(3, S::THREADS, false);
  const int g = lane >> 2, t = lane & 3;
  const auto* upper_bits = reinterpret_cast<const uint16_t*>(s.nodes[first_row + g].words);
  const auto* lower_bits = reinterpret_cast<const uint16_t*>(s.nodes[first_row + g + 8].words);
  if (is_key) {
    mask_block(c, upper_bits[block] & ~(1u << g), lower_bits[block] & ~(256u << g), t);
    if (segmented) {
      invert_diagonal<true, HEADS, TERMS>(s, c, block, first_head, lane);
    } else {
      invert_diagonal<false, HEADS, TERMS>(s, c, block, first_head, lane);
    }
    // again, so that the inversion has the registers
    load_rows(own, &s.keys[first_row], lane);
  }
  barrier_wait(&s.scaled);
  scale_rows<HEADS>(acc, s, is_key, first_row, first_head, lane);

  const int sources = is_key ? block : block + 1;
  for (int j = 0; j < sources; ++j) {
    const uint32_t upper = upper_bits[j], lower = lower_bits[j];
    if (!__any_sync(0xffffffffu, upper | lower)) continue;
    gram_block(c, own, &s.keys[j * BLOCK], lane);
    mask_block(c, upper, lower, t);
    uint32_t terms[TERMS][4];
    split_block<TERMS>(terms, c);
    barrier_wait(&s.ready[j * PARTS + part]);
    if (segmented) {
      add_block<true, HEADS, TERMS>(acc, c, terms, s, first_row, j, first_head, lane);
    } else {
      add_block<false, HEADS, TERMS>(acc, c, terms, s, first_row, j, first_head, lane);
    }
  }
  if (is_key) {
    solve_block<HEADS, TERMS>(acc, s, block, first_head, lane);
    // every lane for its own part of U'
    barrier_arrive(&s.ready[block * PARTS + part]);
  }
  store_rows<HEADS>(acc, s, a, is_key, first_row, first_head, lane);
}

}  // namespace tfm
