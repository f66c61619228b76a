"""What a plan is made from, torch-free and JSON in and out: the cluster, the model's shapes and what a trace of it found.

Legend: bytes are whole numbers, a *unit* is what one all-gather fetches, a *row* is one line of the ledger's account.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from . import hardware
from .errors import UsageError, nearest

ROWS = (
    "params_sharded",
    "grads_sharded",
    "optimizer_state",
    "params_unsharded",
    "grads_unsharded",
    "all_gather_buffers",
    "reduce_scatter_buffers",
    "gloo_staging",
    "activations",
    "attention_masks",
    "loss_and_head",
    "inputs",
    "temporaries",
    "unexplained",
)
BYTES = {"fp32": 4, "bf16": 2}
UnitKind = Literal["block", "embedding", "head", "embedding+head", "root"]


@dataclass(frozen=True)
class Cluster:
    """The devices of a job.

    Attributes:
        gpus_per_node: Ranks on a node; workers where ``kind`` is ``cpu``.
        device: A name of ``hardware.DEVICES``, or ``cpu``.
        device_total_bytes: What the driver reports; on CPU this rank's share of the host's available memory.
        outside_bytes: What a rank holds that no allocator of ours counts (CUDA context and NCCL; on CPU the imported process itself).
        source: Where the two figures come from.
    """

    nodes: int
    gpus_per_node: int
    device: str
    kind: Literal["cpu", "cuda"]
    device_total_bytes: int
    outside_bytes: int
    source: str

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "world_size": self.world_size}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Cluster:
        return Cluster(**{key: value for key, value in record.items() if key != "world_size"})


def make_cluster(
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    device: str | None = None,
    memory_gib: float | None = None,
    where: str = "`cluster`",
) -> Cluster:
    """The cluster a run file or flags describe; what is None is read from this machine.

    Args:
        device: A name of ``hardware.DEVICES``, ``cpu``, or None: the GPUs of this machine, else its CPUs.
        memory_gib: Memory of one device in place of the table's figure.

    Raises:
        UsageError: Unknown device name, with the nearest and the list.
    """
    here = None
    if device is None or device == "cpu":
        here = hardware.this_machine(want="cpu" if device == "cpu" else None)
        kind, name, workers = here.kind, here.device, here.workers
    else:
        match = nearest(device, hardware.DEVICES, cutoff=1.0)
        if match is None:
            begins = [name for name in hardware.DEVICES if name.startswith(device.lower())]
            close = " or ".join(begins) or nearest(device, hardware.DEVICES)
            raise UsageError(
                f"`{device}` is none of the {len(hardware.DEVICES)} devices shardwise knows",
                where=where,
                lines=[("known", "cpu, " + ",\n".join(", ".join(names) for names in _chunks(sorted(hardware.DEVICES), 4)))],
                hints=[f"`--device {close}`"] if close else [f"`--set cluster.memory_gib={80}` describes any other card"],
            )
        kind, name, workers = "cuda", match, 8
    ranks = gpus_per_node or workers
    if memory_gib is not None:
        total, source = round(memory_gib * 2**30), "cluster.memory_gib"
    elif kind == "cpu":
        assert here is not None, "a CPU cluster is this machine"
        total, source = here.memory_bytes // ranks, here.source + f", shared by {ranks} ranks"
    else:
        total, source = (
            hardware.DEVICES[name].total_bytes if here is None else here.memory_bytes,
            hardware.DEVICES[name].source if here is None else here.source,
        )
    return Cluster(nodes, ranks, name, kind, total, hardware.OUTSIDE_BYTES[kind], source)


def _chunks(names: list[str], size: int) -> list[list[str]]:
    return [names[at : at + size] for at in range(0, len(names), size)]


@dataclass(frozen=True)
class UnitSpec:
    """One FSDP group.

    Attributes:
        shapes: Full shape of every parameter, in the order FSDP holds them.
        template: Which traced unit stands for it (an index into ``Trace.units``).
    """

    name: str
    kind: UnitKind
    shapes: tuple[tuple[int, ...], ...]
    template: int = -1

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class ModelSpec:
    """The model as the ledger sees it.

    Attributes:
        units: In the order of the forward pass; the root is last.
    """

    name: str
    num_params: int
    units: tuple[UnitSpec, ...]

    @property
    def block_params(self) -> int:
        return sum(unit.numel for unit in self.units if unit.kind == "block")

    def digest(self) -> str:
        return digest(asdict(self))


@dataclass(frozen=True)
class Point:
    """One event of FSDP in a traced step: what lived just before it, and the most that lived from it to the next event.

    Attributes:
        event: ``pre_forward``, ``loss`` (the head begins), ``post_forward``, ``pre_backward``, ``post_backward`` or ``final``.
        unit: Index into ``Trace.units``.
        live, peak: Bytes by row, parameters left out; rows of no bytes are left out too.
    """

    event: str
    unit: int
    live: dict[str, int]
    peak: dict[str, int]


@dataclass(frozen=True)
class Trace:
    """What one forward and backward of the real module allocates beside parameters, for one micro-batch, dtype and seq_len.

    Attributes:
        units: Names of the traced units: up to three blocks of each kind, and all that are no blocks.
        kernel_bytes: What compiled CPU kernels hold from the first step on.
    """

    units: tuple[str, ...]
    points: tuple[Point, ...]
    kernel_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "units": list(self.units),
            "points": [[p.event, p.unit, p.live, p.peak] for p in self.points],
            "kernel_bytes": self.kernel_bytes,
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Trace:
        return Trace(tuple(record["units"]), tuple(Point(*point) for point in record["points"]), record["kernel_bytes"])


def digest(record: Any) -> str:
    """sha256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
