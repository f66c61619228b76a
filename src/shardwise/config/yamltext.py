"""YAML text to plain values and back, with the line of every key. Knows nothing of what the keys mean.

The words of YAML 1.2 are read, not those of 1.1: ``1e-5`` is a number, and ``no``, ``on``, ``010`` or ``12:30`` never become
something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
_PREFIX = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_WORDS = [
    ("null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"<<$"), ["<"]),
]
_DEEPEST = 20


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own form


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own form

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_float(self, data: float) -> yaml.ScalarNode:
        """``1.0e-5``: a number to readers of YAML 1.1 too, unlike ``1e-05``."""
        text = repr(data)
        if "e" in text:
            mantissa, _, exponent = text.partition("e")
            return self._number(f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}")
        return self._number({"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text))

    def _number(self, text: str) -> yaml.ScalarNode:
        node: yaml.ScalarNode = self.represent_scalar(_PREFIX + "float", text)
        return node


_Dumper.add_representer(float, _Dumper.represent_float)
for _name, _pattern, _first in _WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _name, _pattern, _first)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a text as YAML.

    Attributes:
        line, column: From 1.
        path: The key it concerns, empty for the whole text.
        hint: A way out of a syntax error.
    """

    line: int
    column: int
    what: str
    path: Path = ()
    hint: str = "text with `: ` or ` #` in it goes in quotes"


@dataclass(frozen=True)
class Tree:
    """A text read.

    Attributes:
        value: Mappings, lists, text, numbers, truth values and None.
        lines: Path -> line from 1, for every key and every entry of a list.
        faults: A syntax error alone, or all keys given twice and the like.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def read_tree(text: str) -> Tree:
    """Read one YAML document; an empty one has the value None."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        return Tree(
            None,
            faults=(
                Fault(
                    before.count("\n") + 1,
                    error.position - before.rfind("\n"),
                    f"the character {chr(error.character)!r} is not allowed",
                ),
            ),
        )
    except yaml.MarkedYAMLError as error:
        return Tree(None, faults=(_syntax(error),))
    except RecursionError:
        return Tree(None, faults=(Fault(1, 1, f"it is nested more than {_DEEPEST} deep"),))
    finally:
        if loader is not None:
            loader.dispose()
    builder = _Builder()
    value = None if node is None else builder.build(node, ())
    return Tree(value, builder.lines, tuple(builder.faults))


# What PyYAML says -> what a person would, and the way out. The first that is in its words counts.
_SYNTAX = [
    (r"\t", "a tab stands where YAML takes spaces", "indent with spaces"),
    ("end of stream", "it ends inside a quote or a bracket", "close the quote or bracket that is open"),
    ("<stream end>", "it ends inside a quote or a bracket", "close the quote or bracket that is open"),
    (
        "mapping values are not allowed",
        "a `: ` stands where no key can be",
        "a line above may lack its `: `; text with `: ` in it goes in quotes",
    ),
    ("could not find expected ':'", "a key has no `: ` after it", "write `key: value`, with a space after the colon"),
    ("cannot start any token", "text begins with a character that means something else", "put the text in quotes"),
    ("<block end>", "the indentation fits no line above", "keys of one section begin in one column"),
    ("expected ',' or", "a comma or a closing bracket is missing", "text with a comma in it goes in quotes"),
    ("found another document", "a second document begins", "take the line `---` out"),
    ("undefined alias", "text begins with `*`, or names an anchor that is not there", "put the text in quotes"),
]


def _syntax(error: yaml.MarkedYAMLError) -> Fault:
    """PyYAML's complaint in plain words."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "it cannot be read"
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    for part, what, hint in _SYNTAX:
        if part in problem:
            return Fault(line, column, what, hint=hint)
    return Fault(line, column, problem)


def read_value(text: str) -> Any:
    """The value of one line of YAML, as in ``--set key=value``.

    Raises:
        ValueError: It is not YAML; the text says why.
    """
    tree = read_tree(text)
    if tree.faults:
        raise ValueError(tree.faults[0].what)
    return tree.value


class _Builder:
    """Plain values from YAML nodes."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.faults: list[Fault] = []

    def build(self, node: yaml.Node, path: Path) -> Any:
        if len(path) > _DEEPEST:  # an alias inside its own anchor never ends
            self._fault(node, path, f"it is nested more than {_DEEPEST} deep")
            return None
        if node.tag.removeprefix(_PREFIX) not in (*_MAKE, "map", "seq"):
            self._fault(node, path, f"the tag `{node.tag.replace(_PREFIX, '!!')}` has no meaning here")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for at, item in enumerate(node.value):
                self.lines[(*path, at)] = item.start_mark.line + 1
                items.append(self.build(item, (*path, at)))
            return items
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._fault(key, path, "a key is one word, this is a list or a mapping")
                continue
            if key.tag == _PREFIX + "merge":
                for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    inner = self.build(one, path)
                    merged = {**(inner if isinstance(inner, dict) else {}), **merged}
                continue
            here = (*path, key.value)
            if key.value in found:
                self._fault(key, here, f"is given on line {self.lines[here]} already")
                continue
            self.lines[here] = key.start_mark.line + 1
            found[key.value] = self.build(value, here)
        return {**merged, **found}

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            return _MAKE[node.tag.removeprefix(_PREFIX)](node.value)
        except (KeyError, ValueError):
            self._fault(node, path, f"is not what its tag `{node.tag.replace(_PREFIX, '!!')}` says")
            return None

    def _fault(self, node: yaml.Node, path: Path, what: str) -> None:
        self.faults.append(Fault(node.start_mark.line + 1, node.start_mark.column + 1, what, path))


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_MAKE: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", "")),
    "float": _float,
    "str": str,
    "merge": str,
}


def typed(value: Any) -> str:
    """A plain value as one line of YAML, as it would be typed: ``null``, ``[0.9, 0.95]``, ``{shape: gpt2}``, ``"64"``."""
    text = _dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    return text.replace("'", '"') if _plain_quotes(value) else text


def short(value: Any, most: int = 48) -> str:
    """``typed``, cut to ``most`` characters."""
    text = typed(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def write_tree(value: Any) -> str:
    """Plain values as a YAML document that ``read_tree`` reads back equal."""
    return _dump(value, default_flow_style=False, width=120)


def _dump(value: Any, **style: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return text


def _plain_quotes(value: Any) -> bool:
    """Whether single quotes of YAML may become double ones: no text inside needs escapes."""
    if isinstance(value, dict):
        return all(_plain_quotes(one) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_plain_quotes, value))
    return not isinstance(value, str) or (value.isprintable() and not any(c in value for c in "'\"\\"))
