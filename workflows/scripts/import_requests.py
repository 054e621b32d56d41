"""Lay somebody else's run of the paper's code beside ours: its request log read, and both in one table."""

import argparse
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from input_errors import told
from input_files import read_table

from baselines.methods import METHODS
from baselines.refusals import one_of
from baselines.suite import setting_name
from tfm import metrics
from tfm.manifest import sha256_file, write_atomic

DESCRIPTION = """
Reads logs of the public harness (the printed output of sglang.bench_dflash_tfm, or JSON lines with dataset, id,
completion_tokens and spec_verify_ct a request), each as METHOD=FILE, and the per_set.csv of a suite of ours. Writes
requests.jsonl (one JSON object a request, workflows/schemas/request.schema.yaml) and beside.csv (one row a set,
setting, method and origin, macro first) to --out. Counts as the harness does: tau is tokens / verify passes a request,
1 for ar; tokens a second are those of a set's whole loop, in which a failed request has none. A count that is missing
is an error and never 1. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
REQUEST = re.compile(
    r"\[(?P<dataset>[^\]\s]+) (?P<number>\d+)/(?P<total>\d+)\] qid=(?P<id>\S+) "
    r"(?:tokens=(?P<new_tokens>\d+) steps=(?P<steps>\d+) accept_length=\S+ latency=(?P<latency>[\d.]+)s "
    r"finish=(?P<finish_reason>.*)|ERROR: (?P<error>.*))"
)
BEGINS = re.compile(r"\[\S+ \d+/\d+\] qid=")
SETTINGS = re.compile(r"\b(temperature|reasoning|max_new_tokens|concurrency|seed|model)=(\S*)")
TOTALS = re.compile(
    r"(?P<dataset>\S+) +(?P<prompts>\d+) +(?P<errors>\d+) +(?P<tokens>\d+) +(?P<wall>[\d.]+) +[\d.]+ +[\d.]+ +\S+"
)
WARM_UP, MACRO = "warmup", "macro"
OURS = ("suite", "device", "dataset", "variant", "setting")  # columns of a per_set.csv
COLUMNS = ("dataset", "setting", "method", "origin", "device", "tau", "tau_low", "tau_high", "tok_s", "speedup", "n")
COLUMNS += ("errors", "reason")


@dataclass
class Log:
    """One run of the harness against one server: its settings, requests in order, and a set's wall in seconds."""

    method: str
    settings: dict = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    walls: dict[str, float] = field(default_factory=dict)
    printed: dict[str, dict] = field(default_factory=dict)  # the harness's own totals, by set

    @property
    def setting(self) -> str:
        """Return the name of its temperature and reasoning, as in a cell's path."""
        return setting_name(float(self.settings["temperature"]), reasoning=self.settings["reasoning"] == "on")


def read_log(method: str, path: Path) -> Log:
    """Return a log; raises ValueError naming the file for one that is not the harness's, or contradicts itself."""
    one_of("method", method, METHODS)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text ({error}); give the log as the harness printed it") from error
    log = _from_json(method, text, path) if text.lstrip().startswith("{") else _from_print(method, text, path)
    if not log.requests:
        raise ValueError(f"{path}: no request of the harness in it; give its whole printed output, or JSON lines")
    lacking = {"temperature", "reasoning"} - set(log.settings)
    if lacking:
        raise ValueError(f"{path}: says nothing of {', '.join(sorted(lacking))}; the log was cut before its summary")
    if log.settings["reasoning"] not in ("on", "off"):
        raise ValueError(
            f"{path}: reasoning: {log.settings['reasoning']!r} is not allowed (allowed: on, off); repair the log"
        )
    for key, kind, least in (("temperature", float, 0), ("concurrency", int, 1), ("seed", int, 0)):
        value = log.settings.get(key, str(least))
        try:
            is_allowed = least <= kind(value) < math.inf
        except ValueError:
            is_allowed = False
        if not is_allowed:
            allowed = f"a finite number >= {least}"
            raise ValueError(f"{path}: {key}: {value!r} is not allowed (allowed: {allowed}); repair the log")
    _check(log, path)
    return log


def _from_print(method: str, text: str, path: Path) -> Log:
    log = Log(method)
    for line in text.splitlines():
        if found := REQUEST.fullmatch(line.strip()):
            log.requests += [_request(found.groupdict())] if found["dataset"] != WARM_UP else []
        elif BEGINS.match(line.strip()):
            raise ValueError(
                f"{path}: {line.strip()[:90]!r} is no whole line of the harness; give its output as it was"
            )
        elif line.startswith("base_url="):
            log.settings = dict(SETTINGS.findall(line))
        elif (found := TOTALS.fullmatch(line.strip())) and found["dataset"] != "dataset":
            log.walls[found["dataset"]] = float(found["wall"])
            log.printed[found["dataset"]] = found.groupdict()
    return log


def _from_json(method: str, text: str, path: Path) -> Log:
    log, counts = Log(method), Counter()
    # not splitlines: a reply may hold U+2028, which ends no line of JSON
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row |= row.pop("meta_info", {})
            name = str(row["dataset"]).strip()
            if row["dataset"] is None or row["id"] is None:
                raise ValueError("dataset or id is null")
            if name in ("", MACRO):
                raise ValueError(f"dataset {row['dataset']!r} is not allowed (allowed: a name, not {MACRO})")
            fields = {"dataset": name, "id": str(row["id"]), "number": counts[name] + 1}
            fields |= {"latency": row.get("e2e_latency"), "finish_reason": _finish(row.get("finish_reason"))}
            # what a failed request has made by then is not counted
            fields |= {"error": row.get("error") or None, "new_tokens": None}
            if fields["error"] is None:
                fields["new_tokens"] = _count(row, "completion_tokens")
                fields["steps"] = _count(row, "spec_verify_ct") if method != "ar" or row.get("spec_verify_ct") else 0
            request = _request(fields)
            wall = row.get("dataset_wall")
            walls = {} if wall is None else {fields["dataset"]: float(wall)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}: line {number} is no request ({type(error).__name__}: {error}); a line needs dataset, id, "
                "completion_tokens and spec_verify_ct"
            ) from error
        counts[name] += 1
        log.requests.append(request)
        settings = {key: _word(row[key]) for key in ("temperature", "reasoning", "concurrency", "seed") if key in row}
        for what, known, new in (("", log.settings, settings), ("the wall of ", log.walls, walls)):
            for key in (key for key in new if known.setdefault(key, new[key]) != new[key]):
                before = f"{known[key]!r} before; a log is one run, split it"
                raise ValueError(f"{path}: line {number}: {what}{key} is {new[key]!r}, {before}")
    return log


def _word(value) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _count(row: dict, key: str) -> int:
    if type(row[key]) is not int or row[key] < 0:
        raise ValueError(f"{key} {row[key]!r} is no count")
    return row[key]


def _request(found: dict) -> dict:
    tokens, steps = (None if found["new_tokens"] is None else int(found[key]) for key in ("new_tokens", "steps"))
    row = {"dataset": found["dataset"], "id": found["id"], "index": int(found["number"]) - 1, "new_tokens": tokens}
    latency = None if found["latency"] is None else float(found["latency"])
    if latency is not None and not 0 <= latency < math.inf:
        raise ValueError(f"latency {latency} is not allowed (allowed: seconds >= 0)")
    row |= {"steps": steps, "latency_s": latency}
    return row | {"finish_reason": found["finish_reason"], "error": found.get("error")}


def _finish(value) -> str | None:
    value = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, str | None):
        raise ValueError(f"finish_reason {value!r} is not allowed (allowed: a word, or an object with a type)")
    return value


def _check(log: Log, path: Path) -> None:
    """Raise ValueError for counts that cannot be, and when a set's printed totals are not those of its requests.

    The passes of ar become its tokens: each was one, and servers that draft nothing count none.
    """
    seen = set()
    for row in log.requests:
        where, tokens, steps = f"{path}: {row['dataset']}, request {row['id']!r}", row["new_tokens"], row["steps"]
        if (row["dataset"], row["id"]) in seen:
            raise ValueError(f"{where} is there twice; a prompt is counted once, give one run a log")
        seen.add((row["dataset"], row["id"]))
        if row["error"] is not None:
            continue
        if log.method == "ar" and steps not in (0, tokens):
            raise ValueError(f"{where}: {steps} verify passes for {tokens} tokens of ar, which drafts nothing")
        if steps > tokens or (tokens > 1 and not steps and log.method != "ar"):
            raise ValueError(
                f"{where}: {tokens} tokens by {steps} verify passes; such a count is not averaged (it is not 1 token a "
                "pass): check that the server ran the method"
            )
        row["steps"] = tokens if log.method == "ar" else steps
    for dataset in {row["dataset"]: None for row in log.requests}:
        numbers = sorted(row["index"] for row in log.requests if row["dataset"] == dataset)
        gap = next((place for place, number in enumerate(numbers) if number != place), None)
        if gap is not None:
            raise ValueError(f"{path}: {dataset} has no request number {gap + 1}; lines are missing")
    for dataset, wall in log.walls.items():
        if not 0 < wall < math.inf:
            raise ValueError(f"{path}: {dataset}: a wall of {wall} s is not allowed (allowed: above 0); repair the log")
    for dataset, printed in log.printed.items():
        mine = [row for row in log.requests if row["dataset"] == dataset]
        tokens, errors = sum(row["new_tokens"] or 0 for row in mine), sum(row["error"] is not None for row in mine)
        found = (len(mine), errors, tokens)
        expected = tuple(int(printed[key]) for key in ("prompts", "errors", "tokens"))
        if found != expected:
            raise ValueError(
                f"{path}: {dataset} has prompts, errors, tokens {found}, its summary says {expected}; lines are missing"
            )


def to_rows(log: Log, origin: str, device: str) -> list[dict]:
    """Return one JSON object a request, in the names of our export; what the log does not say is null."""
    fixed = {"origin": origin, "device_name": device, "method": log.method, "setting": log.setting}
    fixed |= {"temperature": float(log.settings["temperature"]), "reasoning": log.settings["reasoning"] == "on"}
    fixed |= {"seed": int(log.settings.get("seed", 0)), "requests": int(log.settings.get("concurrency", 1))}
    return [{**fixed, **row, "dataset_wall_s": log.walls.get(row["dataset"])} for row in log.requests]


def beside(rows: list[dict], per_set: pd.DataFrame | None) -> pd.DataFrame:
    """Return one row a set, setting, method and origin: the imported runs, then ours; macro rows first."""
    frame, table = pd.DataFrame(rows), []
    for (origin, device, setting, method), part in frame.groupby(
        ["origin", "device_name", "setting", "method"], sort=False
    ):
        identity = {"setting": setting, "method": method, "origin": origin, "device": device}
        reference = frame[(frame["origin"] == origin) & (frame["setting"] == setting) & (frame["method"] == "ar")]
        for dataset in [MACRO, *part["dataset"].unique()]:
            mine, ar = (rows if dataset == MACRO else rows[rows["dataset"] == dataset] for rows in (part, reference))
            table.append({"dataset": dataset, **identity, **_numbers(mine, ar)})
    ours = [] if per_set is None else _ours(per_set)
    return pd.DataFrame([*table, *ours]).reindex(columns=list(COLUMNS))


def _numbers(part: pd.DataFrame, ar: pd.DataFrame) -> dict:
    good = part[part["steps"].fillna(0) > 0]
    good = good.assign(tau=good["new_tokens"] / good["steps"])
    tau, speed, reference = metrics.mean(good, "tau"), _tok_s(part), _tok_s(ar)
    row = {"tau": tau.value, "tau_low": tau.low, "tau_high": tau.high, "tok_s": speed, "n": tau.n}
    # the ratio of the macros, and only where ar ran on the same sets
    same_sets = len(ar) > 0 and set(ar["dataset"]) == set(part["dataset"])
    row |= {"speedup": speed / reference if same_sets and speed and reference else None}
    empty = int((part["error"].isna() & (part["new_tokens"] == 0)).sum())
    reasons = [
        f"{empty} requests without a token, in no mean" if empty else "",
        "" if speed is not None else "the log was cut before its walls",
        "" if row["speedup"] is not None else "no ar run of the same sets",
    ]
    if (part["requests"] > 1).any():
        reasons.append(f"concurrency {part['requests'].max()}, ours is 1")
    return row | {"errors": int(part["error"].notna().sum()), "reason": "; ".join(filter(None, reasons))}


def _tok_s(part: pd.DataFrame) -> float | None:
    """Return tokens a second, macro over sets: a set's tokens over its loops' walls; None where a wall is unknown."""
    if part.empty or part["dataset_wall_s"].isna().any():
        return None
    runs = part.groupby(["dataset", "seed"]).agg(tokens=("new_tokens", "sum"), wall=("dataset_wall_s", "first"))
    by_set = runs.groupby("dataset").sum()
    return float((by_set["tokens"] / by_set["wall"]).mean())


def _ours(per_set: pd.DataFrame) -> list[dict]:
    rows = per_set.assign(method=per_set["variant"].str.partition("-")[0], origin="ours: " + per_set["suite"])
    rows["reason"] = rows["reason"].fillna("") if "reason" in rows else ""
    rows["errors"] = 0
    return rows.to_dict("records")


@told
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--log", required=True, nargs="+", metavar="METHOD=FILE", help="logs, such as ar=ar.log tfm=tfm.log")
    add("--origin", required=True, help="who ran it, as the table shall name it")
    add("--device", required=True, help="the card, as its driver names it")
    add("--per-set", type=Path, help="tables/per_set.csv of a suite of ours (default: the imported run alone)")
    add("--out", required=True, type=Path, help="folder of requests.jsonl and beside.csv")
    options = parser.parse_args(arguments)
    rows = []
    for word in options.log:
        method, sign, name = word.partition("=")
        if not sign:
            raise ValueError(f"--log: {word!r} is not allowed (allowed: METHOD=FILE); write for example tfm=tfm.log")
        log = read_log(method, Path(name))
        digest = sha256_file(Path(name))
        rows += [row | {"log_sha256": digest} for row in to_rows(log, options.origin, options.device)]
    table = beside(rows, read_table(options.per_set, *OURS) if options.per_set else None)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "requests.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    write_atomic(options.out / "beside.csv", table.to_csv(index=False, lineterminator="\n").encode())
    print(json.dumps({"requests": len(rows), "rows": len(table)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
