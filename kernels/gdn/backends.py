"""Names of the backends. Apart from the ops, so that a config can be checked without importing torch."""

# name -> module: strings, so that neither Triton nor a compiler is needed before such a backend is asked for
KERNELS = {
    "recurrent_triton": "tfm_kernels.gdn.recurrent_triton",
    "fused_triton": "tfm_kernels.gdn.fused_triton",
    "fused_cuda": "tfm_kernels.gdn.fused_cuda",
}
TORCH_BACKENDS = ("naive", "solve")
BACKENDS = (*TORCH_BACKENDS, *KERNELS)


def backend_modules(name: str) -> list[str]:
    """Return the modules that only this backend needs: what a digest of the code must cover beside the imports."""
    return [KERNELS[name]] if name in KERNELS else []
