"""Published records in few bytes: read back value for value, figures with the same marks at the same places."""

import io
import re
import sys
from xml.etree import ElementTree

import matplotlib
import pyarrow as pa
import pytest
from workflow_runs import ROOT

matplotlib.use("Agg")
sys.path.insert(0, str(ROOT / "workflows/scripts"))
import matplotlib.pyplot as plt
from make_figures import save
from packing import read_packed, reduced, whole, write_packed
from small_svg import SVG, small
from tree_steps import REQUESTS, STEPS

from tfm.cells import KINDS, to_tables
from tfm.trace import RequestTrace, StepTrace, TreeNode


def step(number: int, context: int, drafts: int, emitted: int) -> StepTrace:
    """A pass over a chain of 15 whose rule accepts `drafts`; the text takes `emitted` of its tokens."""
    return StepTrace(number, context, 16, 15, min(drafts, emitted), drafts, emitted, 0.1 + drafts)


def text(name: str, prompt: int, accepted: list[int], *, cut: int = 0) -> RequestTrace:
    """A request whose steps accept so many drafts each; `cut` of the last one's tokens are beyond the limit."""
    steps, length = [], 1
    for number, drafts in enumerate(accepted):
        emitted = drafts + 1 - (cut if number == len(accepted) - 1 else 0)
        steps.append(step(number, prompt + length, drafts, emitted))
        length += emitted
    nodes = [TreeNode(number, 0, -1, 5, 0.0, 0, True) for number in range(len(accepted))]
    return RequestTrace(
        id=name,
        index=3,
        prompt_tokens=prompt,
        output_tokens=list(range(length)),
        finish_reason="length",
        prefill_us=None,
        decode_us=None,
        steps=steps,
        trees=nodes,
    )


@pytest.fixture
def tables() -> dict[str, pa.Table]:
    """Two cells: texts with a cut last step, one whose only token came at prefill, and more than a report shows."""
    cells = [
        [text("a", 9, [3, 0, 15]), text("b", 4, []), text("c", 5, [2, 7], cut=4)],
        [text(f"r{i}", 7 + i, [1] * (STEPS + 2), cut=2) for i in range(REQUESTS + 1)],
    ]
    parts = [to_tables(traces) for traces in cells]
    return {
        kind: pa.concat_tables(
            part[kind].append_column("cell", pa.array([i] * len(part[kind]), pa.int32()))
            for i, part in enumerate(parts)
        )
        for kind in KINDS
    }


def test_what_is_left_out_comes_back_value_for_value(tables):
    kept = reduced(tables)
    assert set(kept["steps"].column_names).isdisjoint({"step", "context", "accepted", "committed"})
    assert set(kept["requests"].column_names).isdisjoint({"output_sha256", "new_tokens", "steps"})
    again = whole(kept)
    for kind in ("requests", "steps"):
        assert again[kind].combine_chunks().equals(tables[kind].combine_chunks()), kind


@pytest.mark.parametrize("name", ["context", "accepted", "committed", "step"])
def test_a_column_that_does_not_follow_stays(tables, name):
    # a server's merged chunks leave the context unknown, another counting could differ in one step
    column = tables["steps"][name].to_pylist()
    column[2] = None if name == "context" else column[2] + 1
    place = tables["steps"].column_names.index(name)
    tables["steps"] = tables["steps"].set_column(place, name, pa.array(column, pa.int32()))
    kept = reduced(tables)
    assert kept["steps"][name].to_pylist() == column
    assert whole(kept)["steps"].combine_chunks().equals(tables["steps"].combine_chunks())


def test_trees_are_cut_to_what_a_report_shows(tables):
    kept = reduced(tables)["trees"].to_pandas()
    assert kept["request"].max() == REQUESTS - 1 and kept["step"].max() == STEPS - 1
    shown = tables["trees"].to_pandas().query(f"request < {REQUESTS} and step < {STEPS}")
    assert len(kept) == len(shown) < len(tables["trees"])


def test_packed_json_is_the_same_bytes_each_time_and_damage_is_an_error(tmp_path):
    value = {"b": [1.5, None], "a": "x"}
    write_packed(tmp_path / "one.json.gz", value)
    write_packed(tmp_path / "two.json.gz", dict(reversed(value.items())))
    data = (tmp_path / "one.json.gz").read_bytes()
    assert data == (tmp_path / "two.json.gz").read_bytes() and read_packed(tmp_path / "one.json.gz") == value
    for damaged in (data[:-9], data[:12] + b"\xff" * 4 + data[16:], b"{}", b""):
        (tmp_path / "one.json.gz").write_bytes(damaged)
        with pytest.raises(ValueError):
            read_packed(tmp_path / "one.json.gz")


@pytest.fixture
def svg() -> str:
    """A figure with bars, error bars, markers, dashes and text, as matplotlib writes it."""
    figure, axis = plt.subplots()
    axis.errorbar([1, 2, 3], [1, 4, 2], [0.5, 0.25, 1], marker="o", capsize=2, label="one")
    axis.errorbar([1, 2, 3], [2, 3, 1], [0.1, 0.3, 0.2], marker="s", capsize=2, label="two")
    axis.bar([1, 2], [0.5, 1], color="#e69f00")
    axis.plot([1, 3], [1, 1], linestyle="--")
    axis.legend()
    sink = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(sink, format="svg", metadata={"Date": None})
    plt.close(figure)
    return sink.getvalue()


def marks(svg: str) -> tuple[list[tuple], list[float]]:
    """Return every segment, marker and word with its look, classes and groups resolved, and all their coordinates."""
    root = ElementTree.fromstring(svg)
    sheet = root.find(f"{{{SVG}}}defs/{{{SVG}}}style").text
    classes = dict(re.findall(r"\.(c\d+)\{([^}]*)\}", sheet))
    shapes = {element.get("id"): element.get("d") for element in root.iter() if element.get("id")}
    found, places = [], []

    def put(*words: str | None) -> None:
        places.extend(float(number) for text in words for number in re.findall(r"-?\d+(?:\.\d+)?", text or ""))

    def walk(element: ElementTree.Element, look: dict, hidden: bool) -> None:
        text = element.get("style") or classes.get(element.get("class"), "")
        mine = look | dict(re.findall(r"([\w-]+):\s*([^;]+)", text))
        hidden = hidden or element.tag == f"{{{SVG}}}defs"
        words = tuple(sorted((key, value) for key, value in mine.items() if key != "clip-path"))
        if not hidden and element.tag == f"{{{SVG}}}path":
            for part in filter(None, re.split(r"(?=M)", element.get("d"))):
                found.append(("path", "".join(re.findall("[A-Za-z]", part)), words))
                put(part)
        elif not hidden and element.tag == f"{{{SVG}}}use":
            shape = shapes[element.get("{http://www.w3.org/1999/xlink}href")[1:]]
            found.append(("use", words))
            put(shape, element.get("x"), element.get("y"))
        elif not hidden and element.tag == f"{{{SVG}}}text":
            found.append(("text", element.text, words))
            put(element.get("transform"))
        for child in element:
            walk(child, mine, hidden)

    walk(root, {}, False)
    return found, places


def test_a_small_svg_has_the_same_marks_at_the_same_places_in_less_than_half_the_bytes(svg):
    again = small(svg)
    looks, places = marks(svg)
    assert len(looks) > 40 and marks(again)[0] == looks
    assert marks(again)[1] == pytest.approx(places, abs=0.0051)  # a hundredth of a point, rounded
    assert len(again) < len(svg) / 2 and small(svg) == again
    references = set(re.findall(r"#([\w.]+)[\")]", again)) - set(re.findall(r"#[0-9a-f]{6}\b", again))
    assert references == set(re.findall(r'id="(\w+)"', again))


def test_every_figure_is_saved_small(tmp_path):
    figure, axis = plt.subplots()
    axis.plot([0, 1], [1, 0])
    save(figure, tmp_path, "line", "a line")
    assert "<metadata" not in (tmp_path / "line.svg").read_text() and (tmp_path / "line.pdf").stat().st_size > 1000
