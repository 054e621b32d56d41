"""The plugin's GDN layers in CUDA C++, without a GPU: what they hand to the kernels' library."""

import contextlib
from types import SimpleNamespace

import torch

from baselines.sglang.gdn_cuda import CudaGdnMemory
from baselines.sglang.gdn_memory import LayerShape
from tfm_kernels.gdn import fused_cuda, mixer_cuda
from tfm_kernels.gdn.ops import ancestor_mask


class Entry:
    """A function of the kernels' library: takes what its declared types take, and launches nothing."""

    argtypes, calls = None, 0

    def __call__(self, *arguments):
        if self.argtypes is not None:
            assert len(arguments) == len(self.argtypes)
            for kind, value in zip(self.argtypes, arguments, strict=True):
                kind.from_param(value)
        self.calls += 1
        return 0


def test_the_cuda_layers_call_the_library_as_it_is_declared(monkeypatch):
    """Its signatures are declared once for all callers; here by fused_cuda.library, on a machine without a GPU."""
    entries = {}
    library = type("Library", (), {"__getattr__": lambda _, name: entries.setdefault(name, Entry())})()
    monkeypatch.setattr(fused_cuda, "build", lambda *_, **__: "library")
    monkeypatch.setattr(fused_cuda.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(fused_cuda, "architecture", lambda device: "90a")
    monkeypatch.setattr(fused_cuda, "_check_rows", lambda *_: None)
    monkeypatch.setattr(fused_cuda, "check_verify", lambda *_: None)
    monkeypatch.setattr(mixer_cuda, "check_tensors", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    fused_cuda.library.cache_clear()
    try:
        shape, nodes = LayerShape(2, 6, 128, 128), 5
        memory = CudaGdnMemory({3: shape}, nodes=nodes, backend="fused_cuda", device="cpu", dtype=torch.bfloat16)
        parents = torch.tensor([[-1, 0, 0, 1, 3]])
        memory.start(parents, ancestor_mask(parents))
        weights = SimpleNamespace(
            conv_weights=torch.zeros(shape.channels, 4, dtype=torch.bfloat16),
            A_log=torch.zeros(6),
            dt_bias=torch.zeros(6),
        )
        joined = torch.zeros(nodes, shape.channels + 12, dtype=torch.bfloat16)
        out = memory.verify(3, weights, *joined.split([shape.channels, 6, 6], dim=-1))
        memory.commit(torch.tensor([[0, 1, -1]]))
    finally:
        fused_cuda.library.cache_clear()
    assert out.shape == (1, nodes, 6, 128)
    assert {name: entry.calls for name, entry in entries.items() if entry.calls} == {
        "tfm_prepare": 1, "tfm_tree_verify": 1, "tfm_commit": 1, "tfm_verify_shared_bytes": 1,
    }  # fmt: skip
