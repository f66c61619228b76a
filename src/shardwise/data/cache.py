"""Folders that are made once, named by what is in them, and seen only when whole.

A folder is written aside as ``.tmp-...``, every file flushed, ``shardwise.meta`` with the size of each file last, then renamed.
Two processes that make the same folder at once both succeed; one of the two copies is thrown away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ..errors import NotReady, OnDisk
from ..units import bytes_text

META = "shardwise.meta"  # JSON; the name keeps it out of copies of tokenizer files
_STALE_S = 24 * 3600
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class HasCacheDir(Protocol):
    """What ``cache_folder`` needs of a ``DataConfig``."""

    @property
    def cache_dir(self) -> str | None: ...


def cache_folder(config: HasCacheDir) -> Path:
    """Where prepared data of this run file lives: ``data.cache_dir``, else ``shardwise`` under ``$XDG_CACHE_HOME`` or
    ``~/.cache``."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "shardwise"


def digest(facts: Any) -> str:
    """32 hexadecimal digits that name JSON-able ``facts``."""
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, ensure_ascii=True).encode())


def file_digest(path: Path) -> str:
    """32 hexadecimal digits of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def publish(final: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The meta of folder ``final``, made by ``make(aside)`` unless a whole one is there.

    Args:
        make: Fills the empty folder it is given and returns the facts that go into ``shardwise.meta``.

    Raises:
        NotReady: The cache cannot be written, or its disk is full. What was written is removed.
    """
    found = read_meta(final)
    if found is not None:
        return found
    with _writing(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent)
        # In this order: another process may publish a whole one at any time.
        if final.exists() and read_meta(final) is None:
            shutil.rmtree(final, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".tmp-{final.name[:8]}-", dir=final.parent))
        try:
            facts = make(aside)
            os.chmod(aside, 0o777 & ~_umask())
            facts["files"] = {p.name: p.stat().st_size for p in sorted(aside.iterdir())}
            (aside / META).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
            for path in aside.iterdir():
                _flush(path)
            try:
                aside.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _flush(final.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return open_meta(final)


def read_meta(folder: Path) -> dict[str, Any] | None:
    """``shardwise.meta`` of a whole folder; None where a file is missing or of another size."""
    try:
        facts: dict[str, Any] = json.loads((folder / META).read_text("utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in facts["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return facts if whole else None


def open_meta(folder: Path) -> dict[str, Any]:
    """``shardwise.meta`` of a folder that must be whole.

    Raises:
        OnDisk: It is missing or torn.
    """
    facts = read_meta(folder)
    if facts is None:
        raise OnDisk(
            "prepared data are missing or torn", where=str(folder), hints=["run the same command again: it prepares them anew"]
        )
    return facts


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns the operating system's refusals to write into NotReady."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            room = shutil.disk_usage(_existing(folder)).free
            raise NotReady(
                f"the disk of the data cache is full, {bytes_text(room)} are free",
                where=str(folder),
                why=os.strerror(error.errno or 0),
                hints=["`--set data.cache_dir=FOLDER` on a disk with more room"],
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise NotReady(
                "the data cache cannot be written",
                where=str(folder),
                why=os.strerror(error.errno),
                hints=["`--set data.cache_dir=FOLDER` where you may write"],
            ) from error
        raise


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind a day ago and more."""
    for path in folder.glob(".tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
