"""Time GDN tree verification, one layer a call, for every backend of the device that passes its check."""

import logging
import sys
import time
from pathlib import Path

import pyarrow as pa
import torch
from input_errors import told
from probe_records import run_probe, write_rows
from torch import Tensor

from tfm import device, manifest
from tfm_kernels.gdn import naive, ops

DESCRIPTION = """
Compares every backend with the definition in float64 (gentle and strong decays, every node as the committed leaf), then
times those that passed, interleaved ABBA: forward, then backward, in every round. Writes samples.parquet,
checks.parquet and kernels.json to --out. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
# largest error against float64, relative to the largest exact value; the float32 limit is the paper's
LIMITS = {"float64": 1e-12, "float32": 1e-4}
BASELINES = ("recurrent_triton", "naive")  # the per-branch recurrence, the first one that the device has
CUDA_REPEATS = 20  # calls between two events: one call is shorter than the events resolve
SMALL_DIM = 16  # of the commit check, which needs a state a node
SAMPLES = pa.schema(
    [("backend", pa.string()), ("shape", pa.string())]
    + [(name, pa.int32()) for name in ("rows", "round", "order")]
    + [("us", pa.float64())]
)
CHECKS = pa.schema(
    [(name, pa.string()) for name in ("backend", "op", "shape", "dtype", "decay")]
    + [("rows", pa.int32()), ("error", pa.float64()), ("limit", pa.float64()), ("passed", pa.bool_())]
    + [("reason", pa.string())]
)
logger = logging.getLogger("bench_kernel")


def parents_of(shape: str, rows: int) -> list[int]:
    """Return the parents of a tree of `rows` nodes: the three shapes of the public micro-benchmark (paper 1.3)."""
    parent = {"chain": lambda i: i - 1, "wide": lambda i: (i - 1) // 4, "mixed": lambda i: max(i - 4, 0)}[shape]
    return [-1, *(parent(i) for i in range(1, rows))]


def make_inputs(rows: int, shape: str, settings: dict, where: torch.device, *, decay: str = "gentle") -> dict:
    """Return the op's inputs for one request, float32: unit keys, scaled queries, log-decays as named."""
    generator = torch.Generator().manual_seed(settings["seed"])
    heads, values, dim = settings["key_heads"], settings["value_heads"], settings["head_dim"]

    def draw(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(rows, heads, dim), dim=-1) for _ in range(2))
    gate = torch.rand(1, rows, values, generator=generator)
    # strong: most of the state is forgotten at once, so that path sums of log-decays reach thousands
    log_decay = -0.5 * gate if decay == "gentle" else torch.where(gate < 0.5, -200.0 * gate, -0.1 * gate)
    inputs = {"q": q * dim**-0.5, "k": k, "v": draw(rows, values, dim), "log_decay": log_decay}
    inputs |= {"beta": draw(rows, values).sigmoid(), "state": draw(values, dim, dim) * dim**-0.5}
    inputs["parents"] = torch.tensor([parents_of(shape, rows)])
    return {name: tensor.to(where) for name, tensor in inputs.items()}


def backends_of(where: torch.device) -> dict[str, str]:
    """Return each backend of the op with why it does not run here; empty for those that do."""
    reasons = {}
    for name in ops.BACKENDS:
        try:
            ops.resolve_backend(name, where, torch.float32)
            reasons[name] = ""
        except (ValueError, RuntimeError, ImportError) as error:
            reasons[name] = str(error)
    return reasons


def check(backend: str, rows: int, shape: str, settings: dict, where: torch.device) -> list[dict]:
    """Return the errors of one backend against the definition in float64, one row a decay and dtype."""
    found = []
    for decay in ("gentle", "strong"):
        inputs = make_inputs(rows, shape, settings, where, decay=decay)
        exact, _, _ = naive.naive_tree_verify(**{**inputs, "state": inputs["state"].double()})
        for dtype in (torch.float32, torch.float64) if runs_in(backend, where, torch.float64) else (torch.float32,):
            out, _, _ = ops.tree_verify(**{**inputs, "state": inputs["state"].to(dtype)}, backend=backend)
            found.append(_check_row(backend, "verify", rows, shape, decay, out, exact))
    return found


def check_commit(backend: str, rows: int, shape: str, settings: dict, where: torch.device) -> list[dict]:
    """Return how far the state after each node's path is from the recurrence's: every node as the accepted leaf."""
    small = {**settings, "head_dim": min(settings["head_dim"], SMALL_DIM)} if where.type == "cpu" else settings
    found = []
    for dtype in (torch.float32, torch.float64) if runs_in(backend, where, torch.float64) else (torch.float32,):
        inputs = make_inputs(rows, shape, small, where)
        _, states, _ = naive.naive_states(**{**inputs, "state": inputs["state"].double()})
        state = inputs["state"].to(dtype)
        _, writes, path_log_decay = ops.tree_verify(**{**inputs, "state": state}, backend=backend)
        committed = [
            ops.commit(state, inputs["k"], writes, path_log_decay, torch.tensor([path], device=where))
            for path in _paths(inputs["parents"][0].tolist())
        ]
        found.append(_check_row(backend, "commit", rows, shape, "gentle", torch.cat(committed), states[0]))
    return found


def runs_in(backend: str, where: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a backend takes a state of `dtype`."""
    try:
        return bool(ops.resolve_backend(backend, where, dtype))
    except ValueError:
        return False


def measure(backends: list[str], rows: int, shape: str, settings: dict, where: torch.device) -> list[dict]:
    """Return the samples of one tree: in each round every backend once forward and once backward."""
    inputs = make_inputs(rows, shape, settings, where)
    ancestors = ops.ancestor_mask(inputs["parents"])
    # shared by all layers of a pass, so not in the time
    trees = {name: ops.prepare_tree(inputs["parents"], ancestors, backend=name) for name in backends}
    for backend in backends:
        _time(backend, {**inputs, "tree": trees[backend]}, where)  # warm-up: compilation and caches
    samples = []
    for number in range(settings["rounds"]):
        for order, backend in enumerate([*backends, *reversed(backends)]):
            us = _time(backend, {**inputs, "tree": trees[backend]}, where)
            samples.append(
                {"backend": backend, "shape": shape, "rows": rows, "round": number, "order": order, "us": us}
            )
    return samples


def _time(backend: str, inputs: dict, where: torch.device) -> float:
    """Return the microseconds of one call."""
    if where.type == "cpu":
        start = time.perf_counter()
        ops.tree_verify(**inputs, backend=backend)
        return (time.perf_counter() - start) * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(CUDA_REPEATS):
        ops.tree_verify(**inputs, backend=backend)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / CUDA_REPEATS


def run(settings: dict, out: Path) -> dict:
    """Check, measure and write the three files; return kernels.json."""
    start = time.time()
    device.make_deterministic(threads=settings["threads"])
    checks, samples = [], []
    with torch.inference_mode(), device.claim(device.check_device(settings["device"])) as where:
        reasons = backends_of(where)
        # in Python a GPU's time of the definition would be the host's
        names = [name for name, reason in reasons.items() if not reason and (where.type == "cpu" or name != "naive")]
        few = min(settings["rows"], key=lambda rows: abs(rows - 33))
        for backend in names:
            checks += _or_refusal(check_commit, backend, few, "mixed", settings, where)
        for rows in settings["rows"]:
            for shape in settings["shapes"]:
                for backend in names:
                    checks += _or_refusal(check, backend, rows, shape, settings, where)
                wrong = {row["backend"] for row in checks if not row["passed"]}
                samples += measure([name for name in names if name not in wrong], rows, shape, settings, where)
                logger.info("T = %d, %s: %d of %d backends timed", rows, shape, len(names) - len(wrong), len(names))
        facts = {"device": device.facts(where)}
    facts["files"] = {
        "samples.parquet": write_rows(out / "samples.parquet", samples, SAMPLES),
        "checks.parquet": write_rows(out / "checks.parquet", checks, CHECKS),
    }
    baseline = next((name for name in BASELINES if name in names), None)
    facts |= {"schema": manifest.SCHEMA_VERSION, "settings": settings, "backends": reasons, "baseline": baseline}
    facts |= {"source_digest": manifest.modules_digest(["tfm_kernels.gdn.ops"])}
    facts |= {"environment": manifest.environment(), "seconds": round(time.time() - start, 3)}
    manifest.write_json(out / "kernels.json", facts)
    return facts


def _or_refusal(one_check, backend: str, rows: int, shape: str, settings: dict, where: torch.device) -> list[dict]:
    """Return a check's rows; where the backend refuses these sizes, one failed row with its words."""
    try:
        return one_check(backend, rows, shape, settings, where)
    except ValueError as error:
        row = {"backend": backend, "op": one_check.__name__, "shape": shape, "dtype": "", "decay": "", "rows": rows}
        return [{**row, "error": None, "limit": None, "passed": False, "reason": str(error)}]


def _check_row(backend: str, op: str, rows: int, shape: str, decay: str, found: Tensor, exact: Tensor) -> dict:
    dtype = str(found.dtype).removeprefix("torch.")
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    passed = error <= LIMITS[dtype]  # false for NaN
    row = {"backend": backend, "op": op, "shape": shape, "dtype": dtype, "decay": decay, "rows": rows}
    reason = "" if passed else f"{op} in {dtype}, {decay} decay: error {error:.1e} above {LIMITS[dtype]:g}"
    return {**row, "error": error, "limit": LIMITS[dtype], "passed": passed, "reason": reason}


def _paths(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@told
def main() -> int:
    return run_probe("kernels", DESCRIPTION, run, fact="baseline")


if __name__ == "__main__":
    sys.exit(main())
