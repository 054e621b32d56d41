"""The product of few rows in CUDA C++: its sources on a CPU in any order of threads, its launches, and on a card."""

import shutil

import pytest
import torch
from cuda_emulation import build_product

from tfm_kernels import product_cuda
from tfm_kernels.product_cuda import Plan

HANDOVERS = ("none", "copies", "stages", "groups_before", "groups_after")
# emulator::missing = i leaves the wait of HANDOVERS[i] out
SWITCHES = {
    "product.cuh": [
        (
            "    wait_copies_but(stages - 2);\n    __syncthreads();",
            "    if (emulator::missing != 1) wait_copies_but(stages - 2);\n"
            "    if (emulator::missing != 2) __syncthreads();",
        ),
        (
            "  for (int i = 0; i < TALL; ++i) {\n    __syncthreads();",
            "  for (int i = 0; i < TALL; ++i) {\n    if (emulator::missing != 3) __syncthreads();",
        ),
        (
            "make_float4(d[0], d[1], d[2], d[3]);\n    }\n    __syncthreads();",
            "make_float4(d[0], d[1], d[2], d[3]);\n    }\n    if (emulator::missing != 4) __syncthreads();",
        ),
    ]
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    built = {}

    def library(rows):
        tiles = product_cuda.tiles_of(rows)
        if tiles not in built:
            folder = tmp_path_factory.mktemp(f"tiles{tiles}") / "csrc"
            built[tiles] = build_product(folder, tiles, SWITCHES)
        return built[tiles]

    return library


def draw(rows, out_rows, inner, device="cpu", apart=0):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner + apart, generator=generator).bfloat16().to(device)[:, :inner]
    return x, torch.randn(out_rows, inner, generator=generator).bfloat16().to(device)


def assert_rounded(got, x, weight):
    """Each number is the exact one rounded to bf16, but for what float32 sums of `inner` terms may lose before it."""
    x, weight = x.double(), weight.double()
    exact, most = x @ weight.T, x.abs() @ weight.abs().T
    excess = (got.double() - exact).abs() - (exact.abs() * 2**-8 + most * (x.shape[1] * 2**-24))
    assert got.isfinite().all() and (excess <= 0).all(), excess.max()


def run(lib, x, weight, how, seed=0, missing="none"):
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.bfloat16)
    product_cuda.check(x, weight, out)
    lib.emulator_order(seed, HANDOVERS.index(missing))
    product_cuda.launch(lib, x, weight, out, how, 0)
    return out


# rows, out_rows, inner, plan
CASES = {
    "one_row": (1, 64, 64, Plan(64, 4, 2, 1)),
    "odd_rows_and_tails_of_both_sizes": (5, 70, 72, Plan(64, 8, 3, 3)),
    "rows_that_no_four_divide": (7, 149, 136, Plan(64, 4, 4, 2)),
    "a_block_for_all_programs": (8, 60, 64 * 7, Plan(64, 8, 4, 5)),
    "more_programs_than_steps": (3, 64, 128, Plan(64, 4, 3, 5)),
    "one_block_left_with_fewer_steps_than_programs": (8, 4 * 64, 128, Plan(64, 4, 3, 3)),
    "whole_blocks_alone": (6, 256, 192, Plan(64, 8, 3, 2)),
    "whole_blocks_then_shared_ones": (4, 5 * 64, 192, Plan(64, 4, 8, 3)),
    "blocks_in_even_pieces": (8, 128, 64 * 5, Plan(64, 8, 2, 4)),
    "tree": (65, 140, 200, Plan(128, 8, 4, 3)),
    "tree_by_four_warps": (67, 140, 200, Plan(128, 4, 3, 2)),
    "tree_in_large_blocks": (65, 300, 136, Plan(256, 8, 4, 3)),
    "tree_in_large_blocks_by_four_warps": (72, 300, 136, Plan(256, 4, 5, 1)),
    "tree_in_small_blocks": (66, 70, 136, Plan(64, 4, 5, 2)),
    "most_rows": (144, 132, 136, Plan(128, 8, 3, 2)),
    "one_into_the_last_tile": (137, 132, 72, Plan(64, 8, 3, 3)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_sources_equal_the_definition(emulated, name):
    rows, out_rows, inner, how = CASES[name]
    x, weight = draw(rows, out_rows, inner, apart=16)
    assert_rounded(run(emulated(rows), x, weight, how), x, weight)
    assert emulated(rows).emulator_conflicts() == 0


@pytest.mark.parametrize("name", ["a_block_for_all_programs", "whole_blocks_then_shared_ones", "tree"])
def test_any_order_of_threads_gives_the_same_bits(emulated, name):
    rows, out_rows, inner, how = CASES[name]
    x, weight = draw(rows, out_rows, inner)
    first = run(emulated(rows), x, weight, how)
    for seed in range(1, 5):
        assert torch.equal(run(emulated(rows), x, weight, how, seed), first)


def test_stages_change_no_bit(emulated):
    x, weight = draw(8, 150, 328)
    results = [run(emulated(8), x, weight, Plan(64, 8, stages, 2)) for stages in product_cuda.STAGES]
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("handover", HANDOVERS[1:])
def test_a_missing_wait_is_seen(emulated, handover):
    """Each handover of the kernel without its wait: some order of threads then reads what is not there yet."""
    x, weight = draw(8, 128, 64 * 6)
    how = Plan(128, 8, 2, 1)
    expected = run(emulated(8), x, weight, how)
    assert any(not torch.equal(run(emulated(8), x, weight, how, seed, handover), expected) for seed in range(1, 25))


# (out, in) at the paper's target and what 132 multiprocessors are given: programs, and whether anything is added up
@pytest.mark.parametrize(
    ("out_rows", "block_out", "programs", "is_shared"),
    [
        pytest.param(34816, 256, 132, True, id="gate_up_a_block_each_then_the_rest"),
        pytest.param(5120, 128, 132, True, id="down_dealt_evenly"),
        pytest.param(16480, 128, 129, False, id="gdn_in_a_block_each"),
        pytest.param(16480, 256, 130, True, id="gdn_in_half_a_block_each"),
        pytest.param(14336, 128, 112, False, id="attention_in_a_block_each_rather_than_a_second_launch"),
        pytest.param(14336, 256, 132, True, id="attention_in_dealt_evenly"),
    ],
)
def test_what_the_programs_are_given(out_rows, block_out, programs, is_shared):
    how = product_cuda.plan(65, out_rows, block_out=block_out, warps=8, stages=4, slots=132)
    assert how == Plan(block_out, 8, 4, programs)
    assert (-(-out_rows // block_out) % programs > 0) == is_shared


def test_stages_shrink_to_what_fits():
    sizes = dict(block_out=256, warps=8, slots=132)
    assert [product_cuda.plan(rows, 512, stages=5, **sizes).stages for rows in (65, 80)] == [5, 4]
    assert product_cuda.plan(65, 512, stages=8, **sizes).shared_bytes(9) <= product_cuda.BLOCK_SHARED
    two = product_cuda.plan(65, 512, block_out=128, warps=4, stages=8, slots=132, each=2)
    assert 2 * (two.shared_bytes(9) + 1024) <= 228 * 1024
    small = product_cuda.plan(65, 512, block_out=128, warps=8, stages=8, slots=132, limit=99 * 1024)
    assert small.shared_bytes(9) <= 99 * 1024 and small.stages == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 145}, "rows: 145 .*1 to 144"),
        ({"block_out": 96}, "block_out: 96 .*64, 128, 256"),
        ({"warps": 2}, "warps: 2 .*4, 8"),
        ({"stages": 9}, "stages: 9"),
        ({"rows": 81, "block_out": 256}, "block_out: 256 .*81 rows .*192 or less"),
        ({"block_out": 256, "each": 4}, "block_out: 256 does not fit 4 times"),
    ],
)
def test_what_the_kernel_lacks_is_refused(change, message):
    arguments = {"rows": 65, "out_rows": 512, "block_out": 128, "warps": 8, "stages": 4, "slots": 132} | change
    with pytest.raises(ValueError, match=message):
        product_cuda.plan(arguments.pop("rows"), arguments.pop("out_rows"), **arguments)


def test_tensors_that_the_kernel_does_not_take_are_refused():
    x, weight = draw(3, 16, 64)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weight: .*float32 .*bfloat16"):
        product_cuda.check(x, weight.float(), out)
    with pytest.raises(ValueError, match="x: strides .*multiple of 8"):
        product_cuda.check(draw(3, 16, 64, apart=4)[0], weight, out)
    with pytest.raises(ValueError, match="x: an inner size of 60 .*multiples of 8"):
        product_cuda.check(draw(3, 16, 60, apart=4)[0], draw(3, 16, 60)[1], out)
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        product_cuda.multiply(x, weight, out, block_out=64, warps=4, stages=4, each=1)


def test_a_library_is_built_once_for_each_number_of_tiles(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    built = product_cuda.build("80", 1, cache=tmp_path)
    stamp = built.stat().st_mtime_ns
    assert product_cuda.build("80", 1, cache=tmp_path).stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 65, 72, 129, 144])
@pytest.mark.parametrize(
    ("block_out", "warps", "each"), [(64, 4, 2), (64, 8, 1), (128, 4, 2), (128, 8, 1), (256, 8, 1)]
)
def test_products_on_a_card(rows, block_out, warps, each):
    """A hundred repeats have the same bits; one shape is shared unevenly, one has tails of both sizes."""
    if block_out // 64 * product_cuda.tiles_of(rows) > product_cuda.MOST_SUMS:
        pytest.skip("its sums do not fit into registers")
    for out_rows, inner in ((5120, 6144), (8295, 5128)):
        x, weight = draw(rows, out_rows, inner, "cuda", apart=8)
        sizes = dict(block_out=block_out, warps=warps, stages=5, each=each)
        out = x.new_full((rows, out_rows), torch.nan)
        first = product_cuda.multiply(x, weight, out, **sizes).clone()
        assert_rounded(first, x, weight)
        for _ in range(100):
            assert torch.equal(product_cuda.multiply(x, weight, out.fill_(torch.nan), **sizes), first)


@pytest.mark.gpu
def test_a_captured_product_follows_its_input():
    x, weight = draw(65, 5120, 6144, "cuda")
    out, graph = x.new_empty(65, 5120), torch.cuda.CUDAGraph()
    sizes = dict(block_out=128, warps=8, stages=5, each=1)
    product_cuda.multiply(x, weight, out, **sizes)
    with torch.cuda.graph(graph):
        product_cuda.multiply(x, weight, out, **sizes)
    for scale in (1.0, -2.0):
        x.mul_(scale)
        graph.replay()
        assert_rounded(out, x, weight)
