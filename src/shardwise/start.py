"""Starting a run and watching it: prepare in one process, then the ranks, until they end or one fails. Imports no torch.

Under ``torchrun`` (``RANK`` set) this process is itself a rank: rank 0 prepares while the others wait, then all train.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import meter
from .errors import Interrupted, LostWorker, NotReady, ShardwiseError, Terminated
from .faults import describe
from .rundir import RunDir
from .world import RankContext, Ranks, init_group, leave_group, threads_per_rank

if TYPE_CHECKING:
    from .job import Job, Ready, Request

# What a user hears of a run: prepared -> its rows of text, then one call a message of rank 0.
Listener = Callable[[dict[str, Any]], None]


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def preload_meter(cache: Path) -> None:
    """Let every process started from here on be measured exactly: put livebytes in ``LD_PRELOAD`` where a C compiler is."""
    library = meter.livebytes_library(cache)
    if library is not None and str(library) not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD", "")]))


def run_here(request: Request, on_ready: Callable[[Ready], None], listen: Listener) -> dict[str, Any]:
    """Prepare, start the workers of this machine, and watch them to the end.

    Returns:
        The summary of the run (``train.Trainer.summary``) with ``predicted_peak_allocated_bytes`` and ``run_dir``.

    Raises:
        ShardwiseError: Of the preparation or of the first failing rank.
        Interrupted: Ctrl-C; the workers are gone.
    """
    preload_meter(meter.cache_folder())
    ready: Ready = _watched(
        Ranks(_prepare, 1, (request,), group=False, describe=describe, threads=threads_per_rank(1)), listen, request, None
    )[0]
    on_ready(ready)
    run = RunDir.open(ready.job.run_dir)
    run.event(
        "started",
        world_size=ready.job.layout.world_size,
        resumed_from=str(ready.job.resume_from) if ready.job.resume_from else None,
    )
    ranks = Ranks(_train, ready.job.layout.world_size, (ready.job,), describe=describe, device_type=ready.job.device_type)
    listen({"kind": "ranks", "ranks": ranks.world_size, "threads": ranks.threads})
    summary: dict[str, Any] = _watched(ranks, listen, request, run)[0]
    return _finished(summary, ready, run)


def _finished(summary: dict[str, Any], ready: Ready, run: RunDir) -> dict[str, Any]:
    summary = {**summary, "predicted_peak_allocated_bytes": ready.plan.chosen.peak_allocated_bytes, "run_dir": str(run.path)}
    run.event("ended", **summary)
    return summary


def _watched(ranks: Ranks, listen: Listener, request: Request, run: RunDir | None) -> list[Any]:
    """Join ``ranks`` with signals forwarded and failures recorded in the run folder."""
    asked_to_stop: list[int] = []
    try:
        with _forwarding(ranks, asked_to_stop):
            return ranks.join(lambda rank, message: listen(message))
    except KeyboardInterrupt:
        ranks.stop()
        raise _interrupted(run) from None
    except ShardwiseError as error:
        if asked_to_stop and isinstance(error, LostWorker):
            raise Terminated("stopped by SIGTERM before the first step; nothing was saved") from error
        if run is not None:
            run.event("failed", **error.to_json())
        raise


def _interrupted(run: RunDir | None) -> Interrupted:
    saved = sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("step-*")) if run else []
    hint = [f"`shardwise train --resume {run.path}` goes on from step {saved[-1]}"] if run and saved else []
    return Interrupted("interrupted" + ("" if saved else "; nothing was saved yet"), hints=hint)


@contextlib.contextmanager
def _forwarding(ranks: Ranks, asked: list[int]) -> Iterator[None]:
    """SIGTERM goes on to the ranks, which save and end; without this they would be orphans (facts/feasibility.md B.8)."""

    def forward(number: int, frame: Any) -> None:
        asked.append(number)
        ranks.signal(number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _train(context: RankContext, job: Job) -> dict[str, Any]:
    from .train import run_rank  # here, so that the command line never imports torch

    return run_rank(context, job)


def _prepare(context: RankContext, request: Request) -> Ready:
    from .prepare import prepare

    return prepare(request, lambda text: context.send({"kind": "say", "text": text}))


def run_as_rank(request: Request, on_ready: Callable[[Ready], None], listen: Listener) -> dict[str, Any]:
    """Be one rank under torchrun: measured, prepared by rank 0, trained with the others.

    Collective: every process that torchrun started calls it.

    Raises:
        ShardwiseError: This rank's own error, or rank 0's while preparing.
    """
    _exec_measured()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    from .prepare import prepare
    from .train import run_rank

    device_type = "cpu" if request.run.config.cluster.device == "cpu" or not torch.cuda.is_available() else "cuda"
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    if device_type == "cuda":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if local > torch.cuda.device_count():
            raise NotReady(
                f"torchrun started {local} ranks, {torch.cuda.device_count()} GPUs are visible",
                why="two ranks on one GPU deadlock in NCCL",
                hints=[f"`torchrun --nproc-per-node={torch.cuda.device_count()} ...`"],
                common=True,
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_group(device_type, rank=rank, world_size=world_size, meeting=None)
    try:
        box: list[bytes | dict[str, Any] | None] = [None]
        if rank == 0:
            try:
                box[0] = pickle.dumps(prepare(request, lambda text: listen({"kind": "say", "text": text})))
            except ShardwiseError as error:
                box[0] = error.to_json()
        dist.broadcast_object_list(box)
        if isinstance(box[0], dict):
            theirs = ShardwiseError.from_json(box[0])
            theirs.common = True
            raise theirs
        assert box[0] is not None, "rank 0 sent a job or an error"
        ready: Ready = pickle.loads(box[0])
        if rank == 0:
            on_ready(ready)
        summary = run_rank(RankContext(rank, world_size, listen if rank == 0 else lambda message: None), ready.job)
        leave_group()  # after an error it could wait for peers that are stuck in a collective; the command line exits hard then
        return _finished(summary, ready, RunDir.open(ready.job.run_dir)) if rank == 0 else summary
    except ShardwiseError:
        raise
    except Exception as error:
        raise describe(error, rank) from error


def _exec_measured() -> None:
    """Start this process over with livebytes in front of its allocator; cheap, since torch is not imported yet."""
    if os.environ.get("SHARDWISE_EXECED") or "torch" in sys.modules:
        return
    os.environ["SHARDWISE_EXECED"] = "1"
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        deadline = time.monotonic() + 10  # local rank 0 compiles; the library appears whole, by rename
        while time.monotonic() < deadline and not meter.livebytes_path(meter.cache_folder()).is_file():
            time.sleep(0.05)
    before = os.environ.get("LD_PRELOAD")
    preload_meter(meter.cache_folder())
    if os.environ.get("LD_PRELOAD") != before:
        os.execv(sys.executable, [sys.executable, "-m", "shardwise", *sys.argv[1:]])
