"""Where a training run keeps its files, and the command line that all stages share.

OUT/text/corpus.npz, manifest.json        tokenised text
OUT/<stage>/state.pt, curve.csv           of target, drafter, weaver
OUT/sample/part-*.npz, samples.npz        answers sampled from the target
OUT/weights/{target,drafter,weaver}/      checkpoints in the public formats or in int8 rows, README.md beside them
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tfm.train.loop import Deadline
from tfm.train.peers import Peers, join
from tfm.train.settings import TrainSettings, load_settings


@dataclass(frozen=True)
class Layout:
    """Paths of one training run."""

    root: Path
    data: Path | None  # directory of training text; only the tokenizer stage reads it

    @property
    def corpus(self) -> Path:
        return self.root / "text" / "corpus.npz"

    @property
    def text_manifest(self) -> Path:
        return self.root / "text" / "manifest.json"

    @property
    def samples(self) -> Path:
        return self.root / "sample" / "samples.npz"

    @property
    def exported(self) -> Path:
        return self.root / "weights"

    def stage(self, name: str) -> Path:
        return self.root / name

    def weights(self, part: str) -> Path:
        return self.exported / part

    def require(self, path: Path, stage: str) -> Path:
        """Return `path`, or raise ValueError naming the stage that makes it."""
        if not path.exists():
            raise ValueError(f"{path}: missing; run the {stage} stage first")
        return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every stage."""
    parser.add_argument("--config", type=Path, required=True, help="workflows/config/train_<family>.yaml")
    parser.add_argument("--data", type=Path, default=None, help="directory of training text (the tokenizer stage)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; a second call goes on in it")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=None, help="stop cleanly after this time; default: never")
    parser.add_argument("--no-graphs", action="store_true", help="do not use CUDA graphs")


def with_steps(settings: TrainSettings, stage: str, steps: int | None) -> TrainSettings:
    """Return settings with another number of steps for one training stage."""
    if steps is None:
        return settings
    if steps < 1:
        raise ValueError(f"steps: {steps} is not allowed (allowed: an integer >= 1); raise it")
    return replace(settings, **{stage: replace(getattr(settings, stage), steps=steps)})


def without_graphs(settings: TrainSettings) -> TrainSettings:
    """Return settings whose training stages run without CUDA graphs."""
    stages = ("target", "drafter", "weaver")
    return replace(settings, **{stage: replace(getattr(settings, stage), graphs=False) for stage in stages})


def prepare_device(device: str) -> Peers:
    """Allow TF32 products in training on a GPU and join the processes of torchrun, if any.

    Raises ValueError when the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, but this machine has no CUDA device; use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    return join(device)


def stage_main(name: str, run: Callable, description: str) -> None:
    """Run one stage from the command line; the last line of stdout is its report as JSON."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    if name in ("target", "drafter", "weaver"):
        parser.add_argument("--steps", type=int, default=None, help="steps in all, in place of the config's")
    options = parser.parse_args()
    settings = load_settings(options.config)
    if getattr(options, "steps", None):
        settings = with_steps(settings, name, options.steps)
    if options.no_graphs:
        settings = without_graphs(settings)
    peers = prepare_device(options.device)
    layout, deadline = Layout(options.out, options.data), Deadline(options.minutes)
    report = run(settings, layout, device=options.device, deadline=deadline, peers=peers)
    if peers.is_first:
        print(json.dumps(report))
