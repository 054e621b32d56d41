"""`tfm cells`: every cell of a suite, with its state and the reason, before, while and after it is run."""

import argparse
import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.cells import cell_len
from rich.text import Text

from baselines import suite
from baselines.cell_states import STATES, CellState, Inspector, count_states
from baselines.inputs import WORKFLOWS
from baselines.methods import METHODS
from baselines.plans import read_plan
from baselines.refusals import one_of
from baselines.terminal import Screen, visible
from baselines.where import Condition
from tfm.manifest import REPOSITORY

DESCRIPTION = (
    "Lists the cells of a suite: done, stale (and whether code, config, weights or prompts changed), incomplete (n of "
    "N prompts), running, failed, damaged or missing. Reads the suite's config, weights and results folder, writes "
    "nothing, and needs none of them but the config. In a pipe: state, path, prompts done, reason, separated by tabs."
)
EXAMPLES = """examples:
  tfm cells --state stale,missing
  tfm cells --where 'method==tfm and budget>=64 and temperature==1'
  tfm cells --where 'variant==tfm-b64-w4' --export jsonl > requests.jsonl
  tfm cells --config prompts=4 budgets=8,128
  tfm cells --suite nano-real --results /somewhere/results"""
KINDS = {
    **dict.fromkeys(("state", "suite", "engine", "target", "dataset", "domain", "variant", "setting", "method"), str),
    **dict.fromkeys(("budget", "width", "children", "candidates", "depth", "temperature", "seed"), float),
    **dict.fromkeys(("rule", "clock", "part", "device", "dtype", "path", "reason"), str),
    **dict.fromkeys(("requests", "max_new_tokens", "done", "prompts"), float),
    **dict.fromkeys(("residual", "reasoning", "traced"), bool),
}
STYLES = {
    "done": ("good", "green"),
    "stale": ("note", "yellow"),
    "incomplete": ("miss", "cyan"),
    "running": ("hit", "cyan"),
    "failed": ("bad", "red"),
    "damaged": ("bad", "red"),
    "missing": ("open", "dim"),
}
ADVICE = {
    "failed": "read decode.log in its folder, then {call}",
    "damaged": "{call} --force PATH/requests.parquet",
    "incomplete": "{resume} keeps the finished prompts",
    "stale": "{call}",
    "missing": "{call}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tfm cells` takes."""
    add = parser.add_argument
    add(
        "--suite",
        default="nano",
        metavar="NAME",
        help="a config of workflows/config, or a results folder with plan.json",
    )
    add("--configfile", type=Path, metavar="FILE", help="the suite's config, as for snakemake")
    add(
        "--config", nargs="+", default=[], metavar="KEY=VALUE", help="values in place of the config's, as for snakemake"
    )
    add("--where", metavar="CONDITION", help=f"only cells that meet it; fields: {', '.join(KINDS)}")
    add("--state", metavar="STATE[,STATE]", help=f"only these: {', '.join(STATES)}")
    add("--results", type=Path, metavar="DIR", help="the results folder (default: results of the repository)")
    add(
        "--export", metavar="FORMAT", help="jsonl: one JSON object a request of the selected cells, instead of the list"
    )


def run(options: argparse.Namespace) -> int:
    """List the selected cells, or export their requests."""
    condition = Condition(options.where, KINDS) if options.where is not None else None
    wanted = options.state.split(",") if options.state is not None else STATES
    for name in wanted:
        one_of("state", name, STATES)
    if options.export is not None:
        one_of("export", options.export, ("jsonl",))
    configfile = options.configfile and options.configfile.absolute()
    results = (options.results or REPOSITORY / "results").absolute()
    if options.results and not results.is_dir():
        raise ValueError(f"results: {options.results} is no folder; give the folder that holds {options.suite}/")
    check_checkout()
    with contextlib.chdir(REPOSITORY):  # a config names weights from there
        cells = cells_of(options.suite, configfile, options.config, results)
        inspector = Inspector(results)
        states = [inspector.inspect(cell) for cell in cells]
    states = [state for state in states if state.state in wanted and (condition is None or condition(row_of(state)))]
    screen = Screen()
    if options.export:
        return export(states, screen)
    # a path that works from here
    home = results.parent if results == Path.cwd() / "results" else None
    show(screen, states, total=len(cells), home=home, same=same_options(options))
    return 0


def check_checkout() -> None:
    """Raise ValueError in a checkout whose code is not the code that runs: it would be judged by other code."""
    here = Path.cwd()
    if (here / "Snakefile").exists() and (here / "tfm/cells.py").exists() and here.resolve() != REPOSITORY.resolve():
        raise ValueError(f"this is a checkout, but tfm runs the code of {REPOSITORY}; run pip install -e . here")


def cells_of(name: str, configfile: Path | None, given: list[str], results: Path) -> list[dict]:
    """Return the resolved cells of a suite: from its config, or from the plan of its last run where there is none."""
    values = dict(parse_value(word) for word in given)
    path = configfile or WORKFLOWS / f"config/{name}.yaml"
    plan = results / name / "plan.json"
    if configfile is None and name not in suite_names() and plan.exists():
        if given:
            raise ValueError(
                f"config: {name} is known from {plan} only, nothing can be changed; give --configfile FILE"
            )
        return read_plan(plan)["cells"]
    if configfile is None:
        planned = [folder.parent.name for folder in results.glob("*/plan.json")]
        one_of("suite", name, sorted({*suite_names(), *planned}))
    if not path.is_file():
        raise ValueError(
            f"configfile: {path} does not exist; give a suite's config, such as workflows/config/nano.yaml"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"configfile: {path} is not YAML ({visible(str(error))}); restore it") from error
    suite.check_file(path)
    if not isinstance(raw, dict) or "suite" not in raw:
        raise ValueError(f"configfile: {path} is no suite's config, it has no key suite; give one that has")
    return suite.expand(suite.resolve({**raw, **values}, given=values))


def same_options(options: argparse.Namespace) -> str:
    """Return what a snakemake call on the same suite has to say, with a space before it; empty for suite nano."""
    file = options.configfile or (WORKFLOWS / f"config/{options.suite}.yaml" if options.suite != "nano" else None)
    if file and file.is_relative_to(REPOSITORY):
        file = file.relative_to(REPOSITORY)
    words = [f" --configfile {shlex.quote(str(file))}"] if file else []
    return "".join([*words, *([f" --config {shlex.join(options.config)}"] if options.config else [])])


def suite_names() -> list[str]:
    """Return the suites that have a config here."""
    paths = sorted((WORKFLOWS / "config").glob("*.yaml"))
    # a damaged one is named when it is asked for
    return [path.stem for path in paths if re.search(rb"^suite:", path.read_bytes(), flags=re.MULTILINE)]


def parse_value(word: str) -> tuple[str, object]:
    """Return key and value of KEY=VALUE; lists and maps are YAML, the rest is typed by the schema."""
    key, sign, text = word.partition("=")
    if not sign or not key:
        raise ValueError(f"config: {word!r} is not allowed (allowed: KEY=VALUE); write for example prompts=4")
    try:
        # as Snakemake does: everything inside stays text, and nothing after the = is null
        return key, yaml.load(text, yaml.BaseLoader) if text[:1] in ("[", "{") else text or None
    except yaml.YAMLError as error:
        raise ValueError(f"config: {word!r} is not allowed (allowed: YAML after the =); close its brackets") from error


def row_of(state: CellState) -> dict:
    """Return the fields of a cell that --where can name."""
    cell, decode = state.cell, state.cell["decode"]
    row = {**decode, **cell, "state": state.state, "reason": state.reason, "done": state.done, "prompts": state.prompts}
    method = METHODS[decode["method"]]
    # a default that the method does not take says nothing of the cell
    row |= {key: None for key in METHODS["tfm"].knobs if key not in method.knobs}
    return {name: row.get(name) for name in KINDS}


def show(screen: Screen, states: list[CellState], *, total: int, home: Path | None, same: str) -> None:
    """Write the list, then what it adds up to."""
    if screen.is_terminal:
        for line in listing(states, screen):
            screen.line(line)
        screen.line()
    else:
        for state in states:
            path = state.folder.relative_to(home) if home else state.folder
            screen.line("\t".join([state.state, str(path), progress(state), state.reason]))
    screen.aside(summary(states, total, same))


def listing(states: list[CellState], screen: Screen) -> Iterator[Text]:
    """Yield the lines of a terminal's list; the part of the paths that all share stands once, above."""
    heads = {state.folder.parents[3] for state in states}
    shared = heads.pop() if len(heads) == 1 else None
    if shared:
        here = Path.cwd()
        yield Text(f"{shared.relative_to(here) if shared.is_relative_to(here) else shared}/", "dim")
    names = [str(state.folder.relative_to(shared) if shared else state.folder) for state in states]
    longest = max(map(len, names), default=0)
    for state, name in zip(states, names, strict=True):
        sign, style = STYLES[state.state]
        head = f"{getattr(screen.glyphs, sign)} {state.state:<11}"
        text = Text.assemble((head, style), f"{name:<{longest}}", (f"{progress(state):>8}", "dim"))
        reason = visible(state.reason)
        if not reason or text.cell_len + 2 + cell_len(reason) <= screen.width:
            yield text.append(f"  {reason}" if reason else "", style)
        else:
            yield text
            yield Text(" " * len(head) + reason, style)


def progress(state: CellState) -> str:
    """Return prompts done of prompts, empty where nothing was prepared."""
    return "" if state.prompts is None else f"{state.done}/{state.prompts}"


def summary(states: list[CellState], total: int, same: str) -> Text:
    """Return the last lines: how many are in which state, and what to call next with the `same` options."""
    counts = count_states(states)
    chosen = f"{len(states)} of {total} cells" if len(states) < total else f"{total} cells"
    text = Text.assemble((chosen, "bold"))
    for name, count in counts.items():
        text.append(", " if name != next(iter(counts)) else ": ")
        text.append(f"{count} {name}", STYLES[name][1])
    for name, advice in ADVICE.items():
        if name in counts and "running" not in counts:
            calls = {"call": f"snakemake --cores all{same}", "resume": f"tfm resume{same}"}
            text.append(f"\n{name}: {advice.format(**calls)}", "dim")
    return text


def export(states: list[CellState], screen: Screen) -> int:
    """Write one JSON object a request; name on standard error what has no records. Return 1 when a cell is damaged."""
    from tfm.cells import load_cells  # needs pyarrow and pandas, which the list does not

    left_out = []
    for state in states:
        if state.state not in ("done", "stale"):
            left_out.append(state)
            continue
        for row in load_cells([state.folder]).requests.to_dict("records"):
            fields = {key: plain(value) for key, value in row.items() if key != "cell"}
            screen.line(json.dumps({"cell": state.cell["path"], "state": state.state, **fields}, ensure_ascii=False))
    counts = ", ".join(f"{count} {name}" for name, count in count_states(left_out).items())
    if left_out:
        print(f"tfm cells: {len(left_out)} of {len(states)} cells have no records: {counts}", file=sys.stderr)
    damaged = [state for state in left_out if state.state == "damaged"]
    for state in damaged:
        print(f"tfm cells: {state.folder} is damaged: {state.reason}", file=sys.stderr)
    return 1 if damaged else 0


def plain(value):
    """Return a value of a data frame as JSON has it: lists, numbers, null for what is empty."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value
