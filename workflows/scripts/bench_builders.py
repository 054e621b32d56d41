"""Builders on equal terms: time, calls of the head, and what each tree would get accepted, at the same contexts."""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from run_cells import register_kernels

register_kernels()

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from decode_cell import decode_config  # noqa: E402
from torch import Tensor  # noqa: E402

from baselines import methods, suite  # noqa: E402
from baselines.loading import load_models  # noqa: E402
from tfm import device, manifest, metrics, oracle  # noqa: E402
from tfm.acceptance import accept, edge_log_probs, expected_accepted  # noqa: E402
from tfm.clock import OFF  # noqa: E402
from tfm.decode import Context, Models  # noqa: E402
from tfm.marginals import Marginals  # noqa: E402
from tfm.prompts import read_prepared  # noqa: E402
from tfm.sampling import next_tokens  # noqa: E402
from tfm.tokenizer import load_tokenizer  # noqa: E402
from tfm.tree import DraftTree  # noqa: E402

DESCRIPTION = """
Reads a suite's config, its weights and prepared prompt files. Decodes every prompt with the first variant and, at every
`--every`-th step, builds a tree with each of the variants from the same marginals, in an order that turns round each
time; the target then says what a lossless rule accepts of each tree on average, and what the best tree of the same
budget would give. Writes --out: samples.parquet (one row a context and variant) and builders.json (means with 95 %
intervals over contexts, and how often two builds chose the same nodes). Last line of stdout: one JSON object.
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
)
SAME = (("heap", "dartree"),)  # methods whose nodes are compared, every variant of one with every one of the other
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
    scorer = getattr(arm.proposer, "_scorer", None) or getattr(getattr(arm.proposer, "_chain", None), "_scorer", None)
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


def paths_of(tree: DraftTree) -> frozenset[tuple[int, ...]]:
    """Return the drafted prefixes of a tree of one request."""
    paths, tokens = [()], tree.tokens[0].tolist()
    for node, parent in enumerate(tree.parents[0, : int(tree.num_nodes)].tolist()[1:], start=1):
        paths.append((*paths[parent], tokens[node]))
    return frozenset(paths[1:])


class Bench:
    """The arms on one set of models, and the rows that they leave."""

    def __init__(self, arms: list[Arm], models: Models, where: torch.device, *, budget: int, every: int, backend: str):
        self.arms, self.models, self.where = arms, models, where
        self.budget, self.every, self.backend = budget, every, backend
        self.candidates = max(max(arm.config.candidates, arm.config.budget or 1) for arm in arms)
        self.rows: list[dict] = []
        pairs = ((a, b) for a in arms for b in arms if (a.config.method, b.config.method) in SAME)
        self.same = {(one.name, other.name): [] for one, other in pairs}
        self.contexts, self._left = 0, WARM_UPS

    @torch.inference_mode()
    def prompt(self, name: str, index: int, tokens: list[int], *, steps: int) -> None:
        """Decode `steps` steps after a prompt with the first arm, and build with all of them on the way."""
        target, lead = self.models.target, self.arms[0].config
        ids, lengths = torch.tensor([tokens], device=self.where), torch.tensor([len(tokens)], device=self.where)
        indices = torch.tensor([index], device=self.where)
        room = len(tokens) + steps * (self.models.drafter.draft_rows + 1) + 1
        cache = target.new_cache(1, room)
        output = target.prefill(ids, lengths, cache)
        roots = next_tokens(output.logits, lengths[:, None], indices, seed=0, temperature=1.0)[:, 0]
        context = Context(self.models, output, lengths, roots, indices, max_tokens=room)
        for step in range(steps):
            if int(context.roots) in lead.eos_tokens:
                return
            frozen = Frozen(context, context.draft(self.candidates))
            if step % self.every == 0:
                self._compare(f"{name}/{step}", frozen, cache)
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

    def _compare(self, where: str, frozen: Frozen, cache) -> None:
        while self._left:
            self._left -= 1
            for arm in self.arms:
                arm.proposer.propose(frozen, OFF)
        order = self.arms if self.contexts % 2 == 0 else self.arms[::-1]
        self.contexts += 1
        trees, target = {}, self.models.target
        for arm in order:
            trees[arm.name], us = timed_build(arm, frozen, self.where)
            self.rows.append({"context": where, "variant": arm.name, "build_us": us, "calls": arm.calls[0]})
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
        for one, other in self.same:
            self.same[one, other].append(paths_of(trees[one]) == paths_of(trees[other]))


def expected(tree: DraftTree, logits: Tensor) -> Tensor:
    """Return what a lossless rule accepts of a tree on average at temperature 1 [R], in float64."""
    return expected_accepted(tree, edge_log_probs(tree, logits.double(), 1.0), int(tree.depths.max()))


def summary(bench: Bench) -> dict:
    """Return means with intervals by variant, and the share of contexts where two builds chose the same nodes."""
    frame, found = pd.DataFrame(bench.rows), {}
    for name, rows in frame.groupby("variant", sort=False):
        table = rows.assign(dataset="all", id=rows["context"], seed=0, expected_accepted=rows["accepted"])
        best = table.assign(expected_accepted=table["limit"])
        found[name] = {
            "build_us": statistics.median(rows["build_us"]),
            "build_us_mean": float(rows["build_us"].mean()),
            "calls": float(rows["calls"].mean()),
            "nodes": float(rows["nodes"].mean()),
            "accepted": asdict(metrics.mean(table, "expected_accepted")),
            "oracle_share": asdict(metrics.ratio(table, best, "expected_accepted")),
            "contexts": len(rows),
        }
    same = {
        f"{one} = {other}": {"share": sum(hits) / len(hits), "n": len(hits)}
        for (one, other), hits in bench.same.items()
    }
    return {"variants": found, "same_nodes": same}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a suite's config (workflows/config/dense.yaml)")
    add("--prompts", type=Path, nargs="+", required=True, help="prepared prompt files of the suite's target")
    add("--out", type=Path, required=True, help="folder to write")
    add("--variants", default=",".join(VARIANTS), help="comma-separated; the first one leads the decode")
    add("--head", choices=("markov", "recurrent"), help="the head of every variant that has one, in the weaver's place")
    add("--weights", help="folder of the weights; default: the config's")
    add("--device", choices=("cpu", "cuda"), help="default: the config's")
    add("--limit", type=int, default=4, help="prompts of each file")
    add("--steps", type=int, default=16, help="steps decoded after a prompt")
    add("--every", type=int, default=4, help="steps between two comparisons")
    add("--threads", type=int, default=4, help="of torch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    raw = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    changes = {key: value for key, value in (("weights", options.weights), ("device", options.device)) if value}
    config = suite.resolve({**raw, **changes})
    names = options.variants.split(",")
    if options.head:
        names = [_with_head(name, options.head, config) for name in names]
    device.make_deterministic(threads=options.threads)
    with device.claim(device.check_device(config["device"])) as where:
        weights = {part: f"{config['weights']}/{part}" for part in ("target", "drafter", options.head or "weaver")}
        models = load_models(weights, device=where, dtype=getattr(torch, config["dtype"]))
        tokenizer = load_tokenizer(weights["target"])
        arms = [make_arm(name, config, models, tokenizer) for name in names]
        bench = Bench(arms, models, where, budget=config["budget"], every=options.every, backend=config["gdn_backend"])
        for path in options.prompts:
            for row in read_prepared(path)[: options.limit]:
                bench.prompt(f"{path.stem}/{row.id}", row.index, row.tokens, steps=options.steps)
        facts = {"head": options.head or "weaver", "device": device.facts(where)}
    report = {**facts, "config": str(options.config), "environment": manifest.environment(), **summary(bench)}
    options.out.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(bench.rows).to_parquet(options.out / "samples.parquet", index=False)
    manifest.write_json(options.out / "builders.json", report)
    brief = {name: round(entry["build_us"]) for name, entry in report["variants"].items()}
    print(json.dumps({"out": str(options.out), "contexts": bench.contexts, "build_us": brief}))
    return 0


def _with_head(name: str, head: str, config: dict) -> str:
    variant = suite.parse_variant(name, config)
    takes_one = "head" in methods.METHODS[variant.method].options
    return replace(variant, head=head).name(config) if takes_one else name


if __name__ == "__main__":
    sys.exit(main())
