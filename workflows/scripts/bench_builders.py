"""Builders on equal terms: time, calls of the head, and what each tree would get accepted, at the same contexts."""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from input_errors import told
from run_cells import register_kernels

register_kernels()

import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from decode_cell import decode_config  # noqa: E402
from probe_records import write_rows  # noqa: E402
from torch import Tensor  # noqa: E402

from baselines import methods, suite  # noqa: E402
from baselines.loading import load_models  # noqa: E402
from tfm import device, manifest, oracle  # noqa: E402
from tfm.acceptance import accept, edge_log_probs, expected_accepted  # noqa: E402
from tfm.clock import OFF  # noqa: E402
from tfm.decode import Context, Models  # noqa: E402
from tfm.marginals import Marginals  # noqa: E402
from tfm.prompts import PreparedPrompt, read_prepared  # noqa: E402
from tfm.sampling import next_tokens  # noqa: E402
from tfm.tokenizer import load_tokenizer  # noqa: E402
from tfm.tree import DraftTree  # noqa: E402

DESCRIPTION = """
Reads a suite's config, its weights and prepared prompt files. Decodes every prompt with the first variant and, at every
`--every`-th step, builds a tree with each of the variants from the same marginals, in an order that turns round each
time; the target then says what a lossless rule accepts of each tree on average, and what the best tree of the same
budget would give. Writes --out, a suite's folder builders/: samples.parquet (one row a context, head and variant) and
builders.json, which certifies it. Table `builders` and the summary read them. Last line of stdout: one JSON object.
"""
VARIANTS = (
    "dartree-b64-w12",  # leads the decode
    "dflash",
    "headchain",
    "ddtree-b64",
    "headddtree-b64",
    "dartfixed-b64",
    "dartree-b64-w12-n0",
    "dartree-b64-w64",
    "heap-b64",
    "tfm-b64-w1",
    "tfm-b64-w2",
    "tfm-b64-w4",
    "tfm-b64-w8",
    "tfm-b64-w16",
    "overgrown-b64-w8",
    "overgrown-b64-w12",
)
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("dataset", "id")),
        ("step", pa.int32()),
        *((name, pa.string()) for name in ("head", "variant", "method")),
        *((name, pa.int32()) for name in ("width", "budget", "calls", "nodes")),
        *((name, pa.float64()) for name in ("build_us", "accepted", "limit")),
        ("nodes_sha256", pa.string()),
    ]
)
WARM_UPS = 3  # builds of each variant that are not counted


@dataclass
class Arm:
    """One variant: its proposer, and how often its head was called in the last build."""

    name: str
    config: object
    proposer: object
    calls: list[int] = field(default_factory=lambda: [0])


class Frozen:
    """A context whose drafter has run: every arm gets the same marginals, cut to the candidates that it asks for."""

    def __init__(self, context: Context, marginals: Marginals):
        self.roots, self.target_hidden = context.roots, context.target_hidden
        self.indices, self.root_positions = context.indices, context.root_positions
        self._marginals = marginals

    def draft(self, candidates: int) -> Marginals:
        count = min(candidates, self._marginals.tokens.shape[-1])
        own = self._marginals
        return Marginals(own.tokens[..., :count], own.log_probs[..., :count], own.hidden)


def make_arm(name: str, config: dict, models: Models, tokenizer) -> Arm:
    """Return the arm of a variant's name at temperature 1."""
    cell = suite.resolve_cell(config, dataset=config["datasets"][0], variant=name, setting="t1", seed=0)
    decode = decode_config(cell, tokenizer)
    arm = Arm(name, decode, methods.resolve(decode.method)(decode, models))
    scorer = getattr(arm.proposer, "_scorer", None)
    if scorer is not None:
        count_calls(scorer, arm.calls)
    return arm


def count_calls(scorer, calls: list[int]) -> None:
    """Make a scorer add 1 to calls[0] for every expansion."""
    expand = scorer.expand

    def counted(*arguments):
        calls[0] += 1
        return expand(*arguments)

    scorer.expand = counted


def timed_build(arm: Arm, context: Frozen, where: torch.device) -> tuple[DraftTree, float]:
    """Return a tree and the microseconds of building it, the device idle before and after."""
    arm.calls[0] = 0
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    start = time.perf_counter()
    tree = arm.proposer.propose(context, OFF)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return tree, (time.perf_counter() - start) * 1e6


def nodes_sha256(tree: DraftTree) -> str:
    """Return the digest of the drafted prefixes of a tree of one request, whatever their order."""
    paths, tokens = [()], tree.tokens[0].tolist()
    for node, parent in enumerate(tree.parents[0, : int(tree.num_nodes)].tolist()[1:], start=1):
        paths.append((*paths[parent], tokens[node]))
    return manifest.sha256_json(sorted(paths[1:]))


class Bench:
    """The arms on one set of models, and the rows that they leave."""

    def __init__(
        self, arms: list[Arm], models: Models, where: torch.device, *, head: str, budget: int, every: int, backend: str
    ):
        self.arms, self.models, self.where, self.head = arms, models, where, head
        self.budget, self.every, self.backend = budget, every, backend
        self.candidates = max(max(arm.config.candidates, arm.config.budget or 1) for arm in arms)
        self.rows: list[dict] = []
        self.contexts, self._left = 0, WARM_UPS

    @torch.inference_mode()
    def prompt(self, row: PreparedPrompt, *, steps: int) -> None:
        """Decode `steps` steps after a prompt with the first arm, and build with all of them on the way."""
        target, lead = self.models.target, self.arms[0].config
        ids, lengths = (torch.tensor([x], device=self.where) for x in (row.tokens, len(row.tokens)))
        indices = torch.tensor([row.index], device=self.where)
        room = len(row.tokens) + steps * (self.models.drafter.draft_rows + 1) + 1
        cache = target.new_cache(1, room)
        output = target.prefill(ids, lengths, cache)
        roots = next_tokens(output.logits, lengths[:, None], indices, seed=0, temperature=1.0)[:, 0]
        context = Context(self.models, output, lengths, roots, indices, max_tokens=room)
        for step in range(steps):
            if int(context.roots) in lead.eos_tokens:
                return
            frozen = Frozen(context, context.draft(self.candidates))
            if step % self.every == 0:
                self._compare({"dataset": row.dataset, "id": row.id, "step": step}, frozen, cache)
            tree = self.arms[0].proposer.propose(frozen, OFF)
            output = target.verify(tree, cache, gdn_backend=self.backend)
            result = accept(
                tree,
                output.logits,
                rule="target_only",
                temperature=1.0,
                seed=0,
                indices=indices,
                root_positions=cache.lengths,
            )
            cache.commit(output.scratch, result.path)
            context.advance(output, result)

    def _compare(self, where: dict, frozen: Frozen, cache) -> None:
        while self._left:
            self._left -= 1
            for arm in self.arms:
                arm.proposer.propose(frozen, OFF)
        order = self.arms if self.contexts % 2 == 0 else self.arms[::-1]
        self.contexts += 1
        trees, target = {}, self.models.target
        for arm in order:
            trees[arm.name], us = timed_build(arm, frozen, self.where)
            one = {"head": self.head, "variant": arm.name, "method": arm.config.method, "width": arm.config.width}
            self.rows.append({**where, **one, "budget": arm.config.budget, "build_us": us, "calls": arm.calls[0]})
        limits = oracle.search(
            lambda tree: target.verify(tree, cache, gdn_backend=self.backend).logits,
            frozen.roots,
            budget=self.budget,
            width=16,
            depth=self.models.drafter.draft_rows,
            temperature=1.0,
        )
        for row in self.rows[-len(order) :]:
            tree = trees[row["variant"]]
            logits = target.verify(tree, cache, gdn_backend=self.backend).logits
            row["nodes"] = int(tree.num_nodes) - 1
            row["accepted"] = float(expected(tree, logits))
            row["limit"] = float(limits.expected_accepted(self.budget))
            row["nodes_sha256"] = nodes_sha256(tree)


def expected(tree: DraftTree, logits: Tensor) -> Tensor:
    """Return what a lossless rule accepts of a tree on average at temperature 1 [R], in float64."""
    return expected_accepted(tree, edge_log_probs(tree, logits.double(), 1.0), int(tree.depths.max()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a suite's config (workflows/config/dense.yaml)")
    add("--prompts", type=Path, nargs="+", required=True, help="prepared prompt files of the suite's target")
    add("--out", type=Path, required=True, help="folder to write")
    add("--variants", default=",".join(VARIANTS), help="comma-separated; the first one leads the decode")
    add("--heads", default="weaver", help="comma-separated: the variants run once with each of them")
    add("--weights", help="folder of the weights; default: the config's")
    add("--device", choices=("cpu", "cuda"), help="default: the config's")
    add("--limit", type=int, default=4, help="prompts of each file")
    add("--steps", type=int, default=16, help="steps decoded after a prompt")
    add("--every", type=int, default=4, help="steps between two comparisons")
    add("--threads", type=int, default=4, help="of torch")
    add("--commit", help="commit of the code where this is no git checkout")
    return parser.parse_args(arguments)


@told
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    raw = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    changes = {key: value for key, value in (("weights", options.weights), ("device", options.device)) if value}
    config = suite.resolve({**raw, **changes})
    heads, start, rows = options.heads.split(","), time.time(), []
    device.make_deterministic(threads=options.threads)
    with device.claim(device.check_device(config["device"])) as where:
        for head in heads:
            rows += bench_head(head, config, options, where)
        facts = {"device": device.facts(where)}
    settings = {name: getattr(options, name) for name in ("limit", "steps", "every", "threads")}
    settings |= {"heads": heads, "budget": config["budget"], "dtype": config["dtype"], "sets": len(options.prompts)}
    environment = manifest.environment()
    if options.commit:
        environment["git"] = {"commit": options.commit, "dirty": None}
    files = {"samples.parquet": write_rows(options.out / "samples.parquet", rows, SCHEMA)}
    facts |= {"files": files, "settings": settings, "environment": environment, "caption": config["caption"]}
    facts |= {"source_digest": manifest.script_digest("bench_builders"), "seconds": round(time.time() - start, 1)}
    manifest.write_json(options.out / "builders.json", facts)
    print(json.dumps({"out": str(options.out), "rows": len(rows), "seconds": facts["seconds"]}))
    return 0


def bench_head(head: str, config: dict, options: argparse.Namespace, where: torch.device) -> list[dict]:
    """Return the rows of all variants with one head."""
    weights = {part: f"{config['weights']}/{part}" for part in ("target", "drafter", head)}
    models = load_models(weights, device=where, dtype=getattr(torch, config["dtype"]))
    tokenizer = load_tokenizer(weights["target"])
    names = [_with_head(name, head, config) for name in options.variants.split(",")]
    arms = [make_arm(name, config, models, tokenizer) for name in names]
    bench = Bench(
        arms, models, where, head=head, budget=config["budget"], every=options.every, backend=config["gdn_backend"]
    )
    for path in options.prompts:
        for row in read_prepared(path)[: options.limit]:
            bench.prompt(row, steps=options.steps)
    return bench.rows


def _with_head(name: str, head: str, config: dict) -> str:
    variant = suite.parse_variant(name, config)
    takes_one = "head" in methods.METHODS[variant.method].options
    return replace(variant, head=head).name(config) if takes_one else name


if __name__ == "__main__":
    sys.exit(main())
