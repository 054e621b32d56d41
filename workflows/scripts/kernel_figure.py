"""The figure of a GPU run of the GDN kernels: microseconds a layer against tree size, with the memory roofline."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from probe_figures import BACKENDS, PAPER
from probe_tables import paper_kernels

# one layer of the paper's target, as the run times it
HEADS, VALUE_HEADS, DIM = 16, 48, 128
MARKERS = {"fused_cuda": "D", "fused_triton": "o", "recurrent_triton": "s"}
CAPTION = (
    "GDN tree verification on {card}: microseconds a layer against verified rows T (random trees, medians of {n} "
    "replays of CUDA graphs) and the ratio of the per-branch recurrence to each kernel. Grey: paper (B200). "
    "Dotted: the bytes that a layer must at least read and write, at the {bandwidth:.2f} TB/s of a copy on this card."
)


def layer_bytes(rows: int) -> int:
    """Return the bytes that verification must move for one layer: state and inputs in once, out and u out once.

    State and gates are float32, q, k and v bfloat16, out and u float32.
    """
    state = VALUE_HEADS * DIM * DIM * 4
    inputs = 2 * HEADS * DIM * 2 + VALUE_HEADS * DIM * 2 + 2 * VALUE_HEADS * 4
    return state + rows * (inputs + 2 * VALUE_HEADS * DIM * 4)


def roofline(rows: int, terabytes_a_second: float) -> float:
    """Return the microseconds that moving `layer_bytes` takes."""
    return layer_bytes(rows) / terabytes_a_second / 1e6


def draw(table: pd.DataFrame, bandwidth: float) -> plt.Figure:
    """Return times beside ratios; `table` is `kernel_runs.kernel_table`."""
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    table = table[(table["shape"] == "random") & table["arm"].isin(MARKERS)]
    for arm, part in table.groupby("arm", sort=False):
        style = {"color": BACKENDS[arm][0], "marker": MARKERS[arm], "lw": 1.4, "ms": 5, "label": BACKENDS[arm][1]}
        times.plot(part["rows"], part["us"], **style)
        if arm != "recurrent_triton":
            ratios.plot(part["rows"], part["ratio"], **style)
    rows, paper = sorted(table["rows"].unique()), paper_kernels()
    sizes = list(paper)
    times.plot(rows, [roofline(count, bandwidth) for count in rows], color="0.2", ls=":", label="memory roofline")
    recurrent = [row["recurrent"] for row in paper.values()]
    times.plot(sizes, recurrent, color=PAPER, ls="--", label="paper, recurrence (B200)")
    times.plot(sizes, [row["fused"] for row in paper.values()], color=PAPER, ls="-.", label="paper, fused (B200)")
    ratios.plot(sizes, [row["ratio"] for row in paper.values()], color=PAPER, ls="-.")
    for axis, label in ((times, "microseconds a layer"), (ratios, "recurrence / kernel")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([16, 32, 64, 128], labels=["16", "32", "64", "128"])
        axis.minorticks_off()
        axis.set(xlabel="verified rows T, the root included", ylabel=label)
    ratios.set_yticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def bandwidth_of(folder: Path) -> float:
    """Return the terabytes a second that the run's copy reached."""
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["copy_tb_s"]
