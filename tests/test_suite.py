"""A suite's config: what is refused and how, and the names that spell cells."""

import json
import re

import pytest
import yaml
from workflow_runs import NANO, ROOT, snakemake, write_tiny_family

from baselines import suite
from baselines.methods import METHODS

BAD = {  # C113: what is wrong -> (change, words of the message)
    "seed_null": ({"seeds": None}, ["seeds: null", "integer >= 0"]),
    "missing_budgets": ({"budgets": ...}, ["budgets: missing key"]),
    "unknown_key": ({"buget": 3}, ["buget: unknown key", "did you mean budget?", "allowed keys:"]),
    "temperature_negative": ({"temperatures": [-1]}, ["temperatures: -1", ">= 0"]),
    "temperature_nan": ({"temperatures": [float("nan")]}, ["temperatures: nan", "finite"]),
    "temperature_beyond_floats": ({"temperatures": [10**400]}, ["temperatures: 1000", "finite"]),
    "seed_beyond_int64": ({"seeds": [0, 2**64]}, ["seeds: 18446744073709551616", "<= 9223372036854775807"]),
    "budget_in_hex": ({"budget": "0x10"}, ["budget: '0x10'", "integer >= 1"]),
    "budget_by_the_minute": ({"budgets": "8,1:30"}, ["budgets: '1:30'"]),
    "threads": ({"torch_threads": 100_000}, ["torch_threads: 100000", ">= 1 and <= 1024"]),
    "suite_too_long": ({"suite": "n" * 300}, ["suite: 'nnn", "at most 100 characters"]),
    "kernel_heads": (
        {"kernels": {**NANO["kernels"], "key_heads": 2, "value_heads": 3}},
        ["kernels.value_heads: 3", "multiples of key_heads"],
    ),
    "budget_zero": ({"budget": 0}, ["budget: 0", "integer >= 1"]),
    "sweep_budget_zero": ({"budgets": [8, 0]}, ["budgets: 0", ">= 1"]),
    "method_typo": (
        {"methods": ["ar", "dflsh"]},
        ["methods: 'dflsh'", "did you mean dflash?", "ar, dflash, ddtree, dartree, tfm"],
    ),
    "dataset_empty": ({"datasets": [""]}, ["datasets: ''", "sample-chat, sample-math, sample-code"]),
    "dataset_typo": ({"datasets": ["sample-mat"]}, ["datasets: 'sample-mat'", "did you mean sample-math?"]),
    "dataset_of_another_source": ({"datasets": ["gsm8k"]}, ["datasets: 'gsm8k'", "data=DIR"]),
    "datasets_none": ({"datasets": []}, ["datasets: []", "at least one"]),
    "side_elsewhere": ({"side": {"dataset": "gsm8k", "temperature": None}}, ["side.dataset: 'gsm8k'"]),
    "side_key": ({"side": {"dataset": None, "temprature": 1}}, ["side.temprature: unknown key", "temperature?"]),
    "data_nowhere": ({"data": "/nowhere/at/all"}, ["data: '/nowhere/at/all'", "not a folder"]),
    "prompts_word": ({"prompts": "many"}, ["prompts: 'many'", "integer"]),
    "legacy_in_headline": ({"methods": ["tfm-b64-w4-legacy_traversal"]}, ["methods:", "not allowed"]),
    "device": ({"device": "gpu"}, ["device: 'gpu'", "cpu, cuda"]),
    "context": ({"context": 4096}, ["context: 4096", "1 to 2048", "target holds", "lower context"]),
    "no_room": ({"context": 32}, ["max_new_tokens: 48", "1 to 31", "lower max_new_tokens"]),
    "candidates": ({"candidate_counts": [4096]}, ["candidate_counts: 4096", "1 to 2048, the target's vocabulary"]),
    "children": ({"children": 20}, ["children: 20", "1 to 16, candidates"]),
    "children_counts": ({"children_counts": [65]}, ["children_counts: 65", "1 to 64, candidates"]),
    "prompts": ({"prompts": 17}, ["prompts: 17", "1 to 16, the rows of sample-chat", "never repeated"]),
    "data_file": ({"data": "workflows"}, ["data: 'workflows'", "a folder with mtbench.jsonl, which mtbench needs"]),
    "figure": ({"tables": ["headline"]}, ["figures: 'tau'", "drawn from table per_set", "add per_set to tables"]),
    "two_missing": ({"budgets": ..., "audit": ...}, ["2 problems", "budgets: missing key", "audit: missing key"]),
    "suite_with_a_line_break": ({"suite": "nano\n"}, ["suite: 'nano\\n'"]),
    "family_with_a_line_break": ({"family": "nano\n"}, ["family: 'nano\\n'"]),
    "weights_with_braces": ({"weights": "w/{x}"}, ["weights: 'w/{x}'", "without braces", "give a link to it"]),
    "server_seconds": ({"server_seconds": float("nan")}, ["server_seconds: nan", "finite"]),
    "fixed_key": ({"fixed": ["temperatuers"]}, ["fixed: 'temperatuers': unknown key", "did you mean temperatures?"]),
    "real_key": ({"real": {"buget": 3}}, ["real.buget: unknown key", "did you mean budget?"]),
    "method_in_capitals": ({"methods": ["AR"]}, ["methods: 'AR'", "did you mean ar?"]),
    "suite_reserved": ({"suite": "train"}, ["suite: 'train'", "published, train", "choose another name"]),
    # filters and penalties: openvino.genai#3451, pegainfer#512
    "top_p": ({"top_p": 0.9}, ["top_p: 0.9", "allowed: 1", "the target's whole law"]),
    "top_k": ({"top_k": 3}, ["top_k: 3", "allowed: -1", "the target's whole law"]),
    "min_p": ({"min_p": 0.1}, ["min_p: 0.1", "allowed: 0", "the target's whole law"]),
    "penalty": ({"repetition_penalty": 1.3}, ["repetition_penalty: 1.3", "allowed: 1", "with every drafted token"]),
    "presence": ({"presence_penalty": 1.5}, ["presence_penalty: 1.5", "with every drafted token"]),
    "depths": ({"depths": [20]}, ["depths: 20", "1 to 15, the drafter's rows", "lower depths"]),
    "dartree_without_width": (
        {"methods": ["ar", "dartree"], "dartree_width": ...},
        ["dartree_width: missing key", "12 in its authors' code"],
    ),
    "two_at_once": ({"budget": 0, "buget": 1}, ["2 problems", "budget: 0", "buget: unknown key"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_config_is_refused_with_key_value_allowed_and_remedy(case):  # C113
    change, words = BAD[case]
    config = {key: value for key, value in {**NANO, **change}.items() if value is not ...}
    with pytest.raises(ValueError) as error:
        suite.resolve(config)
    assert all(word in str(error.value) for word in [*words, "nothing was run"]), str(error.value)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("seeds=null", ["seeds: null"]),
        ("buget=3", ["buget: unknown key", "did you mean budget?"]),
        ("temperatures=-1", ["temperatures: -1"]),
        ("budget=0", ["budget: 0"]),
        ("methods=ar,dflsh", ["methods: 'dflsh'", "did you mean dflash?"]),
        ("suite=foo", ["suite: 'foo'", "stands alone", "--configfile"]),
        ("datasets=", ["datasets: null", "sample-chat, sample-math"]),
        ("top_p=0.9", ["top_p: 0.9", "the target's whole law"]),
    ],
)
def test_bad_values_of_the_command_line_stop_before_any_job(argument, words):  # C113
    text = snakemake(ROOT, "-n", config=[argument], expect=1)
    assert all(word in text for word in words) and "Job stats" not in text, text[-2000:]
    assert "Traceback" not in text


def test_filters_and_penalties_that_are_off_are_accepted_and_recorded():
    given = {"top_p": "1.0", "top_k": "-1", "min_p": 0, "repetition_penalty": 1.0}
    for config in (suite.resolve({**NANO, **given}), suite.resolve(NANO)):
        decode = suite.expand(config)[0]["decode"]
        assert (decode["top_p"], decode["top_k"], decode["min_p"], decode["repetition_penalty"]) == (1, -1, 0, 1)


def test_command_line_strings_are_typed_before_they_name_a_cell():  # C114
    typed = suite.resolve({**NANO, "temperatures": "0.0,1", "seeds": "0,3", "budget": "16", "datasets": "sample-code"})
    assert (typed["temperatures"], typed["seeds"], typed["budget"]) == ([0, 1], [0, 3], 16)
    paths = {cell["path"] for cell in suite.expand(typed)}
    assert "results/nano/cells/torch/nano/sample-code/ddtree-b16/t0/seed0" in paths


def test_keys_that_stand_twice_are_found_wherever_they_stand(tmp_path):
    for path in (ROOT / "workflows/config").glob("*.yaml"):
        suite.check_file(path)
    (tmp_path / "x.yaml").write_text("a: 1\nb: [{c: 1, c: 2}]\nd:\n  e: 1\n  e: 2\na: 3\n")
    with pytest.raises(ValueError) as error:
        suite.check_file(tmp_path / "x.yaml")
    assert re.findall(r"  (\S+): is in .* twice, lines (\d) and (\d)", str(error.value)) == [
        ("a", "1", "6"),
        ("d.e", "4", "5"),
        ("b.c", "2", "2"),
    ]


def test_a_budget_beyond_every_tree_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"budget: 1000000000000000019\d+ is not allowed .allowed: 1 to 16384"):
        suite.expand(suite.resolve({**NANO, "budget": "1e30"}))


def test_numbers_of_the_command_line_are_decimal_wherever_they_stand():
    """YAML reads 016 as octal 14; Snakemake reads a lone 016 as 16 and hands on a list as text."""
    given = {"budget": "016", "budgets": "8,032", "depths": ["04"], "stages": "Off", "timed": "false"}
    given |= {"server_flags": {"eager": "true", "graphs": "null", "backend": "fa3"}}
    typed = suite.resolve({**NANO, **given})
    assert (typed["budget"], typed["budgets"], typed["depths"]) == (16, [8, 32], [4])
    assert typed["stages"] is False and typed["timed"] is False
    assert typed["server_flags"] == {"eager": True, "graphs": None, "backend": "fa3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 10**12}, "budget: 1000000000000 is not allowed \\(allowed: 1 to 16384\\); .*lower budget"),
        ({"widths": [10**9]}, "width: 1000000000 is not allowed \\(allowed: 1 to 16384\\)"),
        ({"temperatures": [1e39]}, "temperature: 99+\\d+ is not allowed .*at most 3e\\+38"),
    ],
)
def test_what_no_pass_could_hold_is_refused_before_any_job(change, message):
    with pytest.raises(ValueError, match=message):
        suite.expand(suite.resolve({**NANO, **change}))


@pytest.mark.parametrize(
    ("temperature", "name"),
    [(0, "t0"), (-0.0, "t0"), (1.0, "t1"), (0.6, "t0.6"), (1e-6, "t0.000001"), (0.1234567, "t0.1234567"), (10, "t10")]
    + [(1e9, "t1000000000"), (5e-324, None), (1.7976931348623157e308, None), (0.1 + 0.2, "t0.30000000000000004")],
)
def test_a_setting_spells_every_digit_of_its_temperature(temperature, name):
    spelled = suite.setting_name(temperature, reasoning=True)
    assert suite.parse_setting(spelled) == (temperature, True) and re.fullmatch(suite.SETTING, spelled)
    assert name is None or spelled == name + "-think"


@pytest.mark.parametrize("name", ["t0.0", "t00", "t1.", "t01", "t0.60", "t1e-6", "t", "t" + "9" * 400])
def test_another_spelling_of_a_setting_is_refused(name):
    with pytest.raises(ValueError, match="setting: "):
        suite.parse_setting(name)
    assert not re.fullmatch(suite.SETTING, name) or name.endswith("999")


def test_numbers_come_as_strings_and_whole_floats_and_name_the_same_cells():
    change = {"temperatures": "1e-6,1", "budget": 64.0, "side": {"dataset": None, "temperature": "1.0"}}
    config = suite.resolve({**NANO, **change, "reasoning": "true"})
    assert config["temperatures"] == [1e-6, 1] and config["reasoning"] == [True]
    assert [str(config["budget"]), str(config["side"]["temperature"])] == ["64", "1"]
    assert "results/nano/cells/torch/nano/sample-code/ddtree-b64/t0.000001-think/seed0" in {
        cell["path"] for cell in suite.expand(config)
    }


def test_depth_beyond_the_drafters_rows_is_refused(tmp_path):
    write_tiny_family(tmp_path)
    with pytest.raises(ValueError, match=r"depth: 16 is not allowed \(allowed: 1 to 15, the drafter's rows\)"):
        suite.resolve({**NANO, "weights": str(tmp_path), "depth": 16})


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        *(("drafter", {"block_size": value}, "block_size .* an integer >= 2") for value in (0, 1, -3, "16", 2.5, True)),
        ("drafter", {"dflash_config": {"mask_token_id": "5"}}, "mask_token_id '5' .* an integer"),
        ("drafter", {"dflash_config": {"target_layer_ids": "0"}}, "target_layer_ids '0' .* a list of layers"),
        ("drafter", {"dflash_config": [5]}, "dflash_config .5. .* an object"),
        ("target", {"vocab_size": "2048"}, "vocab_size '2048' .* an integer >= 1"),
        ("weaver", {"K": 15.0}, "K 15.0 .* an integer >= 1"),
    ],
)
def test_a_checkpoint_whose_sizes_are_none_is_refused_by_its_file(tmp_path, part, change, words):
    """A block of one drafted nothing (allowed: 1 to 0), text in place of a number ended in a traceback (C021)."""
    write_tiny_family(tmp_path)
    file = tmp_path / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"weights: {file}: {words}.*take the config.json that belongs"):
        suite.resolve({**NANO, "weights": str(tmp_path)})


def test_names_spell_variants_both_ways():  # C114
    sweeps = {"widths": [1, 2], "depths": [4], "candidate_counts": [16], "residuals": [False]}
    config = suite.resolve({**NANO, **sweeps, "methods": list(METHODS)})
    cells = suite.expand(config)
    assert len({cell["path"] for cell in cells}) == len(cells)
    # it follows one request at a time: its untimed cells failed after their models had loaded
    assert {cell["decode"]["requests"] for cell in cells if cell["decode"]["method"] == "adaptive"} == {1}
    for cell in cells:
        variant = suite.parse_variant(cell["variant"], config)
        assert variant.name(config) == cell["variant"]
        assert re.fullmatch(suite.variant_pattern(variant.method), cell["variant"])
        fields = {key: cell[key] for key in ("dataset", "variant", "setting", "seed")}
        assert suite.resolve_cell(config, **fields) == {k: v for k, v in cell.items() if k not in ("path", "part")}


def test_residual_0_is_one_more_cell_that_needs_no_weaver():
    config, none = (suite.resolve({**NANO, "residuals": value}) for value in ("false", []))
    more = {cell["path"]: cell for cell in suite.expand(config)}
    path = "results/nano/cells/torch/nano/sample-chat/tfm-b64-w4-r0/t1/seed0"
    assert set(more) - {cell["path"] for cell in suite.expand(none)} == {path}
    assert set(more[path]["weights"]) == {"target", "drafter"} and more[path]["decode"]["residual"] is False
    for name in ("tfm-b64-w4-k256-r0-traversal-stages", "tfm-b64-w4-d3-r0-sampled-traversal", "tfm-b64-w4-sampled"):
        assert suite.parse_variant(name, config).name(config) == name


def test_the_audited_rule_is_no_variant_with_drawn_siblings():
    fields = {"dataset": "sample-chat", "setting": "t1", "seed": 0}
    with pytest.raises(ValueError, match=r"rule: 'legacy_traversal' .*\(allowed: target_only, traversal\).*sampled"):
        suite.resolve_cell(suite.resolve(NANO), variant="tfm-b64-w4-sampled-legacy_traversal", **fields)


def test_dartree_has_a_width_of_its_own():
    change = {"methods": ["ar", "dartree", "tfm"], "width": 4, "widths": [8], "dartree_widths": [16], "budgets": [16]}
    cells = suite.expand(suite.resolve({**NANO, **change}))
    parts = ("headline", "budgets", "widths", "dartree_widths")
    assert {part: {c["variant"] for c in cells if c["part"] == part} for part in parts} == {
        "headline": {"ar", "dartree-b64-w12", "tfm-b64-w4"},
        "budgets": {"dartree-b16-w12", "tfm-b16-w1"},
        "widths": {"tfm-b64-w8"},
        "dartree_widths": {"dartree-b64-w16"},
    }
    cells = suite.expand(suite.resolve({**NANO, **change, "dartree_width": "16"}))
    assert "dartree-b64-w16" in {cell["variant"] for cell in cells if cell["clock"] == "wall"}


NO_VARIANT = ["tfm-b64", "tfm-b0-w4", "tfm-b064-w4", "tfm-b64-w4-k64", "ar-b4", "tfm-b64-w4-fast", "ddtree-b64-r0"]
NO_VARIANT += ["ddtree-b64-sampled", "tfm-b64-w4-sampled-r0"]


@pytest.mark.parametrize("name", NO_VARIANT)
def test_a_name_that_is_no_variant_is_refused(name):
    with pytest.raises(ValueError, match="variant: "):
        suite.parse_variant(name, suite.resolve(NANO))


def test_the_nano_suite_has_the_cells_its_readers_expect():
    cells = suite.expand(suite.resolve(NANO))
    timed = [cell for cell in cells if cell["clock"] == "wall"]
    assert len(cells) == 81 and len(timed) == 30
    assert all(cell["decode"]["requests"] == 1 for cell in cells if cell["clock"] != "off")
    assert all(cell["seed"] == 0 for cell in timed) and all(cell["threads"] == 1 for cell in cells)
    # greedy decoding has one seed; stages trace trees; rules that are audited never stand in the headline
    assert {cell["seed"] for cell in cells if cell["setting"] == "t0"} == {0}
    cool = suite.expand(suite.resolve({**NANO, "temperatures": [1, 1e-6]}))
    assert {cell["seed"] for cell in cool if cell["setting"] == "t0.000001"} == {0}
    assert all(cell["traced"] == cell["variant"].endswith("-stages") for cell in cells)
    audited = {cell["variant"]: cell["decode"] for cell in cells if cell["part"] == "audit"}
    assert {name: (decode["rule"], decode["siblings"]) for name, decode in audited.items()} == {
        "tfm-b64-w4-traversal": ("traversal", "top"),
        "tfm-b64-w4-legacy_traversal": ("legacy_traversal", "top"),
        "tfm-b64-w4-sampled": ("target_only", "sampled"),
        "tfm-b64-w4-sampled-traversal": ("traversal", "sampled"),
    }
    others = [cell["decode"] for cell in cells if cell["part"] != "audit"]
    assert {(decode["rule"], decode["siblings"]) for decode in others} == {("target_only", "top")}


def test_real_sets_replace_the_embedded_ones(tmp_path):
    for name in NANO["real"]["datasets"]:
        (tmp_path / suite.pins()["local"][name]["file"]).touch()
    assert suite.resolve({**NANO, "data": f"{tmp_path}/"})["data"] == str(tmp_path)
    config = suite.resolve({**NANO, "data": str(tmp_path)})
    assert config["suite"] == "nano-real" and len(config["datasets"]) == 8 and config["prompts"] == 24
    assert not [cell for cell in suite.expand(config) if "sample-" in cell["path"]]
    given = {"data": str(tmp_path), "prompts": 3}
    assert suite.resolve({**NANO, **given}, given=given)["prompts"] == 3


def test_weights_that_are_not_here_are_named_and_refuse_nothing(tmp_path):
    config = suite.resolve({**NANO, "weights": str(tmp_path), "methods": ["ar", "dflash"]})
    assert suite.missing_weights(config) == [f"{tmp_path}/target", f"{tmp_path}/drafter"]
    assert suite.expand(config) and suite.draft_rows(config) is None


def test_schema_methods_are_those_that_exist():
    schema = yaml.safe_load(suite.SCHEMA_FILE.read_text())
    allowed = schema["properties"]["methods"]["items"]["enum"]
    assert set(allowed) == set(METHODS)
    assert all("description" in entry for entry in schema["properties"].values())
