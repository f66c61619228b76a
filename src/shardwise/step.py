"""The mathematics of one optimizer step: accumulate, reduce, check, clip, update; and evaluation without an update.

The loss of a step is the sum over valid tokens of all micro-batches on all ranks, divided by their number. That number is known on every rank before
the step (the order of rows is a pure function), so it costs no collective, and a rank without valid tokens is no special case.
One all-reduce a step carries the squared gradient norm, every rank's loss and the wish to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from . import optim, sharding
from .errors import NotFinite
from .model import attention

if TYPE_CHECKING:
    from .data import Batch, Mixture, PackedSet


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step.

    Attributes:
        loss: Mean over the step's valid tokens of all ranks, before the update.
        grad_norm: Global 2-norm before clipping.
        stop: Some rank was asked to stop (SIGTERM).
    """

    loss: float
    grad_norm: float
    stop: bool


def rows_of(step_ids: Iterable[int], rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    """The rows of this rank in each micro-batch of a global batch: ``grad_accum`` lists of ``micro_batch`` row ids.

    Micro-batch m of rank r takes places ``(m * world_size + r) * micro_batch`` onwards, so that the ranks together read the global batch in order.
    """
    ids, stride = [int(i) for i in step_ids], world_size * micro_batch
    return [ids[start + rank * micro_batch : start + (rank + 1) * micro_batch] for start in range(0, len(ids), stride)]


def to_device(batch: Batch, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], attention.Borders]:
    """``(input_ids, position_ids, labels)``, int64 ``[B, S]`` on the device, and the borders of the documents."""
    host = [torch.from_numpy(array) for array in (batch.input_ids, batch.position_ids, batch.labels)]
    docs = attention.borders(host[1], device)
    moved = [tensor.to(device, non_blocking=True) for tensor in host]
    return (moved[0], moved[1], moved[2]), docs


def accumulate(
    model: Any, data: Mixture, rows: list[list[int]], global_tokens: int, grad_sync: str, device: torch.device
) -> torch.Tensor:
    """Forward and backward of every micro-batch; gradients end up averaged over ranks such that they are those of the step's mean loss.

    FSDP divides the summed gradients by the world size, so the loss is multiplied by it: ``loss_sum * world / global_tokens``.

    Args:
        global_tokens: Valid tokens of the whole step on all ranks.
        grad_sync: ``each`` reduces gradients after every micro-batch, ``last`` after the last one only.

    Returns:
        0-d fp64: this rank's loss sum.

    Collective: FSDP's gathers and reductions; every rank must call it with as many micro-batches.
    """
    scale = dist.get_world_size() / max(1, global_tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, ids in enumerate(rows):
        sharding.set_gradient_sync(model, grad_sync == "each" or index == len(rows) - 1)
        inputs, docs = to_device(data.rows(ids), device)
        attention.set_borders(docs)
        loss_sum = model.token_loss(*inputs)
        total += loss_sum.detach()
        (loss_sum * scale).backward()
    return total


def reduce_and_check(
    params: Sequence[torch.Tensor],
    loss_sum: torch.Tensor,
    global_tokens: int,
    wants_stop: bool,
    *,
    step: int,
    rows: list[list[int]],
    find_rank: Callable[[], str],
) -> StepResult:
    """One all-reduce of norm, losses and stop flag, and a refusal of what is not finite, before it reaches the weights.

    Args:
        find_rank: Called on every rank when the gradient alone is not finite; collective; says where it began.

    Raises:
        NotFinite: With step, rank and rows, the same on all ranks.

    Collective: one all-reduce of ``world + 2`` fp64 numbers; waits for the device.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = torch.zeros(world + 2, dtype=torch.float64, device=loss_sum.device)
    parts[0] = optim.local_square_sum(params)
    parts[1] = float(wants_stop)
    parts[2 + rank] = loss_sum
    dist.all_reduce(parts)
    square, stop, *losses = parts.tolist()
    norm = math.sqrt(square) if square >= 0 and math.isfinite(square) else square
    bad = [r for r, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad or not math.isfinite(square):
        raise _not_finite(step, losses, norm, bad, rows, find_rank)
    return StepResult(sum(losses) / max(1, global_tokens), norm, stop > 0)


def _not_finite(
    step: int, losses: list[float], norm: float, bad: list[int], rows: list[list[int]], find_rank: Callable[[], str]
) -> NotFinite:
    everyone: list[list[list[int]]] = [[] for _ in losses]
    dist.all_gather_object(everyone, rows)
    if bad:
        rank = bad[0]
        what = f"loss is {losses[rank]} in step {step} on rank {rank}"
        facts = [("batch", f"rows {', '.join(str(row) for micro in everyone[rank] for row in micro)} of the training data")]
    else:
        what = f"gradient norm is {norm} in step {step}, every loss is finite"
        facts = [("began", find_rank())]
    return NotFinite(
        what,
        lines=facts,
        why="the update was not made: the weights are those before this step, and\nnothing of it was saved",
        common=True,
    )


def evaluate(model: Any, data: PackedSet, micro_batch: int, device: torch.device) -> float:
    """Mean loss over every valid token of ``data``, the same on all ranks.

    Collective: FSDP's gathers, as many on every rank, and one all-reduce.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    stride = world * micro_batch
    order = [*range(data.num_rows), *[-1] * (-data.num_rows % stride)]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for ids in rows_of(order, rank, world, micro_batch):
            batch = data.rows(ids)
            inputs, docs = to_device(batch, device)
            attention.set_borders(docs)
            total[0] += model.token_loss(*inputs)
            total[1] += batch.num_valid
    sharding.reshard(model)
    model.train(was_training)
    dist.all_reduce(total)
    return float(total[0] / total[1].clamp_min(1))


def find_not_finite(model: nn.Module, blocks: Sequence[str], again: Callable[[], object]) -> str:
    """Run the micro-batches once more and say on which ranks, and at which block's output, a gradient first stops being finite.

    Collective: repeats the step's forward and backward, then gathers one string a rank. Only called on the way out.
    """
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            if not seen and any(g is not None and not torch.isfinite(g).all() for g in grad_output):
                seen.append(name)

        return hook

    handles = [model.get_submodule(name).register_full_backward_hook(watch(name)) for name in blocks]
    try:
        model.zero_grad(set_to_none=True)
        again()
    finally:
        for handle in handles:
            handle.remove()
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, seen[0] if seen else "")
    found = [f"rank {rank}, gradient at the output of `{name}`" for rank, name in enumerate(everyone) if name]
    return "\n".join(found) or "in no rank's own backward: the sum over ranks or a weight's gradient overflows"
