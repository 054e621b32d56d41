"""The CUDA kernel of tree verify against its definition in float64, and what is refused before anything is launched."""

import math
import re

import pytest
import torch
from cuda_cases import (
    TOLERANCE,
    TREES,
    assert_equals_definition,
    definition,
    draw_inputs,
    nan_outputs,
    random_tree,
    relative,
    run,
)

from tfm_kernels.gdn import fused_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(1, id="root_alone"),
        pytest.param(16, id="one_block"),
        pytest.param(33, id="first_shape_of_all_heads_in_a_warp"),
        pytest.param(65, id="one_row_into_fifth_block"),
        pytest.param(129, id="one_row_into_ninth_block"),
    ],
)
def test_equals_definition_for_tree_shapes(nodes, tree):
    assert_equals_definition(draw_inputs(TREES[tree](nodes), seed=nodes))


@pytest.mark.gpu
def test_equals_definition_for_every_size():
    """No size is special: T = 1 to 144, a random tree each."""
    for nodes in range(1, fused_cuda.MAX_ROWS + 1):
        assert_equals_definition(draw_inputs(random_tree(nodes, nodes), seed=nodes, heads=1))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.0, 1.0, 5.0, 20.0, 100.0, math.inf])
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_equals_definition_for_any_decay(nodes, decay):
    """transformers#47625, fla#463: the ratio of decays is formed for ancestors only, so nothing overflows."""
    for tree in ("random", "chain"):
        assert_equals_definition(draw_inputs(TREES[tree](nodes), seed=nodes, decay=decay))


@pytest.mark.gpu
def test_equals_definition_where_decay_stops_halfway():
    """tt-metal#56550: two steps of -90, then none."""
    inputs = draw_inputs(TREES["chain"](65))
    inputs[3].zero_()
    inputs[3][:, :2] = -90.0
    assert_equals_definition(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65])
def test_repeated_keys_stay_accurate(nodes):
    """Equal keys, write strength 1, no decay: a product of powers of X would cancel terms of C(15, 7) = 6435."""
    inputs = draw_inputs(TREES["chain"](nodes))
    inputs[1][:] = inputs[1][:, :1]
    inputs[3].zero_()
    inputs[4].fill_(1.0)
    assert_equals_definition(inputs, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("group", fused_cuda.GROUPS)
def test_takes_other_numbers_of_value_heads(group):
    for nodes in (16, 65):
        assert_equals_definition(draw_inputs(random_tree(nodes), group=group))


@pytest.mark.gpu
def test_precisions_are_as_exact_as_they_say():
    inputs = draw_inputs(random_tree(65))
    expected = definition(inputs)
    for precision, bound in {"bf16": 1e-2, "bf16x2": TOLERANCE, "bf16x3": 3e-6}.items():
        out, u, _ = run(inputs, precision=precision)
        assert relative(out, expected[0]) < bound
        assert relative(u, expected[1]) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_requests_have_their_own_trees_and_padding_changes_nothing(nodes):
    """Ragged requests in one launch; rows of padding hold NaN, give 0 and leave every other bit as it is."""
    trees = torch.stack([random_tree(nodes, 5), TREES["chain"](nodes), TREES["wide"](nodes)])
    lengths = (nodes, nodes // 2, nodes - 3)
    for row, length in zip(trees, lengths, strict=True):
        row[length:] = -2
    inputs = draw_inputs(trees)
    expected = definition(inputs)
    padding = (trees == -2).cuda()
    for tensor in inputs[:5]:
        tensor[padding] = math.nan
    outputs = run(inputs)
    for got, exact in zip(outputs[:2], expected[:2], strict=True):
        assert relative(got[~padding], exact[~padding]) < TOLERANCE
        assert torch.equal(got[padding], torch.zeros_like(got[padding]))
    for request, length in enumerate(lengths):
        alone = [x[request : request + 1, :length].contiguous() for x in inputs[:6]] + [
            inputs[6][request : request + 1]
        ]
        if (length + 15) // 16 == (nodes + 15) // 16:
            assert all(torch.equal(x[request, :length], y[0]) for x, y in zip(outputs, run(alone), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_a_hundred_runs_are_equal_bit_for_bit(nodes):
    inputs = draw_inputs(random_tree(nodes), heads=16)
    first = run(inputs)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(run(inputs), first, strict=True))


@pytest.mark.gpu
def test_a_graph_replays_with_another_tree():
    """flashinfer#5015: the tree is device data, so a captured launch must follow it."""
    inputs = draw_inputs(random_tree(65, 1))
    outputs = nan_outputs(inputs)
    fused_cuda.tree_verify_into(*inputs, *outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_cuda.tree_verify_into(*inputs, *outputs)
    for tree, real in ((TREES["chain"](65), 65), (random_tree(65, 9), 37)):
        inputs[5][0] = tree
        inputs[5][0, real:] = -2
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(outputs, run(inputs), strict=True))


@pytest.mark.gpu
def test_the_op_is_registered():
    inputs = draw_inputs(random_tree(17))
    torch.library.opcheck(fused_cuda.tree_verify, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        pytest.param(0, lambda x: x.float(), "q: .*float32 is not allowed", id="dtype"),
        pytest.param(6, lambda x: x.transpose(2, 3), "state: strides", id="not_contiguous"),
        pytest.param(3, lambda x: x[:, :-1], "log_decay: ", id="shape"),
        pytest.param(5, lambda x: x.cpu(), "parents: on cpu", id="device"),
    ],
)
def test_refuses_before_the_launch(index, change, message):
    inputs = draw_inputs(random_tree(16))
    inputs[index] = change(inputs[index])
    with pytest.raises(ValueError, match=message):
        fused_cuda.tree_verify_into(*inputs, *nan_outputs(draw_inputs(random_tree(16))))


@pytest.mark.gpu
def test_refuses_more_rows_than_it_has():
    """tokenspeed#700: checked in Python, not by a fault in the kernel."""
    with pytest.raises(ValueError, match="takes 1 to 144 rows, not 145"):
        run(draw_inputs(random_tree(145)))


def test_cache_is_keyed_by_sources_flags_and_architecture(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(fused_cuda, "_compile", lambda flags, target: (built.append(flags), target.write_text("")))
    names = {
        fused_cuda.build(arch, group=group, precision=precision, cache=tmp_path).name
        for arch, group, precision in (("80", 3, "bf16"), ("90a", 3, "bf16"), ("80", 1, "bf16"), ("80", 3, "bf16x2"))
    }
    assert len(names) == len(built) == 4
    fused_cuda.build("80", group=3, precision="bf16", cache=tmp_path)
    assert len(built) == 4
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in fused_cuda.SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr(fused_cuda, "SOURCES", sources)
    fused_cuda.build("80", group=3, precision="bf16", cache=tmp_path)
    assert len(built) == 5


def test_names_the_remedy_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_cuda.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="nvcc .* install the CUDA toolkit, or use fused_triton"):
        fused_cuda.build("90a", cache=tmp_path)


def test_shows_what_the_compiler_said(tmp_path, monkeypatch):
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(fused_cuda, "compiler", lambda: str(fake))
    with pytest.raises(RuntimeError, match="did not compile .*\n.*no such thing"):
        fused_cuda.build("90a", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_refuses_an_architecture_nobody_compiled_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=re.escape("compute capability 7.5 (allowed: 8.0, 9.0, 10.0, 12.0)")):
        fused_cuda.architecture("cuda")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 128, 128, torch.bfloat16), "takes 1 to 144 rows, not 0"),
        ((145, 128, 128, torch.bfloat16), "takes 1 to 144 rows, not 145"),
        ((65, 96, 128, torch.bfloat16), "takes heads of 128, not 96 and 128"),
        ((65, 128, 128, torch.float32), "takes q, k, v in bfloat16, not torch.float32"),
    ],
)
def test_refuses_sizes_and_types_it_does_not_have(shape, message):
    with pytest.raises(ValueError, match=message):
        fused_cuda.check_shape(*shape)


def test_refuses_a_device_or_state_it_does_not_run_on():
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        fused_cuda.check_device(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="keeps its state in float32, not torch.float64"):
        fused_cuda.check_device(torch.device("cuda"), torch.float64)
