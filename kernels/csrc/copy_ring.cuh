// Copies from global to shared memory that stay in flight over several steps: groups of 16-byte copies, waited for in
// the order of their commits. Plain PTX of sm_80 and later.
#pragma once

#include "tensor_core.cuh"

namespace tfm {

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
