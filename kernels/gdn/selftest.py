"""Every backend that runs on this device against the definition in float64: what a new machine should run first."""

from dataclasses import dataclass

import torch

from tfm_kernels.gdn import naive, ops
from tfm_kernels.gdn.backends import BACKENDS

NODES = (16, 65)
# of float32 rows and a float32 state: above rounding over a path of 16, far below what a wrong row gives
TOLERANCE = 1e-4


@dataclass(frozen=True)
class SelfTest:
    """One backend at one size; where it does not run, `reason` says why and the errors are None."""

    backend: str
    nodes: int | None
    out_error: float | None = None  # largest absolute differences from float64
    u_error: float | None = None
    path_error: float | None = None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and every error is under TOLERANCE; NaN is not."""
        errors = (self.out_error, self.u_error, self.path_error)
        return self.reason is None and all(error is not None and error < TOLERANCE for error in errors)


def run(
    device: torch.device | str, *, heads: int = 16, value_heads: int = 48, dim: int = 128, backends=BACKENDS
) -> list[SelfTest]:
    """Return a result for each backend and size, by default with the paper's heads; absent backends raise nothing."""
    results, device = [], torch.device(device)
    for backend in backends:
        try:
            ops.resolve_backend(backend, device, torch.float32)
        except ValueError as error:
            results.append(SelfTest(backend, None, reason=str(error)))
            continue
        results += [_compare(backend, nodes, device, heads, value_heads, dim) for nodes in NODES]
    return results


def _compare(backend: str, nodes: int, device: torch.device, heads: int, value_heads: int, dim: int) -> SelfTest:
    inputs = _inputs(nodes, device, heads, value_heads, dim)
    if backend == "fused_cuda":
        inputs[:3] = [x.bfloat16() for x in inputs[:3]]  # the rows that it takes; the definition gets the same
    got = ops.tree_verify(*inputs, backend=backend)
    expected = naive.naive_tree_verify(*(x.double() if x.is_floating_point() else x for x in inputs))
    errors = ((x.double() - y).abs().max().item() for x, y in zip(got, expected, strict=True))
    return SelfTest(backend, nodes, *errors)


def _inputs(nodes: int, device: torch.device, heads: int, value_heads: int, dim: int) -> list[torch.Tensor]:
    # a tree with a chain of four, wide levels and siblings: node i hangs under node (i - 1) // 2, or under i - 1
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.tensor([[i - 1 if i % 4 else (i - 1) // 2 for i in range(nodes)]])

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(1, nodes, heads, dim), dim=-1) for _ in range(2))
    v, decay = draw(1, nodes, value_heads, dim), -0.3 * draw(1, nodes, value_heads).abs()
    beta, state = draw(1, nodes, value_heads).sigmoid(), draw(1, value_heads, dim, dim)
    return [x.to(device) for x in (q * dim**-0.5, k, v, decay, beta, parents, state)]
