"""Cutting a model over the ranks with FSDP2, exactly as a layout says. The only room that imports ``torch.distributed.fsdp``.

The order is fixed and each step needs the one before:

    1. build        parameters on meta (``model.build``)
    2. checkpoint   activation checkpointing around each block's forward, so that FSDP's hooks stay outside it
    3. shard        units first, then the root (``fully_shard`` on a parent claims what its children left)
    4. materialise  each rank allocates its shards only; sharding first keeps tied weights tied (facts/failures.md 17)
    5. fill         ``model.initialise`` or ``model.load_weights``
    6. optimizer    last: made earlier it would hold the unsharded parameters (facts/planning.md 7)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from .layout import Layout
    from .model import Unit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of a layout: one dim ``shard``, or ``(replicate, shard)`` where parameters are replicated.

    ``no_shard`` is a shard dim of size 1: public API, the same code and checkpoint format as sharding (facts/feasibility.md 14).

    Collective: makes process groups; every rank must call it.
    """
    if layout.dp_replicate == 1:
        return init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, units: tuple[Unit, ...], layout: Layout, mesh: DeviceMesh) -> nn.Module:
    """Cut ``model`` in place: each unit first, then what is left.

    A unit is what FSDP gathers with one all-gather and frees together, so the peak holds about two units unsharded, the running one and the next.
    The head stays gathered from forward to backward under every strategy: its backward is the first.

    Returns:
        The same module, with meta parameters that are DTensors.
    """
    if layout.activation_checkpointing == "full":
        for unit in units:
            if unit.kind == "block":
                _recompute(model.get_submodule(unit.modules[0]))
    # Both dtypes are written out: what torch does with None changed in 2.15 (facts/planning.md 0.5).
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[layout.param_dtype], reduce_dtype=DTYPES[layout.reduce_dtype])
    reshard = layout.strategy == "full_shard"
    for unit in units:
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard and unit.kind in ("block", "embedding"),
        )
    # The root is needed first in backward: resharding it would gather it twice.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, "token_loss")
    return model


def _recompute(block: nn.Module) -> None:
    """Activation checkpointing by replacing ``forward``: unlike a wrapper module it leaves parameter names alone."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate this rank's shards on ``device`` and move the buffers there with their values; parameters stay uninitialised."""
    buffers = [
        (module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items() if buffer is not None
    ]
    model.to_empty(device=device)
    for module, key, buffer in buffers:
        module._buffers[key] = buffer.to(device)


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients to their owners, or keeps them whole for the next micro-batch."""
    assert isinstance(model, FSDPModule), "the model was sharded"
    model.set_requires_gradient_sync(sync)


def reshard(model: nn.Module) -> None:
    """Free what a forward left gathered (units that stay gathered until backward); needed after evaluation, which has no backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def stored_bytes(model: nn.Module) -> int:
    """Bytes of parameter storage this rank holds between steps, to be held against the plan.

    The storage, not the shard: FSDP2 allocates ``ceil(R / N)`` rows on every rank, of which ``to_local()`` of the last ranks shows fewer.
    """
    parts = (param.to_local() if isinstance(param, DTensor) else param for param in model.parameters())
    return sum(part.untyped_storage().nbytes() for part in parts)
