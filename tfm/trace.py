"""What a decode run records: one row a request, one row a step, and for traced cells one row a tree node."""

from dataclasses import dataclass, field

STAGES = ("draft", "build", "verify", "accept", "commit", "other")
SUBSTAGES = (
    "target_gemm",
    "target_attention",
    "target_gdn",
    "target_head",
    "target_other",
    "weaver_prefix",
    "grow",
)


@dataclass
class StepTrace:
    """One verify pass of one request. Times are None unless the cell's clock is "stages" (and R == 1)."""

    step: int
    context: int  # tokens in the request before the step: prompt and emitted tokens, the root included
    nodes: int  # verified rows, the root included (budget + 1)
    depth: int  # deepest drafted node
    accepted: int  # drafts accepted, trimmed to what was emitted (EOS, stop, cap)
    accepted_untrimmed: int  # drafts accepted by the rule
    committed: int  # tokens emitted by the step, trimmed
    # sum over drafted nodes of the target's path probability: the lossless bound; None where it is none
    expected_accepted: float | None
    stage_us: dict[str, float] | None = None  # keys of STAGES and SUBSTAGES; STAGES sum to the step's wall


@dataclass
class TreeNode:
    """One node of one step's draft tree (traced cells only)."""

    step: int
    node: int
    parent: int
    token: int
    log_prob: float
    depth: int
    accepted: bool


@dataclass
class RequestTrace:
    """One finished request. Microseconds; wall times are None when several requests shared the batch (R > 1)."""

    id: str
    index: int  # index in the dataset: it seeds the noise
    prompt_tokens: int
    output_tokens: list[int]  # emitted tokens, an EOS that ended the request included
    finish_reason: str  # "stop" (an EOS token or a stop string) or "length" (the cap)
    prefill_us: float | None
    decode_us: float | None
    steps: list[StepTrace] = field(default_factory=list)
    trees: list[TreeNode] = field(default_factory=list)
