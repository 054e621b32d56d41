"""Sections of the report page about the methods: how each was run, every prompt set apart, and their draft trees."""

import html
from pathlib import Path

import arms
from input_files import read_table
from report_html import code, number, table, temperature, with_interval
from tree_steps import as_json, outline

VIEWER = Path(__file__).with_name("tree_viewer.js")
DOMAINS = {"chat": "Chat", "math": "Maths", "code": "Code"}
NUMBERS = {"tau": "tau", "accepted": "accepted", "tok_s": "tokens/s", "speedup": "speedup over ar"}


def configurations(plan: dict, names: dict[str, str]) -> list[str]:
    """Return how each method was run, tuned or not, and every setting in which they differ."""
    launches, config = arms.launches_of(plan["cells"]), plan["config"]
    if not launches:
        return []
    rows, wrong = [], arms.unfair(launches)
    for method, launch in launches.items():
        keys = [key for key in launch if arms.is_own(method, key) and key not in ("method", "weights")]
        own = ", ".join(f"{key} {launch[key]}" for key in keys if launch[key] is not None)
        state = "on" if launch["cuda_graph"] else "off"
        rows.append(
            [html.escape(names[method]), html.escape(own or "none"), html.escape(arms.tuned(method, config)), state]
        )
        rows[-1].append(str(launch["requests"]))
    head = ["method", "settings of its own", "tuned", "CUDA graphs", "requests at once"]
    verdict = (
        f'<p class="fail">✗ Not a fair comparison: {html.escape("; ".join(wrong))}.</p>'
        if wrong
        else "<p>No setting but the methods' own differs between them, graph capture included.</p>"
    )
    parts = [verdict, table(head, rows, cards=True), *differences(launches, "Every setting that differs")]
    if config.get("servers"):
        flags = {name: values for name, values in config["servers"].items() if name != "common"}
        common = config["servers"].get("common", {})
        launched = {name: {**common, **values} for name, values in flags.items()}
        parts += differences(launched, "Launch flags in which the paper's own servers differ")
    return parts


def differences(launches: dict[str, dict], title: str) -> list[str]:
    """Return the settings that differ as a table; nothing where none does."""
    found = arms.differing(launches)
    rows = [
        [code(key), *(html.escape("none" if values.get(name) is None else str(values[name])) for name in launches)]
        for key, values in found.items()
    ]
    return (
        [f"<h3>{title}</h3>", table(["setting", *launches], rows, caption=f"{title}: its value of each method.")]
        if rows
        else []
    )


def by_domain(folder: Path, config: dict, names: dict[str, str]) -> list[str]:
    """Return the prompt sets of chat, maths and code apart, each with every method; never a mean over all of them."""
    path = folder / "tables/per_set.csv"
    if not path.exists():
        return []
    frame = read_table(path)
    if "domain" not in frame or "tau" not in frame:
        return []
    parts = []
    if len(set(frame["domain"])) == 1:
        parts.append(f'<p class="fail">✗ {html.escape(arms.domain_note(set(frame["domain"])))}.</p>')
    for domain, part in sorted(frame.groupby("domain"), key=lambda one: list(DOMAINS).index(one[0])):
        rows = []
        for row in part.to_dict("records"):
            values = [with_interval(row.get(key), row.get(f"{key}_low"), row.get(f"{key}_high")) for key in NUMBERS]
            method = names[row["variant"].partition("-")[0]]
            rows.append(
                [
                    html.escape(row["dataset"]),
                    temperature(row["setting"]),
                    html.escape(method),
                    *values,
                    number(row.get("n")),
                ]
            )
        head = ["prompt set", "setting", "method", *NUMBERS.values(), "prompts"]
        numbers = [*NUMBERS.values(), "prompts"]
        parts += [
            f"<h3>{DOMAINS[domain]}</h3>",
            table(
                head,
                rows,
                caption=f"{DOMAINS[domain]}, a row a prompt set, setting and method.",
                numbers=numbers,
                cards=True,
            ),
        ]
    return parts


def viewer(trees: list[dict]) -> list[str]:
    """Return the draft trees: a viewer that steps through them, and without a script their accepted paths in words."""
    if not trees:
        return []
    words = "".join(
        f"<li>{code(run['variant'])}, {html.escape(str(run['id']))}, step {i}: {html.escape(outline(step))}</li>"
        for run in trees
        for i, step in enumerate(run["steps"][:2], start=1)
    )
    buttons = (
        '<button type="button" data-part="back" aria-label="step before">←</button>'
        '<input type="range" min="0" value="0" data-part="step" aria-label="step">'
        '<button type="button" data-part="next" aria-label="step after">→</button>'
    )
    return [
        "<p>Recorded trees as they were drafted: a mark's size is the draft's probability given its parent, a diamond "
        "on a thick line was accepted. Click a node, or focus the tree: ← → step, ↑ ↓ node, Home and End.</p>",
        '<div id="tree-viewer" hidden><p class="controls"><label>request <select data-part="run"></select></label> '
        f'<span class="stepper">{buttons}</span></p>',
        '<p data-part="said" aria-live="polite" class="soft"></p>',
        '<div data-part="picture" class="tree" tabindex="0" role="application" '
        'aria-label="draft tree; arrow keys step and walk"></div></div>',
        f"<noscript><ul>{words}</ul></noscript>",
        f'<script type="application/json" id="tree-data">{as_json(trees)}</script>',
        f"<script>{VIEWER.read_text(encoding='utf-8')}</script>",
    ]
