"""This project's attention in the place of SGLang's: for the rows of a tree that is verified, and the drafter's block.

Keys and values are written by SGLang, to its pool; what a row sees of its own block is a buffer that the next tree
overwrites, so a captured pass needs no mask of the context and no list of its places.
"""

import torch
from torch import Tensor

from baselines.sglang import pool_attention
from baselines.sglang.pool_attention import PoolRows
from baselines.sglang.settings import Settings

NARROWEST = 128  # bytes of a head's row on a GPU


class PoolAttention:
    """What attends in each of the two models; `own` [N, N] bool says what the rows of the last tree see of it."""

    def __init__(self, settings: Settings, *, block: int, device):
        self._forms = {False: _form(settings.attention), True: _form(settings.draft_attention)}
        self.own = torch.eye(settings.budget + 1, dtype=torch.bool, device=device)
        whole = torch.ones(block, block, dtype=torch.bool, device=device)
        self._blocks = {False: whole, True: whole.tril()}  # a layer's rows see the whole block, or a chain

    def takes(self, backend, forward) -> bool:
        """Whether a pass of SGLang's Triton backend is a tree or a drafter's block whose attention is ours."""
        is_block = forward is not None and forward.spec_info is not None and forward.forward_mode.is_target_verify()
        return is_block and self._forms[backend.is_draft_runner] is not None

    def attend(self, backend, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **more) -> Tensor:
        """Write a layer's new keys and values to SGLang's pool and return its output [N, H * D]; SGLang's signature.

        Raises ValueError, at the capture, for a layer or a pool that the forms do not know.
        """
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        forward = forward_batch
        if forward.batch_size != 1:
            raise ValueError(
                f"batch_size: {forward.batch_size} is not allowed with attention of this project (allowed: 1); start "
                "the server with --max-running-requests 1 --cuda-graph-max-bs-decode 1"
            )
        pool = backend.token_to_kv_pool
        kept = pool.get_kv_buffer(layer.layer_id)
        _check(backend, layer, q, kept, more)
        if save_kv_cache and k is not None:
            backend._set_kv_buffer(forward, layer, KVWriteLoc(forward.out_cache_loc), k, v)
        own, window = self.own, None
        if backend.is_draft_runner:
            own, window = self._blocks[_is_causal(layer)], _window(layer)
        rows = PoolRows(backend.req_to_token, forward.req_pool_indices, forward.seq_lens, own, window)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._forms[backend.is_draft_runner](heads, *kept, rows, layer.scaling)


def _form(name: str):
    if name == "sglang":
        return None
    if name == "torch":
        return pool_attention.attend
    from baselines.sglang import pool_attention_triton  # lazy: needs triton

    return pool_attention_triton.attend


def _is_causal(layer) -> bool:
    from sglang.srt.layers.radix_attention import AttentionType

    return layer.attn_type == AttentionType.DECODER


def _window(layer) -> int | None:
    # SGLang counts the positions before a row's own
    size = layer.sliding_window_size
    return size + 1 if size is not None and size > -1 else None


def _check(backend, layer, query: Tensor, kept: tuple[Tensor, Tensor], more: dict) -> None:
    window, width = _window(layer), layer.qk_head_dim * query.element_size()
    unknown = {
        "sinks or other changes of its scores": any(value is not None for value in more.values()),
        "a cross-attention": layer.is_cross_attention,
        "a cap of its scores": bool(layer.logit_cap),
        "a temperature of its scores": layer.xai_temperature_len > 0,
        "values of another width": layer.v_head_dim != layer.qk_head_dim,
        "a width that is no power of two": layer.qk_head_dim & (layer.qk_head_dim - 1) != 0,
        f"a pool of {kept[0].dtype} under rows of {query.dtype}": kept[0].dtype != query.dtype,
        # Triton 3.6 reads past narrower rows of shared memory (kernels/NOTES.md)
        f"heads of {width} bytes": query.is_cuda and query.element_size() < 4 and width < NARROWEST,
        # its places are not yet slots: windows or shared pages
        "a pool with places of its own": backend.use_sliding_window_kv_pool or backend._translate_kv_loc is not None,
        f"a window of {window} positions": window is not None and (window < len(query) or not backend.is_draft_runner),
    }
    for what in (name for name, is_so in unknown.items() if is_so):
        key = "draft_attention" if backend.is_draft_runner else "attention"
        raise ValueError(f"{key}: this project's form does not take {what} (layer {layer.layer_id}); set it to sglang")
