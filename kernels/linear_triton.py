"""Products of few rows with a large weight: x [M, in] times weight [out, in] transposed; reading the weight is all.

Tokens are the narrow side: a tile is BN rows of the weight by the tokens, which are padded to a power of two, or to 64
and a power of two behind them (65 rows take 64 + 16, not 128). There are two ways to share the work. "triton" gives a
program one block of the weight's rows, of which the inner dimension may be cut into splits. "stream" starts a program
or two a multiprocessor and deals out all steps of all blocks evenly, so that none waits for a last wave; a block that
two programs share is added up by a second launch. "cuda" is the latter in CUDA C++ (product_cuda.py), with tokens
padded to 8. Which form a shape takes was measured (`linear_choices.json`); one that nobody measured goes to torch's own
product.
"""

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton, product_cuda
from tfm_kernels.dot_triton import dot
from tfm_kernels.pdl_triton import follow, prefetch

CHOICES = Path(__file__).parent / "linear_choices.json"
MAX_ROWS = 192
LINE = tl.constexpr(64)  # numbers of bf16 in a line of the L2 cache


@dataclass(frozen=True)
class Choice:
    """How one shape is multiplied: by torch, or by the kernel with these tiles."""

    form: str = "torch"  # torch, triton, stream, cuda
    block_out: int = 64
    block_in: int = 128
    splits: int = 1  # of the inner dimension; of stream and cuda: programs a multiprocessor
    warps: int = 4
    stages: int = 4


@triton.jit
def _store(acc, out_p, first, out_row, M, OUT, SIZE: tl.constexpr):
    token = first + tl.arange(0, SIZE)
    inside = (out_row < OUT)[:, None] & (token < M)[None, :]
    tl.store(out_p + token[None, :].to(tl.int64) * OUT + out_row[:, None], acc.to(out_p.dtype.element_ty), mask=inside)


@triton.jit
def _bring(weight_p, out_row, low, IN, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):
    # the program's first tiles of the weight, which no kernel writes, come while the previous grid still works
    for tile in tl.static_range(AHEAD):
        column = tl.minimum(low + tile * BK + tl.arange(0, BK // LINE) * LINE, IN - 1)
        prefetch(weight_p + out_row[:, None].to(tl.int64) * IN + column[None, :], PDL)


# rows and splits are plain numbers: one compiled kernel serves every count of either
@triton.jit(do_not_specialize=["M", "SPLITS"])
def _linear_kernel(
    x_p, weight_p, out_p, M, OUT, IN, x_stride, SPLITS, FIRST: tl.constexpr, SECOND: tl.constexpr,
    HAS_SECOND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # grid (blocks of the weight's rows, splits of the inner dimension); `out` has one plane a split
    block, split = tl.program_id(0), tl.program_id(1)
    out_row, lane = block * BN + tl.arange(0, BN), tl.arange(0, BK)
    first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    each = tl.cdiv(tl.cdiv(IN, SPLITS), BK) * BK
    low = split * each
    high = tl.minimum(low + each, IN)
    _bring(weight_p, tl.minimum(out_row, OUT - 1), low, IN, BK, AHEAD, PDL)
    follow(PDL)
    weights = weight_p + out_row[:, None].to(tl.int64) * IN + lane[None, :]
    acc = tl.zeros((BN, FIRST), tl.float32)
    more = tl.zeros((BN, SECOND), tl.float32)
    for k in range(low, high, BK):
        tile = tl.load(weights + k, mask=(out_row < OUT)[:, None], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_p + first[:, None] * x_stride + (k + lane)[None, :], mask=(first < M)[:, None], other=0.0)
        acc = dot(tile, tl.trans(x), acc)
        if HAS_SECOND:
            y = tl.load(x_p + second[:, None] * x_stride + (k + lane)[None, :], mask=(second < M)[:, None], other=0.0)
            more = dot(tile, tl.trans(y), more)
    out_p += split.to(tl.int64) * M * OUT
    _store(acc, out_p, 0, out_row, M, OUT, FIRST)
    if HAS_SECOND:
        _store(more, out_p, FIRST, out_row, M, OUT, SECOND)


@triton.jit
def _sum_kernel(parts_p, out_p, COUNT, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts_p + split * COUNT + at, mask=at < COUNT, other=0.0)
    tl.store(out_p + at, total.to(out_p.dtype.element_ty), mask=at < COUNT)


@triton.jit(do_not_specialize=["M", "units"])
def _stream_kernel(
    x_p, weight_p, out_p, part_p, M, OUT, IN, x_stride, units, FIRST: tl.constexpr, SECOND: tl.constexpr,
    HAS_SECOND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # grid (programs): of the `units` steps (BK of the inner dimension of one block) each does as many as the others
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = IN // BK
    low, high = program * units // programs, (program + 1) * units // programs
    lane, here = tl.arange(0, BK), tl.arange(0, BN)
    first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    acc = tl.zeros((BN, FIRST), tl.float32)
    more = tl.zeros((BN, SECOND), tl.float32)
    _bring(weight_p, tl.minimum(low // steps * BN + here, OUT - 1), low % steps * BK, IN, BK, AHEAD, PDL)
    follow(PDL)
    for unit in range(low, high):
        block, k = unit // steps, unit % steps * BK
        out_row = block * BN + here
        tile = tl.load(
            weight_p + out_row[:, None].to(tl.int64) * IN + (k + lane)[None, :], mask=(out_row < OUT)[:, None],
            other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_p + first[:, None] * x_stride + (k + lane)[None, :], mask=(first < M)[:, None], other=0.0)
        acc = dot(tile, tl.trans(x), acc)
        if HAS_SECOND:
            y = tl.load(x_p + second[:, None] * x_stride + (k + lane)[None, :], mask=(second < M)[:, None], other=0.0)
            more = dot(tile, tl.trans(y), more)
        is_last = k + BK == IN
        if is_last | (unit + 1 == high):
            begins = block * steps >= low
            if begins & is_last:
                _store(acc, out_p, 0, out_row, M, OUT, FIRST)
                if HAS_SECOND:
                    _store(more, out_p, FIRST, out_row, M, OUT, SECOND)
            else:
                # a block that another program began lies in the first place, one that another ends in the second
                place = (2 * program + begins.to(tl.int32)).to(tl.int64) * BN * (FIRST + SECOND)
                row = part_p + place + here[:, None] * (FIRST + SECOND)
                tl.store(row + first[None, :], acc)
                if HAS_SECOND:
                    tl.store(row + second[None, :], more)
            acc = tl.zeros((BN, FIRST), tl.float32)
            more = tl.zeros((BN, SECOND), tl.float32)


@triton.jit(do_not_specialize=["M", "steps", "units", "programs"])
def _stream_sum_kernel(
    part_p, out_p, M, OUT, steps, units, programs, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # grid (blocks): those that more than one program did
    follow(PDL)
    block = tl.program_id(0)
    here, token = tl.arange(0, BN), tl.arange(0, WIDTH)
    head = ((block * steps + 1).to(tl.int64) * programs - 1) // units
    tail = ((block + 1) * steps.to(tl.int64) * programs - 1) // units
    if head < tail:
        total = tl.zeros((BN, WIDTH), tl.float32)
        for program in range(head, tail + 1):
            place = (2 * program + (program == head).to(tl.int64)) * BN * TOKENS
            row = part_p + place + here[:, None] * TOKENS
            total += tl.load(row + token[None, :], mask=(token < M)[None, :], other=0.0)
        _store(total, out_p, 0, block * BN + here, M, OUT, WIDTH)


def token_blocks(rows: int) -> tuple[int, int]:
    """Return how `rows` tokens are padded: a block of 16, 32 or 64, or 64 (128) and a second one behind it, else 0."""
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows: {rows} is not allowed (allowed: 1 to {MAX_ROWS}); use torch's product")
    if rows <= 64:
        return max(16, triton.next_power_of_2(rows)), 0
    first = 64 if rows <= 128 else 128
    return first, max(16, triton.next_power_of_2(rows - first))


def multiply(x: Tensor, weight: Tensor, choice: Choice, out: Tensor | None = None) -> Tensor:
    """Return x [M, in] times weight [out, in] transposed, [M, out] in x's dtype, with float32 sums; `out` is filled."""
    (rows, inner), out_rows = x.shape, weight.shape[0]
    if inner % choice.block_in:
        raise ValueError(
            f"block_in: {choice.block_in} is not allowed for an inner size of {inner} (allowed: a divisor); choose one"
        )
    if choice.form == "cuda":
        out = x.new_empty(rows, out_rows) if out is None else out
        tile = dict(block_out=choice.block_out, warps=choice.warps, stages=choice.stages, each=choice.splits)
        return product_cuda.multiply(x, weight, out, **tile)
    (first, second), early = token_blocks(rows), pdl_triton.options(x.device)
    out = x.new_empty(rows, out_rows) if out is None else out
    if choice.form == "stream":
        return _stream(x, weight, choice, out, (first, second))
    parts = out if choice.splits == 1 else x.new_empty(choice.splits, rows, out_rows, dtype=torch.float32)
    _linear_kernel[(triton.cdiv(out_rows, choice.block_out), choice.splits)](
        x, weight, parts, rows, out_rows, inner, x.stride(0), choice.splits, FIRST=first, SECOND=second or 16,
        HAS_SECOND=second > 0, BN=choice.block_out, BK=choice.block_in, num_warps=choice.warps,
        num_stages=choice.stages, AHEAD=choice.stages, **early,
    )  # fmt: skip
    if choice.splits > 1:
        count = rows * out_rows
        grid = (triton.cdiv(count, 1024),)
        _sum_kernel[grid](parts, out, count, SPLITS=choice.splits, BLOCK=1024, num_warps=4, **early)
    return out


def _stream(x: Tensor, weight: Tensor, choice: Choice, out: Tensor, tokens: tuple[int, int]) -> Tensor:
    (rows, inner), out_rows, (first, second) = x.shape, weight.shape[0], tokens
    blocks, steps = triton.cdiv(out_rows, choice.block_out), inner // choice.block_in
    units = blocks * steps
    programs = min(units, choice.splits * _multiprocessors(x.device))
    width = first + (second or 16)
    parts = x.new_empty(2 * programs, choice.block_out, width, dtype=torch.float32)
    tile = dict(BN=choice.block_out, num_warps=choice.warps, **pdl_triton.options(x.device))
    _stream_kernel[(programs,)](
        x, weight, out, parts, rows, out_rows, inner, x.stride(0), units, FIRST=first, SECOND=second or 16,
        HAS_SECOND=second > 0, BK=choice.block_in, num_stages=choice.stages, AHEAD=choice.stages,
        **tile,
    )  # fmt: skip
    _stream_sum_kernel[(blocks,)](
        parts,
        out,
        rows,
        out_rows,
        steps,
        units,
        programs,
        TOKENS=width,
        WIDTH=max(16, triton.next_power_of_2(rows)),
        **tile,
    )
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # the interpreter runs one program after the other: a few are enough to cut every kind of block
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 5


def key_of(rows: int, out_rows: int, inner: int) -> str:
    """Return the name of a shape in the table of choices: tokens as they are padded, one apart, as torch has it."""
    return f"{rows if rows == 1 else sum(token_blocks(rows))}x{out_rows}x{inner}"


@functools.cache
def measured_choices(path: Path = CHOICES) -> dict[str, Choice]:
    """Return the measured choices; empty where nothing was measured yet."""
    if not path.exists():
        return {}
    return {key: Choice(**entry) for key, entry in json.loads(path.read_text(encoding="utf-8"))["choices"].items()}


def write_choices(path: Path, choices: dict[str, Choice], facts: dict) -> None:
    """Write measured choices with what they were measured on."""
    entries = {key: asdict(choice) for key, choice in sorted(choices.items())}
    path.write_text(json.dumps({"measured": facts, "choices": entries}, indent=1) + "\n", encoding="utf-8")


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x [M, in] times weight [out, in] transposed in the form that was measured fastest; `out` is filled."""
    rows, choice = x.shape[0], None
    if rows <= MAX_ROWS and x.dtype == torch.bfloat16:  # the type that was measured
        choice = measured_choices().get(key_of(rows, *weight.shape))
    if choice is None or choice.form == "torch":
        return torch.nn.functional.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)
    return multiply(x, weight, choice, out)
