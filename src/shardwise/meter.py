"""Measuring peak allocated bytes of a rank, on every device, exactly where that can be had.

    cuda        torch's allocator counts
    livebytes   CPU: a library in front of the C allocator counts every block whichever thread frees it (needs a C compiler once)
    profiler    CPU without one: the profiler's memory events, replayed by address, since its own total misses frees on gloo's threads
                (facts/feasibility.md A.0). Slower, so only the first, a few steady and the saving steps are measured
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
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

_PROFILED_WINDOWS = 2  # of one name


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
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(made), "-ldl", "-pthread"], check=True, capture_output=True,
                           timeout=60)
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
        self.kind: Literal["cuda", "livebytes", "profiler"]
        self._library = None
        if device_type == "cuda":
            self.kind, self.how = "cuda", "measured by torch's CUDA allocator"
        else:
            self._library = _loaded_livebytes()
            self.kind = "livebytes" if self._library else "profiler"
            self.how = "measured exactly by livebytes" if self._library else "measured from the profiler's events; a C compiler makes it exact"
        self._baseline = 0
        self._counts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def start(self) -> None:
        """Take what the process holds now as zero: call it before the model is built."""
        self._baseline = self._now()

    def _now(self) -> int:
        if self.kind == "livebytes":
            return int(self._library.livebytes_now())  # type: ignore[attr-defined]
        if self.kind == "cuda":
            import torch

            return torch.cuda.memory_allocated()
        return 0

    @contextlib.contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Measure what runs inside. On the profiler's way only the first windows of a name are, since it slows them."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if self.kind == "profiler":
            if count > _PROFILED_WINDOWS:
                yield
                return
            with _profiled(self) as found:
                yield
            peak = found[0]
        elif self.kind == "livebytes":
            assert self._library is not None, "kind livebytes has the library"
            self._library.livebytes_reset_peak()
            yield
            peak = int(self._library.livebytes_peak()) - self._baseline
        else:
            import torch

            torch.cuda.reset_peak_memory_stats()
            yield
            peak = torch.cuda.max_memory_allocated() - self._baseline
        self.peaks[name] = max(self.peaks.get(name, 0), peak)


def _loaded_livebytes() -> Any:
    """The library if this process was started with it in LD_PRELOAD."""
    library = ctypes.CDLL(None)
    try:
        library.livebytes_now.restype = library.livebytes_peak.restype = ctypes.c_longlong
    except AttributeError:
        return None
    return library


@contextlib.contextmanager
def _profiled(meter: Meter) -> Iterator[list[int]]:
    """Peak of the block in bytes: tensors alive before it, plus the replayed events."""
    import torch

    before = _live_tensor_bytes()
    found = [0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
    memory = sorted((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    found[0] = before + replay([(address, size) for _, address, size in memory])


def replay(events: list[tuple[int, int]]) -> int:
    """Peak of live bytes over ``(address, bytes)`` events in order of time; bytes below 0 are a free.

    An address allocated again while it still counts as live was freed unseen: the old block is dropped first. A free of an unknown address belongs to a
    block from before the first event, and lowers the level.
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
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            part = thing.to_local() if isinstance(thing, DTensor) else thing
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse and wrapper tensors have no storage
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())
