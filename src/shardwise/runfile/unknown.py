"""A key that is not in the reference: in another spelling, in another place, another tool's word, or nowhere."""

from __future__ import annotations

from ..config.combinations import Write
from ..config.reference import Key, all_keys
from ..config.yamltext import Path, typed
from ..errors import nearest
from .foreign import foreign_key
from .given import Given, dotted
from .problem import Problem
from .words import WORDS

KEYS: dict[str, Key] = {one.name: one for one in all_keys()}
# Names that say too little to guess a section from: `name: my-run` is not the optimizer's.
_VAGUE = {
    "name",
    "path",
    "shape",
    "factory",
    "train_bpe",
    "weight",
    "every",
    "show",
    "long",
    "format",
    "split",
    "columns",
    "system",
}
_OWN = {
    key: [name for name in KEYS if name.rpartition(".")[2] == key and "[]" not in name]
    for key in (name.rpartition(".")[2] for name in KEYS)
}


def key_name(path: Path) -> str:
    """The name of the path in the reference: ``data.train[].weight``."""
    out = ""
    for part in path:
        out += "[]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out


def _below(section: Path) -> list[str]:
    """Names of the keys that may stand in a section."""
    prefix = key_name(section) + "." if section else ""
    return [name.removeprefix(prefix) for name in KEYS if name.startswith(prefix) and "." not in name.removeprefix(prefix)]


def unknown(given: Given, path: Path) -> Problem:
    """A key that is not in the reference: in another spelling, another place, another tool's, or nowhere."""
    *section, word = path
    word, value, known = str(word), given.at(path), _below(tuple(section))
    plain = word.lower().replace("-", "_")
    if plain in known and plain != word:
        return given.problem(path, f"is spelled `{plain}`", Write(dotted((*section, plain)), typed(value)))
    if "." in word and key_name(tuple(word.split("."))) in KEYS:
        return given.problem(
            path, "points are for `--set`; in the file a key stands under its section", Write(word, typed(value))
        )
    if section and section[0] == "model" and {"shape", "factory"} <= set(given.at(tuple(section))):
        return given.problem(path, "`shape` and `factory` exclude each other", "keep one of the two")
    foreign = foreign_key(word, value, given.at(tuple(section)) if section else given.values)
    if foreign is not None:
        return given.problem(path, foreign.what, *foreign.ways)
    places = [name for name in _OWN.get(plain, ()) if plain not in _VAGUE]
    if places:
        return given.problem(path, f"stands in another place: the key is `{places[0]}`", Write(places[0], typed(value)))
    close = nearest(plain, known, 0.7)
    if close:
        return given.problem(
            path,
            f"is no key; the nearest is `{dotted((*section, close))}`",
            Write(dotted((*section, close)), typed(value)),
        )
    like = nearest(plain, WORDS, 0.85)
    foreign = foreign_key(like, value, {}) if like else None
    if foreign is not None:
        return given.problem(path, f"is no key; the nearest, `{like}`, {foreign.what}", *foreign.ways)
    other = nearest(plain, [one for one in _OWN if one not in _VAGUE], 0.8)
    if other:
        return given.problem(path, f"is no key; the nearest is `{_OWN[other][0]}`", Write(_OWN[other][0], typed(value)))
    under = f" under `{dotted(tuple(section))}`" if section else ""
    return given.problem(path, f"is no key{under}; there are: " + ", ".join(known), "take it out")
