"""The loop: draft and build a tree, verify it, accept a path, commit it. Every method runs through it.

Autoregressive decoding is the tree of the root alone and a chain is a tree with one child a node, so all methods share
the same target, rules, noise and counters.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from tfm.acceptance import VerifyResult, accept
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.sampling import next_tokens
from tfm.target import Target, TargetOutput
from tfm.target_config import TargetConfig
from tfm.trace import RequestTrace, StepTrace, TreeNode
from tfm.tree import DraftTree

if TYPE_CHECKING:
    from tfm.drafter import Drafter
    from tfm.weaver import Weaver


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. `index` is its index in the dataset: it seeds the request's noise."""

    id: str
    index: int
    tokens: list[int]


@dataclass(frozen=True)
class Models:
    """What a method decodes with; parts that it does not need are None."""

    target: Target
    drafter: "Drafter | None" = None
    weaver: "Weaver | None" = None
    head: nn.Module | None = None  # a correction head of tfm/heads.py

    def check(self) -> None:
        """Raise ValueError unless the parts that are here fit each other and the target."""
        for key, value, allowed, what in self._facts():
            if value != allowed:
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: {allowed!r}, {what}); load parts that fit")

    def _facts(self) -> Iterator[tuple[str, object, object, str]]:
        config, drafter, weaver = self.target.config, self.drafter, self.weaver
        if drafter is not None:
            ids, layers = tuple(drafter.config.target_layer_ids), len(config.layer_types)
            yield "drafter.hidden_size", drafter.config.hidden_size, config.hidden_size, "the target's"
            yield "target_layer_ids", ids, tuple(i for i in ids if 0 <= i < layers), f"the target has {layers} layers"
            yield "target.tap_layers", self.target.tap_layers, ids, "the drafter's target_layer_ids, in order"
            mask = drafter.config.mask_token_id
            yield "mask_token_id", mask, min(max(mask, 0), config.vocab_size - 1), "an id of the target's vocabulary"
        if weaver is not None:
            yield "weaver.d_model", weaver.config.d_model, config.hidden_size, "the target's hidden size"
            yield "weaver.d_embed", weaver.config.d_embed, config.hidden_size, "the target's embedding width"
            if drafter is not None:
                rows = max(weaver.config.K, drafter.draft_rows)
                yield "weaver.K", weaver.config.K, rows, "at least the drafter's rows"
        if self.head is not None:
            yield "head.d_model", self.head.config.d_model, config.hidden_size, "the target's hidden size"
            yield "head.d_embed", self.head.config.d_embed, config.hidden_size, "the target's embedding width"


@dataclass(frozen=True)
class Step:
    """What one step decided, for a watcher to read: before the cap, an EOS or a stop string trimmed the path."""

    tree: DraftTree
    logits: Tensor  # [R, N, vocab], the target's row at every node
    result: VerifyResult
    outputs: list[list[int]]  # all tokens that each request has emitted so far, trimmed


class Proposer(Protocol):
    """Turns a context into a draft tree, timing its drafter pass as "draft" and the rest as "build"."""

    def propose(self, context: "Context", clock: Clock) -> DraftTree: ...


class Context:
    """What R requests know between two steps. `advance` is the one place that changes it."""

    def __init__(
        self, models: Models, prefill: TargetOutput, lengths: Tensor, roots: Tensor, indices: Tensor, *, max_tokens: int
    ):
        self._models = models
        self.indices = indices  # [R] int64, each request's index in its dataset
        self.root_positions = lengths  # [R] int64, absolute
        self.roots = roots  # [R] int64, the last emitted token of each request; not yet in any cache
        self.target_hidden = prefill.hidden[:, 0]  # [R, d], after the final norm, of the root's predecessor
        if models.drafter is not None:
            self._drafter_cache = models.drafter.new_cache(len(roots), max_tokens)
            models.drafter.append(prefill.taps, lengths, self._drafter_cache)
        self._pending: tuple[Tensor, Tensor] | None = None
        self.has_drafted = False

    def draft(self, candidates: int) -> Marginals:
        """Run the drafter once and return its `candidates` best tokens for each of its rows.

        The target's features of the tokens committed since the last call are appended to the drafter's context first.
        """
        drafter = self._models.drafter
        if drafter is None:
            raise ValueError("drafter: None is not allowed for a method that drafts; load the drafter")
        if self._pending is not None:
            drafter.append(*self._pending, self._drafter_cache)
            self._pending = None
        self.has_drafted = True
        logits, hidden = drafter.draft(self.roots, self._drafter_cache, self._models.target)
        return Marginals.from_logits(logits, hidden, candidates)

    def advance(self, output: TargetOutput, result: VerifyResult) -> None:
        """Move to the bonus token; the nodes of the path become drafter context, finished requests keep theirs."""
        counts = (result.path >= 0).sum(1)
        nodes = result.path.clamp(min=0)
        leaf = nodes.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        rows = torch.arange(len(nodes), device=nodes.device)
        self.target_hidden = output.hidden[rows, leaf]
        self.root_positions = self.root_positions + counts
        self.roots = result.bonus
        if self._models.drafter is not None:
            self._pending = (output.taps[rows[:, None], nodes], counts)


def decode(
    prompts: list[Prompt],
    models: Models,
    config: DecodeConfig,
    *,
    proposer: Proposer,
    on_finish: Callable[[RequestTrace], None],
    clock: Clock = OFF,
    on_token: Callable[[str, int], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
    detokenise: Callable[[list[int]], str] | None = None,
    traced: bool = False,
) -> None:
    """Decode every prompt, `config.requests` at a time, and hand each finished request to `on_finish`.

    Order is the order given. `on_token(id, tokens emitted)` reports progress; `on_step` is shown every step, outside
    its stages but inside the request's wall; `detokenise` is needed for stop strings; `traced` records every tree.
    Raises ValueError for an empty prompt or a missing model; nothing is skipped here.
    """
    config.check(models.drafter.draft_rows if models.drafter is not None else None)
    models.check()
    if config.stop and detokenise is None:
        raise ValueError(f"stop: {config.stop!r} needs a tokenizer; pass detokenise")
    for prompt in prompts:
        check_prompt(prompt, config, models.target.config)
    with torch.inference_mode():
        for start in range(0, len(prompts), config.requests):
            batch = _Batch(prompts[start : start + config.requests], models, config, clock, detokenise, traced)
            batch.run(proposer, on_finish, on_token, on_step)


def check_prompt(prompt: Prompt, config: DecodeConfig, target: TargetConfig) -> None:
    """Raise ValueError unless the target can read the prompt, and its answer within its positions."""
    if not prompt.tokens:
        raise ValueError(f"prompt {prompt.id}: [] is not allowed (allowed: one token or more); skip empty prompts")
    for name, tokens in ((f"prompt {prompt.id}: token", prompt.tokens), ("eos_tokens:", config.eos_tokens)):
        for token in (token for token in tokens if type(token) is not int or not 0 <= token < target.vocab_size):
            raise ValueError(
                f"{name} {token!r} is not allowed (allowed: 0 to {target.vocab_size - 1}); check tokenizer"
            )
    if type(prompt.index) is not int or not 0 <= prompt.index < 2**31:
        raise ValueError(
            f"prompt {prompt.id}: index {prompt.index!r} is not allowed (allowed: 0 to 2**31 - 1); count rows"
        )
    if len(prompt.tokens) + config.max_new_tokens > target.max_position_embeddings:
        raise ValueError(
            f"prompt {prompt.id}: {len(prompt.tokens)} tokens + {config.max_new_tokens} new ones are not allowed "
            f"(allowed: {target.max_position_embeddings}, the target's positions); skip it, or lower max_new_tokens"
        )


class _Request:
    """Output and counters of one request."""

    def __init__(self, prompt: Prompt, config: DecodeConfig, detokenise: Callable[[list[int]], str] | None):
        self.prompt, self.config, self.detokenise = prompt, config, detokenise
        self.output: list[int] = []
        self.finish_reason: str | None = None
        self.steps: list[StepTrace] = []
        self.trees: list[TreeNode] = []

    def emit(self, tokens: list[int]) -> int:
        """Append tokens up to an EOS, a stop string or the cap; return how many were kept."""
        for kept, token in enumerate(tokens, start=1):
            self.output.append(token)
            if token in self.config.eos_tokens or self._completes_stop():
                self.finish_reason = "stop"
            elif len(self.output) == self.config.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return kept
        return len(tokens)

    def _completes_stop(self) -> bool:
        if not self.config.stop:
            return False
        text = self.detokenise(self.output)
        return any(word in text for word in self.config.stop)

    def refuse_broken(self, logits: list[float]) -> None:
        """Raise ValueError unless the logits of the tokens that the target chose are finite."""
        for value in logits:
            if not math.isfinite(value):
                where = f"prompt {self.prompt.id}, after {len(self.output)} tokens"
                name = "NaN" if math.isnan(value) else f"{value:g}"
                raise ValueError(f"logits: {name} ({where}); the target's weights or dtype are broken, check them")

    def refuse_broken_drafts(self, tree: "_HostTree", row: int, *, has_drafted: bool = True) -> None:
        """Raise ValueError for a tree of NaN, or without a draft where the drafter gave some: builders drop NaN."""
        is_empty = has_drafted and tree.num_nodes[row] == 1
        if is_empty or any(math.isnan(log_prob) for log_prob in tree.log_probs[row]):
            what = "none that has a probability" if is_empty else "NaN"
            where = f"prompt {self.prompt.id}, step {len(self.steps)}"
            raise ValueError(f"drafts: {what} ({where}); the drafter's or the head's weights are broken, check them")

    def record(self, tree: "_HostTree", row: int, result: "_HostResult", traced: bool) -> None:
        """Emit what a step accepted and append its trace, still without times.

        Raises ValueError for a bound of NaN where the rule has one: a row of the tree has no law, on the path or off.
        """
        accepted, path = result.accepted[row], result.path[row][: result.accepted[row] + 1]
        context = len(self.prompt.tokens) + len(self.output)
        kept = self.emit([tree.tokens[row][node] for node in path[1:]] + [result.bonus[row]])
        nodes, expected = tree.num_nodes[row], result.expected_accepted[row]
        if math.isnan(expected) and not self.config.lacks_bound:
            where = f"prompt {self.prompt.id}, step {len(self.steps)}"
            raise ValueError(f"logits: NaN at a drafted node ({where}); the target's weights or dtype are broken")
        step = StepTrace(
            step=len(self.steps),
            context=context,
            nodes=nodes,
            depth=max(tree.depths[row][:nodes]),
            accepted=min(accepted, kept),
            accepted_untrimmed=accepted,
            committed=kept,
            expected_accepted=None if math.isnan(expected) else expected,
        )
        self.steps.append(step)
        if traced:
            columns = zip(tree.parents[row], tree.tokens[row], tree.log_probs[row], tree.depths[row], strict=True)
            for node, (parent, token, log_prob, depth) in enumerate(list(columns)[:nodes]):
                self.trees.append(TreeNode(step.step, node, parent, token, log_prob, depth, node in path))


@dataclass
class _HostTree:
    tokens: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    log_probs: list[list[float]]
    num_nodes: list[int]


@dataclass
class _HostResult:
    path: list[list[int]]
    accepted: list[int]
    bonus: list[int]
    expected_accepted: list[float]


def _to_host(kind, source):
    # the step's device-to-host copies
    return kind(**{name: getattr(source, name).tolist() for name in kind.__dataclass_fields__})


class _Batch:
    """R requests decoded together; a finished one keeps its row but emits and commits nothing more."""

    def __init__(self, prompts, models: Models, config: DecodeConfig, clock: Clock, detokenise, traced: bool):
        self.models, self.config, self.clock, self.traced = models, config, clock, traced
        self.requests = [_Request(prompt, config, detokenise) for prompt in prompts]
        self.device = models.target.embed_weight.device
        self.indices = torch.tensor([prompt.index for prompt in prompts], device=self.device)

    def run(self, proposer: Proposer, on_finish, on_token, on_step) -> None:
        alone = len(self.requests) == 1  # a wall time belongs to a request only when it ran alone
        start = self.clock.now()
        context = self._prefill()
        started = self.clock.now()
        while not all(request.finish_reason for request in self.requests):
            self._step(context, proposer, on_step)
            if on_token is not None:
                on_token(self.requests[0].prompt.id, sum(len(request.output) for request in self.requests))
        end = self.clock.now()
        timed = alone and start is not None
        for request in self.requests:
            on_finish(
                RequestTrace(
                    id=request.prompt.id,
                    index=request.prompt.index,
                    prompt_tokens=len(request.prompt.tokens),
                    output_tokens=request.output,
                    finish_reason=request.finish_reason,
                    prefill_us=(started - start) * 1e6 if timed else None,
                    decode_us=(end - started) * 1e6 if timed else None,
                    steps=request.steps,
                    trees=request.trees,
                )
            )

    def _prefill(self) -> Context:
        config, target = self.config, self.models.target
        prompts = [request.prompt.tokens for request in self.requests]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths.max())
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.device)
        # a request's last step is not committed, so drafts past the cap need no room
        max_tokens = longest + config.max_new_tokens
        self.cache = target.new_cache(len(prompts), max_tokens)
        output = target.prefill(tokens, lengths, self.cache)
        roots = next_tokens(
            output.logits, lengths[:, None], self.indices, seed=config.seed, temperature=config.temperature
        )[:, 0]
        self._refuse_broken(output.logits, torch.zeros_like(roots)[:, None], roots[:, None])
        for request, root in zip(self.requests, roots.tolist(), strict=True):
            request.emit([root])
        return Context(self.models, output, lengths, roots, self.indices, max_tokens=max_tokens)

    def _refuse_broken(self, logits: Tensor, nodes: Tensor, tokens: Tensor) -> None:
        """Raise ValueError where the target chose a token [R, P] by a row, that of `nodes` [R, P], without a law.

        Of a row with a NaN the chosen token's logit is NaN, of one that is -inf throughout it is -inf; neither must
        pass for token 0. Nodes of -1 are padding.
        """
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        chosen = logits[rows, nodes.clamp(min=0), tokens].float().masked_fill(nodes < 0, 0.0).tolist()
        for request, values in zip(self.requests, chosen, strict=True):
            if request.finish_reason is None:
                request.refuse_broken(values)

    def _step(self, context: Context, proposer: Proposer, on_step) -> None:
        clock, config = self.clock, self.config
        clock.start_step()
        tree = proposer.propose(context, clock)
        with clock.stage("verify"):
            output = self.models.target.verify(tree, self.cache, clock, gdn_backend=config.gdn_backend)
        with clock.stage("accept"):
            result = accept(
                tree,
                output.logits,
                rule=config.rule,
                temperature=config.temperature,
                seed=config.seed,
                indices=self.indices,
                root_positions=self.cache.lengths,
            )
            host, host_tree = _to_host(_HostResult, result), _to_host(_HostTree, tree)
            followers = tree.tokens.gather(1, result.path.clamp(min=0)).roll(-1, dims=1)
            followers.scatter_(1, result.accepted[:, None], result.bonus[:, None])
            self._refuse_broken(output.logits, result.path, followers)
        for row, request in enumerate(self.requests):
            if request.finish_reason is None:
                if host_tree.tokens[row][0] != request.output[-1]:
                    where = f"prompt {request.prompt.id}, step {len(request.steps)}"
                    raise ValueError(
                        f"tree: root {host_tree.tokens[row][0]} is not allowed (allowed: {request.output[-1]}, the "
                        f"last token; {where}); a proposer starts its tree at context.roots"
                    )
                request.refuse_broken_drafts(host_tree, row, has_drafted=context.has_drafted)
                request.record(host_tree, row, host, self.traced)
        with clock.stage("commit"):
            going = torch.tensor([request.finish_reason is None for request in self.requests], device=self.device)
            committed = replace(result, path=result.path.masked_fill(~going[:, None], -1))
            self.cache.commit(output.scratch, committed.path)
        context.advance(output, committed)
        stage_us = clock.end_step()
        if len(self.requests) == 1:
            self.requests[0].steps[-1].stage_us = stage_us
        if on_step is not None:
            on_step(Step(tree, output.logits, result, [request.output for request in self.requests]))


def visible_text(text: str, stop: tuple[str, ...]) -> str:
    """Return `text` up to the first stop string, which is left out."""
    cuts = [text.find(word) for word in stop if word in text]
    return text[: min(cuts)] if cuts else text
