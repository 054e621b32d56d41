"""Settings of the plugin: which trees a server drafts and what verifies them. JSON in one environment variable."""

import json
import os
from dataclasses import dataclass, fields

from tfm.config import DecodeConfig

VARIABLE = "DFLASH_TFM"
PROPOSALS = ("tfm", "ddtree", "dartree")
# ours in two forms, ours in plain PyTorch, and SGLang's own kernel that walks the nodes one by one
KERNELS = ("fused_cuda", "fused_triton", "solve", "recurrent")
# ours over SGLang's pool in two forms, and SGLang's own
ATTENTIONS = ("triton", "torch", "sglang")
# what of the next step runs behind the commit, before the scheduler has seen the tokens: the draft and its tree, or the
# verify too; in vain where the request turns out to have ended
AHEAD = ("none", "draft", "verify")


@dataclass(frozen=True)
class Settings:
    """One server's trees. Missing keys have the defaults of DecodeConfig."""

    proposal: str
    budget: int
    kernel: str = "fused_cuda"
    width: int | None = None
    children: int = DecodeConfig.children
    candidates: int = 512
    depth: int | None = None
    residual: bool = True
    depth_bonus: float = 0.0
    weaver: str | None = None  # folder or .pth of the weaver; needed by tfm and dartree while the residual is on
    attention: str = "triton"  # of the tree's rows in the target
    draft_attention: str = "triton"  # of the drafter's block
    ahead: str = "draft"
    simulate_accept: int | None = None  # drafts accepted in every step whatever the target says: for timing only

    @staticmethod
    def from_environment() -> "Settings":
        """Return the settings of this process; raises ValueError when they are not there or not allowed."""
        text = os.environ.get(VARIABLE)
        if not text:
            raise ValueError(
                f"{VARIABLE}: not set (allowed: JSON with proposal and budget); start the server with for example "
                f'{VARIABLE}=\'{{"proposal": "tfm", "budget": 64, "weaver": "DIR"}}\''
            )
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {text!r} is no JSON ({error}); write one object") from error
        return Settings.from_dict(found)

    @staticmethod
    def from_dict(found: dict) -> "Settings":
        """Return checked settings; raises ValueError with key, value, allowed values and remedy."""
        known = [field.name for field in fields(Settings)]
        for key in sorted(set(found) - set(known)):
            raise ValueError(f"{VARIABLE}: {key}: unknown key (allowed: {', '.join(known)}); remove it")
        for key in ("proposal", "budget"):
            if key not in found:
                raise ValueError(f"{VARIABLE}: {key}: missing key; add it")
        settings = Settings(**found)
        choices = {"proposal": PROPOSALS, "kernel": KERNELS, "attention": ATTENTIONS, "draft_attention": ATTENTIONS}
        for key, allowed in (choices | {"ahead": AHEAD}).items():
            value = getattr(settings, key)
            if value not in allowed:
                raise ValueError(f"{VARIABLE}: {key}: {value!r} is not allowed (allowed: {', '.join(allowed)})")
        if settings.needs_weaver and settings.weaver is None:
            raise ValueError(
                f"{VARIABLE}: weaver: null is not allowed with proposal {settings.proposal} (allowed: a weaver's "
                "folder or .pth); give it, or set residual to false"
            )
        if settings.ahead == "verify" and settings.attention == "sglang":
            raise ValueError(
                f"{VARIABLE}: ahead: 'verify' is not allowed with attention sglang (allowed: none, draft); its mask "
                "has the context's length, which the host learns after the step"
            )
        settings.decode_config(temperature=0.0, seed=0).check()
        return settings

    @property
    def needs_weaver(self) -> bool:
        return self.residual and self.proposal != "ddtree"

    @property
    def is_fused(self) -> bool:
        """Whether this project's op verifies and commits, so that SGLang needs no state of every node."""
        return self.kernel != "recurrent"

    def decode_config(self, *, temperature: float, seed: int) -> DecodeConfig:
        """Return the same settings as the decoders' config."""
        shared = {"budget": self.budget, "depth": self.depth, "temperature": temperature, "seed": seed}
        if self.proposal != "ddtree":
            shared |= {"width": self.width, "children": self.children, "candidates": self.candidates}
            shared |= {"residual": self.residual}
        if self.proposal == "dartree":
            shared |= {"depth_bonus": self.depth_bonus}
        backend = self.kernel if self.is_fused else DecodeConfig.gdn_backend
        return DecodeConfig(method=self.proposal, gdn_backend=backend, **shared)
