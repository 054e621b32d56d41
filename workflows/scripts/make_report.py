"""Write a suite's report page: one self-contained HTML file with numbers, figures, what is open, and provenance."""

import argparse
import base64
import html
import json
import sys
from pathlib import Path

import pandas as pd
from captions import TITLES
from input_errors import told
from input_files import read_manifest, read_plan, read_summary, read_table
from make_tables import readable
from report_arms import by_domain, configurations, viewer
from report_html import (
    STYLE,
    anchor,
    chip,
    code,
    facts,
    folded,
    image,
    number,
    plain_table,
    table,
    temperature,
    with_interval,
)
from tree_steps import traced_cells, trees_of

from baselines.suite import FIGURE_TABLES, setting_name
from tfm.json_shape import read_object
from tfm.manifest import sha256_file, write_atomic

DESCRIPTION = """
Reads plan.json, manifest.json and, beside them, the tables, figures, compare.csv and summary.json, and the trees of the
cells that recorded them. Writes --out, a page that needs no network; without a script all but the tree viewer is there.
Last line of stdout: one JSON object.
"""
COMPARED = ("row", "what", "item", "unit", "paper", "ours", "low", "high", "n", "status", "reason", "source")
REMAKE = "make it with make_tables.py"
METHODS = {"ar": "autoregressive", "dflash": "DFlash chain", "ddtree": "DDTree", "dartree": "DARTree"}
METHODS |= {"tfm": "DFlash-TfM", "headchain": "head's chain", "headddtree": "DDTree on the head's chain"}
METHODS |= {"adaptive": "DFlash-TfM, adaptive budget"}
METHODS |= {"dartfixed": "DARTree, fixed", "heap": "sequential heap", "overgrown": "overgrown tree"}
SECTIONS = {
    "headline": "Headline",
    "lossless": "Losslessness",
    "figures": "Figures",
    "sets": "Chat, maths, code",
    "trees": "Draft trees",
    "methods": "How each method ran",
    "paper": "Beside the paper",
    "doubts": "What to doubt",
    "open": "What was not run",
    "tables": "Tables",
    "source": "Where the numbers come from",
}


def page(folder: Path, plan: dict, manifest: dict, trees: list[dict]) -> str:
    """Return the HTML of a suite's report; `trees` is what tree_steps.trees_of found."""
    config, title = plan["config"], html.escape(plan["config"]["title"])
    parts = {
        "headline": headline(folder, config),
        "lossless": lossless(folder, config),
        "figures": figures(folder, config),
        "sets": by_domain(folder, config, METHODS),
        "trees": viewer(trees),
        "methods": configurations(plan, METHODS),
        "paper": comparison(folder),
        "doubts": doubts(folder, config),
        "open": not_run(config, manifest),
        "tables": details(folder, config, manifest),
        "source": provenance(manifest),
    }
    parts = {name: body for name, body in parts.items() if body}
    links = "".join(f'<a href="#{name}">{SECTIONS[name]}</a>' for name in parts)
    sections = [
        f'<section id="{name}"><h2>{SECTIONS[name]}</h2>{"".join(body)}</section>' for name, body in parts.items()
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<header><h1>{title}</h1>{origin(plan, manifest)}</header><nav aria-label='sections'>{links}</nav>",
            "<main>",
            *sections,
            "</main></body></html>",
        ]
    )


def check_outputs(folder: Path, manifest: dict) -> None:
    """Raise ValueError unless the suite's files are those that its manifest names: half a table looks like a table."""
    for name, digest in manifest["outputs"].items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != digest:
            what = "is not the file that the manifest names" if path.exists() else "is gone"
            raise ValueError(f"{path} {what}; make it again: snakemake --cores all --force {path}")


def origin(plan: dict, manifest: dict) -> str:
    """Return in one line what was run where, when and by which code."""
    config = plan["config"]
    devices = html.escape(", ".join(sorted({device["name"] for device in manifest["devices"]})))
    commits = sorted({str(facts["git"]["commit"])[:10] for facts in manifest["environments"]})
    days = sorted({cell["ended"][:10] for cell in manifest["cells"].values()})
    return (
        f'<p class="soft">Suite {code(config["suite"])}: {len(plan["cells"])} cells on {devices}, target '
        f"{html.escape(config['family'])}, {config['dtype']}, {' to '.join(sorted({*days[:1], *days[-1:]}))}, code "
        f"{', '.join(map(code, commits))}. Every number is a link away from the cells that it was computed from.</p>"
    )


def headline(folder: Path, config: dict) -> list[str]:
    """Return the result in words, the headline table with intervals, and the paired differences."""
    if "headline" not in config["tables"]:
        return []
    frame = read_table(folder / "tables/headline.csv", "variant", "setting")
    summary = read_summary(folder / "summary.json")
    rows = []
    for row in frame.to_dict("records"):
        method = row["variant"].split("-")[0]
        link = f'<a href="#{anchor("cells", row["variant"], row["setting"])}">{METHODS[method]}</a>'
        values = [with_interval(row.get(key), row.get(f"{key}_low"), row.get(f"{key}_high")) for key in COLUMNS]
        same = "" if pd.isna(row.get("compared")) else f"{row['same_as_ar']:.0f} of {row['compared']:.0f}"
        notes = "; ".join(str(row[key]) for key in ("flag", "reason") if key in row and not pd.isna(row[key]))
        rows.append([temperature(row["setting"]), link, code(row["variant"]), *values, same, number(row.get("n"))])
        rows[-1].append(html.escape(notes))
    head = ["setting", "method", "variant", *COLUMNS.values(), "same as ar", "prompts", "notes"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    numbers = [*COLUMNS.values(), "prompts"]
    note = (
        "tau: new tokens a step, the bonus token included; accepted: drafts a step without it. Macro over prompt sets, "
        "95 % intervals over prompts. A method's name leads to its cells; exact definitions stand under Tables."
    )
    return [in_words(summary, config), table(head, rows, caption=note, numbers=numbers, cards=True), *pairs(folder)]


COLUMNS = {"tau": "tau", "accepted": "accepted", "tok_s": "tokens/s", "speedup": "speedup over ar"}


def in_words(summary: dict, config: dict) -> str:
    """Return the main result as a sentence, from the summary alone."""
    setting = setting_name(max(config["temperatures"]), reasoning=config["reasoning"][0])
    mark = setting.upper().replace("-", "_")
    tau = summary.get(f"tau_tfm_{mark}") or {}
    if tau.get("value") is None:
        return ""
    text = f"At {temperature(setting)} DFlash-TfM emits {_said(tau)} tokens a step"
    ratios = [(f"ratio_tau_tfm_{other}_{mark}", METHODS[other]) for other in ("dflash", "ddtree", "dartree")]
    known = [(_said(summary[key]), name) for key, name in ratios if (summary.get(key) or {}).get("value") is not None]
    text += ", " + " and ".join(f"{value} times the {name}'s" for value, name in known) if known else ""
    speed = summary.get(f"speedup_tfm_{mark}") or {}
    if speed.get("value") is not None:
        text += f"; its speed is {_said(speed)} times autoregressive decoding's on this machine"
    return f"<p>{text}.</p>"


def pairs(folder: Path) -> list[str]:
    """Return the paired differences between methods, macro over sets."""
    path = folder / "tables/paired.csv"
    if not path.exists():
        return []
    frame = read_table(path)
    if "pair" not in frame:
        return []
    rows = []
    for (setting, pair), part in frame[frame["dataset"] == "macro"].groupby(["setting", "pair"], sort=False):
        one, other = (METHODS[name] for name in pair.split(" - "))
        cells, by_metric = [], part.set_index("metric")
        for metric, kind in (("accepted", "difference"), ("accepted", "ratio"), ("tau", "ratio"), ("tok_s", "ratio")):
            row = by_metric.loc[metric] if metric in by_metric.index else {}
            cells.append(with_interval(row.get(kind), row.get(f"{kind}_low"), row.get(f"{kind}_high")))
        rows.append([temperature(setting), f"{one} over {other}", *cells, number(by_metric["n"].iloc[0])])
    head = ["setting", "pair", "accepted, difference", "accepted, ratio", "tau, ratio", "tokens/s, ratio", "prompts"]
    note = "The same prompts and seeds in both arms, resampled together."
    return ["<h3>Paired on the same prompts</h3>", table(head, rows, caption=note, numbers=head[2:], cards=True)]


def lossless(folder: Path, config: dict) -> list[str]:
    """Return where token identity was measured, what is expected elsewhere, and the command that checks it."""
    summary = read_summary(folder / "summary.json")
    same, rows = summary.get("same_as_ar_share") or {}, []
    for dtype, expected in (
        ("float32", "identical"),
        ("bfloat16", "identical but for near ties of the two best scores"),
    ):
        found = "not measured in this suite"
        if dtype == config["dtype"] and same.get("value") is not None:
            found = f"{round(same['value'] * same['n'])} of {same['n']} outputs identical to ar's"
        rows.append([dtype, found, expected])
    rules = [
        [code(name), with_interval(entry["value"], entry["low"], entry["high"])]
        for name in ("target_only", "traversal", "legacy_traversal")
        if (entry := summary.get(f"excess_{name}"))
    ]
    note = "Accepted drafts a step beyond what any lossless rule can reach; legacy_traversal is lossy and shows it."
    audit = [table(["rule", "excess over the bound"], rules, caption=note, numbers=["excess over the bound"])]
    check = "pytest tests/test_nano.py -k emits_the_tokens_of_ar"
    return [
        "<p>The noise of a token is a function of seed, prompt and position, so that every lossless method emits "
        f"autoregressive decoding's tokens at any temperature. {code(check)} runs the check; in float32 it expects no "
        "difference.</p>",
        table(["type", "measured here", "expected"], rows, cards=True),
        *(audit if rules else []),
    ]


def figures(folder: Path, config: dict) -> list[str]:
    """Return every figure inline with its own caption and a link to the table it is drawn from."""
    parts = []
    for name in config["figures"]:
        data = base64.b64encode((folder / f"figures/{name}.svg").read_bytes()).decode()
        short = (folder / f"figures/{name}.txt").read_text(encoding="utf-8").partition("\n")[0]
        source = FIGURE_TABLES[name]
        link = f'<a href="#{anchor("table", source)}">numbers, counts and conditions</a>'
        picture = image(short.removesuffix("."), f"data:image/svg+xml;base64,{data}")
        text = f"<figcaption>{html.escape(short)} {link}</figcaption>"
        parts.append(f'<figure id="{anchor("figure", name)}">{picture}{text}</figure>')
    return parts


def comparison(folder: Path) -> list[str]:
    """Return the inventory of the paper with its value, ours, and whether they compare."""
    frame = read_table(folder / "compare.csv", *COMPARED)
    counts = "".join(
        f"{chip(status, f'{count} {status}')} " for status, count in frame["status"].value_counts().items()
    )
    reasons = frame.loc[frame["status"] == "not comparable", "reason"]
    common = reasons.mode().iloc[0] if len(reasons) else ""
    rows, last = [], None
    for row in frame.to_dict("records"):
        what = "" if row["row"] == last else f"{row['row']}. {html.escape(row['what'])}"
        last, reason = (
            row["row"],
            "" if pd.isna(row["reason"]) or row["reason"] == common else html.escape(row["reason"]),
        )
        item = code(row["item"]).replace("_", "_<wbr>")
        name = f'{item} <span class="soft">{html.escape(str(row["unit"]))}</span>'
        source = f'<span class="soft">paper: {html.escape(str(row["source"]))}</span>'
        ours = with_interval(row["ours"], row["low"], row["high"])
        remark = "<br>".join(filter(None, [reason, source]))
        rows.append([what, name, _paper(row["paper"]), ours, number(row["n"]), chip(row["status"]), remark])
    head = ["item of the paper", "number", "paper", "ours", "n", "status", "remarks"]
    note = (
        "pass and fail: within the pass rule or not; open: not measured, with what it needs; not comparable: measured, "
        f"but not the paper's configuration{': ' + common if common else ''}. Rules: workflows/config/expected.yaml."
    )
    return [f"<p>{counts}</p>", table(head, rows, caption=note, numbers=["paper", "ours", "n"], cards=True)]


def doubts(folder: Path, config: dict) -> list[str]:
    """Return what a reader should doubt: flags of the sanity checks and of disturbed timings."""
    if "sanity" not in config["tables"]:
        return []
    rows = []
    for row in read_table(folder / "tables/sanity.csv", "check", "value", "limit", "n").to_dict("records"):
        flag, reason = ("" if pd.isna(row.get(key)) else html.escape(str(row[key])) for key in ("flag", "reason"))
        state = chip("fail", "doubt") if flag else chip("open", "not checked") if reason else chip("pass", "fine")
        cells = [html.escape(row["check"]), number(row["value"]), number(row["limit"]), number(row["n"]), state]
        rows.append([*cells, flag or reason])
    head = ["check", "worst value", "limit", "n", "verdict", "why"]
    return [table(head, rows, numbers=["worst value", "limit", "n"], cards=True)]


def details(folder: Path, config: dict, manifest: dict) -> list[str]:
    """Return every table in full, folded, with the SHA-256 of its csv file."""
    named, parts = dict.fromkeys(config["tables"], str), []
    captions = read_object(folder / "tables/captions.json", named, remedy=REMAKE)
    for name in config["tables"]:
        file = f"tables/{name}.csv"
        body = plain_table(readable(read_table(folder / file)), captions[name])
        digest = f'<p class="soft">{code(file)}, sha256 {code(manifest["outputs"].get(file, "unknown"))}</p>'
        parts.append(folded(f"{html.escape(TITLES[name])} ({code(file)})", digest + body, name=anchor("table", name)))
    return parts


def not_run(config: dict, manifest: dict) -> list[str]:
    """Return what this suite leaves open and which prompts were skipped, each with its reason."""
    lines = [f"{html.escape(item['item'])}: needs {html.escape(item['needs'])}" for item in config["open"]]
    for name, prompts in manifest["prompts"].items():
        lines += [
            f"skipped: {html.escape(str(skip['id']))} of {html.escape(name)}: {html.escape(skip['reason'])}"
            for skip in prompts.get("skipped", [])
        ]
        lines += [
            f"used twice: {html.escape(one)} of {html.escape(name)} has the text of {html.escape(first)}"
            for one, first in prompts.get("repeated", {}).items()
        ]
    text = "".join(f"<li>{line}</li>" for line in lines or ["nothing was left out"])
    return [f"<ul>{text}</ul>", '<p class="soft">Items of the paper: <a href="#paper">Beside the paper</a>.</p>']


def provenance(manifest: dict) -> list[str]:
    """Return code, machines, weights, prompts and, by variant and setting, every cell with its digests."""
    pairs = {}
    for device in manifest["devices"]:
        pairs["machine"] = html.escape(", ".join(f"{key} {value}" for key, value in device.items()))
    for facts_ in manifest["environments"]:
        packages = ", ".join(f"{name} {version}" for name, version in facts_["packages"].items())
        dirty = ", with uncommitted changes" if facts_["git"]["dirty"] else ""
        pairs[f"code {str(facts_['git']['commit'])[:10]}"] = html.escape(
            f"commit {facts_['git']['commit']}{dirty}; Python {facts_['python']}, {facts_['system']}; {packages}"
        )
    weights = {part: digest for cell in manifest["cells"].values() for part, digest in cell["weights"].items()}
    pairs |= {f"weights, {part}": f"sha256 {code(digest)}" for part, digest in sorted(weights.items())}
    for name, prompts in manifest["prompts"].items():
        pin = prompts.get("revision") or str(prompts.get("dataset_sha256"))[:16]
        pairs[f"prompts, {name.removesuffix('.manifest.json')}"] = (
            f"{prompts['n']} prompts, sha256 {code(prompts['prompts_sha256'])}; set pinned at {code(pin)}"
        )
    for name, probe in manifest.get("probes", {}).items():
        files = "; ".join(f"{file} sha256 {code(entry['sha256'])}" for file, entry in probe.get("files", {}).items())
        commit = code(str(probe["environment"]["git"]["commit"])[:10])
        pairs[f"beside the cells, {name}"] = f"commit {commit}" + (f"; {files}" if files else "")
    return [
        f"<p>Every number is a function of the cells' parquet files; {code('manifest.json')} holds their SHA-256. "
        f"One cell again: {code('snakemake --cores all -R CELL/requests.parquet')}</p>",
        facts(pairs),
        f"<h3>{len(manifest['cells'])} cells</h3>",
        *_cells(manifest),
    ]


def _cells(manifest: dict) -> list[str]:
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for path, cell in manifest["cells"].items():
        *_, variant, setting, _ = path.split("/")
        digests = [code(cell[key][:12]) for key in ("cell_digest", "source_digest", "prompts_sha256")]
        row = [code(path), number(cell["prompts"]), number(cell["seconds"]), cell["ended"][:16], *digests]
        groups.setdefault((variant, setting), []).append(row)
    head = ["cell", "prompts", "seconds", "ended", "digest", "code", "prompt file"]
    return [
        folded(
            f"{code(variant)} at {temperature(setting)}: {len(rows)} cell{'s' * (len(rows) > 1)}",
            table(head, rows, caption=f"{variant}, {temperature(setting)}: its cells.", numbers=["prompts", "seconds"]),
            name=anchor("cells", variant, setting),
        )
        for (variant, setting), rows in groups.items()
    ]


def _said(entry: dict) -> str:
    ends = entry.get("low"), entry.get("high")
    return number(entry["value"]) + ("" if None in ends else f" [{number(ends[0])}, {number(ends[1])}]")


def _paper(value) -> str:
    """Return the paper's value as it is printed there."""
    if pd.isna(value):
        return ""
    try:
        return f"{float(value):,.12g}"
    except ValueError:
        return html.escape(value)


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--manifest", required=True, type=Path, help="manifest.json")
    parser.add_argument("--out", required=True, type=Path, help="report.html")
    options = parser.parse_args()
    plan, manifest = read_plan(options.plan), read_manifest(options.manifest)
    check_outputs(options.plan.parent, manifest)
    trees = trees_of(traced_cells(plan["cells"]), plan["config"]["weights"])
    text = page(options.plan.parent, plan, manifest, trees)
    write_atomic(options.out, text.encode())
    print(json.dumps({"report": str(options.out), "bytes": len(text)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
