"""Measuring peak allocated bytes of a rank, on every device, exactly where that can be had.

cuda        torch's allocator counts
livebytes   CPU: a library in front of the C allocator counts every block whichever thread frees it (needs a C compiler once)
profiler    CPU without one: the profiler's memory events, replayed by address, since its own total misses frees on gloo's threads
            (facts/feasibility.md A.0). Slower, so only the first windows of each name are measured. It does not tell of a free of a block that is
            older than the window: such a block counts to the window's end, so a figure may be too high
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

_WARM_BYTES = 256 << 20
_PROFILED_WINDOWS = 2  # of one name
_HOW = {
    "cuda": "measured by torch's CUDA allocator",
    "livebytes": "measured exactly by livebytes",
    "profiler": "measured from the profiler's events; a C compiler makes it exact",
}


def cache_folder() -> Path:
    """Where the compiled library is kept: XDG_CACHE_HOME/shardwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def _source() -> bytes:
    return resources.files("shardwise").joinpath("livebytes.c").read_bytes()


def livebytes_path(cache: Path) -> Path:
    """Where the library of this version lies, once compiled."""
    return cache / f"livebytes-{hashlib.sha256(_source()).hexdigest()[:16]}.so"


def livebytes_library(cache: Path) -> Path | None:
    """The compiled library, made on first use; None without a C compiler, off Linux, or where ``cache`` cannot be written. Imports no torch."""
    target = livebytes_path(cache)
    if target.is_file():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.uname().sysname != "Linux":
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source, made = Path(folder) / "livebytes.c", Path(folder) / "livebytes.so"
            source.write_bytes(_source())
            subprocess.run(
                [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(made), "-ldl", "-pthread"],
                check=True,
                capture_output=True,
                timeout=60,
            )
            made.replace(target)  # whole or not at all: ranks of another job may load it now
    except (OSError, subprocess.SubprocessError):
        return None
    return target


class Meter:
    """Peak allocated bytes above what the process held at ``start``, by named windows.

    Attributes:
        kind: How it measures.
        how: The same as a few words for the screen.
        peaks: Window name -> largest peak of all windows of that name. Bytes.
    """

    def __init__(self, device_type: str) -> None:
        self._library: Any = _loaded_livebytes() if device_type == "cpu" else None
        self.kind: Literal["cuda", "livebytes", "profiler"] = (
            "cuda" if device_type == "cuda" else "livebytes" if self._library else "profiler"
        )
        self.how = _HOW[self.kind]
        self._baseline = 0
        self._counts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def warm(self, shapes: set[tuple[int, int]], tokens: int) -> None:
        """Make fp32 products of these weight shapes once, so that what MKL keeps for packing them is there before ``start``.

        MKL holds its packing buffers for the life of the process (1 to 8 MiB, growing with the largest product; probed, torch 2.15). They belong to the
        process, as its code does, and no plan of tensors can know them. Only on CPU; weights above 256 MiB are left out.

        Args:
            shapes: ``(out, in)`` of linear weights.
            tokens: Rows of a product.
        """
        import torch

        if self.kind == "cuda":
            return
        for rows, columns in shapes:
            if rows * columns * 4 <= _WARM_BYTES:
                weight, inputs = torch.zeros(rows, columns), torch.zeros(tokens, columns)
                outputs = inputs @ weight.t()
                outputs @ weight
                outputs.t() @ inputs

    def start(self) -> None:
        """Take what the process holds now as zero: call it before the model is built."""
        self._baseline = self._held()

    def now_bytes(self) -> int:
        """Bytes allocated now, above ``start``."""
        return self._held() - self._baseline

    def _held(self) -> int:
        if self.kind == "livebytes":
            return int(self._library.livebytes_now())
        if self.kind == "cuda":
            import torch

            return torch.cuda.memory_allocated()
        return _live_tensor_bytes()

    @contextlib.contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Measure what runs inside. On the profiler's way only the first windows of a name are, since it slows them."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if self.kind == "profiler" and count > _PROFILED_WINDOWS:
            yield
            return
        with self._measured() as peak:
            yield
        self.peaks[name] = max(self.peaks.get(name, 0), peak() - self._baseline)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[Callable[[], int]]:
        """Run a block; what is given tells its peak in bytes once it is over."""
        if self.kind == "livebytes":
            self._library.livebytes_reset_peak()
            yield lambda: int(self._library.livebytes_peak())
        elif self.kind == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            yield torch.cuda.max_memory_allocated
        else:
            before = self._held()
            with _profiled() as events:
                yield lambda: before + replay(events)


def _loaded_livebytes() -> Any:
    """The library if this process was started with it in LD_PRELOAD."""
    library = ctypes.CDLL(None)
    try:
        library.livebytes_now.restype = library.livebytes_peak.restype = ctypes.c_longlong
    except AttributeError:
        return None
    return library


@contextlib.contextmanager
def _profiled() -> Iterator[list[tuple[int, int]]]:
    """A list that is filled with the block's ``(address, bytes)`` events in order of time when it is over."""
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # read at the first profile: without a driver it writes an error to the terminal
    import torch

    events: list[tuple[int, int]] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield events
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        trace = json.loads(file.read_text("utf-8"))["traceEvents"]
    memory = sorted(
        (event for event in trace if event.get("name") == "[memory]"), key=lambda event: event["ts"]
    )  # stable: ties stay as recorded
    events += [(event["args"]["Addr"], event["args"]["Bytes"]) for event in memory]


def replay(events: list[tuple[int, int]]) -> int:
    """Peak of live bytes over ``(address, bytes)`` events in order of time; bytes below 0 are a free.

    An address allocated again while it still counts as live was freed unseen: the old block is dropped first. A free of an unknown address belongs to
    a block from before the first event, and lowers the level.
    """
    live: dict[int, int] = {}
    level = peak = 0
    for address, size in events:
        if size > 0:
            level += size - live.pop(address, 0)
            live[address] = size
        else:
            level -= live.pop(address, -size)
        peak = max(peak, level)
    return peak


def _live_tensor_bytes() -> int:
    """Bytes of all CPU storages that Python can reach now."""
    import gc

    import torch
    from torch.distributed.tensor import DTensor

    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(
            type(thing), torch.Tensor
        ):  # not isinstance: a proxy's __class__ would be asked, and may import or raise
            continue
        part = thing._local_tensor if isinstance(thing, DTensor) else thing
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse and wrapper tensors have no storage
            if part.device.type == "cpu":
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())
