"""A traced step stretched to the model's real number of blocks, with the middles of equal runs left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import ROWS, ModelSpec, Trace

_ROW = {name: index for index, name in enumerate(ROWS)}
_WHOLE_GRADS = _ROW["grads_unsharded"]
_KEEP = 3  # blocks of an equal run simulated at each end; between them bytes change by the same amount a block


@dataclass(frozen=True)
class Step:
    """One event of a real step, with what the trace says lives around it.

    Attributes:
        unit: Index into ``ModelSpec.units``; -1 for a jump.
        live, peak: Bytes by row index, as in ``spec.Point``.
        live_total, peak_total: Their sums.
        skip: For a jump, how many equal blocks it stands for; the change over the last block is repeated that often.
    """

    event: str
    unit: int
    live: tuple[int, ...]
    peak: tuple[int, ...]
    live_total: int
    peak_total: int
    skip: int = 0


def expand(model: ModelSpec, trace: Trace) -> tuple[Step, ...]:
    """The traced step with as many blocks as the model has, runs of equal blocks shortened to their ends.

    Bytes grow by the same amount with each equal block, so a peak inside a run lies at one of its ends.
    """
    return _Expander(model, trace).run()


class _Expander:
    def __init__(self, model: ModelSpec, trace: Trace) -> None:
        self.model, self.points = model, trace.points
        self.blocks = [index for index, unit in enumerate(model.units) if unit.kind == "block"]
        self.traced = sorted({model.units[index].template for index in self.blocks})
        self.others = {unit.template: index for index, unit in enumerate(model.units) if unit.kind != "block"}
        self.where = {(p.event, p.unit): at for at, p in enumerate(self.points)}
        self.shift = [0] * len(ROWS)
        self.steps: list[Step] = []

    def run(self) -> tuple[Step, ...]:
        seen: set[str] = set()
        for point in self.points:
            if point.unit not in self.traced:
                self._emit(point.event, self.others[point.unit], _vector(point.live), _vector(point.peak))
            elif (direction := "forward" if point.event.endswith("_forward") else "backward") not in seen:
                seen.add(direction)
                self._blocks(direction)
        return tuple(self.steps)

    def _emit(self, event: str, unit: int, live: list[int], peak: list[int]) -> None:
        live_now = tuple(a + b for a, b in zip(live, self.shift, strict=True))
        peak_now = tuple(a + b for a, b in zip(peak, self.shift, strict=True))
        self.steps.append(Step(event, unit, live_now, peak_now, sum(live_now), sum(peak_now)))

    def _blocks(self, direction: str) -> None:
        """All blocks in one direction. ``shift`` carries what the real blocks hold more than the traced ones did at the same place."""
        order = self._shortened(self.blocks if direction == "forward" else self.blocks[::-1])
        tail = self.traced[-1] if direction == "forward" else self.traced[0]
        head = self.traced[0] if direction == "forward" else self.traced[-1]
        begin = self.points[self.where[f"pre_{direction}", head]]
        now = [a + b for a, b in zip(_vector(begin.live), self.shift, strict=True)]
        for place, (index, skip) in enumerate(order):
            template, last = self.model.units[index].template, place == len(order) - 1
            inside = self.points[self.where[f"pre_{direction}", template]]
            after = self._after(direction, template, template == tail)
            if skip:
                now = [a + (b - c) * skip for a, b, c in zip(now, after, _vector(inside.live), strict=True)]
                self.steps.append(Step("jump", -1, (), (), 0, 0, skip))
                continue
            self.shift = [a - b for a, b in zip(now, _vector(inside.live), strict=True)]
            self._emit(inside.event, index, _vector(inside.live), _vector(inside.peak))
            if (end := self.where.get((f"post_{direction}", template))) is not None:
                # What follows the last traced block (the final norm; in backward the embedding's side) follows the last real one only.
                gap = self.points[end]
                self._emit(gap.event, index, _vector(gap.live), _vector(gap.peak if last or template != tail else gap.live))
            now = [a + b for a, b in zip(after, self.shift, strict=True)]
        self.shift = [a - b for a, b in zip(now, self._after(direction, tail, True), strict=True)]

    def _after(self, direction: str, template: int, last: bool) -> list[int]:
        """What lives when the next block begins, or, behind the last traced one, when it has ended and its gradients are gone."""
        end = self.where.get((f"post_{direction}", template))
        begin = self.where[f"pre_{direction}", template]
        if end is None or not last:
            return _vector(self.points[(begin if end is None else end) + 1].live)
        live = _vector(self.points[end].live)
        if direction == "backward":
            live[_WHOLE_GRADS] -= self._grads(template)
        return live

    def _grads(self, template: int) -> int:
        """Gradient bytes the trace dropped when this block's were complete."""
        at = self.where["post_backward", template]
        before, after = self.points[at].live.get("grads_unsharded", 0), self.points[at + 1].live.get("grads_unsharded", 0)
        return before - after

    def _shortened(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """``(unit, 0)`` for a block that is simulated, ``(unit, n)`` where n blocks equal to it are jumped over."""
        out: list[tuple[int, int]] = []
        units = self.model.units
        start = 0
        while start < len(order):
            end = start
            first = units[order[start]]
            while end < len(order) and (units[order[end]].template, units[order[end]].shapes) == (first.template, first.shapes):
                end += 1
            run = order[start:end]
            if len(run) <= 2 * _KEEP + 1:
                out += [(unit, 0) for unit in run]
            else:
                out += [(unit, 0) for unit in run[:_KEEP]]
                out.append((run[_KEEP], len(run) - 2 * _KEEP))
                out += [(unit, 0) for unit in run[-_KEEP:]]
            start = end
        return out


def _vector(rows: dict[str, int]) -> list[int]:
    out = [0] * len(ROWS)
    for name, size in rows.items():
        out[_ROW[name]] = size
    return out
