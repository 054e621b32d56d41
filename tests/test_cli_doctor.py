"""`tfm doctor`: exit status 0 where the default suite can run; otherwise 1, and the reason by name."""

import json
import shutil

import pytest
from workflow_runs import ROOT

from baselines import cli, diagnosis
from baselines.commands import doctor
from tfm_kernels.gdn import solve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout to be looked at: this code and these weights, nothing run, nothing locked."""
    (tmp_path / "tfm/weights").mkdir(parents=True)
    for name in ("kernels", "workflows", "tfm/data"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tfm/weights/nano", tmp_path / "tfm/weights/nano")
    for module in (diagnosis, doctor):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    return tmp_path


def run(capsys, *words):
    capsys.readouterr()
    status = cli.main(["doctor", *words])
    return status, capsys.readouterr().out


def report(capsys):
    """The exit status, {(section, name): (state, text)} and the last line."""
    status, out = run(capsys)
    *lines, last = out.splitlines()
    rows = [line.split("\t") for line in lines]
    assert all(len(row) == 4 for row in rows) and "\x1b" not in out
    return status, {(section, name): (state, text) for state, section, name, text in rows}, last


def test_where_the_default_suite_can_run_the_status_is_0(capsys, folder):
    status, found, last = report(capsys)
    assert status == 0 and last.endswith("suite nano can run: snakemake --cores all")
    assert {section for section, _ in found} == set(diagnosis.SECTIONS)
    for name in ("naive, cpu", "solve, cpu"):
        state, text = found["kernels", name]
        assert state == "good" and "at T = 16" in text and "at T = 65 from float64" in text
    assert found["weights", "nano"][0] == found["weights", "nano tokenizer"][0] == found["suites", "nano"][0] == "good"
    assert {"nano", "mini", "graft", "dense", "paper"} <= {name for section, name in found if section == "suites"}
    assert found["suites", "paper"][0] == "open" and "weights/qwen3.6-27b" in found["suites", "paper"][1]


def test_the_report_as_json_holds_the_numbers(capsys, folder):
    status, out = run(capsys, "--json")
    found = json.loads(out)
    assert status == 0 and found["can_run"] and found["reasons"] == []
    errors = found["kernels"]["solve, cpu"]["error"]
    assert set(errors) == {"16", "65"} and 0 < max(errors.values()) < 1e-5
    assert len(found["weights"]["nano"]["sha256"]["target"]) == 64
    assert found["machine"]["processor"]["cores"] >= 1 and found["packages"]["needed"]["torch"]
    assert found["suites"]["nano"]["states"] == {"missing": found["suites"]["nano"]["cells"]}


def test_a_kernel_that_is_wrong_is_found(capsys, folder, monkeypatch):
    tree_verify = solve.tree_verify

    def wrong(*arguments):
        out, u, path_log_decay = tree_verify(*arguments)
        return out + 1e-3, u, path_log_decay

    monkeypatch.setattr(solve, "tree_verify", wrong)
    status, found, last = report(capsys)
    assert status == 1 and found["kernels", "solve, cpu"][0] == "bad" and found["kernels", "naive, cpu"][0] == "good"
    assert "suite nano cannot run: kernels, solve, cpu: 1.0e-03 at T = 16" in last


def test_a_kernel_that_gives_nan_is_found(capsys, folder, monkeypatch):
    monkeypatch.setattr(diagnosis, "kernel_error", lambda *_: float("nan"))
    status, found, _ = report(capsys)
    assert status == 1 and found["kernels", "solve, cpu"][0] == "bad"


def test_a_kernel_that_does_not_launch_hides_no_other(capsys, folder, monkeypatch):
    def broken(name, device, rows):
        if name == "naive":
            raise RuntimeError("no image for this device")
        return 1e-7

    monkeypatch.setattr(diagnosis, "kernel_error", broken)
    status, found, _ = report(capsys)
    assert status == 0 and found["kernels", "solve, cpu"][0] == "good"
    assert found["kernels", "naive, cpu"] == ("bad", "RuntimeError: no image for this device")


def test_changed_weights_are_named(capsys, folder):
    path = folder / "tfm/weights/nano/weaver/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, found, last = report(capsys)
    assert status == 1 and "weaver/model.safetensors is not the family's" in found["weights", "nano"][1]
    assert "weaver/model.safetensors" in last


def test_missing_weights_are_named(capsys, folder):
    shutil.rmtree(folder / "tfm/weights/nano/drafter")
    status, found, last = report(capsys)
    assert status == 1 and "drafter not here" in found["weights", "nano"][1] and "suites, nano: " in last
    shutil.rmtree(folder / "tfm/weights/nano")
    status, found, last = report(capsys)
    assert status == 1 and "weights, nano: not here; git checkout -- tfm/weights" in last


def test_a_tokenizer_of_other_content_is_named(capsys, folder):
    path = folder / "tfm/weights/nano/target/tokenizer.json"
    path.write_text(
        path.read_text().replace('"use_regex": true', '"use_regex": true ').replace("<|im_end|>", "<|end|>")
    )
    status, found, _ = report(capsys)
    assert status == 1 and any(
        "im_end" in text or "tokenizer" in text for state, text in found.values() if state == "bad"
    )


def test_a_lock_that_a_kill_left_says_tfm_resume(capsys, folder, monkeypatch):
    (folder / ".snakemake/locks").mkdir(parents=True)
    (folder / ".snakemake/locks/0.output.lock").touch()
    status, found, last = report(capsys)
    assert status == 1 and found["results", "lock"][0] == "bad" and "tfm resume" in last

    class Running:
        pid = 4321

        def runs(self, script):
            return script == "snakemake"

    monkeypatch.setattr("baselines.commands.resume.processes_in", lambda folder: [Running()])
    status, found, _ = report(capsys)
    assert status == 0 and found["results", "lock"] == ("note", "snakemake is running here (process 4321)")


def test_a_package_that_is_not_installed_is_named(capsys, folder, monkeypatch):
    version_of = diagnosis.version_of
    monkeypatch.setattr(diagnosis, "version_of", lambda name: None if name == "seaborn" else version_of(name))
    status, found, last = report(capsys)
    assert status == 1 and "packages, needed: seaborn not installed; pip install -e ." in last


def test_a_full_disk_is_named(capsys, folder, monkeypatch):
    usage = shutil.disk_usage(folder)._replace(free=10 * 2**20)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: usage)
    status, _, last = report(capsys)
    assert status == 1 and "machine, disk: 0.0 GiB free" in last


def test_a_look_that_fails_is_a_finding(capsys, folder, monkeypatch):
    def broken():
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setitem(diagnosis.SECTIONS, "suites", broken)
    status, found, last = report(capsys)
    assert status == 1 and found["suites", "not looked at"] == ("bad", "RuntimeError: no such thing")
