"""What a suite costs on several cards, worked out before it runs: an estimate, from the rules of baselines/estimate.py.

Cells are independent and each takes one card, so the longest ones are dealt first, each to the card that is free first
(at most 4/3 of the best schedule; R. L. Graham, 1969). Energy is an upper bound: card hours times a card's share of
what a server of eight draws at most.
"""

import heapq
import math
from dataclasses import dataclass
from pathlib import Path

from baselines.estimate import READ_BYTES_A_SECOND, WEIGHT_BYTES, CellEstimate, estimate_cells, prompt_counts, speeds
from tfm.manifest import weight_files

# NVIDIA DGX B200 user guide: 14.3 kW at most for a server with eight cards
SERVER_KILOWATTS, SERVER_CARDS = 14.3, 8
PAPER_FAMILY = "qwen3.6-27b"  # whose sizes and speeds are known without a file


@dataclass(frozen=True)
class Plan:
    """Hours, energy and disk of a suite on `gpus` cards, and the chain of jobs that no number of cards shortens."""

    suite: str
    gpus: int
    tokens: int  # of an answer, assumed
    prompts: int  # of all sets, a setting
    cells: int
    hours: float
    gpu_hours: float
    kilowatt_hours: float  # at most
    gigabytes: dict[str, float]
    chain: list[tuple[str, float]]  # jobs with their hours

    @property
    def chain_hours(self) -> float:
        return sum(hours for _, hours in self.chain)

    @property
    def useful_gpus(self) -> int:
        """The cards beyond which the longest cell decides."""
        return max(1, math.ceil(self.gpu_hours / max(hours for _, hours in self.chain)))


def plan(config: dict, expected: dict, *, gpus: int, tokens: int | None = None, ar_tok_s: float | None = None) -> Plan:
    """Return the plan of a suite that decodes on CUDA devices.

    `tokens` an answer is the suite's cap unless given. `ar_tok_s` is the measured speed of ar, which the other methods
    pass by the paper's ratios; without it the paper's own speeds count, for the paper's models alone.
    Raises ValueError naming the key for a suite or number that cannot be planned.
    """
    if gpus < 1:
        raise ValueError(f"gpus: {gpus} is not allowed (allowed: at least 1); give the number of cards")
    if config["device"] != "cuda":
        raise ValueError(
            f"suite: {config['suite']!r} runs on a CPU (device: {config['device']}); give a suite of cards"
        )
    tok_s, sizes = rates(config, expected, ar_tok_s), weight_bytes(config)
    tokens = config["max_new_tokens"] if tokens is None else tokens
    cells = estimate_cells(config, tok_s, tokens=tokens, weight_bytes=sizes)
    checked = sum(sizes.values()) / READ_BYTES_A_SECOND / 3600 if config["checkpoints"] else 0.0
    longest = max(cells, key=lambda cell: cell.hours)
    gpu_hours = sum(cell.hours for cell in cells)
    disk = {part: size / 1e9 for part, size in sizes.items()} | {"records": sum(cell.written for cell in cells) / 1e9}
    chain = [("check_weights", checked)] if checked else []
    return Plan(
        suite=config["suite"],
        gpus=gpus,
        tokens=tokens,
        prompts=sum(prompt_counts(config).values()),
        cells=len(cells),
        hours=checked + makespan(cells, gpus),
        gpu_hours=gpu_hours,
        kilowatt_hours=gpu_hours * SERVER_KILOWATTS / SERVER_CARDS,
        gigabytes=disk,
        chain=[*chain, (longest.cell["path"], longest.hours)],
    )


def makespan(cells: list[CellEstimate], gpus: int) -> float:
    """Return the hours until the last cell ends when the longest are dealt first."""
    free = [0.0] * gpus
    for hours in sorted((cell.hours for cell in cells), reverse=True):
        heapq.heapreplace(free, free[0] + hours)
    return max(free)


def rates(config: dict, expected: dict, ar_tok_s: float | None) -> dict[str, float]:
    """Return tokens a second by method."""
    paper = speeds(expected)
    if ar_tok_s is None:
        if config["family"] != PAPER_FAMILY:
            raise ValueError(
                f"ar_tok_s: missing for family {config['family']!r}, whose speed no source prints; run one ar cell and "
                "give its tokens a second with --ar-tok-s"
            )
        return paper
    if not (math.isfinite(ar_tok_s) and ar_tok_s > 0):
        raise ValueError(f"ar_tok_s: {ar_tok_s} is not allowed (allowed: a finite number > 0); give tokens a second")
    return {method: ar_tok_s * value / paper["ar"] for method, value in paper.items()}


def weight_bytes(config: dict) -> dict[str, float]:
    """Return the bytes of each part: of its files where they are here, else the published sizes of the paper's."""
    sizes = {}
    for part, published in WEIGHT_BYTES.items():
        files = weight_files(Path(config["weights"]) / part)
        if not files and config["family"] != PAPER_FAMILY:
            raise ValueError(
                f"weights: {config['weights']}/{part} holds no file, and the size of family {config['family']!r} is "
                "not known; put the weights there, or give --config weights=DIR"
            )
        sizes[part] = float(sum(file.stat().st_size for file in files)) if files else published
    return sizes
