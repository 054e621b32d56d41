// Copies from global to shared memory that stay in flight over several steps: groups of 16-byte copies, waited for in
// the order of their commits. Plain PTX of sm_80 and later.
#pragma once

#include "tensor_core.cuh"

namespace tfm {

// what is read once leaves the L2 cache first
__device__ __forceinline__ uint64_t policy_read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_async_16_once(void* to, const void* from, bool real, uint64_t policy) {
  // a source size of 0 fills with zeros
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "r"(real ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until of this thread's groups at most the last `pending` (0 to 6) are still in flight.
__device__ __forceinline__ void wait_copies_but(int pending) {
  switch (pending) {
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

}  // namespace tfm
