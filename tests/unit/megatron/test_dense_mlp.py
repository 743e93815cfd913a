"""Between a dense MLP's linears nothing is kept for the backward but what its gradient is made of."""

from types import SimpleNamespace

import torch
from torch import Tensor

from qarl_nemo.layers import engine_rounding
from support.needs import MEGATRON

pytestmark = MEGATRON
TOKENS, INNER = 12, 40


def kept_bytes(hidden: Tensor) -> tuple[int, Tensor]:
    """Bytes that are saved for the backward between two linears that do nothing, and the MLP's output."""
    from qarl_nemo.megatron.dense_mlp import AlignedMLP

    mlp = SimpleNamespace(linear_fc1=lambda x: (x * 1, None), linear_fc2=lambda x: (x, None))
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, _ = AlignedMLP.forward(mlp, hidden)
    return sum(one.untyped_storage().nbytes() for one in kept.values()), out


def test_gate_and_up_alone_are_kept_where_kernels_run(monkeypatch):
    hidden = torch.randn(TOKENS, 1, 2 * INNER, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    plain, expected = kept_bytes(hidden)
    monkeypatch.setattr(engine_rounding, "runs_kernels", lambda _: True)
    kept, out = kept_bytes(hidden)
    assert kept == hidden.nbytes
    assert plain > kept
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)
    # The plain gradient is rounded on the way, this one once.
    torch.testing.assert_close(grad, wanted, rtol=0.02, atol=1e-3)
    assert not torch.allclose(grad.flip(-1), wanted, rtol=0.02, atol=1e-3)
