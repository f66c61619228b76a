"""Numbers of real hardware: the only room that holds them, each with its source and date; and what this machine has. Imports no torch.

``total_bytes`` is what the driver reports to a program (``total capacity`` in torch's out-of-memory text), which is less than the name on the box
where ECC or firmware keeps a part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import NotReady

_GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One kind of card.

    Attributes:
        total_bytes: As the driver reports it.
        source: Where that was read, and when.
    """

    name: str
    total_bytes: int
    source: str


def _device(name: str, gib: float, source: str) -> tuple[str, Device]:
    return name, Device(name, round(gib * _GIB), source)


_MEMORY = "from memory of torch's out-of-memory texts, not verified (2026-09)"
DEVICES: dict[str, Device] = dict(
    [
        _device("a100-40gb", 39.39, _MEMORY),
        _device("a100-80gb", 79.15, _MEMORY),
        _device("h100-80gb", 79.10, "TARGETS.md of this project, `79.1 GiB each` (2026-09)"),
        _device("h100-96gb", 94.99, "torchtitan benchmark logs, facts/planning.md 6: 94.99-95.04 GiB (2026-08)"),
        _device(
            "h200-141gb", 139.0, "this project's lent H200 is described as about 139 GiB (2026-09), not read by a program yet"
        ),
        _device("b200-192gb", 178.0, _MEMORY),
        _device("l40s-48gb", 44.40, "out-of-memory text of an L40, same chip and memory, QwenLM/Qwen3-VL#2097 (2026-06)"),
        _device("rtx4090-24gb", 23.64, "out-of-memory text, ali-vilab/VGen#104 (2024-04)"),
        _device("rtx3090-24gb", 23.69, _MEMORY),
        _device("v100-16gb", 15.75, "out-of-memory text, Morizeyao/GPT2-Chinese#215 (2023-02)"),
        _device("v100-32gb", 31.73, _MEMORY),
        _device("mi300x-192gb", 191.98, _MEMORY),
    ]
)

# What a rank holds that no allocator counts. CUDA: context and kernels 0.5-0.9 GiB, NCCL 0.3-1.5 GiB a communicator (facts/planning.md 4.8, middle
# values). CPU: resident set of a rank forked from the server that has torch 2.15 and transformers 5.24 imported, with a gloo group and no model:
# 441 MiB, measured 2026-12 (smaps_rollup, 2 and 4 ranks; all but 10 MiB is shared between ranks, so this errs on the safe side).
OUTSIDE_BYTES: dict[str, int] = {"cuda": round(1.9 * _GIB), "cpu": 441 * 2**20}

# Peak reserved over peak allocated on CUDA. Source: facts/planning.md 4.7, seven published runs against a trace: 1.145, 1.157, 1.205, 1.240, 1.271,
# 1.279, 1.334. An allocator model will replace it. On CPU the two are one.
RESERVED_OVER_ALLOCATED: dict[str, tuple[float, float]] = {"cuda": (1.14, 1.34), "cpu": (1.0, 1.0)}


@dataclass(frozen=True)
class Machine:
    """What this machine offers a job.

    Attributes:
        workers: GPUs, or 1 on CPU (more are asked for).
        memory_bytes: Of one GPU, or what the host has left for all ranks.
    """

    kind: Literal["cpu", "cuda"]
    device: str
    workers: int
    memory_bytes: int
    source: str


def this_machine(want: str | None = None) -> Machine:
    """The GPUs of this machine as ``nvidia-smi`` lists them, else its CPUs.

    Args:
        want: ``cpu`` does not look for GPUs.
    """
    gpus = [] if want == "cpu" else _gpus()
    if gpus:
        name, total = min(gpus, key=lambda gpu: gpu[1])
        return Machine("cuda", name, len(gpus), total, "nvidia-smi on this machine")
    memory, source = host_memory()
    return Machine("cpu", "cpu", 1, memory, source)


def host_memory() -> tuple[int, str]:
    """Bytes of host memory a new process could still take, and where that was read: ``MemAvailable``, or the cgroup's rest where it is less.

    Raises:
        NotReady: No /proc/meminfo (not Linux).
    """
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError as error:
        raise NotReady(
            "memory of this machine is unknown: there is no /proc/meminfo", hints=["`--set cluster.memory_gib=16` says it"]
        ) from error
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None and limit - used < free:
        return limit - used, "memory.max - memory.current of this cgroup"
    return free, "MemAvailable of this machine"


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _gpus() -> list[tuple[str, int]]:
    """Name and total bytes of each GPU a process started here would see."""
    command = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if command is None or visible in ("", "-1"):
        return []
    try:
        text = subprocess.run(
            [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in text.splitlines():
        name, _, mib = line.rpartition(",")
        if mib.strip().isdigit():
            found.append((name.strip().lower().replace(" ", "-"), int(mib) * 2**20))
    return found[: len(visible.split(","))] if visible else found
