"""Hold each method against the best tree that any lossless one could draft, and take the target's entropy."""

import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import torch
from decode_cell import check_weights
from input_errors import told
from probe_records import run_probe, write_rows

from tfm import checkpoints, device, manifest, oracle
from tfm.cells import load_cells
from tfm.prompts import read_prepared

DESCRIPTION = """
Reads the headline's cells at one setting, their prompts and the target that --settings names. Writes steps.parquet (a
row a sampled step: what the method's tree would accept on average, and what the best tree of that budget would),
answers.parquet (a row an answer of ar: the mean entropy of the target's law at its tokens) and oracle.json to --out.
Last line of stdout: one JSON object. Exit 2 on bad input.
"""
STEPS = pa.schema(
    [
        *((name, pa.string()) for name in ("dataset", "domain", "id", "variant", "method", "setting")),
        *((name, pa.int32()) for name in ("seed", "step", "context")),
        ("budget", pa.float64()),
        ("expected_accepted", pa.float64()),
        ("limit", pa.float64()),
    ]
)
ANSWERS = pa.schema(
    [
        *((name, pa.string()) for name in ("dataset", "domain", "id", "setting")),
        ("seed", pa.int32()),
        ("tokens", pa.int32()),
        ("entropy", pa.float64()),  # nats a token
    ]
)


def run(settings: dict, out: Path) -> dict:
    """Search and write the files; return oracle.json. Raises ValueError for weights that are not the settings'."""
    start = time.time()
    check_weights(settings)
    device.make_deterministic(threads=settings["threads"])
    prompts = {
        name: {row.id: row.tokens for row in read_prepared(Path(path))}
        for name, path in settings["prompts_files"].items()
    }
    records = load_cells([Path(cell) for cell in settings["cells"]])
    with device.claim(device.check_device(settings["device"])) as where:
        target = checkpoints.load_target(settings["weights"]["target"], device=str(where), dtype=torch.float32)
        steps = oracle.sampled_steps(records, lambda _, name: prompts[name], each=settings["steps"])
        sizes = {name: settings[name] for name in ("width", "batch", "chain_budget")}
        steps = oracle.add_limits(steps, target, backend="solve", **sizes)
        answers = records.requests[records.requests["method"] == "ar"]
        answers = answers.assign(entropy=oracle.answer_entropies(answers, target, prompts))
        facts = {"device": device.facts(where)}
    answers = answers.assign(tokens=answers["new_tokens"])
    facts |= {"schema": manifest.SCHEMA_VERSION, "settings": settings, "steps": len(steps), "answers": len(answers)}
    facts |= {"source_digest": manifest.modules_digest(["tfm.oracle"]), "environment": manifest.environment()}
    facts["seconds"] = round(time.time() - start, 3)
    facts["files"] = {
        f"{name}.parquet": write_rows(out / f"{name}.parquet", _rows(frame, schema), schema)
        for name, frame, schema in (("steps", steps, STEPS), ("answers", answers, ANSWERS))
    }
    manifest.write_json(out / "oracle.json", facts)
    return facts


def _rows(frame: pd.DataFrame, schema: pa.Schema) -> list[dict]:
    return frame[schema.names].astype(object).where(frame[schema.names].notna(), None).to_dict("records")


@told
def main() -> int:
    return run_probe("oracle", DESCRIPTION, run, fact="steps")


if __name__ == "__main__":
    sys.exit(main())
