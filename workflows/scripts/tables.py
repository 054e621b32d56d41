"""The tables of a suite as frames: identity first, then value, interval and n; missing is empty with a reason."""

import json
from dataclasses import dataclass, field

import arms
import builder_tables
import controls
import dartree_claims
import family_tables
import lossless_table
import pandas as pd
import probe_tables
import sanity

from baselines import suite
from tfm import metrics
from tfm.cells import Records
from tfm.config import HEADS
from tfm.trace import STAGES, SUBSTAGES

INTERVALS = ("tok_s", "tau", "accepted")  # metrics shown with an interval in headline and per_set
POINTS = ("decode_tok_s", "tau_exact", "tau_pooled", "accepted_untrimmed")
PAIRS = (("tfm", "ddtree"), ("ddtree", "dflash"), ("tfm", "dflash"), ("tfm", "dartree"), ("dartree", "ddtree"))
# DARTree's own comparison, in suites that have its reference: the chain of the same head
CHAIN_PAIRS = (("dartree", "headchain"), ("dartree", "dflash"), ("dartree", "headddtree"), ("headchain", "dflash"))
CHAIN_PAIRS += (("headddtree", "ddtree"), ("dartree", "dartfixed"), ("dartree", "heap"))
CHAIN_PAIRS += (("overgrown", "dartree"), ("overgrown", "tfm"))
CPU_SHARE = 0.9  # a timed cell whose process had less of its wall on a core was disturbed
MACRO = {"dataset": "macro"}  # of what runs on several sets: the mean over them
STEP_SPREAD = 2  # and so was one whose slowest request's step took this many times the fastest one's
WALL_TOLERANCE = 0.02  # stage timing may cost this share of the wall before a row is flagged


@dataclass
class Suite:
    """A suite's plan with its records: `requests` carries the metrics of each request."""

    config: dict
    plan: list[dict]
    records: Records
    requests: pd.DataFrame
    draft_rows: int | None = None
    probes: dict = field(default_factory=dict)  # probe_records.Probe by name

    @staticmethod
    def of(plan: dict, records: Records, probes: dict | None = None) -> "Suite":
        requests = metrics.per_request(records.requests, records.steps)
        rows = plan["draft_rows"] if "draft_rows" in plan else suite.draft_rows(plan["config"])
        return Suite(plan["config"], plan["cells"], records, requests, rows, probes or {})

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(cell["setting"] for cell in self.plan if cell["part"] == "headline"))

    @property
    def headline(self) -> dict[str, str]:
        """Method -> its headline variant's name."""
        return {variant.method: variant.name(self.config) for variant in suite.headline(self.config)}

    def side(self, part: str) -> dict:
        """The setting and seed of a sweep, the stages or the audit, and its dataset where it has one alone."""
        setting = suite.setting_name(self.config["side"]["temperature"], reasoning=self.config["reasoning"][0])
        sets = suite.sets_of(self.config, part)
        where = {"dataset": sets[0]} if len(sets) == 1 else {}
        return where | {"setting": setting, "seed": self.config["seeds"][0]}

    def arm(self, variant: str, **fields) -> pd.DataFrame:
        """Return the requests of one variant where every field has the value given."""
        return _where(self.requests, variant=variant, **fields)

    def missing(self, variant: str, **fields) -> str:
        """Return why planned cells of this variant are not there; empty when all are."""
        wanted = [c for c in self.plan if c["variant"] == variant and all(c[key] == fields[key] for key in fields)]
        reasons = {c["path"]: self.records.missing[c["path"]] for c in wanted if c["path"] in self.records.missing}
        return "; ".join(f"{path.split('/', 5)[-1]}: {reason}" for path, reason in reasons.items())


def check_one_kind(records: Records) -> list[str]:
    """Return the mixes that a table must not hold: suites, devices, types, ends of text, threads of what is timed here,
    and source digests within a method.
    """
    problems, rows = [], records.requests
    for column in ("suite", "engine", "target", "device_name", "dtype", "template"):
        found = sorted(map(str, rows[column].unique()))
        if len(found) > 1:
            problems.append(f"{column}: {' and '.join(found)}")
    cells = [(record, record["cell"]) for record in records.cells]
    ends = {json.dumps([cell["decode"].get(key) for key in ("eos_tokens", "stop")]) for _, cell in cells}
    # a server has threads of its own
    timed = [record for record, cell in cells if cell["clock"] != "off" and "server" not in cell]
    threads = {str(record["device"]["torch_threads"]) for record in timed}
    for name, found in (("eos_tokens and stop", ends), ("torch_threads of timed cells", threads)):
        problems += [f"{name}: {' and '.join(sorted(found))}"] if len(found) > 1 else []
    for method, group in rows.groupby("method"):
        found = sorted(digest[:12] for digest in group["source_digest"].unique())
        if len(found) > 1:
            problems.append(f"source_digest of {method}: {' and '.join(found)}")
    return problems


def headline(data: Suite) -> pd.DataFrame:
    """Return one row a variant and setting, macro over datasets. Refuses a rule whose tokens are not ar's."""
    for variant in suite.headline(data.config):
        if variant.rule not in ("greedy", "target_only"):
            raise ValueError(
                f"headline: rule {variant.rule!r} is not allowed (allowed: target_only, whose tokens are ar's); "
                "traversal agrees in law only and legacy_traversal not even so: put it in audit"
            )
    rows = []
    for setting in data.settings:
        for name in data.headline.values():
            rows.append({"variant": name, "setting": setting, **_speed_and_acceptance(data, name, setting=setting)})
    return _identified(data, rows)


def per_set(data: Suite) -> pd.DataFrame:
    """Return one row a dataset, variant and setting."""
    rows = []
    for dataset in data.config["datasets"]:
        domain = next((cell["domain"] for cell in data.plan if cell["dataset"] == dataset), None)
        for setting in data.settings:
            for name in data.headline.values():
                fields = _speed_and_acceptance(data, name, setting=setting, dataset=dataset)
                rows.append({"dataset": dataset, "domain": domain, "variant": name, "setting": setting, **fields})
    return _identified(data, rows)


def latency(data: Suite) -> pd.DataFrame:
    """Return microseconds a step and share of each stage of the -stages cells, with both walls."""
    rows = []
    for method, name in data.headline.items():
        staged, where = f"{name}-{suite.STAGED}", data.side("stages")
        arm, steps = data.arm(staged, **where), _where(data.records.steps, variant=staged, **where)
        times = metrics.stage_times(arm, steps)
        fields = {"dataset": where["dataset"], "variant": name, "setting": where["setting"], "method": method}
        if not times:
            rows.append({**fields, "reason": data.missing(staged, **where) or "no stage times"})
            continue
        wall = metrics.decode_us_per_step(data.arm(name, **where))
        differs = times["decode"] / wall - 1
        shares = metrics.stage_shares(times)
        fields |= {"steps": len(steps), "decode_us": times["decode"], "untimed_decode_us": wall, "difference": differs}
        fields |= {"flag": f"walls differ by more than {WALL_TOLERANCE:.0%}" if abs(differs) > WALL_TOLERANCE else ""}
        for stage in (*STAGES, *SUBSTAGES):
            level = "stage" if stage in STAGES else "build" if stage in ("weaver_prefix", "grow") else "verify"
            rows.append({**fields, "level": level, "stage": stage, "us": times[stage], "share": shares[stage]})
        rows.append(
            {**fields, "level": "sum", "stage": "gdn", "us": shares["gdn"] * times["decode"], "share": shares["gdn"]}
        )
        rows.append({**fields, "level": "request", "stage": "prefill", "us": times["prefill"]})
    return _identified(data, rows)


def acceptance_by_position(data: Suite) -> pd.DataFrame:
    """Return how often each draft position is accepted, steps of all datasets and seeds together."""
    frames = []
    for setting in data.settings:
        for name in data.headline.values():
            table = metrics.acceptance_by_position(_where(data.records.steps, variant=name, setting=setting))
            table.insert(0, "variant", name)
            table.insert(1, "setting", setting)
            frames.append(table)
    return _identified(data, pd.concat(frames).to_dict("records"))


def sweeps(data: Suite) -> pd.DataFrame:
    """Return tau and accepted along every sweep, the headline's own point included; speed where all cells are timed."""
    rows, is_timed = [], data.config.get("timed") == "all"
    names_of = ("tau", "accepted", "tok_s") if is_timed else ("tau", "accepted")
    for key, (knob, methods) in suite.SWEEPS.items():
        where = data.side(key)
        for method in (method for method in methods if data.config.get(key) and method in data.headline):
            names = [
                cell["variant"] for cell in data.plan if cell["part"] == key and cell["decode"]["method"] == method
            ]
            points = [(suite.parse_variant(name, data.config), name) for name in [*names, data.headline[method]]]
            values = {name: getattr(variant, knob) for variant, name in points}
            # no depth limit means all the drafter's rows
            values = {n: data.draft_rows if value is None else _as_number(value) for n, value in values.items()}
            for name, value in sorted(values.items(), key=lambda item: (item[1] or 0, item[0])):
                row = {"sweep": knob, "value": value, "method": method, "variant": name} | MACRO | where
                arm = data.arm(name, **where)
                rows.append(row | _intervals(arm, names_of))
                rows[-1] |= {"step_ms": metrics.decode_us_per_step(arm) / 1e3} if is_timed else {}
                rows[-1]["reason"] = data.missing(name, **where)
    return _identified(data, rows)


def _as_number(value) -> float:
    """Return a sweep's value as a number: a head by its place in HEADS, false and true as 0 and 1."""
    return HEADS.index(value) if value in HEADS else value if isinstance(value, float) else int(value)


def paired(data: Suite) -> pd.DataFrame:
    """Return differences and ratios between methods on the same prompts and seeds, macro first, then by set."""
    rows = []
    for setting in data.settings:
        for one, other in (*PAIRS, *(CHAIN_PAIRS if "headchain" in data.headline else ())):
            if {one, other} <= set(data.headline):
                for dataset in ("macro", *data.config["datasets"]):
                    rows += _pair_rows(data, one, other, setting=setting, dataset=dataset)
    return _identified(data, rows)


def audit(data: Suite) -> pd.DataFrame:
    """Return each rule's acceptance beside the lossless bound of its own steps, and outputs equal to ar's."""
    rows, where = [], data.side("audit")
    names = [*data.headline.values(), *(cell["variant"] for cell in data.plan if cell["part"] == "audit")]
    for name in dict.fromkeys(names):
        arm = data.arm(name, **where)
        excess, same = metrics.excess_over_bound(arm), metrics.identical_outputs(arm, data.arm("ar", **where))
        variant = suite.parse_variant(name, data.config)
        row = {"variant": name, "rule": variant.rule} | MACRO | where
        row |= _intervals(arm, ("accepted_untrimmed", "expected_accepted"))
        row |= {"excess": excess.value, "excess_low": excess.low, "excess_high": excess.high}
        reason = data.missing(name, **where)
        if variant.siblings == "sampled" and variant.rule == "traversal":
            reason = reason or "no bound: siblings are drawn, and the law holds on average over trees"
        rows.append({**row, "same_as_ar": same[0], "compared": same[1], "reason": reason})
    return _identified(data, rows)


TABLES = {
    "headline": headline,
    "per_set": per_set,
    "latency": latency,
    "acceptance_by_position": acceptance_by_position,
    "sweeps": sweeps,
    "paired": paired,
    "audit": audit,
    "oracle": probe_tables.oracle,
    "ceiling": probe_tables.ceiling,
    "ceiling_claims": probe_tables.ceiling_claims,
    "kernels": probe_tables.kernels,
    "controls": controls.controls,
    "arms": arms.arms,
    "builders": builder_tables.builders,
    "dartree_claims": dartree_claims.dartree_claims,
    "lossless": lossless_table.lossless,
    "families": family_tables.families,
}


def frames(data: Suite) -> dict[str, pd.DataFrame]:
    """Return every table; the summary quotes all of them, whether or not the suite writes them."""
    found = {name: table(data) for name, table in TABLES.items()}
    return found | {"sanity": sanity.sanity(data, found["per_set"])}


def _speed_and_acceptance(data: Suite, name: str, **fields) -> dict:
    arm, reference = data.arm(name, **fields), data.arm("ar", **fields)
    reason = data.missing(name, **fields)
    if reason:
        return {"reason": reason}
    speedup, same = metrics.ratio(arm, reference, "tok_s"), metrics.identical_outputs(arm, reference)
    row = {"tok_s": None, "speedup": speedup.value, "speedup_low": speedup.low, "speedup_high": speedup.high}
    row |= _intervals(arm, INTERVALS)
    n = row.pop("n")
    row |= {metric: metrics.mean(arm, metric).value for metric in POINTS}
    timed = metrics.mean(arm, "tok_s").n
    alone = f"speedup of {speedup.n} of {timed} timed prompts: ar has no time of the others"
    doubts = [_disturbed(data, arm), alone if 0 < speedup.n < timed else ""]
    return (
        row
        | {
            "same_as_ar": same[0],
            "compared": same[1],
            "n": n,
            "seeds": arm["seed"].nunique(),
            "flag": "; ".join(filter(None, doubts)),
        }
        | {"reason": ""}
    )


def _disturbed(data: Suite, arm: pd.DataFrame) -> str:
    """Return which timed cells of an arm other work on the machine may have disturbed; empty for none."""
    found = []
    for number, rows in arm[arm["clock"] == "wall"].groupby("cell"):
        share, rows = data.records.cells[number].get("cpu_share"), rows[rows["steps"] > 0]
        step, where = rows["decode_us"] / rows["steps"], f"{rows['dataset'].iloc[0]} " if len(rows) else ""
        if share is not None and share < CPU_SHARE:
            found.append(f"{where}cpu share {share:.2f}")
        if len(rows) and step.max() > STEP_SPREAD * step.min():
            found.append(f"{where}step times spread {step.max() / step.min():.1f}x")
        found += [f"{where}{doubt}" for doubt in controls.clock_doubts(data.records.cells[number])]
    return "; ".join(found)


def _pair_rows(data: Suite, one: str, other: str, *, setting: str, dataset: str) -> list[dict]:
    fields = {"setting": setting} | ({} if dataset == "macro" else {"dataset": dataset})
    arms = [data.arm(data.headline[method], **fields) for method in (one, other)]
    rows = []
    for metric in ("accepted", "tau", "tok_s"):
        diff, ratio = metrics.difference(*arms, metric), metrics.ratio(*arms, metric)
        row = {"pair": f"{one} - {other}", "metric": metric, "setting": setting, "dataset": dataset}
        row |= {"difference": diff.value, "difference_low": diff.low, "difference_high": diff.high}
        row |= {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "n": diff.n}
        reasons = (data.missing(data.headline[method], **fields) for method in (one, other))
        rows.append({**row, "reason": "; ".join(filter(None, reasons))})
    return rows


def _intervals(arm: pd.DataFrame, names) -> dict:
    row, n = {}, 0
    for name in names:
        estimate = metrics.mean(arm, name)
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        n = max(n, estimate.n)
    return {**row, "n": n}


def _where(frame: pd.DataFrame, **fields) -> pd.DataFrame:
    for column, value in fields.items():
        frame = frame[frame[column] == value]
    return frame


def _identified(data: Suite, rows: list[dict]) -> pd.DataFrame:
    """Return the rows as a frame whose first columns say where the numbers were made, and whose last says why not."""
    frame = pd.DataFrame(rows)
    devices = sorted(data.records.requests["device_name"].unique()) if data.records.cells else []
    frame.insert(0, "suite", data.config["suite"])
    frame.insert(1, "device", " + ".join(devices))
    if "reason" in frame:
        frame["reason"] = frame.pop("reason").fillna("")
    return frame
