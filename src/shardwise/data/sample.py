"""One packed row as text: where its documents begin, and which tokens are trained."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from rich.cells import cell_len, chop_cells

from .packed import PackedSet, percent
from .prepared import Prepared

OPEN, CLOSE = "⟦", "⟧"
_WIDTH = 80


def preview(prepared: Prepared, tokenizer: Any, row: int = 0, *, max_lines: int | None = 24) -> str:
    """A training row as a person reads it, at most 80 columns: trained tokens between ⟦ ⟧, a rule before each document, the
    shares below.

    Args:
        row: Id in ``prepared.train``.
        max_lines: Lines of text shown, the middle of long documents left out; None for all.
    """
    ends = np.cumsum([one.num_rows for one in prepared.train.sets])
    index = int(np.searchsorted(ends, row, side="right"))
    one = prepared.train.sets[index]
    own = row - int(ends[index]) + one.num_rows
    spans = one.spans(own)
    filled, valid = sum(length for _, _, length, _ in spans), int(one.valid[own])
    out = wrap(
        f"row {row:,} of {prepared.train.num_rows:,}, {one.name}: {len(spans)} document{'s' * (len(spans) != 1)}, "
        f"{filled:,} of {one.seq_len:,} places, {valid:,} {OPEN}trained{CLOSE}"
    )
    blocks = [wrap(_marked(one, span, tokenizer).removesuffix("\n")) for span in spans]
    for number, (lines, (store, start, length, _)) in enumerate(zip(_shorten(blocks, max_lines), spans, strict=True), 1):
        part = "" if _begins(one, store, start) else ", goes on from another row"
        out += [f"-- document {number}, {length:,} tokens{part} ".ljust(_WIDTH, "-"), *lines]
    if filled < one.seq_len:
        out.append(f"-- padding, {one.seq_len - filled:,} places ".ljust(_WIDTH, "-"))
    stats = one.stats
    shares = f"trained {percent(stats.trained_share)} of tokens, padded {percent(stats.padded_share)} of places"
    out += ["-" * _WIDTH, f"all rows: {shares}, truncated {percent(stats.truncated_share)}"]
    return "\n".join(out)


def _begins(one: PackedSet, store: int, start: int) -> bool:
    return bool(np.isin(start, one.stores[store].starts))


def _marked(one: PackedSet, span: tuple[int, int, int, bool], tokenizer: Any) -> str:
    """The document's text, each stretch of trained tokens between marks."""
    store, start, length, _ = span
    documents = one.stores[store]
    ids = documents.tokens[start : start + length].tolist()
    trained = np.ones(length, np.bool_) if documents.marks is None else np.array(documents.marks[start : start + length] != 0)
    trained[0] = trained[0] and not _begins(one, store, start)  # nothing precedes the first token of a document
    out, begin = "", 0
    for border in [*(np.flatnonzero(np.diff(trained)) + 1).tolist(), length]:
        text = _visible(tokenizer.decode(ids[begin:border], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        out += f"{OPEN}{text}{CLOSE}" if trained[begin] else text
        begin = border
    return out


def _visible(text: str) -> str:
    """Text without anything that moves a terminal's cursor, line breaks apart."""
    text = text.replace("\t", "    ").replace("\r\n", "\n")
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def wrap(text: str) -> list[str]:
    """Lines of at most 80 columns, broken between words where there are any; wide characters count two."""
    lines = []
    for line in text.split("\n"):
        now = ""
        for word in re.findall(r"\S+ *| +", line):
            if now and cell_len(now + word.rstrip(" ")) > _WIDTH:
                lines.append(now.rstrip(" "))
                now = ""
            while cell_len(word.rstrip(" ")) > _WIDTH:
                head, *_ = chop_cells(word, _WIDTH)
                lines.append(head)
                word = word[len(head) :]
            now += word
        lines.append(now.rstrip(" "))
    return lines


def _shorten(blocks: list[list[str]], max_lines: int | None) -> list[list[str]]:
    """Each block cut in its middle so that all together have about ``max_lines`` lines, at least 3 each."""
    if max_lines is None or sum(map(len, blocks)) <= max_lines:
        return blocks
    room = max(max_lines // len(blocks), 3)
    out = []
    for lines in blocks:
        if len(lines) > room:
            head = (room - 1 + 1) // 2
            tail = room - 1 - head
            left = len(lines) - head - tail
            lines = [*lines[:head], f"... {left:,} lines ...", *lines[len(lines) - tail :]]
        out.append(lines)
    return out
