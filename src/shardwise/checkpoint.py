"""Saved resumable state: tensors through ``torch.distributed.checkpoint`` (DCP), all else as JSON, visible only when whole.

    step-N/               appears by one rename, after every file was flushed and the manifest written
      __R_0.distcp        DCP: model.<name>, optim.<name>.exp_avg, optim.<name>.exp_avg_sq, rng.<world>.<rank>
      .metadata           DCP: which tensor lies where
      state.json          what the trainer passed in, and the optimizer's step count
      manifest.json       size and xxh3 of every other file: without it the folder was never finished
    .tmp-step-N/          a save that did not end; swept by the next one

Every item is a tensor: DCP pickles other values and unpickles them without care (facts/feasibility.md B.2). Another world size reads the same files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .errors import NotReady, OnDisk, ShardwiseError, nearest

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SPARE_BYTES = 1 << 20  # metadata, state and manifest


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def steps(checkpoints: Path) -> list[int]:
    """Steps of the whole checkpoints, ascending. A folder without a manifest was never finished."""
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdigit() and (path / "manifest.json").is_file())


def size(checkpoints: Path, step: int) -> int:
    """Bytes of one checkpoint on disk."""
    return sum(file.stat().st_size for file in folder_of(checkpoints, step).iterdir())


def prune(checkpoints: Path, keep_last: int, keep: set[int]) -> None:
    """Remove all whole checkpoints but the newest ``keep_last`` and those of ``keep``. One process calls it."""
    for step in steps(checkpoints)[:-keep_last]:
        if step not in keep:
            folder = folder_of(checkpoints, step)
            (folder / "manifest.json").unlink()  # no longer whole, should we end half-way
            shutil.rmtree(folder)


def save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
    """Write ``step-N`` and publish it.

    Args:
        state: JSON-able facts of the trainer, equal on all ranks.

    Raises:
        NotReady: The disk is too small or a write failed; what was written of it is removed, the same error on all ranks.

    Collective: every rank must call it.
    """
    aside, final = checkpoints / f".tmp-step-{step}", folder_of(checkpoints, step)
    tensors = _tensors(model, optimizer)
    tensors[_rng_key()] = torch.get_rng_state()
    needed = _sum_over_ranks(sum(_local(t).numel() * _local(t).element_size() for t in tensors.values())) + _SPARE_BYTES

    def begin() -> None:
        for torn in checkpoints.glob(".tmp-step-*"):
            shutil.rmtree(torn)
        disk = os.statvfs(checkpoints)
        if disk.f_bavail * disk.f_frsize < needed:
            raise _disk_full(checkpoints, step, f"it needs {needed:,} bytes, {disk.f_bavail * disk.f_frsize:,} are free")
        aside.mkdir()

    def finish() -> None:
        facts = {**state, "step": step, "optimizer_steps": _optimizer_steps(optimizer)}
        (aside / "state.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        files = sorted(file for file in aside.iterdir() if file.is_file())
        manifest = {"schema": 1, "step": step, "files": {file.name: {"bytes": file.stat().st_size, "xxh3": _hash(file)} for file in files}}
        for file in files:
            _flush(file)
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        _flush(aside / "manifest.json")
        _flush(aside)
        aside.rename(final)
        _flush(checkpoints)

    try:
        _on_rank_zero(begin)
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(aside))
        except CheckpointException as error:  # a BaseException; its text never says that the disk is full
            raise _disk_full(checkpoints, step, _innermost(error)) from error
        _on_rank_zero(finish)
    except (ShardwiseError, OSError):
        if _rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)  # partial files would keep the disk full
        raise
    return final


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill a model and an optimizer that has not stepped yet, in place, and this rank's random state where the world size is that of the save.

    Returns:
        The ``state`` of the save, with ``rng_restored``.

    Raises:
        OnDisk: The checkpoint is torn, or its tensors are not those of the model.

    Collective: every rank must call it.
    """
    faults = verify(folder, hashes=False)
    if faults:
        raise OnDisk(f"checkpoint `{folder}` is not whole: {faults[0]}", lines=[("also", fault) for fault in faults[1:4]],
                     hints=["`--resume RUN@STEP` takes an older one; `shardwise checkpoint list RUN` shows them"], common=True)
    state: dict[str, Any] = json.loads((folder / "state.json").read_text("utf-8"))
    _prepare_optimizer(optimizer, float(state["optimizer_steps"]))
    tensors = _tensors(model, optimizer)
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    _compare(tensors, stored, folder)
    rng_key = _rng_key()
    if rng_key in stored:
        tensors[rng_key] = torch.empty_like(torch.get_rng_state())
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise OnDisk(f"checkpoint `{folder}` cannot be read: {_innermost(error)}",
                     hints=["`shardwise checkpoint verify RUN` names the file", "`--resume RUN@STEP` takes an older one"]) from error
    state["rng_restored"] = rng_key in stored
    if rng_key in stored:
        torch.set_rng_state(tensors[rng_key])
    return state


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty when it is whole.

    Args:
        hashes: Read every byte and compare; else sizes only.
    """
    try:
        listed = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"`manifest.json` cannot be read: {error}"]
    faults = []
    for name, facts in listed.items():
        file = folder / name
        if not file.is_file():
            faults.append(f"`{name}` is missing")
        elif file.stat().st_size != facts["bytes"]:
            faults.append(f"`{name}` has {file.stat().st_size:,} bytes, {facts['bytes']:,} were written")
        elif hashes and _hash(file) != facts["xxh3"]:
            faults.append(f"`{name}` was changed after it was written (xxh3 differs)")
    return faults


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved, by name; tied weights once. Parameters that never stepped have no moments."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        found[f"model.{name}"] = param.detach()
        for moment in _MOMENTS:
            if moment in optimizer.state.get(param, {}):
                found[f"optim.{name}.{moment}"] = optimizer.state[param][moment]
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[f"model.{prefix}.{key}" if prefix else f"model.{key}"] = buffer
    return found


def _optimizer_steps(optimizer: torch.optim.Optimizer) -> float:
    counts = {float(entry["step"]) for entry in optimizer.state.values()}
    assert len(counts) <= 1, "every parameter is updated in every step"
    return counts.pop() if counts else 0.0


def _prepare_optimizer(optimizer: torch.optim.Optimizer, count: float) -> None:
    """Give every parameter the state that ``count`` steps of AdamW would have made, to be filled by the load."""
    if count == 0:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            device = param.device if group.get("fused") else "cpu"
            optimizer.state[param] = {"step": torch.tensor(count, dtype=torch.float32, device=device),
                                      **{moment: torch.zeros_like(param, memory_format=torch.preserve_format) for moment in _MOMENTS}}


def _compare(wanted: dict[str, torch.Tensor], stored: dict[str, Any], folder: Path) -> None:
    """Every difference between what the run needs and what is there, in one error."""
    kept = {name for name in stored if not name.startswith("rng.")}
    missing, extra = sorted(wanted.keys() - kept), sorted(kept - wanted.keys())
    other = [f"`{name}`: run {list(wanted[name].shape)}, saved {list(entry.size)}" for name, entry in stored.items()
             if name in wanted and isinstance(entry, TensorStorageMetadata) and list(entry.size) != list(wanted[name].shape)]
    if missing or extra or other:
        lines = [("missing", f"`{name}`" + (f", nearest `{close}`" if (close := nearest(name, kept, 0.8)) else "")) for name in missing[:4]]
        lines += [("unknown", f"`{name}`") for name in extra[:4]] + [("shape", text) for text in other[:4]]
        raise OnDisk(f"checkpoint `{folder}` is of another model: {len(missing)} tensors missing, {len(extra)} unknown, {len(other)} of another shape",
                     lines=lines, hints=["resume with the run's own config: `shardwise train --resume RUN`"], common=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rng_key() -> str:
    return f"rng.{dist.get_world_size() if dist.is_initialized() else 1}.{_rank()}"


def _sum_over_ranks(value: int) -> int:
    if not dist.is_initialized():
        return value
    total = torch.tensor([value], dtype=torch.int64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(total)
    return int(total)


def _on_rank_zero(work: Callable[[], None]) -> None:
    """Do ``work`` on rank 0; its error is raised on every rank.

    Collective: one broadcast.
    """
    box: list[Any] = [None]
    if _rank() == 0:
        try:
            work()
        except ShardwiseError as error:
            box[0] = error.to_json()
        except OSError as error:
            box[0] = NotReady(f"a checkpoint cannot be written: {error.strerror or error}", where=str(error.filename or ""),
                              hints=["`--set run_dir=FOLDER` on a disk with room"]).to_json()
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    if box[0] is not None:
        error = ShardwiseError.from_json(box[0])
        error.common = True
        raise error


def _disk_full(checkpoints: Path, step: int, reason: str) -> NotReady:
    return NotReady(f"checkpoint of step {step} does not fit on the disk: {reason}", where=str(checkpoints),
                    why="what was written of it is removed again; older checkpoints are untouched",
                    hints=["free space, or `--set run_dir=...` on another disk", "`--set checkpoint.keep_last=1` keeps fewer checkpoints"], common=True)


def _innermost(error: CheckpointException) -> str:
    """The last line of the first rank's failure: DCP's text is long and its reason stands at the end."""
    causes = [failure[0] for failure in error.failures.values()]
    return str(causes[0]).strip().splitlines()[-1] if causes else str(error).strip().splitlines()[-1]


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
