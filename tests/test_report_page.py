"""The report page for everybody: keyboard, screen readers, dark mode, phones; in a browser where there is one."""

import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import report_arms
import report_html
from tree_steps import as_json, outline, traced_cells

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; Debian's package is chromium")
AXE = ROOT / "node_modules/axe-core/axe.min.js"
NO_AXE = f"no {AXE.relative_to(ROOT)}: npm install --no-save --prefix . axe-core@4.14.1"


@pytest.fixture(scope="module")
def page(finished):
    return (finished / "results/nano/report.html").read_text()


class Elements(html.parser.HTMLParser):
    """All elements of a page in order: (tag, attributes, is inside a label)."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self._labels = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._labels += tag == "label"
        self.found.append((tag, dict(attrs), self._labels > 0))

    def handle_endtag(self, tag):
        self._labels -= tag == "label"

    def of(self, *tags):
        return [(tag, attributes, inside) for tag, attributes, inside in self.found if tag in tags]


def test_everything_has_a_name_and_an_order(page):
    elements = Elements(page)
    assert elements.of("html")[0][1]["lang"] == "en" and len(elements.of("title")) == len(elements.of("h1")) == 1
    levels = [int(tag[1]) for tag, *_ in elements.of("h1", "h2", "h3", "h4")]
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False)), levels
    assert all(attributes.get("alt") for _, attributes, _ in elements.of("img"))
    assert all(attributes.get("scope") == "col" for _, attributes, _ in elements.of("th"))
    assert all(inside or attributes.get("aria-label") for _, attributes, inside in elements.of("select", "input"))
    regions = [attributes for _, attributes, _ in elements.found if attributes.get("tabindex") == "0"]
    assert regions and all(attributes.get("role") and attributes.get("aria-label") for attributes in regions)
    names = [attributes["aria-label"] for attributes in regions if attributes["role"] == "region"]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_stands_out_from_every_ground_it_is_set_on(mode):
    light, _, dark = report_html.STYLE.partition("prefers-color-scheme: dark")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))
    colours |= dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", dark.partition("* {")[0])) if mode == "dark" else {}
    for text in ("ink", "soft", "link", "good", "bad", "open"):
        for ground in ("page", "band", "chip"):
            pair = sorted((luminance(colours[text]), luminance(colours[ground])))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, f"{text} on {ground} in {mode}"


TREE = {
    "accepted": 2,
    "nodes": [
        [-1, "a", 1.0, True],
        [0, " b", 0.9, True],
        [0, "<i>", 0.1, False],
        [1, "c\n", 0.5, True],
        [1, "", 0.2, False],
    ],
}
TREES = [
    {"variant": f"tfm-b{n}", "dataset": "set", "setting": "t1", "id": f"p{n}", "steps": [TREE] * (n + 1)}
    for n in (1, 2)
]


def test_the_trees_are_those_that_were_recorded(finished, page):
    import pandas as pd

    plan = json.loads((finished / "results/nano/plan.json").read_text())
    cell = traced_cells(plan["cells"])[0]
    assert cell["variant"] == "tfm-b8-w2-stages"
    shown = json.loads(re.search(r'<script type="application/json" id="tree-data">(.*?)</script>', page, re.DOTALL)[1])
    mine = [run for run in shown if run["variant"] == cell["variant"]]
    rows = pd.read_parquet(finished / cell["path"] / "trees.parquet")
    assert [len(run["steps"]) for run in mine] == rows.groupby("request")["step"].nunique().tolist()
    first = rows[(rows["request"] == 0) & (rows["step"] == 0)].sort_values("node")
    nodes = mine[0]["steps"][0]["nodes"]
    assert [node[0] for node in nodes] == first["parent"].tolist() and [node[3] for node in nodes] == first[
        "accepted"
    ].tolist()
    assert mine[0]["steps"][0]["accepted"] == first["accepted"].sum() - 1


def test_without_a_script_the_trees_are_told_and_text_cannot_end_the_script():
    body = "".join(report_arms.viewer(TREES))
    assert "4 drafts, 2 accepted" in body.partition("<noscript>")[2].partition("</noscript>")[0]
    assert "<i>" not in as_json(TREES) and json.loads(as_json(TREES)) == TREES
    assert outline(TREE) == "4 drafts, 2 accepted: ' bc\\n'" and report_arms.viewer([]) == []


# --- in a browser


def in_browser(folder, script: str, body: str, *, width: int = 1000, flags: tuple[str, ...] = ()):
    """What the body of an async function `script` returns, run in a page of `body` once its own scripts ran."""
    file, style = folder / "page.html", f"<style>{report_html.STYLE}</style>"
    answer = f"(async () => {{{script}}})().then((found) => {{ answer.textContent = JSON.stringify(found) }})"
    head = f"<!doctype html><html lang=en><head><meta charset=utf-8><title>t</title>{style}</head>"
    file.write_text(f"{head}<body>{body}<pre id=answer hidden></pre><script>{answer}</script></body></html>")
    call = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},800", *flags]
    # virtual time: what a script waits for comes at once
    call += ["--virtual-time-budget=120000", "--dump-dom", str(file)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="answer" hidden="">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


WALK = """
const part = (name) => document.querySelector(`[data-part="${name}"]`), seen = [];
const note = () => seen.push([part("said").textContent, part("picture").querySelectorAll("g").length]);
const press = (key) => { part("picture").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); note(); };
note();
["ArrowDown", "ArrowDown", "ArrowUp", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"].forEach(press);
part("run").value = "1"; part("run").dispatchEvent(new Event("change")); note();
part("next").click(); part("next").click(); note();
part("picture").querySelectorAll("g")[2].dispatchEvent(new MouseEvent("click", { bubbles: true })); note();
return { seen, wide: document.documentElement.scrollWidth > window.innerWidth, next: part("next").disabled };
"""


@in_chromium
def test_the_viewer_walks_by_keyboard_and_mouse(tmp_path):
    found = in_browser(tmp_path, WALK, "".join(report_arms.viewer(TREES)), width=500)
    said = [text for text, _ in found["seen"]]
    assert {count for _, count in found["seen"]} == {5} and not found["wide"]
    assert said[0] == "Step 1 of 2: 4 drafts, 2 accepted. root a."
    # down the tree in the order in which it is read: the accepted child and its children come first
    assert "␣b: 0.9 given its parent, accepted" in said[1] and "␣b c⏎: 0.5" in said[2] and "␣b: 0.9" in said[3]
    assert [text[:11] for text in said[4:9]] == [
        "Step 2 of 2",
        "Step 2 of 2",
        "Step 1 of 2",
        "Step 2 of 2",
        "Step 1 of 2",
    ]
    assert said[9].startswith("Step 1 of 3") and said[10].startswith("Step 3 of 3") and found["next"]
    assert "<i>: 0.1 given its parent, not accepted" in said[11]


@in_chromium
def test_the_page_fits_a_phone_and_a_wide_screen(finished, page, tmp_path):
    body = page.partition("<body>")[2].rpartition("</body>")[0]
    script = (
        "return [document.documentElement.scrollWidth - window.innerWidth, document.querySelectorAll('section').length]"
    )
    # Chromium's window is at least 500 wide
    for width in (500, 1600):
        over, sections = in_browser(tmp_path, script, body, width=width)
        assert over <= 0 and sections > 8, f"{over} px too wide at {width}"


CHECK = """
AXE
document.querySelectorAll("details").forEach((one) => { one.open = true; });
PLANT
const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const found = await axe.run(document.body, { runOnly: { type: "tag", values: tags } });
const violations = found.violations.map((one) => `${one.id}: ${one.help}, ${one.nodes[0].html.slice(0, 200)}`);
return { violations, passes: found.passes.length, dark: matchMedia("(prefers-color-scheme: dark)").matches };
"""
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def axe_of(page: str, folder, *, plant: str = "", **options) -> dict:
    """What axe finds on a page whose folded parts are open."""
    body = page.partition("<body>")[2].rpartition("</body>")[0]
    return in_browser(folder, CHECK.replace("PLANT", plant).replace("AXE", AXE.read_text()), body, **options)


@in_chromium
@pytest.mark.skipif(not AXE.exists(), reason=NO_AXE)
@pytest.mark.parametrize(("width", "flags"), [(500, ()), (1600, ()), (1000, DARK)], ids=["narrow", "wide", "dark"])
def test_axe_finds_no_fault_on_the_page(page, tmp_path, width, flags):
    found = axe_of(page, tmp_path, width=width, flags=flags)
    assert found["violations"] == [] and found["passes"] > 25 and found["dark"] is bool(flags)


@in_chromium
@pytest.mark.skipif(not AXE.exists(), reason=NO_AXE)
def test_axe_names_a_planted_fault(page, tmp_path):
    """An image without a text and a text that hardly stands out: the check can fail."""
    plant = 'document.querySelector("figure img").removeAttribute("alt");'
    plant += 'document.querySelector("figcaption").style.color = "#bbb";'
    found = axe_of(page, tmp_path, plant=plant)["violations"]
    assert {text.partition(":")[0] for text in found} >= {"image-alt", "color-contrast"}
