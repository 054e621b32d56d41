"""Answers of a given target to the training prompts: what drafter and heads of the dense suite are trained on.

Each part is one static batch, at temperature 1 or greedy; the drafter learns the target's law along both kinds. Prompts
are the distinct first messages of the training text, the ones with the smallest hashes, in the target's own template.
An answer that reaches the cap is kept, cut there.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tfm.llama_gguf import GGUF_SHA256
from tfm.manifest import sha256_file, write_json
from tfm.train.dense_settings import AnswerSettings, DenseSettings
from tfm.train.generate import Plan, Prompt, answer_parts
from tfm.train.layout import Layout
from tfm.train.loop import Deadline
from tfm.train.rows import Rows, fill_buckets, is_held_out
from tfm.train.sample import Samples
from tfm.train.sampler import Sampler
from tfm.train.smollm import ChatTokenizer, load_gguf
from tfm.train.text import iter_training_rows, training_files

GREEDY = 1e-6  # the sampler divides by its temperature: the largest logit then has all the mass


def run(settings: DenseSettings, layout: Layout, *, gguf: Path, device: str, deadline: Deadline) -> dict:
    """Sample part after part until all are there or the deadline, then join them. Returns what is done."""
    folder, plan = layout.stage("sample"), settings.sample
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / "facts.json"
    if layout.samples.is_file() and facts.is_file():
        return {"stage": "sample", "done": True}
    if layout.data is None:
        raise ValueError("data: None is not allowed for the sample stage (allowed: a folder of training text)")
    llama, tokenizer = load_gguf(gguf)
    llama = llama.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    parts = prompt_parts(settings, layout.data, tokenizer)
    rows = plan.max_prompt_tokens + plan.max_new_tokens
    sampler = Sampler(llama, end=tokenizer.end, requests=plan.requests, rows=rows)
    made = []
    for number, part in enumerate(parts):
        path = folder / f"part-{number:03d}.npz"
        if not path.is_file():
            if deadline.is_over:
                break
            sample_part(sampler, tokenizer, part, settings, number).save(path)
        made.append(path)
    report = {"stage": "sample", "step": len(made), "steps": len(parts), "done": len(made) == len(parts)}
    if report["done"]:
        joined = Samples.join([row for path in made for row in Samples.load(path).rows()])
        joined.save(layout.samples)
        report |= describe(joined, parts, settings, layout.data)
        write_json(facts, report)
    return report


def prompt_parts(settings: DenseSettings, data: Path, tokenizer: ChatTokenizer) -> list[list[Prompt]]:
    """Return batches of prompts of similar length, in an order by hash."""
    plan = settings.sample
    found = {
        row.messages[0][1]: row.domain
        for row in iter_training_rows(data)
        if not any(row.source.startswith(name) for name in settings.excluded)
    }
    like = Plan(
        gguf=GGUF_SHA256,
        train_data={},
        seed=settings.seed,
        temperature=1.0,
        message_temperature=1.0,
        requests=plan.requests,
        new_prompts=0,
        max_prompt_tokens=plan.max_prompt_tokens,
        max_new_tokens=plan.max_new_tokens,
        limit=None,
    )
    parts = answer_parts([Prompt(domain, "train", text) for text, domain in found.items()], like, tokenizer)
    return parts[: max(1, -(-plan.conversations // plan.requests))]


def is_greedy(number: int, share: float) -> bool:
    """Whether a part is greedy: the first n parts hold floor(n * share) of them, whatever n is."""
    return int((number + 1) * share) > int(number * share)


def sample_part(
    sampler: Sampler, tokenizer: ChatTokenizer, part: list[Prompt], settings: DenseSettings, number: int
) -> Samples:
    """Return the conversations of one part: prompt, answer and, where it ends, the end of its turn."""
    plan, prompts = settings.sample, tokenizer.answer_prompts([prompt.text for prompt in part])
    greedy = is_greedy(number, plan.greedy_share)
    answers = sampler.sample(
        prompts,
        cap=plan.max_new_tokens,
        temperature=GREEDY if greedy else 1.0,
        seed=settings.seed * 1_000_003 + number,
    )
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = np.array([*prompt, *answer], dtype=np.uint16)
        rows.append((tokens, len(prompt), is_held_out(np.array(prompt, dtype=np.uint16), plan.held_out_every)))
    return Samples.join(rows)


def describe(samples: Samples, parts: list, settings: DenseSettings, data: Path) -> dict:
    """Return the facts of the samples that the model card quotes."""
    answers = np.diff(samples.offsets) - samples.starts
    greedy = [is_greedy(number, settings.sample.greedy_share) for number in range(len(parts))]
    return {
        "conversations": len(samples),
        "answer_tokens": int(answers.sum()),
        "held_out": int(samples.held_out.sum()),
        "greedy_conversations": sum(len(part) for part, is_one in zip(parts, greedy, strict=True) if is_one),
        "settings": asdict(settings.sample),
        "text": {path.name: sha256_file(path) for path in training_files(data)},
    }


def split(samples: Samples, plan: AnswerSettings, *, seed: int, device) -> tuple[Rows, Rows]:
    """Return (training Rows, held-out Rows) of the conversations whose answer has at least two tokens."""
    sides: tuple[list, list] = ([], [])
    for tokens, start, held in samples.rows():
        if len(tokens) - start >= 2:
            sides[held].append((tokens, start))
    return tuple(Rows(fill_buckets(rows, plan.buckets, device), seed) for rows in sides)
