"""Launches that come up while the previous grid of the stream ends (programmatic dependent launch, sm_90 and later).

A kernel launched with `options` calls `follow` before it reads or writes anything that another kernel writes or reads;
before that it may only touch what no kernel writes, such as weights. Every such kernel waits, so one that is done tells
that all before it are. Elsewhere, in the interpreter, and where `launches` says so, `follow` is nothing and
launches are plain.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tfm_kernels import launches

FIRST_CAPABILITY = 9


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next launch come up; then wait for the end of the previous one, whose writes are seen after it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask for the lines of memory at `pointers` to come to the L2 cache; for what no kernel writes, before `follow`."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64, bitcast=True)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


def options(device: torch.device) -> dict:
    """Return the keyword arguments of a launch on `device`; the kernel takes PDL as a constant."""
    is_early = launches.chosen() == "early" and device.type == "cuda"
    if not is_early or torch.cuda.get_device_capability(device)[0] < FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
