"""A drafter that guesses training text well offline but is refused live has its rows or its prompts mixed up."""

import json
import sys
from dataclasses import replace
from functools import cache

import torch
from test_nano import ROOT, WEIGHTS, models

from baselines.methods import resolve
from tfm.config import DecodeConfig
from tfm.decode import Prompt, decode
from tfm.tokenizer import encode_prompt, load_tokenizer
from tfm.train.text import encode_conversation

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from sanity import compare_first_draft

ROWS, NEW_TOKENS = 8, 24


@cache
def conversations() -> list[list[tuple[str, str]]]:
    lines = (ROOT / "tfm/data/tiny-train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    return [[(turn["role"], turn["content"]) for turn in json.loads(line)["messages"][:2]] for line in lines]


def offline_accuracy() -> float:
    """How often the drafter's first guess is the next token of the training text, at every token of the answers."""
    tokenizer, parts, hits = load_tokenizer(WEIGHTS / "target"), models(), []
    with torch.inference_mode():
        for messages in conversations():
            ids, is_answer = encode_conversation(tokenizer, messages)
            tokens, places = torch.tensor([ids]), torch.tensor(is_answer).nonzero()[:-1, 0]
            roots = tokens[:, places]
            hidden = parts.drafter.forward_blocks(parts.target(tokens).taps, places[None], roots, parts.target)
            guesses = parts.target.head(hidden[0, :, 0]).argmax(-1)
            hits += (guesses == tokens[0, places + 1]).tolist()
    return sum(hits) / len(hits)


def live_acceptance(drafter) -> float:
    """How often the first draft is accepted when the same prompts are answered."""
    tokenizer, steps = load_tokenizer(WEIGHTS / "target"), []
    config = DecodeConfig(method="dflash", temperature=1.0, max_new_tokens=NEW_TOKENS, requests=ROWS)
    parts = replace(models(), drafter=drafter)
    prompts = [
        Prompt(str(i), i, encode_prompt(tokenizer, messages[0][1], reasoning=False))
        for i, messages in enumerate(conversations())
    ]
    proposer = resolve(config.method)(config, parts)
    decode(prompts, parts, config, proposer=proposer, on_finish=lambda trace: steps.extend(trace.steps))
    return sum(step.accepted_untrimmed > 0 for step in steps) / len(steps)


class OffByOne:
    """The drafter with its rows shifted: row d holds the marginal of the token after the one it should."""

    def __init__(self, drafter):
        self._drafter = drafter

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def draft(self, *arguments):
        logits, hidden = self._drafter.draft(*arguments)
        return logits.roll(-1, dims=1), hidden.roll(-1, dims=1)


def test_the_shipped_drafter_is_accepted_live_as_its_offline_accuracy_promises_and_a_shifted_one_is_flagged():
    """SpecForge#455, #533, #560: training accuracy was high and live acceptance near zero."""
    offline = offline_accuracy()
    good, shifted = (
        compare_first_draft(live_acceptance(d), offline) for d in (models().drafter, OffByOne(models().drafter))
    )
    print(f"offline {offline:.3f}, live over offline {good['value']:.2f}, with rows off by one {shifted['value']:.2f}")
    assert not good["flag"]
    assert "prompt template, or draft rows off by one" in shifted["flag"]
