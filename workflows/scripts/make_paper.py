"""Lay a suite's tables out as a paper prints them: LaTeX (booktabs) with the numbers of the csv files."""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from input_errors import told
from input_files import read_plan
from make_tables import in_latex as _tex

from tfm.manifest import write_atomic

DESCRIPTION = """
Reads the csv files of a suite's tables. Writes headline.tex (method, tokens a second, speedup, tau), results.tex (a row
a prompt set and setting, speedup and tau of every method) and kernels.tex (microseconds a layer by tree size) to --out,
those for which the suite has the numbers; they need the package booktabs and are read with \\input. The figures' pdf
files lie beside the tables. Last line of stdout: one JSON object.
"""
NAMES = {"ar": "AR", "dflash": "DFlash", "ddtree": "DDTree", "dartree": "DARTree", "tfm": "DFlash-TfM"}
NAMES |= {"headchain": "head's chain", "headddtree": "chain + DDTree", "dartfixed": "DARTree (fixed)"}
NAMES |= {"heap": "sequential heap", "overgrown": "overgrown"}
MISSING = "--"


def headline(tables: Path, config: dict) -> str | None:
    """Return the headline table: one row a method, settings one under the other."""
    frame, rows = _read(tables, "headline"), []
    if frame is None:
        return None
    for setting, part in frame.groupby("setting", sort=False):
        rows.append(f"\\multicolumn{{5}}{{l}}{{{setting_in_words(setting)}}} \\\\")
        for row in part.to_dict("records"):
            cells = [
                _name(row["variant"]),
                _number(row, "tok_s", 1),
                _times(row, "speedup"),
                _with_interval(row, "tau"),
            ]
            rows.append(_line([*cells, _with_interval(row, "accepted")]))
        rows.append("\\addlinespace")
    head = ["method", "tokens/s", "speedup", "$\\tau$", "accepted drafts"]
    return _table("lrrrr", head, rows[:-1], _note(config, frame), "headline")


def results(tables: Path, config: dict) -> str | None:
    """Return the full results: a row a prompt set and setting, speedup and tau of every method."""
    frame = _read(tables, "per_set")
    if frame is None:
        return None
    methods = [method for method in NAMES if method in set(frame["variant"].map(_method))]
    rows = []
    for setting, part in frame.groupby("setting", sort=False):
        rows.append(f"\\multicolumn{{{1 + 2 * len(methods)}}}{{l}}{{{setting_in_words(setting)}}} \\\\")
        for dataset, of_set in part.groupby("dataset", sort=False):
            by_method = {_method(row["variant"]): row for row in of_set.to_dict("records")}
            cells = [
                text
                for m in methods
                for text in (_times(by_method.get(m, {}), "speedup"), _number(by_method.get(m, {}), "tau", 2))
            ]
            rows.append(_line([_tex(dataset), *cells]))
        rows.append("\\addlinespace")
    names = " & ".join(f"\\multicolumn{{2}}{{c}}{{{NAMES[method]}}}" for method in methods)
    rules = "".join(f"\\cmidrule(lr){{{2 + 2 * i}-{3 + 2 * i}}}" for i in range(len(methods)))
    head = [f"& {names} \\\\ {rules}\nprompt set", *["speedup", "$\\tau$"] * len(methods)]
    return _table("l" + "rr" * len(methods), head, rows[:-1], _note(config, frame), "results")


def kernels(tables: Path, config: dict) -> str | None:
    """Return the kernel table of mixed trees: a row a tree size, microseconds a layer of every backend, and ratios."""
    frame = _read(tables, "kernels")
    if frame is None or "us" not in frame or frame["us"].isna().all():
        return None
    frame = frame[frame["shape"] == ("mixed" if "mixed" in set(frame["shape"]) else frame["shape"].iloc[0])]
    timed = frame.dropna(subset=["us"])
    backends = list(dict.fromkeys(timed["backend"]))
    rows = []
    for count, part in timed.groupby("rows"):
        by_backend = {row["backend"]: row for row in part.to_dict("records")}
        us = [_number(by_backend.get(name, {}), "us", 1) for name in backends]
        rows.append(
            _line([str(int(count)), *us, *(_times(by_backend.get(name, {}), "ratio") for name in backends[1:])])
        )
    ratios = [f"{_tex(backends[0])} / {_tex(name)}" for name in backends[1:]]
    head = ["$T$", *map(_tex, backends), *ratios]
    note = f"Microseconds a layer, suite {config['suite']}."
    return _table("r" * len(head), head, rows, note, "kernels")


LAYOUTS = {"headline": headline, "results": results, "kernels": kernels}


def write_paper(tables: Path, config: dict, out: Path) -> list[str]:
    """Write every table for which the suite has numbers; return their names."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {name: layout(tables, config) for name, layout in LAYOUTS.items()}
    for name, text in texts.items():
        if text is not None:
            write_atomic(out / f"{name}.tex", text.encode())
    return [name for name, text in texts.items() if text is not None]


def setting_in_words(setting: str) -> str:
    """Return a setting as a paper writes it."""
    number, _, think = setting.removeprefix("t").partition("-")
    return f"$T = {number}$" + (", reasoning on" if think else "")


def _read(tables: Path, name: str) -> pd.DataFrame | None:
    path = tables / f"{name}.csv"
    return pd.read_csv(path) if path.exists() else None


def _note(config: dict, frame: pd.DataFrame) -> str:
    device = str(frame["device"].iloc[0])
    what = f"Suite {config['suite']}, target {config['family']}, {device}, budget {config['budget']}"
    return f"{what}, one request at a time." if config["timed"] else f"{what}, not timed."


def _table(columns: str, head: list[str], rows: list[str], caption: str, label: str) -> str:
    lines = [f"% needs \\usepackage{{booktabs}}; made from the csv files of {label}", "\\begin{table}", "\\centering"]
    lines += [f"\\caption{{{_tex(caption)}}}\\label{{tab:{label}}}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule"]
    lines += [" & ".join(head) + " \\\\", "\\midrule", *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _method(variant: str) -> str:
    return variant.partition("-")[0]


def _name(variant: str) -> str:
    return NAMES.get(_method(variant), _tex(variant))


def _number(row: dict, key: str, digits: int) -> str:
    value = row.get(key)
    return MISSING if value is None or pd.isna(value) else f"{value:.{digits}f}"


def _times(row: dict, key: str) -> str:
    text = _number(row, key, 2)
    return text if text == MISSING else f"{text}$\\times$"


def _with_interval(row: dict, key: str) -> str:
    text = _number(row, key, 2)
    low, high = _number(row, f"{key}_low", 2), _number(row, f"{key}_high", 2)
    return text if MISSING in (text, low, high) else f"{text} [{low}, {high}]"


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json of the suite")
    parser.add_argument("--tables", required=True, type=Path, help="folder of the csv files")
    parser.add_argument("--out", required=True, type=Path, help="folder of the .tex files")
    options = parser.parse_args()
    names = write_paper(options.tables, read_plan(options.plan)["config"], options.out)
    print(json.dumps({"paper": names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
