"""What was given: the file and the ``--set`` flags as one tree of plain values, each with its place. Knows no key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from ..config.combinations import Write
from ..config.yamltext import Fault, Path, Tree, read_tree, read_value, short, typed
from ..errors import OnDisk, UsageError, nearest
from .problem import Problem

_FLAGS_FIRST = 10**9  # order of the first --set: after every line of a file


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


@dataclass
class Given:
    """The tree, and where each part of it comes from.

    Attributes:
        name: The file as it was typed.
        values: Plain values; the flags are in it.
        lines: Path -> line of the file.
        flags: Path -> (number of the flag, ``a.b=value``), for what a flag gave.
        raw: Path -> the text of a flag's value, before it was read as YAML.
        problems: Keys given twice, flags without a value and the like.
    """

    name: str
    values: dict[str, Any]
    lines: dict[Path, int]
    flags: dict[Path, tuple[int, str]] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def _place(self, path: Path) -> Path:
        """The path or what holds it, else the first part of it that was given; the last two for sections made by flags."""
        given = {*self.flags, *self.lines}
        above = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in given), ())
        return above or next((one for one in (*self.lines, *self.flags) if one[: len(path)] == path), ())

    def source(self, path: Path) -> str:
        """``run.yaml:6`` or ``--set a.b=value``; empty for what nobody gave."""
        place = self._place(path)
        if place in self.flags:
            return f"--set {self.flags[place][1]}"
        return f"{self.name}:{self.lines[place]}" if place else ""

    def order(self, path: Path) -> int:
        """Sorts problems: the line, then the flags."""
        place = self._place(path)
        return _FLAGS_FIRST + self.flags[place][0] if place in self.flags else self.lines.get(place, 0)

    def by_flag(self, path: Path) -> bool:
        return self.order(path) >= _FLAGS_FIRST

    def head(self, path: Path) -> str:
        """A key with value and place: ```data.seq_len: 512` (run.yaml:6)``, or the flag that gave it."""
        source, found = self.source(path), self.at(path)
        if self.by_flag(path):
            return f"`{source}`"
        shown = f": {short(found)}" if not isinstance(found, (dict, list)) or len(typed(found)) <= 40 else ""
        return f"`{dotted(path)}{shown}`" + (f" ({source})" if source else "")

    def problem(self, path: Path, what: str, *ways: Write | str) -> Problem:
        """A problem of the key at ``path``; what a way out writes is no longer missing."""
        gives = frozenset(one.key for one in ways if isinstance(one, Write))
        return Problem(self.head(path), what, ways, self.order(path), self.by_flag(path), gives)

    def at(self, path: Path) -> Any:
        """The value at ``path``, None where there is none."""
        found: Any = self.values
        for part in path:
            inside = (
                part in found
                if isinstance(found, dict)
                else isinstance(found, list) and isinstance(part, int) and part < len(found)
            )
            if not inside:
                return None
            found = found[part]
        return found

    def put(self, parts: Sequence[str], value: Any) -> Path:
        """Set a value, making or replacing what holds it: ``layout: auto`` becomes a mapping when a key of it is set.

        Returns:
            Its path, with numbers for entries of lists.

        Raises:
            LookupError: A list has no such entry; the text says which.
        """
        place: Any = self.values
        path: Path = ()
        for at, part in enumerate(parts):
            key: str | int = part
            if isinstance(place, list):
                if not part.isdigit() or int(part) >= len(place):
                    raise LookupError(f"`{dotted(path)}` is a list of {len(place)}, counted from 0: it has no entry `{part}`")
                key = int(part)
            path = (*path, key)
            if at == len(parts) - 1:
                place[key] = value
            else:
                inner = place[key] if isinstance(place, list) else place.get(key)  # type: ignore[index]
                place[key] = inner = inner if isinstance(inner, (dict, list)) else {}
                place = inner
        return path


def read(file: File, overrides: Sequence[str]) -> tuple[Given, str]:
    """The file and the flags, and the file's text.

    Raises:
        OnDisk: No such file, a folder, or not text.
        UsageError: Not YAML, or no mapping.
    """
    text = _text_of(file)
    tree = read_tree(text)
    _refuse_torn(file, text, tree)
    given = Given(str(file), tree.value, tree.lines)
    given.problems += [_fault(given, one) for one in tree.faults]
    for number, override in enumerate(overrides):
        _override(given, number, override)
    return given, text


def _text_of(file: File) -> str:
    try:
        return file.read_text("utf-8-sig")
    except FileNotFoundError:
        names = sorted(one.name for one in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        close = nearest(file.name, names) or (names[0] if len(names) == 1 else None)
        why = "" if file.parent.is_dir() else f"there is no folder `{file.parent}`"
        raise OnDisk(
            f"run file `{file}` does not exist",
            why=why,
            hints=[f"`{file.parent / close}` is there"] if close else ["docs/run-file.md shows the smallest one"],
            common=True,
        ) from None
    except IsADirectoryError:
        inside = (
            [f"`--resume {file}` goes on with the run in it"]
            if (file / "config.yaml").is_file()
            else [f"`{one}` is in it" for one in sorted(file.glob("*.yaml"))[:3]]
        )
        raise OnDisk(f"`{file}` is a folder, a run file is wanted", hints=inside, common=True) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise OnDisk(
            f"`{file}` is not UTF-8 text: byte 0x{error.object[error.start]:02x} on line {line}",
            where=f"{file}:{line}",
            hints=["save it as UTF-8"],
            common=True,
        ) from None
    except OSError as error:
        raise OnDisk(f"run file `{file}` cannot be read: {error.strerror}", common=True) from error


def _refuse_torn(file: File, text: str, tree: Tree) -> None:
    if isinstance(tree.value, dict):
        return
    start = ["docs/run-file.md shows the smallest run file"]
    if not tree.faults:
        kind = (
            "empty"
            if tree.value is None
            else f"a {'list' if isinstance(tree.value, list) else 'single value'}, not a mapping of keys"
        )
        raise UsageError(f"run file `{file}` is {kind}", hints=start, common=True)
    fault = tree.faults[0]
    lines = text.splitlines()
    line = lines[fault.line - 1] if fault.line <= len(lines) else ""
    shown = [("line", f"`{line.rstrip()[:70]}`")] if line.strip() else []
    raise UsageError(
        f"not YAML: {fault.what}", where=f"{file}:{fault.line}:{fault.column}", lines=shown, hints=[fault.hint], common=True
    )


def _fault(given: Given, fault: Fault) -> Problem:
    ways = ("keep one of the two",) if "already" in fault.what else ()
    return Problem(f"`{dotted(fault.path)}` ({given.name}:{fault.line})", fault.what, ways, fault.line)


def _override(given: Given, number: int, text: str) -> None:
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    order = _FLAGS_FIRST + number

    def bad(what: str, *ways: str) -> None:
        given.problems.append(Problem(f"`--set {text}`", what, ways, order, True))

    if not equals or not all(parts):
        bad("is not KEY=VALUE", "write for example `--set data.seq_len=512`")
        return
    if not raw.strip():
        bad("has no value", f"write `--set {key}=null` for none")
        return
    try:
        value = read_value(raw)
    except ValueError as error:
        bad(f"is not YAML after the `=`: {error}", f"write `--set '{key}=\"{raw.strip()}\"'` for text")
        return
    scalars = {one for one in (*given.lines, *given.flags) if not isinstance(given.at(one), (dict, list))}
    try:
        path = given.put(parts, value)
    except LookupError as error:
        bad(error.args[0], f"set the list as a whole: `--set {parts[0]}.{parts[1]}=[...]`")
        return
    lost = [path[:end] for end in range(1, len(path)) if path[:end] in scalars]
    for known in [one for one in (*given.lines, *given.flags) if one[: len(path)] == path or one in lost]:
        given.lines.pop(known, None)
        given.flags.pop(known, None)
    given.flags[path] = number, text
    given.raw[path] = raw
