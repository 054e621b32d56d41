// What depends on the tree and its decays alone: ancestor bits, path sums, the scale of each row. Warps of their own do it
// while the others wait for memory and multiply with the state.
#pragma once

#include "verify_types.cuh"

namespace tfm {

// The nodes of one thread: thread, thread + TREE, ...
template <typename S>
struct OwnNodes {
  static constexpr int EACH = (S::ROWS + S::TREE - 1) / S::TREE;
  typename S::Node node[EACH];
  bool segmented;  // some segment of this thread's nodes differs from 0
  bool real[EACH];  // inside the tree and no padding
  float beta[EACH][GROUP];
  float fraction[EACH][GROUP];               // of the path's log2 decay, |fraction| <= 1/2
  int shift[EACH][GROUP], gain[EACH][GROUP];  // exponents of the row's scale and gain
};

template <typename S>
__device__ __forceinline__ void read_nodes(OwnNodes<S>& own, const VerifyArgs& a, int head, int request, int thread) {
  const int64_t value_heads = a.heads * GROUP;
  const int64_t first = static_cast<int64_t>(request) * a.rows;
  float decay[own.EACH][GROUP];
  int64_t parent[own.EACH];
#pragma unroll
  for (int m = 0; m < own.EACH; ++m) {
    // all loads before the first use, whatever the parent is: one trip to memory
    const int64_t row = first + min(m * S::TREE + thread, a.rows - 1);
    parent[m] = a.parents[row];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      decay[m][h] = a.log_decay[row * value_heads + head * GROUP + h];
      own.beta[m][h] = a.beta[row * value_heads + head * GROUP + h];
    }
  }
#pragma unroll
  for (int m = 0; m < own.EACH; ++m) {
    const int n = m * S::TREE + thread;
    const bool real = own.real[m] = n < a.rows && parent[m] > -2;
    auto& node = own.node[m];
    node.jump = real && parent[m] >= 0 && parent[m] < n ? static_cast<int>(parent[m]) : -1;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) node.path[h] = real ? fmaxf(decay[m][h], MIN_LOG_DECAY) : 0.0f;
#pragma unroll
    for (int w = 0; w < S::WORDS; ++w) node.words[w] = real && w == n / 32 ? 1u << (n & 31) : 0u;
  }
}

// Pointer jumping: each round doubles the distance over which a node has summed, so a tree of depth 16 takes four.
template <typename S>
__device__ __forceinline__ void sum_paths(OwnNodes<S>& own, S& s, int thread) {
  for (bool more = true; more;) {
#pragma unroll
    for (int m = 0; m < own.EACH; ++m) {
      const int n = m * S::TREE + thread;
      if (n < S::ROWS) s.nodes[n] = own.node[m];
    }
    sync_warps(2, S::TREE);
    bool left = false;
#pragma unroll
    for (int m = 0; m < own.EACH; ++m) {
      auto& node = own.node[m];
      if (node.jump < 0) continue;
      const auto above = s.nodes[node.jump];
#pragma unroll
      for (int w = 0; w < S::WORDS; ++w) node.words[w] |= above.words[w];
#pragma unroll
      for (int h = 0; h < GROUP; ++h) node.path[h] += above.path[h];
      node.jump = above.jump;
      left |= above.jump >= 0;
    }
    more = sync_warps_or(2, S::TREE, left);
  }
}

// All that the inverses need: ancestor bits, write strengths, segments.
template <typename S>
__device__ __forceinline__ void write_segments(OwnNodes<S>& own, S& s, int thread) {
  bool segmented = false;
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    int center;
    float unused;
    split_exponent(s.nodes[0].path[h] * LOG2E, center, unused);
#pragma unroll
    for (int m = 0; m < own.EACH; ++m) {
      const int n = m * S::TREE + thread;
      int whole;
      split_exponent(own.node[m].path[h] * LOG2E, whole, own.fraction[m][h]);
      const int below = center - whole;
      // rounds down: a second root may decay less than the first
      const int segment = own.real[m] ? (below + 1024 * SEGMENT) / SEGMENT - 1024 : 0;
      own.shift[m][h] = SEGMENT * segment - below;  // in (-SEGMENT, 0]
      own.gain[m][h] = center - SEGMENT * segment;
      if (n < S::ROWS) {
        s.segments[h][n] = segment;
        s.betas[h][n] = own.real[m] ? own.beta[m][h] : 0.0f;
      }
      segmented |= segment != 0;
    }
  }
#pragma unroll
  for (int m = 0; m < own.EACH; ++m) {
    const int n = m * S::TREE + thread;
#pragma unroll
    for (int w = 0; w < S::WORDS; ++w) {
      if (n < S::ROWS) s.nodes[n].words[w] = own.node[m].words[w];
    }
  }
  own.segmented = segmented;
  sync_warps(2, S::TREE);
}

template <typename S>
__device__ __forceinline__ void write_scales(const OwnNodes<S>& own, S& s, const VerifyArgs& a, int head, int request,
                                             bool first_tile, int thread) {
  const int64_t value_heads = a.heads * GROUP;
  const int64_t first = static_cast<int64_t>(request) * a.rows;
#pragma unroll
  for (int m = 0; m < own.EACH; ++m) {
    const int n = m * S::TREE + thread;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      const float here = own.real[m] ? 1.0f : 0.0f, fraction = own.fraction[m][h];
      const RowScale scale{here * power_of_two(own.gain[m][h]),
                           here * exp2_fast(fraction) * power_of_two(own.shift[m][h]),
                           here * exp2_fast(-fraction) * power_of_two(-own.shift[m][h]), 0.0f};
      if (n < S::ROWS) s.scales[h][n] = scale;
      if (first_tile && n < a.rows) {
        a.path_log_decay[(first + n) * value_heads + head * GROUP + h] = own.node[m].path[h];
      }
    }
  }
}

// Barrier 3 says that the segments are there, and whether any differs from 0; the caller says when the scales are. Waiting there costs nothing: scales are
// needed after the inverses, which start behind that barrier too.
template <typename S>
__device__ __forceinline__ void tree_stage(S& s, const VerifyArgs& a, int head, int request, bool first_tile,
                                           int thread) {
  OwnNodes<S> own;
  read_nodes(own, a, head, request, thread);
  sum_paths(own, s, thread);
  write_segments(own, s, thread);
  sync_warps_or(3, S::THREADS, own.segmented);
  write_scales(own, s, a, head, request, first_tile, thread);
}

}  // namespace tfm
