"""Attention over packed rows whose documents cannot see each other, on the path that is fast on the device.

Registered with transformers as ``shardwise_document``. No S x S mask is built: the borders come from the position ids (a document starts where they
return to 0), and each document attends to itself alone. On CUDA in bf16 or fp16 that is one call of torch's variable-length flash attention;
elsewhere one causal ``scaled_dot_product_attention`` a document, which on CPU runs the flash kernel over S*L instead of S*S pairs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

NAME = "shardwise_document"


@dataclass(frozen=True)
class Borders:
    """Documents of one micro-batch.

    Attributes:
        spans: ``(row, start, end)`` of every document, in order.
        cumulative: int32 ``[documents + 1]`` on the device: where each starts when rows are laid end to end. None off CUDA.
        longest: Tokens of the longest document.
    """

    spans: tuple[tuple[int, int, int], ...]
    cumulative: torch.Tensor | None
    longest: int


# Module level on purpose: recomputation in backward runs on autograd's own threads on CUDA, where a context variable would be empty.
_current: Borders | None = None


def borders(position_ids_BS: torch.Tensor, device: torch.device) -> Borders:
    """Find the documents in position ids that are still on the host (no device sync)."""
    starts = (position_ids_BS == 0).tolist()
    length = position_ids_BS.shape[1]
    spans: list[tuple[int, int, int]] = []
    for row, flags in enumerate(starts):
        begins = [at for at, flag in enumerate(flags) if flag or at == 0]
        spans += [(row, a, b) for a, b in zip(begins, [*begins[1:], length], strict=True)]
    cumulative = None
    if device.type == "cuda":
        ends = [row * length + end for row, _, end in spans]
        cumulative = torch.tensor([0, *ends], dtype=torch.int32).to(device, non_blocking=True)
    return Borders(tuple(spans), cumulative, max(b - a for _, a, b in spans))


def set_borders(value: Borders) -> None:
    """Say which documents the next forward, and its backward, are about."""
    global _current
    _current = value


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document, in the signature of transformers' attention interface.

    Args:
        query: ``[B, heads, S, D]``; key and value ``[B, kv_heads, S, D]``.

    Returns:
        ``[B, S, heads, D]`` and None (no weights).
    """
    assert _current is not None, "the borders of a micro-batch are set before its forward"
    if sliding_window is not None and _current.longest > sliding_window:
        raise ValueError(f"sliding window {sliding_window} is shorter than a document of {_current.longest} tokens")
    groups = query.shape[1] // key.shape[1]
    if (
        _current.cumulative is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and dropout == 0.0
        and value.shape[-1] == query.shape[-1]
    ):
        return _varlen(query, key, value, _current, scaling, groups), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows: list[list[torch.Tensor]] = [[] for _ in range(query.shape[0])]
    for row, a, b in _current.spans:
        rows[row].append(
            F.scaled_dot_product_attention(
                query[row : row + 1, :, a:b],
                key[row : row + 1, :, a:b],
                value[row : row + 1, :, a:b],
                dropout_p=dropout,
                is_causal=True,
                scale=scaling,
            ).transpose(1, 2)
        )
    return torch.cat([torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in rows], 0), None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, docs: Borders, scaling: float | None, groups: int
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert docs.cumulative is not None, "made on CUDA"
    batch, heads, length, dim = query.shape
    q, k, v = (t.transpose(1, 2).reshape(batch * length, t.shape[1], dim) for t in (query, key, value))
    keywords: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        keywords["enable_gqa"] = True
    elif groups > 1:  # torch below the release that took grouped heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = varlen_attn(q, k, v, docs.cumulative, docs.cumulative, docs.longest, docs.longest, **keywords)
    assert isinstance(out, torch.Tensor), "no auxiliary output was asked for"
    return out.view(batch, length, heads, dim)


def register() -> None:
    """Make ``shardwise_document`` known to transformers. It needs no mask: the mask function returns None."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
