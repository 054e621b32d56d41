"""Measure what the code alone decides: the Weaver's size and parity, the steps of a tree, the training curve."""

import argparse
import csv
import json
import sys
from pathlib import Path

import torch
from input_errors import json_argument, told

from tfm import manifest
from tfm.builder import count_expansions
from tfm.marginals import Marginals
from tfm.weaver import Weaver, WeaverConfig, WeaverScorer, init_weaver

DESCRIPTION = """
Builds the Weaver of the released size without its weights, compares the two forms in which a small one scores a path,
and reads the training curve beside the suite's weaver. Writes definitions.json to --out: name -> {value, n, unit}. Last
line of stdout: one JSON object.
"""
# sizes of the released file for Qwen3.6-27B
RELEASED = WeaverConfig(d_model=5120, d_embed=5120, d_rank=2048, num_heads=16, mlp_dim=2048)
CURVE_COLUMN = "val_alpha"  # mean over draft rows of sum min(p, q), on held-out answers


class _Target:
    """Embedding and head of a target, all that a weaver reads of it."""

    def __init__(self, vocab: int, width: int):
        generator = torch.Generator().manual_seed(1)
        self.embed_weight, self.head_weight = (torch.randn(vocab, width, generator=generator) for _ in range(2))


def weaver_parameters(config: WeaverConfig = RELEASED) -> int:
    """Return the number of parameters of a weaver; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Weaver(config).parameters())


def weaver_parity(*, width: int = 32, vocab: int = 96, depth: int = 15, candidates: int = 24) -> float:
    """Return the largest difference of log-probabilities between the tree's scorer and the plain form along a path."""
    generator = torch.Generator().manual_seed(0)
    config = WeaverConfig(d_model=width, d_embed=width, d_rank=16, num_heads=2, mlp_dim=32)
    weaver, target = Weaver(config), _Target(vocab, width)
    init_weaver(weaver, 0)
    with torch.inference_mode():
        for parameter in weaver.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        logits, hidden = (torch.randn(1, depth, size, generator=generator) for size in (vocab, width))
        marginals = Marginals.from_logits(logits, hidden, candidates)
        above, line = torch.randn(1, width, generator=generator), torch.randint(vocab, (1, depth), generator=generator)
        queries = weaver.path_queries(above, hidden, target.embed_weight[line])
        residual = torch.einsum("ndh,ndkh->ndk", queries, target.head_weight[marginals.tokens])
        plain = (marginals.log_probs + residual).log_softmax(-1)
        scorer = WeaverScorer(weaver, target)
        scorer.begin(marginals, above, depth)
        places = torch.arange(depth)[:, None, None]
        steps = [scorer.expand(at, at - 1, line[:, [at.item()]], at) for at in places]
        return float((torch.cat(steps, dim=1) - plain).abs().max())


def training_gain(weights: Path) -> tuple[float | None, int]:
    """Return how much the weaver's held-out acceptance rose over its training, and how often it was measured.

    None without a curve beside the weights (another family's): nothing is assumed of it.
    """
    path = weights / "weaver_curve.csv"
    if not path.exists():
        return None, 0
    with path.open(encoding="utf-8") as file:
        values = [float(row[CURVE_COLUMN]) for row in csv.DictReader(file) if row[CURVE_COLUMN]]
    return (values[-1] - values[0] if len(values) > 1 else None), len(values)


def definitions(weights: Path) -> dict:
    """Return name -> {value, n, unit}."""
    gain, rows = training_gain(weights)
    return {
        "weaver_parameters": {"value": weaver_parameters(), "n": 1, "unit": "parameters"},
        "weaver_parity": {"value": weaver_parity(), "n": 15, "unit": "log-probability"},
        "expansions_b64_w4": {"value": count_expansions(64, 4, 8), "n": 1, "unit": "batched calls a tree"},
        "weaver_training_gain": {"value": gain, "n": rows, "unit": "acceptance"},
    }


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", required=True, help="resolved settings, JSON text (baselines.probes.definitions)")
    parser.add_argument("--out", required=True, type=Path, help="the suite's folder definitions/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = definitions(Path(json_argument("--settings", options.settings, "weights")["weights"]))
    facts = {"schema": manifest.SCHEMA_VERSION, "values": values, "environment": manifest.environment(), "files": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    manifest.write_json(options.out / "definitions.json", facts)
    print(json.dumps({name: entry["value"] for name, entry in values.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
