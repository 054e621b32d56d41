"""The paper's tree builder in a dozen launches an expansion: Triton between the weaver's products, one frontier kernel.

`FastScorer` is a ConditionalScorer for one request, so DARTree scores with it too.
"""

import torch
from torch import Tensor

from tfm import builder
from tfm.builder import ConditionalScorer, count_expansions
from tfm.config import DecodeConfig
from tfm.engine.adaptive import StaticAdaptiveProposer
from tfm.engine.builder import StaticTfmProposer, adaptive_of
from tfm.engine.forms import Forms
from tfm.engine.ops import Ops, make_ops
from tfm.marginals import Marginals
from tfm.tree import DraftTree
from tfm.weaver import WeaverScorer
from tfm_kernels import frontier_triton, rows_triton, weaver_triton


class FastScorer:
    """WeaverScorer's tables and formulas with the fast forms between the products; one request."""

    def __init__(self, tables: WeaverScorer, ops: Ops):
        self._weaver, self._head, self._tokens, self._qkv = (
            tables.weaver,
            tables.head_table,
            tables.token_table.contiguous(),
            tables.qkv,
        )
        self._ops = ops

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        """See ConditionalScorer.begin."""
        rows = self._weaver.prefix_rows(target_hidden, marginals.hidden)
        self._prefix, levels = rows.shape[1], marginals.tokens.shape[1]
        self._candidates = marginals.tokens[0].clamp(min=0).contiguous()
        scores = marginals.log_probs[0].float()
        self._base = scores.masked_fill(marginals.tokens[0] < 0, -torch.inf).contiguous()
        # one slot more: where absent nodes are written
        self._lists = torch.zeros(slots + 1, levels, dtype=torch.int64, device=rows.device)
        self._memory = []
        for block in self._weaver.blocks:
            rows, keys, values = block.causal(rows)
            memory = rows.new_empty(2, self._prefix + slots + 1, *keys.shape[2:])
            memory[0, : self._prefix], memory[1, : self._prefix] = keys[0], values[0]
            self._memory.append(memory)

    def expand(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """See ConditionalScorer.expand; R = 1."""
        last = len(self._lists) - 1
        own = torch.where(slots[0] < 0, last, slots[0])
        return self.logits(own, parent_slots[0], tokens[0], depths[0]).log_softmax(-1)[None]

    def logits(self, slots: Tensor, parents: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """Return [w, K] float32, not normalised, over the candidates of the children; absent nodes in the last slot."""
        weaver, first = self._weaver, self._weaver.blocks[0].norm_attn
        rows, normed = weaver_triton.embed_norm(
            self._tokens, weaver.pos_emb, tokens, depths, first.weight, first.bias, first.eps
        )
        for layer, block in enumerate(weaver.blocks):
            if layer:
                _, normed = self._norm(rows, None, block.norm_attn)
            mixed = self._ops.linear(normed, self._qkv[layer])
            keys, values = self._memory[layer]
            seen = weaver_triton.path_attention(
                mixed, keys, values, self._lists, slots, parents, depths, prefix=self._prefix
            )
            rows, normed = self._norm(rows, self._ops.linear(seen, block.o_proj.weight), block.norm_mlp)
            inner = rows_triton.bias_gelu(self._ops.linear(normed, block.fc1.weight), block.fc1.bias)
            update, last_bias = self._ops.linear(inner, block.fc2.weight), block.fc2.bias
            if layer + 1 < len(weaver.blocks):
                rows = rows + (update + last_bias)
        _, normed = self._norm(rows, update, weaver.out_norm, last_bias)
        return weaver_triton.candidate_logits(normed, self._head, self._candidates, self._base, depths)

    @staticmethod
    def _norm(rows: Tensor, update: Tensor | None, norm, update_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rows_triton.add_norm(rows, update, norm.weight, norm.eps, 0.0, norm.bias, update_bias)


class FastTfmProposer(StaticTfmProposer):
    """The growth with one frontier kernel, for one request with top siblings."""

    def __init__(self, config: DecodeConfig, scorer: FastScorer):
        if config.siblings != "top":
            raise ValueError(
                f"siblings: {config.siblings!r} is not allowed with growth: triton (allowed: top); use growth: torch"
            )
        super().__init__(config, scorer)

    def _grow(self, marginals: Marginals, context) -> DraftTree:
        config = self._config
        frontier = frontier_triton.Frontier(
            marginals.tokens[0],
            context.roots,
            budget=config.budget,
            width=self._width,
            children=config.children,
            depth=config.depth or marginals.tokens.shape[1],
        )
        for _ in range(count_expansions(config.budget, self._width, frontier.children)):
            nodes = (frontier.slots, frontier.parents, frontier.tokens, frontier.level)
            frontier.expand(self._scorer.logits(*nodes))
        self.unfinished = frontier.unfinished()
        return DraftTree(*frontier.columns(), num_nodes=frontier.count)


def make_scorer(config: DecodeConfig, models, forms: Forms) -> ConditionalScorer:
    """Return what scores children in the fast form; the marginals alone need none. Errors: tfm.builder.make_scorer."""
    scorer = builder.make_scorer(config, models)
    return FastScorer(scorer, make_ops(forms)) if isinstance(scorer, WeaverScorer) else scorer


def make_proposer(config: DecodeConfig, models, forms: Forms) -> FastTfmProposer:
    """Return the proposer of method tfm; the residual must be on."""
    _check_residual(config)
    return FastTfmProposer(config, make_scorer(config, models, forms))


def make_adaptive_proposer(config: DecodeConfig, models, forms: Forms) -> StaticAdaptiveProposer:
    """Return the proposer of method adaptive; the residual must be on."""
    _check_residual(config)
    scorer = make_scorer(config, models, forms)
    return adaptive_of(config, lambda sized: FastTfmProposer(sized, scorer))


def _check_residual(config: DecodeConfig) -> None:
    if not config.residual:
        raise ValueError("residual: False is not allowed with growth: triton (allowed: True); use growth: torch")
