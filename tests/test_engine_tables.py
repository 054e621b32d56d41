"""Tables of timed steps: medians, paired ratios, stages, energy; modelled columns are named so."""

import json
import sys

import pandas as pd
import pytest
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
VARIANT = "all:fused_cuda"
STEP_MS = {"ar": 13.0, "dflash": 15.0, "ddtree": 17.0, "tfm": 18.0, "tfm-b32-w2": 17.0, "dartree": 19.0}
ROWS = {"ar": 1, "dflash": 16, "ddtree": 65, "tfm": 65, "tfm-b32-w2": 33, "dartree": 65}
READING = {"sm_mhz": 1980, "temperature_c": 50, "throttle": [], "energy_mj": 0}


def report() -> dict:
    arms, records = {}, []
    for arm, ms in STEP_MS.items():
        method = arm.split("-")[0]
        weaver = {"expansions": (ROWS[arm] - 1) // (2 if "w2" in arm else 4), "width": 2 if "w2" in arm else 4}
        facts = {"method": method, "rows": ROWS[arm], "floor_ms": 12.0, "bytes": {"target": 5 * 2**30}}
        facts |= weaver if method == "tfm" else {"expansions": None, "width": None}
        facts |= {"built_peak_gib": 3.0, "kept_gib": 1.0, "reserved_gib": 4.0}
        for variant in (VARIANT, f"{VARIANT}:stages"):
            arms[f"{arm} {variant}"] = facts
        for context in (512, 2048):
            for number in range(3):
                span = ms + (context - 512) / 4096 + number / 100
                base = {"arm": arm, "context": context, "round": number, "wall_ms": 4 * span}
                power = {"joule": 4 * span * 0.6, "before": READING, "after": READING}
                records.append({**base, "variant": VARIANT, "ms": [span] * 4, "power": power})
                stages = {"draft": 1000, "build": 500, "verify": 1e3 * span - 3000, "accept": 300, "commit": 200}
                stages |= {"other": 1000, "target_gdn": 400, "grow": 300}
                records.append({**base, "variant": f"{VARIANT}:stages", "ms": [span] * 4, "stages_us": stages})
            records.append({"arm": arm, "variant": VARIANT, "context": context, "device_ms": {"verify": ms - 3}})
    return {"arms": arms, "records": records, "device": {"name": "NVIDIA H200"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import engine_tables

    out = tmp_path_factory.mktemp("tables")
    (out / "all.json").write_text(json.dumps({"tuned": report()}))
    words = ["engine_tables.py", "--steps", str(out / "all.json"), "--key", "tuned", "--out", str(out)]
    words += ["--tau", "tfm=6.7", "dflash=3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        assert engine_tables.main() == 0
    return out


def read(folder, name):
    return pd.read_csv(folder / f"{name}.csv")


def test_ratios_are_of_steps_that_stood_beside_each_other(folder):
    costs = read(folder, "step_costs")
    row = costs[(costs["arm"] == "tfm") & (costs["variant"] == VARIANT) & (costs["context"] == 512)].iloc[0]
    assert row["step_ms"] == pytest.approx(18.01) and row["n"] == 12
    assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
    assert row["over_ar"] == pytest.approx(18.01 / 13.01) and row["over_ar_low"] < row["over_ar"] < row["over_ar_high"]
    assert row["over_floor"] == pytest.approx(18.01 / 12)


def test_the_summary_has_the_names_that_the_goals_are_stated_in(folder):
    found = json.loads((folder / "engine_summary.json").read_text())
    assert found["ar_step_ms"]["value"] == pytest.approx(13.01)
    assert found["tfm_step_over_ar_B64"]["value"] == pytest.approx(18.01 / 13.01)
    assert found["gdn_verify_share"]["value"] == pytest.approx(600 / 18010)
    assert found["host_other_share"]["value"] == pytest.approx(1000 / 18010)
    # the stages without what lies between them, over the step without events
    assert found["stage_sum_over_wall"]["value"] == pytest.approx(17010 / 18010)
    assert found["staged_over_plain_wall"]["value"] > 0
    assert found["joule_per_step_tfm"]["value"] == pytest.approx(0.6 * 18.01, rel=1e-3)


def test_what_is_modelled_says_so_in_every_column(folder):
    modelled = read(folder, "modelled")
    assert set(modelled["arm"]) == {"tfm", "dflash"}
    assert all(name.startswith("modelled") for name in modelled.columns if name not in ("arm", "context", "tau_given"))
    measured = read(folder, "step_costs")
    assert not [name for name in measured.columns if "modelled" in name or "speedup" in name]
    row = modelled[(modelled["arm"] == "tfm") & (modelled["context"] == 512)].iloc[0]
    assert row["modelled_speedup"] == pytest.approx(6.7 * 13 / 18, rel=0.02)
    # what is read scales with the bandwidth, and at most everything does
    assert row["modelled_B200_step_ms_all_scales"] < row["modelled_B200_step_ms_floor_scales"] < 18


def test_paper_measured_and_modelled_stand_in_columns_of_their_own(folder):
    table = read(folder, "headline").set_index("method")
    assert table.loc["tfm", "paper_speedup"] == 4.37 and table.loc["dflash", "paper_speedup"] == 3.5
    assert table.loc["tfm", "measured_step_over_ar"] == pytest.approx(18.01 / 13.01)
    # no cells were given: nothing is measured of acceptance, and the row says so
    assert table["measured_speedup"].isna().all() and (table["reason"] == "no cells of the graft were given").all()
    assert table.loc["tfm", "modelled_speedup"] == pytest.approx(6.7 * 13 / 18, rel=0.02)


def test_the_fit_is_shown_beside_what_it_was_fitted_on(folder):
    fitted = read(folder, "cost_fit")
    assert len(fitted) == 12 and fitted["error"].abs().max() < 0.05
    assert (read(folder, "cost_model")["ms"] >= 0).all()
