"""What the hooks of one SGLang process share with its worker."""

from baselines.sglang.settings import Settings

NAME = "DFLASH_TFM"
attention = None  # PoolAttention of this process's worker, once it is there
memory = None  # GdnMemory of this process's worker, once it is there and the kernel is fused


def verify_topk(settings: Settings) -> int:
    """Return the `topk` that SGLang is told: above 1 it hands its own GDN kernels the tree's links."""
    return 1 if settings.is_fused else 2
