"""From a run file and a model to a plan, and the plan as a person reads it. trace -> ledger -> choose."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from . import choose, ledger, units
from .choose import Question
from .errors import AnswerIsNo, UsageError
from .layout import chunk_tokens
from .loss import LossHead
from .plan import Candidate, Plan
from .spec import ROWS, Cluster, ModelSpec, digest
from .trace import model_spec, trace_step

if TYPE_CHECKING:
    from .model import Unit
    from .runfile import RunFile

_PARAM_DTYPE: dict[str, Literal["bf16", "fp32"]] = {"bf16-mixed": "bf16", "fp32": "fp32"}


def cache_folder() -> Path:
    """Where traces are kept: XDG_CACHE_HOME/shardwise/traces."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "shardwise" / "traces"


def make_plan(run: RunFile, model: nn.Module, found: Sequence[Unit], *, name: str, cluster: Cluster) -> Plan:
    """Predict every layout of a run and choose.

    Args:
        model: As ``model.build`` makes it: parameters on meta.
        found: ``model.units(model)``.
        name: Of the model, for the screen.

    Raises:
        UsageError: ``global_batch`` cannot be split, fixed keys contradict one another, or the model cannot be traced.
        AnswerIsNo: Nothing fits; with the nearest, and what would, computed.
    """
    return _Planning(run, model, found, name, cluster).plan()


class _Planning:
    def __init__(self, run: RunFile, model: nn.Module, found: Sequence[Unit], name: str, cluster: Cluster) -> None:
        self.run, self.config, self.model, self.found, self.cluster = run, run.config, model, found, cluster
        self.spec: ModelSpec = model_spec(model, found, name)
        layout = self.config.layout
        given = {} if isinstance(layout, str) else layout.model_dump()
        self.fixed: dict[str, Any] = {key: value for key, value in given.items() if value not in (None, "auto")}
        heads = [module for module in model.modules() if isinstance(module, LossHead)]
        self.chunk = chunk_tokens(heads[0].weight.shape[0] if heads else 1)
        self.refused: list[dict[str, Any]] = []

    def question(self, world_size: int, fixed: dict[str, Any], precision: str) -> Question:
        path: Any = fixed.get("attention") or _attention(self.model, self.config.data.seq_len)
        return Question(
            world_size, self.config.global_batch, _PARAM_DTYPE[precision], self.config.reduce_dtype, path, self.chunk, fixed
        )

    def plan(self) -> Plan:
        question = self.question(self.cluster.world_size, self.fixed, self.config.precision)
        order = choose.ranked(self.candidates(question, self.cluster, self.config.data.seq_len))
        best = choose.chosen(order)
        if best is None:
            raise self._nothing_fits(order[0])
        workload = {
            "global_batch": self.config.global_batch,
            "seq_len": self.config.data.seq_len,
            "precision": self.config.precision,
            "reduce_dtype": self.config.reduce_dtype,
            "margin": self.config.margin,
        }
        of = digest([asdict(self.spec), self.cluster.to_json(), workload])
        return Plan(
            {"name": self.spec.name, "num_params": self.spec.num_params},
            self.cluster.to_json(),
            workload,
            best,
            (best, *order[1:]),
            tuple(self.refused),
            None,
            of,
        )

    def candidates(self, question: Question, cluster: Cluster, seq_len: int) -> list[Candidate]:
        """Every layout judged; micro-batches beyond one that fits nowhere are not tried, since they need more."""
        out: list[Candidate] = []
        for micro_batch in (sizes := choose.micro_batches(question, self.run.where)):
            here = self._judge(question, cluster, seq_len, micro_batch)
            out += here
            if not any(c.fits for c in here) and micro_batch != sizes[-1]:
                self.refused.append(
                    {
                        "layout": {"micro_batch": sizes[sizes.index(micro_batch) + 1 :]},
                        "reason": f"micro_batch {micro_batch} fits in no layout and these need more",
                    }
                )
                break
        return out

    def _judge(self, question: Question, cluster: Cluster, seq_len: int, micro_batch: int) -> list[Candidate]:
        steps: dict[str, tuple[tuple[ledger.Step, ...], int]] = {}
        out = []
        for layout in choose.layouts(question, micro_batch):
            recompute = layout.activation_checkpointing
            if recompute not in steps:
                traced = trace_step(
                    self.model,
                    self.found,
                    micro_batch=micro_batch,
                    seq_len=seq_len,
                    dtype=layout.param_dtype,
                    activation_checkpointing=recompute,
                    attention_path=layout.attention,
                    chunk_tokens=layout.loss_chunk_tokens,
                    kind=cluster.kind,
                    cache=cache_folder(),
                )
                steps[recompute] = ledger.expand(self.spec, traced), traced.kernel_bytes
            made_whole = max(unit.numel for unit in self.spec.units) * 4
            peaks = ledger.phases(
                self.spec, steps[recompute][0], layout, cluster.kind, made_whole=made_whole, kernel_bytes=steps[recompute][1]
            )
            out.append(
                choose.candidate(
                    layout,
                    peaks,
                    cluster,
                    self.config.margin,
                    disk_bytes=12 * self.spec.num_params,
                    recomputed_flops=ledger.recomputed_flops(self.spec, layout, seq_len),
                    moved_bytes=ledger.moved_bytes(self.spec, layout),
                )
            )
        return out

    # ---- when nothing fits

    def _nothing_fits(self, nearest: Candidate) -> AnswerIsNo:
        low, high = nearest.peak_reserved_bytes
        usable = choose.usable_bytes(self.cluster, self.config.margin) - self.cluster.outside_bytes
        size, unit = _unit(high)
        needs = f"{low / size:.1f}" if low == high else f"{low / size:.1f} - {high / size:.1f}"
        states = 16 * self.spec.num_params / nearest.layout.dp_shard
        return AnswerIsNo(
            f"nothing fits: the nearest layout needs {needs} {unit}, {max(0, usable) / size:.1f} are usable",
            lines=[("nearest", f"{choose.short(nearest.layout)}; peak in {_PHASE[nearest.peak_phase]}")],
            where=f"{self.cluster.world_size} x {self.cluster.device}, {self.run.where('data.seq_len')}",
            why=f"fp32 parameters, gradients and AdamW state are 16 bytes a parameter,\n{units.bytes_text(states)} on each rank of this layout",
            hints=self._ways_out()
            or ["neither the free layout keys nor a quarter of the seq_len\nnor more ranks make it fit: take a smaller model"],
        )

    def _ways_out(self) -> list[str]:
        """Up to three changes, each computed to fit."""
        seq_len, world = self.config.data.seq_len, self.cluster.world_size
        hints: list[str] = []
        for key in ("strategy", "activation_checkpointing", "micro_batch", "grad_accum", "grad_sync"):
            if key in self.fixed:
                together = {"micro_batch", "grad_accum"}
                freed = together if key in together else {key}
                fixed = {k: v for k, v in self.fixed.items() if k not in freed}
                best = self._best(self.cluster, fixed, seq_len)
                if best:
                    value = getattr(best.layout, key)
                    hints.append(f"`--set layout.{key}={value}` fits: {_range(best)}")
        if self.cluster.kind == "cuda":
            for more in (
                n for n in range(world + 1, min(4096, self.config.global_batch) + 1) if self.config.global_batch % n == 0
            ):
                per_node = more if more <= self.cluster.gpus_per_node else self.cluster.gpus_per_node
                if more % per_node and more > 8:
                    continue
                wider = replace(
                    self.cluster, nodes=max(1, more // per_node), gpus_per_node=per_node if more % per_node == 0 else more
                )
                if wider.world_size == more and (best := self._best(wider, self.fixed, seq_len)):
                    change = (
                        f"cluster.nodes={wider.nodes}"
                        if wider.nodes != self.cluster.nodes
                        else f"cluster.gpus_per_node={wider.gpus_per_node}"
                    )
                    hints.append(f"`--set {change}` fits: {_range(best)} on each of {more}")
                    break
        for shorter in (seq_len // 2, seq_len // 4):
            if shorter >= 16 and (best := self._best(self.cluster, self.fixed, shorter)):
                hints.append(f"`--set data.seq_len={shorter}` fits: {_range(best)}")
                break
        if self.config.precision == "fp32" and (best := self._best(self.cluster, self.fixed, seq_len, "bf16-mixed")):
            hints.append(f"`--set precision=bf16-mixed` fits: {_range(best)}")
        return hints[:3]

    def _best(self, cluster: Cluster, fixed: dict[str, Any], seq_len: int, precision: str | None = None) -> Candidate | None:
        """What would be chosen then, of the smallest micro-batch: it needs least."""
        question = self.question(cluster.world_size, fixed, precision or self.config.precision)
        try:
            smallest = choose.micro_batches(question)[0]
        except UsageError:
            return None
        return choose.chosen(choose.ranked(self._judge(question, cluster, seq_len, smallest)))


def _attention(model: Any, seq_len: int) -> str:
    """``document`` needs no mask; a model whose sliding window is shorter than a row needs one."""
    config = getattr(model, "config", None)
    if config is None:
        return "sdpa"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return "sdpa" if window is not None and window < seq_len else "document"


# ---- the plan as text

_PHASE = {
    "load": "loading",
    "forward": "forward",
    "loss": "the loss",
    "backward": "backward",
    "optimizer": "the optimizer step",
    "first_step": "the first step",
    "save": "a save",
}
_ROW = {name: name.replace("_", " ").replace("params", "parameters").replace("grads", "gradients") for name in ROWS}


def _unit(num_bytes: float) -> tuple[int, str]:
    """One unit for a whole table."""
    return (units.GIB, "GiB") if num_bytes >= units.GIB else (units.MIB, "MiB")


def _range(c: Candidate) -> str:
    low, high = c.peak_reserved_bytes
    size, unit = _unit(high)
    return f"{low / size:.1f} {unit}" if low == high else f"{low / size:.1f} - {high / size:.1f} {unit}"


def plan_text(plan: Plan) -> str:
    """The plan in at most 80 columns: layouts best first, bytes by row and strategy, then the choice and what it rests on."""
    shown = _shown(plan)
    size, unit = _unit(plan.chosen.peak_allocated_bytes)
    return "\n".join(
        [
            *_head(plan),
            "",
            *_table(plan, shown, size, unit),
            "",
            *_rows_table(plan, shown, size, unit),
            "",
            *_foot(plan, size, unit),
        ]
    )


def _shown(plan: Plan) -> list[Candidate]:
    """The best candidate of each strategy and activation checkpointing, best first."""
    seen: dict[tuple[str, str], Candidate] = {}
    for c in plan.candidates:
        seen.setdefault((c.layout.strategy, c.layout.activation_checkpointing), c)
    return list(seen.values())


def _head(plan: Plan) -> list[str]:
    cluster, work = plan.cluster, plan.workload
    nodes = "1 node" if cluster["nodes"] == 1 else f"{cluster['nodes']} nodes"
    left = f"{plan.model['name']}, {units.count_text(plan.model['num_params'])} parameters"
    right = f"{cluster['world_size']} x {cluster['device']}, {nodes}, {units.bytes_text(cluster['device_total_bytes'])} each"
    joined = f"{left:<42}  {right}"
    lines = [joined] if len(joined) <= 80 else [left, right]
    count = len(plan.candidates)
    return [
        *lines,
        f"{work['global_batch']} sequences x {work['seq_len']} tokens a step, {work['precision']}"
        f"; {count} layout{'s' * (count != 1)} compared",
    ]


def _table(plan: Plan, shown: list[Candidate], size: int, unit: str) -> list[str]:
    reserved = any(c.peak_reserved_bytes[0] != c.peak_reserved_bytes[1] for c in shown)
    head = (
        f"  {'strategy':<14} {'act. ckpt':<9} {'micro x accum':<13} {'allocated':>9}"
        + (f" {'reserved':>11}" if reserved else "")
        + "  peak in"
    )
    lines = [head]
    for c in shown:
        low, high = c.peak_reserved_bytes
        mark = ">" if c.layout == plan.chosen.layout else " "
        lines.append(
            f"{mark} {c.layout.strategy:<14} {c.layout.activation_checkpointing:<9} {f'{c.layout.micro_batch} x {c.layout.grad_accum}':<13} "
            f"{c.peak_allocated_bytes / size:>9.1f}"
            + (f" {f'{low / size:.0f} - {high / size:.0f}':>11}" if reserved else "")
            + (f"  {c.peak_phase}" if c.fits else f"  over by {c.missing_bytes / size:.1f}")
        )
    return [*lines, f"  {unit} on the fullest rank in its worst phase"]


def _rows_table(plan: Plan, shown: list[Candidate], size: int, unit: str) -> list[str]:
    """Bytes per rank by row at the peak, the best candidate of each strategy beside one another."""
    columns: dict[str, Candidate] = {}
    for c in shown:
        columns.setdefault(c.layout.strategy, c)
    lines = [f"  {f'{unit} per rank at the peak':<26}" + "".join(f" {name:>15}" for name in columns)]
    for row in ROWS:
        if any(c.rows[row] for c in columns.values()):
            lines.append(f"  {_ROW[row]:<26}" + "".join(f" {c.rows[row] / size:>15.1f}" for c in columns.values()))
    return [*lines, f"  {'sum':<26}" + "".join(f" {sum(c.rows.values()) / size:>15.1f}" for c in columns.values())]


def _foot(plan: Plan, size: int, unit: str) -> list[str]:
    best = plan.chosen
    layout = best.layout
    details = f"{choose.short(layout)}, attention {layout.attention}"
    largest = sorted(((size_, name) for name, size_ in best.rows.items() if size_), reverse=True)
    parts = [f"{_ROW[name]} {bytes_ / size:.1f}" for bytes_, name in largest[:5]]
    others = [
        f"{name.replace('_', ' ')} {best.phases[name].device_bytes / size:.1f}"
        for name in ("first_step", "optimizer", "save")
        if name != best.peak_phase
    ]
    usable = plan.cluster["device_total_bytes"] * (1 - plan.workload["margin"])
    outside, high = plan.cluster["outside_bytes"], best.peak_reserved_bytes[1]
    what = "of the host, shared" if plan.cluster["kind"] == "cpu" else "of the card"
    held = "the process itself" if plan.cluster["kind"] == "cpu" else "CUDA and NCCL"
    room = (
        f"{units.bytes_text(usable)} ({1 - plan.workload['margin']:.0%} {what}) - {units.bytes_text(outside)} {held} "
        f"- {units.bytes_text(high)} {'reserved' if plan.cluster['kind'] == 'cuda' else 'allocated'} = {units.bytes_text(usable - outside - high)}"
    )
    lines = _wrapped("chosen", f"{details}: {best.why}")
    lines += _wrapped("peak", f"{_PHASE[best.peak_phase]}: " + ", ".join(parts) + f" {unit}; " + ", ".join(others))
    lines += _wrapped("room", room)
    lines += [f"{'levers' if index == 0 else '':<8}{text}" for index, text in enumerate(_levers(plan, size, unit))]
    lines += _wrapped("", "levers are differences between computed layouts, a step each (derived)")
    return lines + _wrapped(
        "disk",
        f"{units.bytes_text(best.disk_bytes)} a checkpoint; export {units.bytes_text(4 * plan.model['num_params'])} in fp32",
    )


def _levers(plan: Plan, size: int, unit: str) -> list[str]:
    """What one changed key costs or saves, as differences between computed layouts."""
    best = plan.chosen
    by_layout = {c.layout: c for c in plan.candidates}
    layout = best.layout
    tokens = layout.micro_batch * layout.grad_accum * plan.workload["seq_len"]
    model_flops = 6.0 * plan.model["num_params"] * tokens
    out = []
    changes: list[tuple[str, dict[str, Any]]] = [
        (
            "activation_checkpointing",
            {"activation_checkpointing": "full" if layout.activation_checkpointing == "none" else "none"},
        ),
        ("grad_sync", {"grad_sync": "last" if layout.grad_sync == "each" else "each"}),
    ]
    smaller = max((c.layout.micro_batch for c in plan.candidates if c.layout.micro_batch < layout.micro_batch), default=None)
    if smaller:
        changes.append(("micro_batch", {"micro_batch": smaller, "grad_accum": layout.micro_batch * layout.grad_accum // smaller}))
    for key, change in changes:
        other = by_layout.get(replace(layout, **change))
        if other is None:
            continue
        flops = (other.recomputed_flops - best.recomputed_flops) / model_flops
        moved = other.moved_bytes - best.moved_bytes
        extra = (f", {flops:+.0%} FLOPs" if flops else "") + (
            f", {'-' if moved < 0 else '+'}{units.bytes_text(abs(moved))} moved" if moved else ""
        )
        out.append(
            f"{f'{key}={change[key]}':<29} {(other.peak_allocated_bytes - best.peak_allocated_bytes) / size:+8.1f} {unit}{extra}"
        )
    return out


def _wrapped(label: str, text: str) -> list[str]:
    """``label`` and text folded at 80 columns, continued under itself."""
    lines, line = [], f"{label:<8}"
    for word in text.split():
        if len(line) + len(word) + (line[-1] != " ") > 80:
            lines.append(line)
            line = " " * 8
        line += word if line.endswith(" ") and (line.strip() in ("", label) or not line.strip()) else f" {word}"
    return [*lines, line]
