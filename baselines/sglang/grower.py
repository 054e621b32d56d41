"""The plugin's device work beside the two models: build a tree, accept a path, commit it.

Each part may be a CUDA graph. All of it is this project's own code on buffers that keep their addresses; nothing here
knows SGLang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from baselines.sglang.gdn_memory import GdnMemory
from baselines.sglang.layout import forced_draws, links, output_tokens
from baselines.sglang.settings import Settings
from baselines.static_methods import make_static_proposer
from tfm.acceptance import walk
from tfm.engine.accept import draw_rows, make_fast_draw
from tfm.engine.candidates import marginals_from_logits
from tfm.engine.forms import TRITON, Forms
from tfm.engine.graphs import WARM_UPS, GraphClock, Part
from tfm.marginals import Marginals
from tfm.tree import DraftTree
from tfm_kernels.gdn.ops import ancestor_mask


@dataclass(frozen=True)
class Shared:
    """What the trees take from the target: embedding [vocab, d] and head [vocab, d], not copied."""

    embed_weight: Tensor
    head_weight: Tensor


class Context:
    """What a proposer reads of the running request, in buffers; see tfm.decode.Context."""

    def __init__(self, shared: Shared, rows: int):
        weight, width = shared.head_weight, shared.head_weight.shape[1]
        self._head = weight
        self.rows = weight.new_zeros(1, rows, width)  # the drafter's rows after its final norm
        self.target_hidden = weight.new_zeros(1, width)  # after the final norm, of the root's predecessor
        self.roots = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.indices = torch.zeros_like(self.roots)
        self.root_positions = torch.zeros_like(self.roots)

    def draft(self, candidates: int) -> Marginals:
        """Return the `candidates` best tokens for each of the drafter's rows."""
        return marginals_from_logits(self.rows @ self._head.T, self.rows, candidates)


class Grower:
    """Trees of one request. `build` reads the context; `accept` a pass of the target; `commit` the last path."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        *,
        weaver,
        draft_rows: int,
        seed: int,
        memory: GdnMemory | None,
        graphs: bool,
        ancestors: Tensor | None = None,
    ):
        """`ancestors` [N, N] bool is overwritten by every tree: what an attention reads; None makes one."""
        self.settings, self.seed, self.memory = settings, seed, memory
        device = shared.head_weight.device
        self.context = Context(shared, draft_rows)
        self.path_rows = (settings.depth or draft_rows) + 1
        self.nodes = settings.budget + 1
        on_gpu = device.type == "cuda"
        config = settings.decode_config(temperature=0.0, seed=seed).check(draft_rows)
        models = SimpleNamespace(target=shared, drafter=True, weaver=weaver)
        forms = Forms(growth=TRITON) if on_gpu else Forms()
        self._proposer = make_static_proposer(config, models, forms)
        self._draw = make_fast_draw() if on_gpu else draw_rows
        self._clock, self._graphs = GraphClock("off", device), graphs
        self._parts: dict[tuple, Part] = {}
        # results, written in place: a graph of SGLang's or ours may hold their addresses
        whole = {"dtype": torch.int64, "device": device}
        self.tokens, self.parents = torch.zeros(1, self.nodes, **whole), torch.full((1, self.nodes), -1, **whole)
        self.depths = torch.zeros(1, self.nodes, **whole)
        self.first_child, self.next_sibling = self.parents.clone(), self.parents.clone()
        self.ancestors = torch.eye(self.nodes, dtype=torch.bool, device=device) if ancestors is None else ancestors
        self.path = torch.full((1, self.path_rows), -1, **whole)
        self.accepted, self.bonus = torch.zeros(1, **whole), torch.zeros(1, **whole)
        self.emitted = torch.zeros(1, self.path_rows, **whole)
        # the same for SGLang, in its type: path, drafts accepted, tokens emitted
        self.path_index = self.path.to(torch.int32)
        self.drafts, self.counts = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.unfinished = torch.zeros(1, **whole)  # trees that wanted more expansions than are planned, summed
        self._counts = torch.ones(1, **whole)

    def build(self) -> None:
        """Grow the next tree from the context."""
        self._run(("build",), self._build)

    def accept(self, logits: Tensor, hidden: Tensor, *, temperature: float, keep: bool) -> None:
        """Walk the tree along the target's draws and move the context to the path's end.

        `logits` [N, vocab] and `hidden` [N, d] after the final norm; `keep` says that both lie at these addresses in
        every step, so that the work may be captured.
        """
        key = ("accept", logits.data_ptr(), hidden.data_ptr(), temperature)
        self._run(key if keep else None, lambda: self._accept(logits, hidden, temperature))

    def commit(self) -> None:
        """Make the last path permanent in this project's GDN layers, where they are ours."""
        if self.memory is not None:
            self._run(("commit",), lambda: self.memory.commit(self.path), rehearse=self._commit_nothing)

    def _build(self) -> None:
        tree = self._proposer.propose(self.context, self._clock)
        self.tokens.copy_(tree.tokens)
        self.parents.copy_(tree.parents)
        self.depths.copy_(tree.depths)
        self._counts.copy_(tree.num_nodes)
        first, sibling = links(self.parents)
        self.first_child.copy_(first)
        self.next_sibling.copy_(sibling)
        mask = ancestor_mask(self.parents)
        self.ancestors.copy_(mask[0])
        if (unfinished := getattr(self._proposer, "unfinished", None)) is not None:
            self.unfinished.add_(unfinished.to(torch.int64).view(1))
        if self.memory is not None:
            self.memory.start(self.parents, mask)

    def _accept(self, logits: Tensor, hidden: Tensor, temperature: float) -> None:
        context, settings = self.context, self.settings
        tree = DraftTree(self.tokens, self.parents, self.depths, self.depths.float(), self._counts)
        positions = context.root_positions[:, None] + self.depths + 1
        drawn, _, _ = self._draw(
            logits[None], positions, context.indices, seed=self.seed, temperature=temperature, span=self.path_rows
        )
        if settings.simulate_accept is not None:
            drawn = forced_draws(self.tokens, self.depths, self.first_child, drawn, settings.simulate_accept)
        path, accepted, bonus = walk(tree, drawn, self.path_rows - 1)
        self.path.copy_(path)
        self.accepted.copy_(accepted)
        self.bonus.copy_(bonus)
        self.path_index.copy_(path)
        self.drafts.copy_(accepted)
        torch.add(self.drafts, 1, out=self.counts)
        self.emitted.copy_(output_tokens(self.tokens, path, accepted, bonus))
        leaf = path.gather(1, accepted[:, None])[0]
        context.target_hidden.copy_(hidden.index_select(0, leaf))
        context.roots.copy_(bonus)

    def _commit_nothing(self) -> None:
        kept = self.path.clone()
        self.path.fill_(-1)
        self.memory.commit(self.path)
        self.path.copy_(kept)

    def _run(self, key: tuple | None, work: Callable, rehearse: Callable | None = None) -> None:
        if key is None or not self._graphs:
            work()
            return
        if key not in self._parts:
            self._parts[key] = self._captured(work, rehearse)
        self._parts[key]()

    def _captured(self, work: Callable, rehearse: Callable | None) -> Part:
        """Capture a part; what its rehearsals change is what the part writes anyway, or nothing with `rehearse`."""
        kept = [x.clone() for x in (self.context.target_hidden, self.context.roots, self.unfinished)]
        stream = torch.cuda.Stream()
        for _ in range(WARM_UPS):
            Part(rehearse or work, self._clock).warm_up(stream)
        for buffer, value in zip((self.context.target_hidden, self.context.roots, self.unfinished), kept, strict=True):
            buffer.copy_(value)
        part = Part(work, self._clock)
        part.capture()
        return part
