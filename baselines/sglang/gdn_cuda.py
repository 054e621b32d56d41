"""GdnMemory in CUDA C++: two launches a layer (convolution and gates, then the verify), one commit for all layers."""

import torch
from torch import Tensor, nn

from baselines.sglang.gdn_memory import GdnMemory, LayerShape
from tfm_kernels.gdn import fused_cuda, mixer_cuda
from tfm_kernels.gdn.fused_cuda import DEFAULT_PRECISION, library_of


class CudaGdnMemory(GdnMemory):
    """See GdnMemory. bf16 rows, float32 state, heads of 128; the norm after the op stays SGLang's."""

    def __init__(self, layers: dict[int, LayerShape], *, nodes: int, backend: str, device, dtype: torch.dtype):
        super().__init__(layers, nodes=nodes, backend=backend, device=device, dtype=dtype)
        first = next(iter(layers.values()))
        make = mixer_cuda.MixerBuffers.empty
        shared = make(1, nodes, first.heads, first.value_heads, torch.device(device))
        self._buffers, self._weights, commits = {}, {}, []
        for place, layer in self.layers.items():
            own = make(1, nodes, first.heads, first.value_heads, torch.device(device))
            # only what the commit reads differs from layer to layer
            self._buffers[place] = mixer_cuda.MixerBuffers(
                shared.q, own.k, shared.v, shared.log_decay, shared.beta, shared.out, own.u, own.path_log_decay,
                shared.normed,
            )  # fmt: skip
            commits.append(
                mixer_cuda.CommitLayer(layer.state, own.k, own.u, own.path_log_decay, layer.window, layer.inputs)
            )
        self._commit = mixer_cuda.Commit(commits)

    def start(self, parents: Tensor, ancestors: Tensor) -> None:
        """See GdnMemory.start; the kernels walk the parents themselves."""
        del ancestors
        self.parents.copy_(parents)

    def verify(self, place: int, weights: nn.Module, mixed: Tensor, decay: Tensor, write: Tensor) -> Tensor:
        """See GdnMemory.verify; the output is overwritten by the next layer's."""
        layer, b = self.layers[place], self._buffers[place]
        if place not in self._weights:
            # once: SGLang may keep them in another type or shape
            parts = (weights.conv_weights.contiguous(), weights.A_log.float(), weights.dt_bias.float())
            self._weights[place] = tuple(part.detach() for part in parts)
        kernel, a_log, dt_bias = self._weights[place]
        layer.inputs[0].copy_(mixed)
        lib = library_of(layer.state.device, layer.shape.value_heads // layer.shape.heads, DEFAULT_PRECISION)
        decay, write = (_aligned_rows(x)[None] for x in (decay, write))
        # what the norm reads is SGLang's
        inputs = mixer_cuda.MixerInputs(layer.inputs, None, decay, write, self.parents, layer.window, layer.state)
        with torch.cuda.device(layer.state.device):
            mixer_cuda.launch_prepare(lib, inputs, mixer_cuda.MixerWeights(kernel, a_log, dt_bias, None, 0.0), b)
            fused_cuda.tree_verify_into(
                b.q, b.k, b.v, b.log_decay, b.beta, self.parents, layer.state, b.out, b.u, b.path_log_decay,
                precision=DEFAULT_PRECISION,
            )  # fmt: skip
        return b.out

    def commit(self, path: Tensor) -> None:
        """See GdnMemory.commit."""
        self._commit(path)


def _aligned_rows(x: Tensor) -> Tensor:
    # columns of a joined product as they are where the kernel can read them so, else a copy; [N, HV]
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"decay, write: {x.dtype} is not allowed (allowed: bfloat16); start SGLang with dtype bfloat16"
        )
    is_read = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if is_read else x.contiguous()
