"""Gated-DeltaNet tree verification; the public ops are in `tfm_kernels.gdn.ops`."""
