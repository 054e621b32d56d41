"""The static engine's Triton forms against its PyTorch forms: in the interpreter on a CPU, for real on a GPU.

Runs where triton is installed and TRITON_INTERPRET=1 is set (.ci/run does both, in a venv of its own) or a CUDA device
is there.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: .ci/run tests it in a venv of its own")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from engine_models import assert_same_records, prompts_of, random_family, run_reference, run_static  # noqa: E402

from baselines.ddtree import build_best_first  # noqa: E402
from tfm.config import DecodeConfig  # noqa: E402
from tfm.engine import ops  # noqa: E402
from tfm.layers import RMSNorm, rotary_table  # noqa: E402
from tfm.marginals import Marginals  # noqa: E402
from tfm.sampling import _position_key, next_tokens  # noqa: E402
from tfm.weaver import BiasedRMSNorm  # noqa: E402
from tfm_kernels import (  # noqa: E402  # noqa: E402
    best_first_triton,
    linear_triton,
    product_cuda,
    rows_triton,
    sampling_triton,
    tree_attention,
    tree_attention_triton,
)
from tfm_kernels.gdn.ops import ancestor_mask  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, expected, dtype):
    # bf16: two roundings of the last of eight bits
    torch.testing.assert_close(
        got, expected, **({"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2})
    )


def random_parents(nodes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    row = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]
    return torch.tensor([row], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 160])
def test_residual_and_norm_in_one_launch(width, dtype):
    norm = RMSNorm(width, 1e-6, offset=1.0).to(DEVICE)
    norm.weight.data = draw(width, seed=3)
    norm = norm.to(dtype)
    x, update = draw(5, width, dtype=dtype), draw(5, width, seed=1, dtype=dtype)
    for more in (update, None):
        expected = ops.add_norm(x, more, norm)
        got = rows_triton.add_norm(x, more, norm.weight, norm.eps, norm.offset)
        if INTERPRETED and dtype == torch.bfloat16:
            # the interpreter cuts bits where a GPU rounds
            close(got[0], expected[0], dtype)
        else:
            assert torch.equal(got[0], expected[0])
        close(got[1], expected[1], dtype)
    biased = BiasedRMSNorm(width, 1e-6).to(DEVICE, dtype)
    biased.weight.data, biased.bias.data = norm.weight.data, draw(width, seed=5, dtype=dtype)
    got = rows_triton.add_norm(x, None, biased.weight, biased.eps, 0.0, biased.bias)[1]
    close(got, biased(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_are_added_where_the_products_left_them_out(dtype):
    x, bias = draw(3, 700, dtype=dtype), draw(700, seed=1, dtype=dtype)
    close(rows_triton.bias_gelu(x, bias), torch.nn.functional.gelu(x + bias), dtype)
    norm, update = BiasedRMSNorm(700, 1e-6).to(DEVICE, dtype), draw(3, 700, seed=2, dtype=dtype)
    got = rows_triton.add_norm(x, update, norm.weight, norm.eps, 0.0, norm.bias, bias)
    for one, other in zip(got, (x + (update + bias), norm(x + (update + bias))), strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_product(dtype):
    both = draw(3, 2 * 1100, dtype=dtype)
    close(rows_triton.swiglu(both), ops.swiglu(both), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("rotary", [8, 32])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normed_rotated_and_stored_as_in_torch(dtype, has_gate, rotary, has_norm):
    heads, kv_heads, dim, nodes, capacity = 4, 2, 32, 7, 20
    norms = [RMSNorm(dim, 1e-6, offset=1.0).to(DEVICE, dtype) for _ in range(2)] if has_norm else [None, None]
    for seed, norm in enumerate(norms):
        if norm is not None:
            norm.weight.data = draw(dim, seed=seed, dtype=dtype)
    shape = ops.Heads(heads, kv_heads, dim, has_gate, *norms)
    joined = draw(nodes, (heads * (2 if has_gate else 1) + 2 * kv_heads) * dim, dtype=dtype)
    table = rotary_table(torch.arange(nodes, device=DEVICE) + 3, rotary, 1e4, dtype)
    places = torch.tensor([9, 1, 2, 19, 0, 5, 4], device=DEVICE)
    results = []
    for split in (ops.split_heads, ops._heads_of(rows_triton.split_heads)):
        memory = [torch.zeros(kv_heads, capacity, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
        query, gate = split(joined, shape, table, *memory, places)
        results.append([query, *memory, *([gate] if has_gate else [])])
    for got, expected in zip(results[1], results[0], strict=True):
        close(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "committed", "window"),
    [
        pytest.param(1, 4, 2, 37, None, id="one_row"),
        pytest.param(1, 4, 2, 1, None, id="one_row_after_one_token"),
        pytest.param(16, 4, 1, 70, 11, id="block_with_window"),
        pytest.param(65, 3, 1, 5, None, id="tree_longer_than_its_context"),
        pytest.param(65, 2, 1, 130, None, id="tree"),
        pytest.param(17, 2, 2, 64, 20, id="tree_with_window"),
    ],
)
def test_tree_attention_equals_the_dense_mask(dtype, nodes, heads, kv_heads, committed, window):
    # a GPU takes rows of 128 bytes or more
    dim, capacity = 32 if INTERPRETED or dtype == torch.float32 else 64, committed + nodes + 9
    parents = random_parents(nodes)
    own = ancestor_mask(parents)[0]
    mask = tree_attention.TreeMask(torch.tensor([committed], device=DEVICE), own, own.sum(-1) - 1, window)
    query, gate = draw(heads, nodes, dim, dtype=dtype), draw(nodes, heads, 2 * dim, seed=3, dtype=dtype)[..., dim:]
    keys, values = (draw(kv_heads, capacity, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    # rows past the tree hold whatever the last step left: nothing may come of them
    keys[:, committed + nodes :], values[:, committed + nodes :] = float("nan"), float("nan")
    clean = [torch.nan_to_num(memory) for memory in (keys, values)]
    prepared = tree_attention_triton.prepare_mask(mask, capacity)
    for given in (None, gate):
        expected = tree_attention.attend(query, *clean, tree_attention.dense(mask, capacity), given)
        for splits in (None, 3, 32):
            cut = tree_attention_triton.choose_tiling(heads // kv_heads * nodes, kv_heads, dim)
            cut = cut if splits is None else tree_attention_triton.Tiling(cut.rows, 16, splits, cut.warps, cut.stages)
            got = tree_attention_triton.attend(query, keys, values, prepared, given, tiling=cut)
            close(got, expected, dtype)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes any width")
def test_heads_too_narrow_for_a_gpu_are_refused():
    """Triton 3.6 reads past rows of shared memory under 128 bytes: NaN, or a fault of the launch."""
    own = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    mask = tree_attention.TreeMask(torch.tensor([3], device=DEVICE), own, own[0].long() - 1)
    rows = draw(2, 1, 32, dtype=torch.bfloat16), *(draw(2, 8, 32, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(ValueError, match="head_dim: 32 .*allowed: 64 or more"):
        tree_attention_triton.attend(*rows, tree_attention_triton.prepare_mask(mask, 8))


@pytest.mark.parametrize("vocab", [700, 9001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_one_pass_draws_the_tokens_of_the_addressed_noise(vocab, temperature):
    logits = 3 * draw(6, vocab)
    positions, indices = torch.tensor([[3, 4, 4, 5, 900, 901]], device=DEVICE), torch.tensor([7], device=DEVICE)
    keys = _position_key(11, indices[:, None], positions)[0]
    expected = next_tokens(logits[None], positions, indices, seed=11, temperature=temperature)[0]
    drawn, logit, log_sum = sampling_triton.draw(logits, keys, temperature or None)
    assert torch.equal(drawn, expected)
    assert torch.equal(logit, logits.gather(1, expected[:, None])[:, 0])
    if temperature:
        torch.testing.assert_close(log_sum, (logits / temperature).logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lowest_id_and_a_nan_is_seen():
    logits = torch.zeros(3, 9001, device=DEVICE, dtype=torch.bfloat16)
    logits[0, [8500, 41, 600]] = 2.0
    logits[1, 8999] = float("nan")
    logits[1, 5] = float("inf")
    drawn, logit, _ = sampling_triton.draw(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), None)
    assert drawn.tolist() == [41, 5, 0] or drawn.tolist() == [41, 8999, 0]
    logits[1, 5] = 0.0
    drawn, logit, _ = sampling_triton.draw(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), 1.0)
    assert drawn[1] == 8999
    assert logit[1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 96, 129])
@pytest.mark.parametrize("splits", [1, 3])
def test_products_of_few_rows(rows, splits, dtype):
    x, weight = draw(rows, 192, dtype=dtype), draw(70, 192, seed=1, dtype=dtype)
    choice = linear_triton.Choice("triton", block_out=32, block_in=64, splits=splits)
    got = linear_triton.multiply(x, weight, choice)
    expected = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out_rows", "inner", "splits"),
    [
        pytest.param(1, 70, 192, 1, id="blocks_cut_between_two_programs"),
        pytest.param(16, 32, 1024, 1, id="one_block_for_all_programs"),
        pytest.param(65, 160, 64, 1, id="a_block_a_program"),
        pytest.param(65, 300, 192, 2, id="two_programs_a_multiprocessor"),
        pytest.param(17, 32, 64, 1, id="one_unit"),
    ],
)
def test_products_dealt_out_evenly(rows, out_rows, inner, splits, dtype, nan_filled_empty):
    """What no program wrote is NaN here."""
    x, weight = draw(rows, inner, dtype=dtype), draw(out_rows, inner, seed=1, dtype=dtype)
    choice = linear_triton.Choice("stream", block_out=32, block_in=64, splits=splits)
    got = linear_triton.multiply(x, weight, choice)
    expected = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++")
@pytest.mark.parametrize("rows", [1, 65, 80])
def test_a_choice_of_the_form_cuda_is_multiplied_there(rows):
    x, weight = draw(rows, 192, dtype=torch.bfloat16), draw(300, 192, seed=1, dtype=torch.bfloat16)
    choice = linear_triton.Choice("cuda", block_out=256, block_in=64, splits=1, warps=8, stages=5)
    expected = (x.double() @ weight.double().T).to(torch.bfloat16)
    for out in (None, torch.empty_like(expected)):
        got = linear_triton.multiply(x, weight, choice, out)
        assert out is None or got is out
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 33, 65, 129])
def test_the_search_tries_only_cuda_tiles_that_fit(rows):
    sys.path.append(str(Path(__file__).parent.parent / "workflows/scripts"))
    from engine_products import candidates

    found = [choice for choice in candidates(rows, 5120, 6144) if choice.form == "cuda"]
    assert len(found) >= 3
    for choice in found:
        tile = dict(block_out=choice.block_out, warps=choice.warps, stages=choice.stages, each=choice.splits)
        assert product_cuda.plan(rows, 5120, slots=132, **tile).stages == choice.stages
    assert not [choice for choice in candidates(145, 5120, 6144) if choice.form == "cuda"]


def test_a_shape_that_was_not_measured_goes_to_torch(tmp_path):
    assert [linear_triton.key_of(rows, 8, 4) for rows in (1, 15, 33, 65)] == ["1x8x4", "16x8x4", "64x8x4", "80x8x4"]
    choices = {"16x8x4": linear_triton.Choice("triton", 16, 64, 2, 4, 3)}
    linear_triton.write_choices(tmp_path / "choices.json", choices, {"device": "none"})
    assert linear_triton.measured_choices(tmp_path / "choices.json") == choices
    assert linear_triton.measured_choices(tmp_path / "missing.json") == {}
    with pytest.raises(ValueError, match="block_in: 128 .*inner size of 192"):
        linear_triton.multiply(draw(1, 192), draw(8, 192), linear_triton.Choice("triton"))
    with pytest.raises(ValueError, match="rows: 193 .*1 to 192"):
        linear_triton.multiply(draw(193, 128), draw(8, 128), linear_triton.Choice("triton"))


@pytest.mark.parametrize("budget", [1, 7, 24])
def test_the_heap_pops_what_the_host_pops(budget):
    """Also where scores tie exactly across levels."""
    generator = torch.Generator().manual_seed(budget)
    for case in range(3):
        logits = 2 * torch.randn(1, 6, 40, generator=generator)
        if case == 1:
            logits = logits.round()
        marginals = Marginals.from_logits(logits, torch.zeros(1, 6, 1), 24)
        if case == 2:
            steps = torch.arange(24).div(3, rounding_mode="floor") * -0.5
            steps[20:] = -torch.inf
            marginals = Marginals(marginals.tokens, steps.expand(1, 6, 24), marginals.hidden)
        root = torch.tensor([9], device=DEVICE)
        for depth in (1, 4, 6):
            expected = build_best_first(marginals, torch.tensor([9]), budget=budget, depth=depth)
            *got, count = best_first_triton.best_prefixes(
                marginals.tokens[0].to(DEVICE), marginals.log_probs[0].to(DEVICE), root, budget=budget, depth=depth
            )
            assert int(count) == int(expected.num_nodes)
            for column, name in zip(got, ("tokens", "parents", "depths", "log_probs"), strict=True):
                assert torch.equal(column.cpu(), getattr(expected, name)[0]), (case, depth, name)
    with pytest.raises(ValueError, match="budget, depth: 600, 3 .*1 to 512"):
        best_first_triton.best_prefixes(marginals.tokens[0], marginals.log_probs[0], root, budget=600, depth=3)


FAST = dict(attention="triton", rows="triton", sampling="triton", growth="triton", linear="triton")
SETTINGS = {
    "ar": {},
    "dflash": {},
    "ddtree": dict(budget=9),
    "dartree": dict(budget=9, width=3, candidates=12),
    "tfm": dict(budget=9, width=2, candidates=12, children=3),
    "tfm_shallow": dict(method="tfm", budget=9, width=3, candidates=12, children=4, depth=2),
}


@pytest.mark.parametrize("temperature", [1.0] if INTERPRETED else [0.0, 1.0])
@pytest.mark.parametrize("name", ["ddtree", "dartree", "tfm_shallow"] if INTERPRETED else list(SETTINGS))
def test_all_fast_forms_together_make_the_records_of_the_reference_loop(name, temperature):
    models = random_family(gdn_dim=16)
    settings = {"method": name, "temperature": temperature, "max_new_tokens": 4, "seed": 2, **SETTINGS[name]}
    config, prompts = DecodeConfig(**settings), prompts_of(models, (19,))
    expected = run_reference(models, config, prompts)
    models = type(models)(*(part.to(DEVICE) for part in (models.target, models.drafter, models.weaver)))
    if not INTERPRETED:
        # solve_triangular may leave the stream, which a capture forbids
        config = dataclasses.replace(config, gdn_backend="recurrent_triton")
    forms = FAST if INTERPRETED else {**FAST, "graphs": True}
    assert_same_records(run_static(models, config, prompts, **forms), expected, log_prob_tolerance=1e-4)


def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    """Shared memory of an H200 block is 227 KiB; nothing is read or written before the previous grid has ended."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_engine_triton.py"
    done = subprocess.run(
        [sys.executable, str(script), "--capability", "90"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert max(shared.values()) <= 227 * 1024, shared
