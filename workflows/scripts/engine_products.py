"""Search the tiles of few-row products and of tree attention at the paper's shapes, against torch's own form."""

import itertools
import statistics
import time

import torch
from engine_shapes import FFN, HIDDEN, VOCAB

from tfm_kernels import linear_triton, tree_attention, tree_attention_triton
from tfm_kernels.gdn.ops import ancestor_mask
from tfm_kernels.linear_triton import Choice

# [out, in] of the products of a step, the largest part of a step's bytes first
SHAPES = {
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "gdn_in": (10_240 + 6_144 + 96, HIDDEN),
    "head": (VOCAB, HIDDEN),
    "gdn_out": (HIDDEN, 6_144),  # the attention's output has the same shape
    "attention_in": (2 * 6_144 + 2_048, HIDDEN),
    "drafter_in": (4_096 + 2_048, HIDDEN),
    "drafter_out": (HIDDEN, 4_096),
    "drafter_fc": (HIDDEN, 5 * HIDDEN),
    "weaver_qkv": (6_144, 2_048),
    "weaver_out": (2_048, 2_048),
}
ROWS = {"gdn": (1, 16, 65), "attention": (1, 16, 65), "gate": (1, 16, 65), "down": (1, 16, 65), "head": (1, 16, 65)}
ROWS |= {"drafter": (16, 32), "weaver": (4,)}
COLD_BYTES = 160 * 2**20  # weights in turn: three times the L2 cache
SLACK = 0.98  # our form must be this much faster to be taken


def measure_products(where: torch.device, options) -> list[dict]:
    """Return one row a shape and row count; writes the choices of those where our form wins to --out."""
    deadline, rows, choices = time.monotonic() + options.seconds, [], {}
    for name, (out_rows, inner) in SHAPES.items():
        count = max(2, -(-COLD_BYTES // (2 * out_rows * inner)))
        weights = [torch.randn(out_rows, inner, device=where, dtype=torch.bfloat16) for _ in range(count)]
        for tokens in ROWS[name.split("_")[0]]:
            x = torch.randn(tokens, inner, device=where, dtype=torch.bfloat16)
            row = _measure(x, weights, deadline)
            rows.append({"name": name, "tokens": tokens, "out": out_rows, "in": inner, **row})
            print(name, tokens, {key: row[key] for key in ("torch_us", "ours_us", "floor_us", "choice")}, flush=True)
            if row["ours_us"] is not None and row["ours_us"] < SLACK * row["torch_us"]:
                choices[linear_triton.key_of(tokens, out_rows, inner)] = Choice(**row["choice"])
        linear_triton.write_choices(
            options.out / "linear_choices.json", choices, {"device": torch.cuda.get_device_name(where)}
        )
    return rows


def _measure(x: torch.Tensor, weights: list[torch.Tensor], deadline: float) -> dict:
    expected = torch.nn.functional.linear(x, weights[0]).float()
    best, best_us, errors = None, None, []
    for choice in _candidates(x.shape[0], *weights[0].shape):
        if time.monotonic() > deadline:
            errors.append("search ended by --seconds")
            break
        try:
            error = (linear_triton.multiply(x, weights[0], choice).float() - expected).abs().max().item()
            if error > 0.02 * expected.abs().max().item():
                raise ValueError(f"wrong by {error}")
            us = _graph_us(lambda w, choice=choice: linear_triton.multiply(x, w, choice), weights)
        except Exception as error:
            # a tile that does not fit or is wrong is reported, not used
            errors.append(f"{choice}: {type(error).__name__}: {str(error)[:120]}")
            continue
        if best_us is None or us < best_us:
            best, best_us = choice, us
    torch_us = _graph_us(lambda w: torch.nn.functional.linear(x, w), weights)
    floor = weights[0].numel() * 2 / 4.2e12 * 1e6
    choice = None if best is None else vars(best)
    return {"torch_us": torch_us, "ours_us": best_us, "floor_us": floor, "choice": choice, "errors": errors}


def _candidates(tokens: int, out_rows: int, inner: int):
    # a tile is compiled once for all shapes: few of them, or compiling takes the time
    few = tokens <= 32
    sizes = ((32, 64, 128), (128, 256), (4,)) if few else ((64, 128), (64, 128), (3, 4))
    for block_out, block_in, stages, splits in itertools.product(*sizes, (1, 2, 4, 8)):
        programs = -(-out_rows // block_out)
        # waves of 132 multiprocessors: neither idle ones nor crumbs
        if inner % block_in or (splits > 1 and programs * splits > 132 * 8) or (splits < 8 and programs * splits < 100):
            continue
        # the stages must fit beside each other
        if stages * 2 * block_in * (block_out + sum(linear_triton.token_blocks(tokens))) <= 220 * 1024:
            yield Choice("triton", block_out, block_in, splits, 8 if block_out == 128 else 4, stages)


def _graph_us(call, operands: list, rounds: int = 6) -> float:
    """Return the median us of a call, replayed in a CUDA graph over all operands in turn."""
    call(operands[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(operand) for operand in operands]
    spans = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / len(operands))
    del kept
    return statistics.median(spans[1:])


def measure_attention(where: torch.device, options) -> list[dict]:
    """Return us of torch's form and of each tiling for the target's and the drafter's rows at each context."""
    rows = []
    shapes = {"target": (24, 4, 256, (1, 16, 65), None), "drafter": (32, 8, 128, (16,), 2048)}
    for (name, (heads, kv, dim, sizes, window)), context in itertools.product(shapes.items(), options.contexts):
        for nodes in sizes:
            row = {"name": name, "nodes": nodes, "context": context, "tilings": {}}
            call, torch_call = _attention_calls(where, heads, kv, dim, nodes, context, window)
            row["torch_us"] = _graph_us(lambda _, call=torch_call: call(), [None] * 4)
            for cut in _tilings(heads // kv * nodes, kv, dim):
                try:
                    row["tilings"][str(cut)] = _graph_us(lambda _, cut=cut, call=call: call(cut), [None] * 4)
                except Exception as error:
                    row["tilings"][str(cut)] = f"{type(error).__name__}: {str(error)[:120]}"
            rows.append(row)
            timed = {key: us for key, us in row["tilings"].items() if isinstance(us, float)}
            best = min(timed, key=timed.get) if timed else None
            print(name, nodes, context, f"torch {row['torch_us']:.1f}", best, timed.get(best), flush=True)
    return rows


def _tilings(rows: int, kv_heads: int, dim: int):
    default = tree_attention_triton.choose_tiling(rows, kv_heads, dim)
    yield default
    splits = sorted({default.splits, min(2 * default.splits, tree_attention_triton.MAX_SPLITS)})
    for keys, stages, warps, count in itertools.product((32, 64), (2, 3), (4, 8), splits):
        cut = tree_attention_triton.Tiling(default.rows, keys, count, warps, stages)
        if cut != default:
            yield cut


def _attention_calls(where, heads: int, kv: int, dim: int, nodes: int, context: int, window: int | None):
    def draw(*shape):
        return torch.randn(*shape, device=where, dtype=torch.bfloat16)

    parents = (torch.arange(nodes, device=where)[None] - 1).div(4, rounding_mode="floor")
    own = ancestor_mask(parents)[0]
    capacity = context + 128
    committed = torch.tensor([context], device=where)
    mask = tree_attention.TreeMask(committed, own, own.sum(-1) - 1, window)
    query, keys, values = draw(heads, nodes, dim), draw(kv, capacity, dim), draw(kv, capacity, dim)
    prepared, seen = tree_attention_triton.prepare_mask(mask, capacity), tree_attention.dense(mask, capacity)

    def ours(cut):
        return tree_attention_triton.attend(query, keys, values, prepared, tiling=cut)

    return ours, lambda: tree_attention.attend(query, keys, values, seen)
