"""A run of the public harness beside ours: its log read as it counts, and one schema for a request of either."""

import json
import sys

import jsonschema
import pandas as pd
import pytest
import yaml
from test_cells import finished
from workflow_runs import ROOT

from baselines.commands.cells import plain
from tfm.cells import load_cells

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import import_requests
from import_requests import beside, read_log, to_rows

SCHEMA = yaml.safe_load((ROOT / "workflows/schemas/request.schema.yaml").read_text())
HEAD = "base_url=http://127.0.0.1:30000 model=Qwen/Qwen3.6-27B temperature=1.0 reasoning=on max_new_tokens=4096 "
HEAD += "concurrency=1 flush_cache_between_requests=True per_dataset_limit=paper subsample_seed=20260617 seed=0"
SETS = {"gsm8k": [(100, 20), (50, 25)], "mtbench": [(80, 10)]}  # (tokens, steps) a request


def log_of(sets=SETS, *, wall: dict, head: str = HEAD, summary: bool = True) -> str:
    lines = [
        "server: model_path=/models/target",
        "[warmup 1/1] qid=0 tokens=9 steps=9 accept_length=1.00 latency=0.1s finish=length",
    ]
    totals = []
    for name, requests in sets.items():
        for i, (tokens, steps) in enumerate(requests):
            tau = tokens / max(steps, 1)
            lines.append(
                f"[{name} {i + 1}/{len(requests)}] qid={10 + i} tokens={tokens} steps={steps} "
                f"accept_length={tau:.2f} latency=1.5s finish=stop"
            )
        total = sum(tokens for tokens, _ in requests)
        numbers = f"{total:>11} {wall[name]:>9.1f} {total / wall[name]:>10.1f} {3.0:>13.2f} {'-':>8}"
        totals.append(f"{name:<14} {len(requests):>7} {0:>6} {numbers}")
    if summary:
        names = "dataset        prompts errors  gen_tokens    wall_s  tok/s/seq accept_length  speedup"
        lines += ["=" * 80, "DFlash-TfM paper benchmark summary", head, "-" * 80, names, *totals, "-" * 80]
        lines += ["Macro Avg.                                    43.2          3.00        -"]
    return "\n".join(lines) + "\n"


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "tfm.log").write_text(log_of(wall={"gsm8k": 3.0, "mtbench": 2.0}))
    ar = {name: [(tokens, tokens) for tokens, _ in requests] for name, requests in SETS.items()}
    (tmp_path / "ar.log").write_text(log_of(ar, wall={"gsm8k": 15.0, "mtbench": 8.0}))
    return tmp_path


def rows_of(folder) -> list[dict]:
    return [row for m in ("ar", "tfm") for row in to_rows(read_log(m, folder / f"{m}.log"), "they", "NVIDIA B200")]


def test_an_imported_log_gives_the_harnesss_own_numbers(logs):
    table = beside(rows_of(logs), None).set_index(["dataset", "method"])
    assert table.loc[("gsm8k", "tfm"), "tau"] == pytest.approx((100 / 20 + 50 / 25) / 2)
    # plain means over sets, and the ratio of the macros
    assert table.loc[("macro", "tfm"), "tau"] == pytest.approx((3.5 + 8) / 2)
    assert table.loc[("macro", "tfm"), "tok_s"] == pytest.approx((150 / 3 + 80 / 2) / 2)
    assert table.loc[("macro", "tfm"), "speedup"] == pytest.approx(45 / ((150 / 15 + 80 / 8) / 2))
    assert table.loc[("macro", "ar"), "tau"] == 1 and table.loc[("macro", "ar"), "speedup"] == 1
    assert set(table["setting"]) == {"t1-think"} and set(table["device"]) == {"NVIDIA B200"}
    assert table.loc[("macro", "tfm"), "n"] == 3 and not table["reason"].any()


def test_runs_of_several_seeds_have_a_wall_each(logs):
    """The tokens of both runs over the wall of the first doubled the speed."""
    head = HEAD.replace(" seed=0", " seed=1")
    (logs / "again.log").write_text(log_of(wall={"gsm8k": 3.0, "mtbench": 2.0}, head=head))
    more = to_rows(read_log("tfm", logs / "again.log"), "they", "NVIDIA B200")
    one, two = (beside(rows, None).set_index(["dataset", "method"]) for rows in (rows_of(logs), rows_of(logs) + more))
    for name in ("tok_s", "speedup", "tau"):
        assert two.loc[("macro", "tfm"), name] == pytest.approx(one.loc[("macro", "tfm"), name]), name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x8e[gsm8k 1/1]", "is no text"),
        (
            b'{"dataset": "d", "id": 1, "completion_tokens": 4, "spec_verify_ct": 2, "dataset_wall": []}',
            "line 1 is no request .TypeError",
        ),
        (
            b'{"dataset": "d", "id": 1, "error": "x", "temperature": "hot", "reasoning": "on"}',
            "temperature: 'hot' is not allowed",
        ),
    ],
)
def test_what_is_no_log_is_refused_by_file(tmp_path, data, words):
    (tmp_path / "x.log").write_bytes(data)
    with pytest.raises(ValueError, match=f"x.log: {words}"):
        read_log("tfm", tmp_path / "x.log")


ROW = {"dataset": "gsm8k", "id": 3, "temperature": 1, "reasoning": "on", "dataset_wall": 4.0}
ROW |= {"completion_tokens": 40, "spec_verify_ct": 10}


def write(folder, *rows):
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "log.jsonl"


@pytest.mark.parametrize("steps", [{"spec_verify_ct": 0}, {"spec_verify_ct": None}, {}, {"spec_verify_ct": 40}])
def test_requests_of_ar_count_a_step_a_token(tmp_path, steps):
    row = {key: value for key, value in ROW.items() if key != "spec_verify_ct"}
    meta = {"meta_info": {"finish_reason": {"type": "stop"}} | steps}
    log = read_log("ar", write(tmp_path, row | meta, ROW | steps | {"id": 4, "spec_verify_ct": 0, "e2e_latency": 1.0}))
    assert [(r["id"], r["steps"], r["finish_reason"]) for r in log.requests] == [("3", 40, "stop"), ("4", 40, None)]
    assert beside(to_rows(log, "they", "a card"), None)["tok_s"].tolist() == [20, 20]


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        *(("tfm", {"spec_verify_ct": value}, "spec_verify_ct .* is no count") for value in (None, -4, 2.5, "9", True)),
        *(("tfm", {"completion_tokens": value}, "completion_tokens .* is no count") for value in (None, -4, 2.5, "9")),
        *((name, {"spec_verify_ct": 0}, "request '3': 40 tokens by 0 verify passes") for name in ("dflash", "tfm")),
        ("ddtree", {"spec_verify_ct": 41}, "40 tokens by 41 verify passes"),
        ("ar", {}, "10 verify passes for 40 tokens of ar"),
        ("tfm", {"id": None}, "dataset or id is null"),
        *(("tfm", {"dataset": name}, "dataset .* is not allowed") for name in ("", " ", "macro")),
        *(("tfm", {"e2e_latency": value}, "latency .* is not allowed") for value in (-1, float("nan"), float("inf"))),
        ("tfm", {"finish_reason": ["stop"]}, "finish_reason .'stop'. is not allowed"),
        ("tfm", {"concurrency": 0}, "concurrency: '0' is not allowed"),
        *(("tfm", {"dataset_wall": wall}, "a wall of .* is not allowed") for wall in (0, -1.0, float("inf"))),
        ("tfm", {"reasoning": "yes"}, "reasoning: 'yes' is not allowed"),
        ("tfm", {"meta_info": None}, "line 1 is no request"),
    ],
)
def test_a_count_that_is_missing_or_cannot_be_is_never_one(tmp_path, method, change, words):
    """sglang#29329: a row of a tree without its verify passes was laid beside ours as one token a pass."""
    assert read_log("tfm", write(tmp_path, ROW)).requests[0]["steps"] == 10
    with pytest.raises(ValueError, match=f"log.jsonl.*{words}"):
        read_log(method, write(tmp_path, ROW | change))


def test_a_log_is_one_run_of_prompts_that_differ(tmp_path):
    for change in ({"temperature": 0}, {"id": 4, "dataset_wall": 5.0}, {}):
        with pytest.raises(
            ValueError, match=r"is '0', '1' before|the wall of gsm8k is 5.0, 4.0 before|'3' is there twice"
        ):
            read_log("tfm", write(tmp_path, ROW, ROW | change))
    assert read_log("tfm", write(tmp_path, ROW | {"reasoning": False})).setting == "t1"


@pytest.mark.parametrize("change", [{"text": "one\u2028two\x85three"}, {"dataset": "live-code"}])
def test_text_of_any_kind_ends_no_line_and_names_may_have_dashes(tmp_path, change):
    rows = [ROW | change, ROW | {"dataset": "mbpp"}, ROW | {"dataset": "mbpp", "id": 4, "completion_tokens": 0}]
    rows[2]["spec_verify_ct"] = 0
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "log.jsonl").write_text(text, encoding="utf-8-sig", newline="")
    found = to_rows(read_log("tfm", tmp_path / "log.jsonl"), "they", "a card")
    assert [(row["id"], row["index"]) for row in found] == [("3", 0), ("3", 0), ("4", 1)]  # of the row in its set
    last = beside(found, None).iloc[-1]
    assert last["n"] == 1 and last["reason"].startswith("1 requests without a token, in no mean")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\0"])
def test_a_table_by_set_that_is_none_is_named(logs, capsys, text):
    (logs / "per_set.csv").write_text(text)
    words = ["--log", f"tfm={logs}/tfm.log", "--origin", "a", "--device", "b", "--per-set", f"{logs}/per_set.csv"]
    assert import_requests.main([*words, "--out", f"{logs}/out"]) == 2
    assert f"{logs}/per_set.csv " in capsys.readouterr().err
    assert import_requests.main([*words[:-2], "--out", f"{logs}/tfm.log"]) == 2  # a file in the folder's place


def test_what_a_failed_request_made_is_not_counted(tmp_path):
    """It has its time and no token, as the harness counts; a request that ended in its prefill has no passes."""
    failed, short = ROW | {"id": 4, "error": "aborted"}, ROW | {"id": 5, "completion_tokens": 1, "spec_verify_ct": 0}
    log = read_log("tfm", write(tmp_path, ROW, failed, short))
    row = beside(to_rows(log, "they", "a card"), None).iloc[0]
    assert (row["tau"], row["tok_s"], row["n"], row["errors"]) == (4, 41 / 4, 1, 1)
    only = beside(to_rows(read_log("tfm", write(tmp_path, failed)), "they", "a card"), None).iloc[0]
    assert only["tok_s"] == 0 and only["reason"] == "no ar run of the same sets"


def test_a_failed_request_is_counted_and_not_averaged(logs):
    text = (logs / "tfm.log").read_text()
    old = next(line for line in text.splitlines() if line.startswith("[gsm8k 2/2]"))
    text = text.replace(old, "[gsm8k 2/2] qid=11 ERROR: timed out").replace(
        "      2      0         150", "      2      1         100"
    )
    (logs / "tfm.log").write_text(text)
    table = beside(rows_of(logs), None).set_index(["dataset", "method"])
    assert table.loc[("gsm8k", "tfm"), "errors"] == 1 and table.loc[("gsm8k", "tfm"), "tau"] == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("[gsm8k 2/2]", "[gsm9k 2/2]"), "lines are missing"),
        (lambda text: text.replace("[gsm8k 1/2]", "[gsm-8k 1/2]"), "gsm8k has no request number 1; lines are missing"),
        (lambda text: text.replace("latency=1.5s", "latency=1e-05s"), "'.gsm8k 1/2.*' is no whole line of the harness"),
        (lambda text: text.partition("=====")[0], "says nothing of reasoning, temperature"),
        (lambda text: "", "no request of the harness"),
        (lambda text: '{"dataset": "gsm8k"}', "line 1 is no request"),
        (lambda text: "{", "line 1 is no request"),
    ],
)
def test_a_log_that_is_cut_or_contradicts_itself_is_refused(logs, change, words):
    (logs / "tfm.log").write_text(change((logs / "tfm.log").read_text()))
    with pytest.raises(ValueError, match=words):
        read_log("tfm", logs / "tfm.log")


def test_another_concurrency_and_a_missing_ar_run_are_said(logs):
    text = (logs / "tfm.log").read_text().replace("concurrency=1", "concurrency=8")
    (logs / "tfm.log").write_text(text)
    table = beside(to_rows(read_log("tfm", logs / "tfm.log"), "they", "a card"), None)
    assert (table["reason"] == "no ar run of the same sets; concurrency 8, ours is 1").all()


def test_both_stand_in_one_table_and_the_command_writes_it(logs, capsys):
    ours = pd.DataFrame([{"suite": "paper", "device": "NVIDIA B200", "dataset": "gsm8k", "variant": "tfm-b64-w4"}])
    ours.assign(setting="t1-think", tau=6.5, tok_s=390.0, speedup=4.3, n=128).to_csv(logs / "per_set.csv", index=False)
    words = ["--log", f"ar={logs}/ar.log", f"tfm={logs}/tfm.log", "--origin", "they", "--device", "NVIDIA B200"]
    assert import_requests.main([*words, "--per-set", f"{logs}/per_set.csv", "--out", f"{logs}/out"]) == 0
    table = pd.read_csv(logs / "out/beside.csv")
    mine = table[(table["method"] == "tfm") & (table["dataset"] == "gsm8k")].set_index("origin")
    assert mine["tau"].to_dict() == {"they": 3.5, "ours: paper": 6.5}
    for line in (logs / "out/requests.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), SCHEMA)
    assert import_requests.main(["--log", "tfn=x", "--origin", "a", "--device", "b", "--out", str(logs / "no")]) == 2
    assert "did you mean tfm?" in capsys.readouterr().err and not (logs / "no").exists()


def test_every_field_of_our_own_export_is_in_the_schema_and_described(tmp_path):
    finished(tmp_path)
    for row in load_cells([tmp_path]).requests.to_dict("records"):
        fields = {key: plain(value) for key, value in row.items() if key != "cell"}
        jsonschema.validate({"cell": "results/toy", "state": "done", **fields}, SCHEMA)
        imported = {"origin", "error", "latency_s", "dataset_wall_s", "log_sha256"}
        assert set(SCHEMA["properties"]) - imported == {"cell", "state", *fields}
    assert all(entry["description"] for entry in SCHEMA["properties"].values())
