"""Weaver and drafter equal their definitions, written out row by row in float64.

The oracles use the weights and elementary tensor operations only, nothing of tfm. Every weight and bias is random,
those of the norms too: at their initial ones and zeros a norm that is left out, or its bias, would go unseen.
Sections are those of the paper's notes: 3.1 and 3.2 the weaver, 4.2 the drafter.
"""

import math

import pytest
import torch
from test_drafter import LentTarget as DrafterTarget
from test_drafter import drafted, make_drafter, random_taps
from test_weaver import HIDDEN, ROWS, VOCAB, expand_path, make_weaver
from test_weaver import LentTarget as WeaverTarget
from torch import Tensor

from tfm.marginals import Marginals
from tfm.weaver import WeaverScorer


def randomise(model):
    """Return the model in float64 with noise added to every vector: norms, their biases, the biases of projections."""
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.4 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model.double().requires_grad_(False)


def select(weights: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def norm(x: Tensor, weights: dict, name: str) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) * weight + bias; the drafter's norms have no bias (4.2), the weaver's do (3.2)."""
    return x / (x.square().mean() + 1e-6).sqrt() * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def linear(x: Tensor, weights: dict, name: str) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q . k / sqrt(head dim)) over the rows of keys [n, head dim], times values."""
    return ((keys @ query) / math.sqrt(len(query))).softmax(0) @ values


def weaver_rows(weights: dict, verifier: Tensor, drafts: Tensor, embeds: Tensor) -> list[Tensor]:
    """Return the rows that enter the block.

    u_0 = W_c norm(h_v), u_i = W_c norm(h_i) + p_i with p_i the i-th learned position counted from 1 (3.1; one norm and
    one W_c for both, 3.2 step 1), then W_t norm(e_d) + p of row d of the table, d from 0 at the root (3.2 step 2).
    """
    rows = [linear(norm(verifier, weights, "output_norm"), weights, "proposal_in")]
    for i, hidden in enumerate(drafts):
        rows.append(linear(norm(hidden, weights, "output_norm"), weights, "proposal_in") + weights["pos_emb"][i])
    for depth, embed in enumerate(embeds):
        rows.append(linear(norm(embed, weights, "embed_norm"), weights, "token_in") + weights["pos_emb"][depth])
    return rows


def weaver_block(rows: list[Tensor], weights: dict, heads: int) -> list[Tensor]:
    """Pre-norm causal attention without rotation, residual, pre-norm MLP with exact GELU, residual (3.2 step 3)."""
    normed = [norm(row, weights, "norm_attn") for row in rows]
    q, k, v = (
        torch.stack([linear(row, weights, f"{part}_proj") for row in normed]).unflatten(-1, (heads, -1))
        for part in "qkv"
    )
    out = []
    for i, row in enumerate(rows):
        attended = [attend(q[i, head], k[: i + 1, head], v[: i + 1, head]) for head in range(heads)]
        row = row + linear(torch.cat(attended), weights, "o_proj")
        inner = linear(norm(row, weights, "norm_mlp"), weights, "fc1")
        out.append(row + linear(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))), weights, "fc2"))
    return out


def weaver_queries(weaver, verifier: Tensor, drafts: Tensor, embeds: Tensor) -> Tensor:
    """Return the query of every node of a path [D, d_model]: W_q norm(row), without bias (3.2 step 4)."""
    weights = weaver.state_dict()
    rows = weaver_rows(weights, verifier, drafts, embeds)
    for layer in range(weaver.config.num_layers):
        rows = weaver_block(rows, select(weights, f"blocks.{layer}."), weaver.config.num_heads)
    nodes = rows[1 + len(drafts) :]
    return torch.stack([linear(norm(row, weights, "out_norm"), weights, "lm_head_query_in") for row in nodes])


def weaver_inputs():
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64) for rows in (1, ROWS))


@pytest.mark.parametrize("layers", [1, 2])
def test_weaver_queries_of_a_path_are_their_definition(layers):
    weaver, target, path = randomise(make_weaver(layers)), WeaverTarget(), torch.tensor([3, 17, 0, 39, 8])
    (verifier, drafts), embeds = weaver_inputs(), target.embed_weight[path].double()
    expected = weaver_queries(weaver, verifier[0], drafts, embeds)
    found = weaver.path_queries(verifier, drafts[None], embeds[None])
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-9)


def test_expanded_scores_are_their_definition():
    """softmax over the candidates of row d of the drafter's logits plus the query's dot with the head rows (3.1)."""
    weaver, target, path = randomise(make_weaver()), WeaverTarget(), [3, 17, 0, 39, 8]
    verifier, drafts = weaver_inputs()
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    scorer = WeaverScorer(weaver, target)
    scorer.begin(Marginals.from_logits(logits[None], drafts[None], 7), verifier, slots=ROWS)
    queries = weaver_queries(weaver, verifier[0], drafts, target.embed_weight[torch.tensor(path)].double())
    expected = []
    for row, query in zip(logits, queries, strict=True):
        best = row.argsort(descending=True)[:7]
        expected.append((row[best] + target.head_weight[best].double() @ query).log_softmax(0))
    found = expand_path(scorer, path, list(range(ROWS))).double()
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)  # candidate scores are float32


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate the pairs (x_i, x_{i + dim/2}) by the angle position * theta^(-2 i / dim)."""
    low, high = x.chunk(2)
    angle = position / theta ** (torch.arange(len(low), dtype=torch.float64) * 2 / len(x))
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])


def is_visible(config, kind: str, row: int, place: int, root: int) -> bool:
    """Whether the block row at position `row` sees position `place`; the block starts at `root` (4.2).

    A full layer sees everything. A sliding one sees `sliding_window` positions back, itself included, and inside the
    block forward as far when it is not causal.
    """
    if kind == "full_attention":
        return True
    is_ahead_allowed = place >= root and not config.swa_causal
    return abs(row - place) < config.sliding_window and (place <= row or is_ahead_allowed)


def drafter_layer(block: list[Tensor], context: list[Tensor], weights: dict, config, kind: str) -> list[Tensor]:
    """Attention over context features and the normed block, rotated at true positions; then a SwiGLU MLP (4.2)."""

    def split(name: str, x: Tensor) -> Tensor:
        return linear(x, weights, f"self_attn.{name}_proj").unflatten(0, (-1, config.head_dim))

    def rotated(name: str, x: Tensor, position: int) -> Tensor:
        heads = [norm(head, weights, f"self_attn.{name}_norm") for head in split(name, x)]
        return torch.stack([turn(head, position, config.rope_theta) for head in heads])

    root, groups = len(context), config.num_attention_heads // config.num_key_value_heads
    sources = [*context, *(norm(row, weights, "input_layernorm") for row in block)]
    keys = torch.stack([rotated("k", x, place) for place, x in enumerate(sources)])
    values = torch.stack([split("v", x) for x in sources])
    out = []
    for at, row in enumerate(block, start=root):
        seen = [place for place in range(len(sources)) if is_visible(config, kind, at, place, root)]
        queries = rotated("q", sources[at], at)
        attended = [attend(q, keys[seen, h // groups], values[seen, h // groups]) for h, q in enumerate(queries)]
        row = row + linear(torch.cat(attended), weights, "self_attn.o_proj")
        normed = norm(row, weights, "post_attention_layernorm")
        gate, up = (linear(normed, weights, f"mlp.{name}_proj") for name in ("gate", "up"))
        out.append(row + linear(gate * gate.sigmoid() * up, weights, "mlp.down_proj"))
    return out


def drafter_hidden(drafter, taps: Tensor, root: int, embeds: Tensor) -> Tensor:
    """Return the final-norm rows of the masks; context features are norm(fc(taps)), one a committed token (4.2)."""
    weights, config = drafter.state_dict(), drafter.config
    context = [norm(linear(tap, weights, "fc"), weights, "hidden_norm") for tap in taps]
    block = [embeds[token] for token in [root] + [config.mask_token_id] * (config.block_size - 1)]
    for layer, kind in enumerate(config.layer_types):
        block = drafter_layer(block, context, select(weights, f"layers.{layer}."), config, kind)
    return torch.stack([norm(row, weights, "norm") for row in block[1:]])


@pytest.mark.parametrize("swa_causal", [True, False], ids=["causal_window", "two_sided_window"])
def test_drafter_rows_are_their_definition(swa_causal):
    # a window of 3 cuts the context and, when two-sided, the block of 5 too
    drafter, target = randomise(make_drafter(window=3, swa_causal=swa_causal)), DrafterTarget()
    taps, lengths, roots = random_taps(2, 9), [9, 2], [4, 11]
    logits, hidden = drafted(drafter, taps, lengths, roots, target)
    for request, (length, root) in enumerate(zip(lengths, roots, strict=True)):
        expected = drafter_hidden(drafter, taps[request, :length], root, target.weight)
        # rotary angles are float32
        torch.testing.assert_close(hidden[request], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits[request], expected @ target.weight.T, rtol=1e-6, atol=1e-5)
