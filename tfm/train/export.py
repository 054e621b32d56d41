"""Check the trained family's size, write its model card, and promote it to the package's weights.

`python -m tfm.train.export --from OUT/weights --to tfm/weights/<family>` copies the checkpoints and the card.
"""

import argparse
import csv
import gzip
import json
import math
import shutil
import sys
from pathlib import Path

import yaml

from tfm.manifest import sha256_file, write_atomic
from tfm.quantise import SCALE
from tfm.train.layout import Layout
from tfm.train.peers import ALONE, Peers
from tfm.train.settings import TrainSettings

PARTS = ("target", "drafter", "weaver")
SHIPPED = ("*.safetensors", "*.json")
SOURCES = Path(__file__).parents[2] / "workflows" / "config" / "datasets.yaml"
STORED = {
    "bfloat16": "bfloat16 checkpoints in the public formats; they are computed in float32.",
    "int8": "Matrices are stored as int8 rows with a float16 scale a row: the dequantised weights are the model, and\n"
    "drafter and weaver were trained against them. `tfm.checkpoints.export` writes the same model in bfloat16, the\n"
    "public format. The tensors ship compressed (`model.safetensors.gz`); size and hashes are of what that holds.",
}
CARD = """\
# {family}: target, drafter and weaver

A family trained from nothing for this project: small enough to decode on a CPU, too small to be of use as a language
model. {storage}

| part | parameters | steps | last validation |
|---|---:|---:|---|
{parts}

All files together: {bytes:,} bytes. Curves: `target_curve.csv`, `drafter_curve.csv`, `weaver_curve.csv`. Validation is
one conversation in {every}, by hash. Alpha is sum min(p, q) over draft rows; the chain is the accepted length of the
argmax chain along answers sampled at temperature 1. The curves hold alpha by position.

## How it was trained
Seed {seed}; recipe and sizes in `workflows/config/train_{family}.yaml`. The target learned next tokens. Its logits
were then multiplied by {sharpen:g} (through the final norm), which makes its law the trained one's at temperature
{temperature:.3g}: a model this small is far less certain of its next token than the large ones that drafting is made
for. On its own answers the entropy is {entropy:.2f} nats a token. Rounded as it ships, it sampled {conversations:,}
answers ({answer_tokens:,} tokens) to its training prompts at temperature 1. Drafter and weaver learned its law along
those answers with the LK loss, w KL + (1 - w)(1 - alpha); the weaver saw the drafter as it ships. Muon on matrices,
AdamW elsewhere; warm-up, constant, linear decay.

## Data
| source | conversations | licence | origin |
|---|---:|---|---|
{data}

Excluded sources: {excluded_sources}. Excluded files: {excluded_files}.

| training file | sha256 |
|---|---|
{files}

## Licence
The weights are released under Apache-2.0, like the code. Attribution for the text is in the table above.

## Hashes
| file | sha256 |
|---|---|
{hashes}
"""


def run(settings: TrainSettings, layout: Layout, *, sources: Path = SOURCES, peers: Peers = ALONE) -> dict:
    """Write README.md, curves and hashes beside the three checkpoints. Raises ValueError when they are too large."""
    if not peers.is_first:
        return {"stage": "export", "done": True}
    files = shipped_files(layout)
    total = sum(path.stat().st_size for path in files)
    if settings.max_bytes is not None and total > settings.max_bytes:
        raise ValueError(f"max_bytes: the exported files hold {total} bytes, allowed are {settings.max_bytes}; shrink")
    for part in PARTS:
        shutil.copyfile(layout.require(layout.stage(part) / "curve.csv", part), layout.exported / f"{part}_curve.csv")
    facts = {
        "family": settings.family,
        "seed": settings.seed,
        "bytes": total,
        "parameters": {part: parameter_count(layout.weights(part)) for part in PARTS},
        "sharpen": settings.sharpen,
        "samples": json.loads((layout.stage("sample") / "facts.json").read_text(encoding="utf-8")),
        "final": {part: last_row(layout.stage(part) / "curve.csv") for part in PARTS},
        "text": json.loads(layout.text_manifest.read_text(encoding="utf-8")),
        "sha256": {path.relative_to(layout.exported).as_posix(): sha256_file(path) for path in files},
    }
    (layout.exported / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (layout.exported / "README.md").write_text(model_card(settings, facts, sources), encoding="utf-8")
    return {"stage": "export", "done": True, "bytes": total, "parameters": facts["parameters"]}


def shipped_files(layout: Layout) -> list[Path]:
    """Return the files that ship, sorted; raises ValueError naming the stage of a part that is not there."""
    files = []
    for part in PARTS:
        layout.require(layout.weights(part) / "model.safetensors", part)
        files += [path for pattern in SHIPPED for path in layout.weights(part).glob(pattern)]
    return sorted(files)


def parameter_count(directory: Path) -> int:
    """Return the number of parameters in a directory's model.safetensors, from its header; scales are none."""
    header = header_of(directory / "model.safetensors")
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__" and not name.endswith(SCALE)]
    return sum(math.prod(shape) for shape in shapes)


def header_of(path: Path) -> dict:
    """Return the header of a safetensors file: tensor name -> dtype, shape and place, and its metadata."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def last_row(curve: Path) -> dict[str, float]:
    """Return the last row of a curve.csv that holds a validation, as numbers."""
    with curve.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {key: float(value) for key, value in rows[-1].items() if value != ""}


def model_card(settings: TrainSettings, facts: dict, sources: Path) -> str:
    """Return the README.md of a family: what it is, its data with licences, its numbers, its hashes."""
    text, final = facts["text"], facts["final"]
    known = yaml.safe_load(sources.read_text(encoding="utf-8")).get("training", {}).get("sources", {})
    missing = {"licence": "not listed", "from": "the file given as train_data"}
    origins = {name: missing | known.get(name, {}) for name in text["rows"]}
    chain = "alpha {val_alpha:.3f}, argmax chain {val_chain:.2f} tokens"
    measures = {"target": "next-token loss {val_loss:.3f} nats, before sharpening", "drafter": chain, "weaver": chain}
    return CARD.format(
        family=settings.family,
        storage=STORED[settings.storage],
        seed=settings.seed,
        every=settings.text.held_out_every,
        sharpen=settings.sharpen,
        temperature=1 / settings.sharpen,
        entropy=facts["samples"]["entropy_nats"],
        conversations=facts["samples"]["conversations"],
        answer_tokens=facts["samples"]["answer_tokens"],
        bytes=facts["bytes"],
        parts="\n".join(
            f"| {part} | {facts['parameters'][part]:,} | {final[part]['step']:.0f} | {measure.format(**final[part])} |"
            for part, measure in measures.items()
        ),
        data="\n".join(
            f"| `{name}` | {text['rows'][name]} | {origin['licence']} | {origin['from']} |"
            for name, origin in origins.items()
        ),
        excluded_sources=", ".join(text["excluded_sources"]),
        excluded_files=", ".join(text["excluded_files"]),
        files="\n".join(f"| `{name}` | `{digest}` |" for name, digest in text["files"].items()),
        hashes="\n".join(f"| `{name}` | `{digest}` |" for name, digest in facts["sha256"].items()),
    )


def promote(source: Path, destination: Path) -> list[str]:
    """Copy an exported family over `destination` and return the relative names of its files.

    Tensors in int8 are compressed on the way, a tenth smaller: `tfm.checkpoints` reads them so, and their digest stays.
    """
    if not (source / "README.md").is_file():
        raise ValueError(f"{source}: no README.md; run the export stage first")
    copied = []
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        name = path.relative_to(source)
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        if is_quantised(path):
            (destination / name).unlink(missing_ok=True)
            name = name.with_name(f"{name.name}.gz")
            write_atomic(destination / name, shipped_bytes(path))
        else:
            shutil.copyfile(path, destination / name)
        copied.append(name.as_posix())
    return copied


def is_quantised(path: Path) -> bool:
    """Whether a file holds tensors in int8 rows with scales."""
    return path.suffix == ".safetensors" and any(key.endswith(SCALE) for key in header_of(path))


def shipped_bytes(path: Path) -> bytes:
    """Return a file as it ships: int8 tensors compressed, the same bytes on every call."""
    return gzip.compress(path.read_bytes(), mtime=0) if is_quantised(path) else path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="OUT/weights of a finished run")
    parser.add_argument("--to", type=Path, required=True, help="tfm/weights/<family>")
    options = parser.parse_args()
    copied = promote(options.source, options.to)
    print(f"copied {len(copied)} files", file=sys.stderr)
    print(json.dumps({"to": str(options.to), "files": copied}))


if __name__ == "__main__":
    main()
