"""One expansion of a best-first tree in one program: push the best C children of w nodes, take the w best entries.

The state is that of tfm.builder.Growth for one request: entry slot * C + r is the r-th child of node `slot`. Ties go to
the lowest candidate and to the lowest entry. Sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.pdl_triton import follow


@triton.jit
def _expand_kernel(
    logits_p, candidates_p, slot_p, parent_p, token_p, depth_p, score_p, scores_p, local_p, picks_p, entry_p, depths_p,
    count_p, WIDTH, K, depth_limit, bin_slot, C: tl.constexpr, W: tl.constexpr, KB: tl.constexpr, F: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    member, candidate = tl.arange(0, W), tl.arange(0, KB)
    is_member = member < WIDTH
    slot = tl.load(slot_p + member, mask=is_member, other=0)
    depth = tl.load(depth_p + member, mask=is_member, other=0)
    above = tl.load(score_p + member, mask=is_member, other=0.0)
    is_open = is_member & (depth < depth_limit)
    row = tl.minimum(depth, depth_limit - 1)
    z = tl.load(
        logits_p + member[:, None] * K + candidate[None, :], mask=is_member[:, None] & (candidate < K)[None, :],
        other=-float("inf"),
    )  # fmt: skip
    top = tl.max(z, axis=1)
    # a row without any candidate: nothing to subtract from
    top = tl.where(top == -float("inf"), 0.0, top)
    log_sum = tl.log(tl.sum(tl.exp(z - top[:, None]), axis=1))
    for child in tl.static_range(C):
        best, place = tl.max(z, axis=1, return_indices=True, return_indices_tie_break_left=True)
        local = tl.where(is_open, (best - top) - log_sum, -float("inf"))
        at = slot * C + child
        tl.store(scores_p + at, local + above, mask=is_member)
        tl.store(local_p + at, (best - top) - log_sum, mask=is_member)
        tl.store(picks_p + at, row * K + place, mask=is_member)
        z = tl.where(candidate[None, :] == place[:, None], -float("inf"), z)
    # what was just written is read by other threads of the program
    tl.debug_barrier()
    entry = tl.arange(0, F)
    frontier = tl.load(scores_p + entry, mask=entry < bin_slot * C, other=-float("inf"))
    count = tl.load(count_p)
    taken = tl.zeros_like(count)
    for number in range(WIDTH):
        highest, index = tl.max(frontier, axis=0, return_indices=True, return_indices_tie_break_left=True)
        frontier = tl.where(entry == index, -float("inf"), frontier)
        taken_at = index.to(tl.int64)
        own = count + number
        is_left = (highest == -float("inf")) | (own >= bin_slot)
        own = tl.where(is_left, bin_slot, own)
        parent = taken_at // C
        deep = tl.where(is_left, depth_limit, tl.load(depths_p + parent) + 1)
        tl.store(scores_p + taken_at, -float("inf"))
        tl.store(slot_p + number, own)
        tl.store(parent_p + number, parent)
        tl.store(token_p + number, tl.load(candidates_p + tl.load(picks_p + taken_at)))
        tl.store(depth_p + number, deep)
        tl.store(score_p + number, highest)
        tl.store(entry_p + own, taken_at)
        tl.store(depths_p + own, deep)
        taken += tl.where(is_left, 0, 1)
    tl.store(count_p, count + taken)


class Frontier:
    """The state of one tree of `budget` drafted nodes; `slots` ... `scores` [w] are the nodes to expand next."""

    def __init__(self, candidates: Tensor, root: Tensor, *, budget: int, width: int, children: int, depth: int):
        """candidates [D, K] int64, root [1] int64."""
        device, self.bin = candidates.device, budget + 1
        self.width, self.depth, self.budget = width, depth, budget
        self.children = min(children, candidates.shape[1])
        self.candidates = candidates.contiguous()
        entries = (budget + 2) * self.children
        self.frontier = torch.full((entries,), -torch.inf, device=device)
        self.local = self.frontier.clone()
        self.picks = torch.zeros(entries, dtype=torch.int64, device=device)
        self.entry, self.depths = (torch.zeros(budget + 2, dtype=torch.int64, device=device) for _ in range(2))
        self.count = torch.ones(1, dtype=torch.int64, device=device)
        # the root alone is expanded first: the other members are absent, in the bin and past the depth limit
        self.slots = torch.full((width,), self.bin, dtype=torch.int64, device=device)
        self.slots[:1].zero_()
        self.parents, self.tokens = (torch.zeros(width, dtype=torch.int64, device=device) for _ in range(2))
        self.tokens[:1].copy_(root)
        self.level = torch.full_like(self.slots, depth)
        self.level[:1].zero_()
        self.scores = torch.zeros(width, dtype=torch.float32, device=device)
        self.root = root

    def expand(self, logits: Tensor) -> None:
        """Push the children of the current nodes, whose candidates score `logits` [w, K] float32, and take the next."""
        count = self.candidates.shape[1]
        width, columns = triton.next_power_of_2(self.width), triton.next_power_of_2(count)
        # within one warp no reduction needs shared memory
        warps = 1 if width * columns <= 2048 else 4
        _expand_kernel[(1,)](
            logits, self.candidates, self.slots, self.parents, self.tokens, self.level, self.scores, self.frontier,
            self.local, self.picks, self.entry, self.depths, self.count, self.width, count, self.depth, self.bin,
            C=self.children, W=width, KB=columns,
            F=triton.next_power_of_2(self.bin * self.children), num_warps=warps, **pdl_triton.options(logits.device),
        )  # fmt: skip

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, parents, depths, log-probs [1, budget + 1] of the tree, padded as tfm.tree.DraftTree says."""
        entries = self.entry[: self.bin]
        is_drafted = torch.arange(self.bin, device=entries.device) < self.count
        is_drafted[:1].zero_()
        tokens = self.candidates.flatten()[self.picks[entries]]
        tokens = torch.where(is_drafted, tokens, 0)
        tokens[:1].copy_(self.root)
        parents = torch.where(is_drafted, entries // self.children, -1)
        depths = torch.where(is_drafted, self.depths[: self.bin], 0)
        local = torch.where(is_drafted, self.local[entries], 0.0)
        return tokens[None], parents[None], depths[None], local[None]

    def unfinished(self) -> Tensor:
        """Return [1] bool: the tree is neither full nor out of entries."""
        return (self.count < self.bin) & (self.frontier[: self.bin * self.children] > -torch.inf).any()
