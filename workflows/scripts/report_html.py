"""Pieces of the report page: style, tables with intervals, links to where a number comes from."""

import html
import math
import re

import pandas as pd

# colours of the four statuses, with a sign each: never colour alone
SIGNS = {"pass": "✓", "fail": "✗", "open": "○", "not comparable": "≠", "yes": "✓", "no": "✗"}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #ffffff; --line: #d5dbe1; --band: #f4f6f8;
  --link: #00598c; --good: #00664b; --bad: #a63a00; --open: #6b4c9a; --chip: #eceff2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ed; --soft: #9aa5b1; --page: #14181d; --line: #343b44; --band: #1b2128; --link: #6cb8e6;
    --good: #4fc3a1; --bad: #f0a070; --open: #bda3e0; --chip: #262d35; }
  figure img { filter: invert(0.915) hue-rotate(180deg); } }
* { box-sizing: border-box; }
html { scroll-padding-top: 5rem; }
body { margin: 0 auto; max-width: 74rem; padding: 0 1rem 5rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
a { color: var(--link); text-decoration-thickness: 1px; text-underline-offset: .15em; }
header { padding: 1.5rem 0 .5rem; } h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p, li, summary { max-width: 46rem; } .soft, figcaption, caption { color: var(--soft); font-size: .875rem; }
nav { position: sticky; top: 0; z-index: 2; margin: 0 -1rem; padding: .5rem 1rem; background: var(--page);
  border-bottom: 1px solid var(--line); font-size: .9rem; }
nav a { display: inline-block; padding: .15rem 0; margin-right: 1.1rem; text-decoration: none; }
caption { caption-side: top; text-align: left; padding-bottom: .4rem;
  position: sticky; left: 0; width: min(46rem, calc(100vw - 2rem)); white-space: normal; }
.scroll { overflow-x: auto; margin: .75rem 0 1.25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .32rem .9rem .32rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: .8rem; } tbody tr:hover { background: var(--band); }
td.number, th.number { text-align: right; } td > .soft { font-size: .85em; }
td.long { white-space: normal; min-width: 10.5rem; }
.ci { color: var(--soft); font-size: .8em; margin-left: .35em; }
.chip { display: inline-block; padding: 0 .5em; border-radius: .7em; background: var(--chip); white-space: nowrap; }
.pass, .yes { color: var(--good); } .fail, .no { color: var(--bad); } .open { color: var(--open); }
figure { margin: 1.75rem 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
details { margin: .5rem 0; } summary { cursor: pointer; } details > .scroll { margin: .5rem 0 1.5rem; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; align-items: center; margin: .5rem 0; }
.controls label { max-width: 100%; } .controls label select { display: block; width: 100%; }
.controls select, .controls button { font: inherit; color: var(--ink); background: var(--chip); padding: .15rem .6rem;
  border: 1px solid var(--line); border-radius: 4px; max-width: 100%; } .controls button:disabled { opacity: .45; }
.stepper { display: inline-flex; gap: .5rem; align-items: center; } .controls input { accent-color: var(--link); }
.tree { overflow: auto; max-height: 34rem; border: 1px solid var(--line); border-radius: 4px; padding: .25rem; }
:is(a, button, select, input, summary, .tree, .scroll):focus-visible { outline: 2px solid var(--link);
  outline-offset: 1px; }
.tree svg { display: block; font: 12px system-ui, sans-serif; } .tree .edge { fill: none; stroke: var(--line); }
.tree .edge.on { stroke: var(--good); stroke-width: 3; } .tree .node { fill: var(--soft); cursor: pointer; }
.tree .node.on { fill: var(--good); font-weight: 600; } 
.tree .node text { fill: var(--ink); stroke: var(--page); stroke-width: 4px; paint-order: stroke; }
.tree .node.picked text { text-decoration: underline; } .tree .node.picked :is(circle, path) { stroke: var(--ink);
  stroke-width: 2; }
code { font-size: .85em; overflow-wrap: anywhere; } dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .2rem 1rem; font-size: .9rem; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  nav { overflow-x: auto; white-space: nowrap; } figure img { max-width: none; width: 44rem; }
  body { font-size: .95rem; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
  table.cards thead { display: none; }
  table.cards, table.cards tbody, table.cards tr, table.cards td { display: block; }
  table.cards tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  table.cards td { border: 0; padding: .05rem 0 .05rem 9.5rem; text-align: left; white-space: normal; min-width: 0; }
  table.cards td[data-name]::before { content: attr(data-name) " "; color: var(--soft); font-size: .85em;
    display: inline-block; width: 9.5rem; margin-left: -9.5rem; }
  table.cards td:is([data-name="setting"], [data-name="method"], [data-name="pair"], [data-name="prompt set"],
    [data-name="item of the paper"], [data-name="type"]) { display: inline-block; font-weight: 600;
    margin-right: .6rem; }
  table.cards td:is([data-name="setting"], [data-name="method"], [data-name="pair"], [data-name="prompt set"],
    [data-name="item of the paper"], [data-name="type"], [data-name="number"], [data-name="remarks"]) {
    padding-left: 0; } table.cards td:is([data-name="setting"], [data-name="method"], [data-name="pair"],
    [data-name="prompt set"], [data-name="item of the paper"], [data-name="type"], [data-name="number"],
    [data-name="remarks"])::before { content: none; }
  table.cards td:empty:empty, table.cards td[data-name="variant"] { display: none; } }
@media print { nav, .controls { display: none; } .tree { max-height: none; overflow: hidden; }
  details > *:not(summary) { display: block; } body { max-width: none; }
  figure, tr { break-inside: avoid; } a { color: inherit; text-decoration: none; } }
"""


def anchor(*parts: str) -> str:
    """Return an id that a link can name."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower()).strip("-")


def chip(status: str, text: str | None = None) -> str:
    """Return a status with its sign."""
    name = status.split()[0]
    return f'<span class="chip {name}">{SIGNS.get(status, "")} {html.escape(text or status)}</span>'


def number(value, digits: int = 3) -> str:
    """Return a number as a reader wants it: a few digits, no exponent where none is needed, empty for missing."""
    if isinstance(value, str):
        return html.escape(value)
    if value is None or pd.isna(value):
        return ""
    if math.isinf(value):
        return f"{value:g}"
    if isinstance(value, bool) or float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    size = abs(value)
    if size < 5e-4:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - (0 if size < 1 else len(str(int(size))) - 1))}f}"


def temperature(setting: str) -> str:
    """Return a setting as a reader says it."""
    value, _, think = setting.removeprefix("t").partition("-")
    return f"T = {value}" + (", reasoning on" if think else "")


def image(text: str, source: str) -> str:
    """Return an image with its text; on a narrow screen it keeps its size and scrolls."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="figure: {html.escape(text[:60])}">'
        f'<img alt="{html.escape(text)}" src="{source}"></div>'
    )


def with_interval(value, low, high) -> str:
    """Return value and interval in one cell."""
    text = number(value)
    if not text or any(end is None or pd.isna(end) for end in (low, high)):
        return text
    return f'{text}<span class="ci">[{number(float(low))}, {number(float(high))}]</span>'


def table(head: list[str], rows: list[list[str]], *, caption: str = "", numbers=(), cards: bool = False) -> str:
    """Return a table of ready-made cells; it scrolls sideways on a narrow screen, or is laid out as cards there.

    `numbers` names the columns that are set flush right.
    """
    kinds = ["number" if name in numbers else "" for name in head]
    top = "".join(
        _element("th", kind, html.escape(name), ' scope="col"') for name, kind in zip(head, kinds, strict=True)
    )
    body = ""
    for row in rows:
        cells = zip(head, kinds, row, strict=True)
        body += "<tr>" + "".join(_cell(name, kind, text) for name, kind, text in cells) + "</tr>"
    label = html.escape(caption[:60] or ", ".join(head[:4]))
    kind = ' class="cards"' if cards else ""
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{kind}>{above}'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plain_table(frame: pd.DataFrame, caption: str) -> str:
    """Return a frame of text as a table; columns of numbers are set flush right."""
    pattern = re.compile(r"-?[\d.,e+-]*( \[.*\])?")
    numbers = [name for name in frame if all(pattern.fullmatch(str(text)) for text in frame[name])]
    rows = [[html.escape(str(cell)) for cell in row] for row in frame.values.tolist()]
    return table(list(frame.columns), rows, caption=caption, numbers=numbers)


def facts(pairs: dict[str, str]) -> str:
    """Return names with their values; values are HTML."""
    return "<dl>" + "".join(f"<dt>{html.escape(name)}</dt><dd>{value}</dd>" for name, value in pairs.items()) + "</dl>"


def folded(title: str, body: str, *, name: str = "") -> str:
    """Return content behind its title; a link to `name` opens it."""
    return (
        f'<details id="{name}"><summary>{title}</summary>{body}</details>'
        if name
        else (f"<details><summary>{title}</summary>{body}</details>")
    )


def code(text: str) -> str:
    return f"<code>{html.escape(str(text))}</code>"


def _cell(name: str, kind: str, text: str) -> str:
    is_long = not kind and len(re.sub("<[^>]*>", "", text)) > 28
    return _element("td", "long" if is_long else kind, text, f' data-name="{html.escape(name)}"')


def _element(tag: str, kind: str, text: str, more: str = "") -> str:
    return f"<{tag}{more}" + (f' class="{kind}"' if kind else "") + f">{text}</{tag}>"
