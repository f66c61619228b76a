"""What was given against what a run file may hold: all problems at once, each with a way out, or the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from ..config import RunConfig, Section
from ..config.combinations import Write, impossible
from ..config.reference import Key, takes
from ..config.yamltext import Path, read_value, short, typed
from ..errors import nearest
from .foreign import OUT, foreign_value
from .given import Given, dotted
from .names import meaningless
from .problem import Problem
from .unknown import KEYS, key_name, unknown

# What pydantic puts between keys: the kinds of a union that `config.keys` tags, and the mark of a mapping's key.
_TAGS = {"<text>", "<mapping>", "<list>", "<number>", "<factory>", "[key]"}


def check(given: Given) -> tuple[RunConfig | None, list[Problem]]:
    """The config, or None and everything that is wrong."""
    config, errors = _validated(given)
    wrong: dict[Path, Problem] = {}
    for error in errors:
        if error["type"] != "missing" or _inside_pair(error):
            path = _path(error)
            wrong.setdefault(path, unknown(given, path) if error["type"] == "extra_forbidden" else _mistyped(given, path))
    for path, problem in meaningless(given):
        wrong.setdefault(path, problem)
    problems = [*given.problems, *wrong.values()]
    promised = {key for one in problems for key in one.gives}
    missing = [
        path for error in errors if error["type"] == "missing" and not _inside_pair(error) for path in _leaves(_path(error))
    ]
    lacking = [path for path in missing if dotted(path) not in promised and not _covered(path, wrong)]
    problems += _missing(given, lacking)
    doubtful = frozenset({dotted(path) for path in (*wrong, *lacking)} | promised | {dotted(path) for path in missing})
    problems += [_impossible(given, one) for one in impossible(_filled(RunConfig, given.values), doubtful)]
    return (None if problems else config), problems


def _validated(given: Given) -> tuple[RunConfig | None, list[ErrorDetails]]:
    """The config or pydantic's errors. What a flag gave is taken as text where only text will do: a shell eats quotes."""
    config, errors = _read(given.values)
    known = [_path(one) for one in errors if one["type"] != "extra_forbidden"]
    as_text = [path for path in known if path in given.raw and isinstance(given.at(path), (int, float)) and _only_text(path)]
    for path in as_text:
        given.put([str(part) for part in path], given.raw[path])
    return _read(given.values) if as_text else (config, errors)


def _read(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[ErrorDetails]]:
    """The config or pydantic's errors, those of several keys at once left out: ``impossible`` tells them better."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        return None, [one for one in error.errors(include_url=False) if one["loc"]]


def _only_text(path: Path) -> bool:
    wanted = takes(_key_of(path)[0].hint)
    return "text" in wanted and "number" not in wanted


def _inside_pair(error: ErrorDetails) -> bool:
    """A pair that is too short lacks its second number, which is no missing key."""
    return error["type"] == "missing" and isinstance(error["loc"][-1], int)


def _path(error: ErrorDetails) -> Path:
    """Where in the file: pydantic's location without the tags of the kinds it tried."""
    *above, last = error["loc"]
    path = tuple(part for part in above if part not in _TAGS)
    if error["type"] == "extra_forbidden" or (last not in _TAGS and not _inside_pair(error)):
        path = (*path, last)
    return path


def _key_of(path: Path) -> tuple[Key, bool]:
    """The declaration of a path, and whether it is the path's own: an entry of a mapping has that of the mapping."""
    for end in range(len(path), 0, -1):
        if key_name(path[:end]) in KEYS:
            return KEYS[key_name(path[:end])], end == len(path)
    raise KeyError(path)


def _fits(path: Path, value: Any) -> bool:
    """Whether ``value`` is one that the key at ``path`` takes."""
    key, own = _key_of(path)
    try:
        TypeAdapter(key.hint).validate_python(value)
    except ValidationError:
        return False
    return own


# ---- values that are not right


def _mistyped(given: Given, path: Path) -> Problem:
    key, own = _key_of(path)
    value = given.at(path)
    wanted = takes(key.hint) if own else "text"
    foreign = foreign_value(dotted(path), value)
    if foreign is not None:
        return given.problem(path, "; ".join(filter(None, (foreign.what, f"`{path[-1]}` takes {wanted}"))), *foreign.ways)
    return given.problem(path, f"`{path[-1]}` takes {wanted}; this is {_said(value, wanted)}", *_ways(key, path, value, wanted))


def _said(value: Any, wanted: str) -> str:
    """What a value is, so far as that is why it is refused."""
    number, whole = "number" in wanted, "whole" in wanted
    if value is None:
        return "nothing"
    if value in ("", [], {}):
        return "empty"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, (int, float)):
        return ("not whole" if whole and isinstance(value, float) else "out of range") if number else "a number"
    if isinstance(value, str):
        return (
            "a number in quotes"
            if number and _number(value) is not None
            else "none of these"
            if "`" in wanted and "text" not in wanted
            else "text"
        )
    return f"a list of {len(value)}" if isinstance(value, list) else "a mapping"


def _number(value: Any) -> int | float | None:
    """A number, also one in quotes; None for anything else."""
    try:
        found = read_value(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < 1e18 else None


def _ways(key: Key, path: Path, value: Any, wanted: str) -> list[Write | str]:
    """A value that is right, as near to the given one as can be told, else what the key's example or default is."""
    name, number = dotted(path), _number(value)
    near: list[Any] = []
    if number is not None:
        near += [number, int(number)] if number == int(number) else [number]
    if "text" in wanted and isinstance(value, (int, float)):
        near.append(typed(value))
    if isinstance(value, str):
        near += {"yes": [True], "on": [True], "no": [False], "off": [False]}.get(value.lower(), [])
        near += filter(None, [nearest(value, [part for part in wanted.split("`")[1::2] if "{" not in part])])
    near.append([value])
    for one in near:
        if (type(one), one) != (type(value), value) and _fits(path, one):
            return [Write(name, typed(one))]
    if key_name(path) not in KEYS:
        return [Write(name, typed(typed(value)))] if "text" in wanted and isinstance(value, (int, float)) else []
    if key.required:
        return [Write(name, key.example)]
    default = key.default.strip("`")
    return [f"leave it out: the default is `{default}`" if default not in ("null", "see its keys") else OUT]


# ---- keys that are missing, and keys that exclude each other


def _leaves(path: Path) -> list[Path]:
    """A missing section as the keys that must stand in it."""
    key = KEYS.get(key_name(path))
    if key is None or not key.sections or key.name == "model":
        return [path]
    return [(*path, name) for name, field in key.sections[0].model_fields.items() if field.is_required()]


def _covered(path: Path, wrong: Mapping[Path, Problem]) -> bool:
    return any(path[:end] in wrong for end in range(1, len(path)))


def _missing(given: Given, paths: list[Path]) -> list[Problem]:
    return [
        Problem(
            f"`{dotted(path)}` is missing" + (f" ({given.source(path)})" if given.source(path) else ""),
            KEYS[key_name(path)].what,
            (Write(dotted(path), KEYS[key_name(path)].example),),
            given.order(path) or 10**8,
        )
        for path in paths
    ]


def _impossible(given: Given, found: Any) -> Problem:
    path: Path = tuple(found.key.split("."))
    return Problem(given.head(path), found.what, found.ways, given.order(path), given.by_flag(path))


def _filled(section: type[Section], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What was given with every default, unchecked: what rules about several keys look at."""
    out: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        value = values.get(name, None if field.is_required() else field.get_default(call_default_factory=True))
        value = value.model_dump() if isinstance(value, Section) else value
        inner = KEYS[prefix + name].sections
        value = {} if name not in values and field.is_required() and inner and name != "model" else value
        nested = isinstance(value, Mapping) and len(inner) == 1 and name != "tokenizer"
        out[name] = _filled(inner[0], value, f"{prefix}{name}.") if nested else value
    return out


def shown(config: RunConfig, path: Path) -> str | None:
    """The value of a key in a config as it is typed; None for a section and where there is no such key."""
    found: Any = config.model_dump(exclude_none=True)
    for part in path:
        inside = isinstance(found, Mapping) and part in found
        if not inside and not (isinstance(found, (list, tuple)) and isinstance(part, int) and part < len(found)):
            return None
        found = found[part]
    key = KEYS.get(key_name(path))
    return None if key is not None and key.sections and isinstance(found, Mapping) else short(found)
