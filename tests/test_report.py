"""The report page: readable alone, every number a link from its source, nothing claimed that was not measured."""

import json
import re
import sys

import pandas as pd
import pytest
from test_tables import EXPECTED
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import make_figures
import make_report
from compare_paper import compare
from report_html import chip, number, plain_table, with_interval


def test_the_page_needs_no_network_and_every_link_has_its_target(finished):
    page = (finished / "results/nano/report.html").read_text()
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page and "<script src" not in page
    assert "@media print" in page and not re.findall(r"(?:src|href)=\"(?!data:|#)|@import|url\(", page)
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    links = re.findall(r'href="#([^"]+)"', page)
    assert set(links) <= set(names) and len(links) > 20


def test_the_page_leads_from_a_headline_row_to_its_cells(finished):
    page = (finished / "results/nano/report.html").read_text()
    facts = json.loads((finished / "results/nano/manifest.json").read_text())
    row = re.search(r'<a href="#(cells-tfm-b8-w2-t1)">DFlash-TfM</a>', page)
    block = page[page.index(f'<details id="{row[1]}">') :].partition("</details>")[0]
    path = "results/nano/cells/torch/nano/sample-math/tfm-b8-w2/t1/seed0"
    assert path in block and facts["cells"][path]["cell_digest"][:12] in block
    for what in ("prompts, sample-math", "weights, weaver", "beside the cells, ceiling", "torch"):
        assert what in page, what
    assert "What was not run" in page and "What to doubt" in page


def write_suite(folder, *, headline: list[dict], summary: dict) -> dict:
    (folder / "tables").mkdir()
    pd.DataFrame(headline).to_csv(folder / "tables/headline.csv", index=False)
    (folder / "summary.json").write_text(json.dumps(summary))
    return {"tables": ["headline"], "temperatures": [0, 1], "reasoning": [False], "dtype": "bfloat16"}


def test_a_slow_down_is_printed_as_it_is(tmp_path):
    """llama.cpp#25792: methods slower than plain decoding were clipped to 1 or left out."""
    row = {"variant": "tfm-b64-w4", "setting": "t1", "speedup": 0.833, "speedup_low": 0.81, "speedup_high": 0.85}
    speed = {"value": 0.833, "low": 0.81, "high": 0.85, "n": 9}
    summary = {"tau_tfm_T1": {**speed, "value": 5.0}, "speedup_tfm_T1": speed}
    config = write_suite(tmp_path, headline=[row | {"n": 9, "compared": 9, "same_as_ar": 9}], summary=summary)
    page = "".join(make_report.headline(tmp_path, config))
    assert '0.83<span class="ci">[0.81, 0.85]</span>' in page and "its speed is 0.83 [0.81, 0.85] times" in page


def test_token_identity_is_claimed_only_for_the_type_it_was_measured_in(tmp_path):
    config = write_suite(
        tmp_path, headline=[{}], summary={"same_as_ar_share": {"value": 0.75, "low": None, "high": None, "n": 8}}
    )
    page = "".join(make_report.lossless(tmp_path, config))
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition("</table>")[0])
    by_type = {re.search(r">(float32|bfloat16)<", row)[1]: row for row in rows[1:]}
    assert "6 of 8 outputs identical" in by_type["bfloat16"] and "near ties" in by_type["bfloat16"]
    assert "not measured in this suite" in by_type["float32"] and "outputs identical" not in by_type["float32"]
    assert "pytest tests/test_nano.py -k emits_the_tokens_of_ar" in page


def test_the_inventory_stands_on_the_page_with_every_status(tmp_path):
    rows = compare(EXPECTED, {"weaver_parameters": {"value": 1}, "tau_tfm_T1": {"value": 2.0}}, "nano")
    pd.DataFrame(rows).to_csv(tmp_path / "compare.csv", index=False)
    page = "".join(make_report.comparison(tmp_path))
    assert all(f"<code>{row['item'].replace('_', '_<wbr>')}</code>" in page for row in rows)
    assert chip("fail") in page and chip("open") in page and "1 is outside: 56694784" in page
    assert page.count("headline table (T = 1") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.833, "0.83"), (3.1415, "3.14"), (192, "192"), (392.8, "393"), (56694784, "56,694,784"), (0.0, "0")]
    + [(2.4e-16, "2.4e-16"), (None, ""), (float("nan"), ""), (-0.0247, "-0.02"), (17.11, "17.1"), (True, "1")]
    + [(float("inf"), "inf"), (float("-inf"), "-inf"), (pd.NA, "")],
)
def test_numbers_are_short_and_small_ones_are_not_zero(value, text):
    assert number(value) == text


def test_an_interval_stands_beside_its_value_and_text_is_escaped():
    assert with_interval(1.5, 1.25, float("nan")) == "1.50"
    assert with_interval(None, 1.0, 2.0) == ""
    page = plain_table(pd.DataFrame({"what": ["<b>&"], "tau": ["3.1 [2.9, 3.3]"]}), "a < b")
    assert "&lt;b&gt;&amp;" in page and "a &lt; b" in page and 'class="number">3.1 [2.9, 3.3]' in page


@pytest.mark.parametrize("timed", [True, False])
def test_a_timed_sweep_shows_speed_against_tokens_a_step(tmp_path, timed):
    """What a value buys: tau and tokens a second in one picture, each mark named by the value that gave it."""
    rows = [(method, value, value**0.5, 100 - value) for method in ("ddtree", "tfm") for value in (8, 16, 64)]
    frame = pd.DataFrame(rows, columns=["variant", "value", "tau", "tok_s"]).assign(sweep="budget", setting="t1")
    frame["accepted"] = frame["tau"] - 1
    for name in ("tau", "tok_s", "accepted"):
        frame[f"{name}_low"], frame[f"{name}_high"] = frame[name] - 0.1, frame[name] + 0.1
    (frame if timed else frame.drop(columns=["tok_s", "tok_s_low", "tok_s_high"])).to_csv(tmp_path / "sweeps.csv")
    axes = make_figures.sweeps(tmp_path).axes
    labels = [(axis.get_xlabel(), axis.get_ylabel()) for axis in axes]
    budget = "budget B (drafted nodes)"
    if not timed:
        assert labels == [(budget, "tau (tokens a step)"), (budget, "accepted drafts a step")]
        return
    assert labels == [
        (budget, "tau (tokens a step)"),
        (budget, "tokens / s"),
        ("tau (tokens a step)", "tokens / s"),
    ]
    marks = {(text.get_text(), *text.xy) for text in axes[2].texts}
    assert marks == {(f"{value:g}", value**0.5, 100 - value) for value in (8, 16, 64)}
