"""Measure what sharpening does to a trained target, before drafter and weaver are trained on it.

    python -m tfm.train.calibrate --config workflows/config/train_mini.yaml --out OUT --device cuda

Reads the exported target of OUT and its text; writes nothing. A factor multiplies the exported logits. For each it
samples answers at temperature 1 and prints entropy (nats a token), the share of tokens that are the target's first
choice, and the accepted length of the greedy chain of 15 tokens, of which a drafter's chain reaches a part.
"""

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tfm.target import Target
from tfm.tokenizer import load_tokenizer
from tfm.train.layout import Layout, prepare_device
from tfm.train.rows import hash_of
from tfm.train.sample import Samples, answer_entropy, choose_prompts, sample_answers, split_samples
from tfm.train.settings import TrainSettings, load_settings
from tfm.train.target import load_frozen, sharpen
from tfm.train.text import TokenisedText
from tfm.tree import DraftTree

CHAIN = 15
ANCHORS = 4  # of each answer


def measure(target: Target, samples: Samples, settings: TrainSettings, device: str) -> dict[str, float]:
    """Return entropy_nats, first_choice and greedy_chain along the answers of `samples`."""
    held = split_samples(samples, settings, device)[1]
    hits, total, chain, anchors = 0.0, 0, 0.0, 0
    for batch in held.fixed_batches(16384, 8, ANCHORS):
        with torch.no_grad():
            logits = target(batch["tokens"]).logits
        places = torch.arange(batch["tokens"].shape[1] - 1, device=logits.device)
        is_answer = (places + 1 >= batch["starts"][:, None]) & (places + 1 < batch["lengths"][:, None])
        hits += float(((logits[:, :-1].argmax(-1) == batch["tokens"][:, 1:]) & is_answer).sum())
        total += int(is_answer.sum())
        for column in batch["anchors"].unbind(1):
            chain += float(greedy_chain(target, batch["tokens"], column).sum())
            anchors += len(column)
    entropy = answer_entropy(target, held)
    return {"entropy_nats": entropy, "first_choice": hits / total, "greedy_chain": chain / anchors}


@torch.no_grad()
def greedy_chain(target: Target, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return [R] the mean accepted length of the target's own greedy chain of 15 tokens after positions `anchors` [R].

    It is the sum over depths of the probability of the greedy path.
    """
    cache = target.new_cache(len(tokens), tokens.shape[1] + CHAIN)
    roots = tokens.gather(1, anchors[:, None])[:, 0]
    target.prefill(tokens, anchors.clamp(min=1), cache)
    path, length = torch.zeros(len(tokens), device=tokens.device), torch.zeros(len(tokens), device=tokens.device)
    for _ in range(CHAIN):
        output = target.verify(DraftTree.root_only(roots), cache)
        cache.commit(output.scratch, torch.zeros_like(roots)[:, None])
        best, roots = output.logits[:, 0].float().log_softmax(-1).max(-1)
        path = path + best
        length = length + path.exp()
    return length


def calibrate(
    settings: TrainSettings, layout: Layout, factors: Sequence[float], *, conversations: int, tokens: int, device: str
) -> list[dict[str, float]]:
    """Return one row a factor: factor and what `measure` finds on answers sampled at it."""
    text = TokenisedText.load(layout.require(layout.corpus, "tokenizer"))
    # chosen by a hash of their own: sample.py takes those of the smallest hashes
    prompts = sorted((prompt for prompt, _ in choose_prompts(text, settings)), key=lambda p: hash_of(p[::-1]))
    prompts = sorted(prompts[:conversations], key=len)
    eos, plain, rows = load_tokenizer(layout.weights("target")).eos_id, load_frozen(settings, layout, device), []
    for factor in factors:
        target = copy.deepcopy(plain)
        sharpen(target, factor)
        answers = sample_answers(target, prompts, end=eos, cap=tokens, seed=settings.seed)
        joined = [(np.concatenate([p, a]), len(p), True) for p, a in zip(prompts, answers, strict=True)]
        # a training split is never empty
        samples = Samples.join([*joined, (*joined[0][:2], False)])
        rows.append({"factor": factor, **measure(target, samples, settings, device)})
        print(json.dumps({key: round(value, 4) for key, value in rows[-1].items()}), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="workflows/config/train_<family>.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--factors", default="1,1.25,1.5,1.75,2", help="comma-separated, on top of what was exported")
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    prepare_device(options.device)
    settings, layout = load_settings(options.config), Layout(options.out, None)
    factors = [float(factor) for factor in options.factors.split(",")]
    named = {name: getattr(options, name) for name in ("conversations", "tokens", "device")}
    print(json.dumps(calibrate(settings, layout, factors, **named)))


if __name__ == "__main__":
    main()
