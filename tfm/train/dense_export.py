"""Check the size of drafter and heads, and write their card, curves and hashes beside them."""

import json
import shutil
from pathlib import Path

import yaml

from tfm.llama_gguf import GGUF_SHA256, ORIGIN, REMEDY
from tfm.manifest import sha256_file, sha256_weights
from tfm.train.dense_settings import DenseSettings
from tfm.train.export import SHIPPED, SOURCES, last_row, parameter_count, shipped_bytes
from tfm.train.layout import Layout
from tfm.train.text import EXCLUDED_FILES, EXCLUDED_SOURCES

CARD = """\
# {family}: drafter and correction heads for SmolLM2-135M-Instruct

The target is not trained here and not in this folder: {origin}, Apache-2.0, sha256
`{gguf}`. Its matrices are quantised (Q4_1, the embedding Q8_0) and computed in float32. To write
`target/`: `{remedy}`, then `python -m tfm.llama_gguf --out {folder}/target`.

| part | parameters | steps | last validation |
|---|---:|---:|---|
{parts}

All files together, as they ship: {bytes:,} bytes. Matrices are stored as int8 rows with a float16 scale a row: the
dequantised weights are the model, and the heads were trained on the drafter as it ships. Embedding and head are the
target's. The tensors ship compressed (`model.safetensors.gz`); hashes are of what that holds.
Curves: `<part>_curve.csv`. Validation is one conversation in {every}, by hash. Alpha is sum min(p, q) over draft rows
(for a head over its candidates); the chain is the accepted length of the argmax chain along the sampled answers.

## How they were trained
Seed {seed}; recipe and sizes in `workflows/config/train_dense.yaml`. The target answered {conversations:,} prompts of
the training text ({answer_tokens:,} tokens), {greedy:,} of them greedily and the others at temperature 1. Drafter and
heads learned its law along those answers with the LK loss, w KL + (1 - w)(1 - alpha).

## Data
Prompts are the first user messages of the files below; answers are the target's own. Excluded sources:
{excluded_sources}. Excluded files: {excluded_files}. Origins and licences stand under `training` in
`workflows/config/datasets.yaml`.

| training file | sha256 |
|---|---|
{files}

## Licence
The weights are released under Apache-2.0, like the code and the target.

## Hashes
| file | sha256 |
|---|---|
{hashes}
"""


def run(settings: DenseSettings, layout: Layout, *, target: Path, sources: Path = SOURCES) -> dict:
    """Write README.md, facts.json and curves beside the parts. Raises ValueError when they are too large."""
    files = shipped_files(settings, layout)
    total = sum(len(shipped_bytes(path)) for path in files)
    if settings.max_bytes is not None and total > settings.max_bytes:
        raise ValueError(f"max_bytes: the parts hold {total} bytes, allowed are {settings.max_bytes}; shrink them")
    if not yaml.safe_load(sources.read_text(encoding="utf-8")).get("training"):
        raise ValueError(f"{sources}: holds no section training, which the card refers to; restore it")
    for part in settings.parts:
        shutil.copyfile(layout.require(layout.stage(part) / "curve.csv", part), layout.exported / f"{part}_curve.csv")
    facts = {
        "family": settings.family,
        "seed": settings.seed,
        "bytes": total,
        "target": {"origin": ORIGIN, "gguf_sha256": GGUF_SHA256, "folder_sha256": sha256_weights(target)},
        "parameters": {part: parameter_count(layout.weights(part)) for part in settings.parts},
        "samples": json.loads((layout.stage("sample") / "facts.json").read_text(encoding="utf-8")),
        "final": {part: last_row(layout.stage(part) / "curve.csv") for part in settings.parts},
        "sha256": {path.relative_to(layout.exported).as_posix(): sha256_file(path) for path in files},
    }
    (layout.exported / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (layout.exported / "README.md").write_text(model_card(settings, facts), encoding="utf-8")
    return {"stage": "export", "done": True, "bytes": total, "parameters": facts["parameters"]}


def shipped_files(settings: DenseSettings, layout: Layout) -> list[Path]:
    """Return the files that ship, sorted; raises ValueError naming the stage of a part that is not there."""
    files = []
    for part in settings.parts:
        layout.require(layout.weights(part) / "model.safetensors", part)
        files += [path for pattern in SHIPPED for path in layout.weights(part).glob(pattern)]
    return sorted(files)


def model_card(settings: DenseSettings, facts: dict) -> str:
    """Return the README.md of the parts: what they are, how they were trained, their numbers and hashes."""
    measure = "alpha {val_alpha:.3f}, argmax chain {val_chain:.2f} tokens"
    rows = [
        f"| {part} | {facts['parameters'][part]:,} | {final['step']:.0f} | {measure.format(**final)} |"
        for part, final in facts["final"].items()
    ]
    samples = facts["samples"]
    return CARD.format(
        family=settings.family,
        origin=ORIGIN,
        gguf=GGUF_SHA256,
        remedy=REMEDY,
        folder=f"tfm/weights/{settings.family}",
        parts="\n".join(rows),
        bytes=facts["bytes"],
        every=settings.sample.held_out_every,
        seed=settings.seed,
        conversations=samples["conversations"],
        answer_tokens=samples["answer_tokens"],
        greedy=samples["greedy_conversations"],
        excluded_sources=", ".join((*EXCLUDED_SOURCES, *settings.excluded)),
        excluded_files=", ".join(EXCLUDED_FILES),
        files="\n".join(f"| `{name}` | `{digest}` |" for name, digest in samples["text"].items()),
        hashes="\n".join(f"| `{name}` | `{digest}` |" for name, digest in facts["sha256"].items()),
    )
