"""From a run's checkpoint to a folder that ``AutoModelForCausalLM.from_pretrained`` loads, without a process group and a tensor at a time.

What is held is one tensor: as saved, as cast, and the piece of it being read. The safetensors files are written by hand for that, since the library
wants a whole file's tensors at once (twice); it reads them back afterwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from . import checkpoint
from .errors import AnswerIsNo, NotReady, OnDisk
from .rundir import RunDir
from .units import bytes_text

_FILE_BYTES = 1 << 30  # of tensors in a file, unless one tensor is larger
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the export: its name in the checkpoint and in the files, shape and dtype as written."""

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_run(
    run_path: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the weights of a run as a Hugging Face folder and read every tensor back.

    Args:
        step: Checkpoint to take; None for the newest.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None for that of the source model.

    Returns:
        ``path, num_params, dtype, bytes, step, verified``.

    Raises:
        OnDisk: No whole checkpoint, or ``out`` holds something already.
        NotReady: The export does not fit on the disk or cannot be written; nothing of it is left.
        AnswerIsNo: A tensor read back differs from what was written.
    """
    run = RunDir.open(run_path)
    folder = checkpoint.find(run.checkpoints, step)
    aside = out / ".part"  # inside, so that the renames stay on one disk
    new = not out.exists()
    if not new and (not out.is_dir() or any(entry != aside for entry in out.iterdir())):
        raise OnDisk(
            "the folder to export to is not empty",
            where=f"`{out}`",
            why="an export never writes over anything",
            hints=["give a folder that is not there"],
        )
    checkpoint.require_whole(folder, hashes=True)
    state = json.loads((folder / "state.json").read_text("utf-8"))
    name = dtype or state["source_dtype"]
    reader = checkpoint.Reader(folder)
    tensors = _listed(reader, getattr(torch, name))
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        disk = os.statvfs(aside)
        if (free := disk.f_bavail * disk.f_frsize) < num_bytes:
            raise NotReady(
                f"the export takes {bytes_text(num_bytes)}, {bytes_text(free)} are free on the disk",
                where=f"`{out}`",
                hints=["export to another disk"],
            )
        hashes = _write_weights(reader, aside, tensors, progress)
        if not _write_rest(run, aside, name):
            progress("no config.json: the run's model is none of transformers', so it is weights only")
        _check(aside, hashes)
        _publish(aside, out)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()
        if isinstance(error, OSError):
            raise NotReady(
                f"the export cannot be written: {error.strerror}",
                where=f"`{error.filename or out}`",
                hints=["export to another disk"],
            ) from error
        raise
    return {
        "path": str(out),
        "num_params": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtype": name,
        "bytes": num_bytes,
        "step": state["step"],
        "verified": "tensors",
    }


def _listed(reader: checkpoint.Reader, dtype: torch.dtype) -> list[_Tensor]:
    """The model's tensors by name; numbers with a fraction become ``dtype``, others stay."""
    return [
        _Tensor(
            key,
            key.removeprefix("model."),
            tuple(entry.size),
            dtype if entry.properties.dtype.is_floating_point else entry.properties.dtype,
        )
        for key, entry in sorted(reader.entries.items())
        if key.startswith("model.")
    ]


def _write_weights(
    reader: checkpoint.Reader, out: Path, tensors: list[_Tensor], progress: Callable[[str], None]
) -> dict[str, str]:
    """Write the safetensors files, and their index where there is more than one; the hash of each tensor by name."""
    files = _cut(tensors)
    names = (
        ["model.safetensors"]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    hashes: dict[str, str] = {}
    for name, part in zip(names, files, strict=True):
        _write_file(reader, out / name, part, hashes)
        progress(f"wrote {name}, {bytes_text(sum(tensor.num_bytes for tensor in part))}")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {tensor.name: name for name, part in zip(names, files, strict=True) for tensor in part},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return hashes


def _cut(tensors: list[_Tensor]) -> list[list[_Tensor]]:
    """The tensors in files of at most ``_FILE_BYTES``, in order; one that is larger has a file of its own."""
    files: list[list[_Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if files[-1] and held + tensor.num_bytes > _FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.num_bytes
    return files


def _write_file(reader: checkpoint.Reader, file: Path, tensors: list[_Tensor], hashes: dict[str, str]) -> None:
    """One safetensors file: length of the header, header, bytes. Adds to ``hashes``.

    Wider dtypes come first and the header is padded to 8 bytes, so that every tensor is aligned when the file is mapped.
    Source: the format's description in the safetensors README.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            raw = _raw(reader.read(tensor.key).to(tensor.dtype))
            hashes[tensor.name] = xxhash.xxh3_128_hexdigest(raw)
            handle.write(raw)


def _write_rest(run: RunDir, out: Path, dtype: str) -> bool:
    """Config with the export's dtype, generation config, tokenizer and chat template; whether the model has a config at all."""
    for part in ("tokenizer", "model"):
        if (run.path / part).is_dir():
            shutil.copytree(run.path / part, out, dirs_exist_ok=True)
    config = out / "config.json"
    if config.is_file():
        facts = json.loads(config.read_text("utf-8"))
        facts.pop("torch_dtype", None)
        config.write_text(json.dumps({**facts, "dtype": dtype}, indent=2) + "\n", "utf-8")
    return config.is_file()


def _check(out: Path, hashes: dict[str, str]) -> None:
    """Read every tensor back and compare its hash."""
    found: dict[str, str] = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found.update({name: xxhash.xxh3_128_hexdigest(_raw(handle.get_tensor(name))) for name in handle.keys()})  # noqa: SIM118 - no iterator
    wrong = [name for name, digest in hashes.items() if found.get(name) != digest]
    if wrong or len(found) != len(hashes):
        raise AnswerIsNo(
            f"{len(wrong)} of {len(hashes)} exported tensors read back otherwise than written",
            lines=[("tensor", f"`{name}`") for name in wrong[:5]],
            why="the disk or its cable is at fault",
            hints=["export to another disk"],
        )


def _publish(aside: Path, out: Path) -> None:
    """Make every file readable by others and move it into place, ``config.json`` last: without it a folder is no model."""
    for file in aside.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    for file in sorted(aside.iterdir(), key=lambda file: file.name == "config.json"):
        file.rename(out / file.name)
    aside.rmdir()


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, not copied where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
