"""What a server of DFLASH_TFM may be started with, and what its arguments become."""

import math

from baselines.sglang.settings import Settings
from baselines.sglang.shared_state import verify_topk

# attention backends of the target that take a mask of any shape at page size 1
ATTENTION = ("triton", "flashinfer")
ONE = (("tp_size", "tensor parallelism"), ("pp_size", "pipeline parallelism"), ("dp_size", "data parallelism"))


def validate(server_args) -> None:
    """Raise ValueError naming flag, value, allowed value and reason for what is not exact, or not there."""
    settings = Settings.from_environment()
    for flag, what in ONE:
        _require(flag, getattr(server_args, flag), 1, f"{what} would split the rows that the trees are made of")
    _require("max_running_requests", server_args.max_running_requests, 1, "requests are decoded one after the other")
    _require("disable_overlap_schedule", server_args.disable_overlap_schedule, True, "a step waits for the last one")
    _require("disable_radix_cache", server_args.disable_radix_cache, True, "states are kept for the running request")
    page = server_args.page_size
    if page is not None:
        _require("page_size", page, 1, "accepted rows are moved one by one")
    backend = server_args.attention_backend
    if backend not in ATTENTION:
        raise ValueError(
            f"DFLASH_TFM: attention_backend: {backend!r} is not allowed (allowed: {', '.join(ATTENTION)}); the others "
            "do not take a tree's mask here"
        )
    draft, forms = server_args.speculative_draft_attention_backend or backend, "this project's forms stand in triton"
    early = "it plans a draft from lengths on the host, which are not known before a step ends"
    for key, found, allowed, why in (
        ("attention", backend, "sglang", forms),
        ("draft_attention", draft, "sglang", forms),
        ("ahead", draft, "none", early),
    ):
        if found != "triton":
            more = f"with SGLang's attention backend {found} {why}"
            _require(key, getattr(settings, key), allowed, more)


def make_algorithm() -> type:
    """Return SGLang's class of the algorithm; a function, so that this module needs no SGLang."""
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class TreeAlgorithm(CustomSpecAlgo):
        """Counts as DFLASH everywhere: taps of the target, the drafter's memory, its graphs with embedded inputs."""

        def is_dflash(self) -> bool:
            return True

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        # the three below are asked for by the scheduler and missing in CustomSpecAlgo
        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False):
            from sglang.srt.managers.overlap_utils import FutureMap

            return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

        def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
            """Width of a graph: the drafter's runner is asked with the tree's size, and drafts a block."""
            from sglang.srt.runtime_context import get_server_args

            return int(get_server_args().speculative_dflash_block_size) if is_draft_worker else num_draft_tokens

        def handle_server_args(self, server_args) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_dflash

            resolve(server_args, _handle_dflash)

    return TreeAlgorithm


def resolve(server_args, handle_dflash) -> None:
    """Change a server's arguments in place: DFLASH's own rules for the drafter, then the tree's size for the target."""
    settings = Settings.from_environment()
    # a second pass over the same arguments must find the block, not the tree
    server_args.speculative_num_draft_tokens = server_args.speculative_dflash_block_size
    handle_dflash(server_args)
    block = int(server_args.speculative_num_draft_tokens)
    settings.decode_config(temperature=0.0, seed=0).check(block - 1)
    if 2 * (settings.budget + 1) < block:
        raise ValueError(
            f"budget: {settings.budget} is not allowed with DFLASH_TFM (allowed: {math.ceil(block / 2) - 1} or more); "
            f"SGLang reserves two trees behind the context, and the drafter's block of {block} has to fit"
        )
    # another process gets these arguments, not this object: the worker reads the block here
    server_args.speculative_dflash_block_size = block
    server_args.speculative_num_draft_tokens = settings.budget + 1
    server_args.speculative_eagle_topk = verify_topk(settings)
    server_args.page_size = 1


def _require(flag: str, value, wanted, why: str) -> None:
    if value != wanted:
        raise ValueError(f"DFLASH_TFM: {flag}: {value!r} is not allowed (allowed: {wanted!r}); {why}")


def refuse_request(request) -> str | None:
    """Return why a request cannot be decoded exactly, or None; SGLang aborts it with these words."""
    sampling = request.sampling_params
    whole = {"top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    whole |= {"min_new_tokens": 0}
    for key, allowed in whole.items():
        if getattr(sampling, key) != allowed:
            return (
                f"{key}: {getattr(sampling, key)!r} is not allowed with DFLASH_TFM (allowed: {allowed!r}); its trees "
                "keep the target's whole law, leave it out"
            )
    # SGLang turns temperature 0 into top_k 1; its "all" is 2**30
    if sampling.top_k not in (1, 1 << 30):
        return f"top_k: {sampling.top_k} is not allowed with DFLASH_TFM (allowed: -1, all tokens); leave it out"
    if sampling.logit_bias:
        return "logit_bias: not allowed with DFLASH_TFM (allowed: none); leave it out"
    for key in ("json_schema", "regex", "ebnf", "structural_tag"):
        if getattr(sampling, key):
            return f"{key}: not allowed with DFLASH_TFM (allowed: none); grammars are not applied to trees"
    if request.return_logprob:
        return "return_logprob: not allowed with DFLASH_TFM (allowed: false)"
    return None
