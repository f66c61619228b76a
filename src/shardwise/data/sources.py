"""Which files, globs or hub ids a path of the run file means, and the records in them.

A record is a dict. A text file is one record ``{"text": ...}``; a line of JSONL, an element of a JSON list and a row of Parquet
is one each. Every record comes with its place (``chats.jsonl:7``), for messages.
"""

from __future__ import annotations

import glob
import json
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NotReady, OnDisk, ShardwiseError, UsageError, nearest
from ..hub import hub_answers
from .cache import file_digest
from .columns import kind_name

Record = dict[str, Any]
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GLOB = set("*?[")


@dataclass(frozen=True)
class Source:
    """One set of records: files in sorted order, or a hub id."""

    name: str
    where: str
    files: tuple[Path, ...] = ()
    split: str = "train"
    as_text: bool = False
    hub: list[Any] = field(default_factory=list, compare=False, repr=False)  # the loaded hub data set, once needed

    def facts(self) -> list[list[Any]]:
        """What identifies the content: name, size and digest of each file, or id, split and fingerprint of a hub data set."""
        if not self.files:
            return [[self.name, self.split, self._dataset()._fingerprint]]
        return [[path.name, path.stat().st_size, file_digest(path)] for path in self.files]

    def records(self, only: Collection[str] | None = None) -> Iterator[tuple[Record, str]]:
        """Each record with its place, in a fixed order.

        Args:
            only: Columns that are needed; Parquet and hub data sets then read no others.

        Raises:
            OnDisk: A file that cannot be read as what it is; names file, line and column.
        """
        if not self.files:
            yield from self._hub_records(only)
        for path in self.files:
            kind = (
                "text"
                if self.as_text and path.suffix.lower() not in (".jsonl", ".ndjson", ".json", ".parquet")
                else kind_of(path)
            )
            try:
                yield from _READERS[kind](path, only)
            except OSError as error:
                raise OnDisk(f"`{path}` cannot be read", where=self.where, why=error.strerror or str(error)) from error

    def _dataset(self) -> Any:
        if not self.hub:
            self.hub.append(_load_hub(self.name, self.split, self.where))
        return self.hub[0]

    def _hub_records(self, only: Collection[str] | None) -> Iterator[tuple[Record, str]]:
        row, dataset = 0, self._dataset()
        if only is not None:
            dataset = dataset.select_columns([name for name in dataset.column_names if name in only])
        for batch in dataset.iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                row += 1
                yield dict(zip(batch, values, strict=True)), f"{self.name}, row {row}"


def kind_of(path: Path) -> str | None:
    """``jsonl``, ``json``, ``parquet`` or ``text`` by the end of the name; None where it is none of these."""
    return _KINDS.get(path.suffix.lower())


def find(path: str, *, split: str = "train", as_text: bool = False, where: str = "") -> Source:
    """What ``path`` means: a file, a folder's data files, a glob, or a hub id.

    Args:
        as_text: Files of an unknown kind are texts (``format: text``).
        where: Where the path was written.

    Raises:
        OnDisk: No such file, or none that matches.
        UsageError: A file of a kind that is not known.
    """
    full = Path(path).expanduser()
    if full.is_file():
        files = [full]
    elif full.is_dir():
        files = sorted(p for p in full.iterdir() if p.is_file() and kind_of(p))
        if not files:
            raise OnDisk(
                f"folder `{path}` holds no data file",
                where=where,
                why="looked for " + ", ".join(sorted(_KINDS)),
                hints=[f"`{path.rstrip('/')}/*` with `format: text` takes every file as a text"],
            )
    elif _GLOB & set(path):
        files = sorted(Path(p) for p in glob.glob(str(full), recursive=True) if Path(p).is_file())
        if not files:
            raise OnDisk(
                f"no file matches `{path}`",
                where=where,
                why=f"looked from {_short(Path.cwd())}",
                hints=["`**` reaches into folders below, `*` does not"],
            )
    elif _HUB_ID.fullmatch(path) and not kind_of(full) and not full.parent.is_dir():
        return Source(path, where, split=split)
    else:
        raise _missing(path, full, where)
    for file in files:
        if not as_text and kind_of(file) is None:
            raise UsageError(
                f"`{file}` is of no kind that can be told from its name",
                where=where,
                why="known are " + ", ".join(sorted(_KINDS)),
                hints=["`--set data.format=text` takes it as a text"],
            )
    return Source(path, where, tuple(files), as_text=as_text)


def _missing(path: str, full: Path, where: str) -> OnDisk:
    if not full.parent.is_dir():
        parent = full.parent
        while not parent.is_dir():
            parent = parent.parent
        return OnDisk(
            f"`{path}` does not exist",
            where=where,
            why=f"nor does its folder; the last that does is\n{_short(parent.absolute())}",
        )
    names = sorted(p.name for p in full.parent.iterdir())
    close = nearest(full.name, names)
    hints = [f"`{full.parent / close if path.count(os.sep) else close}` exists"] if close else []
    if not hints and not full.suffix and "/" not in path:
        hints = ["a hub id is written ORG/NAME"]
    return OnDisk(f"`{path}` does not exist", where=where, hints=hints)


def short_name(name: str) -> str:
    """A path's last 28 columns, for lines of progress."""
    return name if len(name) <= 28 else "..." + name[-25:]


def _short(path: Path) -> str:
    home = str(Path.home())
    return "~" + str(path)[len(home) :] if str(path).startswith(home + os.sep) else str(path)


# ---- one file of each kind ----


def _jsonl(path: Path, only: Collection[str] | None = None) -> Iterator[tuple[Record, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.lstrip().startswith(b"["):
                yield from _json(path)
                return
            if text := line.strip():
                place = f"{path}:{number}"
                yield _object(_parse(text, f"line {number} of `{path.name}`", path, number), place), place


def _json(path: Path, only: Collection[str] | None = None) -> Iterator[tuple[Record, str]]:
    whole = path.read_bytes().lstrip()
    if not whole.startswith(b"["):
        yield from _jsonl(path)
        return
    for number, record in enumerate(_parse(whole, f"`{path.name}`", path, 0), 1):
        place = f"{path}, element {number}"
        yield _object(record, place), place


def _parse(text: bytes, name: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OnDisk(
            f"{name} is not UTF-8: byte {error.start + 1} is 0x{text[error.start]:02x}",
            where=f"{path}:{line}" if line else str(path),
            hints=[f"`iconv -f latin1 -t utf-8 {path.name}` converts it"],
        ) from error
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1 if line else error.lineno
        raise OnDisk(
            f"{name} is not JSON",
            where=f"{path}:{at}, column {error.colno}",
            why=error.msg,
            lines=[("here", _around(error))],
            hints=["one JSON object a line, or one list of objects in the whole file"],
        ) from error


def _around(error: json.JSONDecodeError) -> str:
    begin = max(error.doc.rfind("\n", 0, error.pos) + 1, error.pos - 30)
    text = error.doc[begin : error.pos + 20].split("\n")[0]
    return "".join(c if c.isprintable() else " " for c in text) + "\n" + " " * (error.pos - begin) + "^"


def _object(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise OnDisk(
            f"a record is {kind_name(record)}, not an object with named columns",
            where=place,
            hints=['`{"text": "..."}` or `{"messages": [...]}` are records'],
        )
    return record


def _parquet(path: Path, only: Collection[str] | None = None) -> Iterator[tuple[Record, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = None if only is None else [name for name in file.schema_arrow.names if name in only]
            for batch in file.iter_batches(batch_size=1000, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield record, f"{path}, row {row}"
    except pa.ArrowException as error:
        raise OnDisk(
            f"`{path.name}` is not a whole Parquet file",
            where=f"{path}" + (f", after row {row}" if row else ""),
            why=str(error).splitlines()[0][:120],
        ) from error


def _text(path: Path, only: Collection[str] | None = None) -> Iterator[tuple[Record, str]]:
    whole = path.read_bytes()
    try:
        yield {"text": whole.decode("utf-8-sig")}, str(path)
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise OnDisk(
            f"`{path.name}` is not UTF-8: byte {error.start + 1:,} is 0x{whole[error.start]:02x}",
            where=f"{path}:{line}",
            hints=[f"`iconv -f latin1 -t utf-8 {path.name}` converts it"],
        ) from error


_READERS: dict[str | None, Callable[[Path, Collection[str] | None], Iterator[tuple[Record, str]]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "text": _text,
}


# ---- the hub ----


def _load_hub(hub_id: str, split: str, where: str) -> Any:
    """The data set of a hub id, from its cache or the network.

    Raises:
        NotReady: It cannot be had.
        UsageError: It has no such split.
    """
    offline = not hub_answers()
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = before or offline
        return datasets.load_dataset(hub_id, split=split)
    except ShardwiseError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ValueError) and "split" in reason.lower():
            raise UsageError(
                f"hub data set `{hub_id}` has no split `{split}`",
                where=where,
                why=textwrap.fill(reason[:200], 68),
                hints=[f"`train: [{{path: {hub_id}, split: NAME}}]`"],
            ) from error
        raise NotReady(
            f"hub data set `{hub_id}` cannot be fetched\n       and is not in the local cache",
            where=where,
            why=textwrap.fill(reason[:200], 68),
            hints=[
                "`--set data.train=FILE` with JSONL, Parquet or text on this machine",
                f"with a network:\n      `hf download --repo-type dataset {hub_id}`",
            ],
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
