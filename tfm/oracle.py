"""The best tree a lossless method could draft: the B most probable prefixes under the target itself.

Any lossless rule on a tree that is a function of the context accepts the sum over drafted nodes of P_target(path) on
average, so the B prefixes of largest probability are the physical limit at budget B, and a method's share
of it is its `expected_accepted` over the limit at the same contexts.

    python -m tfm.oracle --suite results/mini --target tfm/weights/mini/target --device cuda --out oracle.parquet

Reads the suite's cells and prompts, computes the limit at a hash-chosen sample of their steps and prints each method's
share with its 95 % interval as one JSON object.
"""

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from tfm import checkpoints, metrics
from tfm.cells import Records, load_cells
from tfm.config import GREEDY_BELOW
from tfm.manifest import sha256_weights
from tfm.prompts import read_prepared
from tfm.target import Target
from tfm.tree import DraftTree

DEPTH = 15  # the drafter's rows: what the methods may draft
CLOCKS = ("off", "wall")  # traced cells repeat the headline's


@dataclass(frozen=True)
class OracleTree:
    """The most probable prefixes of R requests, best first."""

    tree: DraftTree  # those of the budget; their order is that of probability, so parents stand first
    probabilities: Tensor  # [R, B] float64 of each prefix; 0 where the law has fewer

    def expected_accepted(self, budget: int) -> Tensor:
        """Return the limit at a budget [R], up to the one searched: the best sets of all budgets are nested."""
        return self.probabilities[:, :budget].sum(1)


class _Search:
    """Best-first search of one request, on the host.

    `prefixes` holds (log-probability, token, parent, depth) of the root and of every child seen so far; `rows` the
    verified ones in the order of verification, the root first.
    """

    def __init__(self, root: int, budget: int, depth: int):
        self.budget, self.depth = budget, depth
        self.prefixes: list[tuple[float, int, int, int]] = [(0.0, root, -1, 0)]
        self.rows: list[int] = [0]
        self.place = {0: 0}  # prefix -> row
        self.best: list[int] = []
        self._ranked = 1  # prefixes before this were kept or dropped for good

    def add_children(self, row: int, log_probs: list[float], tokens: list[int]) -> None:
        parent = self.rows[row]
        above, _, _, depth = self.prefixes[parent]
        self.prefixes += [(above + own, token, parent, depth + 1) for own, token in zip(log_probs, tokens, strict=True)]

    def choose(self, width: int) -> int:
        """Keep the best prefixes and verify the `width` best that may still have a child among them; return how many.

        A child is at most as probable as its parent, so a prefix whose own probability is not above the worst kept one
        can add nothing; when none is left to verify, the kept ones are the best of all prefixes.
        """
        pool = [*self.best, *range(self._ranked, len(self.prefixes))]
        # ties: the prefix seen first
        self.best = sorted(pool, key=lambda prefix: (-self.prefixes[prefix][0], prefix))[: self.budget]
        self._ranked = len(self.prefixes)
        is_full = len(self.best) == self.budget
        worst = self.prefixes[self.best[-1]][0] if is_full else -float("inf")
        open_ones = [p for p in self.best if p not in self.place and self._may_grow(p, worst)]
        for prefix in open_ones[:width]:
            self.place[prefix] = len(self.rows)
            self.rows.append(prefix)
        return min(width, len(open_ones))

    def _may_grow(self, prefix: int, worst: float) -> bool:
        own, _, _, depth = self.prefixes[prefix]
        return depth < self.depth and own > worst

    def tree(self, prefixes: list[int]) -> tuple[list[int], list[int]]:
        """Return tokens and parents of a set of prefixes that stand behind their parents, the root first."""
        row = {prefix: place for place, prefix in enumerate(prefixes)}
        return [self.prefixes[p][1] for p in prefixes], [row.get(self.prefixes[p][2], -1) for p in prefixes]


def search(
    score: Callable[[DraftTree], Tensor], roots: Tensor, *, budget: int, width: int, depth: int, temperature: float
) -> OracleTree:
    """Return the `budget` most probable prefixes of at most `depth` tokens after `roots` [R], exactly.

    `score(tree)` gives the target's logits [R, N, vocab] at every node. `width` prefixes a request are verified at
    once: it changes the number of passes, never the result. Probabilities are at `temperature` > 0, in float64.
    """
    if temperature < GREEDY_BELOW:
        raise ValueError(
            f"temperature: {temperature} is not allowed (allowed: above 0); greedy's best tree is its chain"
        )
    for key, value in (("budget", budget), ("width", width), ("depth", depth)):
        if value < 1:
            raise ValueError(f"{key}: {value} is not allowed (allowed: an integer >= 1); raise it")
    searches = [_Search(root, budget, depth) for root in roots.tolist()]
    fresh = [1] * len(searches)  # rows verified by the next pass for the first time
    while any(fresh):
        logits = score(_joined([s.tree(s.rows) for s in searches], roots.device))
        _extend(searches, fresh, logits, temperature, min(budget, logits.shape[-1]))
        fresh = [s.choose(width) if count else 0 for s, count in zip(searches, fresh, strict=True)]
    tree = _joined([s.tree([0, *s.best]) for s in searches], roots.device)
    table = torch.zeros(len(searches), budget, dtype=torch.float64)
    for row, s in zip(table, searches, strict=True):
        row[: len(s.best)] = torch.tensor([s.prefixes[p][0] for p in s.best], dtype=torch.float64).exp()
    return OracleTree(tree, table)


def _extend(searches: list[_Search], fresh: list[int], logits: Tensor, temperature: float, children: int) -> None:
    # the newest rows stand last; more children than the budget can never all be kept
    for request, (one, count) in enumerate(zip(searches, fresh, strict=True)):
        if not count:
            continue
        first = len(one.rows) - count
        law = (logits[request, first : len(one.rows)].double() / temperature).log_softmax(-1)
        values, tokens = law.sort(dim=-1, descending=True, stable=True)
        rows = zip(values[:, :children].tolist(), tokens[:, :children].tolist(), strict=True)
        for row, (log_probs, ids) in enumerate(rows, start=first):
            one.add_children(row, log_probs, ids)


def _joined(trees: list[tuple[list[int], list[int]]], device) -> DraftTree:
    width = max(len(tokens) for tokens, _ in trees)

    def padded(rows: Iterable[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=device)

    counts = torch.tensor([len(tokens) for tokens, _ in trees], device=device)
    return DraftTree.build(padded((t for t, _ in trees), 0), padded((p for _, p in trees), -1), num_nodes=counts)


@torch.inference_mode()
def limits(
    target: Target, contexts: list[list[int]], *, budget: int, width: int, depth: int, temperature: float, backend: str
) -> Tensor:
    """Return probabilities [R, budget] of the best prefixes after each context, whose last token is the root."""
    device = target.embed_weight.device
    lengths = torch.tensor([len(tokens) - 1 for tokens in contexts], device=device)
    longest = int(lengths.max())
    prompts = torch.tensor([tokens[:-1] + [0] * (longest + 1 - len(tokens)) for tokens in contexts], device=device)
    roots = torch.tensor([tokens[-1] for tokens in contexts], device=device)
    cache = target.new_cache(len(contexts), longest)
    target.prefill(prompts, lengths, cache)

    def score(tree: DraftTree) -> Tensor:
        return target.verify(tree, cache, gdn_backend=backend).logits

    return search(score, roots, budget=budget, width=width, depth=depth, temperature=temperature).probabilities


def sampled_steps(records: Records, prompts: Callable[[str, str], dict[str, list[int]]], *, each: int) -> pd.DataFrame:
    """Return `each` steps of every cell, chosen by hash, with `tokens`: the context up to and with the root.

    `prompts(target, name)` gives the token ids by prompt id of a prompt file. Greedy cells and ar are left out.
    """
    columns = ["cell", "request", "output_tokens", "prompt_tokens", "target", "reasoning"]
    table = records.steps.merge(records.requests[columns], on=["cell", "request"], suffixes=("", "_of_request"))
    table = table[
        (table["temperature"] >= GREEDY_BELOW) & (table["method"] != "ar") & table["clock"].isin(CLOCKS)
    ].copy()
    keys = table[["dataset", "id", "seed", "step"]].astype(str).agg("|".join, axis=1)
    # the same key in every cell: methods are compared on the same prompts where their steps allow it
    table["order"] = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    table = table.sort_values("order").groupby("cell", sort=True).head(each).drop(columns="order")
    tokens = []
    for row in table.itertuples():
        name = row.dataset + ("-think" if row.reasoning else "")
        output = list(row.output_tokens)[: row.context - row.prompt_tokens]
        tokens.append([*prompts(row.target, name)[row.id], *map(int, output)])
    return table.assign(tokens=tokens)


def add_limits(
    steps: pd.DataFrame, target: Target, *, width: int, batch: int, chain_budget: int, backend: str
) -> pd.DataFrame:
    """Return the steps with `limit`: what the best tree of the same budget and depth would accept on average.

    A chain has no budget: it is held against the best tree of `chain_budget` nodes.
    """
    parts = []
    for (temperature, depth), group in steps.groupby(["temperature", steps["depth_limit"].fillna(DEPTH)]):
        group = group.assign(size=[len(tokens) for tokens in group["tokens"]]).sort_values("size")
        budgets = group["budget"].fillna(chain_budget).astype(int)
        for at in range(0, len(group), batch):
            rows, own = group.iloc[at : at + batch], budgets.iloc[at : at + batch]
            found = limits(
                target,
                list(rows["tokens"]),
                budget=int(own.max()),
                width=width,
                depth=int(depth),
                temperature=float(temperature),
                backend=backend,
            )
            reached = [float(row[:count].sum()) for row, count in zip(found, own, strict=True)]
            parts.append(rows.drop(columns="size").assign(limit=reached))
            print(json.dumps({"temperature": temperature, "done": at + len(rows), "of": len(group)}), file=sys.stderr)
    return pd.concat(parts).sort_index()


@torch.inference_mode()
def answer_entropies(answers: pd.DataFrame, target: Target, prompts: dict[str, dict[str, list[int]]]) -> list[float]:
    """Return for each request the mean entropy in nats of the target's law at the tokens of its answer.

    The law is that of the request's temperature; the columns dataset, id, temperature and output_tokens say the rest.
    `prompts` holds token ids by set and id.
    """
    found = []
    for row in answers.itertuples():
        answer = list(map(int, row.output_tokens))
        tokens = torch.tensor([[*prompts[row.dataset][row.id], *answer[:-1]]], device=target.embed_weight.device)
        # the last len(answer) rows are the laws of the answer's tokens
        law = (target(tokens).logits[0, -len(answer) :].double() / row.temperature).log_softmax(-1)
        found.append(float(-(law.exp() * law).sum(-1).mean()))
    return found


def shares(steps: pd.DataFrame) -> dict[str, metrics.Estimate]:
    """Return each variant's share of the limit at each setting, macro over datasets: {"tfm-b64/t1": Estimate, ...}."""
    result = {}
    for (variant, setting), group in steps.groupby(["variant", "setting"]):
        means = group.groupby(["dataset", "id", "seed"], as_index=False)[["expected_accepted", "limit"]].mean()
        reached = means.drop(columns="expected_accepted").rename(columns={"limit": "expected_accepted"})
        result[f"{variant}/{setting}"] = metrics.ratio(means, reached, "expected_accepted")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True, help="results/<suite>, with cells/ and prompts/")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target's weights")
    parser.add_argument("--out", type=Path, required=True, help="parquet file of the sampled steps with their limit")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--each", type=int, default=64, help="steps of a cell")
    parser.add_argument("--width", type=int, default=16, help="prefixes verified at once")
    parser.add_argument("--batch", type=int, default=32, help="contexts searched together")
    parser.add_argument("--chain-budget", type=int, default=64, help="nodes of the tree that a chain is held against")
    parser.add_argument("--gdn-backend", default="solve")
    options = parser.parse_args()
    records = load_cells(sorted(path.parent for path in (options.suite / "cells").rglob("cell.json")))
    digest = sha256_weights(options.target)
    others = {cell["path"] for cell in records.cells if cell["cell"]["weights_sha256"]["target"] != digest}
    if others:
        raise ValueError(
            f"target: {options.target} did not make {min(others)}; give the folder that its cell.json names"
        )

    @functools.cache
    def prompts(target: str, name: str) -> dict[str, list[int]]:
        # asked for once a step
        rows = read_prepared(options.suite / "prompts" / target / f"{name}.jsonl")
        return {row.id: row.tokens for row in rows}

    target = checkpoints.load_target(options.target, device=options.device)
    steps = sampled_steps(records, prompts, each=options.each)
    named = {name: getattr(options, name) for name in ("width", "batch", "chain_budget")}
    steps = add_limits(steps, target, backend=options.gdn_backend, **named)
    kept = ["suite", "target", "dataset", "id", "variant", "setting", "seed", "step", "context", "budget"]
    steps[[*kept, "expected_accepted", "limit"]].to_parquet(options.out, index=False)
    print(json.dumps({name: asdict(estimate) for name, estimate in shares(steps).items()}))


if __name__ == "__main__":
    main()
