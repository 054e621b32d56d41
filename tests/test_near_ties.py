"""Where bfloat16 may part from autoregressive decoding: at near ties of the target's own scores, and nowhere else.

transformers#39421, llama.cpp#25618, mlx-lm#1423: verifying many tokens at once rounds otherwise than decoding one at a
time, so greedy outputs differ where the two best scores are closer than the type resolves. Anything else is a bug.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from test_nano import ARMS, WEIGHTS, embedded_prompts
from workflow_runs import ROOT

from baselines.loading import load_models
from baselines.methods import resolve
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode

PROMPTS, NEW_TOKENS = 8, 48
ULPS = 2  # each of two ways to the same score ends in a rounding


@dataclass(frozen=True)
class Difference:
    """The first token at which an output parts from autoregressive decoding's."""

    prompt: str
    at: int
    gap: float  # between the two best scores there
    resolution: float  # between neighbouring numbers of the type at the best score
    is_second: bool  # the other token is the runner-up

    @property
    def is_near_tie(self) -> bool:
        return self.is_second and self.gap <= ULPS * self.resolution


def classify(parts: Models, prompt: Prompt, expected: list[int], got: list[int]) -> Difference | None:
    """Return the first difference, judged by scoring the common prefix in one pass without any draft."""
    at = next((i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other), None)
    if at is None:
        return None if expected == got else Difference(prompt.id, min(len(expected), len(got)), math.inf, 0.0, False)
    with torch.inference_mode():
        scores = parts.target(torch.tensor([prompt.tokens + expected[:at]])).logits[0, -1]
    (best, second), tokens = (values.tolist() for values in scores.float().topk(2))
    step = torch.finfo(scores.dtype).eps * 2.0 ** math.floor(math.log2(abs(best)))
    return Difference(prompt.id, at, best - second, step, {expected[at], got[at]} == set(tokens))


@cache
def parts(dtype: torch.dtype) -> Models:
    folders = {part: WEIGHTS / part for part in ("target", "drafter", "weaver")}
    return load_models(folders, device=torch.device("cpu"), dtype=dtype)


@cache
def outputs(arm: str, dtype: torch.dtype, requests: int) -> dict[str, list[int]]:
    config = DecodeConfig(**ARMS[arm], temperature=0.0, max_new_tokens=NEW_TOKENS, requests=requests)
    models = parts(dtype) if config.residual else replace(parts(dtype), weaver=None)
    done: dict[str, list[int]] = {}
    proposer = resolve(config.method)(config, models)
    prompts = list(embedded_prompts())[:PROMPTS]
    decode(prompts, models, config, proposer=proposer, on_finish=lambda t: done.__setitem__(t.id, t.output_tokens))
    return done


@pytest.mark.parametrize("arm", ["dflash", "ddtree", "dartree", "tfm"])
def test_first_differences_in_bfloat16_are_near_ties(arm):
    """In float32 there are none at all: tests/test_nano.py."""
    models, prompts = parts(torch.bfloat16), {prompt.id: prompt for prompt in embedded_prompts()}
    expected, got = outputs("ar", torch.bfloat16, 1), outputs(arm, torch.bfloat16, PROMPTS)
    found = [classify(models, prompts[name], expected[name], got[name]) for name in expected]
    differences = [difference for difference in found if difference is not None]
    bugs = [difference for difference in differences if not difference.is_near_tie]
    print(f"{arm}: {len(found) - len(differences)} of {len(found)} identical, {len(bugs)} real bugs, {differences}")
    assert not bugs


def test_a_wrong_token_is_no_near_tie():
    """The judge itself: of outputs with one token replaced, all are called bugs, and a cut one too."""
    expected = outputs("ar", torch.bfloat16, 1)
    for prompt in list(embedded_prompts())[:4]:
        tokens = expected[prompt.id]
        wrong = [*tokens[:3], (tokens[3] + 1) % 2048, *tokens[4:]]
        assert not classify(parts(torch.bfloat16), prompt, tokens, wrong).is_near_tie
        assert not classify(parts(torch.bfloat16), prompt, tokens, tokens[:-1]).is_near_tie
        assert classify(parts(torch.bfloat16), prompt, tokens, tokens) is None


def test_the_check_of_a_family_calls_a_token_that_is_no_runner_up_and_a_cut_text_wrong():
    """C038, C046: judged by ar's two best scores alone, any token passed at a near tie, and so did a text cut there."""
    sys.path.insert(0, str(ROOT / "workflows/scripts"))
    import check_lossless
    from lossless_table import is_near_tie

    prompt = list(embedded_prompts())[0]

    class Tied:
        embed_weight = torch.zeros(1)

        def __call__(self, tokens):
            logits = torch.tensor([0.0, 2.0, 2.0, 3.0, 3.0 + 2e-5]).expand(1, tokens.shape[1], 5)
            return type("Output", (), {"logits": logits})

    check = check_lossless.Check(Models(Tied()), [prompt], None, ())
    found = [check._first(prompt, [5, 4], other, 0.0) for other in ([5, 3], [5, 1], [5])]
    assert [(row["at"], is_near_tie(row)) for row in found] == [(1, True), (1, False), (1, False)]
