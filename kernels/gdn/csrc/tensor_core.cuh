// Warp-level pieces of the tree-verify kernel: bf16 tensor-core products, fragment moves, the split of fp32 into bf16
// terms, powers of two, and one-shot barriers. Plain PTX of sm_80 and later; no torch headers.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#ifndef TFM_DEFERRED
#define TFM_DEFERRED 0  // 1: a verify first commits the path that the step before accepted (pending.cuh, mixer.cu)
#endif

namespace tfm {

constexpr int MAX_PENDING = 32;  // nodes of a path that is committed inside the next verify: a lane each

constexpr double LOG2E = 1.4426950408889634;

// d += a b: a is 16x16 row-major, b is 16x8 column-major, d is 16x8 in fp32. With g = lane / 4 and t = lane % 4 a lane
// holds a at rows g, g + 8 and columns 2t, 2t + 1 (+8), b at rows 2t, 2t + 1 (+8) and column g, d at rows g, g + 8 and
// columns 2t, 2t + 1. So two neighbouring d tiles, packed to bf16 pairs, are an a.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool real) {
  // a source size of 0 fills with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// x and y as TERMS packed bf16 pairs whose sums approach them: 8, 16, 24 bits of mantissa for 1, 2, 3 terms
template <int TERMS>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&terms)[TERMS]) {
#pragma unroll
  for (int i = 0; i < TERMS; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(terms[i]) : "f"(y), "f"(x));
    if (i + 1 < TERMS) {
      x -= __uint_as_float(terms[i] << 16);
      y -= __uint_as_float(terms[i] & 0xffff0000u);
    }
  }
}

// One-shot barriers: `arrivals` complete the phase, and nobody reuses the barrier afterwards.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
#endif
  }
}

// Barriers of some warps of a block; 0 is __syncthreads.
__device__ __forceinline__ void sync_warps(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ bool sync_warps_or(int barrier, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any;
}

// Lets the next grid of the stream come up while this one works, and waits until all that the previous one wrote is here:
// of a programmatic launch (launch.h) only the time between two grids is overlapped, never their memory traffic.
__device__ __forceinline__ void follow_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Four warps, a warp group: d += a b with a 64x16 (16 rows a warp, fragments as for mma) and b 16x48 in shared memory as
// 8x8 blocks of 128 bytes, a block's row one k; `depth` and `width` are the strides between blocks along k and n.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* first, int depth, int width) {
  const auto units = [](uint64_t bytes) { return (bytes & 0x3ffff) >> 4; };
  return units(shared_address(first)) | units(depth) << 16 | units(width) << 32;
}

__device__ __forceinline__ void group_mma(float (&d)[6][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,"
      "%17,%18,%19,%20,%21,%22,%23}, {%24,%25,%26,%27}, %28, 1, 1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void group_finish() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// ordinary stores to shared memory become visible to group_mma
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^whole, 0 below the normal range
__device__ __forceinline__ float power_of_two(int whole) {
  return whole < -126 ? 0.0f : __int_as_float((min(whole, 127) + 127) << 23);
}

// x = whole + fraction with |fraction| <= 1/2, for |x| < 2^31
__device__ __forceinline__ void split_exponent(double x, int& whole, float& fraction) {
  constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the rounded integer in the low word
  const double shifted = x + SHIFT;
  whole = __double2loint(shifted);
  fraction = static_cast<float>(x - (shifted - SHIFT));
}

// exp(x), 0 below the normal range
__device__ __forceinline__ float exp_of(double x) {
  int whole;
  float fraction;
  split_exponent(x * LOG2E, whole, fraction);
  return exp2_fast(fraction) * power_of_two(whole);
}

__device__ __forceinline__ void add_scaled(float4& sum, float k, float4 u) {
  sum.x = fmaf(k, u.x, sum.x);
  sum.y = fmaf(k, u.y, sum.y);
  sum.z = fmaf(k, u.z, sum.z);
  sum.w = fmaf(k, u.w, sum.w);
}

}  // namespace tfm
