"""Markov and recurrent heads: their definitions by plain loops, and that expansion equals them along every path."""

import math
from dataclasses import replace

import pytest
import torch
from test_weaver import HIDDEN, ROWS, LentTarget, expand_path, make_inputs

from tfm import checkpoints
from tfm.heads import HEADS, HeadConfig, build_head, init_head
from tfm.heads_scoring import make_head_scorer
from tfm.marginals import Marginals

SIZES = {"markov": {"rank": 5}, "recurrent": {"rank": 6, "state": 7}}
KINDS = tuple(HEADS)


def head_config(kind: str) -> HeadConfig:
    return HeadConfig(kind, d_model=HIDDEN, d_embed=HIDDEN, **SIZES[kind])


def make_head(kind: str, seed: int = 4):
    head = build_head(head_config(kind))
    init_head(head, seed, std=0.5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + len(name)))
            parameter.add_(noise * (0.5 if name == "up.weight" else 0.2))
    return head.requires_grad_(False)


def by_hand(head, token_rows, draft_rows):
    """Residual queries of one path in Python's floats: no tensor operation but reading a weight."""
    weights = {name: tensor.double().tolist() for name, tensor in head.named_parameters()}

    def normed(row, name):
        scale = math.sqrt(sum(x * x for x in row) / len(row) + head.config.norm_eps)
        return [x / scale * w for x, w in zip(row, weights[name], strict=True)]

    def product(name, row, bias=None):
        rows = [sum(w * x for w, x in zip(line, row, strict=True)) for line in weights[f"{name}.weight"]]
        return [r + b for r, b in zip(rows, weights[bias], strict=True)] if bias else rows

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    queries, state = [], [0.0] * head.config.state
    for token, draft in zip(token_rows, draft_rows, strict=True):
        embed = normed(token, "embed_norm.weight")
        if head.config.kind == "markov":
            queries.append(product("up", product("down", embed)))
            continue
        given = product("input_gates", embed, "input_gates.bias")
        kept = product("state_gates", state, "state_gates.bias")
        size = head.config.state
        reset = [sigmoid(a + b) for a, b in zip(given[:size], kept[:size], strict=True)]
        update = [sigmoid(a + b) for a, b in zip(given[size : 2 * size], kept[size : 2 * size], strict=True)]
        new = [math.tanh(a + r * b) for a, r, b in zip(given[2 * size :], reset, kept[2 * size :], strict=True)]
        state = [(1 - z) * n + z * s for z, n, s in zip(update, new, state, strict=True)]
        mixed = zip(
            product("draft_in", normed(draft, "draft_norm.weight"), "draft_in.bias"),
            product("state_in", state),
            strict=True,
        )
        queries.append(product("up", [(a + b) * sigmoid(a + b) for a, b in mixed]))
    return torch.tensor(queries)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_the_equation_by_hand(kind):
    head, target = make_head(kind), LentTarget()
    marginals, hidden = make_inputs(1)
    embeds = target.embed_weight[torch.tensor([3, 17, 0, 39, 8])]
    queries = head.path_queries(hidden, marginals.hidden, embeds[None])[0]
    expected = by_hand(head, embeds.double().tolist(), marginals.hidden[0].double().tolist())
    torch.testing.assert_close(queries, expected.float(), rtol=1e-4, atol=1e-5)


def test_the_recurrent_cell_is_pytorchs():
    head = make_head("recurrent")
    cell = torch.nn.GRUCell(HIDDEN, head.config.state)
    theirs = dict(zip(("weight_ih", "bias_ih"), head.input_gates.parameters(), strict=True))
    theirs |= dict(zip(("weight_hh", "bias_hh"), head.state_gates.parameters(), strict=True))
    cell.load_state_dict(theirs)
    generator = torch.Generator().manual_seed(1)
    tokens, state = (torch.randn(4, size, generator=generator) for size in (HIDDEN, head.config.state))
    torch.testing.assert_close(head.cell(head.input_gates(tokens), state), cell(tokens, state))


@pytest.mark.parametrize("kind", KINDS)
def test_expansion_equals_the_definition_along_a_path(kind):
    head, target = make_head(kind), LentTarget()
    marginals, hidden = make_inputs(1)
    path = [3, 17, 0, 39, 8]
    scorer = make_head_scorer(head, target)
    scorer.begin(marginals, hidden, slots=ROWS)
    expanded = expand_path(scorer, path, list(range(ROWS)))
    queries = head.path_queries(hidden, marginals.hidden, target.embed_weight[torch.tensor(path)][None])
    residual = (queries @ target.head_weight.T).gather(-1, marginals.tokens)
    expected = (marginals.log_probs + residual).log_softmax(-1)[0]
    torch.testing.assert_close(expanded, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, marginals.log_probs.log_softmax(-1)[0], atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_padding_and_other_requests_change_nothing(kind):
    head, target = make_head(kind), LentTarget()
    marginals, hidden = make_inputs(2)
    single = Marginals(marginals.tokens[:1], marginals.log_probs[:1], marginals.hidden[:1])
    scorer = make_head_scorer(head, target)
    scorer.begin(single, hidden[:1], slots=3)
    alone = expand_path(scorer, [3, 17, 9], [0, 1, 2])
    scorer.begin(marginals, hidden, slots=8)
    scorer.expand(*(torch.tensor(rows) for rows in ([[0], [0]], [[-1]] * 2, [[3], [4]], [[0]] * 2)))
    rows = ([[1, 2, -1]] * 2, [[0, 0, 5]] * 2, [[5, 17, 0], [6, 7, 0]], [[1, 1, 4]] * 2)
    first = scorer.expand(*map(torch.tensor, rows))
    rows = ([[3, 4], [-1, -1]], [[1, 2], [-1, -1]], [[9, 9], [0, 0]], [[2, 2]] * 2)
    second = scorer.expand(*map(torch.tensor, rows))
    torch.testing.assert_close(first[0, 1], alone[1])
    torch.testing.assert_close(second[0, 1], alone[2])
    is_same = torch.allclose(second[0, 0], second[0, 1])
    assert is_same == (kind == "markov")  # which knows the last token alone


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_normalised_and_invalid_candidates_get_no_mass(kind):
    scorer = make_head_scorer(make_head(kind), LentTarget())
    marginals, hidden = make_inputs(2)
    tokens = marginals.tokens.clone()
    tokens[:, :, -1] = -1
    scorer.begin(Marginals(tokens, marginals.log_probs, marginals.hidden), hidden, slots=1)
    scores = scorer.expand(*(torch.tensor([[value]] * 2) for value in (0, -1, 6, 0)))
    assert scores.shape == (2, 1, 7) and scores.dtype == torch.float32
    assert (scores[..., -1] == -math.inf).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_leaves_the_marginals_as_they_are(kind):
    head, target = build_head(head_config(kind)), LentTarget()
    init_head(head, 0)
    marginals, hidden = make_inputs(1)
    scorer = make_head_scorer(head, target)
    scorer.begin(marginals, hidden, slots=ROWS)
    expanded = expand_path(scorer, [3, 17, 0, 39, 8], list(range(ROWS)))
    torch.testing.assert_close(expanded, marginals.log_probs[0].log_softmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_head_survives_its_checkpoint(kind, storage, tmp_path):
    head = make_head(kind)
    checkpoints.save_head(head, tmp_path / "first", storage=storage)
    again = checkpoints.load_head(tmp_path / "first")
    assert again.config == head.config and type(again) is type(head)
    checkpoints.save_head(again, tmp_path / "second", storage=storage)
    names = ("model.safetensors", "config.json")
    assert [(tmp_path / "first" / n).read_bytes() for n in names] == [
        (tmp_path / "second" / n).read_bytes() for n in names
    ]
    for name, tensor in head.named_parameters():
        # int8 rows keep 6 bits against the row's largest value, bfloat16 8 bits
        torch.testing.assert_close(again.get_parameter(name), tensor, rtol=0.01, atol=float(tensor.abs().max()) / 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "domino"}, "kind: 'domino' is not allowed .allowed: markov, recurrent"),
        ({"rank": 0}, "rank: 0 is not allowed .allowed: an integer >= 1"),
        ({"kind": "recurrent", "state": 0}, "state: 0 is not allowed .allowed: an integer >= 1"),
        ({"d_model": True}, "d_model: True is not allowed"),
        ({"norm_eps": math.inf}, "norm_eps: inf is not allowed .allowed: a number > 0"),
        ({"layers": 2}, "unknown key layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(changes, message):
    raw = {"kind": "markov", "d_model": 8, "d_embed": 8, "rank": 4}
    with pytest.raises(ValueError, match=message):
        HeadConfig.from_dict(raw | changes)
    assert HeadConfig.from_dict(raw).to_dict() == replace(HeadConfig(**raw)).to_dict()


def test_a_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match="missing key d_embed, missing key rank"):
        HeadConfig.from_dict({"kind": "markov", "d_model": 8})
