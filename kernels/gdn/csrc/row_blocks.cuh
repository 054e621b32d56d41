// What a warp does with its 16 rows: products with the state, Gram blocks, the inverse of a diagonal block, the solve.
#pragma once

#include "verify_types.cuh"

namespace tfm {

// own[step]: A fragments of 16 rows over the key dimension
__device__ __forceinline__ void load_rows(uint32_t (&own)[8][4], const __nv_bfloat16 (*rows)[KEY_STRIDE], int lane) {
#pragma unroll
  for (int step = 0; step < 8; ++step) load_matrices(own[step], &rows[lane & 15][step * 16 + (lane >> 4) * 8]);
}

// acc = own rows times the state, for HEADS value heads of 16 columns
template <int HEADS, int TERMS, typename S>
__device__ __forceinline__ void multiply_state(float (&acc)[2 * HEADS][4], const uint32_t (&own)[8][4], const S& s,
                                               int first_head, int lane) {
  // a warp of one head has two tiles only: one sum a term, or it would wait for every product
  constexpr int SUMS = HEADS == 1 ? TERMS : 1;
  float sums[SUMS][2 * HEADS][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        uint32_t b[4];
        load_matrices_transposed(
            b, s.state[term][step * 2 + ((lane >> 3) & 1)][(first_head + h) * (TILE / 8) + (lane >> 4)][lane & 7]);
        mma(sums[term % SUMS][2 * h], own[step], b[0], b[1]);
        mma(sums[term % SUMS][2 * h + 1], own[step], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8 * HEADS; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int part = SUMS - 1; part >= 0; --part) sum += sums[part][i / 4][i % 4];
    acc[i / 4][i % 4] = sum;
  }
}

#ifdef TFM_WARP_GROUPS
// The same by a warp group: four warps read each piece of the state together.
template <int TERMS, typename S>
__device__ __forceinline__ void multiply_state_grouped(float (&acc)[6][4], const uint32_t (&own)[8][4], const S& s) {
#pragma unroll
  for (int i = 0; i < 24; ++i) acc[i / 4][i % 4] = 0.0f;
  group_begin();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      group_mma(acc, own[step], matrix_descriptor(s.state[term][step * 2], COLS * 16, 128));
    }
  }
  group_finish();
}
#endif

// c = own rows (A fragments) times 16 rows of keys, 16x16
__device__ __forceinline__ void gram_block(float (&c)[2][4], const uint32_t (&own)[8][4],
                                           const __nv_bfloat16 (*keys)[KEY_STRIDE], int lane) {
  float odd[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) c[0][i] = c[1][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t b[4];
    load_matrices(b, &keys[(lane & 7) + ((lane >> 4) << 3)][step * 16 + ((lane >> 3) & 1) * 8]);
    mma(step & 1 ? odd[0] : c[0], own[step], b[0], b[1]);
    mma(step & 1 ? odd[1] : c[1], own[step], b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    c[0][i] += odd[0][i];
    c[1][i] += odd[1][i];
  }
}

// select, not multiply: a padding row may hold NaN
__device__ __forceinline__ void mask_block(float (&c)[2][4], uint32_t upper, uint32_t lower, int t) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int bit = tile * 8 + 2 * t + i;
      c[tile][i] = (upper >> bit) & 1 ? c[tile][i] : 0.0f;
      c[tile][2 + i] = (lower >> bit) & 1 ? c[tile][2 + i] : 0.0f;
    }
  }
}

__device__ __forceinline__ float between_segments(int row, int column) {
  return row == column ? 1.0f : row == column + 1 ? 1.0f / (1ll << SEGMENT) : 0.0f;
}

// what a block of M or N is for one head where the path decays span several segments
__device__ __forceinline__ void scale_block(float (&scaled)[2][4], const float (&c)[2][4], const int* row_segments,
                                            const int* column_segments, int g, int t) {
  const int upper = row_segments[g], lower = row_segments[g + 8];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int2 columns = *reinterpret_cast<const int2*>(&column_segments[tile * 8 + 2 * t]);
    scaled[tile][0] = c[tile][0] * between_segments(upper, columns.x);
    scaled[tile][1] = c[tile][1] * between_segments(upper, columns.y);
    scaled[tile][2] = c[tile][2] * between_segments(lower, columns.x);
    scaled[tile][3] = c[tile][3] * between_segments(lower, columns.y);
  }
}

template <int TERMS>
__device__ __forceinline__ void split_block(uint32_t (&terms)[TERMS][4], const float (&c)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pair[TERMS];
      split_pair<TERMS>(c[tile][2 * half], c[tile][2 * half + 1], pair);
#pragma unroll
      for (int i = 0; i < TERMS; ++i) terms[i][tile * 2 + half] = pair[i];
    }
  }
}

// Write -(I + diag(beta) M)^-1 diag(beta) of one diagonal block, transposed, as bf16 terms, for HEADS heads from
// `first_head`: forward substitution in fp32, a lane a column of every second head. `c` is M without its decay.
template <bool SEGMENTED, int HEADS, int TERMS, typename S>
__device__ __forceinline__ void invert_diagonal(S& s, const float (&c)[2][4], int block, int first_head, int lane) {
  constexpr int SLOTS = (HEADS + 1) / 2;
  const int g = lane >> 2, t = lane & 3, column = lane & 15, half = lane >> 4;
#pragma unroll
  for (int h = 0; h < (SEGMENTED ? HEADS : 1); ++h) {
    const int* segments = &s.segments[first_head + h][block * BLOCK];
    float scaled[2][4];
    if (SEGMENTED) scale_block(scaled, c, segments, segments, g, t);
    auto* gram = reinterpret_cast<float(*)[GRAM_STRIDE]>(s.scratch[block][first_head + h]);  // [column][row]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      gram[(i / 4) * 8 + 2 * t + (i & 1)][g + (i & 2) * 4] = SEGMENTED ? scaled[i / 4][i % 4] : c[i / 4][i % 4];
    }
  }
  __syncwarp();
  float x[SLOTS][BLOCK] = {};
#pragma unroll
  for (int j = 0; j < BLOCK; ++j) {
    const float one = j == column ? 1.0f : 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int head = min(2 * slot + half, HEADS - 1);
      x[slot][j] = fmaf(-s.betas[first_head + head][block * BLOCK + j], x[slot][j], one);
    }
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < BLOCK; i += 4) {
      float4 m[SLOTS];
#pragma unroll
      for (int slot = 0; slot < (SEGMENTED ? SLOTS : 1); ++slot) {
        const int head = SEGMENTED ? min(2 * slot + half, HEADS - 1) : 0;
        const auto* gram = reinterpret_cast<const float(*)[GRAM_STRIDE]>(s.scratch[block][first_head + head]);
        m[slot] = *reinterpret_cast<const float4*>(&gram[j][i]);
      }
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const float4 own = m[SEGMENTED ? slot : 0];
        if (i > j) x[slot][i] = fmaf(own.x, x[slot][j], x[slot][i]);
        if (i + 1 > j) x[slot][i + 1] = fmaf(own.y, x[slot][j], x[slot][i + 1]);
        if (i + 2 > j) x[slot][i + 2] = fmaf(own.z, x[slot][j], x[slot][i + 2]);
        if (i + 3 > j) x[slot][i + 3] = fmaf(own.w, x[slot][j], x[slot][i + 3]);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const int head = 2 * slot + half;
    if (head >= HEADS) continue;
    const float beta = -s.betas[first_head + head][block * BLOCK + column];
    auto* inverse = reinterpret_cast<__nv_bfloat16(*)[BLOCK][INVERSE_STRIDE]>(s.scratch[block][first_head + head]);
#pragma unroll
    for (int i = 0; i < BLOCK; i += 8) {
      uint32_t pairs[4][TERMS];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        split_pair<TERMS>(beta * x[slot][i + 2 * p], beta * x[slot][i + 2 * p + 1], pairs[p]);
      }
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        *reinterpret_cast<uint4*>(&inverse[term][column][i]) =
            make_uint4(pairs[0][term], pairs[1][term], pairs[2][term], pairs[3][term]);
      }
    }
  }
  __syncwarp();
}

// acc += block (M or N, masked) times U' of row block j, for HEADS heads
template <bool SEGMENTED, int HEADS, int TERMS, typename S>
__device__ __forceinline__ void add_block(float (&acc)[2 * HEADS][4], const float (&c)[2][4],
                                          const uint32_t (&shared_terms)[TERMS][4], const S& s, int first_row, int j,
                                          int first_head, int lane) {
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    uint32_t terms[TERMS][4];
    if (SEGMENTED) {
      float scaled[2][4];
      const int* segments = s.segments[first_head + h];
      scale_block(scaled, c, segments + first_row, segments + j * BLOCK, lane >> 2, lane & 3);
      split_block<TERMS>(terms, scaled);
    } else {
#pragma unroll
      for (int i = 0; i < 4 * TERMS; ++i) terms[i / 4][i % 4] = shared_terms[i / 4][i % 4];
    }
#pragma unroll
    for (int right = 0; right < TERMS; ++right) {
      uint32_t b[4];
      load_matrices_transposed(
          b, &s.writes[right][j * BLOCK + (lane & 15)][(first_head + h) * TILE + (lane >> 4) * 8]);
#pragma unroll
      for (int left = 0; left + right < TERMS; ++left) {
        mma(acc[2 * h], terms[left], b[0], b[1]);
        mma(acc[2 * h + 1], terms[left], b[2], b[3]);
      }
    }
  }
}

// acc = U' = -(I + diag(beta) M)^-1 diag(beta) acc of one row block, also written to shared memory as terms
template <int HEADS, int TERMS, typename S>
__device__ __forceinline__ void solve_block(float (&acc)[2 * HEADS][4], S& s, int block, int first_head, int lane) {
  uint32_t inverse[TERMS][HEADS][4], right[2 * HEADS][TERMS][2];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const auto* terms =
        reinterpret_cast<const __nv_bfloat16(*)[BLOCK][INVERSE_STRIDE]>(s.scratch[block][first_head + h]);
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      load_matrices_transposed(inverse[term][h], &terms[term][(lane & 7) + (lane >> 4) * 8][((lane >> 3) & 1) * 8]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2 * HEADS; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pair[TERMS];
      split_pair<TERMS>(acc[n][2 * half], acc[n][2 * half + 1], pair);
#pragma unroll
      for (int term = 0; term < TERMS; ++term) right[n][term][half] = transpose_8x8(pair[term]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
  }
#pragma unroll
  for (int left = 0; left < TERMS; ++left) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int term = 0; left + term < TERMS; ++term) {
        mma(acc[2 * h], inverse[left][h], right[2 * h][term][0], right[2 * h][term][1]);
        mma(acc[2 * h + 1], inverse[left][h], right[2 * h + 1][term][0], right[2 * h + 1][term][1]);
      }
    }
  }
  const int row = block * BLOCK + (lane >> 2), column = first_head * TILE + (lane & 3) * 2;
#pragma unroll
  for (int n = 0; n < 2 * HEADS; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pair[TERMS];
      split_pair<TERMS>(acc[n][2 * half], acc[n][2 * half + 1], pair);
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        *reinterpret_cast<uint32_t*>(&s.writes[term][row + half * 8][column + n * 8]) = pair[term];
      }
    }
  }
}

// acc = gain K S_0 - V' for keys, gain Q S_0 for queries, 0 for padding
template <int HEADS, typename S>
__device__ __forceinline__ void scale_rows(float (&acc)[2 * HEADS][4], const S& s, bool is_key, int first_row,
                                           int first_head, int lane) {
  bool padding = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + (lane >> 2) + half * 8;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const RowScale scale = s.scales[first_head + h][row];
      padding |= scale.scale == 0.0f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* x = &acc[2 * h + n][2 * half];
        x[0] *= scale.gain;
        x[1] *= scale.gain;
        if (is_key) {
          const auto* pair = &s.values[row][(first_head + h) * TILE + n * 8 + (lane & 3) * 2];
          const float2 value = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pair));
          x[0] = fmaf(-scale.inverse, value.x, x[0]);
          x[1] = fmaf(-scale.inverse, value.y, x[1]);
        }
      }
    }
  }
  // select, not multiply: a padding row may hold NaN
  if (!__any_sync(0xffffffffu, padding)) return;
#pragma unroll
  for (int i = 0; i < 8 * HEADS; ++i) {
    const int row = first_row + (lane >> 2) + (i & 2) * 4;
    if (s.scales[first_head][row].scale == 0.0f) acc[i / 4][i % 4] = 0.0f;
  }
}

}  // namespace tfm
