// Gated-DeltaNet tree verify in one launch: masked triangular solve over the tree, kernels/NOTES.md has the derivation.
//
// Grid (value tile, key head, request). A block owns 16 value columns of all GROUP value heads of one key head, so the
// Gram matrices are formed once for those heads. Rows are cut into blocks of 16; a warp owns one block of keys or of
// queries, and one more warp computes what depends on the tree alone.
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

#include "tensor_core.cuh"

#ifndef TFM_GROUP
#define TFM_GROUP 3
#endif
#ifndef TFM_TERMS
#define TFM_TERMS 2
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TFM_WARP_GROUPS 1
#endif

namespace tfm {

constexpr int GROUP = TFM_GROUP;      // value heads of a key head
constexpr int DIM = 128;              // key and value dimension
constexpr int BLOCK = 16;             // rows of one warp
constexpr int TILE = 16;              // value columns of one thread block
constexpr int COLS = GROUP * TILE;
constexpr int KEY_STRIDE = DIM + 8;   // an odd number of 16-byte units: ldmatrix without bank conflicts
constexpr int COL_STRIDE = COLS + 8;
constexpr int INVERSE_STRIDE = BLOCK + 8;
constexpr int GRAM_STRIDE = BLOCK + 4;
constexpr int SEGMENT = 60;           // log2 units: a decay of 2^-60 is nothing beside 1, and 2^60 fits in fp32 often
constexpr float MIN_LOG_DECAY = -1e4f;

struct VerifyArgs {
  const __nv_bfloat16* q;    // [R, T, H, DIM]
  const __nv_bfloat16* k;    // [R, T, H, DIM]
  const __nv_bfloat16* v;    // [R, T, H * GROUP, DIM]
  const float* log_decay;    // [R, T, H * GROUP]
  const float* beta;         // [R, T, H * GROUP]
  const int64_t* parents;    // [R, T]; -1 starts from the state, -2 is padding: not read, output 0
  const float* state;        // [R, H * GROUP, DIM, DIM]
  void* out;                 // [R, T, H * GROUP, DIM] float or bf16
  float* u;                  // [R, T, H * GROUP, DIM]
  double* path_log_decay;    // [R, T, H * GROUP]
  int rows;                  // T
  int heads;                 // H
  int out_is_bf16;
};

struct RowScale {
  float gain, scale, inverse, unused;  // scale = e; 0 marks padding
};

template <int BLOCKS, int TERMS>
struct Shape {
  static constexpr int ROWS = BLOCKS * BLOCK;
  static constexpr int WORDS = (ROWS + 31) / 32;
  // few rows: a warp for each value head, or too few warps would hide nothing
  static constexpr int PARTS = BLOCKS <= 2 ? GROUP : 1;
  static constexpr int HEADS = GROUP / PARTS;
  static constexpr int WORKERS = BLOCKS * 2 * PARTS * 32;
  static constexpr int TREE = BLOCKS <= 2 ? 32 : 64;  // threads of the tree stage
  static constexpr int THREADS = WORKERS + TREE;
  // of the working warps, those in whole warp groups where the architecture has products of a group
  static constexpr int GROUPED = PARTS == 1 && COLS == 48 ? WORKERS / 128 * 4 : 0;
};

// Shared memory of one block. Writes live where the queries were and scratch where the state was: both are read into
// registers before the barrier that follows the products with the state.
template <int BLOCKS, int TERMS>
struct Shared : Shape<BLOCKS, TERMS> {
  using Shape<BLOCKS, TERMS>::ROWS;
  static constexpr int GRAM_BYTES = BLOCK * GRAM_STRIDE * 4, INVERSE_BYTES = TERMS * BLOCK * INVERSE_STRIDE * 2;
  static constexpr int SCRATCH = GRAM_BYTES > INVERSE_BYTES ? GRAM_BYTES : INVERSE_BYTES;
  struct alignas(16) Node {
    double path[GROUP];
    int jump;
    uint32_t words[Shape<BLOCKS, TERMS>::WORDS];  // bit j: node j is this node or its ancestor
  };
  union {
    __nv_bfloat16 queries[ROWS][KEY_STRIDE];
    __nv_bfloat16 writes[TERMS][ROWS][COL_STRIDE];
  };
  __nv_bfloat16 keys[ROWS][KEY_STRIDE];
  union {
    // 8x8 blocks of 128 bytes, [k / 8][column / 8][k % 8][column % 8]: what ldmatrix and warp groups both read
    __nv_bfloat16 state[TERMS][DIM / 8][COLS / 8][8][8];
    unsigned char scratch[BLOCKS][GROUP][SCRATCH];
  };
  __nv_bfloat16 values[ROWS][COL_STRIDE];
  RowScale scales[GROUP][ROWS];
  float betas[GROUP][ROWS];
  int segments[GROUP][ROWS];
  Node nodes[ROWS];
  uint64_t ready[BLOCKS * GROUP];  // U' of a row block is written
  uint64_t scaled;                 // the scales are written
  int segmented;                   // some segment differs from 0
};

// Warps of their own: ancestor bits, path decays and row scales of one key head's value heads, by pointer jumping: each
// round doubles the distance over which a node has summed, so a tree of depth 16 takes four.
template <typename S>
__device__ __forceinline__ void tree_stage(S& s, const VerifyArgs& a, int head, int request, bool first_tile,
                                           int thread) {
  constexpr int EACH = (S::ROWS + S::TREE - 1) / S::TREE;
  const int64_t value_heads = a.heads * GROUP;
  const int64_t first = static_cast<int64_t>(request) * a.rows;
  typename S::Node node[EACH];
  bool real[EACH];
  float beta[EACH][GROUP], own_decay[EACH][GROUP];
  int64_t parent[EACH];
#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    // all loads before the first use, whatever the parent is: one trip to memory
    const int n = m * S::TREE + thread;
    const int64_t row = first + min(n, a.rows - 1);
    parent[m] = a.parents[row];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      own_decay[m][h] = a.log_decay[row * value_heads + head * GROUP + h];
      beta[m][h] = a.beta[row * value_heads + head * GROUP + h];
    }
  }
#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    const int n = m * S::TREE + thread;
    real[m] = n < a.rows && parent[m] > -2;
    node[m].jump = real[m] && parent[m] >= 0 && parent[m] < n ? static_cast<int>(parent[m]) : -1;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) node[m].path[h] = real[m] ? fmaxf(own_decay[m][h], MIN_LOG_DECAY) : 0.0f;
#pragma unroll
    for (int w = 0; w < S::WORDS; ++w) node[m].words[w] = real[m] && w == n / 32 ? 1u << (n & 31) : 0u;
  }
  for (bool more = true; more;) {
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
      const int n = m * S::TREE + thread;
      if (n < S::ROWS) s.nodes[n] = node[m];
    }
    sync_warps(2, S::TREE);
    bool left = false;
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
      if (node[m].jump >= 0) {
        const auto above = s.nodes[node[m].jump];
#pragma unroll
        for (int w = 0; w < S::WORDS; ++w) node[m].words[w] |= above.words[w];
#pragma unroll
        for (int h = 0; h < GROUP; ++h) node[m].path[h] += above.path[h];
        node[m].jump = above.jump;
        left |= above.jump >= 0;
      }
    }
    more = sync_warps_or(2, S::TREE, left);
  }

  int shift[EACH][GROUP], gain[EACH][GROUP];
  float fraction[EACH][GROUP];
  bool segmented = false;
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    int center;
    float unused;
    split_exponent(s.nodes[0].path[h] * LOG2E, center, unused);
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
      const int n = m * S::TREE + thread;
      int whole;
      split_exponent(node[m].path[h] * LOG2E, whole, fraction[m][h]);
      const int below = center - whole;
      // rounds down: a second root may decay less than the first
      const int segment = real[m] ? (below + 1024 * SEGMENT) / SEGMENT - 1024 : 0;
      shift[m][h] = SEGMENT * segment - below;  // in (-SEGMENT, 0]
      gain[m][h] = center - SEGMENT * segment;
      if (n < S::ROWS) {
        s.segments[h][n] = segment;
        s.betas[h][n] = real[m] ? beta[m][h] : 0.0f;
      }
      segmented |= segment != 0;
    }
  }
#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    const int n = m * S::TREE + thread;
#pragma unroll
    for (int w = 0; w < S::WORDS; ++w) {
      if (n < S::ROWS) s.nodes[n].words[w] = node[m].words[w];
    }
  }
  segmented = sync_warps_or(2, S::TREE, segmented);
  if (thread == 0) s.segmented = segmented;
  arrive_warps(3, S::THREADS);

#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    const int n = m * S::TREE + thread;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      const float here = real[m] ? 1.0f : 0.0f;
      const RowScale scale{here * power_of_two(gain[m][h]), here * exp2_fast(fraction[m][h]) * power_of_two(shift[m][h]),
                           here * exp2_fast(-fraction[m][h]) * power_of_two(-shift[m][h]), 0.0f};
      if (n < S::ROWS) s.scales[h][n] = scale;
      if (first_tile && n < a.rows) a.path_log_decay[(first + n) * value_heads + head * GROUP + h] = node[m].path[h];
    }
  }
}

// Copy this block's keys, queries and values to shared memory and its state, split into terms.
template <int TERMS, typename S>
__device__ __forceinline__ void load_inputs(S& s, const VerifyArgs& a, int tile, int head, int request, int thread) {
  constexpr int LINES = S::WORKERS / 4, PASSES = (DIM + LINES - 1) / LINES;
  const int line = thread / 4, quarter = thread % 4 * 4;
  const float* state = a.state + (static_cast<int64_t>(request) * a.heads + head) * (GROUP * DIM * DIM) + tile * TILE +
                       (line * DIM + quarter);
  float4 held[GROUP][PASSES];
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (line + pass * LINES < DIM) {
        held[h][pass] = __ldg(reinterpret_cast<const float4*>(state + h * DIM * DIM + pass * LINES * DIM));
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
    if (thread < BLOCKS * PARTS) barrier_init(&s.ready[thread], 1);
    if (thread == 0) barrier_init(&s.scaled, S::TREE / 32);
    tree_stage(s, a, head, request, tile == 0, thread);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.scaled);
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
  sync_warps(3, S::THREADS);

  const bool segmented = s.segmented;
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
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.ready[block * PARTS + part]);
  }
  store_rows<HEADS>(acc, s, a, is_key, first_row, first_head, lane);
}

}  // namespace tfm
