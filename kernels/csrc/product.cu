// The launches of product.cuh for tokens of TFM_TILES tiles.
#include "launch.h"
#include "product.cuh"

#ifndef TFM_TILES
#define TFM_TILES 9
#endif

namespace tfm {

constexpr int MOST_SUMS = 40;  // tiles of 16 x 8 a warp: 160 registers of a thread's 255

struct Request {
  const void *x, *weight;
  void *out, *parts;
  int rows, out_rows, inner;
  int64_t x_stride;
  int stages, programs;
  cudaStream_t stream;
};

template <int TALL, int GROUPS>
int run(const Request& r) {
  if constexpr (TALL * TFM_TILES > MOST_SUMS) {
    return cudaErrorInvalidValue;
  } else {
    using P = Product<TFM_TILES, TALL, GROUPS>;
    const Deal deal((r.out_rows + P::BLOCK - 1) / P::BLOCK, r.inner, r.programs);
    const int shared = P::JOIN_BYTES + r.stages * P::STAGE_BYTES;
    const auto kernel = product_kernel<TFM_TILES, TALL, GROUPS>;
    int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (code) return code;
    const auto x = static_cast<const __nv_bfloat16*>(r.x), weight = static_cast<const __nv_bfloat16*>(r.weight);
    const auto out = static_cast<__nv_bfloat16*>(r.out);
    const auto parts = static_cast<float*>(r.parts);
    code = launch(kernel, dim3(r.programs), P::THREADS, shared, r.stream, x, weight, out, parts, r.rows, r.out_rows,
                  r.inner, r.x_stride, r.stages, deal);
    if (code || deal.rest == 0) return code;
    return launch(product_sum_kernel<TFM_TILES, TALL>, dim3(deal.rest, SLICES * TALL), 32 * TFM_TILES, 0, r.stream,
                  static_cast<const float*>(parts), out, r.rows, r.out_rows, deal);
  }
}

}  // namespace tfm

// x [rows, inner] with rows x_stride apart, weight [out_rows, inner], out [rows, out_rows], bf16, 16-byte aligned; inner
// and x_stride are multiples of 8. `parts` is float32 [2 programs, block_out, 8 TFM_TILES], used where blocks are
// shared. 2 to 8 stages. Returns a cudaError_t.
extern "C" int tfm_product(const void* x, const void* weight, void* out, void* parts, int rows, int out_rows, int inner,
                           int64_t x_stride, int block_out, int warps, int stages, int programs, void* stream) {
  if (rows < 1 || rows > 8 * TFM_TILES || inner % 8 || x_stride % 8 || stages < 2 || stages > 8 || programs < 1) {
    return cudaErrorInvalidValue;
  }
  const tfm::Request request{x,     weight,    out,    parts,    rows, out_rows,
                             inner, x_stride, stages, programs, static_cast<cudaStream_t>(stream)};
  switch (block_out * 16 + warps) {
    case 64 * 16 + 4: return tfm::run<1, 1>(request);
    case 64 * 16 + 8: return tfm::run<1, 2>(request);
    case 128 * 16 + 4: return tfm::run<2, 1>(request);
    case 128 * 16 + 8: return tfm::run<2, 2>(request);
    case 256 * 16 + 4: return tfm::run<4, 1>(request);
    case 256 * 16 + 8: return tfm::run<4, 2>(request);
  }
  return cudaErrorInvalidValue;
}

extern "C" const char* tfm_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
