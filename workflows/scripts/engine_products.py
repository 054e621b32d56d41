"""Search the tiles of few-row products and of tree attention at a shape, against torch's own form."""

import functools
import itertools
import statistics
import time

import torch
from engine_arms import mark, span_ms, synchronise
from engine_shapes import Sizes

from tfm_kernels import linear_triton, product_cuda, tree_attention, tree_attention_triton
from tfm_kernels.gdn.ops import ancestor_mask
from tfm_kernels.linear_triton import Choice

TREE_ROWS, CHAIN_ROWS = 65, 16
OTHER_ROWS = (17, 33, 129)  # of the sweep of budgets: searched when the rest is done
COLD_BYTES = 160 * 2**20  # weights in turn: three times the L2 cache
BLOCK_SHARED = 220 * 1024  # bytes of shared memory that the stages of a tile may take
ENDED = "search ended by --seconds"


def product_shapes(sizes: Sizes) -> dict[str, tuple[tuple[int, int], tuple[int, ...]]]:
    """Return ([out, in], row counts) of a step's products by name, the largest part of a step's bytes first."""
    heads, kv = (count * sizes.head_dim for count in sizes.heads)
    keys, values = (count * sizes.gdn_dim for count in sizes.gdn_heads)
    drafter, drafter_kv = (count * sizes.drafter_dim for count in sizes.drafter_heads)
    target, block = (1, CHAIN_ROWS, TREE_ROWS), (CHAIN_ROWS, 2 * CHAIN_ROWS)
    return {
        "gate_up": ((2 * sizes.inner, sizes.hidden), target),
        "down": ((sizes.hidden, sizes.inner), target),
        "gdn_in": ((2 * keys + 2 * values + 2 * sizes.gdn_heads[1], sizes.hidden), target),
        "head": ((sizes.vocab, sizes.hidden), target),
        "gdn_out": ((sizes.hidden, values), target),  # the attention's output has the same shape in the paper's model
        "attention_in": ((2 * heads + 2 * kv, sizes.hidden), target),
        "drafter_in": ((drafter + 2 * drafter_kv, sizes.hidden), block),
        "drafter_out": ((sizes.hidden, drafter), (CHAIN_ROWS,)),
        "drafter_fc": ((sizes.hidden, 5 * sizes.hidden), (CHAIN_ROWS,)),
        "weaver_qkv": ((3 * sizes.rank, sizes.rank), (4,)),
        "weaver_out": ((sizes.rank, sizes.rank), (4,)),
    }


def run_products(where: torch.device, options, sizes: Sizes) -> list[dict]:
    """Return one row a shape and row count; writes choices to --out, as before where a search did not end."""
    deadline, rows, choices = time.monotonic() + options.seconds, [], dict(linear_triton.measured_choices())
    cold = COLD_BYTES if where.type == "cuda" else 0
    for name, (out_rows, inner), counts in _passes(sizes):
        count = max(2, -(-cold // (2 * out_rows * inner)))
        weights = [torch.randn(out_rows, inner, device=where, dtype=torch.bfloat16) for _ in range(count)]
        for tokens in counts:
            if time.monotonic() > deadline:
                print(name, tokens, "left out: --seconds are over", flush=True)
                break
            x = torch.randn(tokens, inner, device=where, dtype=torch.bfloat16)
            row = _measure(x, weights, deadline)
            rows.append({"name": name, "tokens": tokens, "out": out_rows, "in": inner, **row})
            shown = {key: round(row[key], 1) for key in ("torch_us", "ours_us") if row[key] is not None}
            print(name, tokens, shown, row["choice"], f"tried {len(row['tried'])}", flush=True)
            key, is_whole = linear_triton.key_of(tokens, out_rows, inner), ENDED not in row["errors"]
            if row["ours_us"] is not None and row["ours_us"] < row["torch_us"] and (is_whole or key not in choices):
                choices[key] = Choice(**row["choice"])
            elif is_whole:
                choices.pop(key, None)
        facts = {"device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"}
        linear_triton.write_choices(options.out / "linear_choices.json", choices, facts)
    return rows


def _passes(sizes: Sizes):
    shapes = product_shapes(sizes)
    yield from ((name, shape, counts) for name, (shape, counts) in shapes.items())
    yield from ((name, shape, OTHER_ROWS) for name, (shape, counts) in shapes.items() if TREE_ROWS in counts)


def _measure(x: torch.Tensor, weights: list[torch.Tensor], deadline: float) -> dict:
    expected = torch.nn.functional.linear(x, weights[0]).float()
    torch_us = replay_us(lambda w: torch.nn.functional.linear(x, w), weights)
    tried, errors = [], []
    for choice in candidates(x.shape[0], *weights[0].shape):
        if time.monotonic() > deadline:
            errors.append(ENDED)
            break
        try:
            if choice.form == "cuda" and (refused := _cuda_error(x.device, x.shape[0])):
                raise ValueError(refused)
            error = (linear_triton.multiply(x, weights[0], choice).float() - expected).abs().max().item()
            # NaN is not less than anything
            if not error <= 0.02 * expected.abs().max().item():
                raise ValueError(f"wrong by {error}")
            us = replay_us(lambda w, choice=choice: linear_triton.multiply(x, w, choice), weights)
        except Exception as error:
            # a tile that does not fit or is wrong is reported, not used
            errors.append(f"{choice}: {type(error).__name__}: {str(error)[:120]}")
            continue
        tried.append((us, choice))
    best = min(tried, key=lambda pair: pair[0], default=(None, None))
    return {
        "torch_us": torch_us,
        "ours_us": best[0],
        "choice": best[1] and vars(best[1]),
        "bytes": weights[0].numel() * 2,
        "tried": [[us, *vars(choice).values()] for us, choice in tried],
        "errors": errors,
    }


@functools.cache
def _cuda_error(where: torch.device, tokens: int) -> str | None:
    # what does not compile is tried once, not for every tile
    try:
        product_cuda.library_of(where, tokens)
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    return None


def cuda_candidates(tokens: int, inner: int):
    """Yield the tiles of the form `cuda` worth trying: one program of eight warps, or two of four, a multiprocessor."""
    for block_out, warps in itertools.product(product_cuda.BLOCKS, product_cuda.WARPS):
        each = 2 if warps == 4 else 1
        is_crumb = tokens > 32 and block_out == 64 and each == 1
        try:
            # as many stages as fit: the ring is what keeps memory busy
            how = product_cuda.plan(tokens, 1, block_out=block_out, warps=warps, stages=8, slots=1, each=each)
        except ValueError:
            continue
        if inner % 8 == 0 and how.stages > 2 and not is_crumb:
            yield Choice("cuda", block_out, product_cuda.STEP, each, warps, how.stages)


def candidates(tokens: int, out_rows: int, inner: int):
    """Yield the tiles worth trying for a product."""
    if tokens <= product_cuda.MAX_ROWS:
        yield from cuda_candidates(tokens, inner)
    few, padded = tokens <= 32, sum(linear_triton.token_blocks(tokens))
    # the tokens are read again for every block of the weight's rows: many tokens want large blocks
    sizes = ((32, 64, 128), (128, 256), (3, 4, 6)) if few else ((64, 128, 256), (64, 128), (3, 4, 5))
    for form, block_out, block_in, stages in itertools.product(("stream", "triton"), *sizes):
        # the stages must fit beside each other
        needed = stages * 2 * block_in * (block_out + padded)
        # sums pass through it when they are stored: there the stages are still in use
        needed += 4 * block_out * padded if form == "stream" else 0
        if inner % block_in or needed > BLOCK_SHARED or (form == "stream" and block_out == 32):
            continue
        # two programs a multiprocessor were never the fastest of `stream`
        for splits in (1,) if form == "stream" else (1, 2, 4, 8):
            programs = -(-out_rows // block_out) * splits
            # waves of 132 multiprocessors: neither idle ones nor crumbs
            is_odd = (splits > 1 and programs > 132 * 8) or (splits < 8 and programs < 100)
            if form != "stream" and is_odd:
                continue
            yield Choice(form, block_out, block_in, splits, 4 if block_out < 128 else 8, stages)


def replay_us(call, operands: list, rounds: int = 6) -> float:
    """Return the median us of a call, replayed in a CUDA graph over all operands in turn; called as it is on a CPU."""
    where = operands[0].device if operands[0] is not None else torch.device("cuda")
    call(operands[0])
    synchronise(where)
    if where.type != "cuda":
        start = time.perf_counter()
        call(operands[0])
        return (time.perf_counter() - start) * 1e6
    # not torch.cuda.graph, which empties all caches before every capture
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        kept = [call(operand) for operand in operands]
        graph.capture_end()
    spans = []
    for _ in range(rounds):
        start = mark(where)
        graph.replay()
        end = mark(where)
        synchronise(where)
        spans.append(span_ms(start, end) * 1e3 / len(operands))
    del kept
    return statistics.median(spans[1:])


def attention_cases(sizes: Sizes):
    """Yield name, query heads, key heads, width, rows and window of the attention passes of a step."""
    for rows in (1, CHAIN_ROWS, TREE_ROWS):
        yield "target", *sizes.heads, sizes.head_dim, rows, None
    yield "drafter", *sizes.drafter_heads, sizes.drafter_dim, CHAIN_ROWS, 2048


def run_attention(where: torch.device, options, sizes: Sizes) -> list[dict]:
    """Return us of torch's form and of each tiling for the target's and the drafter's rows at each context."""
    deadline, rows = time.monotonic() + options.seconds, []
    for context, (name, heads, kv, dim, nodes, window) in itertools.product(options.contexts, attention_cases(sizes)):
        if time.monotonic() > deadline:
            print(ENDED, flush=True)
            break
        row = {"name": name, "nodes": nodes, "context": context, "tilings": {}}
        ours, plain, keys = _attention_calls(where, heads, kv, dim, nodes, context, window)
        row["torch_us"] = replay_us(plain, [keys] * 4)
        expected = plain(keys).float()
        for cut in tilings(heads // kv * nodes, kv, dim):
            try:
                error = (ours(keys, cut).float() - expected).abs().max().item()
                if not error <= 0.02 * expected.abs().max().item():
                    raise ValueError(f"wrong by {error}")
                row["tilings"][str(cut)] = replay_us(lambda keys, cut=cut, ours=ours: ours(keys, cut), [keys] * 4)
            except Exception as error:
                row["tilings"][str(cut)] = f"{type(error).__name__}: {str(error)[:120]}"
        rows.append(row)
        timed = {key: us for key, us in row["tilings"].items() if isinstance(us, float)}
        best, default = min(timed, key=timed.get, default=None), next(iter(row["tilings"].values()))
        shown = [us if isinstance(us, str) else round(us, 1) for us in (row["torch_us"], default, timed.get(best))]
        print(name, nodes, context, "torch, default, best:", shown, best, flush=True)
    return rows


def tilings(rows: int, kv_heads: int, dim: int):
    """Yield the tilings worth trying, the one that is taken without a search first."""
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

    def ours(keys, cut):
        return tree_attention_triton.attend(query, keys, values, prepared, tiling=cut)

    return ours, lambda keys: tree_attention.attend(query, keys, values, seen), keys


def run_compile(where: torch.device, options, sizes: Sizes) -> dict:
    """Compile what `run_products` and `run_attention` try, into Triton's cache on disk; returns counts and seconds."""
    part, parts = map(int, options.part.split("/"))
    start, jobs = time.monotonic(), {}
    for _, (out_rows, inner), counts in _passes(sizes):
        for tokens in counts:
            for choice in candidates(tokens, out_rows, inner):
                if choice.form == "cuda":
                    # one library a number of tiles
                    jobs.setdefault(product_cuda.tiles_of(tokens), (tokens, choice))
                    continue
                tile = (sum(linear_triton.token_blocks(tokens)), choice.block_out, choice.block_in, choice.stages)
                tile += (choice.form,)
                # with splits the kernel writes float32
                jobs.setdefault((*tile, choice.form == "triton" and choice.splits > 1), (tokens, choice))
    # the slow ones first, so that every part takes one
    ordered = sorted(jobs.values(), key=lambda job: job[1].form != "cuda")
    mine = [job for number, job in enumerate(ordered) if number % parts == part]
    for tokens, choice in mine:
        x, weight = (torch.ones(rows, 2048, device=where, dtype=torch.bfloat16) for rows in (tokens, 1024))
        try:
            linear_triton.multiply(x, weight, choice)
        except Exception as error:
            # what does not fit is named by the search itself
            print(choice, f"{type(error).__name__}: {str(error)[:120]}", flush=True)
    cases = {case[1:]: case for case in attention_cases(sizes)}
    cuts = [(case, cut) for case in cases.values() for cut in tilings(case[1] // case[2] * case[4], case[2], case[3])]
    mine_too = [job for number, job in enumerate(cuts) if number % parts == part]
    for (_, heads, kv, dim, nodes, window), cut in mine_too:
        ours, _, keys = _attention_calls(where, heads, kv, dim, nodes, 64, window)
        try:
            ours(keys, cut)
        except Exception as error:
            print(cut, f"{type(error).__name__}: {str(error)[:120]}", flush=True)
    synchronise(where)
    return {"products": len(mine), "tilings": len(mine_too), "seconds": time.monotonic() - start}
