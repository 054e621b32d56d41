"""Target: a lean text model that verifies draft trees.

Qwen3.5/3.6 (gated DeltaNet and gated attention), Qwen3 and Llama (attention alone) are built from the same layers;
`TargetConfig.style` says what each does differently. Three passes share them. `forward` is the plain causal model
(training, whole sequences), `prefill` is the same and fills a cache, `verify` runs a tree over a cache that it only
reads. Parameter names are Hugging Face's, without the `model.` prefix.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tfm.cache import AttentionRows, GdnScratch, GdnState, TargetCache
from tfm.clock import OFF, Clock
from tfm.layers import MLP, RMSNorm, rotary_table, rotate, widen
from tfm.target_config import GDN, TargetConfig
from tfm.tree import DraftTree
from tfm_kernels import conv
from tfm_kernels.gdn import ops, solve


@dataclass(frozen=True)
class TargetOutput:
    """Rows of one pass; `scratch` is what `TargetCache.commit` needs after a verify, one entry a layer."""

    logits: Tensor  # [R, N, vocab]; prefill: [R, 1, vocab], of each last real token
    hidden: Tensor  # [R, N, d] after the final norm; prefill: [R, 1, d]
    taps: Tensor  # [R, N, taps * d], the outputs of the tap layers side by side; prefill: all L rows
    scratch: list = field(default_factory=list)


@dataclass(frozen=True)
class _Rows:
    # what the layers of one pass share, computed once a pass
    table: tuple[Tensor, Tensor]  # rotary cos, sin [R, N, rotary_dim]
    mask: Tensor  # bool, what each row attends to: [.., N, rows]
    clock: Clock
    committed: int = 0  # cache rows that verify reads
    tree: DraftTree | None = None
    backend: str = ""  # of the GDN tree verify
    gdn_tree: Tensor | None = None  # from ops.prepare_tree
    windows: Tensor | None = None  # [R, N, conv width]
    lengths: Tensor | None = None  # [R], real tokens of a right-padded prefill


class Attention(nn.Module):
    """Causal grouped-query attention; with Qwen3.5's output gate, half of `q_proj` is the gate."""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config, self.style = config, config.style
        dim, heads, kv_heads, head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(dim, heads * head_dim * (2 if self.style.output_gate else 1), bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        if self.style.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, offset=self.style.norm_offset)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, offset=self.style.norm_offset)

    def forward(self, x: Tensor, rows: _Rows, memory: AttentionRows | None) -> tuple[Tensor, AttentionRows]:
        """Return (output [R, N, d], own keys and values); `memory` holds committed rows in a verify, else None."""
        head_dim, gate = self.config.head_dim, None
        with rows.clock.stage("target_gemm"):
            query = self.q_proj(x).unflatten(-1, (self.config.num_attention_heads, -1))
            if self.style.output_gate:
                query, gate = query.chunk(2, dim=-1)
            key, value = (proj(x).unflatten(-1, (-1, head_dim)) for proj in (self.k_proj, self.v_proj))
        with rows.clock.stage("target_attention"):
            if self.style.qk_norm:
                query, key = self.q_norm(query), self.k_norm(key)
            query = rotate(query.transpose(1, 2), rows.table)
            own = AttentionRows(rotate(key.transpose(1, 2), rows.table), value.transpose(1, 2))
            keys, values = own.keys, own.values
            if memory is not None:
                keys = torch.cat([memory.keys[:, :, : rows.committed], keys], dim=2)
                values = torch.cat([memory.values[:, :, : rows.committed], values], dim=2)
            out = nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=rows.mask, enable_gqa=query.shape[1] != keys.shape[1]
            )
            out = out.transpose(1, 2).flatten(2)
            if gate is not None:
                out = out * torch.sigmoid(gate.flatten(2))
        with rows.clock.stage("target_gemm"):
            return self.o_proj(out), own


class GatedNorm(nn.Module):
    """rms-norm(x) * weight * silu(gate), in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = widen(x)
        scaled = nn.functional.rms_norm(wide, wide.shape[-1:], widen(self.weight), self.eps)
        return (scaled * nn.functional.silu(widen(gate))).to(gate.dtype)


class GatedDeltaNet(nn.Module):
    # of whole sequences; training may put another exact form here (tfm/train/gdn.py)
    chain_forward = staticmethod(solve.chain_forward)

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        dim, heads, inner = (
            config.hidden_size,
            config.linear_num_value_heads,
            config.linear_num_value_heads * config.linear_value_head_dim,
        )
        self.in_proj_qkv = nn.Linear(dim, config.conv_channels, bias=False)
        self.in_proj_z = nn.Linear(dim, inner, bias=False)
        self.in_proj_b = nn.Linear(dim, heads, bias=False)
        self.in_proj_a = nn.Linear(dim, heads, bias=False)
        self.conv1d = nn.Conv1d(
            config.conv_channels,
            config.conv_channels,
            config.linear_conv_kernel_dim,
            groups=config.conv_channels,
            bias=False,
        )
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.norm = GatedNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, rows: _Rows, memory: GdnState | None) -> tuple[Tensor, object]:
        """Return (output [R, N, d], GdnScratch in a verify, the new GdnState otherwise)."""
        with rows.clock.stage("target_gemm"):
            mixed, gate = self.in_proj_qkv(x), self.in_proj_z(x).unflatten(-1, (-1, self.config.linear_value_head_dim))
            write_logit, decay_input = self.in_proj_b(x), self.in_proj_a(x)
        with rows.clock.stage("target_gdn"):
            log_decay = log_decay_gate(self.A_log, decay_input, self.dt_bias)
            beta = widen(write_logit).sigmoid()
            core = self._tree if rows.tree is not None else self._sequence
            out, kept = core(mixed, log_decay, beta, rows, memory)
            out = self.norm(out.to(x.dtype), gate).flatten(2)
        with rows.clock.stage("target_gemm"):
            return self.out_proj(out), kept

    def _tree(self, mixed, log_decay, beta, rows: _Rows, memory: GdnState):
        q, k, v = self._split(conv.tree_conv(mixed, self.conv1d.weight[:, 0], memory.inputs, rows.windows))
        out, writes, path_log_decay = ops.tree_verify(
            q, k, v, log_decay, beta, rows.tree.parents, memory.state, backend=rows.backend, tree=rows.gdn_tree
        )
        return out, GdnScratch(mixed, rows.windows, k, writes, path_log_decay)

    def _sequence(self, mixed, log_decay, beta, rows: _Rows, memory):
        width = self.config.linear_conv_kernel_dim
        padded = nn.functional.pad(mixed.transpose(1, 2), (width - 1, 0))
        q, k, v = self._split(nn.functional.silu(self.conv1d(padded)).transpose(1, 2))
        if rows.lengths is not None:
            # a padding row neither decays nor writes, so the state after the last row is that of the last real one
            real = (torch.arange(mixed.shape[1], device=mixed.device) < rows.lengths[:, None])[..., None]
            # filled, not multiplied: a decay of -inf times 0 is NaN
            log_decay, beta = log_decay.masked_fill(~real, 0.0), beta * real
        heads, dims = self.config.linear_num_value_heads, (self.config.linear_key_head_dim, v.shape[-1])
        dtype = torch.float64 if mixed.dtype == torch.float64 else torch.float32
        start = torch.zeros(len(mixed), heads, *dims, dtype=dtype, device=mixed.device)
        out, state = self.chain_forward(q, k, v, log_decay, beta, start)
        if rows.lengths is None:
            return out, None
        # columns of `padded` stand width - 1 to the right: these are the last width - 1 real inputs
        newest = rows.lengths[:, None] + torch.arange(width - 1, device=mixed.device)
        inputs = padded.transpose(1, 2).gather(1, newest[..., None].expand(-1, -1, mixed.shape[2]))
        return out, GdnState(inputs, state)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
        q, k = (_unit(x.unflatten(-1, (config.linear_num_key_heads, -1))) for x in (q, k))
        return q * config.linear_key_head_dim**-0.5, k, v.unflatten(-1, (config.linear_num_value_heads, -1))


def log_decay_gate(a_log: Tensor, decay_input: Tensor, dt_bias: Tensor) -> Tensor:
    """Return -exp(A_log) softplus(a + dt_bias) in float32 [.., HV], finite wherever the product is.

    The product is formed in log space: exp(A_log) may overflow while softplus underflows (their product is then tiny).
    """
    x = widen(decay_input) + widen(dt_bias)
    # below -20 softplus(x) is exp(x) in float32
    log_softplus = torch.where(x < -20.0, x, nn.functional.softplus(x.clamp(min=-20.0)).log())
    return -(widen(a_log) + log_softplus).exp()


def _unit(x: Tensor) -> Tensor:
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    def __init__(self, config: TargetConfig, kind: str):
        super().__init__()
        offset = config.style.norm_offset
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset)
        if kind == GDN:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.kind = kind

    def forward(self, x: Tensor, rows: _Rows, memory) -> tuple[Tensor, object]:
        normed = self.input_layernorm(x)
        if self.kind == GDN:
            mixed, kept = self.linear_attn(normed, rows, memory)
        else:
            mixed, kept = self.self_attn(normed, rows, memory)
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        with rows.clock.stage("target_gemm"):
            return x + self.mlp(normed), kept


class Target(nn.Module):
    """The model whose law is kept. `tap_layers` are the layers whose outputs the drafter reads."""

    def __init__(self, config: TargetConfig, tap_layers: tuple[int, ...] = ()):
        super().__init__()
        self.config, self.tap_layers, count = config, tuple(tap_layers), len(config.layer_types)
        if wrong := [layer for layer in self.tap_layers if not 0 <= layer < count]:
            allowed = f"0 to {count - 1}, the target's layers" if count else "none: the target has no layers"
            raise ValueError(
                f"tap_layers: {wrong[0]} is not allowed (allowed: {allowed}); take the drafter of this target"
            )
        self.has_gdn = GDN in config.layer_types
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.style.norm_offset)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def embed_weight(self) -> Tensor:
        return self.embed_tokens.weight  # [vocab, d]

    @property
    def head_weight(self) -> Tensor:
        return self.embed_weight if self.config.tie_word_embeddings else self.lm_head.weight  # [vocab, d]

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.head_weight)

    def new_cache(self, requests: int, max_tokens: int) -> TargetCache:
        """Return an empty cache for `requests` requests of at most `max_tokens` committed tokens each."""
        config, weight = self.config, self.embed_weight
        state_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        rows = (requests, config.num_key_value_heads, max_tokens, config.head_dim)
        state = (requests, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        inputs = (requests, config.linear_conv_kernel_dim - 1, config.conv_channels)
        layers = [
            GdnState(weight.new_zeros(inputs), weight.new_zeros(state, dtype=state_dtype))
            if kind == GDN
            else AttentionRows(weight.new_zeros(rows), weight.new_zeros(rows))
            for kind in config.layer_types
        ]
        return TargetCache(layers, requests, weight.device)

    def forward(self, tokens: Tensor) -> TargetOutput:
        """Return logits, hidden and taps of every position of `tokens` [R, L]; differentiable, no cache."""
        hidden, taps, _ = self._run(tokens, self._causal_rows(tokens, None), None)
        return TargetOutput(self.head(hidden), hidden, taps)

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: TargetCache) -> TargetOutput:
        """Fill an empty `cache` with right-padded prompts `tokens` [R, L] of `lengths` [R] >= 1 tokens."""
        if int(lengths.min()) < 1 or int(lengths.max()) > tokens.shape[1]:
            raise ValueError(
                f"lengths: {lengths.tolist()} not allowed (allowed: 1 to {tokens.shape[1]}); skip empty prompts"
            )
        if int(cache.lengths.max()) > 0:
            raise ValueError(f"cache: already holds {cache.lengths.tolist()} tokens; prefill needs a new one")
        if cache.max_tokens is not None and tokens.shape[1] > cache.max_tokens:
            raise ValueError(f"cache: {cache.max_tokens} rows for a prompt of {tokens.shape[1]}; raise max_tokens")
        hidden, taps, kept = self._run(tokens, self._causal_rows(tokens, lengths), None)
        for layer, rows in zip(cache.layers, kept, strict=True):
            if isinstance(layer, GdnState):
                layer.inputs, layer.state = rows.inputs, rows.state
            else:
                layer.keys[:, :, : tokens.shape[1]] = rows.keys
                layer.values[:, :, : tokens.shape[1]] = rows.values
        cache.lengths = lengths.clone()
        last = hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2]))
        return TargetOutput(self.head(last), last, taps)

    def verify(
        self, tree: DraftTree, cache: TargetCache, clock: Clock = OFF, *, gdn_backend: str = "solve"
    ) -> TargetOutput:
        """Return logits, hidden, taps of every node of `tree` and the scratch to commit; `cache` is only read.

        A node sees the committed tokens, its ancestors and itself, at position committed length + depth. Rows of
        padding nodes are meaningless.
        """
        committed = int(cache.lengths.max())
        positions = cache.lengths[:, None] + tree.depths
        ancestors = tree.ancestor_mask()
        before = torch.arange(committed, device=tree.tokens.device) < cache.lengths[:, None, None]
        mask = torch.cat([before.expand(-1, tree.tokens.shape[1], -1), ancestors], dim=2)[:, None]
        rows = _Rows(
            table=self._table(positions),
            mask=mask,
            clock=clock,
            committed=committed,
            tree=tree,
            backend=gdn_backend,
            gdn_tree=ops.prepare_tree(tree.parents, ancestors, backend=gdn_backend) if self.has_gdn else None,
            windows=conv.window_index(tree.parents, self.config.linear_conv_kernel_dim) if self.has_gdn else None,
        )
        hidden, taps, scratch = self._run(tree.tokens, rows, cache)
        with clock.stage("target_head"):
            logits = self.head(hidden)
        return TargetOutput(logits, hidden, taps, scratch)

    def _run(self, tokens: Tensor, rows: _Rows, cache: TargetCache | None) -> tuple[Tensor, Tensor, list]:
        x = self.embed(tokens)
        taps, kept = {}, []
        for i, layer in enumerate(self.layers):
            x, own = layer(x, rows, cache.layers[i] if cache is not None else None)
            kept.append(own)
            if i in self.tap_layers:
                taps[i] = x
        empty = x.new_zeros(*x.shape[:2], 0)
        return self.norm(x), torch.cat([empty, *(taps[i] for i in self.tap_layers)], dim=-1), kept

    def _causal_rows(self, tokens: Tensor, lengths: Tensor | None) -> _Rows:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand(len(tokens), length)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        return _Rows(table=self._table(positions), mask=mask, clock=OFF, lengths=lengths)

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return rotary_table(
            positions, config.rotary_dim, config.rope_theta, self.embed_weight.dtype, scaling=config.rope_scaling
        )
