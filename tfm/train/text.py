"""Training text: rows `{domain, source, messages}` on disk -> flat token arrays with a mask of assistant tokens.

`python -m tfm.train.text --train-data DIR --out OUT_DIR` trains the tokenizer on a balanced sample, writes it
to OUT_DIR and prints bytes per token of each domain.
"""

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from tfm.tokenizer import THINK_END, THINK_START, TURN_END, TURN_START, TextTokenizer, answer_opening
from tfm.train.tokenizer import VOCAB_SIZE, train_tokenizer

DOMAINS = ("chat", "math", "code")
# not used for shipped weights: text whose licence or origin limits what may be trained on it
EXCLUDED_SOURCES = ("alpaca_eval:*", "gpteacher_*")
EXCLUDED_FILES = ("chat_sharealike",)
SUFFIXES = (".jsonl.gz", ".jsonl")
ROWS_AT_ONCE = 2000


@dataclass(frozen=True)
class TrainingRow:
    """One conversation: roles alternate, first `user`, last `assistant`."""

    domain: str
    source: str
    messages: tuple[tuple[str, str], ...]  # (role, content)


@dataclass(frozen=True)
class TokenisedText:
    """Conversations as flat arrays; row i is tokens[offsets[i]:offsets[i + 1]]."""

    tokens: np.ndarray  # [total] uint16
    mask: np.ndarray  # [total] bool, True on assistant tokens, the <|im_end|> of their turn included
    offsets: np.ndarray  # [rows + 1] int64
    domains: np.ndarray  # [rows] uint8, index into DOMAINS

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, mask) of one conversation, views."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[span], self.mask[span]

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, mask=self.mask, offsets=self.offsets, domains=self.domains)

    @classmethod
    def load(cls, path: Path) -> "TokenisedText":
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in ("tokens", "mask", "offsets", "domains")})


def training_files(train_data: Path | str | None) -> list[Path]:
    """Return the training files of a directory (or the one file given), excluded ones left out, sorted by name.

    Raises ValueError when there are none, with the remedy.
    """
    if train_data is None:
        raise ValueError(
            "train_data: None is not allowed (allowed: a directory of training text); pass "
            "--config train_data=DIR. The sources of the shipped weights' text, with commits and licences, "
            "are listed under `training` in workflows/config/datasets.yaml"
        )
    path = Path(train_data)
    if path.is_file():
        return [path]
    files = sorted(f for f in path.glob("*") if f.name.endswith(SUFFIXES) and _stem(f) not in EXCLUDED_FILES)
    if not files:
        raise ValueError(
            f"train_data: {str(path)!r} holds no training file (allowed: *.jsonl or *.jsonl.gz with rows "
            "{domain, source, messages}); give the directory that holds math, code and chat"
        )
    return files


def iter_training_rows(
    train_data: Path | str | None, *, exclude: tuple[str, ...] = EXCLUDED_SOURCES
) -> Iterator[TrainingRow]:
    """Yield the rows of every training file in order, without sources that match a pattern of `exclude`.

    Raises ValueError with file, line and field on a malformed row.
    """
    for path in training_files(train_data):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = _checked_row(line, f"{path.name} line {number}")
                if not any(fnmatch(row.source, pattern) for pattern in exclude):
                    yield row


def training_manifest(train_data: Path | str | None) -> dict:
    """Return what the text is made of: sha256 of each file, the exclusions, and rows per source."""
    files = training_files(train_data)
    sources: dict[str, int] = {}
    for row in iter_training_rows(train_data):
        name = row.source.split(":")[0]
        sources[name] = sources.get(name, 0) + 1
    return {
        "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
        "excluded_sources": list(EXCLUDED_SOURCES),
        "excluded_files": list(EXCLUDED_FILES),
        "rows": dict(sorted(sources.items())),
    }


def conversation_parts(messages: Iterable[tuple[str, str]]) -> list[tuple[str, bool, bool]]:
    """Return (text, is_tag, is_assistant) pieces of a conversation.

    The last assistant turn opens with the empty think block, as a prompt without reasoning does; history turns
    carry none. is_assistant marks the answers and the tag that ends each.
    """
    messages = list(messages)
    parts: list[tuple[str, bool, bool]] = []
    for index, (role, content) in enumerate(messages):
        parts.append((TURN_START, True, False))
        if role == "user":
            parts += [("user\n" + content, False, False), (TURN_END, True, False)]
        else:
            parts.append(("assistant\n", False, False))
            if index == len(messages) - 1:
                parts += [(text, text in (THINK_START, THINK_END), False) for text in answer_opening(reasoning=False)]
            parts += [(content, False, True), (TURN_END, True, True)]
        if index < len(messages) - 1:
            parts.append(("\n", False, False))
    return parts


def encode_conversation(tokenizer: TextTokenizer, messages: Iterable[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation and its loss mask (True on assistant tokens)."""
    rows = tokenise_rows([TrainingRow("chat", "", tuple(messages))], tokenizer)
    return rows.tokens.tolist(), rows.mask.tolist()


def tokenise_rows(rows: Iterable[TrainingRow], tokenizer: TextTokenizer) -> TokenisedText:
    """Tokenise conversations into flat arrays on all cores (the tokenizers library's own threads)."""
    if tokenizer.vocab_size > 2**16:
        raise ValueError(f"vocab_size: {tokenizer.vocab_size} is over 65536, what the uint16 arrays hold")
    tokens, masks, lengths, domains = [], [], [], []
    fixed = {text: tokenizer.encode(text) for text in ("assistant\n", "\n", "\n\n")}
    for chunk in _chunks(rows, ROWS_AT_ONCE):
        conversations = [conversation_parts(row.messages) for row in chunk]
        texts = [t for parts in conversations for t, is_tag, _ in parts if not is_tag and t not in fixed]
        encoded = iter(tokenizer.encode_many(texts))
        for row, parts in zip(chunk, conversations, strict=True):
            row_tokens, row_mask = [], []
            for text, is_tag, is_assistant in parts:
                ids = [tokenizer.tag(text)] if is_tag else fixed[text] if text in fixed else next(encoded)
                row_tokens += ids
                row_mask += [is_assistant] * len(ids)
            tokens.append(np.array(row_tokens, dtype=np.uint16))
            masks.append(np.array(row_mask, dtype=bool))
            lengths.append(len(row_tokens))
            domains.append(DOMAINS.index(row.domain))
    if not lengths:
        raise ValueError("train_data: no row is left after the exclusions; give training text with other sources")
    return TokenisedText(
        tokens=np.concatenate(tokens),
        mask=np.concatenate(masks),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        domains=np.array(domains, dtype=np.uint8),
    )


def tokenise_directory(train_data: Path | str | None, tokenizer: TextTokenizer) -> TokenisedText:
    """Tokenise all kept rows of a training directory (43 MB of text in ten seconds on two cores)."""
    return tokenise_rows(iter_training_rows(train_data), tokenizer)


def balanced_sample(rows: Iterable[TrainingRow], bytes_per_domain: int) -> list[str]:
    """Return message texts, about `bytes_per_domain` of each domain, chosen by the hash of their content."""
    keyed: dict[str, list[tuple[bytes, str]]] = {domain: [] for domain in DOMAINS}
    for row in rows:
        text = "\n".join(content for _, content in row.messages)
        keyed[row.domain].append((hashlib.sha256(text.encode()).digest(), text))
    sample: list[str] = []
    for texts in keyed.values():
        size = 0
        for _, text in sorted(texts):
            if size >= bytes_per_domain:
                break
            sample.append(text)
            size += len(text.encode())
    return sample


def bytes_per_token(rows: Iterable[TrainingRow], tokenizer: TextTokenizer) -> dict[str, float]:
    """Return UTF-8 bytes per token of the message texts of each domain, tags left out."""
    rows = list(rows)
    result = {}
    for domain in DOMAINS:
        texts = [content for row in rows if row.domain == domain for _, content in row.messages]
        tokens = sum(len(ids) for chunk in _chunks(texts, ROWS_AT_ONCE) for ids in tokenizer.encode_many(chunk))
        if tokens:
            result[domain] = round(sum(len(text.encode()) for text in texts) / tokens, 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the tokenizer. Reads --train-data (*.jsonl[.gz] rows {domain, source, messages}); "
        "writes tokenizer.json, tokenizer_config.json and special_tokens_map.json to --out. "
        "Prints bytes per token of each domain as one JSON object."
    )
    parser.add_argument("--train-data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--bytes-per-domain", type=int, default=4_000_000)
    options = parser.parse_args()
    rows = list(iter_training_rows(options.train_data))
    print(f"{len(rows)} rows kept", file=sys.stderr)
    tokenizer = train_tokenizer(balanced_sample(rows, options.bytes_per_domain), options.vocab_size)
    tokenizer.save(options.out)
    print(json.dumps({"rows": len(rows), "bytes_per_token": bytes_per_token(rows, tokenizer)}))


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _chunks(items: Iterable, size: int) -> Iterator[list]:
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _checked_row(line: str, where: str) -> TrainingRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); restore the file") from error
    if not isinstance(row, dict) or row.get("domain") not in DOMAINS:
        domain = row.get("domain") if isinstance(row, dict) else row
        raise ValueError(f"{where}: domain {domain!r} is not allowed (allowed: {', '.join(DOMAINS)}); fix the row")
    messages = row.get("messages")
    roles = [m.get("role") for m in messages] if isinstance(messages, list) else None
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(f"{where}: messages must alternate user, assistant and end with assistant, got {roles}")
    contents = tuple((m["role"], m.get("content")) for m in messages)
    if not all(isinstance(content, str) for _, content in contents):
        raise ValueError(f"{where}: every message needs a string `content`; fix the row")
    return TrainingRow(row["domain"], str(row.get("source", "")), contents)


if __name__ == "__main__":
    main()
