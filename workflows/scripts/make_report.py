"""Write a suite's report page: one self-contained HTML file with numbers, figures, what was not run, and provenance."""

import argparse
import base64
import html
import json
import sys
from pathlib import Path

import pandas as pd
from make_tables import TITLES, readable

from baselines.suite import FIGURE_TABLES
from tfm.manifest import write_atomic

DESCRIPTION = """
Reads plan.json, manifest.json and, beside them, the tables, figures, compare.csv and summary.json. Writes --out, a page
that needs no script and no network. Last line of stdout: one JSON object.
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff; --line: #d0d7de; --band: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --page: #14181d; --line: #343b44; --band: #1d232a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1rem 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, li { max-width: 46rem; } .soft, figcaption, caption { color: var(--soft); font-size: .875rem; }
caption { caption-side: top; text-align: left; padding-bottom: .4rem;
  position: sticky; left: 0; width: min(46rem, calc(100vw - 2rem)); }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid #0072b2; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.long { white-space: normal; min-width: 16rem; } tbody tr:nth-child(even) { background: var(--band); }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
details { margin: .75rem 0; } summary { cursor: pointer; } code { font-size: .85em; overflow-wrap: anywhere; }
"""
HEADLINE = ["variant", "setting", "tok_s", "speedup", "tau", "accepted", "n"]


def page(folder: Path, plan: dict, manifest: dict) -> str:
    """Return the HTML of a suite's report."""
    config = plan["config"]
    title = html.escape(config["title"])
    devices = html.escape(", ".join(sorted({device["name"] for device in manifest["devices"]})))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f'<p class="soft">Suite <code>{config["suite"]}</code>, {len(plan["cells"])} cells on {devices}.</p>',
            *headline(folder, config),
            *figures(folder, config),
            *details(folder, config),
            *comparison(folder),
            *not_run(config, manifest),
            *provenance(manifest),
            "</body></html>",
        ]
    )


def headline(folder: Path, config: dict) -> list[str]:
    """Return the short headline table and the paired differences in words."""
    if "headline" not in config["tables"]:
        return []
    frame = readable(pd.read_csv(folder / "tables/headline.csv"))
    summary = json.loads((folder / "summary.json").read_text())
    lines = []
    for name, entry in summary.items():
        if name.startswith("diff_accepted_") and entry["value"] is not None:
            one, other, setting = name.removeprefix("diff_accepted_").split("_", 2)
            above = "above zero" if (entry["low"] or 0) > 0 else "not above zero"
            lines.append(
                f"<li>{one} over {other} at {setting}: {entry['value']:+.3f} accepted drafts a step "
                f"[{_shown(entry['low'])}, {_shown(entry['high'])}], n = {entry['n']}, {above}</li>"
            )
    notes = [f"<p>Paired differences, macro over sets, 95 % intervals:</p><ul>{''.join(lines)}</ul>"] if lines else []
    columns = [column for column in HEADLINE if column in frame]
    return ["<h2>Headline</h2>", table(frame[columns], _caption(folder, "headline")), *notes]


def figures(folder: Path, config: dict) -> list[str]:
    """Return every figure inline with its own caption; the long one stands once, at the table."""
    parts = ["<h2>Figures</h2>"]
    for name in config["figures"]:
        data = base64.b64encode((folder / f"figures/{name}.svg").read_bytes()).decode()
        short = (folder / f"figures/{name}.txt").read_text().partition("\n")[0]
        source = f"<code>tables/{FIGURE_TABLES[name]}.csv</code>"
        text = f"{html.escape(short)} Counts and conditions: under Tables, {source}."
        alt = html.escape(short.removesuffix("."))
        image = f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{text}</figcaption></figure>")
    return parts


def details(folder: Path, config: dict) -> list[str]:
    """Return every table in full, folded."""
    parts = ["<h2>Tables</h2>"]
    for name in config["tables"]:
        body = table(readable(pd.read_csv(folder / f"tables/{name}.csv")), _caption(folder, name))
        parts.append(f"<details><summary>{TITLES[name]} (<code>tables/{name}.csv</code>)</summary>{body}</details>")
    return parts


def comparison(folder: Path) -> list[str]:
    """Return the table beside the paper's numbers."""
    frame = readable(pd.read_csv(folder / "compare.csv").rename(columns={"low": "ours_low", "high": "ours_high"}))
    return [
        "<h2>Beside the paper</h2>",
        table(frame, "Items of the paper with its value, ours, and whether they compare."),
    ]


def not_run(config: dict, manifest: dict) -> list[str]:
    """Return what this suite leaves open and which prompts were skipped, each with its reason."""
    lines = [
        f"<li>open: {html.escape(item['item'])}; needs {html.escape(item['needs'])}</li>" for item in config["open"]
    ]
    for name, prompts in manifest["prompts"].items():
        lines += [
            f"<li>skipped: {html.escape(str(skip['id']))} of {html.escape(name)}: {html.escape(skip['reason'])}</li>"
            for skip in prompts.get("skipped", [])
        ]
    return ["<h2>What was not run</h2>", f"<ul>{''.join(lines) or '<li>nothing was left out</li>'}</ul>"]


def provenance(manifest: dict) -> list[str]:
    """Return code, machines, weights, prompts and digests."""
    rows = [{"what": "machine", "value": json.dumps(device)} for device in manifest["devices"]]
    rows += [{"what": "environment", "value": json.dumps(facts)} for facts in manifest["environments"]]
    weights = {part: sha for cell in manifest["cells"].values() for part, sha in cell["weights"].items()}
    rows += [{"what": f"weights, {part}", "value": f"sha256 {sha}"} for part, sha in sorted(weights.items())]
    for name, prompts in manifest["prompts"].items():
        text = f"{prompts['n']} prompts, sha256 {prompts['prompts_sha256']}"
        rows.append({"what": f"prompts, {name}", "value": text})
    cells = [
        {
            "cell": path,
            "seconds": cell["seconds"],
            "source": cell["source_digest"][:12],
            "digest": cell["cell_digest"][:12],
        }
        for path, cell in manifest["cells"].items()
    ]
    listing = table(pd.DataFrame(cells), "Cells and digests.")
    return [
        "<h2>Where the numbers come from</h2>",
        "<p>Every number is a function of the cells' parquet files; <code>manifest.json</code> holds their SHA-256. "
        "One cell again: <code>snakemake --cores all -R &lt;cell&gt;/requests.parquet</code></p>",
        table(pd.DataFrame(rows), "Code, machine, weights and prompts."),
        f"<details><summary>All {len(cells)} cells</summary>{listing}</details>",
    ]


def table(frame: pd.DataFrame, caption: str) -> str:
    """Return a table that scrolls sideways on a narrow screen."""
    head = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in frame.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in frame.astype(str).values.tolist())
    text = html.escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption[:60])}"><table>'
        f"<caption>{text}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--manifest", required=True, type=Path, help="manifest.json")
    parser.add_argument("--out", required=True, type=Path, help="report.html")
    options = parser.parse_args()
    plan, manifest = (json.loads(path.read_text()) for path in (options.plan, options.manifest))
    text = page(options.plan.parent, plan, manifest)
    write_atomic(options.out, text.encode())
    print(json.dumps({"report": str(options.out), "bytes": len(text)}))
    return 0


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > 40 else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _caption(folder: Path, name: str) -> str:
    return json.loads((folder / "tables/captions.json").read_text())[name]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


if __name__ == "__main__":
    sys.exit(main())
