"""Training settings: a YAML file -> checked dataclasses. Unknown keys are errors; defaults stand here and only here."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from tfm.checkpoints import STORAGES
from tfm.drafter import DrafterConfig
from tfm.target import TargetConfig
from tfm.train.gdn import FORMS
from tfm.train.lk_forms import FORMS as LOSS_FORMS
from tfm.train.precision import PRECISIONS
from tfm.train.tokenizer import VOCAB_SIZE
from tfm.weaver import WeaverConfig

NAMED = {"storage": tuple(STORAGES), "precision": PRECISIONS, "gdn": tuple(FORMS)}  # keys with a list of values
STAGES = ("tokenizer", "target", "sample", "drafter", "weaver", "export")


@dataclass(frozen=True)
class Schedule:
    """One training stage: warm-up, constant, linear decay to zero (WSD); Muon on matrices, AdamW elsewhere."""

    steps: int  # with `seconds` the most
    tokens_per_step: int  # padded tokens; a batch of rows of one length
    muon_lr: float = 0.006
    adam_lr: float = 0.003
    weight_decay: float = 0.01  # times the learning rate, on matrices
    warmup_steps: int = 100
    decay_fraction: float = 0.3
    clip: float = 1.0
    log_every: int = 50
    validate_every: int = 500
    graphs: bool = True  # CUDA graphs; ignored on a CPU
    # as many steps as fit, by the pace of the first ones: the learning rate then falls to zero in time on any machine
    seconds: float | None = None

    def scale(self, step: int) -> float:
        """Return the learning rate of a step as a fraction of its peak."""
        decay_from = self.steps * (1 - self.decay_fraction)
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return warm if step < decay_from else warm * (self.steps - step) / max(1.0, self.steps - decay_from)


@dataclass(frozen=True)
class LossSettings:
    """LK loss: w KL + (1 - w)(1 - alpha), w = kl_scale exp(-kl_decay alpha)."""

    kl_scale: float = 1.0
    kl_decay: float = 1.0
    gamma: float = 7.0  # draft row d (0-based) weighs exp(-d / gamma)
    anchors: int = 8  # blocks a sequence
    form: str = "torch"  # see tfm/train/lk_forms.py; both give the same loss up to rounding

    def __post_init__(self):
        if self.form not in LOSS_FORMS:
            raise ValueError(
                f"loss.form: {self.form!r} is not allowed (allowed: {', '.join(LOSS_FORMS)}); choose one of them"
            )


@dataclass(frozen=True)
class TextSettings:
    vocab_size: int = VOCAB_SIZE
    bytes_per_domain: int = 4_000_000  # text of each domain that the tokenizer is trained on
    buckets: tuple[int, ...] = (128, 256, 512)  # row lengths; a longer conversation is cut into rows of the last
    held_out_every: int = 64  # one conversation in this many, by hash, is never trained on


@dataclass(frozen=True)
class SampleSettings:
    conversations: int = 30_000
    requests: int = 2048  # sampled at once
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides the weights of a family."""

    family: str
    seed: int
    text: TextSettings
    target_model: TargetConfig
    target: Schedule
    sharpen: float  # the exported target's logits are the trained one's times this
    sample: SampleSettings
    drafter_model: DrafterConfig
    drafter: Schedule
    drafter_loss: LossSettings
    weaver_model: WeaverConfig
    weaver: Schedule
    weaver_loss: LossSettings
    max_bytes: int | None = None  # limit of the exported files together
    storage: str = "bfloat16"  # of the exported weights: bfloat16, or int8 rows with scales
    precision: str = "float32"  # what training computes in; the weights it updates are float32
    keep_outputs: bool = False  # drafter and weaver: the frozen target reads each answer once, not at every step
    gdn: str = "solve"  # form of the gated delta rule over whole sequences, see tfm/train/gdn.py

    def digest_fields(self, stage: str) -> dict:
        """Return what a stage's weights depend on, without the step count: it may grow while a run goes on."""
        names = {
            "target": ("target_model", "target"),
            "drafter": ("drafter_model", "drafter", "drafter_loss"),
            "weaver": ("weaver_model", "weaver", "weaver_loss"),
        }[stage]
        values = {name: asdict(getattr(self, name)) for name in (*names, "text")}
        for volatile in ("steps", "decay_fraction", "graphs", "log_every", "validate_every"):
            values[stage].pop(volatile)
        return {"family": self.family, "seed": self.seed, "precision": self.precision, **values}


def load_settings(path: Path | str, *, conversations: int | None = None) -> TrainSettings:
    """Read workflows/config/train_<family>.yaml; `conversations` replaces the number to sample.

    Raises ValueError naming key, value and what is allowed."""
    raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    known = {
        "family",
        "seed",
        "text",
        "target",
        "sample",
        "drafter",
        "weaver",
        "max_bytes",
        "train_data",
        "keep_outputs",
    }
    _refuse_unknown("", raw, known | set(NAMED))
    parts = {}
    for stage in ("target", "drafter", "weaver"):
        section = raw.get(stage, {})
        _refuse_unknown(stage, section, {"model", "train", "sharpen" if stage == "target" else "loss"})
        parts[stage] = _build(f"{stage}.train", Schedule, section.get("train", {}))
    sample = raw.get("sample", {}) | ({} if conversations is None else {"conversations": conversations})
    return _check(
        TrainSettings(
            family=raw["family"],
            seed=raw["seed"],
            text=_build("text", TextSettings, raw.get("text", {})),
            target_model=TargetConfig.from_dict(raw["target"]["model"]),
            target=parts["target"],
            sharpen=float(raw["target"].get("sharpen", 1.0)),
            sample=_build("sample", SampleSettings, sample),
            drafter_model=DrafterConfig.from_dict(raw["drafter"]["model"]),
            drafter=parts["drafter"],
            drafter_loss=_build("drafter.loss", LossSettings, raw["drafter"].get("loss", {})),
            weaver_model=WeaverConfig.from_dict(raw["weaver"]["model"]),
            weaver=parts["weaver"],
            weaver_loss=_build("weaver.loss", LossSettings, raw["weaver"].get("loss", {})),
            max_bytes=raw.get("max_bytes"),
            keep_outputs=raw.get("keep_outputs", False),
            **{key: raw[key] for key in NAMED if key in raw},
        )
    )


def _check(settings: TrainSettings) -> TrainSettings:
    for key, allowed in NAMED.items():
        if getattr(settings, key) not in allowed:
            raise ValueError(f"{key}: {getattr(settings, key)!r} is not allowed (allowed: {', '.join(allowed)})")
    if not isinstance(settings.keep_outputs, bool):
        raise ValueError(f"keep_outputs: {settings.keep_outputs!r} is not allowed (allowed: true, false)")
    if not 1.0 <= settings.sharpen <= 4.0:
        raise ValueError(
            f"target.sharpen: {settings.sharpen!r} is not allowed (allowed: 1.0 to 4.0); 1.0 changes nothing"
        )
    hidden, layers = settings.target_model.hidden_size, len(settings.target_model.layer_types)
    wanted = {
        "drafter.model.hidden_size": (settings.drafter_model.hidden_size, hidden),
        "weaver.model.d_model": (settings.weaver_model.d_model, hidden),
        "weaver.model.d_embed": (settings.weaver_model.d_embed, hidden),
        "weaver.model.K": (settings.weaver_model.K, settings.drafter_model.block_size - 1),
        "target.model.vocab_size": (settings.target_model.vocab_size, settings.text.vocab_size),
    }
    for key, (value, allowed) in wanted.items():
        if value != allowed:
            raise ValueError(f"{key}: {value!r} is not allowed (allowed: {allowed!r}); the parts share these sizes")
    outside = [layer for layer in settings.drafter_model.target_layer_ids if not 0 <= layer < layers]
    if outside:
        raise ValueError(
            f"target_layer_ids: {outside} is not allowed (allowed: 0 to {layers - 1}, the target's layers)"
        )
    return settings


def _build(where: str, kind: type, values: dict):
    _refuse_unknown(where, values, {f.name for f in fields(kind)})
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}; give the missing key") from error


def _refuse_unknown(where: str, values: dict, known: set[str]) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{where or 'training config'}: unknown key {', '.join(unknown)} (allowed: {', '.join(sorted(known))})"
        )
