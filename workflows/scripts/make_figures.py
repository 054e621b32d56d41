"""Draw all figures of a suite from its tables' csv files: pdf, svg and png, each with a caption in a text file."""

import argparse
import itertools
import json
import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import seaborn as sns
from input_errors import told
from input_files import read_table
from matplotlib.ticker import MaxNLocator
from probe_figures import PROBE_CAPTIONS, PROBE_FIGURES
from small_svg import small

from baselines.suite import FIGURE_TABLES
from tfm.json_shape import Each, read_object

DESCRIPTION = """
Reads the tables' csv files and captions.json, never the records. Writes <figure>.{pdf,svg,png,txt} to --out; a figure
without data says why.
Last line of stdout: one JSON object.
"""
# one colour and one marker a method, everywhere; distinct for colour-blind readers and in grey
COLOURS = {"ar": "#7f7f7f", "dflash": "#0072b2", "ddtree": "#e69f00", "dartree": "#cc79a7", "tfm": "#009e73"}
MARKERS = {"ar": "s", "dflash": "o", "ddtree": "^", "dartree": "v", "tfm": "D"}
LABELS = {"ar": "AR", "dflash": "DFlash", "ddtree": "DDTree", "dartree": "DARTree", "tfm": "DFlash-TfM"}
COLOURS |= {"adaptive": "#8c510a"}
COLOURS |= {
    "headchain": "#56b4e9",
    "headddtree": "#d55e00",
    "dartfixed": "#882255",
    "heap": "#999933",
    "overgrown": "#332288",
}
MARKERS |= {"headchain": "P", "headddtree": "<", "dartfixed": "X", "heap": "*", "overgrown": "h"}
MARKERS |= {"adaptive": ">"}
LABELS |= {"adaptive": "DFlash-TfM, adaptive budget"}
LABELS |= {"headchain": "head's chain", "headddtree": "chain, then DDTree", "dartfixed": "DARTree, fixed"}
LABELS |= {"heap": "sequential heap", "overgrown": "overgrown"}
PARTS = {
    "draft": "#0072b2",
    "weaver_prefix": "#f0e442",
    "grow": "#e69f00",
    "build_other": "#b8860b",
    "target_gemm": "#004d40",
    "target_attention": "#26a69a",
    "target_gdn": "#009e73",
    "target_head": "#80cbc4",
    "target_other": "#c8e6c9",
    "accept": "#cc79a7",
    "commit": "#d55e00",
    "other": "#bdbdbd",
}
CAPTIONS = {
    "throughput": "Tokens a second and speedup over ar by prompt set; bars with 95 % intervals.",
    "tau": "Tokens a step (tau, the bonus token included) by prompt set, with 95 % intervals.",
    "latency": "Time of one step by stage, from cells with stage timing.",
    "acceptance_by_position": "Acceptance by draft position, with 95 % intervals.",
    "sweeps": "Tokens a step along each sweep, with accepted drafts or, where it was timed, with speed: along it, and "
    "against tokens a step, a mark a value; 95 % intervals.",
    **PROBE_CAPTIONS,
}

TRADE = "trade"  # a column of the sweeps: tok_s over tau
LABELS_OF_KNOBS = {
    "budget": "budget B (drafted nodes)",
    "width": "width w (nodes expanded at once)",
    "candidates": "candidates K a depth",
    "children": "children C a node",
    "depth": "depth limit",
    "residual": "weaver's residual, on (1) or off (0)",
    "depth_bonus": "depth bonus a level",
    "head": "head: 0 weaver, 1 Markov, 2 recurrent",
}


def throughput(tables: Path) -> plt.Figure:
    """Return bars of tok/s and of speedup by set, a row a setting."""
    frame = _methods(_read(tables, "per_set"))
    return _bars(frame, {"tok_s": "tokens / s", "speedup": "speedup over ar"})


def tau(tables: Path) -> plt.Figure:
    """Return bars of tau and of accepted drafts by set, a row a setting."""
    frame = _methods(_read(tables, "per_set"))
    return _bars(frame, {"tau": "tokens a step (tau)", "accepted": "accepted drafts a step"})


def latency(tables: Path) -> plt.Figure:
    """Return one stacked bar of milliseconds a step for each method."""
    frame = _read(tables, "latency")
    if "stage" not in frame:
        return _nothing("no cell ran with stage timing (stages is off, or its cells are missing)")
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    wide = _methods(frame).dropna(subset=["stage"]).pivot(index="method", columns="stage", values="us") / 1e3
    wide["build_other"] = (wide["build"] - wide["weaver_prefix"] - wide["grow"]).clip(lower=0)
    methods = [method for method in reversed(COLOURS) if method in wide.index]
    left = pd.Series(0.0, index=methods)
    for part, colour in PARTS.items():
        widths = wide.loc[methods, part]
        names = [LABELS[method] for method in methods]
        axis.barh(names, widths, left=left, color=colour, label=part, edgecolor="white", linewidth=0.4)
        left = left + widths
    axis.set_xlabel("milliseconds a step")
    axis.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    return figure


def acceptance_by_position(tables: Path) -> plt.Figure:
    """Return lines of conditional and unconditional acceptance, a row a setting."""
    frame = _read(tables, "acceptance_by_position")
    if frame.empty or "position" not in frame:
        return _nothing("no method of this suite drafts")
    frame = _methods(frame)
    columns = {"conditional": "accepted, given all before", "unconditional": "accepted"}
    return _lines(frame, "position", columns, label=lambda setting: "draft position")


def sweeps(tables: Path) -> plt.Figure:
    """Return lines along every sweep, a row each: tau and accepted; tau, tok/s and the trade between them if timed."""
    frame = _read(tables, "sweeps")
    if frame.empty or "value" not in frame or frame["value"].isna().all():
        return _nothing("the config sweeps nothing that its methods have")
    frame = _methods(frame).dropna(subset=["value"])
    is_timed = "tok_s" in frame and frame["tok_s"].notna().any()
    columns = {"tau": "tau (tokens a step)", "accepted": "accepted drafts a step"}
    columns = {"tau": columns["tau"], "tok_s": "tokens / s", TRADE: "tokens / s"} if is_timed else columns
    figure = _lines(frame, "value", columns, by="sweep", label=LABELS_OF_KNOBS.get, title=lambda knob: "")
    for axis, (sweep, column) in zip(figure.axes, itertools.product(frame["sweep"].unique(), columns), strict=True):
        if column == TRADE:
            _trade(axis, frame[frame["sweep"] == sweep])
            continue
        ticks = sorted(frame.loc[frame["sweep"] == sweep, "value"].unique())
        if ticks[0] > 0:
            axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, labels=[f"{value:g}" for value in ticks])
        axis.minorticks_off()
    return figure


def _trade(axis, frame: pd.DataFrame) -> None:
    """Draw speed against tau, each mark with the value of the knob that gave it."""
    for method in (method for method in COLOURS if method in set(frame["method"])):
        part = frame[frame["method"] == method].sort_values("value")
        axis.plot(part["tau"], part["tok_s"], color=COLOURS[method], marker=MARKERS[method], linewidth=1.4)
        for row in part.dropna(subset=["tau", "tok_s"]).to_dict("records"):
            place = {"xytext": (4, -9), "textcoords": "offset points", "fontsize": 8, "color": "#333333"}
            axis.annotate(f"{row['value']:g}", (row["tau"], row["tok_s"]), **place)
    axis.set(xlabel="tau (tokens a step)", ylabel="tokens / s")


FIGURES = {
    "throughput": throughput,
    "tau": tau,
    "latency": latency,
    "acceptance_by_position": acceptance_by_position,
    "sweeps": sweeps,
    **{name: lambda tables, name=name: _probe(tables, name) for name in PROBE_FIGURES},
}


def _probe(tables: Path, name: str) -> plt.Figure:
    frame = _read(tables, FIGURE_TABLES[name])
    if len(frame) == 1 and len(reason := str(frame["reason"].iloc[0])) > 3:
        return _nothing(reason)
    return PROBE_FIGURES[name](frame, _read(tables, "ceiling_claims") if name == "ceiling_length" else None)


def save(figure: plt.Figure, out: Path, name: str, caption: str) -> None:
    """Write the figure in all forms, without dates, so that the same tables give the same files."""
    for form, metadata in (("pdf", {"CreationDate": None}), ("svg", {"Date": None}), ("png", {})):
        figure.savefig(out / f"{name}.{form}", dpi=150, metadata=metadata)
    svg = out / f"{name}.svg"
    svg.write_text(small(svg.read_text(encoding="utf-8")), encoding="utf-8")
    (out / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")
    plt.close(figure)


def set_style() -> None:
    """Set the look of all figures; text stays text: it can be searched, and an svg is a quarter of the size."""
    sns.set_theme(style="whitegrid", rc={"svg.hashsalt": "tfm", "svg.fonttype": "none", "font.size": 9})


def draw(tables: Path, out: Path, figures: list[str]) -> None:
    """Draw the figures named from the csv files in `tables`."""
    out.mkdir(parents=True, exist_ok=True)
    set_style()
    captions = read_object(tables / "captions.json", Each(str), remedy="make it with make_tables.py")
    for name in figures:
        # the second line is the table's caption: sizes, counts and conditions
        caption = f"{CAPTIONS[name]}\n{captions.get(FIGURE_TABLES[name], '')}".strip()
        save(FIGURES[name](tables), out, name, caption)


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", required=True, type=Path, help="folder of the csv files")
    parser.add_argument("--out", required=True, type=Path, help="folder of the figures")
    parser.add_argument("--figures", required=True, nargs="+", choices=list(FIGURES), help="what to draw")
    options = parser.parse_args()
    draw(options.tables, options.out, options.figures)
    print(json.dumps({"figures": options.figures}))
    return 0


def _read(tables: Path, name: str) -> pd.DataFrame:
    return read_table(tables / f"{name}.csv")


def _nothing(reason: str) -> plt.Figure:
    """Return a figure that says why it shows no data."""
    figure = plt.figure(figsize=(8, 1.2))
    figure.text(0.5, 0.5, f"nothing to show: {reason}", ha="center", va="center")
    return figure


def _methods(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(method=frame["variant"].str.partition("-")[0])


def _bars(frame: pd.DataFrame, columns: dict[str, str]) -> plt.Figure:
    settings, sets = list(frame["setting"].unique()), list(frame["dataset"].unique())
    size = (2 + min(1.1 * len(sets), 5) * len(columns), (2.6 if len(sets) <= 4 else 3.2) * len(settings) + 0.6)
    figure, axes = plt.subplots(len(settings), len(columns), figsize=size, squeeze=False, layout="constrained")
    methods = [method for method in COLOURS if method in set(frame["method"])]
    for row, setting in enumerate(settings):
        part = frame[frame["setting"] == setting]
        for axis, (column, label) in zip(axes[row], columns.items(), strict=True):
            order = {"x": "dataset", "order": sets, "hue": "method", "hue_order": methods, "palette": COLOURS}
            sns.barplot(part, y=column, ax=axis, errorbar=None, saturation=1, legend=False, **order)
            _whiskers(axis, part, column, sets, methods)
            axis.set(xlabel="", ylabel=label, title=_title(setting))
            if len(sets) > 4:
                plt.setp(axis.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
            if column == "speedup":
                axis.axhline(1, color="black", linewidth=0.8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[method], label=LABELS[method]) for method in methods]
    # a narrow figure wraps its legend
    ncols = min(len(methods), int(size[0] / 1.3))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def _whiskers(axis, part: pd.DataFrame, column: str, sets: list[str], methods: list[str]) -> None:
    indexed = part.set_index(["dataset", "method"])
    for position, dataset in enumerate(sets):
        for number, method in enumerate(methods):
            if (dataset, method) in indexed.index and f"{column}_low" in indexed:
                row = indexed.loc[(dataset, method)]
                x = position + 0.8 * ((number + 0.5) / len(methods) - 0.5)
                axis.vlines(x, row[f"{column}_low"], row[f"{column}_high"], color="black", linewidth=0.9)


def _lines(frame: pd.DataFrame, x: str, columns: dict[str, str], *, label, by="setting", title=None) -> plt.Figure:
    """Draw one row of axes for each value of column `by`; `label` and `title` are functions of that value."""
    groups = list(frame[by].unique())
    size = (4.2 * len(columns), 2.8 * len(groups) + 0.6)
    figure, axes = plt.subplots(len(groups), len(columns), figsize=size, squeeze=False, layout="constrained")
    drawn = {}
    for row, group in enumerate(groups):
        for axis, (column, text) in zip(axes[row], columns.items(), strict=True):
            for method in COLOURS if column in frame else ():
                part = frame[(frame[by] == group) & (frame["method"] == method)].dropna(subset=[column])
                if len(part):
                    below, above = part[column] - part[f"{column}_low"], part[f"{column}_high"] - part[column]
                    style = {"color": COLOURS[method], "marker": MARKERS[method], "label": LABELS[method]}
                    # an interval's end can pass the value by rounding
                    error = [below.clip(lower=0), above.clip(lower=0)]
                    drawn[method] = axis.errorbar(part[x], part[column], error, capsize=2, linewidth=1.4, **style)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set(xlabel=label(group), ylabel=text, title=(title or _title)(group))
    handles = list(drawn.values())
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False)
    return figure


def _title(setting: str) -> str:
    number, _, think = setting.removeprefix("t").partition("-")
    return f"T = {number}" + (", reasoning on" if think else "")


if __name__ == "__main__":
    sys.exit(main())
