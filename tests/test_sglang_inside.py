"""The plugin beside SGLang 0.5.17's own Python, on a CPU: registry, hooks, launch flags, tree layouts, its GDN kernel.

Needs an environment with sglang (its wheel without dependencies and what its imports need) and is skipped without it.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed; run these in its environment", allow_module_level=True)

NANO = Path(__file__).resolve().parent.parent / "tfm/weights/nano"


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import torchvision, which SGLang needs, beside a torch of another build: its ops are declared, never called."""
    real = torch.library.register_fake
    torch.library.register_fake = lambda name, *rest, **named: (
        (lambda function: function)
        if isinstance(name, str) and name.startswith("torchvision::")
        else real(name, *rest, **named)
    )
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = real
    from sglang.srt.plugins.hook_registry import HookRegistry

    from baselines.sglang.plugin import register

    register()
    register()  # SGLang loads plugins in every process, and some twice
    HookRegistry.apply_hooks()


@pytest.fixture
def settings(monkeypatch):
    def choose(**found):
        monkeypatch.setenv("DFLASH_TFM", json.dumps({"proposal": "ddtree", "budget": 64, **found}))

    choose()
    return choose


def test_the_algorithm_is_found_by_name_and_counts_as_dflash():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = SpeculativeAlgorithm.from_string("DFLASH_TFM")
    assert found.is_dflash_family() and found.is_speculative() and not found.is_eagle()
    assert found.supports_target_verify_for_draft() and not found.supports_grammar_overlap()
    # what the scheduler asks every algorithm, and a bare CustomSpecAlgo lacks
    wanted = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_") and name.islower()}
    assert wanted - {"from_string", "register"} <= set(dir(found))


def test_the_worker_is_sglangs_own_with_a_tree_in_the_chains_place(settings):
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = SpeculativeAlgorithm.from_string("DFLASH_TFM")
    assert issubclass(found.create_worker(SimpleNamespace(disable_overlap_schedule=True)), DFlashWorkerV2)
    with pytest.raises(ValueError, match="does not support overlap"):
        found.create_worker(SimpleNamespace(disable_overlap_schedule=False))


def test_every_hook_is_in_place_also_where_its_function_was_imported_by_name():
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.runner import base_runner
    from sglang.srt.speculative import dflash_utils, spec_info

    assert scheduler.validate_dflash_request is dflash_utils.validate_dflash_request
    assert base_runner.create_dummy_verify_input is spec_info.create_dummy_verify_input
    for function in (dflash_utils.validate_dflash_request, spec_info.create_dummy_verify_input):
        assert hasattr(function, "__wrapped__")


def test_a_stock_algorithm_is_not_changed_by_the_hooks(settings):
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm, create_dummy_verify_input

    from baselines.sglang.verify_input import TreeVerifyInput

    server, mask = SimpleNamespace(speculative_num_draft_tokens=16), torch.ones(8, dtype=torch.bool)
    stock = create_dummy_verify_input(SpeculativeAlgorithm.DFLASH, server, mask, 16, False)
    assert type(stock) is DFlashVerifyInput and stock.custom_mask is None and stock.draft_token_num == 16
    trees = SpeculativeAlgorithm.from_string("DFLASH_TFM")
    tree = create_dummy_verify_input(trees, server, mask, 65, False)
    assert type(tree) is TreeVerifyInput and tree.custom_mask is mask and tree.num_tokens_per_req == 65
    assert tree.is_verify_input() and tree.topk == 1
    # the drafter's own graph is the chain's
    assert type(create_dummy_verify_input(trees, server, mask, 16, True)) is DFlashVerifyInput


def test_no_state_of_every_node_is_allocated_when_this_projects_op_verifies(settings, monkeypatch):
    from baselines.sglang import hooks

    given = {}
    monkeypatch.setattr(hooks, "_process_runs_trees", lambda *_: True)
    for kernel, wanted in (("fused_cuda", None), ("recurrent", 65)):
        settings(kernel=kernel)
        hooks.mamba_pool(lambda pool, **named: given.update(named), None, speculative_num_draft_tokens=65, size=1)
        assert given["speculative_num_draft_tokens"] == wanted


def test_a_requests_row_has_room_for_two_trees_behind_the_context(settings, monkeypatch):
    """DFLASH reserves 2 * 65 places behind the committed ones; SGLang's row ends 4 + 65 behind the context."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from baselines.sglang import hooks

    for runs_trees, width in ((False, 2048 + 4 + 65), (True, 2048 + 4 + 2 * 65)):
        monkeypatch.setattr(hooks, "_process_runs_trees", lambda *_, found=runs_trees: found)
        pool = ReqToTokenPool(size=1, max_context_len=2048 + 4 + 65, device="cpu", enable_memory_saver=False)
        assert pool.req_to_token.shape == (2, width)


def test_a_pool_without_draft_tokens_keeps_one_state_a_slot(monkeypatch):
    """What the hook relies on: SGLang's pool has no per-node buffers when it is told of no draft tokens."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    from baselines.sglang import hooks

    monkeypatch.setattr(hooks, "_process_runs_trees", lambda *_: False)
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=3 * 8, n_groups=1, num_heads=3, head_dim=8, state_size=8, conv_kernel=4
    )
    params = Mamba2CacheParams(shape=shape, layers=[0, 2])
    pool = MambaPool(
        size=1, spec_state_size=1, cache_params=params, mamba_layer_ids=[0, 2], device="cpu",
        speculative_num_draft_tokens=None,
    )  # fmt: skip
    assert not isinstance(pool.mamba_cache, MambaPool.SpeculativeState)
    assert pool.mamba_cache.temporal.shape[:2] == (2, 2)


@pytest.mark.parametrize("engine", ["sglang", "sglang-paper"])
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "tfm"])
def test_launch_flags_are_flags_of_this_sglang(method, engine):
    from sglang.srt.server_args import ServerArgs

    from baselines.sglang.flags import arguments, server_of

    decode = {"method": method, "budget": 64, "width": 4, "children": 8, "candidates": 512, "depth": None}
    decode |= {"residual": True, "depth_bonus": 0.0, "gdn_backend": "fused_cuda"}
    cell = {"decode": decode, "dtype": "bfloat16", "seed": 3}
    server = server_of(cell, draft_rows=15, context=4096, paper=engine.endswith("paper"), flags={})
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    drafter = [] if method == "ar" else ["--speculative-draft-model-path", "drafter"]
    found = parser.parse_args(["--model-path", "target", *drafter, *arguments(server["flags"]), "--host", "127.0.0.1"])
    assert found.max_running_requests == 1 and found.disable_radix_cache and found.random_seed == 3
    wanted = {"ar": None, "dflash": "DFLASH"}.get(method, "DFLASH_TFM")
    assert found.speculative_algorithm == wanted
    assert found.speculative_dflash_block_size == (16 if method == "dflash" else None)


@pytest.mark.parametrize(
    "parents", [[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]], ids=["mixed", "chain", "wide"]
)
def test_links_are_those_that_sglang_derives_from_a_trees_mask(parents, monkeypatch):
    """NGRAM, its own irregular tree, derives first child and next sibling from the mask of ancestors."""
    from baselines.sglang.layout import attention_mask, links
    from tfm_kernels.gdn.ops import ancestor_mask

    # the module imports a kernel library that has no build for a CPU; this function needs none
    for name in ("sgl_kernel", "sgl_kernel.speculative", "sglang.srt.speculative.cpp_ngram.ngram_corpus"):
        stand_in = types.ModuleType(name)
        stand_in.reconstruct_indices_from_tree_mask = stand_in.NgramCorpus = None
        monkeypatch.setitem(sys.modules, name, stand_in)
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    tree, count = torch.tensor([parents]), len(parents)
    mask = attention_mask(ancestor_mask(tree)[0], 0)
    theirs = _derive_tree_links(mask.numpy(), 1, count)
    for ours, wanted in zip(links(tree), theirs, strict=True):
        assert torch.equal(ours, wanted)


def test_a_request_with_a_grammar_is_aborted_with_the_reason(settings, monkeypatch):
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.dflash_utils import validate_dflash_request

    from baselines.sglang import hooks

    monkeypatch.setattr(hooks, "_process_runs_trees", lambda *_: True)

    def refused(**fields):
        sampling = SamplingParams(**fields)
        sampling.normalize(None)
        request = SimpleNamespace(sampling_params=sampling, return_logprob=False, return_hidden_states=False)
        return validate_dflash_request(request, False)

    # SGLang's own defaults are the whole law, and temperature 0 becomes top_k 1
    assert refused() is None and refused(temperature=0.0) is None and refused(top_k=-1) is None
    assert "regex" in refused(regex="[0-9]+") and "top_p" in refused(top_p=0.9)
    assert "repetition_penalty" in refused(repetition_penalty=1.3)
    monkeypatch.setattr(hooks, "_process_runs_trees", lambda *_: False)
    assert refused(regex="[0-9]+") is None


@pytest.mark.parametrize("kernel", ["fused_cuda", "recurrent_triton"])
def test_a_whole_servers_arguments_resolve_to_trees_for_the_target(kernel, monkeypatch):
    """SGLang's own resolution of the runner's flags, with the shipped family's configs."""
    from sglang.srt.runtime_context import get_context, get_spec
    from sglang.srt.server_args import prepare_server_args

    from baselines.sglang import hooks
    from baselines.sglang.flags import arguments, server_of

    decode = {"method": "ddtree", "budget": 64, "width": None, "children": 8, "candidates": 64, "depth": None}
    decode |= {"residual": True, "depth_bonus": 0.0, "gdn_backend": kernel}
    cell = {"decode": decode, "dtype": "bfloat16", "seed": 3}
    server = server_of(cell, draft_rows=15, context=2048, paper=False, flags={})
    monkeypatch.setenv("DFLASH_TFM", json.dumps(server["plugin"]))
    words = ["--model-path", f"{NANO}/target", "--speculative-draft-model-path", f"{NANO}/drafter", "--device", "cuda"]
    found = prepare_server_args([*words, *arguments(server["flags"])])
    assert (found.speculative_num_draft_tokens, found.speculative_dflash_block_size, found.page_size) == (65, 16, 1)
    assert found.speculative_eagle_topk == (1 if kernel == "fused_cuda" else 2)
    assert found.attention_backend == found.speculative_draft_attention_backend == "triton"
    # the memory's plan sees no states of every node where none are kept, and nothing else does
    with get_context().preserve_config():
        get_context().set_server_args(found)
        seen = hooks.mamba_budget(lambda *_: get_spec().speculative_num_draft_tokens, None, 50.0)
        assert seen == (0 if kernel == "fused_cuda" else 65) and get_spec().speculative_num_draft_tokens == 65
    with pytest.raises(ValueError, match="DFLASH_TFM: max_running_requests: 4 is not allowed"):
        prepare_server_args([*words, *arguments({**server["flags"], "max-running-requests": 4})])


KERNEL = """
import sys
import torch
from pathlib import Path
from tfm_kernels.gdn import ops, recurrent_sglang
from tfm_kernels.gdn.naive import naive_states

kernel = recurrent_sglang.load(Path(sys.argv[1]))
draw = torch.Generator().manual_seed(5)
parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 2]])
nodes, heads, value_heads, dim = parents.shape[1], 1, 3, 32
q, k = (torch.nn.functional.normalize(torch.randn(1, nodes, heads, dim, generator=draw), dim=-1) for _ in range(2))
v = torch.randn(1, nodes, value_heads, dim, generator=draw)
log_decay = -torch.rand(1, nodes, value_heads, generator=draw) - 0.01
beta = torch.rand(1, nodes, value_heads, generator=draw) * 0.9 + 0.05
state = torch.randn(1, value_heads, dim, dim, generator=draw)
arguments = (q * dim**-0.5, k, v, log_decay, beta, parents, state)
theirs = torch.full((1, nodes, value_heads, dim, dim), torch.nan)
(out,) = recurrent_sglang.launch_of(kernel, arguments, theirs)()
ours, writes, sums = ops.tree_verify(*arguments, backend="solve")
print("out", float((out - ours).abs().max()))
worst = 0.0
for path in ([0, 1, 3, 5], [0, 2, 6], [0, 1, 4], [0]):
    state_of_path = ops.commit(state, k, writes, sums, torch.tensor([path]))
    worst = max(worst, float((theirs[0, path[-1]].transpose(-1, -2) - state_of_path[0]).abs().max()))
print("states", worst)
"""


def test_sglangs_recurrent_kernel_gives_our_outputs_and_our_commits(tmp_path):
    """Under Triton's interpreter: its outputs, and the states that it keeps of every node against our commit."""
    import sglang

    site = Path(next(iter(sglang.__path__))).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(site)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split() for line in done.stdout.splitlines())
    assert float(found["out"]) < 1e-5 and float(found["states"]) < 1e-5, found
