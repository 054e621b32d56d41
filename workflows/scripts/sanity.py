"""What no table may be made of, and what a reader should be warned about."""

import pandas as pd

from tfm.cells import Records, rerun_command

FASTEST = 20  # a speedup above this is more likely a mistake than a result
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
    for name in ("prefill_us", "decode_us"):
        _refuse(rows, rows[name].astype(float) < 0, f"a time below 0 ({name})")


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
    slack = (steps["accepted_untrimmed"] - steps["depth"]).max() if len(steps) else None
    # rows beyond it were refused by check_rows, so that this is shown as kept
    return {"check": "accepted drafts less the tree's depth", "limit": 0, "n": len(steps), "value": slack, "flag": ""}


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
