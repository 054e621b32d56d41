"""The weaver: its size, its configuration, and that tree expansion equals the causal form used in training."""

import pytest
import torch

from tfm.marginals import Marginals
from tfm.weaver import Weaver, WeaverConfig, WeaverScorer, init_weaver

VOCAB, HIDDEN, ROWS = 40, 12, 5


class LentTarget:
    """Embedding and head rows, all that the weaver takes from a target."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.embed_weight = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head_weight = torch.randn(VOCAB, HIDDEN, generator=generator)


def make_weaver(layers: int = 1) -> Weaver:
    config = WeaverConfig(d_model=HIDDEN, d_embed=HIDDEN, d_rank=16, num_heads=4, mlp_dim=20, num_layers=layers, K=ROWS)
    weaver = Weaver(config)
    init_weaver(weaver, 4, std=0.4)
    with torch.no_grad():
        weaver.lm_head_query_in.weight.normal_(generator=torch.Generator().manual_seed(5))
    return weaver


def make_inputs(requests: int, seed: int = 6):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, ROWS, VOCAB, generator=generator)
    hidden = torch.randn(requests, ROWS, HIDDEN, generator=generator)
    return Marginals.from_logits(logits, hidden, 7), torch.randn(requests, HIDDEN, generator=generator)


def expand_path(scorer, path, slots):
    """Log-probs [D, K] of the nodes of one path, expanded one by one into the given slots (R = 1)."""
    rows = []
    for depth, (token, slot) in enumerate(zip(path, slots, strict=True)):
        parent = slots[depth - 1] if depth else -1
        one = [torch.tensor([[value]]) for value in (slot, parent, token, depth)]
        rows.append(scorer.expand(*one)[0, 0])
    return torch.stack(rows)


def test_parameter_count_at_the_papers_sizes():
    config = WeaverConfig(d_model=5120, d_embed=5120, d_rank=2048, num_heads=16, mlp_dim=2048)
    with torch.device("meta"):
        weaver = Weaver(config)
    assert sum(parameter.numel() for parameter in weaver.parameters()) == 56_694_784


@pytest.mark.parametrize("layers", [1, 2])
def test_training_form_equals_expansion_along_a_path(layers):
    weaver, target = make_weaver(layers), LentTarget()
    marginals, hidden = make_inputs(1)
    path = [3, 17, 0, 39, 8]
    scorer = WeaverScorer(weaver, target)
    scorer.begin(marginals, hidden, slots=ROWS)
    expanded = expand_path(scorer, path, list(range(ROWS)))
    queries = weaver.path_queries(hidden, marginals.hidden, target.embed_weight[torch.tensor(path)][None])
    residual = (queries @ target.head_weight.T).gather(-1, marginals.tokens)
    expected = (marginals.log_probs + residual).log_softmax(-1)[0]
    torch.testing.assert_close(expanded, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, marginals.log_probs.log_softmax(-1)[0], atol=0.1)


def test_branches_do_not_see_each_other():
    weaver, target = make_weaver(), LentTarget()
    marginals, hidden = make_inputs(1)
    scorer = WeaverScorer(weaver, target)
    scorer.begin(marginals, hidden, slots=3)
    alone = expand_path(scorer, [3, 17, 9], [0, 1, 2])
    scorer.begin(marginals, hidden, slots=8)
    expand_path(scorer, [3], [0])
    # both children of the root and a grandchild below each, interleaved and batched
    first = scorer.expand(*(torch.tensor([row]) for row in ([1, 2], [0, 0], [5, 17], [1, 1])))
    second = scorer.expand(*(torch.tensor([row]) for row in ([3, 4], [1, 2], [9, 9], [2, 2])))
    torch.testing.assert_close(first[0, 1], alone[1])
    torch.testing.assert_close(second[0, 1], alone[2])
    assert not torch.allclose(second[0, 0], second[0, 1])


def test_padding_and_other_requests_change_nothing():
    weaver, target = make_weaver(), LentTarget()
    marginals, hidden = make_inputs(2)
    scorer = WeaverScorer(weaver, target)
    scorer.begin(marginals, hidden, slots=4)
    scorer.expand(
        *(torch.tensor(rows) for rows in ([[0, -1], [0, -1]], [[-1, -1]] * 2, [[3, 0], [4, 0]], [[0, 9]] * 2))
    )
    both = scorer.expand(*(torch.tensor(r) for r in ([[1], [-1]], [[0], [-1]], [[7], [0]], [[1], [0]])))
    single = Marginals(marginals.tokens[:1], marginals.log_probs[:1], marginals.hidden[:1])
    scorer.begin(single, hidden[:1], slots=4)
    torch.testing.assert_close(both[0, 0], expand_path(scorer, [3, 7], [0, 1])[1])


def test_scores_are_normalised_over_the_candidates():
    scorer = WeaverScorer(make_weaver(), LentTarget())
    marginals, hidden = make_inputs(2)
    scorer.begin(marginals, hidden, slots=1)
    scores = scorer.expand(*(torch.tensor([[value]] * 2) for value in (0, -1, 6, 0)))
    assert scores.shape == (2, 1, 7) and scores.dtype == torch.float32
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 1))


def test_invalid_candidates_get_no_mass():
    scorer = WeaverScorer(make_weaver(), LentTarget())
    marginals, hidden = make_inputs(1)
    tokens = marginals.tokens.clone()
    tokens[:, :, -1] = -1
    scorer.begin(Marginals(tokens, marginals.log_probs, marginals.hidden), hidden, slots=1)
    scores = scorer.expand(*(torch.tensor([[value]]) for value in (0, -1, 6, 0)))
    assert scores[0, 0, -1] == float("-inf")
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(1, 1))


def test_fresh_weaver_leaves_the_marginals_as_they_are():
    weaver = make_weaver()
    init_weaver(weaver, 0)
    marginals, hidden = make_inputs(1)
    scorer = WeaverScorer(weaver, LentTarget())
    scorer.begin(marginals, hidden, slots=ROWS)
    torch.testing.assert_close(expand_path(scorer, [1, 2, 3], [0, 1, 2]), marginals.log_probs[0, :3].log_softmax(-1))


def test_drafter_with_more_rows_than_positions_is_an_error():
    weaver = make_weaver()
    with pytest.raises(ValueError, match="has 5 draft positions, the drafter gives 6 rows"):
        weaver.prefix_rows(torch.zeros(1, HIDDEN), torch.zeros(1, ROWS + 1, HIDDEN))


def test_config_survives_a_round_trip():
    config = make_weaver().config
    assert WeaverConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_mode": 2}, "encoder_mode: 2 is not allowed"),
        ({"score_head": 1}, "score_head: 1 is not allowed"),
        ({"rope_theta": 1e4}, "rope_theta=10000.0 is not understood"),
        ({"num_heads": 3}, "num_heads: 3 does not divide"),
        ({"K": 0}, "K: 0 is not allowed"),
        ({"K": "15"}, "K: '15' is not allowed"),
        ({"d_rank": 0}, "d_rank: 0 is not allowed"),
        ({"norm_eps": "x"}, "norm_eps: 'x' is not allowed"),
        ({"norm_eps": True}, "norm_eps: True is not allowed"),
        ({"norm_eps": float("nan")}, "norm_eps: nan is not allowed"),
    ],
)
def test_other_forms_are_refused_naming_the_key(change, message):
    with pytest.raises(ValueError, match=f"{message}.*; (take|use|only the first released form)"):
        WeaverConfig.from_dict(make_weaver().config.to_dict() | change)
