"""Forms: how the static engine computes each part. All emit the same tokens; none is chosen or dropped quietly."""

import importlib.util
from dataclasses import dataclass, fields

TORCH, TRITON = "torch", "triton"
CHOICES = (TORCH, TRITON)
CHUNKS = "chunks"


@dataclass(frozen=True)
class Forms:
    """One choice a part. The defaults run anywhere and are what the fast forms are tested against."""

    graphs: bool = False  # replay each step as CUDA graphs
    ahead: bool = False  # propose the next tree while the host still reads this step; a request's last one is wasted
    attention: str = TORCH  # of tree rows over the memory
    rows: str = TORCH  # norms, gated products, rotary positions and the write into the memory
    sampling: str = TORCH  # one pass over the logits for token and log-sum
    growth: str = TORCH  # frontier of the tree builders
    linear: str = TORCH  # products with few rows; "triton" takes the measured choice of each shape
    prefill: str = TORCH  # torch: as the reference loop; chunks: as verify passes over chains, captured like the steps

    @staticmethod
    def fast() -> "Forms":
        """Return the forms for a GPU."""
        return Forms(graphs=True, ahead=True, prefill=CHUNKS, **{name: TRITON for name in _names()})

    def check(self, device) -> "Forms":
        """Return self, or raise ValueError naming the form that `device` or this environment cannot run."""
        chosen = [name for name in _names() if getattr(self, name) != TORCH]
        for name in chosen:
            if getattr(self, name) not in CHOICES:
                allowed = ", ".join(CHOICES)
                raise ValueError(
                    f"{name}: {getattr(self, name)!r} is not allowed (allowed: {allowed}); choose one of them"
                )
        if self.prefill not in (TORCH, CHUNKS):
            raise ValueError(f"prefill: {self.prefill!r} is not allowed (allowed: torch, chunks); choose one of them")
        if self.graphs and str(device).partition(":")[0] != "cuda":
            raise ValueError(
                f"graphs: True is not allowed on {device} (allowed: False); CUDA graphs need a CUDA device"
            )
        if chosen and importlib.util.find_spec("triton") is None:
            raise ValueError(
                f"{chosen[0]}: 'triton' needs the package triton (allowed without it: torch); "
                "pip install -e '.[kernels]'"
            )
        return self


def _names() -> list[str]:
    return [field.name for field in fields(Forms) if field.name not in ("graphs", "ahead", "prefill")]
