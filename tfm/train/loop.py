"""The training loop of every stage: seeded by step, bounded in time, resumed from its last checkpoint.

A stage's folder holds state.pt (model, optimizer, step) and curve.csv. Batches depend on (seed, step) alone, so a run
that was stopped and continued equals one that was not. With several processes each takes its rows of every batch and
the first one writes.
"""

import csv
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tfm.manifest import sha256_json
from tfm.train.optim import MuonAdamW
from tfm.train.peers import ALONE, Peers
from tfm.train.precision import Shadow
from tfm.train.settings import Schedule

SAVE_SECONDS = 60.0
PACE_STEPS = 100  # timed after the warm-up, to see how many fit a schedule's seconds


@dataclass(frozen=True)
class Stage:
    """What a stage gives the loop."""

    name: str
    shadow: Shadow  # the model, and what computes in its place
    schedule: Schedule
    digest_fields: dict  # what must not change between a run and its continuation
    batch: Callable[[int], dict[str, Tensor]]  # step -> tensors
    loss: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # scalars, "loss" among them; a process's share of each
    validate: Callable[[], dict[str, float]]
    peers: Peers = ALONE


class Deadline:
    """A point in time after which no new step starts."""

    def __init__(self, minutes: float | None):
        self.at = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_over(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


class Backward:
    """Computes gradients into `.grad`, through one CUDA graph for each batch shape or plainly."""

    def __init__(self, stage: Stage, optimiser: MuonAdamW, *, graphs: bool):
        self.stage, self.optimiser, self.graphs = stage, optimiser, graphs
        self.captured: dict[tuple, tuple] = {}
        # replays follow one another, so graphs of all shapes may use the same memory
        self.pool = torch.cuda.graph_pool_handle() if graphs else None
        self.step_graph: torch.cuda.CUDAGraph | None = None
        for parameter in optimiser.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss terms of a batch; gradients lie in `.grad` afterwards."""
        if not self.graphs:
            return self._plain(batch)
        key = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        if key not in self.captured:
            self.captured[key] = self._capture(batch)
        graph, inputs, terms = self.captured[key]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)
        graph.replay()
        return terms

    def update(self) -> None:
        """Take one optimizer step."""
        if not self.graphs:
            self.optimiser.step()
            return
        if self.step_graph is None:
            # capturing does not run the step: warm its kernels up on gradients of zero and a scale of zero
            scale = self.optimiser.scale.clone()
            saved = {name: _clone(value) for name, value in self.optimiser.state_dict().items()}
            self.optimiser.set_scale(0.0)
            self._warm_up(self.optimiser.step)
            self.optimiser.load_state_dict(saved)
            self.optimiser.scale.copy_(scale)
            self.step_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.step_graph):
                self.optimiser.step()
        self.step_graph.replay()

    def _plain(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.stage.shadow.pull()
        torch._foreach_zero_([p.grad for p in self.optimiser.parameters])
        terms = self.stage.loss(batch)
        terms["loss"].backward()
        self.stage.shadow.push()
        self.stage.peers.add_up([p.grad for p in self.optimiser.parameters])
        return {name: term.detach() for name, term in terms.items()}

    def _capture(self, batch: dict[str, Tensor]) -> tuple:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        self._warm_up(lambda: self._plain(inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            terms = self._plain(inputs)
        return graph, inputs, terms

    @staticmethod
    def _warm_up(function: Callable) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)


def train(stage: Stage, folder: Path, *, deadline: Deadline) -> dict:
    """Run `stage` until its last step or the deadline, from the checkpoint in `folder` if there is one.

    Returns {"stage", "step", "steps", "done", "seconds", and the last validation}. Raises ValueError when the
    checkpoint was made with other settings, and for a loss that is not a number, whose weights are not saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    peers = stage.peers
    optimiser = new_optimiser(stage)
    step, spent, last, fitted = _resume(stage, optimiser, folder)
    pace = Pace(stage.schedule, fitted)
    schedule = pace.schedule
    device = optimiser.parameters[0].device
    backward = Backward(stage, optimiser, graphs=schedule.graphs and device.type == "cuda" and peers.size == 1)
    curve, began, saved = Curve(folder / "curve.csv", step), time.monotonic() - spent, time.monotonic()
    terms = None
    while step < schedule.steps and not _is_over(stage, step, deadline, device):
        optimiser.set_scale(schedule.scale(step))
        terms = backward(stage.batch(step))
        backward.update()
        step += 1
        schedule = pace.after(step, device)
        if step % schedule.log_every and step < schedule.steps:
            continue
        row = {"step": step, "lr_scale": schedule.scale(step - 1), **_floats(stage, step, terms)}
        row["seconds"] = time.monotonic() - began
        if step % schedule.validate_every == 0 or step == schedule.steps:
            stage.shadow.pull()
            last = stage.validate()
            row |= last
        if peers.is_first:
            curve.add(row)
            _report(stage.name, schedule.steps, row)
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(stage, optimiser, folder, step, time.monotonic() - began, last, pace.fitted)
                saved = time.monotonic()
    if terms is not None:
        _floats(stage, step, terms)  # what a loss that is no number has made is not saved
    spent = time.monotonic() - began
    if peers.is_first:
        _save(stage, optimiser, folder, step, spent, last, pace.fitted)
    peers.wait()
    done = step >= schedule.steps
    return {
        "stage": stage.name,
        "step": step,
        "steps": schedule.steps,
        "done": done,
        "seconds": round(spent, 1),
        **last,
    }


class Pace:
    """A schedule's steps where it gives seconds instead: measured once, kept over calls in `fitted`."""

    def __init__(self, schedule: Schedule, fitted: int | None):
        self.schedule, self.fitted = schedule, fitted if schedule.seconds is not None else None
        self._first: tuple[int, float] | None = None
        if self.fitted is not None:
            self.schedule = replace(schedule, steps=self.fitted)

    def after(self, step: int, device: torch.device) -> Schedule:
        """Return the schedule after `step` steps; with as many steps as fit, once PACE_STEPS of them were timed."""
        schedule = self.schedule
        if schedule.seconds is None or self.fitted is not None or step < schedule.warmup_steps:
            return schedule
        if self._first is None or step == self._first[0] + PACE_STEPS:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if self._first is None:
                self._first = step, time.monotonic()
                return schedule
            each = (time.monotonic() - self._first[1]) / PACE_STEPS
            self.fitted = min(schedule.steps, max(step + 1, int(schedule.seconds / each)))
            self.schedule = replace(schedule, steps=self.fitted)
        return self.schedule


def new_optimiser(stage: Stage) -> MuonAdamW:
    schedule = stage.schedule
    return MuonAdamW(
        stage.shadow.model,
        muon_lr=schedule.muon_lr,
        adam_lr=schedule.adam_lr,
        weight_decay=schedule.weight_decay,
        clip=schedule.clip,
    )


def _is_over(stage: Stage, step: int, deadline: Deadline, device: torch.device) -> bool:
    # processes must stop at one step; asking each other waits for the device, so they ask where they wait anyway
    if stage.peers.size == 1:
        return deadline.is_over
    return step % stage.schedule.log_every == 0 and stage.peers.any(deadline.is_over, device)


class Curve:
    """curve.csv: one row a report, appended; rows past the checkpoint's step are dropped on resume."""

    def __init__(self, path: Path, step: int):
        self.path, self.rows = path, []
        if path.is_file() and step:
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]

    def add(self, row: dict[str, float]) -> None:
        self.rows.append({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
        columns = list(dict.fromkeys(key for each in self.rows for key in each))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)


def _resume(stage: Stage, optimiser: MuonAdamW, folder: Path) -> tuple[int, float, dict, int | None]:
    path = folder / "state.pt"
    if not path.is_file():
        return 0, 0.0, {}, None
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["digest"] != sha256_json(stage.digest_fields):
        raise ValueError(
            f"{path}: made with other settings than the {stage.name} stage has now; restore the settings, or delete "
            f"{folder} to start over"
        )
    with torch.no_grad():
        for name, tensor in stage.shadow.model.state_dict().items():
            tensor.copy_(state["model"][name])
    optimiser.load_state_dict(state["optimiser"])
    return state["step"], state["seconds"], state["last"], state.get("fitted")


def _save(stage: Stage, optimiser: MuonAdamW, folder: Path, step: int, seconds: float, last: dict, fitted) -> None:
    state = {
        "digest": sha256_json(stage.digest_fields),
        "model": stage.shadow.model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "seconds": seconds,
        "last": last,
        "fitted": fitted,
    }
    partial = folder / "state.pt.partial"
    torch.save(state, partial)
    partial.replace(folder / "state.pt")


def _floats(stage: Stage, step: int, terms: dict[str, Tensor]) -> dict[str, float]:
    values = {key: float(stage.peers.sum(term)) for key, term in terms.items()}
    if not values["loss"] == values["loss"]:
        raise ValueError(f"{stage.name}: the loss is not a number at step {step}; lower muon_lr and adam_lr")
    return values


def _report(name: str, steps: int, row: dict) -> None:
    print(json.dumps({"stage": name, "steps": steps, **summary(row)}), file=sys.stderr, flush=True)


def summary(row: dict) -> dict:
    """Return a row rounded and without its values by position (name_1, name_2, ...), which stay in curve.csv."""
    kept = {key: value for key, value in row.items() if not key.rsplit("_", 1)[-1].isdigit()}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in kept.items()}


def _clone(value):
    return [item.clone() for item in value] if isinstance(value, list) else value.clone()
