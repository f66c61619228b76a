"""What a key takes, in words, and docs/run-file.md made from it: read off ``keys``, so that neither can drift."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from . import keys
from .yamltext import typed

_HEAD = """\
# The run file

Every key, made from `shardwise.config` by `reference_page()`; a test holds the two equal.

A run file is YAML. Any key can be set from the command line instead, `--set data.seq_len=512`; the value is
read as YAML. What is set there wins over the file, and the file over the defaults. A key that is not in this
list, a value of another type and keys that exclude each other are refused before anything starts, all at once.

* Numbers: `1e-5`, `1.0e-5` and `1_000` are numbers; `"64"` in quotes is text and no number.
* `true` and `false` are truth values; `yes`, `no`, `on` and `off` are text, and so are dates.
* Paths are taken as written: relative ones are relative to the folder the command is started in, not to the
  run file's.
* *required* stands where a key has no default. Prices say what a key costs or saves, in memory or time.

The smallest run file:

```yaml
model: HuggingFaceTB/SmolLM2-135M
data: {train: texts/*.txt, seq_len: 2048}
global_batch: 64
optimizer: {lr: 1.0e-5}
run_dir: runs/first
```
"""


@dataclass(frozen=True)
class Key:
    """One key as the page and the messages speak of it.

    Attributes:
        name: Dotted from the top of the file; ``[]`` stands for each entry of a list.
        hint: Its annotation.
        sections: The sections it can be, whose keys come right after it.
        entries: The sections an entry of its list can be.
    """

    name: str
    field: FieldInfo
    hint: Any
    sections: tuple[type[keys.Section], ...]
    entries: tuple[type[keys.Section], ...] = ()

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def example(self) -> str:
        """A value as it is typed; empty where there is a default."""
        return str(self._extra["example"])

    @property
    def _extra(self) -> dict[str, Any]:
        extra = self.field.json_schema_extra
        assert isinstance(extra, dict), "every key is declared by keys._key"
        return extra

    @property
    def what(self) -> str:
        return str(self._extra["what"])

    @property
    def unit(self) -> str:
        return str(self._extra["unit"])

    @property
    def price(self) -> str:
        return str(self._extra["price"])

    @property
    def default(self) -> str:
        """As it would be typed."""
        if self.required:
            return "*required*"
        value = self.field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            return "see its keys"
        return f"`{typed(value)}`"


def all_keys() -> list[Key]:
    """Every key of a run file, in the order of the declarations, a section's keys after the section."""
    return list(_keys_of(keys.RunConfig, ""))


def _keys_of(section: type[keys.Section], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        inner = list(_sections(hints[name]))
        yield Key(
            prefix + name,
            field,
            hints[name],
            tuple(model for model, each in inner if not each),
            tuple(model for model, each in inner if each),
        )
        for model, each in inner:
            yield from _keys_of(model, f"{prefix}{name}{each}.")


def _sections(hint: Any, each: str = "") -> Iterator[tuple[type[keys.Section], str]]:
    if isinstance(hint, type) and issubclass(hint, keys.Section):
        yield hint, each
    elif get_origin(hint) is Annotated:
        yield from _sections(get_args(hint)[0], each)
    elif get_origin(hint) in (Union, types.UnionType):
        for one in get_args(hint):
            yield from _sections(one, each)
    elif get_origin(hint) is list:
        yield from _sections(get_args(hint)[0], each + "[]")


def takes(hint: Any) -> str:
    """What a key of this annotation takes, in words: ``a whole number from 1 up or `null` ``."""
    *most, last = dict.fromkeys(_kinds(hint, ()))
    return f"{', '.join(most)} or {last}" if most else last


def _kinds(hint: Any, limits: tuple[Any, ...]) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from _kinds(args[0], (*limits, *args[1:]))
    elif origin in (Union, types.UnionType):
        for one in args:
            yield from _kinds(one, ())
    elif origin is Literal:
        yield from (f"`{typed(value)}`" for value in args)
    elif origin is list:
        yield "a list of " + " or ".join(dict.fromkeys(_kinds(args[0], ())))
    elif origin is tuple:
        yield f"[a, b], each {next(_kinds(args[0], ()))}"
    elif origin is dict:
        yield "a mapping of names to text" if args[1] is not Any else "a mapping with `model_type`"
    elif isinstance(hint, type) and issubclass(hint, keys.Section):
        names = [name for name, field in hint.model_fields.items() if field.is_required()] or list(hint.model_fields)[:1]
        yield "`{" + ", ".join(f"{name}: ..." for name in names) + "}`"
    elif hint is type(None):
        yield "`null`"
    elif hint is bool:
        yield "`true` or `false`"
    else:
        yield {int: "a whole number", float: "a number", str: "text"}[hint] + _range(limits)


def _range(limits: tuple[Any, ...]) -> str:
    low = next(
        (f" from {one.ge}" if isinstance(one, Ge) else f" above {one.gt}" for one in limits if isinstance(one, (Ge, Gt))), ""
    )
    high = next(
        (f" to {one.le}" if isinstance(one, Le) else f" below {one.lt}" for one in limits if isinstance(one, (Le, Lt))), ""
    )
    return (
        low + (" and" if low and high.startswith(" below") else "") + high
        if high
        else low + (" up" if low.startswith(" from") else "")
    )


def reference_page() -> str:
    """The text of docs/run-file.md."""
    out, top = [_HEAD], all_keys()
    out += ["## Top level\n", *_table([one for one in top if "." not in one.name])]
    for section in [one for one in top if one.sections or one.entries]:
        inside = [one for one in top if one.name.replace("[]", "").rpartition(".")[0] == section.name.replace("[]", "")]
        out += [f"\n## `{section.name}`\n", f"{section.what[0].upper()}{section.what[1:]}.\n", *_table(inside)]
    return "\n".join(out) + "\n"


def _table(rows: list[Key]) -> Iterator[str]:
    yield "| key | takes | default | what it is | unit | price |"
    yield "|---|---|---|---|---|---|"
    for one in rows:
        cells = (f"`{one.name}`", takes(one.hint), one.default, one.what, one.unit, one.price)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
