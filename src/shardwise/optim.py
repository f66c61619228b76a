"""AdamW with decay groups, the learning-rate schedule, and the gradient norm over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from .config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the sharded parameters: weight decay for matrices, none for vectors (norms, biases).

    ``fused`` on every device: it needs no temporaries, where ``foreach`` needs one more copy of the shards (facts/planning.md 4.1).
    """
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Below 1 a share of all steps, else a number of steps."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)


def lr_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of 0-based ``step``: linear warm-up, then cosine, linear or constant down to ``min_lr * lr`` in the last step.

    A pure function of the step, so that a resumed run cannot have another (facts/failures.md 70).
    """
    warm = warmup_steps(config.warmup, total_steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warm + 1) / max(1, total_steps - warm))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr + (1 - config.min_lr) * left)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def local_square_sum(params: Iterable[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the squared gradient norm: summed over all ranks it is the whole. 0-d fp64: a square overflows fp32.

    A gradient that several ranks hold alike counts 1/copies on each, so one plain sum is right for every mesh and for plain tensors
    beside DTensors, where torch's own clipping fails (facts/feasibility.md 9).
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            sizes = [grad.device_mesh.size(dim) for dim, place in enumerate(grad.placements) if isinstance(place, Replicate)]
            by_copies.setdefault(math.prod(sizes), []).append(grad.to_local())
        else:
            world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            by_copies.setdefault(world, []).append(grad)
    sums = [nn.utils.get_total_norm(grads).double().square() / copies for copies, grads in by_copies.items()]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def scale_gradients(params: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    for param in params:
        if param.grad is not None:
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            grad.mul_(factor)
