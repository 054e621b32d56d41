"""The draft tree: what a proposer hands to the target, and the invariants every other part relies on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_kernels.gdn.ops import ancestor_mask


def validate_parents(parents: Tensor, num_nodes: Tensor | None = None) -> None:
    """Raise ValueError unless every row of `parents` [R, N] is a rooted tree in topological order.

    Node 0 is the root and has parent -1; every other node's parent stands before it. Rows past `num_nodes` [R] are
    padding and carry parent -1. The message names the request, the node and the value.
    """
    if parents.dim() != 2 or parents.is_floating_point():
        raise ValueError(f"parents: {parents.dtype} of shape {tuple(parents.shape)}, expected int64 [requests, nodes]")
    requests, width = parents.shape
    if num_nodes is not None and (num_nodes.shape != (requests,) or num_nodes.is_floating_point()):
        raise ValueError(
            f"num_nodes: {num_nodes.dtype} of shape {tuple(num_nodes.shape)}, expected one whole count for each of "
            f"{requests} requests"
        )
    counts = [width] * requests if num_nodes is None else num_nodes.tolist()
    for request, (row, count) in enumerate(zip(parents.tolist(), counts, strict=True)):
        if not 1 <= count <= width:
            allowed = f"1 to {width}" if width else "at least 1"
            raise ValueError(f"parents: request {request} has {count} nodes, expected {allowed} (the root counts)")
        if row[0] != -1:
            raise ValueError(f"parents: request {request}, node 0 has parent {row[0]}; node 0 is the root, parent -1")
        for node in range(1, count):
            if not 0 <= row[node] < node:
                raise ValueError(
                    f"parents: request {request}, node {node} has parent {row[node]}, expected 0 to {node - 1}: "
                    "one root, and parents before their children"
                )
        if any(parent != -1 for parent in row[count:]):
            raise ValueError(f"parents: request {request}: padding past node {count - 1} must carry parent -1")


def node_depths(parents: Tensor) -> Tensor:
    """Return the depth of every node [R, N] int64; roots and padding have depth 0."""
    return ancestor_mask(parents).sum(-1) - 1


@dataclass(frozen=True)
class DraftLaw:
    """What the children of every node were drawn from, one after the other in slot order, without replacement."""

    tokens: Tensor  # [R, N, K] int64, distinct in a row; -1 where there is no candidate
    log_probs: Tensor  # [R, N, K] float32, normalised over a node's candidates; -inf where there is none


@dataclass(frozen=True)
class DraftTree:
    """R draft trees padded to N nodes. Node 0 is the root: the last committed token, drafted by nobody.

    Siblings carry distinct tokens. Padding rows have token 0, parent -1, depth 0 and log-probability 0.
    """

    tokens: Tensor  # [R, N] int64
    parents: Tensor  # [R, N] int64, parents[r, 0] == -1, parents[r, i] < i
    depths: Tensor  # [R, N] int64
    log_probs: Tensor  # [R, N] float32, of each node given its parent; 0 at the root
    num_nodes: Tensor  # [R] int64, the root counts
    is_chain: bool = False  # every request is a chain 0 -> 1 -> ...: its ancestor mask is a plain triangle
    law: DraftLaw | None = None  # None: the tree is a function of the context, no token of it was drawn

    @staticmethod
    def build(tokens: Tensor, parents: Tensor, log_probs: Tensor | None = None, num_nodes: Tensor | None = None):
        """Return a checked tree from tokens and parents [R, N]; raises ValueError as `validate` does."""
        validate_parents(parents, num_nodes)
        if tokens.shape != parents.shape or (log_probs is not None and log_probs.shape != parents.shape):
            shapes = [tuple(x.shape) for x in (tokens, log_probs) if x is not None]
            raise ValueError(f"tokens, log_probs: shapes {shapes}, expected {tuple(parents.shape)} as parents have")
        counts = tokens.new_full((len(tokens),), tokens.shape[1]) if num_nodes is None else num_nodes
        tree = DraftTree(
            tokens=tokens,
            parents=parents,
            depths=node_depths(parents),
            log_probs=torch.zeros(tokens.shape, device=tokens.device) if log_probs is None else log_probs,
            num_nodes=counts,
            is_chain=bool((parents == torch.arange(-1, parents.shape[1] - 1, device=parents.device)).all()),
        )
        tree.validate()
        return tree

    @staticmethod
    def root_only(roots: Tensor) -> "DraftTree":
        """Return the tree of autoregressive decoding: the root [R] alone."""
        zero = torch.zeros_like(roots)[:, None]
        return DraftTree(roots[:, None], zero - 1, zero, zero.float(), torch.ones_like(roots), is_chain=True)

    @property
    def is_real(self) -> Tensor:
        """Mask [R, N] bool of nodes that are not padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes[:, None]

    def ancestor_mask(self) -> Tensor:
        """See `ancestor_mask`; [R, N, N] bool, a node is its own ancestor."""
        if self.is_chain:
            width = self.tokens.shape[1]
            return (
                torch.ones(width, width, dtype=torch.bool, device=self.tokens.device)
                .tril()
                .expand(len(self.tokens), width, width)
            )
        return ancestor_mask(self.parents)

    def validate(self) -> None:
        """Raise ValueError when an invariant of the class does not hold. Not called inside a timed step."""
        if self.tokens.is_floating_point():
            raise ValueError(f"tokens: {self.tokens.dtype} is not allowed (allowed: int64 ids); convert them")
        validate_parents(self.parents, self.num_nodes)
        if bool((self.tokens < 0).any()):
            raise ValueError(f"tokens: {int(self.tokens.min())} is not allowed (allowed: ids >= 0; 0 for padding)")
        if bool((self.tokens.masked_fill(self.is_real, 0) != 0).any()):
            raise ValueError("tokens: padding rows must carry token 0")
        if not torch.equal(self.depths, node_depths(self.parents)):
            raise ValueError("depths: they do not follow from parents")
        for request, count in enumerate(self.num_nodes.tolist()):
            seen: dict[tuple[int, int], int] = {}
            edges = zip(self.parents[request, :count].tolist(), self.tokens[request, :count].tolist(), strict=True)
            for node, edge in enumerate(edges):
                if edge in seen:
                    raise ValueError(
                        f"tokens: request {request}, nodes {seen[edge]} and {node} are siblings with token {edge[1]}; "
                        "siblings carry distinct tokens"
                    )
                seen[edge] = node
