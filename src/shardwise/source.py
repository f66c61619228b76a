"""What the run file's ``model:`` means: a folder or hub id with trained weights, a shape with random ones, or a user's factory."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from .errors import NotReady, OnDisk, UsageError, nearest
from .hub import hub_answers

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]


@dataclass(frozen=True)
class ModelSource:
    """One model to build; JSON in and out.

    Attributes:
        kind: ``weights`` (folder with trained weights), ``shape`` (random weights), ``factory`` (user code).
        name: For the screen.
        folder: Folder of ``config.json`` and weights, for kind ``weights``.
        config: Keyword arguments of the transformers config with ``model_type``, for kind ``shape``.
        factory: ``package.module:function``.
    """

    kind: Literal["weights", "shape", "factory"]
    name: str
    folder: str | None = None
    config: dict[str, Any] | None = None
    factory: str | None = None
    trust_remote_code: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> ModelSource:
        return ModelSource(**record)


def shapes() -> dict[str, dict[str, Any]]:
    """The model shapes that ship with shardwise: name -> ``{model_type, config, params, source}``."""
    text = resources.files("shardwise").joinpath("shapes.json").read_text("utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def find_shape(name: str) -> tuple[str, dict[str, Any]] | None:
    """The shape of that name, without regard to case and to a final ``-hf``; ``org/name`` is taken as ``name``."""

    def plain(text: str) -> str:
        return text.rsplit("/", 1)[-1].lower().removesuffix("-hf")

    return next(((key, entry) for key, entry in shapes().items() if plain(key) == plain(name)), None)


def resolve(model: Any, *, trust_remote_code: bool = False, where: str = "") -> ModelSource:
    """What ``model:`` of a run file names, with a hub id fetched.

    Args:
        model: A string, or an object or mapping with ``shape`` or ``factory``.
        where: Where it was written, for messages.

    Raises:
        UsageError: A bare name that is no folder, an unknown shape.
        OnDisk: A folder without ``config.json``.
        NotReady: A hub id that cannot be fetched.
    """
    if isinstance(model, str):
        if (folder := Path(model).expanduser()).is_dir():
            return _from_folder(folder, model, trust_remote_code, where)
        if "/" not in model.strip("/") or model.startswith(("/", ".", "~")):
            raise _no_such_model(model, where)
        return _from_folder(_fetch(model, where), model, trust_remote_code, where)
    given: Mapping[str, Any] = model if isinstance(model, Mapping) else model.model_dump(exclude_none=True)
    if "factory" in given:
        return ModelSource("factory", given["factory"], factory=given["factory"])
    shape = given["shape"]
    if isinstance(shape, Mapping):
        return ModelSource("shape", f"{shape['model_type']} shape", config=dict(shape))
    found = find_shape(shape)
    if found is None:
        close = nearest(shape, shapes())
        raise UsageError(
            f"`{shape}` is none of the {len(shapes())} shapes that ship with shardwise",
            where=where,
            why=f"the nearest is `{close}`" if close else "no shape has a similar name",
            hints=[
                f"`model: {{shape: {close or 'llama-3.1-8b'}}}`",
                "`model: {shape: {model_type: llama, hidden_size: 512, ...}}`",
            ],
        )
    name, entry = found
    return ModelSource("shape", name, config={"model_type": entry["model_type"], **entry["config"]})


def _from_folder(folder: Path, name: str, trust_remote_code: bool, where: str) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise OnDisk(
            f"`{name}` is a folder without `config.json`",
            where=where,
            why="a model folder holds config.json and *.safetensors as `save_pretrained` writes them",
            hints=["give the folder that `save_pretrained` or `shardwise export` wrote"],
        )
    return ModelSource("weights", name, folder=str(folder.absolute()), trust_remote_code=trust_remote_code)


def _no_such_model(model: str, where: str) -> UsageError | OnDisk:
    if model.startswith(("/", ".", "~")):
        return OnDisk(
            f"model folder `{model}` does not exist", where=where, hints=["give the folder that `save_pretrained` wrote"]
        )
    found = find_shape(model)
    if found:
        return UsageError(
            f"`{model}` is the name of a shape, not of trained weights",
            where=where,
            why="a folder or a hub id has trained weights, a shape has random ones",
            hints=[
                f"`--set model.shape={model}` trains it from random weights",
                "`--set model=ORG/NAME` or a folder starts from trained weights",
            ],
        )
    close = nearest(model, shapes())
    return UsageError(
        f"`{model}` is no folder here and no hub id",
        where=where,
        why="a hub id is written ORG/NAME" + (f"; the nearest shape is `{close}`" if close else ""),
        hints=[
            *([f"`--set model.shape={close}` trains it from random weights"] if close else []),
            "`--set model=ORG/NAME` or a folder starts from trained weights",
        ],
    )


def _fetch(hub_id: str, where: str) -> Path:
    """The local folder of a hub id, downloaded if the network and the hub allow.

    Raises:
        NotReady: It cannot be had, with the hub's own words.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=not hub_answers()))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise NotReady(
            f"hub id `{hub_id}` cannot be fetched\n       and is not in the local cache",
            where=where,
            why=textwrap.fill(reason, 68),
            hints=[
                "`--set model=FOLDER` with config.json and *.safetensors in it",
                f"with a network: `hf download {hub_id}`",
                "`--set model.shape=NAME` takes random weights of a known shape",
            ],
        ) from error
