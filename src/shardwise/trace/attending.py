"""Which attention a traced model uses, with documents in its rows, and a stand-in for a kernel that only CUDA has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..model import attention


@contextmanager
def attending(model: Any, path: str, kind: str, micro_batch: int, seq_len: int) -> Iterator[None]:
    """Choose the attention path of a transformers model, with two documents in every row."""
    config = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        yield
        return
    name = "sdpa"
    if path == "document":
        attention.register()
        name = attention.NAME
        if kind == "cuda":
            from transformers import AttentionInterface, AttentionMaskInterface

            name = "shardwise_trace_flash"
            AttentionInterface.register(name, _flash_like)
            AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name
    half = max(1, seq_len // 2)
    spans = tuple((row, a, b) for row in range(micro_batch) for a, b in ((0, half), (half, seq_len)) if a < b)
    before = attention._current
    attention.set_borders(attention.Borders(spans, None, max(half, seq_len - half)))
    try:
        yield
    finally:
        attention._current = before


class _Flash(torch.autograd.Function):
    """Saves and returns what a flash kernel on CUDA does: query, key, value, output and the fp32 log-sum-exp of each query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _flash_like(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    result: torch.Tensor = _Flash.apply(*(t.transpose(1, 2).contiguous() for t in (query, key, value)))
    return result, None
