"""The chunked loss is the plain loss: value, gradients, every dtype, every chunk size; and logits are never whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.loss import LossHead, chunked_cross_entropy


def plain(hidden, weight, bias, labels):
    return F.cross_entropy(F.linear(hidden, weight, bias).double(), labels, ignore_index=-100, reduction="sum")


@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 60),
    chunk=st.integers(1, 50),
    ignored=st.floats(0, 1),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_value_and_gradients_equal_plain_cross_entropy_in_fp32(tokens, vocab, chunk, ignored, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator)
    weight = torch.randn(vocab, 8, generator=generator)
    bias_V = torch.randn(vocab, generator=generator) if bias else None
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    inputs = [t.clone().requires_grad_() for t in (hidden, weight, bias_V) if t is not None]
    reference = [t.clone().requires_grad_() for t in (hidden, weight, bias_V) if t is not None]
    ours = chunked_cross_entropy(inputs[0], inputs[1], inputs[2] if bias else None, labels, chunk)
    theirs = plain(reference[0], reference[1], reference[2] if bias else None, labels)
    assert ours.dtype == torch.float64
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-4)
    (ours * 0.37).backward()
    (theirs * 0.37).backward()
    for mine, other in zip(inputs, reference, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_the_bf16_value_is_the_sum_of_fp32_losses_not_a_bf16_sum():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 32).bfloat16(), torch.randn(512, 32).bfloat16()
    labels = torch.randint(0, 512, (4000,))
    expected = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none").double().sum()
    assert chunked_cross_entropy(hidden, weight, None, labels, 300).item() == pytest.approx(expected.item(), rel=1e-7)


def test_in_bf16_the_scale_of_the_loss_is_not_rounded_to_bf16():
    torch.manual_seed(0)
    hidden, weight = torch.randn(500, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    labels = torch.randint(0, 64, (500,))
    grads = []
    for scale in (1.0, 2 / 1021):  # 2/1021 is 0.3 % away from the nearest bf16
        inputs = hidden.clone().requires_grad_()
        (chunked_cross_entropy(inputs, weight, None, labels, 100) * scale).backward()
        grads.append(inputs.grad.double())
    ratio = (grads[1] * grads[0]).sum() / (grads[0] ** 2).sum()
    assert float(ratio) == pytest.approx(2 / 1021, rel=2e-4)


def test_a_batch_without_labels_costs_nothing_and_gives_zero_gradients():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, None, torch.full((6,), -100), 4)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


class _Largest(TorchDispatchMode):
    """Notes the largest tensor any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_logits_are_never_held_whole():
    head = LossHead(16, 5000, bias=False)
    head.chunk_tokens = 32
    hidden = torch.randn(1, 400, 16, requires_grad=True)
    with _Largest() as largest:
        head(hidden, torch.randint(0, 5000, (1, 400))).backward()
    assert largest.numel == 32 * 5000 < 400 * 5000


def test_without_labels_the_head_is_the_linear_layer_it_replaced():
    head = LossHead(8, 11)
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(head(hidden), F.linear(hidden, head.weight, head.bias))
