"""Engines side by side: steps inside SGLang, steps of this project's engine, and what real cells accepted."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tfm import metrics
from tfm.cells import load_cells
from tfm.manifest import write_atomic, write_json

DESCRIPTION = """
Reads files of bench_serving.py, files of bench_engine.py and folders of served suites. Writes summary.json (flat: name
-> {value, low, high, n, unit}) and engines.csv (one row an arm, engine, attention backend and context) to --out.
Medians over requests or steps with a bootstrap 95 % interval; ratios are an arm's step over ar's under the same flags.
Last line of stdout: one JSON object.
"""
SEED, RESAMPLES = 20260617, 2000
COLUMNS = ["engine", "arm", "attention", "context", "step_ms", "low", "high", "n", "ratio_to_ar", "state_gib"]


def estimate(values: list[float]) -> dict:
    """Return the median of measured values with its interval."""
    rows = np.asarray(values, dtype=float)
    draws = np.random.default_rng(SEED).integers(0, len(rows), (RESAMPLES, len(rows)))
    low, high = np.percentile(np.median(rows[draws], axis=1), [2.5, 97.5])
    return {"value": float(np.median(rows)), "low": float(low), "high": float(high), "n": len(rows)}


def served_rows(record: dict) -> list[dict]:
    """Return a row for each arm and context of a bench_serving.py file."""
    table = []
    for arm, found in record["arms"].items():
        frame = pd.DataFrame(found["rows"])
        states = found.get("state_gib") or {}
        for context, part in frame.groupby("prompt_tokens"):
            row = {"engine": "sglang", "arm": arm, "attention": record["options"]["attention"], "context": int(context)}
            table.append({**row, "step": estimate(part["step_ms"].tolist()), "state_gib": state_of(states)})
    return with_ratios(table)


def state_of(states: dict[str, float]) -> float | None:
    """Return GiB of recurrent state beside one committed state a slot: of every node, or the plugin's own."""
    kinds = [size for name, size in states.items() if name.startswith("intermediate_ssm") or name == "plugin"]
    return sum(kinds) if kinds else None


def own_rows(record: dict) -> list[dict]:
    """Return a row for each arm, variant and context of a bench_engine.py file; whole steps only."""
    frame = pd.DataFrame([row for row in record["records"] if row.get("ms")])
    table = []
    for (arm, variant, context), part in frame.groupby(["arm", "variant", "context"]):
        values = [value for row in part["ms"] for value in row]
        row = {"engine": f"ours {variant}", "arm": arm, "attention": "ours", "context": int(context)}
        table.append({**row, "step": estimate(values), "state_gib": None})
    return with_ratios(table)


def with_ratios(table: list[dict]) -> list[dict]:
    """Add each row's step over ar's of the same engine, attention backend and context; None where ar did not run."""
    place = ("engine", "attention", "context")
    base = {tuple(row[key] for key in place): row["step"]["value"] for row in table if row["arm"] == "ar"}
    for row in table:
        ar = base.get(tuple(row[key] for key in place))
        row["ratio_to_ar"] = row["step"]["value"] / ar if ar else None
    return table


def accepted(folder: Path) -> dict[str, dict]:
    """Return tau of every method and setting of a served suite's cells, macro over sets."""
    cells = sorted(path.parent for path in folder.glob("cells/*/*/*/*/*/*/cell.json"))
    records = load_cells(cells)
    table, found = metrics.per_request(records.requests, records.steps), {}
    for (engine, method, setting), part in table.groupby(["engine", "method", "setting"]):
        tau = metrics.mean(part, "tau")
        entry = {"value": tau.value, "low": tau.low, "high": tau.high, "n": tau.n, "unit": "tokens a step"}
        name = "sglang" if engine.startswith("sglang") else "vllm" if engine == "vllm" else "ours"
        found[f"tau_{name}_{method}_{setting}"] = entry
    return found


def summary_of(table: list[dict], taus: dict[str, dict], *, context: int, attention: str, variant: str) -> dict:
    """Return the flat summary: steps at one context, attention backend and variant of ours, ratios, states, tau."""
    flat = {}
    for row in table:
        is_served = row["engine"] == "sglang" and row["attention"] == attention
        if row["context"] != context or not (is_served or row["engine"] == f"ours {variant}"):
            continue
        name = f"{'sglang' if is_served else 'ours'}_{row['arm'].replace('-', '_')}"
        flat[f"step_ms_{name}"] = {**row["step"], "unit": "ms"}
        if row["ratio_to_ar"] is not None:
            ratio = {"value": row["ratio_to_ar"], "low": None, "high": None, "n": row["step"]["n"]}
            flat[f"step_over_ar_{name}"] = {**ratio, "unit": "ratio of medians"}
        if row["state_gib"] is not None:
            kind = "recurrent" if row["arm"].endswith("recurrent") else "fused"
            state = {"value": row["state_gib"], "low": None, "high": None, "n": 1}
            flat.setdefault(f"state_gib_{kind}", {**state, "unit": "GiB, as the server logs it"})
    return flat | taus


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sglang", type=Path, nargs="*", default=[], help="files of bench_serving.py")
    add("--ours", type=Path, nargs="*", default=[], help="files of bench_engine.py")
    add("--cells", type=Path, nargs="*", default=[], help="folders results/<suite> of served cells, and of ours beside")
    add("--context", type=int, default=512, help="prompt length of the summary (default 512)")
    add("--attention", default="triton", help="SGLang's attention backend of the summary (default triton)")
    add("--variant", default="all:fused_cuda", help="variant of ours of the summary (default all:fused_cuda)")
    add("--out", type=Path, required=True, help="folder to write to")
    options = parser.parse_args(arguments)
    table = [row for path in options.sglang for row in served_rows(json.loads(path.read_text(encoding="utf-8")))]
    table += [row for path in options.ours for row in own_rows(json.loads(path.read_text(encoding="utf-8")))]
    taus = {name: entry for folder in options.cells for name, entry in accepted(folder).items()}
    if not table and not taus:
        print("summarise_engines: nothing was given; pass --sglang, --ours or --cells", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {"context": options.context, "attention": options.attention, "variant": options.variant}
    flat = summary_of(table, taus, **chosen)
    rows = [{**row, **{"step_ms": row["step"]["value"], **row["step"]}} for row in table]
    frame = pd.DataFrame(rows).reindex(columns=COLUMNS)
    write_atomic(options.out / "engines.csv", frame.to_csv(index=False, lineterminator="\n").encode())
    write_json(options.out / "summary.json", flat)
    print(json.dumps({"rows": len(frame), "names": len(flat)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
