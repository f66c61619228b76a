"""A layout: every choice that changes bytes or mathematics, complete, so that a run can be made from what a plan stores. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

CHUNK_BYTES = 32 * 2**20  # fp32 logits the head makes at a time; small beside a block's activations, large enough for a matmul
MIN_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Layout:
    """How one model is cut and run.

    Attributes:
        dp_shard, dp_replicate: The mesh; their product is ``world_size``. ``no_shard`` is a shard dim of 1.
        micro_batch, grad_accum: Their product times ``world_size`` is the global batch.
        grad_sync: ``each`` micro-batch reduces its gradients, or only the ``last`` of a step.
        loss_chunk_tokens: Tokens the head handles at a time.
    """

    strategy: Literal["full_shard", "shard_grad_op", "no_shard"]
    wrap: str
    world_size: int
    dp_shard: int
    dp_replicate: int
    master_dtype: Literal["fp32"]
    param_dtype: Literal["fp32", "bf16"]
    reduce_dtype: Literal["fp32", "bf16"]
    activation_checkpointing: Literal["none", "full"]
    micro_batch: int
    grad_accum: int
    grad_sync: Literal["each", "last"]
    offload: Literal["none"]
    loss: Literal["chunked"]
    loss_chunk_tokens: int
    optimizer: Literal["adamw"]
    optimizer_impl: Literal["fused"]
    attention: Literal["sdpa", "document"]
    compile: bool

    def __post_init__(self) -> None:
        assert self.dp_shard * self.dp_replicate == self.world_size, "the mesh holds every rank once"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Layout:
        """Raises ValueError where a key is missing or unknown: nothing is defaulted on reading."""
        names = {field.name for field in fields(Layout)}
        if names != set(record):
            raise ValueError(f"layout keys missing: {sorted(names - set(record))}, unknown: {sorted(set(record) - names)}")
        return Layout(**record)


def mesh_of(strategy: str, world_size: int) -> tuple[int, int]:
    """``(dp_shard, dp_replicate)``."""
    return (1, world_size) if strategy == "no_shard" else (world_size, 1)


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose fp32 logits fill at most 32 MiB, at least 64.

    C = max(64, floor(32 MiB / (4 V)))
    """
    return max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size))
