"""The one-token step of the gated delta rule: the plain form against the definition, Triton's against the plain form.

Triton's runs in its interpreter (TRITON_INTERPRET=1 with triton installed, see .ci/run) or on a CUDA device.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from tfm_kernels.gdn import step
from tfm_kernels.gdn.naive import naive_states

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"


def rows(requests: int, length: int, heads: int, group: int, dim: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(requests, length, *shape, generator=generator, dtype=dtype)

    q, k = (torch.nn.functional.normalize(normal(heads, dim), dim=-1) for _ in range(2))
    log_decay = -normal(heads * group).exp()
    log_decay[0, 0, 0] = float("-inf")  # forgets everything
    return q * dim**-0.5, k, normal(heads * group, dim), log_decay, normal(heads * group).sigmoid()


def test_steps_are_the_definition_along_a_chain():
    inputs = rows(3, 7, 2, 3, 16, torch.float64)
    start = torch.randn(3, 6, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parents = torch.arange(-1, 6).expand(3, 7)
    wanted, states, _ = naive_states(*inputs, parents, start)
    state = start.clone()
    for place in range(7):
        out = step.step(*(x[:, place] for x in inputs), state)
        torch.testing.assert_close(out, wanted[:, place])
        torch.testing.assert_close(state, states[:, place])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_one_launch_equals_the_plain_step_on_a_gpu(dim):
    compare(dim, requests=33)


@pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("dim", [16, 64])
def test_one_launch_equals_the_plain_step_in_the_interpreter(dim):
    compare(dim, requests=2)


def compare(dim: int, requests: int) -> None:
    from tfm_kernels.gdn import step_triton

    inputs = [x[:, 0].to(DEVICE) for x in rows(requests, 1, 2, 3, dim)]
    # columns of one wider product, as a layer hands them over
    inputs[2] = torch.cat([inputs[2], inputs[2]], dim=-1)[..., :dim]
    state = torch.randn(requests, 6, dim, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wanted_state = state.clone()
    wanted = step.plain_step(*inputs, wanted_state)
    torch.testing.assert_close(step_triton.step(*inputs, state), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state, wanted_state, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="contiguous"):
        step_triton.step(*inputs, state.mT)
