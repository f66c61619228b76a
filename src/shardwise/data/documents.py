"""A whole set tokenised once: its documents one after the other on disk, memory-mapped by every rank.

    tokens.bin      uint16 or uint32, all documents without gaps
    marks.bin       uint8 a token, 1 = trained; absent where all are
    lengths.npy     int64 [documents]
    shardwise.meta  format, columns, counts, the largest id

What is stored depends on content, format and tokenizer only: another ``seq_len`` or seed packs the same store anew without
tokenising.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OnDisk, UsageError
from ..units import bytes_text
from . import columns
from .cache import digest, open_meta, publish
from .chat import Document, Encoder
from .columns import Reading
from .sources import Record, Source, short_name

_VERSION = 1  # of what the tokens of a record are; another number makes every cache anew
_BATCH_RECORDS, _BATCH_CHARACTERS = 1024, 1 << 21
_SAY_EVERY_S = 2.0
_SAY_HASHING_BYTES = 1 << 30  # about a second


@dataclass(frozen=True)
class Recipe:
    """What decides the tokens of a set, besides its content."""

    format: str
    columns: dict[str, str]
    system: str | None
    tokenizer: str  # digest of its files


@dataclass(frozen=True)
class Documents:
    """One tokenised set, opened.

    Attributes:
        folder: Where it lies.
        meta: ``format``, ``columns``, ``empty`` (records without text), ``unanswered`` (conversations without
            assistant), ``max_id``.
        tokens: ``[num_tokens]``, memory-mapped.
        marks: uint8 ``[num_tokens]``, memory-mapped; None where every token is trained.
        lengths: int64 ``[documents]``.
    """

    folder: Path
    meta: dict[str, Any]
    tokens: npt.NDArray[Any]
    marks: npt.NDArray[np.uint8] | None
    lengths: npt.NDArray[np.int64]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each document begins, int64 ``[documents]``."""
        return np.cumsum(self.lengths) - self.lengths


def open_documents(folder: Path) -> Documents:
    """The tokenised set in ``folder``.

    Raises:
        OnDisk: It is missing or torn.
    """
    meta = open_meta(folder)
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    marks = np.memmap(folder / "marks.bin", dtype=np.uint8, mode="r") if "marks.bin" in meta["files"] else None
    return Documents(folder, meta, tokens, marks, np.load(folder / "lengths.npy"))


def tokenise(
    source: Source,
    recipe: Recipe,
    encoder: Encoder,
    root: Path,
    *,
    vocab_size: int,
    where: Callable[[str], str],
    progress: Callable[[str], None],
) -> Documents:
    """The set of ``source`` as tokens, from the cache under ``root`` if it is there.

    Raises:
        OnDisk: A record that cannot be read (the first one, with file and line), no record at all, no assistant turn in any
            conversation.
        UsageError: Unknown columns, no chat template, a token id at or above ``vocab_size``.
    """
    name = short_name(source.name)
    if (size := sum(path.stat().st_size for path in source.files)) > _SAY_HASHING_BYTES:
        progress(f"{name}: hashing {bytes_text(size)}")
    key = digest([_VERSION, source.facts(), asdict(recipe)])
    folder = root / "documents" / key

    def make(aside: Path) -> dict[str, Any]:
        return _write(source, recipe, encoder, aside, vocab_size=vocab_size, where=where, progress=progress)

    publish(folder, make)
    found = open_documents(folder)
    check_ids(found.meta["max_id"], vocab_size, encoder.tokenizer, where)
    documents = f"{len(found.lengths):,} document{'s' * (len(found.lengths) != 1)}"
    progress(f"{name}: {documents} as {found.meta['format']}, {len(found.tokens):,} tokens")
    return found


def check_ids(max_id: int, vocab_size: int, tokenizer: Any, where: Callable[[str], str]) -> None:
    """Refuse data whose tokens the model has no embedding for.

    Raises:
        UsageError: ``max_id`` is at or above ``vocab_size``.
    """
    if max_id >= vocab_size:
        raise UsageError(
            f"tokenizer and model disagree: the data hold token id {max_id:,},\n       the model knows ids below {vocab_size:,}",
            where=where("tokenizer"),
            lines=[("token", repr(tokenizer.convert_ids_to_tokens(max_id)))],
            hints=[
                "leave out `tokenizer:`, the one beside the weights is used then",
                f"`model: {{shape: ...}}` with `vocab_size: {len(tokenizer)}` fits this one",
            ],
        )


def _write(
    source: Source,
    recipe: Recipe,
    encoder: Encoder,
    folder: Path,
    *,
    vocab_size: int,
    where: Callable[[str], str],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    reading, name = _reading(source, recipe, encoder, where), short_name(source.name)
    progress(f"{name}: {reading.text()}")
    dtype = np.uint16 if len(encoder.tokenizer) <= 1 << 16 else np.uint32
    lengths, max_id, num_tokens, empty, unanswered = array("q"), -1, 0, 0, 0
    last_said = time.monotonic()
    with ExitStack() as files:
        tokens_file = files.enter_context((folder / "tokens.bin").open("wb"))
        marks_file = files.enter_context((folder / "marks.bin").open("wb")) if reading.format != "text" else None
        for batch, num_empty in _batches(source, reading):
            empty += num_empty
            for document in _encode(batch, reading, recipe.system, encoder):
                if document.marks is not None and not document.marks[1:].any():
                    unanswered += 1
                    continue
                max_id = max(max_id, int(document.tokens.max()))
                check_ids(max_id, vocab_size, encoder.tokenizer, where)
                tokens_file.write(document.tokens.astype(dtype).tobytes())
                if marks_file is not None and document.marks is not None:
                    marks_file.write(document.marks.astype(np.uint8).tobytes())
                lengths.append(len(document.tokens))
                num_tokens += len(document.tokens)
            if time.monotonic() - last_said > _SAY_EVERY_S:
                last_said = time.monotonic()
                progress(f"{name}: {len(lengths):,} documents tokenised, {num_tokens:,} tokens")
    if not lengths and unanswered:
        raise OnDisk(
            f"no conversation of `{source.name}` has an assistant turn with text",
            where=source.where,
            why=f"{unanswered:,} conversation{'s' * (unanswered != 1)} read, only the assistant's tokens are trained",
            hints=[
                "roles are `assistant` in `messages`, `gpt` in `conversations`",
                "`--set data.format=text` trains every token of a `text` column",
            ],
        )
    if not lengths:
        raise _nothing(source, empty)
    np.save(folder / "lengths.npy", np.frombuffer(lengths, np.int64))
    return {
        "format": reading.format,
        "shape": reading.shape,
        "columns": reading.columns,
        "dtype": np.dtype(dtype).name,
        "max_id": max_id,
        "empty": empty,
        "unanswered": unanswered,
        "num_documents": len(lengths),
        "num_tokens": num_tokens,
    }


def _reading(source: Source, recipe: Recipe, encoder: Encoder, where: Callable[[str], str]) -> Reading:
    """How to read the set, decided by its first record."""
    first = next(source.records(), None)
    if first is None:
        raise _nothing(source, 0)
    reading = columns.decide(*first, format=recipe.format, columns=recipe.columns, has_template=encoder.has_template, where=where)
    if reading.format == "chat" and not encoder.has_template:
        raise UsageError(
            "the data are conversations, and the tokenizer has no chat template",
            where=where("tokenizer"),
            lines=[("data", f"{first[1]}, {reading.text()}")],
            hints=[
                "`--set tokenizer=FOLDER` of an instruct model",
                "put its `chat_template.jinja` into the tokenizer's folder",
                "`--set data.format=prompt` trains without a template"
                if reading.shape in ("prompt", "instruction")
                else "`--set data.format=text` with a column of plain text",
            ],
        )
    if reading.format == "text" and encoder.eos is None:
        raise UsageError(
            "the tokenizer has no end-of-text token, so texts cannot be told apart",
            where=where("tokenizer"),
            hints=["set `eos_token` in the `tokenizer_config.json` of its folder"],
        )
    return reading


def _nothing(source: Source, empty: int) -> OnDisk:
    why = (
        f"{empty:,} record{'s' * (empty != 1)}, none with text"
        if empty
        else f"{len(source.files)} file{'s' * (len(source.files) != 1)} read, no record found"
    )
    return OnDisk(f"data set `{source.name}` is empty", where=source.where, why=why)


def _batches(source: Source, reading: Reading) -> Iterator[tuple[list[tuple[Record, str]], int]]:
    """Records in batches of bounded size, and how many were left out because their text is empty."""
    batch: list[tuple[Record, str]] = []
    size = empty = 0
    for record, place in source.records(only=set(reading.columns.values())):
        if reading.format == "text" and record.get(reading.columns["text"]) == "":
            empty += 1
            continue
        batch.append((record, place))
        size += sum(len(v) if isinstance(v, str) else 1000 for v in record.values())
        if len(batch) >= _BATCH_RECORDS or size >= _BATCH_CHARACTERS:
            yield batch, empty
            batch, size, empty = [], 0, 0
    if batch or empty:
        yield batch, empty


def _encode(
    batch: Sequence[tuple[Mapping[str, Any], str]], reading: Reading, system: str | None, encoder: Encoder
) -> list[Document]:
    if reading.format == "text":
        return encoder.texts([columns.text_of(reading, *item) for item in batch])
    if reading.format == "prompt":
        return encoder.prompts([columns.prompt_of(reading, *item, system) for item in batch])
    return encoder.chats([(columns.messages_of(reading, *item, system), item[1]) for item in batch])
