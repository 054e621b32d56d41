"""Faults that other projects reported and that no other file guards against; tests/CASES.md lists all of them."""

import json
import os
import time

import engine_models
import numpy as np
import pytest
import torch
import yaml
from test_decode import PROMPTS, Oracle, ar_tokens
from test_kernels import error, gdn_inputs, random_parents
from test_metrics import arm, request
from test_target import toy_target
from torch.utils._python_dispatch import TorchDispatchMode
from workflow_runs import NANO, ROOT

from baselines import suite
from baselines.commands import resume
from tfm import metrics
from tfm.config import DecodeConfig
from tfm.decode import Models, decode
from tfm_kernels.gdn import naive, ops

CONFIGS = {path.stem: path for path in sorted((ROOT / "workflows/config").glob("*.yaml"))}
SUITES = [name for name in CONFIGS if "suite" in yaml.safe_load(CONFIGS[name].read_text())]


def test_512_rounds_of_bf16_rows_do_not_drift():
    """uzu#609: the committed state against the sequential recurrence in float64 on the same rounded rows."""
    sizes = {"heads": 1, "value_heads": 2, "dim": 8}
    inputs = gdn_inputs(random_parents(1, 0), dtype=torch.float32, **sizes)
    state, exact = inputs[6], inputs[6].double()
    generator, errors = torch.Generator().manual_seed(0), []
    for number in range(512):
        parents = random_parents(6, number)
        rows = [x.bfloat16() for x in gdn_inputs(parents, seed=number, **sizes)[:5]]
        _, u, path_log_decay = ops.tree_verify(*(x.float() for x in rows), parents, state, backend="solve")
        node, path = int(torch.randint(0, 6, (1,), generator=generator)), []
        while node >= 0:
            path.insert(0, node)
            node = int(parents[0, node])
        state = ops.commit(state, rows[1].float(), u, path_log_decay, torch.tensor([path]))
        chain = [x.double()[:, path] for x in rows]
        exact = naive.naive_states(*chain, torch.arange(-1, len(path) - 1)[None], exact)[1][:, -1]
        errors.append(error(state, exact) / exact.abs().max().item())
    assert max(errors) < 1e-5  # float32 states of bfloat16 rows; rows rounded twice would be off by 4e-3
    assert max(errors[384:]) < 3 * max(errors[:128])


@pytest.mark.parametrize("run_all", [engine_models.run_reference, engine_models.run_static], ids=["loop", "static"])
@pytest.mark.parametrize("method", ["ar", "tfm"])
def test_a_prompt_decoded_again_costs_and_gives_the_same(method, run_all):
    """vllm#53912: a cache of earlier prompts. The second run prefills every token again and makes the same records."""
    models = engine_models.random_family()
    tree = {"budget": 12, "width": 3, "candidates": 20} if method == "tfm" else {}
    settings = DecodeConfig(method=method, max_new_tokens=12, seed=2, **tree)
    one, other = engine_models.prompts_of(models)[1:]
    prefilled, prefill = [], models.target.prefill
    models.target.prefill = lambda *args, **named: prefilled.append(args[0].numel()) or prefill(*args, **named)
    first, between, again = run_all(models, settings, [one, other, one])
    assert prefilled == [len(one.tokens), len(other.tokens), len(one.tokens)]
    engine_models.assert_same_records([again], [first])
    assert between.output_tokens != first.output_tokens


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


@pytest.mark.parametrize("nodes", [16, 65])
def test_no_tensor_of_verify_holds_a_state_for_every_node(nodes):
    """llama.cpp#22673: gigabytes went into one recurrent state a drafted node; the definition keeps them."""
    inputs = gdn_inputs(random_parents(nodes, 1), dim=32)
    states = nodes * inputs[6].numel()
    with LargestTensor() as seen:
        _, u, path_log_decay = ops.tree_verify(*inputs, backend="solve")
        ops.commit(inputs[6], inputs[1], u, path_log_decay, torch.tensor([[0, 1]]))
    assert seen.numbers < states / 4
    with LargestTensor() as seen:
        naive.naive_states(*inputs)
    assert seen.numbers >= states


def test_the_target_runs_once_a_step():
    """tpu-inference#3178: after a partial acceptance the accepted tokens went through the target again."""
    target, calls = toy_target(torch.float32), []
    emitted = ar_tokens(target, PROMPTS[1])
    for name in ("forward", "prefill", "verify"):
        inner = getattr(target, name)
        setattr(
            target, name, lambda *args, name=name, inner=inner, **named: (calls.append(name), inner(*args, **named))[1]
        )
    done, config = [], DecodeConfig(method="ar", max_new_tokens=12)
    proposer = Oracle([emitted], 3, lambda step: [1, None, 0][step % 3])
    decode([PROMPTS[1]], Models(target), config, proposer=proposer, on_finish=done.append)
    assert {step.accepted for step in done[0].steps} > {0, 1}
    assert calls == ["prefill"] + ["verify"] * len(done[0].steps)


def test_two_runs_of_one_arm_have_a_ratio_that_covers_one():
    """lattice#714: the same configuration timed twice differed by more than the gain that was claimed."""
    generator, hits = np.random.default_rng(0), 0
    for _ in range(20):
        arms = [
            arm([request(str(i), [3] * 8, index=i, us=1e6 * generator.lognormal(0, 0.1)) for i in range(24)])[0]
            for _ in range(2)
        ]
        estimate = metrics.ratio(*arms, "tok_s")
        assert 0.01 < estimate.high - estimate.low < 0.2  # as wide as 10 % a prompt make it
        hits += estimate.low <= 1 <= estimate.high
    assert hits >= 16  # 19 of 20 expected; 15 or fewer have a chance of 0.0003


def flat(value, head: str = "") -> dict:
    """Return a nested object as one level, keys joined by dots."""
    if not isinstance(value, dict):
        return {head: str(value)}
    return {
        key: text for name, inner in value.items() for key, text in flat(inner, f"{head}.{name}".strip(".")).items()
    }


KNOBS = {f"decode.{name}" for name in ("method", "budget", "width", "candidates", "children", "depth", "depth_bonus")}
KNOBS |= {"variant", "path", "swa_causal"}
PARTS = ("weights", "graft.drafter", "graft.weaver")  # a method names those of the parts it decodes with
PARTS += ("server.flags.speculative-", "server.plugin", "server.draft_rows")  # and how a server drafts for it


@pytest.mark.parametrize("name", SUITES)
def test_arms_differ_in_nothing_but_their_methods_own_knobs(name):
    """vllm#42910, lorax#474: one arm ran in graphs or with its scheduler on, or ignored the end of text, alone."""
    arms: dict[tuple, list[dict]] = {}
    for cell in suite.expand(suite.resolve(yaml.safe_load(CONFIGS[name].read_text()))):
        if cell["part"] == "headline":
            arms.setdefault((cell["dataset"], cell["setting"], cell["seed"]), []).append(flat(cell))
    for cells in arms.values():
        keys = {key for cell in cells for key in cell if len({other.get(key) for other in cells}) > 1}
        assert len(cells) > 2 and {key for key in keys if not key.startswith(PARTS)} <= KNOBS


# dense-cpu is the smallest slice of dense, which has all three
@pytest.mark.parametrize("name", [*(name for name in SUITES if name != "dense-cpu"), "nano-real"])
def test_every_suite_asks_for_chat_mathematics_and_code(name):
    """z-lab/dflash#119: gains on mathematics, none on chat. The headline is a mean over sets, each beside it."""
    raw = NANO | NANO["real"] | {"data": None} if name == "nano-real" else yaml.safe_load(CONFIGS[name].read_text())
    domains = {suite.pins()[raw["source"]][dataset]["domain"] for dataset in raw["datasets"]}
    assert domains >= {"chat", "math", "code"} and {"headline", "per_set"} <= set(raw["tables"])


def test_captions_say_how_many_requests_run_together(finished):
    """z-lab/dflash#55: faster at four requests, slower at 64."""
    captions = json.loads((finished / "results/nano/tables/captions.json").read_text())
    assert all("timed cells decode one request at a time" in captions[name] for name in ("headline", "per_set"))


@pytest.mark.parametrize(("name", "executor"), [("slurm", "slurm"), ("kubernetes", "cluster-generic")])
def test_cluster_profiles_wait_for_late_files(name, executor):
    """snakemake#153, snakemake#2739: on a network disk an output may be seen seconds after it was written."""
    profile = yaml.safe_load((ROOT / f"workflows/profiles/{name}/config.yaml").read_text())
    assert profile["executor"] == executor and profile["latency-wait"] >= 60
    assert "--latency-wait" in (ROOT / "README.md").read_text()


def test_no_rule_needs_the_number_of_cores():
    """A cluster has none: a rule that asks for workflow.cores stops every call with a cluster's profile."""
    for path in sorted((ROOT / "workflows/rules").glob("*.smk")):
        assert "threads: workflow.cores" not in path.read_text(), f"{path.name}: take all_cores"


def test_resume_gives_files_of_a_later_clock_the_time_of_now(tmp_path):
    """A clock that was set back: Snakemake fails a job whose input is newer than its output, and removes the output."""
    rule = "rule all:\n    input: 'results/nano/a'\n    output: 'results/nano/b'\n    shell: 'touch {output}'\n"
    (tmp_path / "Snakefile").write_text(rule)
    (tmp_path / "results/nano").mkdir(parents=True)
    (tmp_path / "results/nano/a").touch()
    os.utime(tmp_path / "results/nano/a", (time.time() + 172800,) * 2)
    assert resume.resume(["--cores", "1", "-q"], folder=tmp_path) == 0 and (tmp_path / "results/nano/b").exists()
    assert (tmp_path / "results/nano/a").stat().st_mtime <= time.time()
