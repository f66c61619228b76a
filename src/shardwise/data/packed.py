"""Rows as arrays: ``Batch`` is what a model takes, ``PackedSet`` gives rows of one set by id, ``Mixture`` of several.

Everything is read from memory-mapped files; ranks on one machine share the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OnDisk
from .documents import Documents
from .pack import Pieces, best_fit

NO_TARGET = -100


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass, int64 ``[B, S]`` each.

    Attributes:
        input_ids: Token ids; padding is a document of its own at the end of a row.
        position_ids: Restart at 0 with each document.
        labels: The token to predict *at* this place, already shifted; -100 = none.
        num_valid: Labels that are not -100.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_valid: int


@dataclass(frozen=True)
class PackStats:
    """What became of the documents of one set; JSON in and out.

    Attributes:
        num_documents: Documents with at least a part in a row.
        num_tokens: Tokens in rows.
        num_targets: Tokens that are predicted and counted in the loss.
        num_padding: Places of rows without a token.
        num_truncated: Tokens of conversations that are in no row, because the conversation is longer than ``seq_len``.
        truncated_documents: Conversations that lost their end.
        dropped_documents: Conversations left out: longer than ``seq_len``, or nothing to train on in their first ``seq_len``
            tokens.
        unanswered: Conversations left out because the assistant says nothing.
        empty: Texts left out because they are empty.
    """

    num_documents: int
    num_rows: int
    num_tokens: int
    num_targets: int
    num_padding: int
    num_truncated: int
    truncated_documents: int
    dropped_documents: int
    unanswered: int
    empty: int

    @property
    def trained_share(self) -> float:
        """Of the tokens in rows."""
        return self.num_targets / self.num_tokens

    @property
    def padded_share(self) -> float:
        """Of the places in rows."""
        return self.num_padding / (self.num_tokens + self.num_padding)

    @property
    def truncated_share(self) -> float:
        """Of all tokens of the set."""
        return self.num_truncated / (self.num_tokens + self.num_truncated)

    def text(self) -> str:
        """The three shares in words; each is of what its property says."""
        trained, padded, truncated = map(percent, (self.trained_share, self.padded_share, self.truncated_share))
        return f"trained {trained}, padded {padded}, truncated {truncated}"

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def percent(share: float) -> str:
    """A share as ``45.1 %``."""
    return f"{100 * share:.1f} %"


class PackedSet:
    """Rows of ``seq_len`` tokens.

    Attributes:
        name: As in the run file.
        num_rows: Rows; ids go from 0 to ``num_rows - 1``.
        valid: Targets of each row, int32 ``[num_rows]``.
        stats: What became of the documents.
    """

    def __init__(
        self,
        name: str,
        seq_len: int,
        pad_id: int,
        stores: Sequence[Documents],
        pieces: Pieces,
        row_ends: npt.NDArray[np.integer[Any]],
        valid: npt.NDArray[np.int32],
        stats: PackStats,
    ) -> None:
        self.name, self.seq_len, self.pad_id, self.stores, self.pieces = name, seq_len, pad_id, list(stores), pieces
        self.row_ends, self.valid, self.stats = row_ends, valid, stats
        self.num_rows = len(row_ends)

    def spans(self, row: int) -> list[tuple[int, int, int, bool]]:
        """The pieces of one row in order: store, start, length, and whether the token after it is a target too."""
        pieces, begin, end = self.pieces, int(self.row_ends[row - 1]) if row else 0, int(self.row_ends[row])
        return [
            (int(pieces.stores[p]), int(pieces.starts[p]), int(pieces.lengths[p]), bool(pieces.follows[p]))
            for p in range(begin, end)
        ]

    def rows(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The rows ``ids``, ``[len(ids), seq_len]``; id -1 is a row of padding without any target."""
        shape = (len(ids), self.seq_len)
        input_ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, NO_TARGET, np.int64)
        position_ids = np.empty(shape, np.int64)
        for b, row in enumerate(ids):
            assert -1 <= row < self.num_rows, "a row id is -1 or one of the set"
            at = 0
            for store, start, length, follows in self.spans(int(row)) if row != -1 else []:
                documents = self.stores[store]
                tokens = documents.tokens[start : start + length + follows].astype(np.int64)
                targets = tokens[1:]
                if documents.marks is not None:
                    targets = np.where(documents.marks[start + 1 : start + length + follows] != 0, targets, NO_TARGET)
                input_ids[b, at : at + length] = tokens[:length]
                labels[b, at : at + len(targets)] = targets
                position_ids[b, at : at + length] = np.arange(length)
                at += length
            position_ids[b, at:] = np.arange(self.seq_len - at)
        return Batch(input_ids, position_ids, labels, int((labels != NO_TARGET).sum()))

    def save(self, folder: Path, prefix: str) -> None:
        """Write the arrays of this set as ``folder/prefix.*.npy``; the tokens stay in their stores."""
        for name, values in self._arrays().items():
            np.save(folder / f"{prefix}.{name}.npy", values)

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        pieces = self.pieces
        return {
            "stores": pieces.stores.astype(np.int16),
            "starts": pieces.starts.astype(np.int64),
            "lengths": pieces.lengths.astype(np.int32),
            "follows": pieces.follows,
            "row_ends": self.row_ends.astype(np.int64),
            "valid": self.valid,
        }

    @staticmethod
    def load(
        folder: Path, prefix: str, *, name: str, seq_len: int, pad_id: int, stores: Sequence[Documents], stats: PackStats
    ) -> PackedSet:
        """What ``save`` wrote, memory-mapped.

        Raises:
            OnDisk: A file is missing or torn.
        """
        try:
            a = {
                key: np.load(folder / f"{prefix}.{key}.npy", mmap_mode="r")
                for key in ("stores", "starts", "lengths", "follows", "row_ends", "valid")
            }
        except (OSError, ValueError) as error:
            raise OnDisk(
                "prepared data are torn",
                where=f"{folder}/{prefix}.*.npy",
                hints=["run the same command again after removing the folder"],
            ) from error
        return PackedSet(
            name,
            seq_len,
            pad_id,
            stores,
            Pieces(a["stores"], a["starts"], a["lengths"], a["follows"]),
            a["row_ends"],
            a["valid"],
            stats,
        )


def pack(name: str, seq_len: int, pad_id: int, stores: Sequence[Documents], pieces: Pieces) -> PackedSet:
    """Pieces put into rows; conversations without a target among their kept tokens are left out and counted.

    The caller makes sure that something is left.
    """
    targets = np.array(
        [
            _targets(stores[s], a, n, f)
            for s, a, n, f in zip(
                pieces.stores.tolist(), pieces.starts.tolist(), pieces.lengths.tolist(), pieces.follows.tolist(), strict=True
            )
        ],
        np.int64,
    )
    chats = np.array([store.marks is not None for store in stores])[pieces.stores] if len(pieces) else np.zeros(0, np.bool_)
    keep = (targets > 0) | ~chats
    lost, dropped = pieces.lost + int(pieces.lengths[~keep].sum()), pieces.dropped_documents + int((~keep).sum())
    pieces, targets = pieces.take(keep), targets[keep]
    rows = best_fit(pieces.lengths, seq_len)
    order = np.argsort(rows, kind="stable")
    pieces, targets, rows = pieces.take(order), targets[order], rows[order]
    num_rows = int(rows[-1]) + 1 if len(rows) else 0
    row_ends = np.searchsorted(rows, np.arange(num_rows), side="right")
    valid = np.bincount(rows, weights=targets, minlength=num_rows).astype(np.int32)
    num_tokens = int(pieces.lengths.sum())
    stats = PackStats(
        num_documents=int((~pieces.follows).sum()),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_targets=int(targets.sum()),
        num_padding=num_rows * seq_len - num_tokens,
        num_truncated=lost,
        truncated_documents=pieces.truncated_documents - int((~keep).sum()),
        dropped_documents=dropped,
        unanswered=sum(store.meta["unanswered"] for store in stores),
        empty=sum(store.meta["empty"] for store in stores),
    )
    return PackedSet(name, seq_len, pad_id, stores, pieces, row_ends, valid, stats)


def _targets(store: Documents, start: int, length: int, follows: bool) -> int:
    if store.marks is None:
        return length - 1 + follows
    return int(np.count_nonzero(store.marks[start + 1 : start + length + follows]))


class Mixture:
    """Several packed sets under one numbering of rows, each set behind the one before it.

    Attributes:
        weights: Shares of an epoch for ``Order``; None for every row once.
        valid: Targets of each row, int32 ``[num_rows]``.
    """

    def __init__(self, sets: Sequence[PackedSet], weights: Sequence[float] | None) -> None:
        assert len({s.seq_len for s in sets}) == 1, "the sets of a mixture have one seq_len"
        self.sets, self.weights = list(sets), None if weights is None else list(weights)
        self._ends = np.cumsum([s.num_rows for s in sets])
        self.num_rows = int(self._ends[-1])

    @cached_property
    def valid(self) -> npt.NDArray[np.int32]:
        return np.concatenate([s.valid for s in self.sets])

    def rows(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The rows ``ids`` in that order; id -1 is a row of padding without any target."""
        parts = [self._one(int(i)) for i in ids]
        return Batch(
            np.concatenate([p.input_ids for p in parts]),
            np.concatenate([p.position_ids for p in parts]),
            np.concatenate([p.labels for p in parts]),
            sum(p.num_valid for p in parts),
        )

    def _one(self, row: int) -> Batch:
        if row == -1:
            return self.sets[0].rows([-1])
        index = int(np.searchsorted(self._ends, row, side="right"))
        return self.sets[index].rows([row - int(self._ends[index]) + self.sets[index].num_rows])
