"""Documents into rows of ``seq_len``: which piece of which document lies in which row.

Arithmetic on lengths alone; no token is read here. A *piece* is a stretch of one document that lies in one row.

    starts[p], lengths[p]    the stretch, in tokens of its store
    follows[p]               the token after the stretch is the target of its last one: a text goes on in another row
    rows[p]                  its row; pieces are sorted by row
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
# Pieces packed together: rows are as full as without a window (measured), and what lies together on disk stays together.
WINDOW = 16384


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, one entry a piece; ``lost`` are the tokens that no piece holds."""

    stores: IntArray
    starts: IntArray
    lengths: IntArray
    follows: BoolArray
    lost: int = 0
    truncated_documents: int = 0
    dropped_documents: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, index: IntArray | BoolArray) -> Pieces:
        """The pieces at ``index``, in that order."""
        return Pieces(
            self.stores[index],
            self.starts[index],
            self.lengths[index],
            self.follows[index],
            self.lost,
            self.truncated_documents,
            self.dropped_documents,
        )


def join(parts: list[Pieces]) -> Pieces:
    """All pieces one after the other."""
    return Pieces(
        np.concatenate([p.stores for p in parts]),
        np.concatenate([p.starts for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        np.concatenate([p.follows for p in parts]),
        sum(p.lost for p in parts),
        sum(p.truncated_documents for p in parts),
        sum(p.dropped_documents for p in parts),
    )


def cut_texts(starts: IntArray, lengths: IntArray, seq_len: int, store: int = 0) -> Pieces:
    """Texts in pieces of ``seq_len``, the last of each shorter: every token in exactly one piece, every token but the first a
    target once."""
    counts = -(-lengths // seq_len)
    owner = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    left = lengths[owner] - nth * seq_len
    return Pieces(np.full(len(owner), store, np.int64), starts[owner] + nth * seq_len, np.minimum(left, seq_len), left > seq_len)


def cut_chats(starts: IntArray, lengths: IntArray, seq_len: int, long: str, store: int = 0) -> Pieces:
    """Conversations as one piece each; longer ones lose their end (``truncate``) or are left out (``drop``)."""
    too_long = lengths > seq_len
    keep = ~too_long if long == "drop" else np.ones(len(lengths), np.bool_)
    kept = np.minimum(lengths[keep], seq_len)
    dropped = int(len(lengths) - keep.sum())
    return Pieces(
        np.full(len(kept), store, np.int64),
        starts[keep],
        kept,
        np.zeros(len(kept), np.bool_),
        int(lengths.sum() - kept.sum()),
        int(too_long.sum()) - dropped,
        dropped,
    )


def best_fit(lengths: IntArray, seq_len: int, window: int = WINDOW) -> IntArray:
    """The row of each piece, by best-fit decreasing inside windows of ``window`` pieces; rows are numbered without gaps.

    Each piece, the longest first, goes into the fullest row of its window that still has room for it. Equal input gives equal
    rows.
    """
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for begin in range(0, len(lengths), window):
        part = lengths[begin : begin + window]
        by_room: dict[int, list[int]] = {}  # room left -> rows with that much
        rooms: list[int] = []  # the keys of by_room, sorted
        for i in np.argsort(-part, kind="stable").tolist():
            length = int(part[i])
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                row = by_room[room].pop()
                if not by_room[room]:
                    del by_room[room], rooms[at]
            else:
                room, row, num_rows = seq_len, num_rows, num_rows + 1
            rows[begin + i] = row
            if left := room - length:
                if left not in by_room:
                    insort(rooms, left)
                    by_room[left] = []
                by_room[left].append(row)
    return rows
