"""From a prompt set to token ids: which rows a run uses, what is sent for each, and what is skipped and why.

Where rows come from is `tfm/prompt_sources.py`. Protocol `paper` follows the paper's benchmark script: first turn
only, no system prompt, chat tags by hand. Protocol `dflash` adds the instructions of the public DFlash scripts.
"""

import hashlib
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tfm.manifest import write_atomic
from tfm.tokenizer import QWEN3, SMOLLM2, TextTokenizer, encode_prompt, prompt_text

SUBSAMPLE_SEED = 20260617
PROTOCOLS = ("paper", "dflash")
MATH_SETS = ("gsm8k", "math500", "aime25")
CODE_STUB_SETS = ("humaneval",)

# {turn} the first user turn, {tests} meta.test_list a line each, {starter} meta.starter_code or a comment
TEMPLATES = {
    "paper": {
        "raw": "{turn}",
        "mbpp": "{turn}\n\nExamples/tests:\n{tests}",
        "starter": "{turn}\n\n{starter}",
    },
    "dflash": {
        "raw": "{turn}",
        "math": "{turn}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n{turn}\n```",
        "livecodebench": "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will return only a correct Python program that matches it and passes all tests.\n\n"
        "### Question:\n{turn}\n\n### Format:\n```python\n{starter}\n```\n\n### Answer:\n",
    },
}


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt set. `turns` may hold None or be empty; preparation skips such a row by name."""

    id: str
    index: int  # position in the set's file: it seeds the noise
    dataset: str
    domain: str
    turns: tuple[str | None, ...]
    category: str = ""
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """How rows become prompts. Token counts; `context` is what the target holds, prompt and answer together."""

    max_new_tokens: int
    context: int
    protocol: str = "paper"
    reasoning: bool = False

    def check(self) -> "Preparation":
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol: {self.protocol!r} is not allowed (allowed: {', '.join(PROTOCOLS)}); choose one of them"
            )
        for key in ("max_new_tokens", "context"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: an integer, at least 1); raise {key}")
        if not isinstance(self.reasoning, bool):
            raise ValueError(f"reasoning: {self.reasoning!r} is not allowed (allowed: true, false)")
        return self


@dataclass(frozen=True)
class PreparedPrompt:
    """One line of a prepared file. `sha256` is of the raw text with its chat tags."""

    id: str
    index: int
    dataset: str
    domain: str
    category: str
    template: str
    sha256: str
    tokens: list[int]


@dataclass(frozen=True)
class SkippedPrompt:
    id: str
    index: int
    reason: str


def select(
    rows: Sequence[PromptRow], *, name: str, count: int | None, stratify: bool = False, seed: int = SUBSAMPLE_SEED
) -> list[PromptRow]:
    """Return `count` rows in index order, those with the smallest keys (all rows when count is None).

    With `stratify` every category keeps its share (largest remainder, ties to the first name).
    Raises ValueError when the set has fewer rows: a prompt is never repeated.
    """
    if count is None:
        return list(rows)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(rows):
        raise ValueError(
            f"limit: {count!r} is not allowed for {name} (allowed: 1 to {len(rows)}, its rows); "
            "lower limit; prompts are never repeated"
        )
    by_key = sorted(rows, key=lambda row: (subsample_key(row, name=name, seed=seed), row.index))
    quotas = category_quotas([row.category for row in rows], count) if stratify else None
    chosen = by_key[:count] if quotas is None else _first_of_each(by_key, quotas)
    return sorted(chosen, key=lambda row: row.index)


def subsample_key(row: PromptRow, *, name: str, seed: int = SUBSAMPLE_SEED) -> bytes:
    """Return the first 8 bytes of sha256("seed|name|id|category"), big-endian: the order of the authors' benchmark."""
    return hashlib.sha256(f"{seed}|{name}|{row.id}|{row.category}".encode()).digest()[:8]


def category_quotas(categories: Sequence[str], count: int) -> dict[str, int]:
    """Return how many of `count` rows each category gets: floors of the exact shares, then largest remainders."""
    sizes = {category: 0 for category in sorted(set(categories))}
    for category in categories:
        sizes[category] += 1
    total = len(categories)
    quotas = {category: count * size // total for category, size in sizes.items()}
    # integers, so that equal remainders tie exactly
    order = sorted(sizes, key=lambda category: (-(count * sizes[category] % total), category))
    for category in order[: count - sum(quotas.values())]:
        quotas[category] += 1
    return quotas


def template_name(row: PromptRow, protocol: str) -> str:
    """Return which entry of TEMPLATES[protocol] a row takes."""
    if protocol == "dflash":
        if row.dataset in MATH_SETS:
            return "math"
        if row.dataset in CODE_STUB_SETS:
            return "humaneval"
        return "livecodebench" if row.dataset.startswith("livecodebench") else "raw"
    if row.dataset == "mbpp":
        return "mbpp"
    return "starter" if row.dataset.startswith("livecodebench") and row.meta.get("starter_code") else "raw"


def render(row: PromptRow, protocol: str) -> str:
    """Return the user turn that is sent for a row: its first turn in the protocol's template.

    Raises ValueError, naming the row, where its template needs a value that the row has not, or text is no UTF-8.
    """
    template = TEMPLATES[protocol][template_name(row, protocol)]
    text = re.sub(r"\{(turn|tests|starter)\}", lambda match: _VALUES[match[1]](row), template)
    try:
        f"{row.id}{row.category}{text}".encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{row.dataset}: row {row.id!r} is not UTF-8 text ({error}); fix the row") from error
    return text


def _tests(row: PromptRow) -> str:
    tests = row.meta.get("test_list")
    if not isinstance(tests, list | tuple) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(
            f"{row.dataset}: row {row.id!r}: meta.test_list {tests!r} is not allowed (allowed: a list of strings, at "
            "least one, which its template shows); fix the row"
        )
    return "\n".join(tests)


def _starter(row: PromptRow) -> str:
    starter = row.meta.get("starter_code")
    if starter is not None and not isinstance(starter, str):
        raise ValueError(
            f"{row.dataset}: row {row.id!r}: meta.starter_code {starter!r} is not allowed (allowed: a string or null); "
            "fix the row"
        )
    return starter or "# YOUR CODE HERE"


# what a template's placeholders stand for
_VALUES = {"turn": lambda row: row.turns[0], "tests": _tests, "starter": _starter}


def template_id(row: PromptRow, preparation: Preparation, style: str = QWEN3) -> str:
    """Return protocol/template/mode, the name of everything put around a row's first turn.

    The mode is think or direct in Qwen3's chat style, else the style's name.
    """
    mode = style if style != QWEN3 else "think" if preparation.reasoning else "direct"
    return f"{preparation.protocol}/{template_name(row, preparation.protocol)}/{mode}"


def template_sha256(template: str) -> str:
    """Return the sha256 of the whole text of a template id, chat tags included."""
    protocol, name, mode = template.split("/")
    style = SMOLLM2 if mode == SMOLLM2 else QWEN3
    return _sha256(prompt_text(TEMPLATES[protocol][name], reasoning=mode == "think", style=style))


def prepare(
    rows: Sequence[PromptRow], tokenizer: TextTokenizer, preparation: Preparation
) -> tuple[list[PreparedPrompt], list[SkippedPrompt]]:
    """Return the prompts of a run in row order and what was skipped: no text, or too long for the context.

    Raises ValueError when nothing is left.
    """
    preparation.check()
    prompts, skipped = [], []
    for row in rows:
        if not row.turns or row.turns[0] is None or not row.turns[0].strip():
            what = "None" if row.turns and row.turns[0] is None else "empty"
            skipped.append(SkippedPrompt(row.id, row.index, f"first turn is {what}"))
            continue
        turn = render(row, preparation.protocol)
        tokens = encode_prompt(tokenizer, turn, reasoning=preparation.reasoning)
        if len(tokens) + preparation.max_new_tokens > preparation.context:
            room = f"{len(tokens)} prompt tokens + {preparation.max_new_tokens} new > context {preparation.context}"
            skipped.append(SkippedPrompt(row.id, row.index, room))
            continue
        text = prompt_text(turn, reasoning=preparation.reasoning, style=tokenizer.style)
        name = template_id(row, preparation, tokenizer.style)
        prompts.append(
            PreparedPrompt(row.id, row.index, row.dataset, row.domain, row.category, name, _sha256(text), tokens)
        )
    if not prompts:
        reasons = "; ".join(f"{s.id}: {s.reason}" for s in skipped[:5]) or "it has no rows"
        raise ValueError(f"dataset: no prompt is left of {len(rows)} rows ({reasons}); choose other rows or limits")
    return prompts, skipped


def repeated(prompts: Sequence[PreparedPrompt]) -> dict[str, str]:
    """Return id -> id of an earlier prompt with the same text: what a set asks twice counts twice in its means."""
    first = {prompt.sha256: prompt.id for prompt in reversed(prompts)}
    return {prompt.id: first[prompt.sha256] for prompt in prompts if first[prompt.sha256] != prompt.id}


def write_prepared(path: Path, manifest_path: Path, prompts: Sequence[PreparedPrompt], manifest: dict) -> dict:
    """Write a prepared file and its side manifest, each in one move; return the manifest as written.

    Added to the manifest: n, sha256 of the file, sha256 of the (index, id, tokens) list, and the templates used.
    """
    text = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    identity = json.dumps([[prompt.index, prompt.id, prompt.tokens] for prompt in prompts])
    manifest = {
        "schema": 1,
        **manifest,
        "n": len(prompts),
        "prompts_sha256": _sha256(text),
        "subset_sha256": _sha256(identity),
        "templates": {name: template_sha256(name) for name in sorted({prompt.template for prompt in prompts})},
    }
    _write(path, text)
    _write(manifest_path, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return manifest


def read_prepared(path: Path | str) -> list[PreparedPrompt]:
    """Return the prompts of a prepared file.

    Raises ValueError naming the file, and the line where there is one, when it is cut, not ours, holds an id twice, or
    differs from the `prompts_sha256` of the `.manifest.json` beside it.
    """
    path = Path(path)
    prompts = []
    remedy = f"remove it and run Snakemake again, which rebuilds it, or `--force {path}`"
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); {remedy}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    if not text.endswith("\n"):
        raise ValueError(f"{path}: {'cut off in its last line' if text else 'is empty'}; {remedy}")
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        try:
            prompts.append(PreparedPrompt(**json.loads(line)))
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: not a prepared prompt ({error}); {remedy}") from error
        if problem := _problem_of(prompts[-1]):
            raise ValueError(f"{path} line {number}: {problem}; {remedy}")
    for key in ("id", "index"):
        seen = set()
        for number, prompt in enumerate(prompts, start=1):
            if (value := getattr(prompt, key)) in seen:
                raise ValueError(f"{path} line {number}: {key} {value!r} is there twice; {remedy}")
            seen.add(value)
    manifest_path = path.with_suffix(".manifest.json")
    if manifest_path.exists():
        _check_sha256(path, text, manifest_path, remedy)
    return prompts


def _check_sha256(path: Path, text: str, manifest_path: Path, remedy: str) -> None:
    """Raise ValueError unless the file holds the text that its manifest names."""
    try:
        expected = json.loads(manifest_path.read_text(encoding="utf-8"))["prompts_sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{manifest_path}: no manifest of prepared prompts ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if _sha256(text) != expected:
        raise ValueError(
            f"{path} was cut or altered: its sha256 is {_sha256(text)[:12]}, {manifest_path.name} says "
            f"{str(expected)[:12]}; {remedy}"
        )


def _problem_of(prompt: PreparedPrompt) -> str:
    """Return which field of a prepared prompt is of another type than its own; empty for none."""
    for key, value in vars(prompt).items():
        if key == "tokens":
            is_good = isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)
            allowed = "a list of ids >= 0, at least one"
        elif key == "index":
            is_good, allowed = type(value) is int and 0 <= value < 2**31, "an integer from 0 to 2**31 - 1"
        else:
            is_good, allowed = isinstance(value, str), "a string"
        if not is_good:
            return f"{key}: {reprlib.repr(value)} is not allowed (allowed: {allowed})"
    return ""


def _first_of_each(by_key: Sequence[PromptRow], quotas: dict[str, int]) -> list[PromptRow]:
    left = dict(quotas)
    chosen = []
    for row in by_key:
        if left[row.category] > 0:
            left[row.category] -= 1
            chosen.append(row)
    return chosen


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
