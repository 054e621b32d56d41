"""Token identity of every method with ar, for every head that the weights hold, greedy and at temperature 1."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from input_errors import told
from run_cells import register_kernels

register_kernels()

import torch  # noqa: E402
from lossless_table import is_near_tie  # noqa: E402

from baselines.loading import load_models  # noqa: E402
from baselines.methods import METHODS, check, resolve  # noqa: E402
from tfm import checkpoints, device, manifest  # noqa: E402
from tfm.config import HEADS, DecodeConfig  # noqa: E402
from tfm.decode import Models, Prompt, decode  # noqa: E402
from tfm.prompts import read_prepared  # noqa: E402
from tfm.sampling import gumbel  # noqa: E402
from tfm.tokenizer import end_tokens, load_tokenizer  # noqa: E402

DESCRIPTION = """
Reads a family's weights and prepared prompts and decodes each of them by ar and by every other method, in float32. A
first difference passes only where the two tokens' scores are within 1e-4 of ar's best (rounding decides there). Writes
--out: one row a method, head and temperature, and every difference with its gap. Last line of stdout: one JSON object.
Exit 1 on a difference that is no near tie.
"""
TEMPERATURES = (0.0, 1.0)


class Check:
    """The outputs of ar, and what each arm's differ in."""

    def __init__(self, models: Models, prompts: list[Prompt], options: argparse.Namespace, ends: tuple[int, ...]):
        self.models, self.prompts, self.options, self.ends = models, prompts, options, ends
        self.expected: dict[float, dict[str, list[int]]] = {}
        self.rows: list[dict] = []

    def outputs(self, method: str, temperature: float, head: str | None) -> dict[str, list[int]]:
        """Return the tokens of each prompt."""
        options, entry = self.options, METHODS[method]
        knobs = {"budget": options.budget, "candidates": options.candidates, "children": 16, "depth": options.depth}
        settings = {name: value for name, value in knobs.items() if name in entry.knobs}
        settings |= {"depth_bonus": -0.2} if "depth_bonus" in entry.options else {}
        settings |= {"head": head} if head and "head" in entry.options else {}
        config = check(
            DecodeConfig(
                method,
                temperature=temperature,
                max_new_tokens=options.max_new_tokens,
                requests=options.requests,
                eos_tokens=self.ends,
                **settings,
            )
        )
        found: dict[str, list[int]] = {}
        decode(
            self.prompts,
            self.models,
            config,
            proposer=resolve(method)(config, self.models),
            on_finish=lambda trace: found.update({trace.id: trace.output_tokens}),
        )
        return found

    def arm(self, method: str, temperature: float, head: str | None) -> None:
        """Compare one arm with ar and note the result."""
        if temperature not in self.expected:
            self.expected[temperature] = self.outputs("ar", temperature, None)
        start, differences = time.time(), []
        found, expected = self.outputs(method, temperature, head), self.expected[temperature]
        for prompt in self.prompts:
            one, other = expected[prompt.id], found[prompt.id]
            if one != other:
                differences.append({"id": prompt.id, **self._first(prompt, one, other, temperature)})
        row = {"method": method, "head": head, "temperature": temperature, "compared": len(self.prompts)}
        row |= {"same": len(self.prompts) - len(differences), "differences": differences}
        row |= {"tokens": sum(map(len, found.values())), "seconds": round(time.time() - start, 1)}
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    @torch.inference_mode()
    def _first(self, prompt: Prompt, one: list[int], other: list[int], temperature: float) -> dict:
        """Return where two outputs part, and how far the worse token there is below the best; inf where one ends."""
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            return {"at": min(len(one), len(other)), "gap": math.inf}
        tokens = torch.tensor([prompt.tokens + one[:at]], device=self.models.target.embed_weight.device)
        scores = self.models.target(tokens).logits[0, -1].float()
        if temperature > 0:
            place = torch.tensor([[tokens.shape[1]]], device=tokens.device)
            indices = torch.tensor([prompt.index], device=tokens.device)
            scores = scores / temperature + gumbel(0, indices, place, len(scores))[0, 0]
        return {"at": at, "gap": float(scores.max() - scores[[one[at], other[at]]].min())}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="folder of target, drafter and heads")
    add("--prompts", type=Path, nargs="+", required=True, help="prepared prompt files of the target")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--limit", type=int, help="prompts of each file; default: all")
    # adaptive takes one request at a time: ask for it with --requests 1
    several = ",".join(name for name in METHODS if name not in ("ar", "adaptive"))
    add("--methods", default=several, help=f"comma-separated; default: {several}")
    add("--heads", default=",".join(HEADS), help="comma-separated; those without a folder are left out")
    add("--max-new-tokens", type=int, default=48)
    add("--requests", type=int, default=1, help="decoded together")
    add("--budget", type=int, default=64)
    add("--candidates", type=int, default=64)
    add("--depth", type=int, help="deepest draft; default: all the drafter's rows")
    add("--threads", type=int, default=2, help="of torch")
    return parser.parse_args(arguments)


@told
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device.make_deterministic(threads=options.threads)
    rows = [row for path in options.prompts for row in read_prepared(path)[: options.limit]]
    prompts = [Prompt(f"{row.dataset}/{row.id}", row.index, row.tokens) for row in rows]
    heads = [head for head in options.heads.split(",") if (options.weights / head).is_dir()]
    with device.claim(device.check_device(options.device)) as where:
        weights = {part: options.weights / part for part in ("target", "drafter", "weaver")}
        weights = {part: folder for part, folder in weights.items() if folder.is_dir()}
        loaded = load_models(weights, device=where, dtype=torch.float32)
        ends = end_tokens(weights["target"], load_tokenizer(weights["target"]))
        test = Check(loaded, prompts, options, ends)
        for method in options.methods.split(","):
            for head in heads if "head" in METHODS[method].options else [None]:
                special = head if head not in (None, "weaver") else None
                extra = checkpoints.load_head(options.weights / head, device=where) if special else None
                test.models = Models(loaded.target, loaded.drafter, loaded.weaver, extra)
                for temperature in TEMPERATURES:
                    test.arm(method, temperature, special)
        facts = device.facts(where)
    wrong = [d for row in test.rows for d in row["differences"] if not is_near_tie(d)]
    total = {"compared": sum(row["compared"] for row in test.rows), "same": sum(row["same"] for row in test.rows)}
    total |= {"near_ties": sum(len(row["differences"]) for row in test.rows) - len(wrong), "wrong": len(wrong)}
    budget = {name: getattr(options, name) for name in ("budget", "candidates", "depth", "max_new_tokens")}
    facts = {"device": facts, "dtype": "float32", "prompts": len(prompts), "requests": options.requests, **budget}
    manifest.write_json(options.out, {**total, **facts, "environment": manifest.environment(), "rows": test.rows})
    print(json.dumps({"out": str(options.out), **total}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
