"""From a run's checkpoint to a folder that ``AutoModelForCausalLM.from_pretrained`` loads, without a process group and a tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import checkpoint
from .errors import AnswerIsNo, OnDisk
from .rundir import RunDir

_FILE_BYTES = 1 << 30  # a file of the export; also what is held in memory


def export_run(run_path: Path, out: Path, *, step: int | None = None, dtype: str | None = None,
               progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Write the weights of a run as a Hugging Face folder and read every tensor back.

    Args:
        step: Checkpoint to take; None for the newest.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None for that of the source model.

    Returns:
        ``path, num_params, dtype, bytes, step, verified``.

    Raises:
        OnDisk: No whole checkpoint, or ``out`` holds something already.
        AnswerIsNo: A tensor read back differs from what was written.
    """
    run = RunDir.open(run_path)
    folder = _checkpoint(run, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OnDisk(f"`{out}` exists and is not empty", where="`OUT`", why="an export never writes over anything", hints=["give a folder that is not there"])
    state = json.loads((folder / "state.json").read_text("utf-8"))
    name = dtype or state["source_dtype"]
    aside = out.with_name(f".{out.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        hashes, num_params, num_bytes = _write_weights(folder, aside, getattr(torch, name), progress)
        _write_rest(run, aside, name)
        _check(aside, hashes)
        for file in aside.iterdir():
            file.chmod(0o666 & ~_umask())  # safetensors writes 0600, which others could not read
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return {"path": str(out), "num_params": num_params, "dtype": name, "bytes": num_bytes, "step": state["step"], "verified": "tensors"}


def _checkpoint(run: RunDir, step: int | None) -> Path:
    whole = checkpoint.steps(run.checkpoints)
    if not whole or (step is not None and step not in whole):
        raise OnDisk(f"`{run.path}` has no whole checkpoint" + (f" of step {step}" if step is not None else ""), where="`--step`" if step is not None else "",
                     why=f"whole ones are of steps {', '.join(map(str, whole))}" if whole else "it ended before its first save",
                     hints=[f"`--step {whole[-1]}`"] if whole else [])
    folder = checkpoint.folder_of(run.checkpoints, whole[-1] if step is None else step)
    if faults := checkpoint.verify(folder):
        raise OnDisk(f"checkpoint `{folder}` is not whole: {faults[0]}", lines=[("also", fault) for fault in faults[1:4]],
                     hints=["`--step N` takes another; `shardwise checkpoint list RUN` shows them"])
    return folder


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, one at a time."""
    reader = dcp.FileSystemReader(folder)
    for key, entry in sorted(reader.read_metadata().state_dict_metadata.items()):
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata):
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            dcp.load({key: tensor}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            yield key.removeprefix("model."), tensor


def _write_weights(folder: Path, out: Path, dtype: torch.dtype, progress: Callable[[str], None]) -> tuple[dict[str, str], int, int]:
    """Shards of at most ``_FILE_BYTES`` and their index; hash of each tensor, number of parameters and of bytes."""
    hashes: dict[str, str] = {}
    files: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    num_params = num_bytes = held = 0

    def flush() -> None:
        nonlocal held
        save_file(pending, out / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append({name: 0 for name in pending})
        progress(f"wrote {num_bytes:,} bytes of weights")
        pending.clear()
        held = 0

    for name, tensor in _read(folder):
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        size = cast.numel() * cast.element_size()
        if pending and held + size > _FILE_BYTES:
            flush()
        pending[name], hashes[name] = cast, _hash(cast)
        held, num_params, num_bytes = held + size, num_params + cast.numel(), num_bytes + size
    flush()
    if len(files) == 1:
        (out / "part-0.safetensors").rename(out / "model.safetensors")
        return hashes, num_params, num_bytes
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, final in enumerate(names):
        (out / f"part-{i}.safetensors").rename(out / final)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": {name: names[i] for i, part in enumerate(files) for name in part}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return hashes, num_params, num_bytes


def _write_rest(run: RunDir, out: Path, dtype: str) -> None:
    """Config with the export's dtype, generation config, tokenizer and chat template."""
    for part in ("tokenizer", "model"):
        if (run.path / part).is_dir():
            shutil.copytree(run.path / part, out, dirs_exist_ok=True)
    config = out / "config.json"
    if config.is_file():
        facts = json.loads(config.read_text("utf-8"))
        facts.pop("torch_dtype", None)
        config.write_text(json.dumps({**facts, "dtype": dtype}, indent=2) + "\n", "utf-8")


def _check(out: Path, hashes: dict[str, str]) -> None:
    """Read every tensor back and compare its hash."""
    found: dict[str, str] = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found.update({name: _hash(handle.get_tensor(name)) for name in handle.keys()})  # noqa: SIM118 - no iterator
    wrong = [name for name, digest in hashes.items() if found.get(name) != digest]
    if wrong or len(found) != len(hashes):
        raise AnswerIsNo(f"{len(wrong)} of {len(hashes)} exported tensors read back otherwise than written", lines=[("tensor", f"`{name}`") for name in wrong[:5]],
                         why="the disk or its cable is at fault", hints=["export to another disk"])


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
