"""Weaver: a path-conditional correction of the drafter's marginals over the K candidates of each depth.

The prefix is the target's hidden state at the last committed position and the drafter's hidden rows, passed once,
causally. A drafted token attends to the prefix, to its ancestors and to itself; its output scores the candidates of
its children: logits = drafter logits + residual, softmax over the candidates alone.
This is the first released form (learned positions, GELU MLP); `WeaverConfig` refuses the later ones.
"""

from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfm.layers import widen
from tfm.marginals import Marginals

REMEDY = "take the config that belongs to the weights"


@dataclass(frozen=True)
class WeaverConfig:
    """Sizes of a weaver, under the key names of the released file."""

    d_model: int  # hidden size of target and drafter
    d_embed: int  # width of the target's embedding
    d_rank: int  # internal width
    num_heads: int
    mlp_dim: int
    num_layers: int = 1
    K: int = 15  # draft positions, rows of pos_emb
    candidate_pool_size: int = 512
    encoder_mode: int = 3  # "global prompt"
    score_head: int = 4  # "simple"
    norm_eps: float = 1e-6

    @staticmethod
    def from_dict(config: dict) -> "WeaverConfig":
        """Read a released config. Raises ValueError naming the key, its value and what is allowed."""
        known = {field.name for field in fields(WeaverConfig)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(
                f"weaver config: {', '.join(f'{key}={config[key]!r}' for key in unknown)} is not understood (known: "
                f"{', '.join(sorted(known))}); only the first released form is supported (learned positions, GELU)"
            )
        missing = sorted({"d_model", "d_embed", "d_rank", "num_heads", "mlp_dim"} - set(config))
        if missing:
            raise ValueError(f"weaver config: no {', '.join(missing)}; {REMEDY}")
        return WeaverConfig(**config).check()

    def check(self) -> "WeaverConfig":
        """Return self, or raise ValueError naming the key, its value and what is allowed."""
        for key, allowed in (("encoder_mode", 3), ("score_head", 4)):
            if getattr(self, key) != allowed:
                raise ValueError(
                    f"{key}: {getattr(self, key)!r} is not allowed (allowed: {allowed}); use a weaver of the first "
                    "released form, encoder_mode 3 and score_head 4"
                )
        for key in ("d_model", "d_embed", "d_rank", "num_heads", "mlp_dim", "num_layers", "K", "candidate_pool_size"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: an integer >= 1); {REMEDY}")
        eps = self.norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < float("inf"):
            raise ValueError(f"norm_eps: {eps!r} is not allowed (allowed: a number > 0); {REMEDY}")
        if self.d_rank % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide d_rank {self.d_rank} (allowed: a divisor of d_rank); "
                f"{REMEDY}"
            )
        return self

    def to_dict(self) -> dict:
        """Return the dictionary that `from_dict` reads back."""
        return asdict(self)


class BiasedRMSNorm(nn.Module):
    """RMSNorm with weight and bias; computed in float32, returned in the input's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        return (F.rms_norm(wide, wide.shape[-1:], widen(self.weight), self.eps) + widen(self.bias)).to(x.dtype)


class WeaverBlock(nn.Module):
    """Pre-norm multi-head attention without rotary embedding, then a pre-norm GELU (exact) MLP."""

    def __init__(self, config: WeaverConfig):
        super().__init__()
        width = config.d_rank
        self.heads, self.head_dim = config.num_heads, width // config.num_heads
        self.norm_attn = BiasedRMSNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.norm_mlp = BiasedRMSNorm(width, config.norm_eps)
        self.fc1 = nn.Linear(width, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, width)

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [..., H, head_dim] of rows [..., width]."""
        normed = self.norm_attn(rows)
        split = (self.heads, self.head_dim)
        return tuple(layer(normed).unflatten(-1, split) for layer in (self.q_proj, self.k_proj, self.v_proj))

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """Return rows after the residual of `attended` [..., H, head_dim] and after the MLP."""
        rows = rows + self.o_proj(attended.flatten(-2))
        return rows + self.fc2(F.gelu(self.fc1(self.norm_mlp(rows))))

    def causal(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [N, n, width] after the block, and the keys and values [N, n, H, head_dim] they left."""
        queries, keys, values = self.project(rows)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        return self.finish(rows, attended.transpose(1, 2)), keys, values


class Weaver(nn.Module):
    """See the module. Parameter names are those of the released file, with split q, k and v."""

    def __init__(self, config: WeaverConfig):
        super().__init__()
        self.config = config
        self.output_norm = BiasedRMSNorm(config.d_model, config.norm_eps)
        self.embed_norm = BiasedRMSNorm(config.d_embed, config.norm_eps)
        self.token_in = nn.Linear(config.d_embed, config.d_rank)
        self.proposal_in = nn.Linear(config.d_model, config.d_rank)
        self.blocks = nn.ModuleList(WeaverBlock(config) for _ in range(config.num_layers))
        self.out_norm = BiasedRMSNorm(config.d_rank, config.norm_eps)
        self.lm_head_query_in = nn.Linear(config.d_rank, config.d_model, bias=False)
        self.pos_emb = nn.Parameter(torch.zeros(config.K, config.d_rank))

    def prefix_rows(self, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        """Return u_0 .. u_D [N, D + 1, width] from target_hidden [N, d_model] and draft_hidden [N, D, d_model].

        Raises ValueError when the drafter has more rows than the weaver has positions.
        """
        rows = draft_hidden.shape[1]
        if rows > self.config.K:
            raise ValueError(
                f"K: the weaver has {self.config.K} draft positions, the drafter gives {rows} rows; use a weaver "
                "trained for this block size"
            )
        hidden = torch.cat([target_hidden[:, None], draft_hidden], dim=1).to(self.pos_emb.dtype)
        first = torch.zeros_like(self.pos_emb[:1])
        return self.proposal_in(self.output_norm(hidden)) + torch.cat([first, self.pos_emb[:rows]])

    def embed_tokens(self, embeds: Tensor) -> Tensor:
        """Return [..., width] from the target's embedding rows [..., d_embed], without the position."""
        return self.token_in(self.embed_norm(embeds.to(self.pos_emb.dtype)))

    def positions(self, depths: Tensor) -> Tensor:
        """Return the learned positions [..., width] of nodes at `depths`; depths past the table use its last row."""
        return self.pos_emb[depths.clamp(0, self.config.K - 1)]

    def path_queries(self, target_hidden: Tensor, draft_hidden: Tensor, embeds: Tensor) -> Tensor:
        """Return queries [N, D, d_model] along a path (differentiable): the dot with a head row is the residual.

        embeds [N, D, d_embed] are the target's embeddings of the root and of the D - 1 tokens after it. Row d equals
        what `WeaverScorer.expand` uses for the node at depth d of that path.
        """
        prefix = self.prefix_rows(target_hidden, draft_hidden)
        depths = torch.arange(embeds.shape[1], device=embeds.device)
        rows = torch.cat([prefix, self.embed_tokens(embeds) + self.positions(depths)], dim=1)
        for block in self.blocks:
            rows, _, _ = block.causal(rows)
        return self.lm_head_query_in(self.out_norm(rows[:, prefix.shape[1] :]))


class WeaverScorer:
    """Scores the children of tree nodes with a weaver. One `begin` a tree batch, then `expand` in any order.

    The weights are folded into two tables once: head rows times the query projection [vocab, width], and projected
    embeddings [vocab, width]. Keys and values of the prefix and of expanded nodes lie in rows of one table a layer;
    what a node attends to is a list of rows (the prefix, then its ancestors by depth), so nothing is copied between
    branches. Request r owns rows r * stride .. (r + 1) * stride: prefix, slots, and a spare one where padding writes.
    """

    def __init__(self, weaver: Weaver, target):
        self.weaver = weaver
        with torch.no_grad():
            dtype = weaver.pos_emb.dtype
            self.head_table = target.head_weight.to(dtype) @ weaver.lm_head_query_in.weight  # [vocab, width]
            self.token_table = weaver.embed_tokens(target.embed_weight)  # [vocab, width]
            self.qkv = [torch.cat([b.q_proj.weight, b.k_proj.weight, b.v_proj.weight]) for b in weaver.blocks]

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        """Run the prefix of every request and make room for `slots` expanded nodes.

        target_hidden [R, d_model] is the target's final-norm hidden state at the root's predecessor.
        """
        requests, self.depth = marginals.tokens.shape[:2]
        rows = self.weaver.prefix_rows(target_hidden, marginals.hidden)
        self.prefix, device = rows.shape[1], rows.device
        self.stride = self.prefix + slots + 1
        base = torch.arange(requests, device=device) * self.stride
        places = (base[:, None] + torch.arange(self.prefix, device=device)).flatten()
        self.keys, self.values = [], []
        for block in self.weaver.blocks:
            rows, keys, values = block.causal(rows)
            for table, new in ((self.keys, keys), (self.values, values)):
                table.append(rows.new_zeros(requests * self.stride, *new.shape[2:]))
                table[-1][places] = new.flatten(0, 1)
        self.base, self.spare = base[:, None], self.stride - self.prefix - 1
        # rows that a node in each slot attends to; an ancestor not there yet points at the spare row
        self.lists = (
            (base + self.stride - 1).repeat_interleave(self.stride)[:, None].repeat(1, self.prefix + self.depth)
        )
        self.lists[:, : self.prefix] = places.view(requests, -1).repeat_interleave(self.stride, dim=0)
        # 0 for the prefix and ancestors down to each depth, -inf below
        reach = torch.arange(self.prefix + self.depth, device=device) - self.prefix
        is_seen = reach <= torch.arange(self.depth, device=device)[:, None]
        self.bias = torch.where(is_seen, 0.0, float("-inf")).to(rows.dtype)
        self._keep_candidates(marginals)

    def _keep_candidates(self, marginals: Marginals) -> None:
        # [R * D, K, width] and [R * D, K]: a depth's candidates are gathered from the vocabulary once, not per node
        candidates = marginals.tokens.flatten(0, 1)
        self.first_row = torch.arange(len(marginals.tokens), device=candidates.device)[:, None] * self.depth
        self.candidate_rows = self.head_table[candidates.clamp(min=0)]
        scores = marginals.log_probs.float().flatten(0, 1)
        self.candidate_scores = scores.masked_fill(candidates < 0, float("-inf"))

    def expand(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """Return log-probs [R, W, K] float32 over the candidates of the children of the nodes, normalised over them.

        slots, parent_slots, tokens, depths [R, W]; the root has depth 0 (its parent slot is ignored). Row d of the
        candidates belongs to the children of a node at depth d. Slot -1 is padding: its values mean nothing.
        """
        shape, own = slots.shape, self._row(slots).flatten()
        depths = depths.clamp(0, self.depth - 1)
        at = depths.flatten()
        # index_select and index_copy_ throughout: a third of the overhead of indexing with brackets
        lists = self.lists.index_select(0, self._row(torch.where(depths > 0, parent_slots, -1)).flatten())
        lists.scatter_(1, (self.prefix + at)[:, None], own[:, None])
        self.lists.index_copy_(0, own, lists)
        rows = self.token_table.index_select(0, tokens.flatten()) + self.weaver.pos_emb.index_select(0, at)
        bias = self.bias.index_select(0, at)[:, None, None]
        for layer, block in enumerate(self.weaver.blocks):
            rows = self._attend(layer, block, rows, own, lists, bias)
        row = (self.first_row + depths).flatten()
        residual = self._residual(self.weaver.out_norm(rows), row)
        return (self.candidate_scores.index_select(0, row) + residual.float()).log_softmax(-1).unflatten(0, shape)

    def _residual(self, rows: Tensor, row: Tensor) -> Tensor:
        # [R * W, K]: the dot of each node with its candidates' head rows
        candidates = self.candidate_rows.index_select(0, row)
        return torch.bmm(candidates, rows[:, :, None])[:, :, 0]

    def _row(self, slots: Tensor) -> Tensor:
        return self.base + self.prefix + torch.where(slots < 0, self.spare, slots)

    def _attend(self, layer: int, block: WeaverBlock, rows: Tensor, own: Tensor, lists: Tensor, bias: Tensor) -> Tensor:
        mixed = F.linear(block.norm_attn(rows), self.qkv[layer]).unflatten(-1, (3, block.heads, block.head_dim))
        self.keys[layer].index_copy_(0, own, mixed[:, 1])
        self.values[layer].index_copy_(0, own, mixed[:, 2])
        seen = lists.flatten()
        keys, values = (
            table[layer].index_select(0, seen).unflatten(0, lists.shape).transpose(1, 2)
            for table in (self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(mixed[:, 0][:, :, None], keys, values, attn_mask=bias)
        return block.finish(rows, attended[:, :, 0])


def init_weaver(weaver: Weaver, seed: int, std: float = 0.02) -> None:
    """Fill the weights from `seed`; the query projection starts at zero, so that the residual starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in weaver.named_parameters():
            if parameter.dim() > 1 and not name.startswith("lm_head_query_in"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
