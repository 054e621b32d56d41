// Sizes, arguments and shared memory of the tree-verify kernel.
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
constexpr int SEGMENT = 60;           // log2 units: 2^-60 is nothing beside 1, and 2^60 leaves room in fp32
constexpr float MIN_LOG_DECAY = -1e4f;

// What the step before left to commit: a path of its tree, and what its verify wrote of that tree.
struct Pending {
  const int64_t* path;           // [R, max_length] nodes from the root down, then -1
  const __nv_bfloat16* k;        // [R, rows, H, DIM]
  const float* u;                // [R, rows, H * GROUP, DIM]
  const double* path_log_decay;  // [R, rows, H * GROUP]
  int max_length;                // at most MAX_PENDING; 0: nothing is pending
  int rows;
};

struct VerifyArgs {
  const __nv_bfloat16* q;    // [R, T, H, DIM]
  const __nv_bfloat16* k;    // [R, T, H, DIM]
  const __nv_bfloat16* v;    // [R, T, H * GROUP, DIM]
  const float* log_decay;    // [R, T, H * GROUP]
  const float* beta;         // [R, T, H * GROUP]
  const int64_t* parents;    // [R, T]; -1 starts from the state, -2 is padding: not read, output 0
  float* state;              // [R, H * GROUP, DIM, DIM]; written where a path is pending, else read only
  void* out;                 // [R, T, H * GROUP, DIM] float or bf16
  float* u;                  // [R, T, H * GROUP, DIM]
  double* path_log_decay;    // [R, T, H * GROUP]
  int rows;                  // T
  int heads;                 // H
  int out_is_bf16;
  Pending pending;
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

// What a block needs of the pending path.
struct PendingRows {
  __nv_bfloat16 keys[MAX_PENDING][DIM];
  float writes[MAX_PENDING][COLS];
  float weights[GROUP][MAX_PENDING];  // decay from a node to the path's last one
  float gains[GROUP];                 // of the whole path
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
#if TFM_DEFERRED
  alignas(16) PendingRows pending;
#endif
};

}  // namespace tfm
