"""Reading a run file: YAML with line numbers, ``--set`` flags over it, and every problem at once, each with a way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.yamltext import write_tree
from .check import check, shown
from .given import dotted, read
from .problem import error_of

__all__ = ["RunFile", "load_run_file"]


@dataclass(frozen=True)
class RunFile:
    """A run file, checked.

    Attributes:
        path: As it was given.
        text: Of the file, without the flags.
        values: What was given, flags included, without defaults.
        sources: Dotted key -> ``run.yaml:6`` or ``--set a.b=value``, for every key that was given.
    """

    config: RunConfig
    path: Path
    text: str
    values: dict[str, Any]
    sources: dict[str, str]

    def where(self, key: str) -> str:
        """A key as messages name it: ```seed: 1` (run.yaml:6)``, ```--set seed=1` ``, ```log_every: 50` (default)``."""
        source = self.sources.get(key) or next((place for one, place in self.sources.items() if one.startswith(key + ".")), "")
        if source.startswith("--set "):
            return f"`{source}`"
        value = shown(self.config, tuple(int(part) if part.isdigit() else part for part in key.split(".")))
        if source:
            return f"`{key}: {value}` ({source})" if value is not None and value != "null" else f"`{key}` ({source})"
        above = next((self.sources[up] for up in _above(key) if self.sources.get(up, "").startswith("--set ")), "")
        if above:
            return f"`{above}`"
        return f"`{key}`, not given" if value in (None, "null", "{}", "[]") else f"`{key}: {value}` (default)"

    def text_with_overrides(self) -> str:
        """The run file as a whole: the file's own text, or the values as YAML where flags changed them."""
        if not any(source.startswith("--set ") for source in self.sources.values()):
            return self.text
        flags = dict.fromkeys(source for source in self.sources.values() if source.startswith("--set "))
        return f"# {self.path} with " + " ".join(flags) + "\n" + write_tree(self.values)


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read, override and check a run file.

    Args:
        overrides: ``a.b=value`` each, as after ``--set``; the value is YAML, later ones win.

    Raises:
        OnDisk: The file is missing, a folder, or not text.
        UsageError: Everything that is wrong with it and with the flags, in one error.
    """
    given, text = read(path, overrides)
    config, problems = check(given)
    if problems or config is None:
        raise error_of(given.name, problems, given.values)
    places = {
        **{one: f"{given.name}:{line}" for one, line in given.lines.items()},
        **{one: f"--set {flag}" for one, (_, flag) in given.flags.items()},
    }
    return RunFile(config, path, text, given.values, {dotted(one): place for one, place in places.items()})
