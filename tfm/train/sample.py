"""Sample answers from the trained target at temperature 1: what drafter and weaver are trained on.

Prompts are the training conversations up to their last answer, chosen by hash; those of the target's validation split
stay the held-out split here. Answers end at <|im_end|> or at the cap.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tfm.manifest import write_json
from tfm.target import Target
from tfm.tokenizer import load_tokenizer
from tfm.train.layout import Layout, stage_main
from tfm.train.loop import Deadline
from tfm.train.peers import ALONE, Peers
from tfm.train.rows import Rows, fill_buckets, hash_of, is_held_out
from tfm.train.sampler import Sampler
from tfm.train.settings import TrainSettings
from tfm.train.step_target import StepTarget
from tfm.train.target import load_frozen
from tfm.train.text import TokenisedText

ENTROPY_TOKENS, ENTROPY_BATCHES = 16384, 8  # padded tokens a batch, batches a bucket


@dataclass(frozen=True)
class Samples:
    """Conversations as flat arrays; row i is tokens[offsets[i]:offsets[i + 1]], its answer begins at starts[i]."""

    tokens: np.ndarray  # [total] uint16
    offsets: np.ndarray  # [rows + 1] int64
    starts: np.ndarray  # [rows] int64, length of the prompt
    held_out: np.ndarray  # [rows] bool

    def __len__(self) -> int:
        return len(self.starts)

    @staticmethod
    def join(rows: list[tuple[np.ndarray, int, bool]]) -> "Samples":
        lengths = [len(tokens) for tokens, _, _ in rows]
        return Samples(
            tokens=np.concatenate([tokens for tokens, _, _ in rows]).astype(np.uint16),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            starts=np.array([start for _, start, _ in rows], dtype=np.int64),
            held_out=np.array([held for _, _, held in rows], dtype=bool),
        )

    def rows(self) -> list[tuple[np.ndarray, int, bool]]:
        spans = zip(self.offsets[:-1], self.offsets[1:], strict=True)
        return [
            (self.tokens[low:high], int(start), bool(held))
            for (low, high), start, held in zip(spans, self.starts, self.held_out, strict=True)
        ]

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, **self.__dict__)
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> "Samples":
        with np.load(path) as arrays:
            return Samples(**{name: arrays[name] for name in ("tokens", "offsets", "starts", "held_out")})


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline, peers: Peers = ALONE) -> dict:
    """Sample part after part until all are there or the deadline; then join them. Returns what is done.

    Of several processes each samples every size-th part.
    """
    folder = layout.stage("sample")
    folder.mkdir(parents=True, exist_ok=True)
    plan = settings.sample
    prompts = choose_prompts(TokenisedText.load(layout.require(layout.corpus, "tokenizer")), settings)
    # similar lengths together: a part is padded to its longest prompt
    prompts.sort(key=lambda prompt: len(prompt[0]))
    parts = [prompts[at : at + plan.requests] for at in range(0, len(prompts), plan.requests)]
    paths = [folder / f"part-{number:03d}.npz" for number in range(len(parts))]
    eos = load_tokenizer(layout.weights("target")).eos_id
    target = load_frozen(settings, layout, device)
    sampler = None
    for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
        if deadline.is_over:
            break
        if number % peers.size == peers.rank and not path.is_file():
            sampler = sampler or sampler_of(target, settings, eos)
            answers = sampler.sample(
                [tokens.astype(np.int64) for tokens, _ in part],
                cap=plan.max_new_tokens,
                seed=settings.seed * 1_000_003 + number,
            )
            rows = zip(part, answers, strict=True)
            Samples.join([(np.concatenate([p, a]), len(p), held) for (p, held), a in rows]).save(path)
    del sampler  # its states are most of a card's memory
    peers.wait()
    made = [path for path in paths if path.is_file()]
    report = {"stage": "sample", "step": len(made), "steps": len(parts), "done": len(made) == len(parts)}
    if report["done"] and peers.is_first:
        report |= join_parts(made, target, settings, layout, device)
    peers.wait()
    return report


def sampler_of(target: Target, settings: TrainSettings, end: int) -> Sampler:
    """Return a sampler for the parts of a run: prompts and answers as long as the plan allows."""
    plan = settings.sample
    rows = plan.max_prompt_tokens + plan.max_new_tokens
    return Sampler(StepTarget(target), end=end, requests=plan.requests, rows=rows)


def sample_answers(target: Target, prompts: list[np.ndarray], *, end: int, cap: int, seed: int) -> list[list[int]]:
    """Return an answer of at most `cap` tokens (the end token included) for each prompt, at temperature 1."""
    rows = max(len(prompt) for prompt in prompts) + cap
    sampler = Sampler(StepTarget(target), end=end, requests=len(prompts), rows=rows)
    return sampler.sample([prompt.astype(np.int64) for prompt in prompts], cap=cap, seed=seed)


def join_parts(made: list[Path], target: Target, settings: TrainSettings, layout: Layout, device: str) -> dict:
    """Write samples.npz and facts.json from the parts; return the facts."""
    rows = [row for path in made for row in Samples.load(path).rows()]
    joined = Samples.join(rows)
    joined.save(layout.samples)
    answers = np.diff(joined.offsets) - joined.starts
    facts = {
        "conversations": len(joined),
        "answer_tokens": int(answers.sum()),
        "held_out": int(joined.held_out.sum()),
        "entropy_nats": answer_entropy(target, split_samples(joined, settings, device)[1]),
    }
    write_json(layout.stage("sample") / "facts.json", facts)
    return facts


def choose_prompts(text: TokenisedText, settings: TrainSettings) -> list[tuple[np.ndarray, bool]]:
    """Return (prompt tokens, is held out) of the conversations with the smallest hashes, in text order."""
    found, hashes = [], []
    for index in range(len(text)):
        tokens, mask = text.row(index)
        prompt = tokens[: last_answer_start(mask)]
        if 0 < len(prompt) <= settings.sample.max_prompt_tokens:
            found.append((prompt, is_held_out(tokens, settings.text.held_out_every)))
            hashes.append(hash_of(tokens))
    order = sorted(range(len(found)), key=hashes.__getitem__)
    return [found[place] for place in sorted(order[: settings.sample.conversations])]


def last_answer_start(mask: np.ndarray) -> int:
    """Return where the last run of True in `mask` begins (0 when there is none)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask]).astype(np.int8)) == 1)
    return int(edges[-1]) if len(edges) else 0


@torch.no_grad()
def answer_entropy(target: Target, rows: Rows) -> float:
    """Return the mean entropy in nats of the target's law at each token of the rows' answers."""
    total, count = 0.0, 0
    for batch in rows.fixed_batches(ENTROPY_TOKENS, ENTROPY_BATCHES):
        log_probs = target(batch["tokens"]).logits.float().log_softmax(-1)
        places = torch.arange(batch["tokens"].shape[1], device=log_probs.device)
        # row i is the law of token i + 1
        is_answer = (places + 1 >= batch["starts"][:, None]) & (places + 1 < batch["lengths"][:, None])
        total += float((-(log_probs.exp() * log_probs).sum(-1) * is_answer).sum())
        count += int(is_answer.sum())
    return total / count


def split_samples(samples: Samples, settings: TrainSettings, device) -> tuple[Rows, Rows]:
    """Return (training Rows, held-out Rows) of the conversations whose answer has at least two tokens."""
    longest = settings.sample.max_prompt_tokens + settings.sample.max_new_tokens
    buckets = tuple(sorted({*(size for size in settings.text.buckets if size < longest), longest}))
    sides: tuple[list, list] = ([], [])
    for tokens, start, held in samples.rows():
        if len(tokens) - start >= 2:
            sides[held].append((tokens, start))
    return tuple(Rows(fill_buckets(rows, buckets, device), settings.seed) for rows in sides)


if __name__ == "__main__":
    stage_main("sample", run, __doc__)
