"""The folders of a run's checkpoints: which are whole, what is wrong with one, which may go. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import xxhash

from ..errors import OnDisk, UsageError

SCHEMA = 1


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def steps(checkpoints: Path) -> list[int]:
    """Steps of the whole checkpoints, ascending. A folder without a manifest was never finished."""
    return sorted(
        int(path.name[5:])
        for path in checkpoints.glob("step-*")
        if path.name[5:].isdigit() and (path / "manifest.json").is_file()
    )


def find(checkpoints: Path, step: int | None = None) -> Path:
    """The folder of a whole checkpoint: of ``step``, or the newest.

    Raises:
        OnDisk: There is none.
    """
    whole = steps(checkpoints)
    if not whole:
        raise OnDisk(
            "no whole checkpoint",
            where=str(checkpoints),
            why="the run ended before its first save",
            hints=["train again, in another `run_dir`"],
        )
    if step is not None and step not in whole:
        raise OnDisk(
            f"no whole checkpoint of step {step}",
            where=str(checkpoints),
            why=f"the last whole ones are of steps {', '.join(map(str, whole[-6:]))}",
            hints=[f"leave the step out to take {whole[-1]}, the newest"],
        )
    return folder_of(checkpoints, whole[-1] if step is None else step)


def size(checkpoints: Path, step: int) -> int:
    """Bytes of one checkpoint on disk."""
    return sum(file.stat().st_size for file in folder_of(checkpoints, step).iterdir())


def prune(checkpoints: Path, keep_last: int, keep: set[int]) -> list[int]:
    """Remove all whole checkpoints but the newest ``keep_last`` and those of ``keep``; the steps removed. One process calls it.

    Raises:
        UsageError: ``keep_last`` would leave none.
    """
    if keep_last < 1:
        raise UsageError(f"{keep_last} checkpoints would be kept", why="at least the newest stays", hints=["keep 1"])
    gone = [step for step in steps(checkpoints)[:-keep_last] if step not in keep]
    for step in gone:
        aside = aside_of(checkpoints, step)
        folder_of(checkpoints, step).rename(aside)  # at once no checkpoint any more, should we end half-way
        shutil.rmtree(aside)
    return gone


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty when it is whole.

    Args:
        hashes: Read every byte and compare; else sizes only.
    """
    try:
        listed = json.loads((folder / "manifest.json").read_text("utf-8"))
        files = {name: (int(facts["bytes"]), str(facts["xxh3"])) for name, facts in listed["files"].items()}
        schema, step = listed["schema"], listed["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"`manifest.json` cannot be read: {error.strerror if isinstance(error, OSError) else 'it is not whole'}"]
    faults = [] if schema == SCHEMA and folder.name == f"step-{step}" else [f"`manifest.json` is of step {step}, schema {schema}"]
    for name, (num_bytes, digest) in files.items():
        file = folder / name
        if not file.is_file():
            faults.append(f"`{name}` is missing")
        elif file.stat().st_size != num_bytes:
            faults.append(f"`{name}` has {file.stat().st_size:,} bytes, {num_bytes:,} were written")
        elif hashes and hash_of(file) != digest:
            faults.append(f"`{name}` was changed after it was written (xxh3 differs)")
    return faults


def require_whole(folder: Path, *, hashes: bool) -> None:
    """Refuse a checkpoint that ``verify`` finds a fault in.

    Raises:
        OnDisk: With the first faults.
    """
    if faults := verify(folder, hashes=hashes):
        raise OnDisk(
            f"checkpoint `{folder.name}` is not whole",
            lines=[("fault", fault) for fault in faults[:4]],
            where=str(folder),
            hints=[
                "`shardwise checkpoint verify RUN` tells which ones are",
                "an older step can be asked for: `--resume RUN@STEP`, `export --step`",
            ],
        )


def aside_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".tmp-step-{step}"


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def hash_of(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
