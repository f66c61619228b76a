"""Filling a sharded module with weights: random ones equal for every world size, or the rows of a checkpoint that this rank owns.

Both touch one block (or one tensor's rows) at a time, so that no rank ever holds the whole model. Neither communicates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..errors import OnDisk, UsageError, nearest
from .build import units

_READ_BYTES = 64 * 2**20  # rows of a checkpoint are read this many bytes at a time


def local_rows(param: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's part of a parameter: the local tensor and the rows of the whole it holds.

    FSDP2 cuts dim 0 into ceil(R / N) rows a rank; the last ranks may hold fewer or none. A plain tensor is whole.

    Source: torch 2.15 ``fsdp/_fully_shard/_fsdp_param.py`` (``_chunk_with_empty``).
    """
    if not isinstance(param, DTensor):
        return param.detach(), slice(0, param.shape[0] if param.ndim else 1)
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank that runs is in the mesh"
    start, rows = 0, param.shape[0]
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "shardwise shards dim 0"
            piece = -(-param.shape[0] // param.device_mesh.size(dim))
            start = min(coordinate[dim] * piece, param.shape[0])
            rows = min(piece, param.shape[0] - start)
    return param.to_local().detach(), slice(start, start + rows)


def _copy_rows(param: torch.Tensor, whole: torch.Tensor) -> None:
    local, rows = local_rows(param)
    if local.numel():
        local.copy_(whole[rows])


def initialise(model: nn.Module, seed: int, source_name: str) -> None:
    """Random weights by the model's own rule, the same for every world size and strategy.

    A block is made whole on the host, filled by the model's ``_init_weights`` (transformers) or each module's ``reset_parameters`` with a generator
    seeded by (seed, module name), and this rank's rows are kept.

    Raises:
        UsageError: A module of a factory's model has parameters of its own and no ``reset_parameters``.
    """
    init: Any = getattr(model, "_init_weights", None)
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [model.get_submodule(name) for unit in units(model) if unit.kind == "block" for name in unit.modules]
    inside = {id(module) for block in blocks for module in block.modules()}
    scopes = [*blocks, *(module for module in model.modules() if id(module) not in inside and module._parameters)]
    done: set[int] = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for scope in scopes:
            modules = list(scope.modules()) if id(scope) in inside else [scope]
            owned = [
                (module, key, param)
                for module in modules
                for key, param in module._parameters.items()
                if param is not None and id(param) not in done
            ]
            if not owned:
                continue
            done.update(id(param) for _, _, param in owned)
            for module, key, param in owned:
                module._parameters[key] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=False)
            try:
                for module in reversed(modules):  # children before the parents that adjust them
                    torch.manual_seed(_seed_of(seed, names[id(module)]))
                    if init is not None:
                        init(module)
                    elif callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
                    elif any(owner is module for owner, _, _ in owned):
                        raise UsageError(
                            f"`{names[id(module)] or 'the module itself'}` of `{source_name}` has parameters\n       and no `reset_parameters`",
                            why="shardwise builds on the meta device and fills each rank's shard by it",
                            hints=["give the module a `reset_parameters(self)` that fills its own"],
                            common=True,
                        )
                made = [module._parameters[key] for module, key, _ in owned]
            finally:
                for module, key, param in owned:
                    module._parameters[key] = param
            for (_, _, param), whole in zip(owned, made, strict=True):
                assert whole is not None, "it was put there above"
                _copy_rows(param, whole)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def load_weights(model: nn.Module, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Read from a Hugging Face folder the rows this rank owns, converted to the parameters' dtype.

    Raises:
        OnDisk: No safetensors file, or names and shapes that differ from the model's: all of them, with the nearest.
    """
    from safetensors import SafetensorError, safe_open

    wanted = dict(_persistent(model))
    try:
        where = _index(folder)
    except SafetensorError as error:
        raise OnDisk(f"a weights file in `{folder}` is not whole: {error}", hints=["fetch or export the model again"]) from error
    to_file = _match(model, wanted, where, folder)
    by_file: dict[str, list[str]] = {}
    for name, key in to_file.items():
        by_file.setdefault(where[key][0], []).append(name)
    for file, names in sorted(by_file.items()):
        say(f"reading {file}")
        with torch.no_grad(), safe_open(folder / file, framework="pt") as handle:
            for name in names:
                local, rows = local_rows(wanted[name])
                if not local.numel():
                    continue
                part = handle.get_slice(to_file[name])
                if local.ndim == 0:
                    local.copy_(handle.get_tensor(to_file[name]))
                    continue
                step = max(1, _READ_BYTES // max(1, local[0].numel() * 4))
                for start in range(rows.start, rows.stop, step):
                    stop = min(start + step, rows.stop)
                    local[start - rows.start : stop - rows.start].copy_(part[start:stop])


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def _index(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Tensor name -> (file, shape) of every safetensors file that belongs to the folder's model."""
    from safetensors import safe_open

    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        files = sorted(set(json.loads(listed.read_text("utf-8"))["weight_map"].values()))
    else:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing or not files:
        raise OnDisk(
            f"`{folder}` lacks " + (", ".join(missing) if missing else "a *.safetensors file"),
            why="the index names it" if missing else "weights are read from safetensors only, since a pickle can run code",
            hints=[
                "fetch the model again"
                if missing
                else "convert once: `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)`"
            ],
        )
    found: dict[str, tuple[str, list[int]]] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as handle:
            found.update({key: (file, handle.get_slice(key).get_shape()) for key in handle.keys()})  # noqa: SIM118 - no iterator
    return found


def _match(model: Any, wanted: dict[str, torch.Tensor], found: dict[str, tuple[str, list[int]]], folder: Path) -> dict[str, str]:
    """Which key of the files fills which parameter; every difference in one error."""
    base = getattr(model, "base_model_prefix", "")
    keys = {name: name for name in wanted}
    if base and not set(wanted) & set(found):  # saved from the bare decoder, without the head around it
        keys = {name: name.removeprefix(base + ".") for name in wanted}
    missing = [name for name, key in keys.items() if key not in found]
    # A tied weight is one parameter with two names; files may hold either or both. Rotary tables of old files are recomputed.
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unexpected = [
        key for key in found if key not in keys.values() and key not in every and not key.endswith("rotary_emb.inv_freq")
    ]
    for name in [*missing]:
        other = next((twin for twin in _twins(model, name) if twin in found), None)
        if other:
            keys[name] = other
            missing.remove(name)
    wrong = [
        f"`{name}`: model {list(wanted[name].shape)}, file {found[key][1]}"
        for name, key in keys.items()
        if key in found and list(wanted[name].shape) != list(found[key][1])
    ]
    if not (missing or unexpected or wrong):
        return keys
    lines = [
        ("missing", f"`{name}`" + (f", nearest in the file `{close}`" if (close := nearest(name, found, 0.8)) else ""))
        for name in missing[:5]
    ]
    lines += [("unknown", f"`{key}`") for key in unexpected[:5]] + [("shape", text) for text in wrong[:5]]
    if any(".experts.0." in key for key in unexpected) and any(".experts." in name for name in missing):
        raise OnDisk(
            f"weights in `{folder}` hold one tensor an expert, the model one for all",
            why="mixture-of-experts weights of the hub's form are not read yet",
            hints=["convert once: `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)`"],
        )
    raise OnDisk(
        f"weights in `{folder}` do not fit the model: {len(missing)} missing, {len(unexpected)} unknown, {len(wrong)} of another shape",
        lines=lines,
        why="what is not loaded would stay random without a word",
        hints=["give the folder whose config.json belongs to these weights"],
    )


def _twins(model: nn.Module, name: str) -> list[str]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, param in params.items() if other != name and param is params[name]]
