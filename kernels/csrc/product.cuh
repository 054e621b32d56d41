// x [M, K] times weight [N, K] transposed, bf16 with float32 sums, for M of at most 144: the weight's rows are the tall
// side of mma, tokens are columns in tiles of 8, so 65 tokens cost 72 columns.
//
// A step is 64 of K of one block of 64 TALL rows. Four warps take 16 TALL rows each, with every token; with GROUPS = 2
// another four take the other half of each step and the two sums meet in shared memory. Weight and tokens come through
// one ring of stages. Of the blocks, as many as come out even are done whole by one program; the steps of the rest are
// dealt out evenly, and what several programs did of a block is added up by a second launch in their order.
#pragma once

#include "copy_ring.cuh"

namespace tfm {

constexpr int STEP = 64;              // of K: rows of 128 bytes, 8 chunks of 16
constexpr int ROW = 2 * STEP, CHUNKS = ROW / 16;
constexpr int SLICES = 4;             // warps side by side along the weight's rows

// How blocks and steps are shared; the same numbers in both launches.
struct Deal {
  int steps;     // of a block
  int whole;     // blocks that each program does alone: program p does blocks p, p + programs, ..
  int programs;
  int rest;      // blocks behind them, whose steps are dealt out
  int sharers;   // programs that get some of those: the first so many, so that none gets nothing

  __host__ __device__ Deal(int blocks, int inner, int programs)
      : steps((inner + STEP - 1) / STEP), whole(blocks / programs), programs(programs), rest(blocks % programs),
        sharers(programs < rest * steps ? programs : rest * steps) {}
  // the first of the dealt steps that `program` does not leave to those before it
  __device__ int begin(int program) const {
    const int units = rest * steps;
    return program < sharers ? static_cast<int>(static_cast<int64_t>(units) * program / sharers) : units;
  }
  // the program that does step `unit` of the dealt ones
  __device__ int owner(int unit) const {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * sharers - 1) / (rest * steps));
  }
};

template <int TILES, int TALL, int GROUPS>
struct Product {
  static constexpr int BLOCK = 16 * SLICES * TALL, TOKENS = 8 * TILES;
  static constexpr int THREADS = 32 * SLICES * GROUPS;
  static constexpr int WEIGHT_BYTES = BLOCK * ROW, STAGE_BYTES = WEIGHT_BYTES + TOKENS * ROW;
  static constexpr int JOIN_BYTES = GROUPS == 1 ? 0 : SLICES * TILES * 32 * 16;  // one 16-row tile of every slice
  static constexpr int PART = BLOCK * TOKENS;                                    // floats
};

// Where a program is: its step `local` is step `step` of block `block`.
struct Place {
  int block, step;
  bool is_begun;  // this program does the block's first step
};

__device__ __forceinline__ Place place_of(const Deal& deal, int program, int local) {
  const int alone = deal.whole * deal.steps, begin = deal.begin(program);
  if (local < alone) return {local / deal.steps * deal.programs + program, local % deal.steps, true};
  const int unit = begin + local - alone, step = unit % deal.steps;
  return {deal.whole * deal.programs + unit / deal.steps, step, unit - step >= begin};
}

// What a thread copies in the step at hand: every so many rows of the weight and of the tokens, 16 bytes of each.
template <class P>
struct Source {
  static constexpr int ROWS_A_TURN = P::THREADS / CHUNKS;  // a multiple of 16, so that a thread's chunk keeps its place

  const __nv_bfloat16 *weight, *tokens;
  int64_t weight_turn, token_turn;  // elements from one of its rows to the next
  int left, k;                      // rows of the weight from the block's first on; where its chunk begins

  __device__ void go_to(const Place& at, const __nv_bfloat16* x, const __nv_bfloat16* all, int out_rows, int inner,
                        int64_t x_stride) {
    const int first = threadIdx.x / CHUNKS;
    const int64_t row = static_cast<int64_t>(at.block) * P::BLOCK;
    k = at.step * STEP + threadIdx.x % CHUNKS * 8;
    left = static_cast<int>(out_rows - row);
    weight_turn = static_cast<int64_t>(ROWS_A_TURN) * inner;
    token_turn = ROWS_A_TURN * x_stride;
    weight = all + (row + first) * inner + k;
    tokens = x + first * x_stride + k;
  }

  __device__ void step_on() {
    weight += STEP;
    tokens += STEP;
    k += STEP;
  }
};

// One step's weight rows and tokens on their way to `stage`. Chunk c of weight row r lies at c ^ (bits 0, 2, 3 of r), of
// token r at c ^ (r mod 8): the eight rows that one phase of ldmatrix reads (multiply_half) then lie in different banks.
// Rows and columns past the end become zeros, and their addresses are not read.
template <class P>
__device__ __forceinline__ void bring(unsigned char* stage, const Source<P>& from, int rows, int inner) {
  constexpr int ROWS_A_TURN = Source<P>::ROWS_A_TURN;
  const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
  unsigned char* to = stage + first * ROW + (chunk ^ ((first & 1) | (first >> 1 & 6))) * 16;
  const int left = from.k < inner ? from.left : 0, tokens = from.k < inner ? rows : 0;
  const __nv_bfloat16* row = from.weight;
#pragma unroll
  for (int r = 0; r < P::BLOCK; r += ROWS_A_TURN, row += from.weight_turn) {
    copy_async_16(to + r * ROW, row, first + r < left);
  }
  to = stage + P::WEIGHT_BYTES + first * ROW + (chunk ^ (first & 7)) * 16;
  row = from.tokens;
#pragma unroll
  for (int r = 0; r < P::TOKENS; r += ROWS_A_TURN, row += from.token_turn) {
    if (r + ROWS_A_TURN <= P::TOKENS || first + r < P::TOKENS) copy_async_16(to + r * ROW, row, first + r < tokens);
  }
}

// Where a lane reads in a stage, for the first 16 of K that its warp multiplies: the others lie at these, xor 32 and 64.
// Fragment row f of a 16-row tile is its row 4 (f / 2 mod 4) + f mod 2, plus 2 for f of 8 or more: store_tile then has
// four neighbouring rows of a token in one lane.
struct Lane {
  int weight, tokens;

  __device__ Lane(int tall, int weight_bytes, int slice, int half) {
    const int matrix = threadIdx.x % 32 / 8, r = threadIdx.x % 8;
    weight = (slice * tall * 16 + 4 * (r / 2) + r % 2 + 2 * (matrix % 2)) * ROW + ((half * 4 + matrix / 2) ^ r) * 16;
    tokens = weight_bytes + r * ROW + ((half * 4 + matrix) ^ r) * 16;
  }
};

// sums += 16 TALL rows times all tokens, over half a step (32 of K)
template <int TILES, int TALL>
__device__ __forceinline__ void multiply_half(float (&sums)[TALL][TILES][4], const unsigned char* stage, int weight,
                                              int tokens) {
  constexpr int TOGETHER = TALL == 4 ? 1 : TALL == 2 ? 2 : 4;  // tiles whose products take turns: no sum waits for itself
  uint32_t a[2][TALL][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
      load_matrices(a[s][i], stage + (weight ^ s * 32) + i * 16 * ROW);
    }
  }
#pragma unroll
  for (int first = 0; first < TILES; first += TOGETHER) {
    uint32_t b[TOGETHER][4];
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      if (first + j < TILES) load_matrices(b[j], stage + tokens + (first + j) * 8 * ROW);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
        for (int i = 0; i < TALL; ++i) {
          if (first + j < TILES) mma(sums[i][first + j], a[s][i], b[j][2 * s], b[j][2 * s + 1]);
        }
      }
    }
  }
}

// One 16x8 tile of sums, as bf16, to out[token0 .. token0 + 8)[row0 .. row0 + 16): 32 bytes a token.
__device__ __forceinline__ void store_tile(__nv_bfloat16* out, const float (&d)[4], int64_t row0, int token0, int rows,
                                           int out_rows) {
  const int lane = threadIdx.x % 32, token = token0 + lane / 4;
  uint32_t low[1], high[1];
  split_pair<1>(d[0], d[1], low);
  split_pair<1>(d[2], d[3], high);
  const uint32_t pairs[2] = {transpose_8x8(low[0]), transpose_8x8(high[0])};
  const int64_t row = row0 + lane % 4 * 4;
  if (token >= rows || row >= out_rows) return;
  __nv_bfloat16* to = out + static_cast<int64_t>(token) * out_rows + row;
  if (out_rows % 4 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row + i < out_rows) reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16));
  }
}

// Adds the second group's sums to the first's, tile row by tile row; every thread calls it.
template <int TILES, int TALL>
__device__ __forceinline__ void join_groups(float (&sums)[TALL][TILES][4], float4* join) {
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % SLICES, group = threadIdx.x / 32 / SLICES;
#pragma unroll
  for (int i = 0; i < TALL; ++i) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      float(&d)[4] = sums[i][j];
      if (group == 1) join[(slice * TILES + j) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      float(&d)[4] = sums[i][j];
      if (group == 1) continue;
      const float4 more = join[(slice * TILES + j) * 32 + lane];
      d[0] += more.x, d[1] += more.y, d[2] += more.z, d[3] += more.w;
    }
  }
}

// Grid: programs. `parts` has two places a program: what it did of a block that another began, of one that another ends.
template <int TILES, int TALL, int GROUPS>
__global__ void __launch_bounds__(32 * SLICES * GROUPS, 1)
    product_kernel(const __nv_bfloat16* x, const __nv_bfloat16* weight, __nv_bfloat16* out, float* parts, int rows,
                   int out_rows, int inner, int64_t x_stride, int stages, Deal deal) {
  using P = Product<TILES, TALL, GROUPS>;
  extern __shared__ __align__(16) unsigned char memory[];
  float4* join = reinterpret_cast<float4*>(memory);
  unsigned char* ring = memory + P::JOIN_BYTES;
  const int program = blockIdx.x, lane = threadIdx.x % 32;
  const int slice = threadIdx.x / 32 % SLICES, group = threadIdx.x / 32 / SLICES;
  const int count = deal.whole * deal.steps + deal.begin(program + 1) - deal.begin(program);
  float sums[TALL][TILES][4] = {};
  const Lane own(TALL, P::WEIGHT_BYTES, slice, GROUPS == 1 ? 0 : group);
  Place at = place_of(deal, program, 0), ahead = at;
  Source<P> source;
  source.go_to(ahead, x, weight, out_rows, inner, x_stride);
  // brings step `local` and turns to the next
  const auto bring_next = [&](int local, unsigned char* stage) {
    if (local < count) {
      bring<P>(stage, source, rows, inner);
      source.step_on();
      if (++ahead.step == deal.steps) {
        ahead = place_of(deal, program, local + 1);
        source.go_to(ahead, x, weight, out_rows, inner, x_stride);
      }
    }
    commit_copies();
  };
  follow_previous_grid();
  for (int local = 0; local < stages - 1; ++local) bring_next(local, ring + local * P::STAGE_BYTES);
  int now = 0, next = stages - 1;
  for (int local = 0; local < count; ++local) {
    wait_copies_but(stages - 2);
    __syncthreads();
    bring_next(local + stages - 1, ring + next * P::STAGE_BYTES);
    const unsigned char* stage = ring + now * P::STAGE_BYTES;
#pragma unroll
    for (int half = 0; half < 2 / GROUPS; ++half) {
      multiply_half<TILES, TALL>(sums, stage, own.weight ^ half * 64, own.tokens ^ half * 64);
    }
    next = now;
    now = now + 1 == stages ? 0 : now + 1;
    const bool is_end = at.step + 1 == deal.steps;
    if (!is_end && local + 1 < count) {
      ++at.step;
      continue;
    }
    if constexpr (GROUPS == 2) join_groups<TILES, TALL>(sums, join);
    const bool is_whole = at.is_begun && is_end;
    float4* part = reinterpret_cast<float4*>(parts + (2 * static_cast<int64_t>(program) + at.is_begun) * P::PART);
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        float(&d)[4] = sums[i][j];
        const int tile = slice * TALL + i;
        if (group == 0 && is_whole) {
          store_tile(out, d, static_cast<int64_t>(at.block) * P::BLOCK + tile * 16, j * 8, rows, out_rows);
        } else if (group == 0) {
          part[(tile * TILES + j) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
        }
        d[0] = d[1] = d[2] = d[3] = 0.0f;
      }
    }
    at = place_of(deal, program, local + 1);
  }
}

// Grid (dealt blocks, 16-row tiles of a block), a warp a tile of tokens: adds up a block that more than one program did.
template <int TILES, int TALL>
__global__ void __launch_bounds__(32 * TILES) product_sum_kernel(const float* parts, __nv_bfloat16* out, int rows,
                                                                 int out_rows, Deal deal) {
  constexpr int PART = Product<TILES, TALL, 1>::PART;
  follow_previous_grid();
  const int lane = threadIdx.x % 32, j = threadIdx.x / 32, block = blockIdx.x, tile = blockIdx.y;
  const int head = deal.owner(block * deal.steps);
  const int tail = deal.owner((block + 1) * deal.steps - 1);
  if (head == tail) return;
  const float4* part = reinterpret_cast<const float4*>(parts) + (tile * TILES + j) * 32 + lane;
  float d[4] = {};
#pragma unroll 8
  for (int program = head; program <= tail; ++program) {
    const float4 more = part[(2 * static_cast<int64_t>(program) + (program == head)) * (PART / 4)];
    d[0] += more.x, d[1] += more.y, d[2] += more.z, d[3] += more.w;
  }
  const int64_t row0 = (static_cast<int64_t>(deal.whole) * deal.programs + block) * Product<TILES, TALL, 1>::BLOCK;
  store_tile(out, d, row0 + tile * 16, j * 8, rows, out_rows);
}

}  // namespace tfm
