"""What no table may be made of, and what a reader should be warned about."""

import hashlib
import json

import numpy as np
import pandas as pd

from tfm.cells import STAGE_COLUMNS, Records, rerun_command

FASTEST = 20  # a speedup above this is more likely a mistake than a result
ROUNDING = 1e-3  # of sums of float32 probabilities, and of times
TIMES = ("prefill_us", "decode_us", "wall_us")
PLACE = ("suite", "engine", "target", "dataset", "variant", "setting", "seed")  # what a cell's path spells
ZERO_RUN = 50  # steps in a row that accept nothing: the drafter may have lost its context
LIVE_OVER_OFFLINE = 0.5  # a live first draft that is accepted less than this share of the offline guess is suspect
# of a cell.json, what every number must be traceable to
PROVENANCE = (
    ("environment", "git", "commit"),
    ("environment", "packages", "torch"),
    ("environment", "python"),
    ("device", "name"),
    ("prompts_sha256",),
    ("source_digest",),
    *(("cell", key) for key in ("seed", "dtype", "reasoning", "decode", "weights_sha256", "template")),
)


def check_rows(records: Records) -> None:
    """Raise ValueError for rows that no metric may touch, naming the cell and the command that makes it again.

    A count that is missing is not 1: a request with two tokens or more had a verify pass. A rule cannot accept deeper
    than the tree, so tokens a step never exceed the deepest draft plus one. A request's counts are those of its steps,
    plus the token sampled at prefill.
    """
    rows, steps = records.requests, records.steps
    lost = steps[steps["id"].isna()]
    if len(lost):
        raise ValueError(
            f"{records.cells[lost['cell'].iloc[0]]['path']}: {len(lost)} steps of requests that it has not; make the "
            "cell again"
        )
    _refuse(rows, rows["steps"].isna() | rows["new_tokens"].isna(), "a request without a count of steps or tokens")
    _refuse(rows, (rows["new_tokens"] > 1) & (rows["steps"] < 1), "tokens without a verify pass")
    if "reasoning_tokens" in rows:
        _refuse(rows, rows["reasoning_tokens"] > rows["new_tokens"], "more reasoning tokens than new tokens")
    _refuse(steps, steps["accepted_untrimmed"] > steps["depth"], "a step that accepted deeper than its tree")
    _refuse(steps, steps["committed"] > steps["accepted"] + 1, "a step that emitted more than it accepted and a bonus")
    counts = steps[["accepted", "accepted_untrimmed", "committed"]]
    _refuse(steps, counts.isna().any(axis=1) | (counts.astype(float) < 0).any(axis=1), "a step without a count")
    _refuse(steps, steps["accepted"] > steps["accepted_untrimmed"], "a step that emitted drafts which it refused")
    # of a served tree the depth may be unknown, its size is not
    _refuse(steps, steps["accepted_untrimmed"] > steps["nodes"] - 1, "a step that accepted more than it drafted")
    _refuse(rows, rows["new_tokens"] < 1, "a request without a token")
    _refuse(rows, rows["new_tokens"] > rows["max_new_tokens"], "more tokens than the cap")
    _refuse(rows, rows.duplicated(["cell", "id"]), "a request that its cell holds twice")
    key = ["cell", "request"]
    own = rows[key].merge(
        steps.groupby(key)["committed"].agg(["size", "sum"]), left_on=key, right_index=True, how="left"
    )
    own = own.fillna(0).set_index(rows.index)
    _refuse(rows, own["size"] != rows["steps"], "another count of steps than it has")
    _refuse(rows, own["sum"] + 1 != rows["new_tokens"], "another count of tokens than its steps emitted")
    _check_requests(rows)
    _check_trees(rows, steps)
    _check_times(rows, steps)


def _check_requests(rows: pd.DataFrame) -> None:
    """Refuse requests that are not what their cell decoded: other tokens, another end, another prompt."""
    _refuse(rows, rows["output_tokens"].map(len) != rows["new_tokens"], "another count of tokens than its text has")
    digests = rows["output_tokens"].map(lambda tokens: hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest())
    _refuse(rows, digests != rows["output_sha256"], "a hash that is not its text's")
    _refuse(rows, ~rows["finish_reason"].isin(["stop", "length"]), "an end that is neither stop nor length")
    is_short = (rows["finish_reason"] == "length") & (rows["new_tokens"] != rows["max_new_tokens"])
    _refuse(rows, is_short, "an end at the cap before the cap")
    _refuse(rows, rows["prompt_tokens"] < 1, "a prompt without a token")
    of_prompt = rows.groupby(["dataset", "reasoning", "prompts_sha256", "id"])
    for name in ("index", "prompt_tokens"):
        _refuse(rows, of_prompt[name].transform("nunique") > 1, f"another {name} than the same prompt of another arm")


def _check_trees(rows: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Refuse steps of trees that cannot be, and bounds that no tree has."""
    _refuse(steps, steps.duplicated(["cell", "request", "step"]), "a step that its request holds twice")
    owner = steps[["cell", "request"]].merge(rows[["cell", "request", "budget"]], on=["cell", "request"], how="left")
    drafted = steps["nodes"] - 1
    _refuse(steps, (drafted > pd.to_numeric(owner["budget"]).set_axis(steps.index)), "a tree larger than its budget")
    _refuse(steps, (drafted < 0) | (steps["depth"] < 0) | (steps["depth"] > drafted), "a tree deeper than its nodes")
    _refuse(steps, (steps["method"] == "ar") & (drafted != 0), "a draft of ar, which has none")
    bound = steps["expected_accepted"].astype(float)
    is_none = bound.isna()
    partly = is_none.groupby(steps["cell"]).transform("any") & ~is_none.groupby(steps["cell"]).transform("all")
    _refuse(steps, partly & is_none, "no lossless bound where the cell's other steps have one")
    _refuse(steps, (bound < 0) | (bound > steps["depth"].fillna(np.inf) + ROUNDING), "a bound outside 0 to its depth")


def _check_times(rows: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Refuse timed requests whose times are missing, impossible or no sum, and stages of a part of a cell's steps."""
    timed, times = rows["clock"] != "off", rows[list(TIMES)].astype(float)
    for name in TIMES:
        _refuse(rows, times[name] < 0, f"a time below 0 ({name})")
        _refuse(rows, timed & ~np.isfinite(times[name]), f"no time in a timed cell ({name})")
    _refuse(rows, timed & (times["wall_us"] <= 0), "a wall of 0")
    parts = times["prefill_us"] + times["decode_us"]
    _refuse(rows, (parts - times["wall_us"]).abs() > ROUNDING * parts, "a wall that is not prefill and decode")
    staged = steps[steps["clock"] == "stages"]
    for name in STAGE_COLUMNS:
        column = staged[name].astype(float)
        some = column.notna().groupby(staged["cell"]).transform("any")
        _refuse(staged, (some & ~np.isfinite(column)) | (column < 0), f"no time of a stage that others have ({name})")


def differing(plan: list[dict], records: Records) -> list[str]:
    """Return each cell that is not the plan's: decoded with other settings or weights, in part, or not listed.

    What a plan leaves to the run (ends of text) and settings that are newer than a record are not compared.
    """
    planned, problems = {_place(cell): cell for cell in plan}, []
    found = records.requests.groupby("cell").size() if records.cells else {}
    for number, record in enumerate(records.cells):
        wanted, cell = planned.get(_place(record["cell"])), record["cell"]
        if wanted is None:
            problems.append(f"{record['path']}: is not in the plan")
            continue
        pairs = {key: (wanted[key], cell[key]) for key in wanted if key in cell and key not in ("decode", "weights")}
        # a plan may be made where the weights are not
        known = {part: digest for part, digest in pairs.get("weights_sha256", ({}, {}))[0].items() if digest}
        pairs["weights_sha256"] = (known, {part: cell["weights_sha256"].get(part) for part in known})
        decode = {key: value for key, value in wanted["decode"].items() if key != "eos_tokens" or value}
        pairs |= {key: (decode[key], cell["decode"][key]) for key in decode if key in cell["decode"]}
        pairs["requests with a record"] = (record["prompts"], int(found.get(number, 0)))
        words = [
            f"{key} {one!r} in the plan, {other!r} in the record"
            for key, (one, other) in pairs.items()
            if json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True)
        ]
        problems += [f"{record['path']}: {', '.join(words)}"] if words else []
    return problems


def _place(cell: dict) -> tuple:
    return tuple(cell[key] for key in PLACE)


def check_prompts(records: Records) -> None:
    """Raise ValueError unless all cells of a prompt set decoded the same prompt file."""
    for (dataset, reasoning), rows in records.requests.groupby(["dataset", "reasoning"]):
        found = sorted(digest[:12] for digest in rows["prompts_sha256"].unique())
        if len(found) > 1:
            raise ValueError(
                f"prompts of {dataset}{', reasoning on' if reasoning else ''}: cells decoded {len(found)} prompt files "
                f"({', '.join(found)}); arms are compared on the same prompts, rerun the older cells"
            )


def complete_share(cells: list[dict]) -> float | None:
    """Return the share of cells whose manifest names all that made them; None without cells."""
    return sum(not lacking(cell) for cell in cells) / len(cells) if cells else None


def lacking(cell: dict) -> list[str]:
    """Return what a cell's manifest does not name: commit, versions, device, prompts, weights, seed, type, settings."""
    found = []
    for path in PROVENANCE:
        value = cell
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None or value == {}:
            found.append(".".join(path))
    weights = cell.get("cell", {}).get("weights_sha256") or {}
    return found + [f"cell.weights_sha256.{part}" for part, digest in weights.items() if not digest]


def sanity(data, per_set: pd.DataFrame) -> pd.DataFrame:
    """Return one row a check: what was looked at, the worst value, its limit, and whether a reader should doubt it."""
    return pd.DataFrame([_speed(per_set), _depth(data), _zero_run(data), _first_draft(data), _repeats(data)])


def _speed(frame: pd.DataFrame) -> dict:
    frame = frame.dropna(subset=["speedup"]) if "speedup" in frame else frame.head(0)
    row = {"check": "speedup over ar", "limit": FASTEST, "n": len(frame)}
    if frame.empty:
        return row | {"value": None, "flag": "", "reason": "no timed cell has an ar beside it"}
    worst = frame.loc[frame["speedup"].idxmax()]
    return row | _verdict(worst["speedup"], FASTEST, f"{worst['variant']}, {worst['dataset']}, {worst['setting']}")


def _depth(data) -> dict:
    steps = data.records.steps
    slack = (steps["accepted_untrimmed"] - steps["depth"]).dropna()
    row = {"check": "accepted drafts less the tree's depth", "limit": 0, "n": len(slack), "flag": ""}
    if slack.empty:
        return row | {"value": None, "reason": "no step whose tree's depth is known"}
    # rows beyond it were refused by check_rows, so that this is shown as kept
    return row | {"value": slack.max()}


def _zero_run(data) -> dict:
    steps = data.records.steps
    steps = steps[steps["nodes"] > 1]
    row = {"check": "steps in a row that accepted nothing", "limit": ZERO_RUN, "n": len(steps)}
    if steps.empty:
        return row | {"value": None, "flag": "", "reason": "no method of this suite drafts"}
    steps = steps.sort_values(["cell", "request", "step"])
    hit = steps["accepted_untrimmed"] > 0
    start = hit | (steps["request"] != steps["request"].shift()) | (steps["cell"] != steps["cell"].shift())
    lengths = (~hit).groupby(start.cumsum()).sum()
    run = start.cumsum() == lengths.idxmax()
    first = steps[run].iloc[0]
    return row | _verdict(int(lengths.max()), ZERO_RUN, f"{first['variant']}, {first['dataset']}, {first['id']}")


def _first_draft(data) -> dict:
    """Compare the live acceptance of the first draft with the drafter's guess at the same kind of place, offline."""
    row = {"check": "dflash's first draft, live over offline acceptance", "limit": LIVE_OVER_OFFLINE, "n": None}
    anchors = data.probes["ceiling"].frames["anchors"] if "ceiling" in data.probes else None
    live = data.records.steps
    live = live[(live["method"] == "dflash") & (live["variant"] == "dflash") & (live["depth"] > 0)]
    if anchors is None or live.empty:
        return row | {"value": None, "flag": "", "reason": "needs dflash cells and the ceiling's anchors"}
    live = live[live["setting"] == data.probes["ceiling"].facts["settings"]["setting"]]
    guess = anchors[(anchors["drafter"] == "dflash_argmax") & (anchors["position"] == 1)]
    if live.empty or not guess["overlap"].sum() > 0:
        return row | {"value": None, "flag": "", "reason": "no live draft, or no offline one, at the ceiling's setting"}
    return (
        row | compare_first_draft((live["accepted_untrimmed"] > 0).mean(), guess["overlap"].mean()) | {"n": len(live)}
    )


def compare_first_draft(live: float, offline: float) -> dict:
    """Return value and flag: a live acceptance far below the offline one points at the template or an offset."""
    share = live / offline if offline else float("nan")
    doubt = "the prompt template, or draft rows off by one" if share < LIVE_OVER_OFFLINE else ""
    return {"value": share, "flag": f"live {live:.2f}, offline {offline:.2f}: suspect {doubt}" if doubt else ""}


def _repeats(data) -> dict:
    rows = data.requests[data.requests["variant"] == "ar"] if "variant" in data.requests else data.requests
    same = rows.duplicated(["dataset", "setting", "seed", "index"]).sum() if len(rows) else None
    return {"check": "prompts that a set holds twice", "limit": 0, "n": len(rows)} | _verdict(same or 0, 0, "ar cells")


def _verdict(value: float, limit: float, where: str) -> dict:
    return {"value": value, "flag": f"{where}: {value:g} is above {limit:g}" if value > limit else "", "reason": ""}


def _refuse(rows: pd.DataFrame, is_bad: pd.Series, what: str) -> None:
    if is_bad.any():
        first = rows[is_bad].iloc[0]
        keys = ("suite", "engine", "target", "dataset", "variant", "setting", "seed")
        head = {key: first[key] for key in keys}
        folder = (
            f"results/{head['suite']}/cells/{head['engine']}/{head['target']}/{head['dataset']}/{head['variant']}/"
            f"{head['setting']}/seed{head['seed']}"
        )
        raise ValueError(
            f"{folder}: {what} ({int(is_bad.sum())} rows, first request {first['id']!r}); such a row is not averaged, "
            f"make the cell again: {rerun_command(folder)}"
        )
