"""What a step costs: a linear model of rows, context and tree growth, fitted on measured steps, with its error.

    ms = step + row T + context c + row_context T c                            every method
         + draft + draft_context c                                             methods that draft
         + heap_node B | expansion E + expansion_node E w | supertree          by what grows the tree

T are verified rows, c committed tokens in thousands, B drafted nodes, E expansions of w nodes. No coefficient is
negative: more work never costs less. What the model says of a step or a speed is modelled, never measured.
"""

from dataclasses import dataclass

import numpy as np

THOUSAND = 1000.0  # tokens of context that its coefficients count
WEAVER_TREES = ("tfm", "adaptive")


@dataclass(frozen=True)
class Sample:
    """A measured step: its median in ms and what it is made of."""

    method: str
    rows: int  # verified, the root included
    context: int  # committed tokens
    expansions: int = 0  # of the weaver
    width: int = 0  # nodes of an expansion
    ms: float = float("nan")


def features(sample: Sample) -> dict[str, float]:
    """Return what the coefficients of the same names are multiplied by."""
    context = sample.context / THOUSAND
    found = {"step": 1.0, "row": sample.rows, "context": context, "row_context": sample.rows * context}
    if sample.method == "ar":
        return found
    found |= {"draft": 1.0, "draft_context": context}
    if sample.method == "ddtree":
        found["heap_node"] = sample.rows - 1
    elif sample.method == "dartree":
        found["supertree"] = 1.0
    elif sample.method in WEAVER_TREES:
        found |= {"expansion": sample.expansions, "expansion_node": sample.expansions * sample.width}
    return found


@dataclass(frozen=True)
class CostModel:
    """Coefficients in ms by feature, and the errors of steps that were left out of a fit, relative to the measured."""

    coefficients: dict[str, float]
    left_out_errors: tuple[float, ...] = ()

    def ms(self, sample: Sample) -> float:
        """Return the modelled ms of a step; raises ValueError for a method that no fitted step had."""
        found = features(sample)
        unknown = sorted(set(found) - set(self.coefficients))
        if unknown:
            raise ValueError(
                f"method: {sample.method} needs {', '.join(unknown)}, which no fitted step had; measure a step of it"
            )
        return sum(self.coefficients[name] * value for name, value in found.items())

    def speedup(self, sample: Sample, tau: float) -> float:
        """Return the modelled speed over ar's at the same context, at `tau` tokens a step, prefill left out."""
        return tau * self.ms(Sample("ar", 1, sample.context)) / self.ms(sample)


def fit(samples: list[Sample]) -> CostModel:
    """Return the model with the least squared relative error; each sample is also predicted by a fit without it.

    Raises ValueError for fewer samples than coefficients.
    """
    names = sorted({name for sample in samples for name in features(sample)})
    if len(samples) < len(names):
        raise ValueError(
            f"samples: {len(samples)} steps are not allowed for {len(names)} coefficients (allowed: as many or more); "
            "measure more arms or contexts"
        )
    errors = []
    for left_out in samples if len(samples) > len(names) else ():
        others = [sample for sample in samples if sample is not left_out]
        # the only sample with a feature says nothing of itself
        if set(features(left_out)) <= {name for sample in others for name in features(sample)}:
            errors.append(_solve(others, names).ms(left_out) / left_out.ms - 1)
    return CostModel(_solve(samples, names).coefficients, tuple(errors))


def _solve(samples: list[Sample], names: list[str]) -> CostModel:
    rows = np.array([[features(sample).get(name, 0.0) for name in names] for sample in samples])
    weights = 1 / np.array([sample.ms for sample in samples])
    return CostModel(dict(zip(names, _non_negative(rows * weights[:, None], np.ones(len(samples))), strict=True)))


def _non_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return x >= 0 with the least |rows x - wanted| (Lawson and Hanson's active set)."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    x, is_free = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], dtype=bool)
    for _ in range(30 * rows.shape[1]):
        gradient = rows.T @ (wanted - rows @ x)
        gradient[is_free] = -np.inf
        if gradient.max(initial=-np.inf) <= 1e-10:
            break
        is_free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(x)
            trial[is_free] = np.linalg.lstsq(rows[:, is_free], wanted, rcond=None)[0]
            if trial[is_free].min() > 0:
                break
            # as far as the first coefficient that would pass zero
            blocked = is_free & (trial <= 0)
            share = np.min(x[blocked] / (x[blocked] - trial[blocked]))
            x = x + share * (trial - x)
            is_free &= x > 1e-12
            x[~is_free] = 0.0
            if not is_free.any():
                trial = x
                break
        x = trial
    return x / scale


def other_card(ms: float, floor_ms: float, ratio: float) -> tuple[float, float]:
    """Return the modelled ms of a step on a card with `ratio` times the bandwidth: (all of it scales, the floor alone).

    `floor_ms` is the time of the bytes that the step must read at this card's bandwidth.
    """
    return ms / ratio, ms - floor_ms + floor_ms / ratio
