// Launcher of the tree-verify kernel: raw pointers, a stream, an error code. Shapes are checked by the caller
// (kernels/gdn/fused_cuda.py); rows and shared memory are checked here too.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "launch.h"
#include "tree_verify.cuh"

#ifndef TFM_ALONE
#define TFM_ALONE 120000
#endif

namespace {

using tfm::GROUP;
constexpr int TERMS = TFM_TERMS;
constexpr int MAX_BLOCKS = 9;  // row blocks: 144 rows
constexpr int TOO_MANY_ROWS = -1, TOO_LONG = -2;
// asked for on sm_90 so that a multiprocessor holds one block: with two, a launch that comes up early halves the chip
constexpr int ALONE = TFM_OVERLAP ? TFM_ALONE : 0;

template <int BLOCKS>
int launch(const tfm::VerifyArgs& args, int requests, cudaStream_t stream) {
  void (*kernel)(tfm::VerifyArgs) = tfm::tree_verify_kernel<BLOCKS, TERMS>;
  const int bytes = std::max<int>(sizeof(tfm::Shared<BLOCKS, TERMS>), ALONE);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(tfm::DIM / tfm::TILE, args.heads, requests);
  return tfm::launch(kernel, grid, tfm::Shape<BLOCKS, TERMS>::THREADS, bytes, stream, args);
}

// call `use` with the fewest blocks that hold `rows`
template <int BLOCKS = 1, typename Use>
int with_blocks(int rows, Use use) {
  if (rows <= BLOCKS * tfm::BLOCK) return use(std::integral_constant<int, BLOCKS>());
  if constexpr (BLOCKS < MAX_BLOCKS) {
    return with_blocks<BLOCKS + 1>(rows, use);
  } else {
    return TOO_MANY_ROWS;
  }
}

}  // namespace

extern "C" {

// bytes of shared memory that `rows` rows need, -1 where they are too many
int tfm_verify_shared_bytes(int rows) {
  return with_blocks(rows, [](auto blocks) { return static_cast<int>(sizeof(tfm::Shared<blocks(), TERMS>)); });
}

const char* tfm_error_string(int code) {
  if (code == TOO_LONG) return "the path is too long";
  return code == TOO_MANY_ROWS ? "too many rows" : cudaGetErrorString(static_cast<cudaError_t>(code));
}

// `state` is written only where pending_length > 0, which takes a library built with TFM_DEFERRED=1.
int tfm_tree_verify(const void* q, const void* k, const void* v, const void* log_decay, const void* beta,
                    const void* parents, void* state, void* out, void* u, void* path_log_decay, int requests,
                    int rows, int heads, int out_is_bf16, const void* pending_path, const void* pending_k,
                    const void* pending_u, const void* pending_decay, int pending_length, int pending_rows,
                    void* stream) {
  if (pending_length > (TFM_DEFERRED ? tfm::MAX_PENDING : 0)) return TOO_LONG;
  tfm::VerifyArgs args;
  args.q = static_cast<const __nv_bfloat16*>(q);
  args.k = static_cast<const __nv_bfloat16*>(k);
  args.v = static_cast<const __nv_bfloat16*>(v);
  args.log_decay = static_cast<const float*>(log_decay);
  args.beta = static_cast<const float*>(beta);
  args.parents = static_cast<const int64_t*>(parents);
  args.state = static_cast<float*>(state);
  args.out = out;
  args.u = static_cast<float*>(u);
  args.path_log_decay = static_cast<double*>(path_log_decay);
  args.rows = rows;
  args.heads = heads;
  args.out_is_bf16 = out_is_bf16;
  args.pending = {static_cast<const int64_t*>(pending_path),
                  static_cast<const __nv_bfloat16*>(pending_k),
                  static_cast<const float*>(pending_u),
                  static_cast<const double*>(pending_decay),
                  pending_length,
                  pending_rows};
  return with_blocks(
      rows, [&](auto blocks) { return launch<blocks()>(args, requests, static_cast<cudaStream_t>(stream)); });
}
}
