"""Which layouts there are, which come first, and why. Pure decisions over the ledger's numbers; imports no torch.

What ``auto`` may vary leaves the mathematics alone: strategy, activation checkpointing, micro-batch x accumulation at the same global batch, and when
gradients are reduced. Dtypes, sequence length, global batch and the number of ranks are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import UsageError
from .hardware import RESERVED_OVER_ALLOCATED
from .layout import Layout, mesh_of
from .ledger import Peak
from .plan import Candidate, Phase
from .spec import ROWS, Cluster
from .units import bytes_text

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
MAX_MICRO_BATCH = 64  # sequences; larger ones are tried only where the key is fixed


@dataclass(frozen=True)
class Question:
    """What the layouts of one plan share.

    Attributes:
        fixed: Layout keys the user set, by name.
    """

    world_size: int
    global_batch: int
    param_dtype: Literal["fp32", "bf16"]
    reduce_dtype: Literal["fp32", "bf16"]
    attention: Literal["sdpa", "document"]
    loss_chunk_tokens: int
    fixed: Mapping[str, Any]


def micro_batches(question: Question, where: Callable[[str], str] = lambda key: key) -> list[int]:
    """The micro-batches that make the global batch exactly, smallest first.

    Raises:
        UsageError: ``global_batch`` is no multiple of the world, or of the fixed keys; with the nearest that work.
    """
    total, world = question.global_batch, question.world_size
    micro, accum = question.fixed.get("micro_batch"), question.fixed.get("grad_accum")
    if total % world:
        raise UsageError(
            f"global_batch {total} cannot be split evenly over {world} ranks",
            where=where("global_batch"),
            why="every rank handles as many sequences:\nmicro_batch x grad_accum x ranks = global_batch",
            hints=[f"`--set global_batch={n}`" for n in _multiples(total, world)]
            + ["or " + " or ".join(str(n) for n in _near_divisors(total, world)) + f" ranks for {total} sequences"],
        )
    per_rank = total // world
    if micro and accum and micro * accum != per_rank:
        raise UsageError(
            f"micro_batch {micro} x grad_accum {accum} x {world} ranks = {micro * accum * world}, global_batch is {total}",
            where=where("global_batch"),
            hints=[f"`--set global_batch={micro * accum * world}`", "leave `layout.grad_accum` out"],
        )
    for key, value in (("micro_batch", micro), ("grad_accum", accum)):
        if value and per_rank % value:
            near = [
                n
                for n in (
                    max((d for d in _divisors(per_rank) if d < value), default=None),
                    min((d for d in _divisors(per_rank) if d > value), default=None),
                )
                if n
            ]
            raise UsageError(
                f"{key} {value} does not divide the {per_rank} sequences a rank handles in a step",
                where=where(f"layout.{key}"),
                why=f"global_batch {total} over {world} ranks is {per_rank}",
                hints=[f"`--set layout.{key}={n}`" for n in near],
            )
    if micro or accum:
        return [micro or per_rank // accum]  # type: ignore[operator]
    return [n for n in _divisors(per_rank) if n <= MAX_MICRO_BATCH]


def layouts(question: Question, micro_batch: int) -> Iterator[Layout]:
    """Every buildable layout of one micro-batch that agrees with the fixed keys."""
    fixed = question.fixed
    accum = question.global_batch // question.world_size // micro_batch
    strategies: tuple[Any, ...] = (fixed["strategy"],) if fixed.get("strategy") else STRATEGIES
    for strategy in strategies:
        shard, copies = mesh_of(strategy, question.world_size)
        for recompute in [fixed["activation_checkpointing"]] if fixed.get("activation_checkpointing") else ("none", "full"):
            # With one micro-batch a step the two are the same.
            for sync in [fixed["grad_sync"]] if fixed.get("grad_sync") else ("each", "last") if accum > 1 else ("each",):
                yield Layout(
                    strategy=strategy,
                    wrap="auto",
                    world_size=question.world_size,
                    dp_shard=shard,
                    dp_replicate=copies,
                    master_dtype="fp32",
                    param_dtype=question.param_dtype,
                    reduce_dtype=question.reduce_dtype,
                    activation_checkpointing=recompute,
                    micro_batch=micro_batch,
                    grad_accum=accum,
                    grad_sync=sync,
                    offload="none",
                    loss="chunked",
                    loss_chunk_tokens=question.loss_chunk_tokens,
                    optimizer="adamw",
                    optimizer_impl="fused",
                    attention=question.attention,
                    compile=False,
                )


def candidate(
    layout: Layout,
    peaks: Mapping[str, Peak],
    cluster: Cluster,
    margin: float,
    *,
    disk_bytes: int,
    recomputed_flops: float,
    moved_bytes: int,
) -> Candidate:
    """A layout judged: it fits if the upper end of reserved and what lies outside the allocator are within ``(1 - margin)`` of the device."""
    worst = max(peaks, key=lambda name: (peaks[name].total, name != "first_step"))
    allocated = peaks[worst].total
    low, high = (round(allocated * factor) for factor in RESERVED_OVER_ALLOCATED[cluster.kind])
    missing = max(0, high + cluster.outside_bytes - usable_bytes(cluster, margin))
    host = 1 if cluster.kind == "cpu" else 0  # on CPU device memory is host memory
    named = {name: Phase(peak.total, peak.total * host, peak.by_name()) for name, peak in peaks.items()}
    rows = {name: peaks[worst].rows[index] for index, name in enumerate(ROWS)}
    return Candidate(
        layout,
        not missing,
        missing,
        allocated,
        (low, high),
        cluster.device_total_bytes,
        worst,
        rows,
        named,
        disk_bytes,
        recomputed_flops,
        moved_bytes,
    )


def usable_bytes(cluster: Cluster, margin: float) -> int:
    return round(cluster.device_total_bytes * (1 - margin))


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first: fits; no offload; least recomputed FLOPs; gradients reduced each micro-batch; least bytes moved; fewest micro-batches; most room.

    What does not fit is ordered by how little it misses.
    """
    return sorted(candidates, key=_merit)


def _merit(c: Candidate) -> tuple[Any, ...]:
    return (
        not c.fits,
        c.missing_bytes,
        c.layout.offload != "none",
        c.recomputed_flops,
        c.layout.grad_sync != "each",
        c.moved_bytes,
        c.layout.grad_accum,
        c.peak_allocated_bytes,
    )


def chosen(order: Sequence[Candidate]) -> Candidate | None:
    """The first that fits, with the sentence that sets it apart from the next; None where nothing fits."""
    if not order or not order[0].fits:
        return None
    return replace(order[0], why=_why(order))


def short(layout: Layout) -> str:
    """A layout in a few words: ``full_shard, recompute full, 1 x 32``."""
    recompute = f", recompute {layout.activation_checkpointing}" if layout.activation_checkpointing != "none" else ""
    sync = ", sync last" if layout.grad_sync == "last" and layout.grad_accum > 1 else ""
    return f"{layout.strategy}{recompute}, {layout.micro_batch} x {layout.grad_accum}{sync}"


def _why(order: Sequence[Candidate]) -> str:
    best = order[0]
    if len(order) == 1:
        return "the only layout that agrees with the fixed keys"
    other = order[1]
    name = short(other.layout)
    room = other.peak_allocated_bytes - best.peak_allocated_bytes
    beside = f" and takes {bytes_text(abs(room))} {'more' if room > 0 else 'less'}" if room else ""
    if not other.fits:
        return f"the only one that fits; next {name} misses by {bytes_text(other.missing_bytes)}"
    if best.recomputed_flops < other.recomputed_flops:
        return f"recomputes nothing; next {name} recomputes every block{beside}"
    if best.layout.grad_sync != other.layout.grad_sync:
        return f"holds no whole gradients between micro-batches; next {name} does{beside}"
    if best.moved_bytes < other.moved_bytes:
        return f"moves {bytes_text(best.moved_bytes)} a step; next {name} moves {bytes_text(other.moved_bytes)}{beside}"
    if best.layout.grad_accum < other.layout.grad_accum:
        return f"moves as little in fewer micro-batches; next {name} has {other.layout.grad_accum}{beside}"
    return f"the next, {name}, has the same work and traffic{beside}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _multiples(total: int, world: int) -> list[int]:
    below = total // world * world
    return [n for n in (below, below + world) if n > 0]


def _near_divisors(total: int, world: int) -> list[int]:
    below = max((n for n in _divisors(total) if n < world), default=None)
    above = min((n for n in _divisors(total) if n > world), default=None)
    return [n for n in (below, above) if n]
