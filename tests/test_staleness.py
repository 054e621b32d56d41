"""What a plain call makes again, and what it refuses: changed code, pins and weights, lost and cut files."""

import json
import os
import shutil
from pathlib import Path

import pytest
from workflow_runs import NANO, NO_SWEEPS, ROOT, SLICE, SMALL, checkout, jobs, snakemake, write_tiny_family

from baselines import suite
from tfm import manifest

CELL = "results/nano/cells/torch/nano/sample-math"
WEIGHTS = ROOT / "tfm/weights/nano"


@pytest.fixture(scope="module")
def copy(finished, tmp_path_factory) -> Path:
    """The finished checkout, to change; tests put back what they change."""
    folder = tmp_path_factory.mktemp("stale") / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    return folder


def planned(folder: Path, changes: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Return the jobs of a dry run with `changes`, file -> (old, new), made and then taken back."""
    before = {name: (folder / name).read_text() for name in changes}
    for name, (old, new) in changes.items():
        assert before[name].count(old) == 1, f"{name} holds {old!r} {before[name].count(old)} times"
        (folder / name).write_text(before[name].replace(old, new))
    try:
        return jobs(snakemake(folder, "-n", config=SLICE))
    finally:
        for name, text in before.items():
            (folder / name).write_text(text)


DECODE, TABLES = "workflows/scripts/decode_cell.py", "workflows/scripts/tables.py"
EXPECTED = "workflows/config/expected.yaml"
PREPARE, PINS = "workflows/scripts/prepare_prompts.py", "workflows/config/datasets.yaml"


def test_comments_and_touched_files_make_nothing_again(copy):
    """snakemake#1694, snakemake#3456, snakemake#3690: neither a comment in a cell's script nor a new time reruns it."""
    for path in [*copy.glob("workflows/**/*"), *copy.glob("tfm/*.py"), *copy.glob("tfm/data/*"), *copy.glob("*/*.py")]:
        os.utime(path)
    changes = {}
    for name in [DECODE, TABLES, PREPARE, "tfm/checkpoints.py", "baselines/dflash.py"]:
        lines = (copy / name).read_text().splitlines()
        first = next(line for line in lines if line.startswith(("import ", "from ")))
        changes[name] = (f"\n{first}\n", f"\n# a comment\n{first}\n")
    assert planned(copy, changes) == {}


ALL = "all"
MATH, CODE = (f"  sample-{name}:\n    rows: 16\n" for name in ("math", "code"))  # in the pins


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        pytest.param({DECODE: ("WARM_UP_TOKENS = 8", "WARM_UP_TOKENS = 9")}, {"decode_cell": ALL}, id="cell_script"),
        pytest.param({PINS: (MATH, f"{MATH}    cap: 9\n")}, {"prepare_prompts": 1}, id="pin"),
        pytest.param(
            {
                TABLES: ("STEP_SPREAD = ", "NEW = 1\nSTEP_SPREAD = "),
                PINS: (CODE, f"{CODE}    cap: 9\n"),
            },
            {"make_tables": 1, "decode_cell": 0, "prepare_prompts": 0},
            id="table_library_and_pin_of_another_set",
        ),
        pytest.param(
            {EXPECTED: ("64: {recurrent: 195.0", "64: {recurrent: 195.1")},
            {"make_tables": 1, "decode_cell": 0},
            id="papers_kernel_times_in_the_kernel_table",
        ),
    ],
)
def test_changed_code_makes_again_what_it_made(copy, changes, again):
    """snakemake#3095: Snakemake sees no change of an imported module; a digest among the parameters does."""
    counts, cells = planned(copy, changes), json.loads((copy / "results/nano/plan.json").read_text())["cells"]
    expected = {name: len(cells) if count is ALL else count for name, count in again.items()}
    assert {name: counts.get(name, 0) for name in again} == expected


@pytest.mark.slow
def test_changed_code_of_the_static_engine_makes_its_cells_again(tmp_path, tiny_weights):
    """Its cells were held against the digest of the reference loop, and stayed when tfm/engine changed."""
    folder, target = checkout(tmp_path, tiny_weights), "results/nano/cells/torch-static/nano/sample-math/ar/t0/seed0"
    config = [*SMALL, *NO_SWEEPS, "methods=ar", "engine=torch-static", "forms=torch", "requests=1", "audit=[]"]
    snakemake(folder, f"{target}/cell.json", config=config)
    for name, again in (("tfm/engine/loop.py", 1), ("tfm/engine/fast_builder.py", 0)):
        path = folder / name
        text = path.read_text()
        path.write_text(f"{text}\nNEW = 1\n")
        counts = jobs(snakemake(folder, "-n", f"{target}/cell.json", config=config))
        path.write_text(text)
        assert counts.get("decode_cell", 0) == again, name


@pytest.mark.parametrize(
    ("file", "loader", "prompts", "tables"),
    [
        ("workflows/scripts/decode_cell.py", True, False, False),
        ("workflows/scripts/prepare_prompts.py", False, True, False),
        ("workflows/scripts/tables.py", False, False, True),
        ("workflows/scripts/progress.py", False, False, False),
        ("tfm/checkpoints.py", True, False, False),
        ("tfm/tokenizer.py", True, True, False),
        ("tfm/prompt_sources.py", False, True, False),
        ("tfm/metrics.py", False, False, True),
        ("baselines/suite.py", False, False, True),
        ("tfm/manifest.py", False, None, True),
    ],
)
def test_each_digest_covers_the_code_that_it_stands_for(copy, file, loader, prompts, tables):
    path = copy / file
    text, before = path.read_text(), digests(copy)
    try:
        path.write_text(text + "\n# a comment\n\nNEW = 1\n")
        after = digests(copy)
    finally:
        path.write_text(text)
    for one, other, changed in zip(before, after, (loader, prompts, tables), strict=True):
        assert changed is None or (one != other) == changed


def digests(root: Path) -> list[str]:
    scripts = [manifest.script_digest(name, root) for name in ("prepare_prompts", "make_tables")]
    return [manifest.loader_digest.__wrapped__(root), *scripts]


def test_lost_files_are_made_again_by_a_plain_call(copy, tmp_path):
    """Files that no one asks for by name: a table's .md, a figure's caption, a cell's records, the plan."""
    names = ["tables/headline.md", "tables/paired.tex", "figures/tau.txt", "plan.json"]
    lost = [copy / "results/nano" / name for name in names] + [copy / CELL / "ar/t1/seed0/requests.parquet"]
    for path in lost:
        shutil.move(path, tmp_path / path.name)
    counts = jobs(snakemake(copy, "-n", config=SLICE))
    for path in lost:
        shutil.move(tmp_path / path.name, path)
    assert {name: counts[name] for name in ("decode_cell", "make_tables", "make_figures", "write_plan")} == {
        "decode_cell": 1, "make_tables": 1, "make_figures": 1, "write_plan": 1,
    }  # fmt: skip
    assert "prepare_prompts" not in counts


def test_a_call_from_elsewhere_needs_the_directory_and_says_so(copy, tmp_path):
    """snakemake#2933: -s and -d from another folder give the same run; without -d it is refused with the remedy."""
    text = snakemake(copy, "-s", str(copy / "Snakefile"), "-d", str(copy), "-n", config=SLICE, cwd=tmp_path)
    assert "Nothing to be done" in text
    text = snakemake(copy, "-s", str(copy / "Snakefile"), "-n", config=SLICE, cwd=tmp_path, expect=1)
    assert f"add -d {copy}" in text and not list(tmp_path.glob("results"))


# weights


@pytest.fixture
def family(tmp_path) -> Path:
    """A copy of the shipped family, to damage."""
    shutil.copytree(WEIGHTS, tmp_path / "nano")
    return tmp_path / "nano"


def damaged(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return {"half": data[:middle], "empty": b"", "bit": flipped}[how]


FILES = ["target/model.safetensors", "target/config.json", "target/tokenizer.json", "drafter/config.json"]


@pytest.mark.parametrize("how", ["half", "empty", "bit"])
@pytest.mark.parametrize("name", [*FILES, "weaver/model.safetensors"])
def test_a_damaged_file_of_the_shipped_family_is_refused_before_any_job(family, name, how):
    path = family / name
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(ValueError) as error:
        suite.resolve({**NANO, "weights": str(family)})
    assert str(path) in str(error.value) and "git checkout" in str(error.value), str(error.value)


def test_a_lost_file_of_the_shipped_family_is_named_and_a_lost_part_only_warned_of(family):
    (family / "target/tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is not the family's .sha256 no file"):
        suite.resolve({**NANO, "weights": str(family)})
    shutil.copy(WEIGHTS / "target/tokenizer.json", family / "target")
    shutil.rmtree(family / "weaver")
    config = suite.resolve({**NANO, "weights": str(family)})
    assert suite.missing_weights(config) == [f"{family}/weaver"]


SPECIAL = {"mask_token_id": 5, "target_layer_ids": [0]}
MISFITS = {  # what is wrong -> (part, change of its config.json, words of the message)
    "drafter_width": ("drafter", {"hidden_size": 64}, ["drafter hidden_size 64", "allowed: 32, the target's"]),
    "drafter_layers": (
        "drafter",
        {"dflash_config": {**SPECIAL, "target_layer_ids": [0, 7]}},
        ["target_layer_ids 7", "0 to 1, the target's layers"],
    ),
    "drafter_mask": (
        "drafter",
        {"dflash_config": {**SPECIAL, "mask_token_id": 4096}},
        ["mask_token_id 4096", "0 to 2047, the target's vocabulary"],
    ),
    "weaver_width": ("weaver", {"d_embed": 64}, ["weaver d_embed 64", "allowed: 32, the target's hidden_size"]),
    "weaver_rows": ("weaver", {"K": 7}, ["weaver K 7", "allowed: >= 15, the rows that the drafter drafts"]),
}


@pytest.mark.parametrize("case", list(MISFITS))
def test_parts_that_do_not_fit_each_other_are_refused_before_any_job(tmp_path, case):
    write_tiny_family(tmp_path)
    part, change, words = MISFITS[case]
    path = tmp_path / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError) as error:
        suite.resolve({**NANO, "weights": str(tmp_path)})
    assert all(word in str(error.value) for word in [*words, "nothing was run"]), str(error.value)


@pytest.mark.parametrize("content", ["", "suite: nano\nbudget: [", "suite: nano\nbudget: 6"])
def test_a_cut_config_stops_before_any_job(tmp_path, content):
    path = tmp_path / "cut.yaml"
    path.write_text(content)
    text = snakemake(ROOT, "-n", "--configfile", str(path), expect=1)
    assert "Job stats" not in text and "Traceback" not in text
    assert "missing key" in text or "Config file" in text, text[-1500:]


def test_an_empty_default_config_is_named(tmp_path, tiny_weights):
    """Snakemake reads that one by itself, and of a file without keys it says not which it is."""
    folder = checkout(tmp_path, tiny_weights)
    (folder / "workflows/config/nano.yaml").write_text("\n# nothing\n")
    text = snakemake(folder, "-n", expect=1)
    assert "workflows/config/nano.yaml is empty; restore it" in text and "Job stats" not in text


@pytest.mark.parametrize("change", [{"ignore_eos": True}, {"methods": [{"dflash": {"ignore_eos": True}}]}])
def test_ignoring_the_end_of_a_reply_cannot_be_asked_for_one_method(change):
    """lorax#474: lengths and acceptance compare only where all methods end alike; end tokens are in a cell's record."""
    with pytest.raises(ValueError, match="ignore_eos: unknown key|methods: .*is not allowed"):
        suite.resolve({**NANO, **change})
    cells = suite.expand(suite.resolve(NANO))
    assert {(tuple(cell["decode"]["eos_tokens"]), tuple(cell["decode"]["stop"])) for cell in cells} == {((), ())}
