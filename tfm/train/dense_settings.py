"""Settings of workflows/config/train_dense.yaml: drafter and correction heads of a target that is given."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import yaml

from tfm.checkpoints import STORAGES
from tfm.config import HEADS
from tfm.drafter import DrafterConfig
from tfm.heads import HeadConfig
from tfm.llama_gguf import GGUF_SHA256, ORIGIN
from tfm.train.precision import PRECISIONS
from tfm.train.settings import LossSettings, Schedule
from tfm.weaver import WeaverConfig

PARTS = ("drafter", *HEADS)
VOLATILE = ("steps", "decay_fraction", "graphs", "log_every", "validate_every", "seconds")  # may change in a run


@dataclass(frozen=True)
class AnswerSettings:
    """Answers of the target to the training prompts, some at temperature 1 and some greedy."""

    conversations: int = 40_000
    greedy_share: float = 0.5  # of the parts
    requests: int = 4096  # sampled at once: a part
    max_prompt_tokens: int = 256
    max_new_tokens: int = 192
    buckets: tuple[int, ...] = (256, 448)  # row lengths
    held_out_every: int = 64  # one conversation in this many, by hash, is never trained on


@dataclass(frozen=True)
class PartSettings:
    """One trained part: its sizes, schedule and loss."""

    model: DrafterConfig | WeaverConfig | HeadConfig
    train: Schedule
    loss: LossSettings


@dataclass(frozen=True)
class DenseSettings:
    """Everything that decides the weights of drafter and heads."""

    family: str
    seed: int
    target_sha256: str  # of the GGUF file that the target folder was written from
    sample: AnswerSettings
    parts: dict[str, PartSettings]  # by name of PARTS, in that order
    max_bytes: int | None = None  # limit of the exported parts together
    storage: str = "int8"
    precision: str = "bfloat16"  # what training computes in; the weights it updates are float32
    keep_outputs: bool = False  # the frozen target reads every row once and its outputs stay on the device
    excluded: tuple[str, ...] = field(default=())  # sources of the training text that are left out

    def digest_fields(self, part: str) -> dict:
        """Return what a part's weights depend on beside the files it reads; the step count may grow."""
        values = {key: asdict(value) for key, value in vars(self.parts[part]).items()}
        values["train"] = {key: value for key, value in values["train"].items() if key not in VOLATILE}
        values["loss"].pop("form")
        return {"family": self.family, "seed": self.seed, "precision": self.precision, **values}

    def with_steps(self, part: str, steps: int | None) -> "DenseSettings":
        """Return settings with another number of steps for one part, however long they take."""
        if steps is None:
            return self
        if steps < 1:
            raise ValueError(f"{part}-steps: {steps} is not allowed (allowed: an integer >= 1); raise it")
        own = self.parts[part]
        changed = replace(own, train=replace(own.train, steps=steps, seconds=None))
        return replace(self, parts={**self.parts, part: changed})

    def with_loss_form(self, form: str) -> "DenseSettings":
        """Return settings whose parts compute their loss in another form."""
        parts = {n: replace(part, loss=replace(part.loss, form=form)) for n, part in self.parts.items()}
        return replace(self, parts=parts)

    def without_graphs(self) -> "DenseSettings":
        """Return settings whose parts train without CUDA graphs."""
        parts = {n: replace(part, train=replace(part.train, graphs=False)) for n, part in self.parts.items()}
        return replace(self, parts=parts)


def load_dense_settings(path: Path | str) -> DenseSettings:
    """Read a training config; raises ValueError naming key, value and what is allowed."""
    raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    outer = {name.name for name in fields(DenseSettings)} - {"parts"}
    _refuse_unknown("training config", raw, outer | set(PARTS))
    missing = [key for key in ("family", "seed", "target_sha256", "drafter") if key not in raw]
    if missing:
        raise ValueError(f"training config: missing {', '.join(missing)}; add it")
    named = {key: raw[key] for key in outer - {"sample"} if key in raw}
    named["excluded"] = tuple(raw.get("excluded", ()))
    sample = AnswerSettings(**_tuples("sample", raw.get("sample", {}), AnswerSettings))
    parts = {part: _part(part, raw[part], raw["drafter"]) for part in PARTS if part in raw}
    if raw["target_sha256"] != GGUF_SHA256:
        raise ValueError(
            f"target_sha256: {raw['target_sha256']!r} is not allowed (allowed: {GGUF_SHA256}, of {ORIGIN}); the target "
            "is read from that file"
        )
    return _check(DenseSettings(sample=sample, parts=parts, **named))


def _part(name: str, raw: dict, drafter: dict) -> PartSettings:
    _refuse_unknown(name, raw, {"model", "train", "loss"})
    width, rows = drafter["model"]["hidden_size"], drafter["model"]["block_size"] - 1
    shared = {"d_model": width, "d_embed": width}
    if name == "drafter":
        model = DrafterConfig.from_dict(raw["model"])
    elif name == "weaver":
        model = WeaverConfig.from_dict({**shared, "K": rows, **raw["model"]})
    else:
        model = HeadConfig.from_dict({**shared, "kind": name, **raw["model"]})
    schedule = _tuples(f"{name}.train", raw.get("train", {}), Schedule)
    missing = sorted({"steps", "tokens_per_step"} - set(schedule))
    if missing:
        raise ValueError(f"{name}.train: missing {', '.join(missing)}; add it")
    train = Schedule(**schedule)
    return PartSettings(model, train, LossSettings(**_tuples(f"{name}.loss", raw.get("loss", {}), LossSettings)))


def _check(settings: DenseSettings) -> DenseSettings:
    named = {"storage": (settings.storage, tuple(STORAGES)), "precision": (settings.precision, PRECISIONS)}
    for key, (value, allowed) in named.items():
        if value not in allowed:
            raise ValueError(f"{key}: {value!r} is not allowed (allowed: {', '.join(allowed)}); choose one of them")
    sample, hidden = settings.sample, settings.parts["drafter"].model.hidden_size
    if not 0 <= sample.greedy_share <= 1:
        raise ValueError(f"sample.greedy_share: {sample.greedy_share} is not allowed (allowed: 0 to 1)")
    longest = sample.max_prompt_tokens + sample.max_new_tokens
    if sample.buckets[-1] < longest:
        raise ValueError(
            f"sample.buckets: {list(sample.buckets)} is not allowed (allowed: a last one of at least {longest}, the "
            "longest prompt and answer); raise it"
        )
    for name, part in settings.parts.items():
        for key in ("d_model", "d_embed") if name != "drafter" else ():
            if getattr(part.model, key) != hidden:
                raise ValueError(
                    f"{name}.model.{key}: {getattr(part.model, key)} is not allowed (allowed: {hidden}, the drafter's "
                    "hidden_size); the parts share it"
                )
    return settings


def _tuples(where: str, values: dict, kind: type) -> dict:
    _refuse_unknown(where, values, {f.name for f in fields(kind)})
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _refuse_unknown(where: str, values: dict, known: set[str]) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{where}: unknown key {', '.join(unknown)} (allowed: {', '.join(sorted(known))})")
