"""The LK terms' kernel against the definition in PyTorch: values and gradient, ragged vocabularies, bfloat16 logits.

Runs where triton is installed and TRITON_INTERPRET=1 is set (.ci/run does both) or a CUDA device is there.
"""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: .ci/run tests it in a venv of its own")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from tfm.train.losses import lk_loss, lk_of_rows  # noqa: E402
from tfm_kernels import lk_triton  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
SHARES = {"kl_scale": 1.0, "kl_decay": 1.0}


def logits(vocab: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target's and draft's logits [2, 3, vocab]; of one row both are equal, of one the target is certain."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = (3 * torch.randn(2, 3, vocab, generator=generator) for _ in range(2))
    target[0, 1] = draft[0, 1]
    target[1, 2, vocab - 1] = 200.0
    return target.to(DEVICE, dtype), draft.to(DEVICE, dtype)


VOCABS = [
    pytest.param(37, id="less_than_a_block"),
    pytest.param(lk_triton.BLOCK, id="one_block"),
    pytest.param(2 * lk_triton.BLOCK + 3, id="three_into_a_third_block"),
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_terms_and_gradient_are_those_of_the_definition(vocab, dtype):
    target, draft = logits(vocab, dtype)
    weights = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.0, 2.0]], device=DEVICE)
    wide = draft.float().clone().requires_grad_()
    naive = lk_loss(target.float().log_softmax(-1), wide.log_softmax(-1), weights, **SHARES)
    naive.loss.backward()
    own = draft.clone().requires_grad_()
    fused = lk_of_rows(*lk_triton.lk_rows(target, own), weights, **SHARES)
    fused.loss.backward()
    # float32 sums over the vocabulary in another order
    torch.testing.assert_close(fused.alpha_rows, naive.alpha_rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.kl, naive.kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.loss, naive.loss, rtol=1e-5, atol=1e-6)
    # a gradient in bfloat16 has eight significant bits
    limits = {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    assert own.grad.dtype == dtype and wide.grad.abs().max() > 1e-4
    torch.testing.assert_close(own.grad.float(), wide.grad, **limits)


@pytest.mark.parametrize("vocab", VOCABS)
def test_log_sums_are_those_of_the_definition(vocab):
    target, _ = logits(vocab, torch.bfloat16, seed=1)
    torch.testing.assert_close(lk_triton.row_lse(target), target.float().logsumexp(-1), rtol=1e-6, atol=1e-5)
