"""Cross-entropy that never holds the whole logits: a language model's head that returns its own loss.

Logits of one long batch are larger than the model's activations (12 bytes a token and vocabulary entry with plain cross-entropy), so
the head multiplies, compares and differentiates a few hundred tokens at a time. The loss value is exact in every dtype: each token's loss
is fp32 and the sum is fp64, where torch's own ``linear_cross_entropy`` sums in bf16 (facts: 5 to 79 % off).

Letters: T tokens (batch and sequence flattened), H hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

IGNORE = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over the chunks, so that no chunk is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        chunk_tokens: int,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = hidden_TH.new_zeros((), dtype=torch.float64)
        d_hidden = torch.empty_like(hidden_TH) if needs_hidden else None
        # fp32: each chunk adds to it, and bf16 would lose what the last chunks add.
        d_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        for start in range(0, labels_T.numel(), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            hidden, labels = hidden_TH[part], labels_T[part]
            logits = F.linear(hidden, weight_VH, bias_V).float()
            valid = labels != IGNORE
            target = labels.clamp_min(0).unsqueeze(1)
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            picked = logits.gather(1, target)
            total += ((log_sum - picked).squeeze(1) * valid).sum(dtype=torch.float64)
            if d_hidden is None and d_weight is None:
                continue
            grad = logits.sub_(log_sum).exp_()  # softmax; the logits are not needed again
            grad.scatter_add_(1, target, torch.full_like(picked, -1.0))
            grad *= valid.unsqueeze(1)
            if d_bias is not None:
                d_bias += grad.sum(0)
            grad = grad.to(weight_VH.dtype)
            if d_hidden is not None:
                torch.mm(grad, weight_VH, out=d_hidden[part])
            if d_weight is not None:
                if weight_VH.dtype == torch.float32:
                    d_weight.addmm_(grad.t(), hidden)
                else:
                    d_weight += grad.t() @ hidden
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = weight_VH.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scale = grads[0].float()
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_hidden is None else _scale_(d_hidden, scale),
            None if d_weight is None else d_weight.mul_(scale).to(weight_dtype),
            None if d_bias is None else d_bias.mul_(scale).to(bias_dtype),
            None,
            None,
        )


def _scale_(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply in place with fp32 arithmetic: a scale rounded to bf16 would bend every gradient below the head by up to 0.4 %."""
    if rows.dtype == torch.float32:
        return rows.mul_(scale)
    for part in torch.split(rows, 4096):
        part.copy_(part.float() * scale)
    return rows


def chunked_cross_entropy(
    hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, labels: torch.Tensor, chunk_tokens: int
) -> torch.Tensor:
    """Sum over tokens of the cross-entropy of ``hidden @ weight.T + bias`` against ``labels``.

    Args:
        hidden: ``[..., H]``, any float dtype; the product is made in this dtype, all after it in fp32.
        labels: ``[...]`` int64; -100 is left out. Not shifted here.
        chunk_tokens: C; peak extra memory is about ``3 * C * V * 4`` bytes and ``V * H * 4`` for the weight's gradient.

    Returns:
        0-d fp64 sum, 0 where no label is valid. Can be differentiated once.
    """
    result: torch.Tensor = _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight_VH, bias_V, labels.reshape(-1), chunk_tokens
    )
    return result


class LossHead(nn.Linear):
    """An output head that owns its weight and the loss, so that FSDP gathers the weight exactly for both.

    Takes the place of a model's ``nn.Linear`` head by assignment of ``__class__``: the parameter's name stays. A head's weight used outside its
    own forward is what FSDP cannot see (facts/failures.md, 5).
    """

    chunk_tokens: int = 1024

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[..., V]`` without labels, the 0-d fp64 loss sum with them."""
        if labels is None:
            return super().forward(hidden)
        return chunked_cross_entropy(hidden, self.weight, self.bias, labels, self.chunk_tokens)
