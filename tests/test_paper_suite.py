"""Suite paper, rehearsed: small checkpoints in the public formats, sets in the hub's columns, from files to tables."""

import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from workflow_runs import ROOT, checkout, jobs, snakemake

from baselines import suite
from tfm.cells import load_cells
from tfm.prompt_sources import load_hub
from tfm.prompts import Preparation, prepare, select
from tfm.tokenizer import load_tokenizer

pytest.importorskip("transformers")
import paper_family  # noqa: E402, needs transformers

PAPER = ROOT / "workflows/config/paper.yaml"
REVISION = "5" * 40
SETS = ("mtbench", "sharechat", "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench")
COUNTS = {
    "mtbench": 80, "sharechat": 500, "gsm8k": 128, "math500": 128, "aime25": 30, "humaneval": 164, "mbpp": 257,
    "livecodebench": 175,
}  # fmt: skip
# two records of each set, with the columns of its repository on the hub
RECORDS = {
    "mtbench": [
        {"question_id": 81, "turns": ["Write a short travel note.", "Shorter."], "category": "writing"},
        {"question_id": 82, "turns": ["", "Nothing was asked."], "category": "writing"},
        {"question_id": 83, "turns": ["word " * 400], "category": "writing"},
    ],
    "gsm8k": [
        {"question": "Tom has 3 pens and buys 4. How many?", "answer": "#### 7"},
        {"question": "A box holds 12 eggs. How many in 5?", "answer": "#### 60"},
    ],
    "math500": [
        {"unique_id": "test/algebra/1.json", "problem": "Solve x + 2 = 5.", "answer": "3", "subject": "Algebra"},
        {"unique_id": "test/geometry/2.json", "problem": "Angles of a square?", "answer": "90", "subject": "Geometry"},
    ],
    "aime25": [
        {"id": "0", "problem": "Find the remainder of 7 * 8 by 5.", "answer": "1"},
        {"id": "1", "problem": "Count the divisors of 12.", "answer": "6"},
    ],
    "humaneval": [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "canonical_solution": "    return x"} for n in (0, 1)
    ],
    "mbpp": [
        {"task_id": n, "prompt": "Write a function.", "code": "x", "test_list": ["assert f()", "assert g()"]}
        for n in (11, 12)
    ],
    "livecodebench": [
        {
            "question_id": f"abc{n}",
            "question_content": "Print the sum.",
            "starter_code": "",
            "platform": "atcoder",
            "difficulty": "easy",
        }
        for n in (1, 2)
    ],
}
# another suite name, since the protocol is changed; the paper's four methods on the CPU with four new tokens. Two of
# the sets go the whole way, one with skipped prompts and the rebuilt sample; all eight become prompts
RUN_SETS = ("mtbench", "sharechat")
REHEARSAL = (
    "suite=paper-rehearsal",
    f"datasets={','.join(RUN_SETS)}", "device=cpu", "dtype=float32", "max_new_tokens=4", "context=512",
    "methods=ar,dflash,ddtree,tfm", "torch_threads=1", "gdn_backend=solve", "audit=[]",
    "tables=headline,per_set,paired", "figures=tau",
)  # fmt: skip
RESULTS = "results/paper-rehearsal"


def write_sets(folder: Path) -> dict:
    """Write the hub sets as frozen files and return their pins."""
    pins = yaml.safe_load((ROOT / "workflows/config/datasets.yaml").read_text())
    for name, records in RECORDS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        pins["hub"][name] |= {"data_files": f"{folder}/{name}.jsonl", "revision": REVISION, "rows": len(records)}
        pins["hub"][name].pop("cap", None)  # all of the few rows
    columns = ("url", "role", "plain_text", "topic", "detected_language_final")
    for platform in ("chatgpt", "claude", "gemini", "grok", "perplexity"):
        rows = [
            (f"https://{platform}.example/{n}", role, f"{platform} question {n}, a long one", "other", "English")
            for n in range(2 if platform == "claude" else 0)
            for role in ("user", "assistant")
        ]
        with open(folder / f"{platform}_results_final_language_filtered.csv", "w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    address = f"{folder}/{{platform}}_results_final_language_filtered.csv"
    pins["hub"]["sharechat"] |= {"data_files": address, "revision": REVISION, "rows": 2}
    return pins


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A checkout whose paper.yaml pins the small family and whose datasets.yaml pins the small sets."""
    weights, data = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("sets")
    paper_family.write_target(weights / "target")
    paper_family.write_drafter(weights / "drafter")
    paper_family.write_weaver(weights / "weaver/qwen36_27b_weaver.pth", fused=True)
    folder = checkout(tmp_path_factory.mktemp("code"), weights)
    config = yaml.safe_load(PAPER.read_text())
    for part, pin in config["checkpoints"].items():
        pinned = {name: weights / part / name for name in pin["sha256"]}
        pin["sha256"] = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in pinned.items()}
        if part != "weaver":  # the weaver's one file is pinned by its SHA-256 alone
            paper_family.record_downloads(weights / part, pin["revision"])
    config["weights"] = str(weights)
    (folder / "workflows/config/paper.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "workflows/config/datasets.yaml").write_text(yaml.safe_dump(write_sets(data), sort_keys=False))
    return folder


def weights_of(folder: Path) -> Path:
    return Path(yaml.safe_load((folder / "workflows/config/paper.yaml").read_text())["weights"])


def read_table(folder: Path, name: str) -> list[dict]:
    with open(folder / RESULTS / f"tables/{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def run(folder: Path, *arguments: str, config=(), expect: int | None = 0) -> str:
    words = [*arguments, "--configfile", "workflows/config/paper.yaml"]
    return snakemake(folder, *words, config=[*REHEARSAL, *config], expect=expect)


@pytest.fixture(scope="module")
def finished(code):
    """The rehearsal: prompts and plan, all cells in one process (as where there is no Snakemake), then the tables."""
    run(code, "--until", "prepare_prompts", "write_plan")
    call = [sys.executable, "workflows/scripts/run_cells.py", "--list", f"{RESULTS}/plan.json"]
    call += ["--out", ".", "--commit", "rehearsal"]
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, cwd=code, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == {}
    text = run(code)
    assert "decode_cell" not in jobs(text)
    return code


def test_a_dry_run_of_the_papers_suite_lists_its_jobs_without_weights(tmp_path):
    text = snakemake(ROOT, "-n", "--configfile", "workflows/config/paper.yaml", config=[f"weights={tmp_path / 'none'}"])
    # 8 sets x 5 arms x 2 temperatures x reasoning on and off, the 5 arms with stage times, and two other rules
    assert jobs(text)["decode_cell"] == 167 and jobs(text)["bench_kernel"] == jobs(text)["estimate_ceiling"] == 1
    assert jobs(text)["prepare_prompts"] == 16 and jobs(text)["check_weights"] == 1
    assert f"weights: {tmp_path}/none/drafter holds no file; its jobs are listed, but they stop" in text
    assert "revision: gsm8k is unpinned" in text and "mtbench is unpinned" not in text
    text = snakemake(
        ROOT, "--configfile", "workflows/config/paper.yaml", "--until", "check_weights",
        config=[f"weights={tmp_path / 'none'}", "suite=paper-without-weights"], expect=1,
    )  # fmt: skip
    assert "target: holds no weight file" in text and "no model was loaded" in text
    pin = yaml.safe_load(PAPER.read_text())["checkpoints"]["weaver"]
    assert f"hf download trymirai/weaver {pin['files'][0]} --revision {pin['revision']}" in text


def test_the_papers_protocol_is_in_the_config():
    config = suite.resolve(yaml.safe_load(PAPER.read_text()))
    assert tuple(config["datasets"]) == SETS and config["prompts"] is None
    hub = suite.pins()["hub"]
    assert {name: hub[name].get("cap") or hub[name]["rows"] for name in SETS} == COUNTS
    assert (config["max_new_tokens"], config["budget"], config["candidates"]) == (4096, 64, 512)
    assert {cell["decode"]["gdn_backend"] for cell in suite.expand(config)} == {"fused_triton"}
    assert (config["temperatures"], config["reasoning"]) == ([1, 0], [True, False])
    pins = config["checkpoints"]
    assert pins["drafter"]["sha256"]["model.safetensors"].startswith("e0c050b3")
    assert pins["weaver"]["sha256"]["qwen36_27b_weaver.pth"].startswith("71f540b1")
    assert config["servers"]["dflash"]["prefill_attention"] == "trtllm_mha"


def test_weights_of_the_public_formats_reach_tables_and_report(finished):
    results = finished / RESULTS
    rows = read_table(finished, "headline")
    settings = {"t0", "t0-think", "t1", "t1-think"}
    assert {(row["variant"], row["setting"]) for row in rows} == {
        (variant, setting) for variant in ("ar", "dflash", "ddtree-b64", "tfm-b64-w4") for setting in settings
    }
    assert all(float(row["tau"]) >= 1 and row["tok_s"] for row in rows)
    plan = json.loads((results / "plan.json").read_text())
    assert len(plan["cells"]) == 2 * 4 * 2 * 2 + 4
    assert plan["config"]["servers"]["common"]["gpu"] == "1 x B200 SXM"
    with open(results / "compare.csv") as file:
        compared = {row["item"]: row for row in csv.DictReader(file)}
    status = {item: row["status"] for item, row in compared.items()}
    # what the code alone decides passes anywhere; the paper's numbers compare in its own suite only
    assert status["tok_s_tfm"] == "not comparable" and status["same_as_ar_share"] == "pass"
    assert set(status.values()) <= {"not comparable", "open", "pass"}
    summary = json.loads((results / "summary.json").read_text())
    # the headline is reasoning on
    assert float(compared["tok_s_tfm"]["ours"]) == summary["tok_s_tfm_T1_THINK"]["value"]
    report = (results / "report.html").read_text()
    assert "mtbench" in report and "first turn is empty" in report
    files = json.loads((results / "weights.json").read_text())["files"]
    assert {entry["by"] for entry in files} == {"config", "download record"}
    assert {Path(entry["file"]).suffix for entry in files} == {".safetensors", ".json", ".pth"}


def test_every_method_emits_ars_tokens_in_every_setting(finished):
    plan = json.loads((finished / RESULTS / "plan.json").read_text())
    outputs: dict[tuple, dict] = {}
    for cell in plan["cells"]:
        requests = load_cells([finished / cell["path"]]).requests
        assert len(requests) == (1 if cell["dataset"] == "mtbench" else 2)
        key = (cell["dataset"], cell["setting"])
        outputs.setdefault(key, {})[cell["variant"]] = list(requests.output_sha256)
        facts = json.loads((finished / cell["path"] / "cell.json").read_text())["cell"]
        assert facts["decode"]["eos_tokens"] == [2, 0]  # <|im_end|>, then the model's generation_config.json
        assert facts.get("swa_causal") == (None if cell["variant"].startswith("ar") else True)
    assert len(outputs) == 8
    for key, by_variant in outputs.items():
        assert all(found == by_variant["ar"] for found in by_variant.values()), key


def test_reasoning_is_part_of_the_cells_name_and_of_the_tables(finished):
    """The same prompts with thinking on and off are two cells, never one row (z-lab/dflash#133)."""
    prompts = finished / RESULTS / "prompts/qwen3.6-27b"
    direct, thinking = ((prompts / f"sharechat{think}.jsonl").read_text().splitlines() for think in ("", "-think"))
    for one, other in zip(map(json.loads, direct), map(json.loads, thinking), strict=True):
        assert one["template"] == "paper/raw/direct" and other["template"] == "paper/raw/think"
        assert one["id"] == other["id"] and one["tokens"] != other["tokens"] and one["sha256"] != other["sha256"]
    rows = read_table(finished, "per_set")
    keys = [(row["dataset"], row["variant"], row["setting"]) for row in rows if row["dataset"] in SETS]
    assert len(keys) == len(set(keys)) == 2 * 4 * 4
    captions = json.loads((finished / RESULTS / "tables/captions.json").read_text())
    assert "reasoning on (-think) and off" in captions["per_set"]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("reasoning", [False, True])
def test_every_set_in_its_hub_columns_becomes_prompts(code, name, reasoning):
    pins = yaml.safe_load((code / "workflows/config/datasets.yaml").read_text())
    found = load_hub(pins, name)
    preparation = Preparation(max_new_tokens=4, context=512, reasoning=reasoning)
    tokenizer = load_tokenizer(weights_of(code) / "target")
    prompts, _ = prepare(select(found.rows, name=name, count=found.count(None)), tokenizer, preparation)
    assert found.revision == REVISION and {prompt.dataset for prompt in prompts} == {name}
    text = tokenizer.decode(prompts[0].tokens)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<think>\n" if reasoning else "</think>\n\n")


def test_skipped_prompts_are_named_with_their_reason(finished):
    facts = json.loads((finished / RESULTS / "prompts/qwen3.6-27b/mtbench.manifest.json").read_text())
    reasons = {entry["id"]: entry["reason"] for entry in facts["skipped"]}
    assert reasons["mtbench/82"] == "first turn is empty" and "> context 512" in reasons["mtbench/83"]
    assert facts["n"] == 1 and facts["revision"] == REVISION


def test_a_second_call_does_nothing(finished):
    assert "Nothing to be done" in run(finished)


# failures


def test_one_changed_byte_of_a_shard_stops_the_run_before_anything_loads(code):
    file = weights_of(code) / "target/model-00002-of-00004.safetensors"
    content = file.read_bytes()
    changed = content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]
    file.write_bytes(changed)
    try:
        text = run(code, config=["suite=paper-damaged"], expect=1)
    finally:
        file.write_bytes(content)
    expected, actual = (hashlib.sha256(data).hexdigest() for data in (content, changed))
    assert f"{file}: differs from its download record, expected {expected}, actual {actual}" in text
    assert "hf download Qwen/Qwen3.6-27B --revision" in text and "Traceback" not in text
    assert not list((code / "results/paper-damaged").rglob("decode.log"))


def test_a_changed_byte_and_a_deleted_row_of_a_set_are_refused(code):
    """The content of a set decides, not its name (lighteval#1009, lm-evaluation-harness#3171)."""
    pins_file = code / "workflows/config/datasets.yaml"
    before = pins_file.read_text()
    pins = yaml.safe_load(before)
    file = Path(pins["hub"]["gsm8k"]["data_files"])
    content = file.read_text()
    pins["hub"]["gsm8k"]["sha256"] = load_hub(pins, "gsm8k").sha256
    target = "results/paper-sets/prompts/qwen3.6-27b/gsm8k.jsonl"
    try:
        pins_file.write_text(yaml.safe_dump(pins))
        file.write_text(content.replace("3 pens", "4 pens"))
        text = run(code, target, config=["suite=paper-sets", "datasets=gsm8k"], expect=1)
        assert "sha256: the rows of gsm8k differ from their pin: expected " in text and "Traceback" not in text
        file.write_text(content[: content.index("\n") + 1])
        with pytest.raises(ValueError, match="rows: gsm8k has 1 rows, its pin says 2"):
            load_hub(pins, "gsm8k")
    finally:
        file.write_text(content)
        pins_file.write_text(before)


def test_a_drafter_with_another_vocabulary_is_refused_naming_both(code, tmp_path):
    weights = weights_of(code)
    fields = json.loads((weights / "target/tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    words = [word for word, index in vocabulary.items() if 1000 <= index < 1010]
    vocabulary.update(zip(words, [vocabulary[word] for word in words][::-1], strict=True))
    other = weights / "drafter/tokenizer.json"
    other.write_text(json.dumps(fields))
    pins = yaml.safe_load((code / "workflows/config/paper.yaml").read_text())["checkpoints"]
    pins["drafter"]["sha256"]["tokenizer.json"] = hashlib.sha256(other.read_bytes()).hexdigest()
    call = [sys.executable, "workflows/scripts/check_weights.py", "--weights", weights, "--checkpoints"]
    call += [json.dumps(pins), "--out", tmp_path / "weights.json"]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    try:
        done = subprocess.run(call, cwd=code, env=environment, capture_output=True, text=True)
    finally:
        other.unlink()
    assert done.returncode == 2 and not (tmp_path / "weights.json").exists()
    assert f"'{weights}/target' and '{weights}/drafter'" in done.stderr
    assert "differ, first at ids [1000, " in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"family": "Qwen/Qwen3.6-27B"}, r"family: 'Qwen/Qwen3.6-27B' is not allowed .*lower-case letters"),
        ({"datasets": "mt_bench"}, r"datasets: 'mt_bench' is not allowed .*did you mean mtbench\?"),
        ({"methods": "dflash_tfm"}, r"methods: 'dflash_tfm' is not allowed .allowed: ar, dflash, ddtree, dartree, tfm"),
        ({"checkpoints": {"target": {"repo": "a/b", "revision": "main", "sha256": {}}}}, "checkpoints.target.revision"),
        ({"checkpoints": {"draft": {}}}, r"checkpoints.draft: unknown key; did you mean drafter\?"),
        ({"swa_causal": "yes please"}, "swa_causal: 'yes please' is not allowed .allowed: boolean or null"),
        ({"data": str(ROOT)}, "file|folder"),
    ],
)
def test_names_of_other_projects_are_refused_with_the_allowed_ones(given, message):
    raw = {**yaml.safe_load(PAPER.read_text()), "suite": "mine", **given}
    with pytest.raises(ValueError, match=message):
        suite.resolve(raw, given={"suite": "mine", **given})


def test_a_temperature_of_0_0_names_the_cell_of_0_and_paths_read_back():
    raw = {**yaml.safe_load(PAPER.read_text()), "temperatures": "0.0,1.0,0.6", "suite": "mine"}
    config = suite.resolve(raw, given={"suite": "mine", "temperatures": "0.0,1.0,0.6"})
    cells = suite.expand(config)
    assert len({cell["path"] for cell in cells}) == len(cells)
    for cell in cells:
        *_, target, dataset, variant, setting, seed = cell["path"].split("/")
        again = suite.resolve_cell(config, dataset=dataset, variant=variant, setting=setting, seed=seed[4:])
        assert again == {key: value for key, value in cell.items() if key not in ("path", "part")}
        assert target == "qwen3.6-27b" and setting.split("-")[0] in ("t0", "t1", "t0.6")


@pytest.mark.parametrize("key", ["prompts", "max_new_tokens", "device", "budget"])
def test_a_changed_protocol_needs_a_name_of_its_own(key):
    raw = yaml.safe_load(PAPER.read_text())
    changed = {"prompts": 4, "max_new_tokens": 64, "device": "cpu", "budget": 32}[key]
    with pytest.raises(ValueError, match=f"{key}: {changed!r} is not allowed in suite paper .*add suite=NAME"):
        suite.resolve({**raw, key: changed}, given={key: changed})
    assert suite.resolve({**raw, key: changed, "suite": "mine"}, given={key: changed, "suite": "mine"})[key] == changed
