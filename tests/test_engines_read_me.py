"""What the read-me says of the serving engines: its commands plan cells, and its extras are the versions that run."""

import re
import shlex
import tomllib

import pytest
from workflow_runs import ROOT, jobs, snakemake

from baselines.sglang import flags as sglang
from baselines.vllm import flags as vllm

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^snakemake (--cores all --configfile workflows/config/engines\.yaml .*)$", README, re.MULTILINE)
METHODS = {"sglang": {"ar", "dflash", "ddtree", "dartree", "tfm"}, "vllm": {"ar", "dflash"}}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: re.search(r"engine=([\w-]+)", words)[1])
def test_a_dry_run_of_a_documented_command_serves_every_arm_of_its_engine(words):
    # no engine is installed here: server_python does not exist
    text = snakemake(ROOT, "-n", "-F", "--nolock", *shlex.split(words))
    engine = re.search(r"engine=([\w-]+)", words)[1]
    counts = jobs(text)
    assert "decode_cell" not in counts and counts["make_tables"] == 1
    found = re.findall(rf"results/engines/cells/{engine}/mini/[\w-]+/([a-z]+)[\w-]*/t\d", text)
    assert set(found) == METHODS[engine] and counts["serve_cell"] % len(METHODS[engine]) == 0


def test_both_engines_are_documented_with_an_extra_of_the_version_that_the_runner_wants():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert len(COMMANDS) == 2
    for name, flags in (("sglang", sglang), ("vllm", vllm)):
        assert extras[name] == [f"{name}=={flags.VERSION}"] and f"'.[{name}]'" in README
