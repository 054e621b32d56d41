// csrc/copy_ring.cuh for the emulator: a copy lands at once or, as often, only when its group is waited for.
#pragma once

#include "tensor_core.cuh"

namespace tfm {

inline void land(const emulator::Copy& copy) {
  if (copy.to) copy.from ? memcpy(copy.to, copy.from, 16) : memset(copy.to, 0, 16);
}

inline void copy_in_group(void* to, const void* from, bool real) {
  const emulator::Copy copy{to, real ? from : nullptr};
  if (emulator::order() % 2) return land(copy);
  emulator::block->fibers[emulator::block->current].copies.push_back(copy);
}

// nothing to nowhere ends a group
inline void commit_copies() { emulator::block->fibers[emulator::block->current].copies.push_back({nullptr, nullptr}); }

inline void wait_copies_but(int pending) {
  auto& copies = emulator::block->fibers[emulator::block->current].copies;
  int groups = 0;
  for (const auto& copy : copies) groups += copy.to == nullptr;
  size_t done = 0;
  for (; groups > pending; ++done) {
    land(copies[done]);
    groups -= copies[done].to == nullptr;
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace tfm
