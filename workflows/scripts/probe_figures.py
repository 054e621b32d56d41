"""Figures of what a suite measures beside its cells: the acceptance ceiling (figures 4 and 6) and the GDN kernel."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from probe_tables import DRAFTERS

# a drafter that samples is a full line with a filled marker, its one-token form a dashed one with a hollow marker
STYLES = {
    "oracle": ("#000000", "s", "-"),
    "oracle_argmax": ("#000000", "s", "--"),
    "dflash": ("#0072b2", "o", "-"),
    "dflash_argmax": ("#0072b2", "o", "--"),
    "weaver": ("#009e73", "D", "-"),
}
BACKENDS = {
    "naive": ("#d55e00", "by the definition, node by node"),
    "solve": ("#0072b2", "masked solve, PyTorch"),
    "recurrent_triton": ("#d55e00", "recurrence, Triton"),
    "fused_triton": ("#009e73", "fused solve, Triton"),
    "fused_cuda": ("#cc79a7", "fused solve, CUDA"),
}
PAPER = "#7f7f7f"
SHAPES = {"chain": "o", "wide": "^", "mixed": "D"}
PROBE_CAPTIONS = {
    "ceiling_position": "Acceptance by draft position: oracle marginal, its argmax, DFlash and the Weaver, with 95 % "
    "intervals; the grey band spans the oracle's estimates from below and above.",
    "ceiling_length": "The same against draft length: all drafts accepted, and accepted drafts; the grey line and band "
    "mark where the oracle's argmax passes its full marginal.",
    "kernels": "GDN tree verification, microseconds a layer against verified rows, and the ratio to the recurrence; "
    "grey: the paper's values (B200).",
}


def ceiling_position(frame: pd.DataFrame, _) -> plt.Figure:
    """Return acceptance by position, given earlier acceptance and along the target's own text."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {"acceptance": "given that all earlier drafts were accepted", "on_text": "along the target's own text"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        _drafters(axis, frame, column)
        limit = frame[frame["drafter"] == "oracle"].dropna(subset=[column])
        axis.fill_between(limit["position"], limit[column], limit[f"{column}_above"], color="0.6", alpha=0.5, lw=0)
        axis.set(xlabel="draft position", ylabel="acceptance", title=title, ylim=(0, 1.03))
    return _legend(figure)


def ceiling_length(frame: pd.DataFrame, claims: pd.DataFrame) -> plt.Figure:
    """Return survival and expected accepted drafts by draft length, with the crossovers marked."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = {"survival": "all drafts accepted", "length": "accepted drafts"}
    longest = frame["position"].max()
    for axis, (column, label) in zip(axes, labels.items(), strict=True):
        _drafters(axis, frame, column)
        found = claims[claims["key"] == f"crossover_{column}"].iloc[0]
        if found["value"] <= longest:
            axis.axvspan(found["value_low"], min(found["value_high"], longest), color="0.6", alpha=0.25, lw=0)
            axis.axvline(found["value"], color="0.4", lw=1)
            title = f"argmax passes at {found['value']:.1f}"
        else:
            title = f"no crossing up to {longest}"
        axis.set(xlabel="draft length", ylabel=label, title=title, ylim=(0, None))
    return _legend(figure)


def kernels(frame: pd.DataFrame, _) -> plt.Figure:
    """Return microseconds a layer and the ratio to the baseline, against verified rows."""
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    known = frame.dropna(subset=["us"])
    for (backend, shape), part in known.groupby(["backend", "shape"], sort=False):
        style = {"color": BACKENDS[backend][0], "marker": SHAPES[shape], "lw": 1.2, "ms": 5, "capsize": 2}
        for axis, column in ((times, "us"), (ratios, "ratio")):
            if column == "us" or part["baseline"].isna().all():
                ends = [part[column] - part[f"{column}_low"], part[f"{column}_high"] - part[column]]
                axis.errorbar(part["rows"], part[column], [end.clip(lower=0) for end in ends], **style)
    for base, line in (("yes", "--"), ("", ":")):
        paper = frame[(frame["baseline"].fillna("") == base)].dropna(subset=["paper_us"]).drop_duplicates("rows")
        times.plot(paper["rows"], paper["paper_us"], color=PAPER, ls=line, lw=1.2)
        if not base:
            ratios.plot(paper["rows"], paper["paper_ratio"], color=PAPER, ls=line, lw=1.2)
    ticks = sorted(set(frame["rows"].dropna().astype(int)) - {65})
    for axis, label in ((times, "microseconds a layer"), (ratios, "speedup over the recurrence")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set(xlabel="verified rows T, the root included", ylabel=label)
    handles = [Line2D([], [], color=BACKENDS[name][0], label=BACKENDS[name][1]) for name in known["backend"].unique()]
    handles += [Line2D([], [], color="0.2", ls="", marker=mark, label=shape) for shape, mark in SHAPES.items()]
    handles += [Line2D([], [], color=PAPER, ls="--", label="paper, recurrence (B200)")]
    handles += [Line2D([], [], color=PAPER, ls=":", label="paper, fused (B200)")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


PROBE_FIGURES = {"ceiling_position": ceiling_position, "ceiling_length": ceiling_length, "kernels": kernels}


def _drafters(axis, frame: pd.DataFrame, column: str) -> None:
    for drafter, (colour, marker, line) in STYLES.items():
        part = frame[frame["drafter"] == drafter].dropna(subset=[column])
        ends = [part[column] - part[f"{column}_low"], part[f"{column}_high"] - part[column]]
        style = {"color": colour, "marker": marker, "ls": line, "lw": 1.3, "ms": 4, "capsize": 2, "elinewidth": 0.8}
        face = colour if line == "-" else "white"
        axis.errorbar(part["position"], part[column], [end.clip(lower=0) for end in ends], mfc=face, **style)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(figure: plt.Figure) -> plt.Figure:
    handles = [
        Line2D(
            [], [], color=colour, marker=marker, ls=line, mfc=colour if line == "-" else "white", label=DRAFTERS[name]
        )
        for name, (colour, marker, line) in STYLES.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return figure
