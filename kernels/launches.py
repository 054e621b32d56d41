"""Which launches may come up while the previous grid of their stream ends: one switch for every kernel here.

The environment variable TFM_LAUNCHES: `early` (default, all kernels that can), `cuda` (those in CUDA C++ alone) or
`plain` (none). It changes times and no number, so no digest covers it; manifests say which one a run had.
"""

import os

VARIABLE = "TFM_LAUNCHES"
CHOICES = ("early", "cuda", "plain")


def chosen() -> str:
    """Return the choice of this process; raises ValueError for one that does not exist."""
    value = os.environ.get(VARIABLE, "") or CHOICES[0]
    if value not in CHOICES:
        raise ValueError(f"{VARIABLE}: {value!r} is not allowed (allowed: {', '.join(CHOICES)}); choose one")
    return value
