"""Where prompt sets come from (embedded, local, hub), their pins, and the prompt-preparation script."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tfm.pins import check_dataset, dataset_names, load_pins, pin, require_pinned, unpinned
from tfm.prompt_sources import load_hub, load_prompt_set, parse_rows
from tfm.prompts import read_prepared
from tfm.sharechat import COLUMNS, LANGUAGES, PLATFORMS, TOPICS, pick, read_conversations, topic_quotas

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "workflows" / "config" / "datasets.yaml"
TARGET = ROOT / "tfm" / "weights" / "nano" / "target"
SCRIPT = ROOT / "workflows" / "scripts" / "prepare_prompts.py"
ALL_PINS = load_pins(PINS)
REVISION = "0123456789abcdef0123456789abcdef01234567"
EIGHT = ["mtbench", "sharechat_sub_arenahard", "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench_v5"]


def record(index=0, **fields) -> dict:
    return {"id": f"mine/{index}", "dataset": "mine", "domain": "math", "turns": [f"What is {index} + 1?"], **fields}


@pytest.fixture
def mine(tmp_path):
    """Return write(records, **entry): it writes and pins a local set `mine` and returns (pins, directory)."""

    def write(records, **entry):
        content = "".join(json.dumps(r) + "\n" for r in records).encode()
        (tmp_path / "mine.jsonl").write_bytes(content)
        pinned = {"file": "mine.jsonl", "sha256": hashlib.sha256(content).hexdigest(), "source": "a test", **entry}
        return {**ALL_PINS, "local": {"mine": pinned}}, tmp_path

    return write


def run_script(*arguments: str, tmp_path: Path) -> tuple[dict | None, Path]:
    """Run the script's own entry in this process; return what it prints and the prepared file."""
    spec = importlib.util.spec_from_file_location("prepare_prompts", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "prompts" / "nano" / "set.jsonl"
    fixed = ["--tokenizer", str(TARGET), "--target", "nano", "--context", "2048", "--max-new-tokens", "48"]
    options = script.parse([*arguments, *fixed, "--pins", str(PINS), "--out", str(out)])
    return script.run(options), out


# local files


def test_the_eight_local_sets_and_the_papers_hub_sets_are_offered_by_name():
    assert dataset_names(ALL_PINS, "local") == EIGHT
    papers = ["mtbench", "sharechat", "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench"]
    assert dataset_names(ALL_PINS, "hub") == papers
    assert {n: ALL_PINS["hub"][n].get("cap") for n in papers if "cap" in ALL_PINS["hub"][n]} == {
        "gsm8k": 128,
        "math500": 128,
    }


def test_a_local_set_gives_its_rows_in_file_order_with_index_and_category(mine):
    pins, data = mine([record(i, meta={"kind": "ab"[i % 2]}) for i in range(4)], category=["kind"], rows=4, cap=2)
    loaded = load_prompt_set(pins, source="local", name="mine", data=data)
    assert [(r.id, r.index, r.category) for r in loaded.rows] == [(f"mine/{i}", i, "ab"[i % 2]) for i in range(4)]
    assert (loaded.count(None), loaded.count(3)) == (2, 3)


@pytest.mark.parametrize("damage", ["one_byte", "one_row"])
def test_a_changed_file_is_refused_with_expected_and_actual_hash(mine, damage):
    pins, data = mine([record(i) for i in range(3)])
    content = (data / "mine.jsonl").read_bytes()
    changed = content.replace(b"1?", b"2?", 1) if damage == "one_byte" else content[: content.rindex(b"{")]
    (data / "mine.jsonl").write_bytes(changed)
    expected, actual = (hashlib.sha256(c).hexdigest() for c in (content, changed))
    with pytest.raises(ValueError, match=f"expected {expected}, actual {actual}; restore the file"):
        load_prompt_set(pins, source="local", name="mine", data=data)


def test_an_absent_local_file_is_an_error_and_nothing_else_is_read(tmp_path):
    with pytest.raises(ValueError, match="gsm8k.jsonl' does not exist .*put the file there"):
        load_prompt_set(ALL_PINS, source="local", name="gsm8k", data=tmp_path)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        pytest.param("embedded", "gsm8k", "allowed: sample-chat, .*offered by source local and hub", id="elsewhere"),
        pytest.param("local", "sample-math", "allowed: mtbench, .*offered by source embedded", id="embedded_only"),
        pytest.param("hub", "gsm8", "dataset: 'gsm8' .*allowed: mtbench, sharechat, gsm8k", id="typo"),
        pytest.param("local", "", "dataset: '' .*allowed: mtbench", id="empty"),
        pytest.param("disk", "gsm8k", "source: 'disk' .*allowed: embedded, local, hub", id="source"),
    ],
)
def test_an_unknown_name_lists_the_allowed_ones(source, name, message):
    with pytest.raises(ValueError, match=message):
        load_prompt_set(ALL_PINS, source=source, name=name)


@pytest.mark.parametrize(("source", "data"), [("embedded", "."), ("hub", "."), ("local", None)])
def test_a_directory_belongs_to_source_local_alone(source, data):
    name = dataset_names(ALL_PINS, source)[0]
    with pytest.raises(ValueError, match=f"is not allowed with source {source}"):
        load_prompt_set(ALL_PINS, source=source, name=name, data=data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "mine: the file holds no row", id="empty_file"),
        pytest.param('{"id": "a", "turns": ["x"]}', "mine line 1: lacks domain", id="no_domain"),
        pytest.param('{"id": "a", "domain": "law", "turns": ["x"]}', "domain 'law' is not allowed", id="domain"),
        pytest.param('{"id": "a", "domain": "math", "turns": "x"}', "turns must be a list", id="turns"),
        pytest.param('{"id": null, "domain": "math", "turns": ["x"]}', "id None is not allowed", id="null_id"),
        pytest.param("[" * 100_000, "mine line 1: not JSON", id="nested"),
        pytest.param('{"id": "a", "domain": "math", "turns": ["x"]}\n' * 2, "id 'a' is there twice", id="repeated_id"),
    ],
)
def test_a_malformed_row_names_its_line(content, message):
    with pytest.raises(ValueError, match=message):
        parse_rows(content.encode(), "mine", {})


def test_a_missing_category_field_and_a_wrong_row_count_are_errors(mine):
    pins, data = mine([record()], category=["kind"])
    with pytest.raises(ValueError, match="lacks kind, which make its category"):
        load_prompt_set(pins, source="local", name="mine", data=data)
    pins, data = mine([record()], rows=2)
    with pytest.raises(ValueError, match="has 1 rows, its pin says 2"):
        load_prompt_set(pins, source="local", name="mine", data=data)


# hub sets and pins


@pytest.fixture
def pins_file(tmp_path):
    # as it was before anyone ran `tfm pin`
    path = tmp_path / "datasets.yaml"
    path.write_text(re.sub(r"revision: '[0-9a-f]{40}'", "revision: null", PINS.read_text()))
    return path


def test_every_unpinned_hub_set_is_named_and_refused_with_the_remedy():
    pins = {**ALL_PINS, "hub": {**ALL_PINS["hub"], "gsm8k": {**ALL_PINS["hub"]["gsm8k"], "revision": None}}}
    assert "gsm8k" in unpinned(pins) and unpinned(pins, ["gsm8k", "mtbench"]) == ["gsm8k"]
    with pytest.raises(ValueError, match="revision: gsm8k is unpinned .*run `tfm pin`"):
        require_pinned(pins, "gsm8k")
    with pytest.raises(ValueError, match="unpinned"):
        load_hub(pins, "gsm8k", load_dataset=lambda *_, **__: pytest.fail("the hub was asked"))


def test_pin_fills_every_revision_and_keeps_the_rest_of_the_file(pins_file):
    asked, before, text = [], load_pins(pins_file), pins_file.read_text()
    revisions = pin(pins_file, resolve=lambda repo: asked.append(repo) or REVISION)
    after = load_pins(pins_file)
    assert set(revisions) == set(unpinned(before)) and len(asked) == len(revisions) == 7
    assert unpinned(after) == []
    for name in revisions:
        before["hub"][name]["revision"] = REVISION
    assert after == before
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert [line for line in pins_file.read_text().splitlines() if line.lstrip().startswith("#")] == comments


def test_pin_leaves_pinned_sets_alone_unless_told_to_update(pins_file):
    pin(pins_file, resolve=lambda repo: REVISION)
    assert pin(pins_file, resolve=lambda repo: pytest.fail("asked")) == {}
    other = REVISION[::-1]
    assert pin(pins_file, names=["aime25"], update=True, resolve=lambda repo: other) == {"aime25": other}
    assert load_pins(pins_file)["hub"]["aime25"]["revision"] == other
    assert load_pins(pins_file)["hub"]["mtbench"] == ALL_PINS["hub"]["mtbench"]


def test_pin_writes_nothing_when_the_hub_fails_or_answers_with_no_commit(pins_file):
    before = pins_file.read_text()

    def offline(repo):
        if "MATH" in repo:
            raise ConnectionError("no route")
        return REVISION

    with pytest.raises(ValueError, match="math500 .*ConnectionError: no route.*nothing was written"):
        pin(pins_file, resolve=offline)
    with pytest.raises(ValueError, match="'main' .*40 hex digits"):
        pin(pins_file, resolve=lambda repo: "main")
    with pytest.raises(ValueError, match="dataset: 'gsm9k'"):
        pin(pins_file, names=["gsm9k"], resolve=lambda repo: REVISION)
    assert pins_file.read_text() == before


def test_a_broken_pins_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_pins(tmp_path / "none.yaml")
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump({"local": {"a": {}}}))
    with pytest.raises(ValueError, match="lacks embedded, hub"):
        load_pins(tmp_path / "cut.yaml")


HUB_RECORDS = {
    "mtbench": {"question_id": 81, "turns": ["a", "b"], "category": "writing"},
    "gsm8k": {"question": "a", "answer": "#### 1"},
    "math500": {"unique_id": "test/algebra/1.json", "problem": "a", "answer": "1", "subject": "Algebra"},
    "aime25": {"problem": "a", "answer": "1", "id": "0"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "a", "canonical_solution": "x"},
    "mbpp": {"task_id": 11, "prompt": "a", "code": "x", "test_list": ["assert f()"]},
    "livecodebench": {
        "question_id": "abc",
        "question_content": "a",
        "starter_code": "def f():",
        "platform": "leetcode",
        "difficulty": "hard",
    },
}


@pytest.mark.parametrize("name", HUB_RECORDS)
def test_hub_columns_become_rows_at_the_pinned_revision(name):
    entry = {**ALL_PINS["hub"][name], "revision": REVISION, "rows": 1}
    pins = {**ALL_PINS, "hub": {**ALL_PINS["hub"], name: entry}}
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return [HUB_RECORDS[name]]

    loaded = load_hub(pins, name, load_dataset=load_dataset)
    assert loaded.rows[0].turns[0] == "a" and loaded.rows[0].index == 0 and loaded.revision == REVISION
    [(arguments, options)] = calls
    assert options.get("revision") == REVISION or REVISION in options["data_files"]
    assert arguments[0] == entry.get("repo") or arguments == ("json",)


def test_a_renamed_hub_column_lists_what_there_is():
    pins = {**ALL_PINS, "hub": {"gsm8k": {**ALL_PINS["hub"]["gsm8k"], "revision": REVISION}}}
    with pytest.raises(ValueError, match=r"column question is not there \(there are: answer, problem\)"):
        load_hub(pins, "gsm8k", load_dataset=lambda *_, **__: [{"problem": "a", "answer": "1"}])

    for turn in ({"text": "a"}, ["a"], 3):  # a list of turns in its place would be sent in part
        with pytest.raises(ValueError, match="gsm8k row 0: turns must be a list of strings"):
            load_hub(pins, "gsm8k", load_dataset=lambda *_, turn=turn, **__: [{"question": turn, "answer": "1"}])


def test_an_unreachable_hub_is_an_error_that_points_to_local_files():
    def offline(*_, **__):
        raise ConnectionError("no route")

    pins = {**ALL_PINS, "hub": {"gsm8k": {**ALL_PINS["hub"]["gsm8k"], "revision": REVISION}}}
    with pytest.raises(ValueError, match="could not be loaded .*no route.*data=DIR"):
        load_hub(pins, "gsm8k", load_dataset=offline)


# ShareChat


def sharechat_records(platform: str) -> list[dict]:
    """Return one conversation per language, topic and round: enough of each for the sample."""
    records = []
    for language in ("English", *LANGUAGES):
        for place, topic in enumerate(TOPICS):
            for copy in range(6 if language == "English" else 1):
                url = f"https://{platform}.example/{language}/{place}/{copy}"
                text = f"{platform} asks about {topic} in {language}, {copy}"
                user = dict(zip(COLUMNS, (url, "user", text, topic, language), strict=True))
                records += [user, {**user, "role": "assistant", "plain_text": "an answer"}]
    return records


def test_sharechat_sample_has_the_papers_sizes_and_no_repeat():
    by_platform = {platform: sharechat_records(platform) for platform in PLATFORMS}
    entry = {**ALL_PINS["hub"]["sharechat"], "revision": REVISION}
    pins = {**ALL_PINS, "hub": {"sharechat": entry}}

    def load_dataset(kind, *, data_files, split):
        assert kind == "csv" and REVISION in data_files
        return by_platform[data_files.split("/")[-1].split("_")[0]]

    rows = load_hub(pins, "sharechat", load_dataset=load_dataset).rows
    languages = [row.category for row in rows]
    assert {language: languages.count(language) for language in set(languages)} == {"english": 250, **LANGUAGES}
    assert len({row.id for row in rows}) == 500 and [row.index for row in rows] == list(range(500))
    english = [row.meta["topic"] for row in rows if row.category == "english"]
    assert {topic: english.count(topic) for topic in TOPICS} == topic_quotas(250)
    assert [row.id for row in load_hub(pins, "sharechat", load_dataset=load_dataset).rows] == [row.id for row in rows]


def test_sharechat_quotas_give_the_remainder_to_the_first_topics():
    quotas = list(topic_quotas(250).values())
    assert quotas == [11] * 10 + [10] * 14


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        pytest.param(["x" * 19], False, id="under_20_characters"),
        pytest.param(["x" * 20], True, id="20_characters"),
        pytest.param(["x" * 8001], False, id="turn_over_8000"),
        pytest.param(["x" * 6000] * 3, False, id="over_12000_together"),
        pytest.param(["x" * 20] * 9, False, id="nine_turns"),
        pytest.param([None, ""], False, id="no_text"),
    ],
)
def test_sharechat_filters(turns, kept):
    records = [dict(zip(COLUMNS, ("u", "human", turn, TOPICS[0], "en"), strict=True)) for turn in turns]
    assert bool(read_conversations(records, "grok")) == kept


def test_sharechat_takes_the_most_frequent_topic_and_drops_other_languages():
    topics = ["other", "translation", "translation"]
    records = [dict(zip(COLUMNS, ("u", "user", "x" * 20, topic, "German"), strict=True)) for topic in topics]
    [conversation] = read_conversations(records, "grok")
    assert (conversation.topic, conversation.language) == ("translation", "german")
    assert pick([conversation]) == []
    with pytest.raises(ValueError, match="column role is not in the file of grok"):
        read_conversations([{k: v for k, v in records[0].items() if k != "role"}], "grok")


# the script


def test_the_script_writes_prompts_and_a_manifest_that_pins_them(tmp_path):
    result, out = run_script("--dataset", "sample-math", "--source", "embedded", "--limit", "5", tmp_path=tmp_path)
    prompts = read_prepared(out)
    manifest = json.loads(Path(result["manifest"]).read_text(encoding="utf-8"))
    assert result["manifest"].endswith("set.manifest.json") and result["n"] == len(prompts) == manifest["n"] == 5
    assert manifest["prompts_sha256"] == hashlib.sha256(out.read_bytes()).hexdigest() == result["prompts_sha256"]
    assert manifest["dataset_sha256"] == hashlib.sha256((ROOT / "tfm/data/sample-math.jsonl").read_bytes()).hexdigest()
    assert manifest["tokenizer_sha256"] == hashlib.sha256((TARGET / "tokenizer.json").read_bytes()).hexdigest()
    assert list(manifest["templates"]) == ["paper/raw/direct"] and manifest["skipped"] == []
    assert sorted(path.name for path in out.parent.iterdir()) == ["set.jsonl", "set.manifest.json"]


def test_the_script_gives_the_same_bytes_twice(tmp_path):
    first, out = run_script("--dataset", "sample-chat", "--source", "embedded", tmp_path=tmp_path)
    content = out.read_bytes()
    second, _ = run_script("--dataset", "sample-chat", "--source", "embedded", tmp_path=tmp_path)
    assert first == second and out.read_bytes() == content


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_cut_prepared_file_is_named_with_the_remedy(tmp_path, kept):
    _, out = run_script("--dataset", "sample-chat", "--source", "embedded", tmp_path=tmp_path)
    content = out.read_bytes()
    out.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match="set.jsonl.*run Snakemake again"):
        read_prepared(out)


def test_an_altered_prepared_file_is_refused(tmp_path):
    _, out = run_script("--dataset", "sample-chat", "--source", "embedded", tmp_path=tmp_path)
    lines = out.read_text().splitlines(keepends=True)
    changed = json.loads(lines[0])
    changed["tokens"][0] += 1
    for kept in (lines[:-1], [json.dumps(changed) + "\n", *lines[1:]]):
        out.write_text("".join(kept))
        with pytest.raises(ValueError, match="set.jsonl was cut or altered: .*set.manifest.json says.*--force"):
            read_prepared(out)
    out.write_text("".join([*lines, lines[0]]))
    with pytest.raises(ValueError, match=r"line \d+: id '.*' is there twice"):
        read_prepared(out)
    out.write_text("".join(lines[:-1]))
    out.with_suffix(".manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="set.manifest.json: no manifest"):
        read_prepared(out)
    out.with_suffix(".manifest.json").unlink()
    assert len(read_prepared(out)) == len(lines) - 1


def test_bad_input_to_the_script_exits_2_with_one_line_and_no_file(tmp_path):
    out = tmp_path / "x.jsonl"
    command = [sys.executable, str(SCRIPT), "--dataset", "sample-chat", "--source", "embedded", "--limit", "200"]
    command += ["--tokenizer", str(TARGET), "--target", "nano", "--context", "2048", "--max-new-tokens", "48"]
    done = subprocess.run([*command, "--pins", str(PINS), "--out", str(out)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and not out.exists()
    assert "limit: 200 is not allowed for sample-chat (allowed: 1 to 16" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_check_dataset_returns_the_entry():
    assert check_dataset(ALL_PINS, "local", "aime25")["rows"] == 30
