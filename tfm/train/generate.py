"""Write training text with SmolLM2-135M-Instruct: its answers to the training prompts and to messages it makes up.

    python -m tfm.train.generate --gguf FILE --train-data DIR --out OUT --device cuda --new-prompts 30000 --minutes 6

Reads the GGUF file (pinned by hash) and rows {domain, source, messages}. Writes OUT/generated-*.jsonl.gz in the same
format and OUT/manifest.json; a second call with the same options goes on. Last line of stdout: one JSON object. On a
host with several GPUs: torchrun --nproc-per-node N -m tfm.train.generate ..., each then writes its share. Answers
that reach the cap, repeat themselves, or share 13 words in a row with a benchmark are dropped.
"""

import argparse
import functools
import gzip
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tfm.manifest import sha256_file, sha256_json, write_atomic, write_json
from tfm.train.layout import prepare_device
from tfm.train.loop import Deadline
from tfm.train.peers import ALONE, Peers
from tfm.train.sampler import Sampler
from tfm.train.smollm import GGUF_SHA256, ChatTokenizer, Llama, load_gguf
from tfm.train.text import iter_training_rows, training_files

SOURCE = "smollm2_135m_instruct"
# what a made-up message is about: the system turn before it
SUBJECTS = {
    "chat": "You are a helpful AI assistant. The user asks a question about everyday life, science, history or work.",
    "math": "You are a patient math teacher. The user asks you to solve one short math problem with numbers.",
    "code": "You are an expert Python programmer. The user asks you to write one short Python function.",
}
LEFT_OVER = 0.02  # a batch ends when this share is still writing: they would reach the cap
PLAIN_WORDS = 13


@dataclass(frozen=True)
class Plan:
    """What decides the text."""

    gguf: str  # sha256
    train_data: dict[str, str]  # sha256 by file
    seed: int
    temperature: float
    message_temperature: float
    requests: int
    new_prompts: int
    max_prompt_tokens: int
    max_new_tokens: int
    limit: int | None  # prompts of the training text at most


@dataclass(frozen=True)
class Prompt:
    domain: str
    origin: str  # "train" or "new"
    text: str


def run(
    plan: Plan,
    llama: Llama,
    tokenizer: ChatTokenizer,
    options: argparse.Namespace,
    deadline: Deadline,
    peers: Peers = ALONE,
) -> dict:
    """Make the messages, then the answers, part by part, until all are there or the deadline.

    Of several processes each makes every size-th part."""
    options.out.mkdir(parents=True, exist_ok=True)
    if peers.is_first:
        check_plan(plan, options.out / "plan.json")
    rows = plan.max_prompt_tokens + plan.max_new_tokens
    sampler = Sampler(llama, end=tokenizer.end, requests=plan.requests, rows=rows)
    report = {"stage": "generate", "done": False}
    new = make_messages(plan, sampler, tokenizer, options.out, deadline, peers)
    if new is None:
        return report
    parts = answer_parts([*training_prompts(plan, options.train_data), *new], plan, tokenizer)
    with Writer(options.benchmarks, options.workers) as writer:
        for number, part in enumerate(parts):
            path = options.out / f"generated-{number:03d}.jsonl.gz"
            if deadline.is_over:
                break
            if path.is_file() or number % peers.size != peers.rank:
                continue
            began, prompts = time.monotonic(), tokenizer.answer_prompts([prompt.text for prompt in part])
            seed = plan.seed * 1_000_003 + 100_000 + number
            answers = write(sampler, prompts, cap=plan.max_new_tokens, temperature=plan.temperature, seed=seed)
            texts = tokenizer.decode_many([ids or [] for ids in answers])
            writer.put(path, part, list(zip(texts, answers, strict=True)))
            facts = {
                "part": number,
                "of": len(parts),
                "asked": len(part),
                "ended": sum(ids is not None for ids in answers),
            }
            facts |= {"tokens": sum(len(ids) for ids in answers if ids), "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(facts), file=sys.stderr, flush=True)
    peers.wait()
    made = sorted(options.out.glob("generated-*.jsonl.gz"))
    report |= {"parts": len(made), "of": len(parts), "done": len(made) == len(parts)}
    if peers.is_first:
        files = {path.name: sha256_file(path) for path in made}
        write_json(options.out / "manifest.json", {"plan": asdict(plan), "files": files, **report})
    return report


def write(
    sampler: Sampler, prompts: list[list[int]], *, cap: int, temperature: float, seed: int
) -> list[list[int] | None]:
    """Return what follows each prompt up to the end of its turn, without it; None where that is not in sight."""
    rows = sampler.sample(prompts, cap=cap, temperature=temperature, seed=seed, left_over=LEFT_OVER)
    return [row[:-1] if row[-1] == sampler.end else None for row in rows]


class Writer:
    """Cleans and writes parts, in `workers` processes beside the sampling one or, with none, at once."""

    def __init__(self, benchmarks: Path | None, workers: int):
        self._benchmarks = benchmarks
        # a fork would take the CUDA context along
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=spawn) if workers else None
        self._pending: list = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for future in self._pending:
            future.result()  # a failed part is an error of the run

    def put(self, path: Path, prompts: list[Prompt], answers: list[tuple[str, list[int] | None]]) -> None:
        """Write the answers (text, ids; ids None where it did not end) that are worth keeping to `path`."""
        if self._pool is None:
            write_part(path, prompts, answers, self._benchmarks)
        else:
            self._pending.append(self._pool.submit(write_part, path, prompts, answers, self._benchmarks))


def write_part(
    path: Path, prompts: list[Prompt], answers: list[tuple[str, list[int] | None]], benchmarks: Path | None
) -> None:
    """Write the rows of one part that end, are plain, go forward and hold no run of a benchmark's words."""
    barred = word_runs(benchmarks)
    rows = [
        {"domain": prompt.domain, "source": f"{SOURCE}:{prompt.origin}", "messages": messages_of(prompt.text, answer)}
        for prompt, (text, ids) in zip(prompts, answers, strict=True)
        if ids is not None and is_worth_keeping(answer := text.strip(), ids)
        if not barred & runs_of(f"{prompt.text} {answer}")
    ]
    write_atomic(path, gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))


def check_plan(plan: Plan, path: Path) -> None:
    """Write the plan beside the text, or raise ValueError when the text there was made with another."""
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(asdict(plan))):
        raise ValueError(f"{path.parent}: holds text of another plan; delete it, or give the options of plan.json")
    write_json(path, asdict(plan))


def training_prompts(plan: Plan, train_data: Path) -> list[Prompt]:
    """Return the distinct first messages of the training text, those with the smallest hashes first."""
    found = {row.messages[0][1]: row.domain for row in iter_training_rows(train_data)}
    order = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [Prompt(found[text], "train", text) for text in order[: plan.limit]]


def make_messages(
    plan: Plan, sampler: Sampler, tokenizer: ChatTokenizer, out: Path, deadline: Deadline, peers: Peers = ALONE
) -> list[Prompt] | None:
    """Return distinct made-up messages, a third on each subject; None when the deadline comes first."""
    each = -(-plan.new_prompts // len(SUBJECTS))
    batches = [
        (out / f"messages-{domain}-{number:03d}.json", place, domain, number)
        for place, domain in enumerate(SUBJECTS)
        for number in range(-(-each // plan.requests))
    ]
    for path, place, domain, number in batches[peers.rank :: peers.size]:
        if path.is_file():
            continue
        if deadline.is_over:
            break
        seed = plan.seed * 1_000_003 + 1000 * place + number
        count = min(plan.requests, each - number * plan.requests)
        prompts = [tokenizer.message_prompt(SUBJECTS[domain])] * count
        drawn = write(sampler, prompts, cap=96, temperature=plan.message_temperature, seed=seed)
        texts = tokenizer.decode_many([ids for ids in drawn if ids is not None and len(ids) >= 6])
        write_atomic(path, json.dumps([text.strip() for text in texts]).encode())
    peers.wait()
    if not all(path.is_file() for path, *_ in batches):
        return None
    found: dict[str, str] = {}
    for path, _, domain, _ in batches:
        found |= dict.fromkeys(json.loads(path.read_text(encoding="utf-8")), domain)
    return [Prompt(domain, "new", text) for text, domain in found.items() if is_plain(text)]


def answer_parts(prompts: list[Prompt], plan: Plan, tokenizer: ChatTokenizer) -> list[list[Prompt]]:
    """Return batches of prompts of similar length, those over the limit left out, batches in an order by hash."""
    distinct = {prompt.text: prompt for prompt in reversed(prompts)}
    texts = list(distinct)
    sized = [(len(ids), text) for ids, text in zip(tokenizer.answer_prompts(texts), texts, strict=True)]
    fitting = [text for size, text in sorted(sized) if size <= plan.max_prompt_tokens]
    parts = [fitting[at : at + plan.requests] for at in range(0, len(fitting), plan.requests)]
    # a run that is cut short then holds prompts of all lengths
    parts.sort(key=lambda texts: sha256_json(texts[0]))
    return [[distinct[text] for text in texts] for texts in parts]


def messages_of(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def is_plain(text: str) -> bool:
    """Whether a text is whole UTF-8, not empty, and spells none of the model's tags."""
    return bool(text) and "\ufffd" not in text and "<|" not in text


def is_worth_keeping(text: str, ids: list[int]) -> bool:
    """Whether an answer is plain and does not go round in circles: half of its 4-grams are distinct."""
    grams = {tuple(ids[at : at + 4]) for at in range(len(ids) - 3)}
    return is_plain(text) and (len(ids) < 8 or len(grams) >= 0.5 * (len(ids) - 3))


def runs_of(text: str) -> set[int]:
    """Return a hash of every run of 13 words, case and punctuation aside; it holds in this process alone."""
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {hash(tuple(words[at : at + PLAIN_WORDS])) for at in range(len(words) - PLAIN_WORDS + 1)}


@functools.cache
def word_runs(benchmarks: Path | None) -> set[int]:
    """Return the runs of 13 words of every prompt and reference of a folder of benchmarks; empty without one."""
    runs: set[int] = set()
    for path in sorted(benchmarks.glob("*.jsonl")) if benchmarks else ():
        for row in map(json.loads, path.read_bytes().splitlines()):
            for text in [*row["turns"], *_texts(row.get("reference"))]:
                runs |= runs_of(text)
    return runs


def _texts(value: object) -> Iterable[str]:
    return [value] if isinstance(value, str) else [text for text in value or () if isinstance(text, str)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--train-data", type=Path, required=True, help="directory whose prompts are answered")
    parser.add_argument("--benchmarks", type=Path, help="folder of *.jsonl prompt sets that the text must not hold")
    parser.add_argument("--out", type=Path, required=True, help="folder of the text; a second call goes on in it")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, help="stop cleanly after this time; default: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.6, help="of answers")
    parser.add_argument("--message-temperature", type=float, default=0.7, help="of made-up messages")
    parser.add_argument("--requests", type=int, default=2048, help="sampled at once")
    parser.add_argument("--new-prompts", type=int, default=60_000)
    parser.add_argument("--max-prompt-tokens", type=int, default=224)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--limit", type=int, help="training prompts at most; default: all")
    parser.add_argument(
        "--workers", type=int, default=4, help="processes that clean and write; 0: none beside this one"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    peers, deadline = prepare_device(options.device), Deadline(options.minutes)
    plan = Plan(
        gguf=GGUF_SHA256,
        train_data={path.name: sha256_file(path) for path in training_files(options.train_data)},
        **{name: getattr(options, name) for name in Plan.__dataclass_fields__ if name not in ("gguf", "train_data")},
    )
    llama, tokenizer = load_gguf(options.gguf)
    llama = llama.to(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    report = run(plan, llama, tokenizer, options, deadline, peers)
    if peers.is_first:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
