"""Which drafted nodes survive: the rules greedy, target_only, traversal and legacy_traversal.

`greedy` and `target_only` draw the target's token at every node and walk from the root while the drawn token is a
child: exact for any tree that does not depend on those draws. `traversal` is exact too (tfm/traversal.py);
`legacy_traversal` is lossy and exists to be audited. At temperature 0 all of them are the greedy walk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm.config import GREEDY_BELOW, RULES, check_temperature
from tfm.sampling import next_tokens, uniform
from tfm.traversal import HashChance, TreeRows, bonus_weights, legacy_traverse, traverse
from tfm.tree import DraftLaw, DraftTree

_TRAVERSAL_STREAM = 1


@dataclass(frozen=True)
class VerifyResult:
    """What one verify pass decided for R requests."""

    path: Tensor  # [R, P] int64 accepted nodes, path[:, 0] == 0, padded with -1; P = deepest node + 1
    accepted: Tensor  # [R] int64, drafted nodes on the path (the root is not one)
    bonus: Tensor  # [R] int64, the target's token after the path
    # [R] float64, sum of the target's path probability over drafted nodes: the lossless bound; NaN where it is none
    expected_accepted: Tensor


def accept(
    tree: DraftTree,
    logits: Tensor,  # [R, N, vocab], the target's row at every node
    *,
    rule: str,
    temperature: float,
    seed: int,
    indices: Tensor,  # [R] int64, the request's index in its dataset
    root_positions: Tensor,  # [R] int64, absolute position of the root
) -> VerifyResult:
    """Return the accepted path, the bonus token and the lossless bound of each request.

    The token after node n has absolute position root_positions + depth[n] + 1. Raises ValueError on an unknown rule
    and on `greedy` above temperature 0. Costs one device-to-host copy (the depth of the trees); the
    traversal rules run on the host and copy the tree and its rows.
    """
    if rule not in RULES:
        raise ValueError(f"rule: {rule!r} is not allowed (allowed: {', '.join(RULES)}); choose one of them")
    check_temperature(temperature)
    is_greedy = temperature < GREEDY_BELOW
    if rule == "legacy_traversal" and tree.law is not None:
        raise ValueError(f"rule: {rule!r} is not allowed on drawn siblings (allowed: target_only, traversal); use one")
    if rule == "greedy" and not is_greedy:
        raise ValueError(f"rule: 'greedy' is not allowed at temperature {temperature} (allowed: 0); use target_only")
    deepest = int(tree.depths.max())
    if is_greedy or rule == "target_only":
        positions = root_positions[:, None] + tree.depths + 1
        drawn = next_tokens(logits, positions, indices, seed=seed, temperature=temperature, span=deepest + 1)
        path, accepted, bonus = walk(tree, drawn, deepest)
        if is_greedy:
            return VerifyResult(path, accepted, bonus, accepted.double())
        edges = edge_log_probs(tree, logits, temperature)
        return VerifyResult(path, accepted, bonus, expected_accepted(tree, edges, deepest))
    draws = uniform(seed, indices, root_positions + 1, _TRAVERSAL_STREAM, 2 * tree.tokens.shape[1])
    chances = [HashChance(row) for row in draws.tolist()]
    return accept_by_traversal(tree, logits, chances, rule=rule, temperature=temperature)


def walk(tree: DraftTree, drawn: Tensor, deepest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the tokens `drawn` [R, N] from each root; return path [R, deepest + 1], accepted [R] and bonus [R]."""
    nodes = torch.arange(tree.tokens.shape[1], device=drawn.device)
    parents = tree.parents.clamp(min=0)
    is_hit = (drawn.gather(1, parents) == tree.tokens) & (tree.parents >= 0)
    is_hit[:, 0] = True
    on_path = _over_ancestors(is_hit, parents, deepest, torch.logical_and)
    accepted = on_path.sum(1) - 1
    # siblings carry distinct tokens, so a depth holds at most one node of the path; the last column is a bin
    slots = torch.where(on_path, tree.depths, deepest + 1)
    path = torch.full_like(drawn[:, :1], -1).repeat(1, deepest + 2)
    path.scatter_(1, slots, nodes.expand_as(slots))
    leaf = path.gather(1, accepted[:, None])
    return path[:, :-1], accepted, drawn.gather(1, leaf)[:, 0]


def expected_accepted(tree: DraftTree, edges: Tensor, deepest: int) -> Tensor:
    """Return sum over drafted nodes of P_target(path) [R] float64: what every lossless rule accepts on average.

    `edges` [R, N] is what `edge_log_probs` returns.
    """
    paths = _over_ancestors(edges.double(), tree.parents.clamp(min=0), deepest, torch.add)
    return torch.where(tree.parents >= 0, paths.exp(), 0.0).sum(1)


def edge_log_probs(tree: DraftTree, logits: Tensor, temperature: float) -> Tensor:
    """Return log P_target(node's token | its parent) [R, N], 0 at roots and padding; float64 if `logits` are."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    requests, width, vocab = scores.shape
    parents = tree.parents.clamp(min=0)
    picked = scores.view(requests, width * vocab).gather(1, parents * vocab + tree.tokens)
    return torch.where(tree.parents >= 0, picked - scores.logsumexp(-1).gather(1, parents), 0.0)


def accept_by_traversal(
    tree: DraftTree, logits: Tensor, chances: list, *, rule: str, temperature: float
) -> VerifyResult:
    """Apply `traversal` or `legacy_traversal` in float64, request by request, drawing from `chances` (one each).

    On drawn siblings the law holds on average over trees only, so `expected_accepted` is NaN: it bounds nothing there.
    """
    run = {"traversal": traverse, "legacy_traversal": legacy_traverse}[rule]
    deepest = int(tree.depths.max())
    paths, bonus = [], []
    for request, (rows, chance) in enumerate(zip(tree_rows(tree, logits, temperature), chances, strict=True)):
        path, leaf = run(rows, chance)
        row = (logits[request, path[-1]].double() / temperature).softmax(-1).cpu()
        if bool(row.isnan().any()):
            raise _lawless(request, path[-1])
        bonus.append(chance.choose(bonus_weights(row, leaf)))
        paths.append(path + [-1] * (deepest + 1 - len(path)))
    path = torch.tensor(paths, device=logits.device)
    if tree.law is None:
        expected = expected_accepted(tree, edge_log_probs(tree, logits.double(), temperature), deepest)
    else:
        expected = torch.full((len(paths),), torch.nan, dtype=torch.float64, device=logits.device)
    return VerifyResult(path, (path >= 0).sum(1) - 1, torch.tensor(bonus, device=logits.device), expected)


def tree_rows(tree: DraftTree, logits: Tensor, temperature: float) -> list[TreeRows]:
    """Return each request's tree with its target and draft rows in float64, on the host.

    Raises ValueError for a child that is no candidate of its parent, and for a row of logits that has no law.
    """
    law = tree.law or children_law(tree)
    is_candidate, is_child = law.tokens >= 0, tree.parents >= 0
    parents = tree.parents.clamp(min=0)
    asked = law.tokens.gather(1, parents[..., None].expand_as(law.tokens)) == tree.tokens[..., None]
    if not bool(asked.any(-1)[is_child].all()):
        raise ValueError("law: a drafted token is no candidate of its parent; a tree's law must hold all its children")
    columns = torch.where(is_child, asked.int().argmax(-1), -1)
    # rows without candidates keep their whole mass outside them
    inner = is_candidate.any(-1)
    scores = logits[inner].double() / temperature
    total = scores.logsumexp(-1)
    rows, places = is_candidate[inner].nonzero(as_tuple=True)
    picked = law.tokens[inner][rows, places]
    target = logits.new_zeros(law.tokens.shape, dtype=torch.float64)
    target[is_candidate] = (scores[rows, picked] - total[rows]).exp()
    rest = logits.new_ones(inner.shape, dtype=torch.float64)
    # summed over the other tokens, not 1 minus the candidates, so that nothing left gives exactly 0
    rest[inner] = (scores.index_put((rows, picked), scores.new_tensor(-torch.inf)).logsumexp(-1) - total).exp()
    draft = law.log_probs.double().softmax(-1).masked_fill(~is_candidate, 0.0)
    host = [x.cpu() for x in (law.tokens, target, rest, draft)]
    # a comparison with NaN is a rejection, so that a broken row would pass for one that nobody drafted well
    if bool((is_broken := (host[1].sum(-1) + host[2]).isnan()).any()):
        raise _lawless(*is_broken.nonzero()[0].tolist())
    tokens, target, rest, draft = (x.numpy() for x in host)
    return [
        TreeRows(
            parents=parent[:count],
            columns=column,
            tokens=tokens[request],
            target=target[request],
            rest=rest[request],
            draft=draft[request],
            is_drawn=tree.law is not None,
        )
        for request, (parent, column, count) in enumerate(
            zip(tree.parents.tolist(), columns.tolist(), tree.num_nodes.tolist(), strict=True)
        )
    ]


def _lawless(request: int, node: int) -> ValueError:
    where = f"request {request}, node {node} of its tree"
    return ValueError(f"logits: NaN or infinite ({where}); the target's weights or dtype are broken, check them")


def children_law(tree: DraftTree) -> DraftLaw:
    """Return the sampling reading of a tree that was not drawn: a node's candidates are its children, in slot order."""
    is_child = tree.parents >= 0
    nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    is_elder = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes[:, None] > nodes) & is_child[:, None]
    ranks = is_elder.sum(-1)
    shape = (*tree.tokens.shape, int(ranks.masked_fill(~is_child, 0).max()) + 1)
    request, node = is_child.nonzero(as_tuple=True)
    where = (request, tree.parents[request, node], ranks[request, node])
    tokens = tree.tokens.new_full(shape, -1).index_put(where, tree.tokens[request, node])
    weights = tree.log_probs.new_full(shape, -torch.inf).index_put(where, tree.log_probs[request, node])
    return DraftLaw(tokens, weights)


def _over_ancestors(values: Tensor, parents: Tensor, deepest: int, combine) -> Tensor:
    """Combine each node's value with those of all its ancestors, by doubling jumps: log2(depth) passes over [R, N].

    The root is its own parent here, so its value must be neutral for `combine`.
    """
    jumps, reach = parents, 1
    while reach <= deepest:
        values = combine(values, values.gather(1, jumps))
        jumps = jumps.gather(1, jumps)
        reach *= 2
    return values
