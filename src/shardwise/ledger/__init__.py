"""Bytes of one rank, by row and phase: pure arithmetic over a model's shapes and a simulation of FSDP2's schedule. Imports no torch.

The simulation walks the events of one step (``spec.Point``) and keeps FSDP2's own buffers beside what the trace found between events:

    pre_forward    copy-in (1/W, only if cast) + all-gather output (1 G) [+ gloo's own copy, 1 G]; then the previous group's output is let go and the
                   parameters are copied out (1 G); this output stays until the next group's copy-out
    post_forward   parameters freed where the unit reshards; the root lets the last all-gather output go
    pre_backward   copy-out (1 G), output freed at once; then the group before it in forward order is gathered (prefetch) and waits
    post_backward  parameters freed; the previous reduce-scatter input let go; new input (b_r/b_g G) filled from the gradients, which are then freed;
                   reduced shard (1/W) [+ gloo's clone of the input and 2 MiB of ring segments]; the input stays until the next group's
    final          the same for groups whose inputs need no gradient (root, embedding, a tied group)

Letters: G bytes of a unit in the compute dtype, W shard degree, b_r / b_g bytes of an element in the reduce / gradient dtype.
Source: torch 2.15 ``_fsdp_param_group.py``, ``_fsdp_collectives.py``, ``_fsdp_state.py`` (read); gloo's copies: ``ProcessGroupGloo`` measured with
livebytes, one operator at a time (all-gather + its output, reduce-scatter + its input + 2 MiB, all-reduce + 2 MiB).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from ..layout import Layout
from ..spec import BYTES, ROWS, ModelSpec, UnitSpec
from .steps import Step, expand

__all__ = ["Peak", "Step", "expand", "moved_bytes", "phases", "recomputed_flops", "shard_numel"]

RING_BYTES = 2 * 2**20  # gloo's ring reduces in two segments of at most 1 MiB. Source: measured, torch 2.15
_ROW = {name: index for index, name in enumerate(ROWS)}
_PARAMS, _GRADS, _STATE, _UNSHARDED, _WHOLE_GRADS, _GATHER, _SCATTER, _GLOO = range(8)
_TEMP = _ROW["temporaries"]


def shard_numel(shape: tuple[int, ...], ways: int) -> int:
    """Elements of one parameter that each rank stores, padding included.

    FSDP2 cuts dim 0 into equal pieces and pads the last ones, so every rank pays for the largest piece:

        W[R_X, ...]  ->  ceil(R / X) * prod(rest)

    Source: torch 2.15 ``_fsdp_param.py`` (pads to the 0th chunk).
    """
    rows, *rest = shape
    return ceil(rows / ways) * prod(rest)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one unit under one layout; see the module's legend."""

    shard: int
    whole: int
    copy_in: int
    scatter: int
    reduced: int
    grads: int
    held_grads: int
    largest_grad: int
    pack: int
    pack_held: int
    cast: int
    resharded: bool


def _sizes(unit: UnitSpec, layout: Layout) -> _Sizes:
    ways, compute, reduce = layout.dp_shard, BYTES[layout.param_dtype], BYTES[layout.reduce_dtype]
    shards = [shard_numel(shape, ways) for shape in unit.shapes]
    numels = [prod(shape) for shape in unit.shapes]
    padded = sum(shards) * ways
    # chunk_cat copies every gradient whose rows do not divide evenly (all at once), and where it casts one gradient at a time.
    # Source: measured with livebytes on torch 2.15's fsdp::chunk_cat_mixed_dtype (CPU), W = 1 to 8.
    uneven = sum(shard * ways for shard, shape in zip(shards, unit.shapes, strict=True) if shape[0] % ways)
    casting = max(shards, default=0) * ways * compute if compute != reduce else 0
    done = 0
    cast = 0
    for numel in numels:  # shard degree 1: each parameter is cast, copied into place, and the cast is dropped
        cast = max(cast, done + 2 * numel * compute if compute != 4 else 0)
        done += numel * compute
    return _Sizes(
        shard=sum(shards) * 4,
        whole=padded * compute,
        copy_in=sum(shards) * compute if compute != 4 else 0,
        scatter=padded * reduce,
        reduced=sum(shards) * reduce,
        grads=sum(numels) * compute,
        held_grads=sum(numels) * reduce,
        largest_grad=max(numels, default=0) * compute,
        pack=uneven * compute + casting,
        pack_held=uneven * reduce,
        cast=max(0, cast - done),
        resharded=layout.strategy == "full_shard" and unit.kind in ("block", "embedding"),
    )


@dataclass(frozen=True)
class Peak:
    """The worst moment of a phase: total bytes and bytes by row index."""

    total: int
    rows: tuple[int, ...]

    def by_name(self) -> dict[str, int]:
        return {name: self.rows[index] for index, name in enumerate(ROWS) if self.rows[index]}


def _plus(peak: Peak, row: int, size: int) -> Peak:
    rows = list(peak.rows)
    rows[row] += size
    return Peak(peak.total + size, tuple(rows))


def phases(
    model: ModelSpec, steps: tuple[Step, ...], layout: Layout, kind: str, *, made_whole: int = 0, kernel_bytes: int = 0
) -> dict[str, Peak]:
    """Peak of each phase on the fullest rank (rank 0).

    Args:
        steps: ``expand`` of a trace made with this layout's micro-batch, dtype, attention and activation checkpointing.
        kind: ``cpu`` adds what gloo allocates and counts the host's copies too.
        made_whole: Bytes of the largest part of the model that is filled whole on the host before its shard is kept.
        kernel_bytes: ``Trace.kernel_bytes``; they are counted from the first step on, in ``temporaries``.

    Returns:
        ``load``, ``forward``, ``loss``, ``backward``, ``optimizer``, ``first_step`` (no optimizer state until its end) and ``save``.
    """
    return _Simulation(model, steps, layout, kind == "cpu").run(made_whole, kernel_bytes)


class _Simulation:
    """FSDP2's buffers over one micro-batch: the last of a step, which holds most."""

    def __init__(self, model: ModelSpec, steps: tuple[Step, ...], layout: Layout, gloo: bool) -> None:
        self.steps, self.layout, self.gloo = steps, layout, gloo
        sizes = {
            id(unit.shapes): _cached_sizes(unit.shapes, unit.kind, layout)
            for unit in {id(u.shapes): u for u in model.units}.values()
        }
        self.sizes = [sizes[id(unit.shapes)] for unit in model.units]
        self.root = len(model.units) - 1
        self.gathered = layout.dp_shard > 1
        self.accumulates = layout.grad_accum > 1
        self.held = self.accumulates and layout.grad_sync == "last"
        self.rows = [0] * len(ROWS)
        self.rows[_PARAMS] = sum(size.shard for size in self.sizes)
        grad_shards = sum(size.shard for size in self.sizes)  # sharded gradients have the masters' dtype
        self.rows[_GRADS] = grad_shards if self.accumulates and not self.held else 0
        self.rows[_WHOLE_GRADS] = sum(size.held_grads for size in self.sizes) if self.held else 0
        self.grad_shards = grad_shards
        self.total = sum(self.rows)
        self.unsharded: set[int] = set()
        self.pending: set[int] = set()
        self.kept_gather = self.kept_scatter = 0
        self.order: list[int] = []
        self.finished: set[int] = set()
        self.phase = "forward"
        self.best: dict[str, Peak] = {}
        self.best_total = {"forward": 0, "loss": 0, "backward": 0}

    def run(self, made_whole: int, kernel_bytes: int) -> dict[str, Peak]:
        self._walk()
        params, state = self.rows[_PARAMS], 2 * self.rows[_PARAMS]
        stepping = self._rest({_PARAMS: params, _GRADS: self.grad_shards, _STATE: state})
        without_state = max(self.best.values(), key=lambda peak: peak.total)
        steady = {name: _plus(peak, _STATE, state) for name, peak in self.best.items()}
        load = self._rest({_PARAMS: params, _TEMP: made_whole if self.gloo else 0})
        running = {
            **steady,
            "optimizer": stepping,
            "first_step": max(without_state, stepping, key=lambda peak: peak.total),
            "save": self._rest({_PARAMS: params, _STATE: state}),
        }
        return {"load": load, **{name: _plus(peak, _TEMP, kernel_bytes) for name, peak in running.items()}}

    @staticmethod
    def _rest(rows: dict[int, int]) -> Peak:
        vector = [0] * len(ROWS)
        for row, size in rows.items():
            vector[row] = size
        return Peak(sum(vector), tuple(vector))

    def _add(self, row: int, size: int) -> None:
        self.rows[row] += size
        self.total += size

    def _check(
        self, traced: tuple[int, ...], traced_total: int, row: int = _TEMP, extra: int = 0, second: int = _TEMP, more: int = 0
    ) -> None:
        """Compare this moment, with ``extra`` bytes in ``row`` and ``more`` in ``second``, with the phase's worst so far."""
        total = self.total + traced_total + extra + more
        if total > self.best_total[self.phase]:
            rows = [a + b for a, b in zip(self.rows, traced, strict=True)]
            rows[row] += extra
            rows[second] += more
            self.best_total[self.phase] = total
            self.best[self.phase] = Peak(total, tuple(rows))

    def _walk(self) -> None:
        before = earlier = list(self.rows)
        for step in self.steps:
            if step.event == "jump":
                # ``before`` is the state at the start of the last block, ``earlier`` at the start of the one before it.
                change = [(a - b) * step.skip for a, b in zip(before, earlier, strict=True)]
                self.rows = [a + b for a, b in zip(self.rows, change, strict=True)]
                self.total = sum(self.rows)
                continue
            if step.event in ("pre_forward", "pre_backward"):
                earlier, before = before, list(self.rows)
            getattr(self, "_" + step.event)(step)
            self._window(step)

    def _window(self, step: Step) -> None:
        peak, total = step.peak, step.peak_total
        if self.held and self.phase == "backward" and peak[_WHOLE_GRADS]:
            # Each gradient is added to the one kept from earlier micro-batches and dropped: one of them lives at a time.
            one = min(peak[_WHOLE_GRADS], self.sizes[step.unit].largest_grad)
            total += one - peak[_WHOLE_GRADS]
            peak = (*peak[:_WHOLE_GRADS], one, *peak[_WHOLE_GRADS + 1 :])
        self._check(peak, total)

    def _gather(self, unit: int, step: Step) -> None:
        size = self.sizes[unit]
        if not self.gathered:
            return
        self._add(_GATHER, size.whole)
        self._check(step.live, step.live_total, _GATHER, size.copy_in, _GLOO, size.whole if self.gloo else 0)

    def _copy_out(self, unit: int, step: Step, keep: bool) -> None:
        size = self.sizes[unit]
        if keep:
            self._let_gather_go()
        self._add(_UNSHARDED, size.whole)
        self._check(step.live, step.live_total, _TEMP, 0 if self.gathered else size.cast)
        if self.gathered:
            if keep:
                self.kept_gather = size.whole
            else:
                self._add(_GATHER, -size.whole)
        self.unsharded.add(unit)

    def _let_gather_go(self) -> None:
        self._add(_GATHER, -self.kept_gather)
        self.kept_gather = 0

    def _reshard(self, unit: int) -> None:
        if unit in self.unsharded:
            self.unsharded.discard(unit)
            self._add(_UNSHARDED, -self.sizes[unit].whole)

    def _pre_forward(self, step: Step) -> None:
        self._gather(step.unit, step)
        self._copy_out(step.unit, step, keep=True)

    def _loss(self, step: Step) -> None:
        self.phase = "loss"

    def _post_forward(self, step: Step) -> None:
        if self.sizes[step.unit].resharded:
            self._reshard(step.unit)
        self.order.append(step.unit)
        if step.unit == self.root:
            self._let_gather_go()

    def _pre_backward(self, step: Step) -> None:
        self.phase = "backward"
        unit = step.unit
        if unit not in self.unsharded:
            if unit not in self.pending:
                self._gather(unit, step)
            self.pending.discard(unit)
            self._copy_out(unit, step, keep=False)
        place = len(self.order) - 1 - self.order[::-1].index(unit)
        if place > 0:
            target = self.order[place - 1]
            if target not in self.unsharded and target not in self.pending:
                self.pending.add(target)
                self._gather(target, step)

    def _post_backward(self, step: Step) -> None:
        self._reduce(step.unit, step, step.live)

    def _reduce(self, unit: int, step: Step, live: tuple[int, ...]) -> None:
        size = self.sizes[unit]
        self.finished.add(unit)
        self._reshard(unit)
        self._add(_SCATTER, -self.kept_scatter)
        self.kept_scatter = 0
        if not size.scatter:
            return
        self._add(_SCATTER, size.scatter)
        in_trace = size.grads if not self.held else 0
        live_total = sum(live)
        if self.held:
            live = (*live[:_WHOLE_GRADS], 0, *live[_WHOLE_GRADS + 1 :])
            live_total = sum(live)
        # CUDA's chunk_cat pads and casts while it copies.
        pack = (size.pack_held if self.held else size.pack) if self.gloo else 0
        self._check(live, live_total, _TEMP, pack)
        if self.held:
            self._add(_WHOLE_GRADS, -size.held_grads)
        after = (*live[:_WHOLE_GRADS], live[_WHOLE_GRADS] - in_trace, *live[_WHOLE_GRADS + 1 :])
        ring = RING_BYTES if self.gloo else 0
        clone = size.scatter + ring if self.gloo and self.gathered else 0
        if not self.gathered and self.layout.dp_replicate > 1:
            clone = ring  # all-reduce works in place
        self._check(after, live_total - in_trace, _SCATTER, size.reduced, _GLOO, min(clone, 2 * size.scatter))
        self.kept_scatter = size.scatter
        if self.rows[_GRADS] < self.grad_shards:
            self._add(_GRADS, size.shard)

    def _final(self, step: Step) -> None:
        live = step.live
        for unit in (self.root, *(unit for unit in range(self.root) if unit not in self.finished)):
            if unit not in self.finished:
                self._reduce(unit, step, live)
                if not self.held:
                    grads = self.sizes[unit].grads
                    live = (*live[:_WHOLE_GRADS], live[_WHOLE_GRADS] - grads, *live[_WHOLE_GRADS + 1 :])
        self._add(_SCATTER, -self.kept_scatter)
        self.kept_scatter = 0


@lru_cache(maxsize=4096)
def _cached_sizes(shapes: tuple[tuple[int, ...], ...], kind: str, layout: Layout) -> _Sizes:
    return _sizes(UnitSpec("", kind, shapes), layout)  # type: ignore[arg-type]


def moved_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes a rank sends in one optimizer step, ring collectives: all-gathers, reduce-scatters and, where replicated, all-reduces.

        all-gather or reduce-scatter of n bytes over W ranks: n (W - 1) / W;  all-reduce over R: 2 n (R - 1) / R

    Source: facts/planning.md 4.9.
    """
    reductions = 1 if layout.grad_sync == "last" else layout.grad_accum
    share = (layout.dp_shard - 1) / layout.dp_shard
    between = 2 * (layout.dp_replicate - 1) / layout.dp_replicate
    total = 0.0
    for unit in model.units:
        size = _cached_sizes(unit.shapes, unit.kind, layout)
        gathers = layout.grad_accum * (2 if size.resharded else 1)
        total += share * (gathers * size.whole + reductions * size.scatter) + between * reductions * size.reduced
    return round(total)


def recomputed_flops(model: ModelSpec, layout: Layout, seq_len: int) -> float:
    """FLOPs a rank does again in backward in one optimizer step: each block's forward, 2 a parameter and token.

    Attention's own products are left out: they are the same share in every layout of a plan.
    """
    if layout.activation_checkpointing == "none":
        return 0.0
    return 2.0 * model.block_params * layout.micro_batch * layout.grad_accum * seq_len
