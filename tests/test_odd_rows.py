"""Prompt sets as other tools write them: line ends, byte order marks, rows that are none, one text under two names."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from workflow_runs import ROOT, TOKENIZER, environment_of

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from make_report import not_run

from tfm.prompt_sources import load_hub, parse_rows
from tfm.prompts import Preparation, PromptRow, prepare, repeated
from tfm.sharechat import read_conversations
from tfm.tokenizer import load_tokenizer

ROW = {"id": "a", "domain": "chat", "turns": ["Hello"]}


def row(**fields) -> bytes:
    return json.dumps({**ROW, **fields}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (row() + b"\r\n" + row(id="b") + b"\r\n", ["Hello", "Hello"]),
        (row() + b"\r\n\r\n", ["Hello"]),
        (row(turns=["one\u2028two\x85three"]) + b"\n", ["one\u2028two\x85three"]),
    ],
)
def test_line_ends_of_other_tools_change_no_row(content, found):
    assert [one.turns[0] for one in parse_rows(content, "d", {})] == found


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n \n"])
def test_a_file_without_rows_is_named_as_one(content):
    with pytest.raises(ValueError, match="^d: the file holds no row; restore it"):
        parse_rows(content, "d", {})


def frozen(path: Path, content: bytes):
    path.write_bytes(content)
    entry = {"revision": "a" * 40, "data_files": str(path), "columns": {"turn": "q"}, "domain": "chat", "repo": "r"}
    return load_hub({"hub": {"d": entry}, "local": {}, "embedded": {}}, "d").rows


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'\xef\xbb\xbfq,z\r\n"hi\r\nyou",1\r\n'),
        ("a.csv", b'q,z\n"hi\r\nyou",1,2,3\n'),
        ("a.jsonl", b'\xef\xbb\xbf{"q": "hi\\r\\nyou"}\r\n\r\n'),
    ],
)
def test_a_frozen_copy_may_come_from_a_spreadsheet(tmp_path, name, content):
    assert [one.turns for one in frozen(tmp_path / name, content)] == [("hi\r\nyou",)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"p,z\nhi,1,2,3\n", r"d row 0: column q is not there .there are: None, p, z"),
        *(("a.jsonl", text, "d row 0: .* is no object") for text in (b"[1]\n", b"3\n", b'"q"\n', b"null\n")),
    ],
)
def test_rows_that_are_none_are_refused_by_number(tmp_path, name, content, words):
    with pytest.raises(ValueError, match=words):
        frozen(tmp_path / name, content)


@pytest.mark.parametrize(
    ("record", "words"), [([1], "is no object"), ({None: ["x"], "url": "u"}, "there are: None, url")]
)
def test_a_conversation_of_another_shape_is_refused(record, words):
    with pytest.raises(ValueError, match=f"sharechat: .*{words}"):
        list(read_conversations([record], "grok"))


@pytest.mark.parametrize(
    "fields", [{"max_new_tokens": "8"}, {"max_new_tokens": 8.5}, {"context": True}, {"reasoning": "false"}]
)
def test_a_preparation_of_other_types_is_refused_by_key(fields):
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: .* is not allowed"):
        Preparation(**{"max_new_tokens": 8, "context": 64, **fields}).check()


def test_a_text_under_two_names_is_reported_and_never_left_out_in_silence():
    """llama.cpp#10455: what is asked twice counts twice, and a cache answers the second one."""
    texts = {"p1": "same", "p2": "other", "p3": "same", "p4": "same"}
    rows = [PromptRow(name, place, "d", "chat", (text,)) for place, (name, text) in enumerate(texts.items())]
    prompts, skipped = prepare(rows, load_tokenizer(TOKENIZER.parent), Preparation(max_new_tokens=8, context=64))
    assert len(prompts) == 4 and not skipped
    assert repeated(prompts) == {"p3": "p1", "p4": "p1"} and repeated(prompts[:2]) == {}
    page = "".join(not_run({"open": []}, {"prompts": {"d.json": {"skipped": [], "repeated": {"<p3>": "p1"}}}}))
    assert "used twice: &lt;p3&gt; of d.json has the text of p1" in page and "nothing was left out" not in page


def test_a_full_disk_while_prompts_are_prepared_is_said_in_one_line(tmp_path):
    command = [
        sys.executable,
        "workflows/scripts/prepare_prompts.py",
        "--dataset",
        "sample-chat",
        "--source",
        "embedded",
    ]
    command += ["--tokenizer", str(TOKENIZER.parent), "--target", "nano", "--context", "2048", "--max-new-tokens", "8"]

    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = subprocess.run(
        [*command, "--out", str(tmp_path / "p.jsonl")],
        cwd=ROOT,
        env={**environment_of(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        preexec_fn=no_room,
    )
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("prepare_prompts: "), done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "p.jsonl").exists()
