"""Saving and loading the state of a run through ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import errno
import io
import json
import pickle
import shutil
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..errors import NotReady, OnDisk, ShardwiseError, nearest
from ..units import bytes_text
from .folder import SCHEMA, aside_of, flush, folder_of, free_bytes, hash_of, require_whole

T = TypeVar("T")

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# ---- save


def save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
    """Write ``step-N`` and publish it.

    Args:
        state: JSON-able facts of the trainer, equal on all ranks.

    Raises:
        OnDisk: ``step-N`` is there already; a checkpoint is never overwritten.
        NotReady: The disk is too small or a write failed; what was written of it is removed, the same error on all ranks.

    Collective: every rank must call it.
    """
    aside, final = aside_of(checkpoints, step), folder_of(checkpoints, step)
    tensors = _tensors(model, optimizer)
    # A DTensor counts whole, so this is the sum over ranks. Each piece has a header, each rank random state.
    pieces = len(tensors) * _world_size()
    needed = (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        + pieces * 2048
        + _world_size() * 16384
        + (1 << 16)
    )
    facts = {**state, "step": step, "optimizer_steps": _step_counts(model, optimizer), "world_size": _world_size()}

    def begin() -> None:
        if (final / "manifest.json").is_file():
            raise OnDisk(
                f"checkpoint of step {step} is there already",
                where=str(final),
                why="a checkpoint is never overwritten",
                hints=["remove it, or go on from it with `--resume`"],
            )
        for torn in [*checkpoints.glob(".tmp-step-*"), *([final] if final.exists() else [])]:
            shutil.rmtree(torn)
        if free_bytes(checkpoints) < needed:
            raise OSError(errno.ENOSPC, "foreseen")
        aside.mkdir()

    def refused(error: BaseException) -> NotReady:
        return _unwritten(checkpoints, step, needed, error)

    try:
        _on_rank_zero(begin, refused)
        try:
            dcp_save({**tensors, **_random_state()}, storage_writer=FileSystemWriter(aside))
        except CheckpointException as error:
            raise refused(_cause(error)) from error
        _on_rank_zero(lambda: _publish(aside, final, facts), refused)
    except ShardwiseError:
        if _rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)  # partial files would keep the disk full
        raise
    return final


def _publish(aside: Path, final: Path, facts: dict[str, Any]) -> None:
    """Make ``aside`` appear as ``final``: facts, then the manifest, then the rename, each on the disk before the next begins."""
    (aside / "state.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    files = sorted(file for file in aside.iterdir() if file.is_file())
    manifest = {
        "schema": SCHEMA,
        "step": facts["step"],
        "files": {file.name: {"bytes": file.stat().st_size, "xxh3": hash_of(file)} for file in files},
    }
    for file in files:
        flush(file)
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    flush(aside / "manifest.json")
    flush(aside)
    aside.rename(final)
    flush(final.parent)


def _unwritten(checkpoints: Path, step: int, needed: int, error: BaseException) -> NotReady:
    """The refusal of a save, and whether it is the disk that is full: torch's own text never says so (facts/feasibility.md B.7)."""
    if getattr(error, "errno", None) not in _FULL and "inline_container" not in str(error):
        return NotReady(
            f"checkpoint of step {step} cannot be written",
            lines=[("reason", _reason(error))],
            where=str(checkpoints),
            hints=["`--set run_dir=...` writes elsewhere"],
            common=True,
        )
    disk = f"{bytes_text(free_bytes(checkpoints))} are free, the checkpoint takes {bytes_text(needed)}"
    return NotReady(
        f"checkpoint of step {step} does not fit on the disk",
        lines=[("disk", disk)],
        where=str(checkpoints),
        why="the disk is full, or a quota or `ulimit -f` is reached;\nwhat was written of it is removed again, older ones are untouched",
        hints=["free space, or `--set run_dir=...` on another disk", "`--set checkpoint.keep_last=1` keeps fewer checkpoints"],
        common=True,
    )


# ---- load


class Reader(FileSystemReader):
    """The tensors of a checkpoint. Its ``.metadata`` is a pickle: read once, and only with the classes that DCP writes there.

    Attributes:
        entries: Name -> shape, dtype and pieces of every tensor.

    Raises:
        OnDisk: ``.metadata`` is torn, asks for anything else, or names a value that DCP would unpickle without care.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self._metadata: Metadata = _MetadataUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            self.entries: dict[str, TensorStorageMetadata] = dict(self._metadata.state_dict_metadata)
        except Exception as error:  # a torn pickle may raise anything
            raise _unreadable(folder, f"`.metadata`: {_reason(error)}") from error
        if pickled := [name for name, entry in self.entries.items() if type(entry) is not TensorStorageMetadata]:
            raise _unreadable(folder, f"`{pickled[0]}` is no tensor but a pickle,\nwhich could run code")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU; needs no process group."""
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is what is meant
            dcp_load({name: tensor}, storage_reader=self, no_dist=True)
        return tensor


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what DCP's ``.metadata`` is made of and nothing else. Source: seen in files of torch 2.15 (facts/feasibility.md B.2)."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "ChunkStorageMetadata",
                    "BytesStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused: {module}.{name}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill a model and an optimizer that has not stepped yet, in place, and this rank's random state.

    On another world size the random state of the save fits no rank: each then seeds its own from its present seed and the step.

    Returns:
        The ``state`` of the save, with ``rng_restored``.

    Raises:
        OnDisk: The checkpoint is torn, or its tensors are not those of the model; the same error on all ranks.

    Collective: every rank must call it.
    """

    def begin() -> dict[str, Any]:
        require_whole(folder, hashes=False)
        return dict(json.loads((folder / "state.json").read_text("utf-8")))

    def refused(error: BaseException) -> OnDisk:
        return _unreadable(folder, _reason(error))

    state = _on_rank_zero(begin, refused)
    _prepare_optimizer(model, optimizer, state["optimizer_steps"])
    tensors = _tensors(model, optimizer)
    stored_random = _on_rank_zero(lambda: _compare(tensors, Reader(folder).entries, folder), refused)
    random = _random_state()
    restored = random.keys() <= set(stored_random)
    try:
        dcp_load({**tensors, **random} if restored else tensors, storage_reader=Reader(folder))
    except CheckpointException as error:
        raise refused(_cause(error)) from error
    if restored:
        _set_random_state(random)
    else:
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{torch.initial_seed()}/{state['step']}".encode()) >> 1)
    return {**state, "rng_restored": restored}


def _prepare_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, counts: dict[str, float]) -> None:
    """Give every parameter that had stepped the state AdamW would have made, to be filled by the load."""
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (count := counts.get(names[param])) is not None:
                device = param.device if group.get("fused") else "cpu"
                optimizer.state[param] = {
                    "step": torch.tensor(count, dtype=torch.float32, device=device),
                    **{moment: torch.zeros_like(param, memory_format=torch.preserve_format) for moment in _MOMENTS},
                }


def _compare(wanted: dict[str, torch.Tensor], stored: dict[str, TensorStorageMetadata], folder: Path) -> list[str]:
    """The names of the saved random states, or every difference between what the run needs and what is there in one error."""
    kept = {name: entry for name, entry in stored.items() if not name.startswith("rng.")}
    missing, extra = sorted(wanted.keys() - kept.keys()), sorted(kept.keys() - wanted.keys())
    forms = {
        name: (_form(wanted[name].dtype, wanted[name].shape), _form(entry.properties.dtype, entry.size))
        for name, entry in kept.items()
        if name in wanted
    }
    other = [f"`{name}`:\nrun {mine}, saved {theirs}" for name, (mine, theirs) in forms.items() if mine != theirs]
    if not (missing or extra or other):
        return sorted(stored.keys() - kept.keys())
    lines = [
        ("missing", f"`{name}`" + (f",\nnearest `{close}`" if (close := nearest(name, extra, 0.8)) else ""))
        for name in missing[:4]
    ]
    lines += [("unknown", f"`{name}`") for name in extra[:4]] + [("shape", text) for text in other[:4]]
    raise OnDisk(
        f"another model: {len(missing)} tensors missing, {len(extra)} unknown, {len(other)} of another shape",
        lines=lines,
        where=str(folder),
        hints=["resume with the run's own config: `shardwise train --resume RUN`"],
    )


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _unreadable(folder: Path, reason: str) -> OnDisk:
    return OnDisk(
        f"checkpoint `{folder.name}` cannot be read",
        lines=[("reason", reason)],
        where=str(folder),
        common=True,
        hints=[
            "`shardwise checkpoint verify RUN` names the file",
            "an older step can be asked for: `--resume RUN@STEP`, `export --step`",
        ],
    )


# ---- what is saved


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


def _step_counts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """How often each parameter was updated; those that never were are left out."""
    return {
        name: float(optimizer.state[param]["step"])
        for name, param in model.named_parameters()
        if "step" in optimizer.state.get(param, {})
    }


def _random_state() -> dict[str, torch.Tensor]:
    """This rank's generators, under names of its own."""
    key = f"rng.{_world_size()}.{_rank()}"
    on_card = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking for the state would start CUDA in a run on CPU
    return {key: torch.get_rng_state(), **({f"{key}.cuda": torch.cuda.get_rng_state()} if on_card else {})}


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    for name, value in states.items():
        (torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state)(value)


# ---- ranks and files


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on_rank_zero(work: Callable[[], T], translate: Callable[[BaseException], ShardwiseError]) -> T:
    """The result of ``work`` on rank 0, on every rank; or its error, foreign ones translated.

    Collective: one broadcast.
    """
    box: list[Any] = [None, None]
    if _rank() == 0:
        try:
            box[1] = work()
        except ShardwiseError as error:
            box[0] = error.to_json()
        except (OSError, ValueError) as error:
            box[0] = translate(error).to_json()
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    if box[0] is not None:
        raise ShardwiseError.from_json({**box[0], "common": True})
    result: T = box[1]
    return result


def _cause(error: CheckpointException) -> BaseException:
    """What the first failing rank met. The wrapper is a BaseException, and its text long."""
    return error.failures[min(error.failures)][0]


def _reason(error: BaseException) -> str:
    """The last line of a foreign error, folded to the screen."""
    return textwrap.fill(f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[-1]}", 68)
