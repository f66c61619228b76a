"""Starting ranks and process groups. The only room that does either.

Ranks on one machine are forked from a *forkserver* that has torch and transformers imported. They meet through a file, not a port, so that nothing
can be in use; under ``torchrun`` (``RANK`` set) the group comes from its environment instead. Every rank dies with its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .errors import LostWorker, NotReady, ShardwiseError

COLLECTIVE_TIMEOUT_S = 1800.0
_GRACE_S = 3.0  # how long the other ranks may take to tell their own error once one has failed
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "timed out waiting",
    "broken pipe",
    "socket closed",
    "remote process",
    "nccl communicator was aborted",
)


@dataclass(frozen=True)
class RankContext:
    """What a rank function gets beside its own arguments.

    Attributes:
        send: Sends a picklable message to whoever started the ranks (a no-op where nobody did).
    """

    rank: int
    world_size: int
    send: Callable[[Any], None]


def _context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise.preload"])
    return context


def threads_per_rank(ranks: int) -> int:
    """Cores divided by ranks, at least one: more threads than cores make every rank slower."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def init_group(
    device_type: str, *, rank: int, world_size: int, meeting: str | None, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> None:
    """Make the default process group: gloo on CPU; NCCL, with gloo beside it for host tensors, on CUDA.

    Args:
        meeting: A file all ranks see (``file://``), or None for torchrun's environment.

    Collective: every rank must call it.

    Raises:
        NotReady: The port of ``MASTER_PORT`` is in use.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{meeting}" if meeting else "env://",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            port = os.environ.get("MASTER_PORT", "?")
            raise NotReady(
                f"port {port} on {os.environ.get('MASTER_ADDR', '?')} is in use, and rank 0 must listen on it",
                where="`MASTER_PORT` in the environment of torchrun",
                why="another job, perhaps an earlier one of this run, holds it",
                hints=[
                    "`torchrun --standalone ...` takes a free port by itself",
                    "`torchrun --master-port 29501 ...` takes another one",
                ],
            ) from error
        raise


def leave_group() -> None:
    """Destroy the process group, if there is one, once every rank is done with it.

    Collective: a barrier, so that no rank sees its peer's sockets close while it still works.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Ranks:
    """Some ranks of one job, running ``fn(context, *args)`` each, watched by the process that made them.

    Args:
        fn: A module-level function; its result must pickle.
        device_type: ``cpu`` or ``cuda``; rank r takes device r.
        group: Whether they form a process group. A single helper process needs none.
        describe: Turns a foreign exception into ours, with the rank that met it; runs in the rank.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any] = (),
        *,
        device_type: str = "cpu",
        group: bool = True,
        describe: Callable[[BaseException, int], ShardwiseError] | None = None,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        threads: int | None = None,
    ) -> None:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: never depend on how its name resolves
        self._folder = tempfile.mkdtemp(prefix="shardwise-")
        self.world_size = world_size
        self.threads = threads or threads_per_rank(world_size)
        meeting = str(Path(self._folder) / "meeting") if group else None
        context = _context()
        self._pipes: dict[Connection, int] = {}
        self._ranks: list[BaseProcess] = []
        self._results: dict[int, Any] = {}
        self._errors: list[tuple[float, int, ShardwiseError, str]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(  # type: ignore[attr-defined]
                target=_main,
                args=(fn, rank, world_size, meeting, device_type, self.threads, timeout_s, describe, theirs, tuple(args)),
                name=f"shardwise-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self._ranks.append(process)

    def join(
        self, on_message: Callable[[int, Any], None] = lambda rank, message: None, limit_s: float | None = None
    ) -> list[Any]:
        """Wait for all ranks; their results in rank order.

        Raises:
            ShardwiseError: The first failing rank's own error; what the others say because of it is left out.
            LostWorker: A rank died without a word, or ``limit_s`` passed.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while self._pipes:
                if self._errors:
                    deadline = min(deadline or float("inf"), self._errors[0][0] + _GRACE_S)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for pipe in wait(list(self._pipes), timeout=left):
                    assert isinstance(pipe, Connection), "only pipes are waited for"
                    self._read(pipe, on_message)
            if self._errors:
                raise self._first_error()
            if len(self._results) < self.world_size:
                silent = sorted(set(range(self.world_size)) - set(self._results))
                raise LostWorker(f"ranks {silent} gave no result within {limit_s:.0f} s")
            return [self._results[rank] for rank in range(self.world_size)]
        finally:
            self.stop()

    def _read(self, pipe: Connection, on_message: Callable[[int, Any], None]) -> None:
        rank = self._pipes[pipe]
        try:
            kind, payload = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._pipes[pipe]
            if rank not in self._results and not any(entry[1] == rank for entry in self._errors):
                self._errors.append((time.monotonic(), rank, self._vanished(rank), ""))
            return
        if kind == "message":
            on_message(rank, payload)
        elif kind == "result":
            self._results[rank] = payload
        else:
            record, trace = payload
            self._errors.append((time.monotonic(), rank, ShardwiseError.from_json(record), trace))

    def _vanished(self, rank: int) -> ShardwiseError:
        process = self._ranks[rank]
        process.join(1.0)
        code = process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return LostWorker(
            f"rank {rank} ended without a word: {name}",
            why="the kernel's out-of-memory killer sends SIGKILL" if code == -signal.SIGKILL else "",
            hints=["`dmesg | tail` tells whether the kernel killed it; fewer ranks or a smaller micro_batch need less memory"]
            if code == -signal.SIGKILL
            else [],
        )

    def _first_error(self) -> ShardwiseError:
        """The first error that is not the echo of another rank's end."""
        own = [entry for entry in self._errors if not any(text in entry[2].what.lower() for text in _PEER_GONE)]
        _, rank, error, trace = min(own or self._errors, key=lambda entry: entry[0])
        others = self.world_size - 1
        if others and not error.common:
            error.lines = (
                *error.lines,
                ("others", f"{others} rank{'s' * (others > 1)} stopped because of rank {rank}; no process is left behind"),
            )
        error.__cause__ = RuntimeError(trace) if trace else None
        return error

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self._ranks:
            if process.pid and process.is_alive():
                os.kill(process.pid, number)

    def stop(self) -> None:
        """End what still runs and leave nothing behind. May be called twice."""
        for process in self._ranks:
            if process.is_alive() and not (process.name and self._done(process)):
                process.kill()
        for process in self._ranks:
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        self._pipes = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _done(self, process: BaseProcess) -> bool:
        """A rank whose result arrived is only leaving; let it."""
        rank = self._ranks.index(process)
        if rank in self._results:
            process.join(5.0)
        return not process.is_alive()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 120.0, timeout_s: float = 20.0, device_type: str = "cpu"
) -> list[Any]:
    """Run ``fn(context, *args)`` on real ranks and return their results in rank order; for tests and benchmarks."""
    return Ranks(fn, world_size, args, timeout_s=timeout_s, device_type=device_type, threads=1).join(limit_s=limit_s)


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    meeting: str | None,
    device_type: str,
    threads: int,
    timeout_s: float,
    describe: Callable[[BaseException, int], ShardwiseError] | None,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    """What a forked rank runs."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    import torch

    torch.set_num_threads(threads)

    def send(kind: str, payload: Any) -> None:
        try:
            pipe.send((kind, payload))
        except OSError:
            os._exit(1)  # nobody listens any more

    try:
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        if meeting:
            init_group(device_type, rank=rank, world_size=world_size, meeting=meeting, timeout_s=timeout_s)
        result = fn(RankContext(rank, world_size, lambda message: send("message", message)), *args)
        leave_group()
        send("result", result)
    except BaseException as error:
        ours = error if isinstance(error, ShardwiseError) else describe(error, rank) if describe else _plain(error, rank)
        send("error", (ours.to_json(), traceback.format_exc()))
        pipe.close()
        os._exit(1)  # peers may hang in a collective with us: leave without its destructors
    pipe.close()


def _plain(error: BaseException, rank: int) -> ShardwiseError:
    return ShardwiseError(f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")


def _die_with_parent() -> None:
    """End this rank when the process that asked for it ends, however it ends.

    The forkserver, our parent to the kernel, lives as long as any rank does, so a parent-death signal would not come: a thread waits for the real one.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by multiprocessing"

    def wait_and_end() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_end, name="parent-watch", daemon=True).start()
