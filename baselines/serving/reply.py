"""What a server said of one request, checked and turned into a record. A counter that is missing is an error.

Servers count what they accepted in a histogram: entry h is how many verify steps accepted h drafts. The order of the
steps is taken from the stream, where every chunk after the first is a step; a stream that merged chunks leaves it open.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baselines.serving.wire import ServerError
from tfm.config import DecodeConfig
from tfm.decode import Prompt
from tfm.trace import RequestTrace, StepTrace


@dataclass
class Reply:
    """One request as it came from a server. Times are seconds of one clock."""

    sent: float
    tokens: list[int] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far) of each chunk
    finish: str | None = None  # "stop", "length", or what else the server said
    closed: bool = False  # by the runner, at a stop string: the server's last words are then not read
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, taken from a cache of earlier requests
    verify_steps: int | None = None
    histogram: list[int] | None = None  # [h] -> steps that accepted h drafts
    undrafted: int = 0  # of the steps, those that the server did not count and that were made out of tokens left over

    def take(self, tokens: list[int], now: float) -> None:
        """Add the new tokens of one chunk."""
        self.tokens += tokens
        if tokens:
            self.chunks.append((now, len(self.tokens)))


@dataclass(frozen=True)
class Arm:
    """What is known of a method's steps before any request."""

    speculative: bool
    nodes: int  # verified rows a step, the root included
    depth: int | None  # of the deepest draft of a step; None where it is the step's own
    room: int | None = None  # tokens that the engine drafts within, prompt included; None where it is not asked

    @property
    def most(self) -> int:
        """Drafts that a step can accept."""
        return self.nodes - 1 if self.depth is None else self.depth


class Watcher:
    """Watches tokens come in and says when a request is over by this project's rules: EOS, stop string, cap."""

    def __init__(self, config: DecodeConfig, detokenise: Callable[[list[int]], str]):
        self.config, self.detokenise = config, detokenise
        self.emitted: list[int] = []
        self.finish: str | None = None
        self.late = 0  # tokens of chunks behind the one that ended the request

    def take(self, tokens: list[int]) -> bool:
        """Take new tokens up to the one that ends the request; return whether it is over."""
        self.late += len(tokens) if self.finish is not None else 0
        for token in tokens:
            if self.finish is not None:
                break
            self.emitted.append(token)
            words = self.config.stop
            if token in self.config.eos_tokens or (words and any(w in self.detokenise(self.emitted) for w in words)):
                self.finish = "stop"
            elif len(self.emitted) == self.config.max_new_tokens:
                self.finish = "length"
        return self.finish is not None


def check_pace(reply: Reply, seconds: float) -> None:
    """Raise ServerError when the server has sent chunks, but no token in them, for longer than `seconds`."""
    since = time.perf_counter() - (reply.chunks[-1][0] if reply.chunks else reply.sent)
    if since > seconds:
        raise ServerError(f"no token for {since:.0f} s, {len(reply.tokens)} before; the server sends empty chunks")


def to_trace(prompt: Prompt, reply: Reply, watcher: Watcher, arm: Arm) -> RequestTrace:
    """Return the record of a request; raises ValueError naming what the server's answer lacks or contradicts."""
    _check(prompt, reply, watcher)
    first, last = reply.chunks[0][0], reply.chunks[-1][0]
    return RequestTrace(
        id=prompt.id,
        index=prompt.index,
        prompt_tokens=len(prompt.tokens),
        output_tokens=watcher.emitted,
        finish_reason=watcher.finish,
        prefill_us=(first - reply.sent) * 1e6,
        decode_us=(last - first) * 1e6,
        steps=_steps(prompt, reply, watcher.emitted, arm),
    )


def order_is_known(trace: RequestTrace) -> bool:
    """Return whether a record's steps are in the order in which they were taken."""
    return all(step.context is not None for step in trace.steps)


def _check(prompt: Prompt, reply: Reply, watcher: Watcher) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f"prompt {prompt.id}: {what}; the record would be wrong, so there is none")

    if not reply.chunks or not reply.tokens:
        refuse("the server sent no token")
    if wrong := [token for token in reply.tokens if type(token) is not int or token < 0]:
        refuse(f"the server sent {wrong[0]!r}, which is no token id")
    if reply.finish not in ("stop", "length", None):
        refuse(f"the server ended it with {reply.finish!r}")
    if watcher.finish is None:
        refuse(
            f"the server ended it with {reply.finish!r} after {len(reply.tokens)} tokens, but no EOS of this project, "
            "stop string or cap is there; give both the same ends (eos_tokens, max_new_tokens)"
        )
    if watcher.late:
        refuse(
            f"the server sent {watcher.late} tokens in chunks behind the one that ended it ({watcher.finish}), and "
            "their time would count without them; give it the same ends (eos_tokens, max_new_tokens)"
        )
    for name, own in (("prompt_tokens", len(prompt.tokens)), ("completion_tokens", len(reply.tokens))):
        found = getattr(reply, name)
        if found is None and not reply.closed:
            refuse(f"the server's answer has no {name}; a count that is missing agrees with nothing")
        if found is not None and found != own:
            verb, what = ("read", "prompt tokens") if name == "prompt_tokens" else ("counted", "tokens")
            refuse(f"the server {verb} {found} {what}, {own} were sent")
    if reply.cached_tokens:
        refuse(f"{reply.cached_tokens} prompt tokens came from the server's cache, whose time is not the prompt's")


def _steps(prompt: Prompt, reply: Reply, emitted: list[int], arm: Arm) -> list[StepTrace]:
    """Return the verify steps of a request, their counts trimmed to the tokens that were kept."""
    after_first = len(emitted) - 1
    if not arm.speculative:
        if reply.verify_steps:
            raise ValueError(
                f"prompt {prompt.id}: {reply.verify_steps} verify steps of a server that must draft nothing"
            )
        return _in_order(len(prompt.tokens), [0] * after_first, after_first, arm)
    if after_first == 0:
        return []
    accepted = _accepted(prompt, reply, arm)
    drafts = [later - before - 1 for (_, before), (_, later) in zip(reply.chunks, reply.chunks[1:], strict=False)]
    if len(drafts) == len(accepted) and reply.chunks[0][1] == 1:
        # an end cuts the last step's chunk, not its count: what the other chunks leave of the histogram is its count
        rest = list((Counter(accepted) - Counter(drafts[:-1])).elements())
        if len(rest) == 1 and rest[0] >= drafts[-1]:
            return _in_order(len(prompt.tokens), [*drafts[:-1], rest[0]], after_first, arm)
    return _unordered(accepted, after_first, arm)


def _accepted(prompt: Prompt, reply: Reply, arm: Arm) -> list[int]:
    """Return the accepted drafts of every step, ascending, from the histogram; raises ValueError without one."""
    if reply.verify_steps is None or reply.histogram is None:
        lacking = "verify steps" if reply.verify_steps is None else "histogram of accepted drafts"
        raise ValueError(
            f"prompt {prompt.id}: the server's answer has no {lacking}; without it nothing is known of its steps (it "
            "is not 1 token a step): check that the server runs the method, and its version"
        )
    if wrong := [count for count in (*reply.histogram, reply.verify_steps) if type(count) is not int or count < 0]:
        raise ValueError(f"prompt {prompt.id}: the server counted {wrong[0]!r} steps; a count is a whole number >= 0")
    if sum(reply.histogram) != reply.verify_steps:
        raise ValueError(
            f"prompt {prompt.id}: a histogram of {sum(reply.histogram)} steps beside {reply.verify_steps} verify steps"
        )
    accepted = [drafts for drafts, count in enumerate(reply.histogram) for _ in range(count)]
    if accepted and accepted[-1] > arm.most:
        raise ValueError(
            f"prompt {prompt.id}: a step accepted {accepted[-1]} drafts, the method verifies {arm.most} at most; check "
            "that the server runs the cell's method"
        )
    _check_undrafted(prompt, reply, arm)
    made, kept = sum(accepted) + len(accepted), len(reply.tokens) - 1
    if made < kept or not accepted or made - kept > accepted[-1]:
        raise ValueError(
            f"prompt {prompt.id}: {len(accepted)} steps that accepted {sum(accepted)} drafts make {made} tokens, the "
            f"server sent {kept} after the first"
        )
    return accepted


def _check_undrafted(prompt: Prompt, reply: Reply, arm: Arm) -> None:
    """Raise ValueError for more steps without drafts than fit between the last place that drafts and the end."""
    if not reply.undrafted or arm.room is None:
        return
    length = len(prompt.tokens) + len(reply.tokens)
    most = max(0, length - (arm.room - arm.most))
    if reply.undrafted > most:
        raise ValueError(
            f"prompt {prompt.id}: {reply.undrafted} of {len(reply.tokens) - 1} tokens after the first are of no step "
            f"that the server counted, and at {length} of {arm.room} tokens at most {most} may be of steps that draft "
            "nothing; its counters stayed behind, or it does not draft"
        )


def _in_order(prompt_tokens: int, accepted: list[int], after_first: int, arm: Arm) -> list[StepTrace]:
    steps, left, context = [], after_first, prompt_tokens + 1
    for drafts in accepted:
        if left <= 0:  # a step behind the stop string that this project ends at
            break
        kept = min(drafts + 1, left)
        steps.append(StepTrace(len(steps), context, arm.nodes, arm.depth, min(drafts, kept), drafts, kept, None))
        left, context = left - kept, context + kept
    return steps


def _unordered(accepted: list[int], after_first: int, arm: Arm) -> list[StepTrace]:
    """Return steps ascending by what they accepted, without context; the one that was cut is the longest."""
    steps, made = [], sum(accepted) + len(accepted)
    for number, drafts in enumerate(accepted):
        kept = drafts + 1 - (max(0, made - after_first) if number == len(accepted) - 1 else 0)
        if kept < 1:
            raise ValueError(
                f"the cut of {made - after_first} tokens is no cut of one step, and the stream does not tell the order "
                "of the steps; leave stop strings out for this engine"
            )
        steps.append(StepTrace(number, None, arm.nodes, arm.depth, min(drafts, kept), drafts, kept, None))
    return steps
