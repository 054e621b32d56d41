"""Turn the timed steps of bench_engine.py, and a suite's cells where given, into tables and engine_summary.json."""

import argparse
import gzip
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from input_errors import told

from baselines import cost_model
from baselines.cost_model import Sample
from tfm import metrics
from tfm.cells import Records, load_cells
from tfm.manifest import write_json
from tfm.trace import STAGES

DESCRIPTION = """
Reads one JSON file of bench_engine.py --stage steps (--steps, .json or .json.gz; with --key, one entry of a file that
holds several). Writes to --out: headline.csv (paper, measured and modelled side by side), step_costs.csv (measured ms a
step, over the floor and over ar), latency.csv (stages inside the step), energy.csv, memory.csv, cost_model.csv
(coefficients and errors), cost_fit.csv (measured against modelled steps), modelled.csv (speed over ar at a given tau,
here and at another card's bandwidth: modelled, never measured) and engine_summary.json (name -> {value, low, high, n,
unit}). --tau takes tokens a step as method=number; --cells adds what a suite's cells say of tau, speed and energy. Last
line of stdout: one JSON object.
"""
RESAMPLES, SEED = 1000, 20261130
# bytes a second of the data sheets: NVIDIA H200 141 GB HBM3e, B200 HBM3e
DATA_SHEET = {"H200": 4.8e12, "B200": 8.0e12}
HEADLINE = {"dflash": "dflash_step_over_ar", "ddtree": "ddtree_step_over_ar_B64", "tfm": "tfm_step_over_ar_B64"}
EXPECTED = Path("workflows/config/expected.yaml")


def read(path: Path) -> dict:
    """Return the JSON of a file, which may be packed (.gz)."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(data)


def samples_of(report: dict, variant: str) -> dict[tuple[str, int], list[np.ndarray]]:
    """Return the ms of a variant's steps by (arm, context), an array a round."""
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    for record in report["records"]:
        if record["variant"] == variant and "ms" in record:
            found.setdefault((record["arm"], record["context"]), []).append(np.array(record["ms"]))
    return found


def interval(rounds: list[np.ndarray], base: list[np.ndarray] | None = None) -> tuple[float, float, float]:
    """Return the median of all steps, or its ratio to that of `base`, with a bootstrap 95 % interval.

    Rounds are drawn, then the steps in them: what drifts between rounds is in the interval. Rounds of two arms that
    stood beside each other are drawn together.
    """
    generator, count = np.random.default_rng(SEED), len(rounds)

    def once(picks) -> float:
        value, below = (
            np.median(np.concatenate([generator.choice(arm[i], len(arm[i])) for i in picks])) if arm else 1.0
            for arm in (rounds, base)
        )
        return value / below

    drawn = [once(generator.integers(count, size=count)) for _ in range(RESAMPLES)]
    value = np.median(np.concatenate(rounds)) / (np.median(np.concatenate(base)) if base else 1.0)
    return float(value), *map(float, np.percentile(drawn, [2.5, 97.5]))


def step_costs(report: dict) -> pd.DataFrame:
    """Return one row an arm, variant and context."""
    rows, apart = [], {}
    for record in report["records"]:
        if "device_ms" in record:
            apart[record["arm"], record["variant"], record["context"]] = record["device_ms"]
    for variant in dict.fromkeys(record["variant"] for record in report["records"]):
        found = samples_of(report, variant)
        for (arm, context), rounds in found.items():
            facts = report["arms"][f"{arm} {variant}"]
            value, low, high = interval(rounds)
            row = {"arm": arm, "method": facts["method"], "variant": variant, "rows": facts["rows"]}
            row |= {"expansions": facts["expansions"], "width": facts["width"], "context": context}
            row |= {"step_ms": value, "step_ms_low": low, "step_ms_high": high, "n": sum(map(len, rounds))}
            row |= {f"device_{name}_ms": ms for name, ms in apart.get((arm, variant, context), {}).items()}
            row |= {"floor_ms": facts["floor_ms"], "over_floor": value / facts["floor_ms"]}
            base = found.get(("ar", context))
            if base is not None and len(base) == len(rounds):
                row |= dict(zip(("over_ar", "over_ar_low", "over_ar_high"), interval(rounds, base), strict=True))
            rows.append(row)
    return pd.DataFrame(rows)


def latency(report: dict, costs: pd.DataFrame) -> pd.DataFrame:
    """Return one row a stage of each arm whose clock stood inside the graphs, with its share of the step's wall."""
    rows = []
    for record in report["records"]:
        if "stages_us" not in record:
            continue
        wall = sum(record["stages_us"][name] for name in STAGES)
        plain = costs[(costs["arm"] == record["arm"]) & (costs["context"] == record["context"])]
        plain = plain[plain["variant"] == record["variant"].removesuffix(":stages")]["step_ms"]
        for name, us in record["stages_us"].items():
            row = {"arm": record["arm"], "variant": record["variant"], "context": record["context"]}
            row |= {"round": record["round"], "stage": name, "level": "stage" if name in STAGES else "inside"}
            row |= {"ms": us / 1e3, "share": us / wall, "staged_wall_ms": wall / 1e3}
            rows.append(row | {"wall_ms": plain.iloc[0] if len(plain) else None})
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    keys = ["arm", "variant", "context", "stage", "level"]
    return frame.groupby(keys, sort=False)[["ms", "share", "staged_wall_ms", "wall_ms"]].median().reset_index()


def energy(report: dict) -> pd.DataFrame:
    """Return joule a step, watts, clocks and throttle reasons of each arm, variant and context, over all its rounds."""
    rows = []
    frame = pd.DataFrame([record for record in report["records"] if "power" in record])
    for (arm, variant, context), group in frame.groupby(["arm", "variant", "context"]) if len(frame) else ():
        power, steps = list(group["power"]), sum(map(len, group["ms"]))
        joule, seconds = sum(one["joule"] for one in power), sum(group["wall_ms"]) / 1e3
        ends = [one[end] for one in power for end in ("before", "after")]
        row = {"arm": arm, "variant": variant, "context": context, "joule_per_step": joule / steps}
        row |= {"watt": joule / seconds, "sm_mhz_min": min(end["sm_mhz"] for end in ends)}
        row |= {"sm_mhz_max": max(end["sm_mhz"] for end in ends), "n": steps}
        row |= {"temperature_c_max": max(end["temperature_c"] for end in ends)}
        rows.append(row | {"throttle": " ".join(sorted({name for end in ends for name in end["throttle"]}))})
    return pd.DataFrame(rows)


def memory(report: dict) -> pd.DataFrame:
    """Return GiB that each arm needs beside the weights, which all share."""
    weights = {key: facts["bytes"] for key, facts in report["arms"].items()}
    rows = []
    for key, facts in report["arms"].items():
        arm, variant = key.split(" ")
        row = {"arm": arm, "variant": variant, "bytes_read_gib": sum(weights[key].values()) / 2**30}
        rows.append(row | {name: facts[name] for name in ("built_peak_gib", "kept_gib", "reserved_gib")})
    return pd.DataFrame(rows)


def fit_samples(costs: pd.DataFrame, variant: str) -> list[Sample]:
    """Return the measured medians of a variant as the cost model reads them."""
    known = costs[costs["variant"] == variant].fillna({"expansions": 0, "width": 0})
    return [
        Sample(row.method, row.rows, row.context, int(row.expansions), int(row.width), row.step_ms)
        for row in known.itertuples()
    ]


def cost_tables(costs: pd.DataFrame, variant: str, taus: dict[str, float], card: str) -> dict[str, pd.DataFrame]:
    """Return cost_model, cost_fit and modelled; empty where too few steps were measured for a fit."""
    samples = fit_samples(costs, variant)
    try:
        model = cost_model.fit(samples)
    except ValueError as error:
        print(f"no cost model: {error}", file=sys.stderr)
        return {name: pd.DataFrame() for name in ("cost_model", "cost_fit", "modelled")}
    errors = np.abs(model.left_out_errors)
    found = pd.DataFrame([{"coefficient": name, "ms": ms} for name, ms in model.coefficients.items()])
    found["steps_fitted"] = len(samples)
    found["left_out_error_median"] = np.median(errors) if len(errors) else None
    found["left_out_error_max"] = errors.max() if len(errors) else None
    fitted = [
        {**vars(sample), "modelled_ms": model.ms(sample), "error": model.ms(sample) / sample.ms - 1}
        for sample in samples
    ]
    fitted = pd.DataFrame(fitted).rename(columns={"ms": "measured_ms"})
    return {"cost_model": found, "cost_fit": fitted, "modelled": modelled(costs, model, variant, taus, card)}


def modelled(costs: pd.DataFrame, model, variant: str, taus: dict[str, float], card: str) -> pd.DataFrame:
    """Return modelled speeds over ar at given tokens a step, here and where the bandwidth is another card's."""
    here = next((bandwidth for name, bandwidth in DATA_SHEET.items() if name in card), None)
    rows, known = [], costs[costs["variant"] == variant]
    for row in known[known["arm"].isin(taus)].itertuples():
        ar = known[(known["arm"] == "ar") & (known["context"] == row.context)]
        if ar.empty:
            continue
        steps = int(row.expansions) if row.expansions == row.expansions else 0
        sample = Sample(row.method, row.rows, row.context, steps, int(row.width) if row.width == row.width else 0)
        tau, out = taus[row.arm], {"arm": row.arm, "context": row.context, "tau_given": taus[row.arm]}
        out |= {"modelled_step_ms": model.ms(sample), "modelled_speedup": model.speedup(sample, tau)}
        for name, bandwidth in DATA_SHEET.items() if here else ():
            ratio = bandwidth / here
            if ratio == 1:
                continue
            base = cost_model.other_card(model.ms(Sample("ar", 1, row.context)), ar["floor_ms"].iloc[0], ratio)
            mine = cost_model.other_card(model.ms(sample), row.floor_ms, ratio)
            for end, one, other in zip(("all_scales", "floor_scales"), mine, base, strict=True):
                out |= {f"modelled_{name}_step_ms_{end}": one, f"modelled_{name}_speedup_{end}": tau * other / one}
        rows.append(out)
    return pd.DataFrame(rows)


def summary(costs: pd.DataFrame, stages: pd.DataFrame, frames: dict, variant: str, context: int) -> dict:
    """Return the flat numbers of the engine at one context; what was not measured is left out."""
    known = costs[(costs["variant"] == variant) & (costs["context"] == context)].set_index("arm")
    entries = {}

    def enter(name, row, columns, unit):
        if columns[0] in row and not pd.isna(row[columns[0]]):
            value, low, high = (float(row[column]) if column else None for column in columns)
            entries[name] = {"value": value, "low": low, "high": high, "n": int(row["n"]), "unit": unit}

    if "ar" in known.index:
        enter("ar_step_ms", known.loc["ar"], ("step_ms", "step_ms_low", "step_ms_high"), "ms")
        enter("ar_step_over_floor", known.loc["ar"], ("over_floor", None, None), "x")
    for arm, name in {**HEADLINE, "dartree": "dartree_step_over_ar_B64"}.items():
        if arm in known.index:
            enter(name, known.loc[arm], ("over_ar", "over_ar_low", "over_ar_high"), "x")
    entries |= _shares(stages, context)
    held = frames["memory"]
    for row in held[(held["arm"] == "tfm") & (held["variant"] == variant)].to_dict("records"):
        beside = {"value": row["built_peak_gib"], "n": 1, "unit": "GiB beside the shared weights"}
        entries["peak_gib_tfm_beside_weights"] = {**beside, "low": None, "high": None}
    for row in frames["energy"].to_dict("records"):
        if row["arm"] in ("ar", "tfm") and (row["variant"], row["context"]) == (variant, context):
            entry = {"value": row["joule_per_step"], "low": None, "high": None, "n": row["n"], "unit": "J a step"}
            entries[f"joule_per_step_{row['arm']}"] = entry
    return entries


def _shares(stages: pd.DataFrame, context: int) -> dict:
    if stages.empty:
        return {}
    mine = stages[(stages["arm"] == "tfm") & (stages["context"] == context)].set_index("stage")
    if mine.empty:
        return {}
    timed = sum(mine.loc[name, "ms"] for name in STAGES if name != "other")
    values = {
        "gdn_verify_share": mine.loc["target_gdn", "share"] + mine.loc["commit", "share"],
        "host_other_share": mine.loc["other", "share"],
        # events cover this share of the wall of their own steps, which take this much longer than without events
        "stage_sum_over_wall": timed / mine["staged_wall_ms"].iloc[0],
        "staged_over_plain_wall": mine["staged_wall_ms"].iloc[0] / mine["wall_ms"].iloc[0],
    }
    return {name: {"value": float(v), "low": None, "high": None, "n": 1, "unit": "share"} for name, v in values.items()}


def from_cells(records: Records, variants: set[str] | None = None) -> dict:
    """Return tau, speed over others and joule a token of each method over a suite's timed cells, those of `variants`.

    Speed counts the prefill, but for those named decode. Names of temperature 1 carry no setting, those of others do.
    """
    entries, timed = {}, records.requests[records.requests["clock"] == "wall"]
    timed = timed[timed["variant"].isin(variants)] if variants is not None else timed
    for setting, table in metrics.per_request(timed, records.steps).groupby("setting"):
        ending = "" if setting == "t1" else f"_{setting}"
        arms = dict(list(table.groupby("method")))
        for method, rows in arms.items():
            entries[f"tau_{method}{ending}"] = _entry(metrics.mean(rows, "tau"), "tokens a step")
            for other in (other for other in ("ar", "dflash", "ddtree") if other in arms and other != method):
                found = metrics.ratio(rows, arms[other], "tok_s")
                entries[f"speedup_{method}_over_{other}{ending}"] = _entry(found, "x, tokens/s, prefill included")
                found = metrics.ratio(rows, arms[other], "decode_tok_s")
                entries[f"decode_speedup_{method}_over_{other}{ending}"] = _entry(found, "x, tokens/s after prefill")
    for method in sorted(set(timed["method"])):
        # of a cell that a kill cut in two only the second run's prompts were metered
        cells = [i for i in sorted(set(timed["cell"])) if _is_metered(records.cells[i])]
        cells = [i for i in cells if records.cells[i]["cell"]["decode"]["method"] == method]
        joules = sum(records.cells[i]["energy"]["joule"] for i in cells)
        tokens = int(records.requests[records.requests["cell"].isin(cells)]["new_tokens"].sum())
        if tokens:
            unit = {"low": None, "high": None, "n": len(cells), "unit": "J a token"}
            entries[f"joule_per_token_{method}"] = {"value": joules / tokens, **unit}
    return entries


def _is_metered(cell: dict) -> bool:
    return bool(cell.get("energy")) and cell["energy"]["prompts"] == cell["prompts"]


def from_checks(found: dict) -> dict:
    """Return what check_graft.py and rehearse_paper.py found; of what was not run there is nothing."""
    entries = {}
    for name in ("float32", "bfloat16"):
        part = found.get("check_graft", {}).get(name)
        if not part:
            continue
        runs = list(part["runs"].values())
        loops = runs + [run["static"] for run in runs if "static" in run]
        parted = [place for loop in loops for place in loop["parts_from_ar"]]
        counts = {"runs_beside_ar": len(loops), "near_ties": sum(place["is_near_tie"] for place in parted)}
        counts |= {"wrong": len(part["wrong"]), "outputs_as_source": sum(run["same_as_source"] for run in runs)}
        largest = [run["logits"]["largest"] for run in runs if run["logits"]["largest"] is not None]
        entries |= {f"graft_{name}_{key}": _count(value, "found by check_graft.py") for key, value in counts.items()}
        entries[f"graft_{name}_logit_difference"] = _count(max(largest, default=None), "largest, from the source's")
    if paper := found.get("rehearse_paper"):
        entries["paper_rehearsal_layers"] = _count(paper["layers"], "of the target's 64")
        entries["paper_rehearsal_tensors"] = _count(paper["tensors"], "tensors")
        entries["paper_rehearsal_wrong"] = _count(len(paper["wrong"]), "tensors and methods that differ")
        entries["paper_rehearsal_load_s"] = _count(paper["seconds"]["load"], "s")
    return entries


def _count(value, unit: str) -> dict:
    return {"value": value, "low": None, "high": None, "n": 1, "unit": unit}


def _entry(found, unit: str) -> dict:
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n, "unit": unit}


def headline(found: dict, model_rows: pd.DataFrame, context: int, expected: Path) -> pd.DataFrame:
    """Return one row a method: what the paper prints, what was measured here, and what is modelled at a given tau."""
    printed = {row["item"]: row["paper"] for row in yaml.safe_load(expected.read_text(encoding="utf-8"))["items"]}
    rows = []
    for method, key in {"ar": None, **HEADLINE, "dartree": "dartree_step_over_ar_B64", "adaptive": None}.items():
        row = {"method": method, "paper_speedup": 1.0 if method == "ar" else printed.get(f"speedup_{method}")}
        for name, entry in (
            ("measured_step_over_ar", found.get(key)),
            ("measured_tau", found.get(f"tau_{method}")),
            ("measured_speedup", found.get(f"speedup_{method}_over_ar")),
            ("measured_decode_speedup", found.get(f"decode_speedup_{method}_over_ar")),
        ):
            row |= {name: entry and entry["value"], f"{name}_low": entry and entry["low"]}
            row |= {f"{name}_high": entry and entry["high"], f"{name}_n": entry and entry["n"]}
        row["reason"] = "" if row["measured_tau"] is not None else "no cells of the graft were given"
        mine = model_rows[(model_rows["arm"] == method) & (model_rows["context"] == context)] if len(model_rows) else []
        if len(mine):
            row |= {"tau_given": mine["tau_given"].iloc[0], "modelled_speedup": mine["modelled_speedup"].iloc[0]}
        rows.append(row)
    return pd.DataFrame(rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", required=True, type=Path, help="JSON of bench_engine.py --stage steps")
    parser.add_argument("--key", help="entry of --steps that holds it, where the file holds several")
    parser.add_argument("--variant", default="all:fused_cuda", help="of the cost model and the summary")
    parser.add_argument("--context", type=int, default=512, help="of the summary")
    parser.add_argument("--tau", nargs="*", default=[], metavar="ARM=NUMBER", help="tokens a step of modelled speeds")
    parser.add_argument("--cells", nargs="*", type=Path, default=[], help="folders of finished cells")
    parser.add_argument("--out", required=True, type=Path)
    return parser.parse_args(arguments)


def write_tables(
    report: dict, out: Path, *, variant: str, context: int, taus: dict[str, float], cells: dict | None = None
) -> dict:
    """Write all tables and engine_summary.json of one report to `out`; return the summary.

    `cells` are the named arguments of `from_cells`.
    """
    costs = step_costs(report)
    stages = latency(report, costs)
    frames = {"step_costs": costs, "latency": stages, "energy": energy(report), "memory": memory(report)}
    frames |= cost_tables(costs, variant, taus, report["device"]["name"])
    out.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(out / f"{name}.csv", index=False)
    found = summary(costs, stages, frames, variant, context)
    found |= from_cells(**cells) if cells else {}
    if "weights_gib" in report and "peak_gib_tfm_beside_weights" in found:
        beside = found["peak_gib_tfm_beside_weights"]
        found["peak_gib_tfm"] = {**beside, "value": beside["value"] + report["weights_gib"], "unit": "GiB"}
    write_json(out / "engine_summary.json", found)
    headline(found, frames["modelled"], context, EXPECTED).to_csv(out / "headline.csv", index=False)
    return found


@told
def main() -> int:
    options = parse()
    report = read(options.steps)
    report = report[options.key] if options.key else report
    taus = {name: float(number) for name, number in (word.split("=") for word in options.tau)}
    settings = {"variant": options.variant, "context": options.context, "taus": taus}
    settings["cells"] = {"records": load_cells(options.cells)} if options.cells else None
    found = write_tables(report, options.out, **settings)
    shown = {name: statistics.fmean([entry["value"]]) for name, entry in found.items()}
    print(json.dumps({"out": str(options.out), **{name: round(value, 4) for name, value in shown.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
