"""DecodeConfig: everything that decides which tokens a run emits, checked before any model loads."""

import math
from dataclasses import dataclass

from tfm_kernels.gdn.backends import BACKENDS

SIBLINGS = ("top", "sampled")
HEADS = ("weaver", "markov", "recurrent")  # what corrects the marginals along a path (tfm/weaver.py, tfm/heads.py)
RULES = ("greedy", "target_only", "traversal", "legacy_traversal")
# settings of other decoders that this one has at one value only, which is recorded with every cell
WHOLE_LAW = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
GREEDY_BELOW = 1e-5  # temperatures under this are greedy
MOST_NODES = 16_384  # of a tree, and of a batch of it: the rows of a verify pass see each other in pairs
MOST_HEAT = 3e38  # logits are divided in float32, where more than this is infinite
MOST_SEEDS = 2**63  # the noise would take a seed from here on for a smaller one, and no table holds it


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of one variant at one temperature. Use `check` before loading models; what a method takes, it knows."""

    method: str  # a label here: who proposes is decided by the caller
    temperature: float = 1.0
    rule: str = "target_only"
    budget: int | None = None  # drafted nodes; the root is extra. None for a method without a budget
    depth: int | None = None  # deepest draft; None means all the drafter's rows
    width: int | None = None  # nodes scored at once; None means the method's default
    children: int = 8  # children kept per scored node
    candidates: int = 64  # K, candidates per depth that are scored
    siblings: str = "top"  # a node's children: its best candidates, or draws without replacement (tfm/siblings.py)
    residual: bool = True  # False sets the head's residual to 0: the marginals alone score, no head is needed
    head: str = "weaver"
    depth_bonus: float = 0.0  # added once a level where the drafted prefixes are selected, at most 0
    max_new_tokens: int = 48
    seed: int = 0
    eos_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the text ends before a stop string, the ids with the token that completes it
    requests: int = 1  # R, requests decoded together
    gdn_backend: str = "solve"
    # every method samples from the target's whole law: a filter or a penalty is refused
    top_p: float = WHOLE_LAW["top_p"]
    top_k: int = WHOLE_LAW["top_k"]
    min_p: float = WHOLE_LAW["min_p"]
    repetition_penalty: float = WHOLE_LAW["repetition_penalty"]
    presence_penalty: float = WHOLE_LAW["presence_penalty"]
    frequency_penalty: float = WHOLE_LAW["frequency_penalty"]

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def lacks_bound(self) -> bool:
        """Whether expected_accepted bounds nothing: drawn siblings keep the law on average over trees only."""
        return self.siblings == "sampled" and self.rule == "traversal" and not self.is_greedy

    def check(self, draft_rows: int | None = None) -> "DecodeConfig":
        """Return self, or raise ValueError naming key, value, allowed values and remedy.

        `draft_rows` is the number of positions that the drafter drafts (block size - 1), when it is known.
        """
        _one_of("rule", self.rule, RULES)
        _one_of("gdn_backend", self.gdn_backend, BACKENDS)
        check_temperature(self.temperature)
        _check_whole_law(self)
        _one_of("siblings", self.siblings, SIBLINGS)
        if self.siblings == "sampled" and self.rule == "legacy_traversal":
            remedy = "siblings is sampled, and the audited rule takes them for the best candidates; use traversal"
            _refuse("rule", self.rule, "target_only, traversal", remedy)
        if not isinstance(self.stop, tuple) or not all(isinstance(word, str) and word for word in self.stop):
            _refuse("stop", self.stop, "a tuple of non-empty strings", "leave it out for none")
        if not isinstance(self.eos_tokens, tuple) or not all(type(token) is int for token in self.eos_tokens):
            _refuse("eos_tokens", self.eos_tokens, "a tuple of token ids", "leave it out for none")
        if self.rule == "greedy" and not self.is_greedy:
            _refuse(
                "rule", self.rule, "greedy only at temperature 0", f"temperature is {self.temperature}; use target_only"
            )
        for key in ("max_new_tokens", "children", "candidates", "requests"):
            _at_least_one(key, getattr(self, key))
        for key in ("budget", "depth", "width"):
            if getattr(self, key) is not None:
                _at_least_one(key, getattr(self, key))
                if getattr(self, key) > MOST_NODES:
                    remedy = f"one verify pass takes a whole tree; lower {key}"
                    _refuse(key, getattr(self, key), f"1 to {MOST_NODES}", remedy)
        if not isinstance(self.residual, bool):
            _refuse("residual", self.residual, "true or false", "false scores with the marginals alone")
        _one_of("head", self.head, HEADS)
        if not self.residual and self.head != DecodeConfig.head:
            _refuse("head", self.head, DecodeConfig.head, "residual is false, and no head is read; leave it out")
        check_depth_bonus(self.depth_bonus)
        if draft_rows is not None and self.depth is not None and self.depth > draft_rows:
            _refuse(
                "depth", self.depth, f"1 to {draft_rows}", f"the drafter drafts {draft_rows} positions; lower depth"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < MOST_SEEDS:
            _refuse("seed", self.seed, "an integer >= 0 and below 2**63", "give a seed; there is no implicit one")
        return self


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless `temperature` is a finite number >= 0."""
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 <= temperature <= MOST_HEAT:
        _refuse(
            "temperature",
            temperature,
            f"a finite number >= 0, at most {MOST_HEAT:g}",
            "use 0 for greedy, 1 for the target's law",
        )


def _check_whole_law(config: DecodeConfig) -> None:
    for key, off in WHOLE_LAW.items():
        value = getattr(config, key)
        if isinstance(value, bool) or value != off:
            _refuse(
                key,
                value,
                repr(off),
                "no method filters or penalises: all of them keep the target's law at its temperature; leave it out",
            )


def check_depth_bonus(value: float) -> None:
    """Raise ValueError unless a child with this bonus never scores above its parent."""
    if not isinstance(value, int | float) or not (math.isfinite(value) and value <= 0):
        _refuse(
            "depth_bonus",
            value,
            "a finite number <= 0",
            "above 0 a child can pass its parent, and the best prefixes are no tree; use 0",
        )


def _refuse(key: str, value, allowed: str, remedy: str) -> None:
    raise ValueError(f"{key}: {value!r} is not allowed (allowed: {allowed}); {remedy}")


def _one_of(key: str, value, allowed) -> None:
    if value not in allowed:
        _refuse(key, value, ", ".join(allowed), f"choose one of the allowed values for {key}")


def _at_least_one(key: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(key, value, "an integer >= 1", f"raise {key} to 1 or more")
