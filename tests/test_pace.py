"""A schedule in seconds: as many steps as fit, measured once, whatever calls they are spread over."""

import pytest
import torch

from tfm.train import loop
from tfm.train.loop import PACE_STEPS, Deadline, Pace, Stage, train
from tfm.train.precision import Shadow
from tfm.train.settings import Schedule

CPU = torch.device("cpu")


class AfterSteps:
    """A Deadline that comes after so many steps."""

    def __init__(self, steps: int):
        self.left = steps

    @property
    def is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


def schedule(**changes) -> Schedule:
    settings = {"steps": 5000, "tokens_per_step": 8, "warmup_steps": 10, "log_every": 50, "validate_every": 50}
    return Schedule(**settings | changes)


def paced(pace: Pace, clock: list[float], monkeypatch, *, each: float, until: int, first: int = 1) -> list[int]:
    """Return the steps that the schedule has after each step, where a step takes `each` seconds."""
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    found = []
    for step in range(first, until + 1):
        clock[0] += each
        found.append(pace.after(step, CPU).steps)
    return found


def test_as_many_steps_as_fit_by_the_pace_after_the_warm_up(monkeypatch):
    pace = Pace(schedule(seconds=60.0), None)
    found = paced(pace, [0.0], monkeypatch, each=0.05, until=10 + PACE_STEPS)
    assert set(found[:-1]) == {5000} and found[-1] in (1199, 1200) and pace.fitted == found[-1]
    assert pace.schedule.scale(pace.fitted - 1) < 0.01  # the decay ends where the time does
    slow = Pace(schedule(seconds=1.0), None)
    assert paced(slow, [0.0], monkeypatch, each=1.0, until=10 + PACE_STEPS)[-1] == 10 + PACE_STEPS + 1
    fast = Pace(schedule(seconds=600.0), None)
    assert paced(fast, [0.0], monkeypatch, each=0.001, until=10 + PACE_STEPS)[-1] == 5000


def test_without_seconds_the_steps_are_the_configs(monkeypatch):
    assert set(paced(Pace(schedule(), 77), [0.0], monkeypatch, each=9.0, until=300)) == {5000}


def test_a_deadline_saves_no_weights_of_a_loss_that_is_no_number(tmp_path):
    """Between two reports nobody looks at the loss; a checkpoint of NaN would end every later call."""
    model = torch.nn.Linear(4, 4)
    stage = Stage(
        name="toy",
        shadow=Shadow(model, "float32"),
        schedule=schedule(),
        digest_fields={},
        batch=lambda step: {"x": torch.full((2, 4), float("nan") if step >= 3 else 1.0)},
        loss=lambda batch: {"loss": model(batch["x"]).square().mean()},
        validate=dict,
    )
    with pytest.raises(ValueError, match="toy: the loss is not a number at step 5"):
        train(stage, tmp_path, deadline=AfterSteps(5))
    assert not (tmp_path / "state.pt").exists()


def test_a_run_goes_on_with_the_steps_that_were_fitted(tmp_path, monkeypatch):
    model = torch.nn.Linear(4, 4)
    stage = Stage(
        name="toy",
        shadow=Shadow(model, "float32"),
        schedule=schedule(seconds=10.0, warmup_steps=2),
        digest_fields={},
        batch=lambda step: {"x": torch.ones(2, 4)},
        loss=lambda batch: {"loss": model(batch["x"]).square().mean()},
        validate=dict,
    )
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.01
        return clock[0]

    monkeypatch.setattr(loop.time, "monotonic", now)
    deadline = Deadline(None)
    deadline.at = 5.0
    first = train(stage, tmp_path, deadline=deadline)
    steps = first["steps"]
    assert not first["done"] and PACE_STEPS < steps < 5000
    second = train(stage, tmp_path, deadline=Deadline(None))
    assert second["done"] and second["step"] == second["steps"] == steps
