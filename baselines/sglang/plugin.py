"""The plugin that SGLang loads in every process: algorithm DFLASH_TFM, trees of this project's proposers."""


def register() -> None:
    """Raise RuntimeError: only the autoregressive and chain arms run inside SGLang in this version."""
    raise RuntimeError(
        "DFLASH_TFM is not in this version: methods ddtree, dartree and tfm do not run inside SGLang yet; use ar and "
        "dflash, or engine torch-static"
    )
