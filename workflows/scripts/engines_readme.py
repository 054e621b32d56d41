"""README.md of a published run of engines: what ran, its numbers beside each other, and what is missing."""

import pandas as pd
from engine_taus import SETTINGS, engine_of
from make_figures import LABELS
from summarise_engines import RECURRENT, Run, devices_in, place_of, split_arm

from baselines.sglang.flags import VERSION

GOAL = "step_over_ar_sglang_tfm"
ABOUT = """\
SGLang {version} with this project's plugin (`baselines/sglang`), one request at a time, CUDA graphs, page size 1, the
synchronous scheduler and the same flags for every arm. **Steps** are of random weights at the 27B's shape, where every
step accepts a given number of drafts, or as many as a path of the random tree has: they say what a step costs and
nothing of tokens. **Tokens a step** are of the mini family with its trained weights, bfloat16, and say nothing of the
27B's speed. The two are never multiplied here."""
MADE = """\
This file is written by `workflows/scripts/publish_engines.py` from the tables beside it, which `snakemake
rebuild_published` makes again from the records; notes by hand stand in NOTES.md."""
STEPS_NOTE = """\
SGLang: median over requests of (last - first chunk) / steps, as the client sees it, interval by drawing requests (few:
it is hardly more than their range); ratios of arms that different servers ran one after the other. Ours: median over
steps on the host's clock, rounds and steps drawn, arms in turn. *{ours}*"""
MEMORY_NOTE = """\
`node states` is what SGLang's own kernel keeps for every node of a draft; this project's op keeps the column `plugin`
in its place. GiB as the server logs them. The card's memory in use holds the pool of keys and values, which SGLang
fills up to a share of the card in every arm."""
TAU_NOTE = """\
Mean over prompts of new tokens / steps, then over sets; 95 % intervals by drawing prompts, the difference paired by
prompt. Ours is the PyTorch loop; for ar a token is a step. The plugin's trees draw the loop's noise of (seed, prompt,
position) at T = 1, and SGLang's own ar and chain their own, so that their texts differ there. In bfloat16 near ties
part texts that are the same in float32."""


def folder_text(run: Run, tables: dict[str, pd.DataFrame], summary: dict) -> str:
    """Return README.md of the published folder."""
    parts = ["# Inside SGLang: " + (", ".join(sorted(devices_in(run))) or "nothing was timed")]
    parts += [ABOUT.format(version=VERSION), _when(run), MADE]
    parts += ["## Milliseconds a step", _steps(run, tables["steps"]), _goal(run, summary), _steps_note(run)]
    parts += [_older(tables["steps"])]
    parts += ["## Memory", _memory(tables["memory"]), MEMORY_NOTE]
    parts += ["## Tokens a step", _taus(tables), _where(run), TAU_NOTE, _paired(tables["pairs"])]
    parts += ["## Greedy texts inside SGLang against the target's own", _texts(tables["texts"])]
    parts += ["## Missing", _missing(tables["missing"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _when(run: Run) -> str:
    commits = {str(record["git"]["commit"])[:7] for record in run.served}
    cells = run.records.cells if run.records is not None else []
    cells = [cell for cell in cells if engine_of(cell["cell"]["engine"]) == "sglang"]
    commits |= {str(cell["environment"]["git"]["commit"])[:7] for cell in cells}
    days = sorted({cell["ended"][:10] for cell in cells})
    words = [f"Commit {', '.join(sorted(commits))}" if commits else "", " to ".join(sorted({*days[:1], *days[-1:]}))]
    words += [f"torch {record['torch']}" for record in run.served[:1]]
    if run.served:
        shape, options = run.served[0]["shape"]["target"], run.served[0]["options"]
        words.append(
            f"target of {shape['num_hidden_layers']} layers, hidden size {shape.get('hidden_size', 'of mini')}"
        )
        words.append(
            f"budget {options['budget']}, K = {options['candidates']}, {options['accept']} drafts to be accepted"
        )
        words.append(f"{options['new_tokens']} new tokens a request, {options['repeats']} requests a context")
    if cells:
        prompts = run.records.requests.groupby("dataset")["id"].nunique()
        words.append("cells over " + ", ".join(f"{name} ({count} prompts)" for name, count in prompts.items()))
    said = {str(record["git"]["said"].get("commit"))[:7] for record in run.served if record["git"]["said"].get("dirty")}
    words += [f"the machine's copy of the code called itself {', '.join(sorted(said))}, changed" if said else ""]
    tests = f" The plugin's own parts on that GPU: {run.asked['tests']}." if run.asked["tests"] else ""
    return "; ".join(word for word in words if word) + "." + tests


def _steps(run: Run, steps: pd.DataFrame) -> str:
    served = f"SGLang ({run.asked['attention']} attention), ms"
    lines = [["arm", "context", served, "over its ar", "over its chain", "accepted", "ours, ms", "over our ar"]]
    lines[0] += ["over our chain", "stated, over ar"]
    chosen = steps[steps["attention"].isin([run.asked["attention"], "ours"])]
    by = {(row["engine"], row["arm"], row["context"]): row for row in chosen.to_dict("records")}
    stated = {row["arm"]: row for row in steps[steps["engine"] == "sglang, as stated"].to_dict("records")}
    for context in sorted(chosen["context"].dropna().unique()):
        names = list(dict.fromkeys(arm for _, arm, at in by if at == context))
        for arm in sorted(names, key=place_of):
            pair = [by.get((engine, arm, context), {}) for engine in ("sglang", "ours")]
            cells = [cell for row in pair for cell in _measured(row)]
            cells.insert(3, _number(pair[0].get("accepted"), 1))
            beside = stated.get(arm, {}) if context == run.asked["context"] else {}
            lines.append([_label(arm), f"{context:.0f}", *cells, _ratio(beside)])
    others = [f"{row['arm']}: {row['step_ms']:g} ms, {row['over_ar']:g}" for row in stated.values()]
    source = f"{run.stated['source']}, attention {run.stated['attention']}" if others else ""
    source = f"\n\n*Stated, not measured here ({source}): {'; '.join(others)}.*" if others else ""
    return _table(lines) + source


def _measured(row: dict) -> tuple[str, str, str]:
    chain = _value(row, "over_chain", "over_chain_low", "over_chain_high", 3)
    return _value(row, "step_ms", "low", "high", 2), _ratio(row), chain


def _goal(run: Run, summary: dict) -> str:
    found, goal = summary.get(GOAL, {}), run.stated.get("goal")
    if goal is None:
        return ""
    asked = f"Asked for: tfm's step at budget 64 within {goal:g} x ar's inside SGLang"
    if found.get("value") is None:
        return f"**{asked}: not measured.**"
    return f"**{asked}: {_interval(found['value'], found['low'], found['high'], 3)}, {_verdict(found, goal)}.**"


def _verdict(found: dict, goal: float) -> str:
    if found["low"] is not None and found["low"] <= goal < found["high"]:
        return f"{'met' if found['value'] <= goal else 'missed'}, but the interval holds {goal:g}"
    return "met" if found["value"] <= goal else "missed"


def _steps_note(run: Run) -> str:
    git, source = (run.ours or {}).get("git") or {}, run.asked["ours_from"]
    if not source:
        return STEPS_NOTE.format(ours="No steps of ours were given.")
    commit = f", commit {str(git['commit'])[:7]}" if git.get("commit") else ""
    commit += " with changes that were not committed then" if git.get("dirty") else ""
    paired = "" if source == "the same run" else "; the engines did not stand beside each other"
    return STEPS_NOTE.format(ours=f"Ours is of {source}{commit}{paired}.")


def _older(steps: pd.DataFrame) -> str:
    """Return which of SGLang's arms ran another commit's code than ar, which may have had other defaults."""
    known = steps[(steps["engine"] == "sglang") & steps["commit"].notna()]
    usual = set(known[known["arm"] == "ar"]["commit"])
    other = known[~known["commit"].isin(usual)].drop_duplicates(["arm", "commit"]).to_dict("records")
    if not usual or not other:
        return ""
    words = "; ".join(f"{_label(row['arm'])}: {row['commit']}" for row in other)
    return f"*Of another commit than ar's {', '.join(sorted(usual))}, with that commit's defaults: {words}.*"


def _memory(memory: pd.DataFrame) -> str:
    columns = {"node_states_gib": "node states", "plugin_gib": "plugin", "committed_state_gib": "committed states"}
    columns |= {"weights_gib": "weights", "kv_gib": "keys and values", "beside_weights_gib": "kept beside the weights"}
    lines = [["engine", "arm", *(f"{name}, GiB" for name in columns.values()), "card in use, MiB", ""]]
    for row in memory.to_dict("records"):
        sizes = [_number(row[name], 2) for name in columns]
        lines.append([row["engine"], _label(row["arm"]), *sizes, _number(row["card_mib"], 0), _text(row["reason"])])
    return _table(lines)


def _taus(tables: dict[str, pd.DataFrame]) -> str:
    taus, pairs = tables["tau"], tables["pairs"]
    whole = taus[taus["dataset"] == "all"]
    by = {(row["engine"], row["method"], row["setting"]): row for row in whole.to_dict("records")}
    beside = {
        (row["one"], row["setting"]): row for row in pairs[pairs["number"] == "tau difference"].to_dict("records")
    }
    with_ar = {(row["one"], row["setting"]): row for row in pairs[pairs["number"] == "same tokens"].to_dict("records")}
    lines = [["T", "method", "SGLang", "n", "texts of SGLang's ar", "ours", "n", "SGLang - ours", "texts of ours"]]
    for setting in SETTINGS:
        for method in dict.fromkeys(whole["method"]):
            cells = []
            for engine in ("sglang", "ours"):
                row = by.get((engine, method, setting), {"n": 0})
                cells += [_value(row, "tau", "low", "high", 2) or "missing", f"{row['n']:.0f}"]
            pair = beside.get((f"sglang {method}", setting), {"n": 0})
            cells.insert(2, _same(with_ar.get((f"sglang {method}", setting), {"n": 0})))
            cells += [_value(pair, "value", "low", "high", 2) if pair["n"] else "", _same(pair)]
            lines.append([setting[1:], _label(method), *cells])
    return _table(lines)


def _same(pair: dict) -> str:
    return f"{pair['same_tokens']:.0f} of {pair['outputs']:.0f}" if pair["n"] else ""


def _where(run: Run) -> str:
    found: dict[tuple, set] = {}
    for cell in run.records.cells if run.records is not None else ():
        settings, git = cell["cell"], cell["environment"]["git"]
        place = engine_of(settings["engine"]), settings["engine"], settings["dtype"], cell["device"]["name"]
        found.setdefault(place, set()).add(str(git["commit"])[:7])
    words = []
    for (side, engine, dtype, card), commits in sorted(found.items()):
        words.append(f"{side}: engine {engine}, {dtype}, {card}, commit {', '.join(sorted(commits))}")
    return "; ".join(words) + "." if words else ""


def _paired(pairs: pd.DataFrame) -> str:
    known = pairs[(pairs["n"] > 0) & pairs["number"].str.endswith("ratio")]
    lines = [["T", "pair", "number", "ratio", "n", "same texts"]]
    for row in known.to_dict("records"):
        names = [f"{row['one']} / {row['other'].split(' ')[1]}", row["number"].removesuffix(" ratio")]
        lines.append(
            [row["setting"][1:], *names, _value(row, "value", "low", "high", 3), f"{row['n']:.0f}", _same(row)]
        )
    return _table(lines) if len(lines) > 1 else ""


def _texts(texts: pd.DataFrame) -> str:
    known = texts[texts["verdict"].notna()]
    lines = [["method", "texts", "equal", "near tie", "other", "first difference (gap; moved by bfloat16)"]]
    for method, part in known.groupby("method", sort=False):
        verdicts = part["verdict"]
        other = part[~verdicts.isin(["equal", "near tie"])]["verdict"]
        apart = part[part["at"].notna()].to_dict("records")
        places = "; ".join(f"token {row['at']:.0f} ({row['gap']:.3f}; {row['moved']:.3f})" for row in apart)
        counts = [len(part), (verdicts == "equal").sum(), (verdicts == "near tie").sum()]
        words = f"{len(other)}: {', '.join(sorted(set(other)))}" if len(other) else "0"
        lines.append([_label(method), *map(str, counts), words, places])
    return _table(lines) if len(lines) > 1 else "No text was compared."


def _missing(missing: pd.DataFrame) -> str:
    if missing.empty:
        return "Nothing that was planned is missing."
    return "\n".join(f"- {row['what']}: {row['reason']}." for row in missing.to_dict("records"))


def _label(arm: str) -> str:
    method, ending, settings = split_arm(arm)
    words = [LABELS.get(method, method)]
    words += ["SGLang's own kernel"] if arm.split(" ")[0] == RECURRENT else [ending] if ending else []
    return ", ".join(words + ([f"plugin {settings}"] if settings else []))


def _ratio(row: dict) -> str:
    return _value(row, "over_ar", "over_ar_low", "over_ar_high", 3)


def _value(row: dict, value: str, low: str, high: str, digits: int) -> str:
    if not row or row.get(value) is None or pd.isna(row[value]):
        return "missing" if row and row.get("n") == 0 and value == "step_ms" else ""
    ends = [row.get(name) for name in (low, high)]
    known = all(end is not None and not pd.isna(end) for end in ends)
    return _interval(row[value], *(ends if known else (None, None)), digits)


def _interval(value: float, low: float | None, high: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")


def _number(value, digits: int) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.{digits}f}"


def _text(value) -> str:
    return value if isinstance(value, str) else ""


def _table(lines: list[list[str]]) -> str:
    body = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(lines[0]), *body[1:]])
