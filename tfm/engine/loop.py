"""The loop of tfm/decode.py on static memory, one request at a time: same tokens, same trees, same records.

While the host writes down what a step accepted, the device already commits it and, if asked to, drafts on.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tfm.adaptive import BudgetPolicy, expected_gains
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, Proposer, _Request, check_prompt
from tfm.engine.accept import Decision, unpack
from tfm.engine.forms import Forms
from tfm.engine.graphs import GraphClock
from tfm.engine.step import StaticStep, check
from tfm.sampling import next_tokens
from tfm.trace import RequestTrace


class Engine:
    """A method ready to decode: memory for `capacity` tokens of prompt and output, graphs captured if asked for.

    Raises ValueError as tfm.decode does, and for rules, batch sizes and forms that the static engine lacks.
    """

    def __init__(
        self,
        models: Models,
        config: DecodeConfig,
        *,
        proposer: Proposer,
        capacity: int,
        forms: Forms | None = None,
        clock: str = "off",
    ):
        forms = forms or Forms()
        config.check(models.drafter.draft_rows if models.drafter is not None else None)
        models.check()
        check(config, models, forms)
        self.models, self.config = models, config
        self.clock = GraphClock(clock, models.target.embed_weight.device)
        with torch.inference_mode():
            self.step = StaticStep(models, config, proposer, capacity=capacity, forms=forms, clock=self.clock)
        self._policy: BudgetPolicy | None = getattr(proposer, "policy", None)
        self._hosts: dict[int, torch.Tensor] = {}  # by length: trees of other sizes have packets of other lengths
        # stages are timed one after the other
        self._runs_ahead, self._is_proposed = forms.ahead and clock != "stages", False

    def decode(
        self,
        prompts: list[Prompt],
        *,
        on_finish: Callable[[RequestTrace], None],
        on_token: Callable[[str, int], None] | None = None,
        detokenise: Callable[[list[int]], str] | None = None,
        traced: bool = False,
        max_new_tokens: int | None = None,
    ) -> None:
        """Decode every prompt in turn; see tfm.decode.decode. `max_new_tokens` shortens a warm-up."""
        for prompt in prompts:
            self._check_prompt(prompt)
        with torch.inference_mode():
            for prompt in prompts:
                self._run(prompt, on_finish, on_token, detokenise, traced, max_new_tokens)

    def restart(self) -> None:
        """Forget the tree that was proposed ahead: the memory now belongs to another request."""
        self._is_proposed = False
        if self._policy is not None:
            self._policy.reset()
            self.step.select(self._policy.choose())

    def _check_prompt(self, prompt: Prompt) -> None:
        check_prompt(prompt, self.config, self.models.target.config)
        needed = len(prompt.tokens) + self.config.max_new_tokens
        if needed > self.step.capacity:
            raise ValueError(
                f"prompt {prompt.id}: {needed} tokens with its output do not fit (allowed: "
                f"{self.step.capacity}); raise capacity"
            )

    def _run(self, prompt: Prompt, on_finish, on_token, detokenise, traced: bool, cap: int | None) -> None:
        # shortens only: the memory has room for the config's cap
        longest = self.config.max_new_tokens
        config = replace(self.config, max_new_tokens=longest if cap is None else min(cap, longest))
        if config.stop and detokenise is None:
            raise ValueError(f"stop: {config.stop!r} needs a tokenizer; pass detokenise")
        request, clock = _Request(prompt, config, detokenise), self.clock
        self.restart()
        start = clock.now()
        logits = self.step.prefill(prompt.tokens, prompt.index, self._first_token)
        root = int(self.step.context.roots)
        request.refuse_broken([float(logits[0, 0, root])])
        request.emit([root])
        started = clock.now()
        while request.finish_reason is None:
            self._step(request, traced)
            if on_token is not None:
                on_token(prompt.id, len(request.output))
        end = clock.now()
        on_finish(
            RequestTrace(
                id=prompt.id,
                index=prompt.index,
                prompt_tokens=len(prompt.tokens),
                output_tokens=request.output,
                finish_reason=request.finish_reason,
                prefill_us=(started - start) * 1e6 if start is not None else None,
                decode_us=(end - started) * 1e6 if start is not None else None,
                steps=request.steps,
                trees=request.trees,
            )
        )

    def _first_token(self, logits, lengths, indices):
        config = self.config
        return next_tokens(logits, lengths[:, None], indices, seed=config.seed, temperature=config.temperature)[:, 0]

    def _step(self, request: _Request, traced: bool) -> None:
        clock, step = self.clock, self.step
        clock.start_step()
        if not self._is_proposed:
            step.propose()
        copied = self._copy(step.verify())
        step.commit()
        if self._policy is not None:
            # a step ahead: this step's decision is still on its way
            step.select(self._policy.choose())
        if self._runs_ahead:
            step.propose()
        self._is_proposed = self._runs_ahead
        decision = self._wait(copied)
        if self._policy is not None:
            columns = (decision.parents[0], decision.log_probs[0], decision.num_nodes[0])
            self._policy.observe(expected_gains(*columns, self._policy.budgets), decision.accepted[0])
        request.refuse_broken([decision.bonus_logit])
        if decision.is_unfinished:
            raise RuntimeError(
                f"tree: step {len(request.steps)} of prompt {request.prompt.id} needs more expansions than were "
                "planned (the frontier held fewer than width entries); lower width, or use the reference loop"
            )
        request.refuse_broken_drafts(decision, 0, has_drafted=self.config.method != "ar")
        request.record(decision, 0, decision, traced)
        request.steps[-1].stage_us = clock.end_step()

    def _copy(self, packet: torch.Tensor):
        # the step's one device-to-host copy
        if packet.device.type != "cuda":
            return packet, None
        if len(packet) not in self._hosts:
            self._hosts[len(packet)] = torch.empty(packet.shape, dtype=packet.dtype, pin_memory=True)
        host, arrived = self._hosts[len(packet)], torch.cuda.Event()
        host.copy_(packet, non_blocking=True)
        arrived.record()
        return host, arrived

    def _wait(self, copied) -> Decision:
        host, arrived = copied
        if arrived is not None:
            arrived.synchronize()
        return unpack(host, self.step.path_rows)
