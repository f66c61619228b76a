"""Names in a run file that are text as they should be and mean nothing: of shapes, devices and columns."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path as File

from .. import hardware, source
from ..config import COLUMNS
from ..config.combinations import Write
from ..config.yamltext import Path, typed
from ..errors import nearest
from .foreign import OUT
from .given import Given, dotted
from .problem import Problem


def meaningless(given: Given) -> Iterator[tuple[Path, Problem]]:
    """Names in values that are of the right type and mean nothing: shapes, devices, columns."""
    model = given.at(("model",))
    if isinstance(model, str) and model and "/" not in model and not model.startswith((".", "~")) and not File(model).is_dir():
        yield ("model",), _bare_model(given, model)
    path: Path = ("model", "shape")
    shape = given.at(path)
    if isinstance(shape, str) and shape and source.find_shape(shape) is None:
        yield path, _unknown_shape(given, shape)
    if isinstance(shape, dict) and not isinstance(shape.get("model_type"), str):
        yield (
            path,
            given.problem(
                path,
                "has no `model_type`, which names the transformers architecture",
                Write("model.shape.model_type", "llama"),
            ),
        )
    device = given.at(("cluster", "device"))
    if isinstance(device, str) and device and device.lower() not in {"cpu", *hardware.DEVICES}:
        yield ("cluster", "device"), _unknown_device(given, device)
    train = given.at(("data", "train"))
    sets: list[Path] = [("data", "train", at) for at in range(len(train))] if isinstance(train, list) else []
    for where in (("data",), *sets):
        columns = given.at((*where, "columns"))
        for name in columns if isinstance(columns, dict) else ():
            if name not in COLUMNS:
                yield (*where, "columns", name), _unknown_column(given, (*where, "columns"), name)


def _unknown_column(given: Given, path: Path, name: str) -> Problem:
    theirs, close = given.at((*path, name)), nearest(name, COLUMNS)
    turned = isinstance(theirs, str) and theirs in COLUMNS
    way = (
        Write(dotted((*path, str(theirs))), name)
        if turned
        else Write(dotted((*path, close)), typed(theirs))
        if close
        else "write our name first, then yours, as in `text: body`"
    )
    return given.problem(
        (*path, name),
        "our name comes first, then yours" if turned else "is no column of ours; there are: " + ", ".join(COLUMNS),
        way,
    )


def _unknown_shape(given: Given, shape: str) -> Problem:
    close = _nearest_shapes(shape)
    what = f"is none of the {len(source.shapes())} shapes that ship with shardwise" + (
        f"; the nearest: {', '.join(close)}" if close else ""
    )
    return given.problem(
        ("model", "shape"),
        what,
        *([Write("model.shape", close[0])] if close else []),
        "give the shape itself: `{model_type: llama, hidden_size: 512, ...}`",
    )


def _bare_model(given: Given, model: str) -> Problem:
    path, trained = ("model",), "give a folder or a hub id, ORG/NAME, for trained ones"
    if source.find_shape(model):
        what = f"names a shape, `{{shape: {model}}}`, not trained weights, and no folder that is here"
        return given.problem(path, what, Write("model.shape", model, "random weights"), trained)
    close = _nearest_shapes(model)
    what = "is no folder here, and a hub id is written ORG/NAME" + (f"; the nearest shapes: {', '.join(close)}" if close else "")
    return given.problem(path, what, *([Write("model.shape", close[0], "random weights")] if close else []), trained)


def _nearest_shapes(word: str) -> list[str]:
    """Up to three names of shapes like ``word``."""
    names = {name.lower(): name for name in source.shapes()}
    return [names[one] for one in difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)]


def _unknown_device(given: Given, device: str) -> Problem:
    path = ("cluster", "device")
    if device.lower().split(":")[0] in ("cuda", "gpu", "auto"):
        return given.problem(path, "is no card; left out it is what this machine has", OUT)
    close = [name for name in hardware.DEVICES if name.startswith(device.lower().replace("_", "-"))] or [
        name for name in [nearest(device, hardware.DEVICES)] if name
    ]
    if close:
        return given.problem(
            path, "is no device shardwise knows by that name", *(Write("cluster.device", name) for name in close[:2])
        )
    return given.problem(
        path,
        "is none of the devices shardwise knows: cpu, " + ", ".join(hardware.DEVICES),
        "name one of about its size, with `cluster.memory_gib` for its memory",
    )
