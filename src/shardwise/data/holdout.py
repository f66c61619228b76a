"""Which documents are for training and which are held out, decided before packing: pure arithmetic on a store's lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from .documents import Documents
from .pack import IntArray, Pieces, cut_chats, cut_texts


@dataclass(frozen=True)
class Span:
    """Documents of one store: all, or those of one side of a split."""

    store: Documents
    starts: IntArray
    lengths: IntArray

    def cut(self, seq_len: int, long: str, index: int) -> Pieces:
        """The documents in pieces of at most ``seq_len``, as pieces of store number ``index``."""
        if self.store.marks is None:
            return cut_texts(self.starts, self.lengths, seq_len, index)
        return cut_chats(self.starts, self.lengths, seq_len, long, index)


def everything(store: Documents) -> Span:
    """All documents."""
    return Span(store, store.starts, store.lengths)


def hold_out(store: Documents, share: float, seed: int, index: int, name: str, where: Callable[[str], str]) -> tuple[Span, Span]:
    """Documents for training and for validation: ``share`` of them, at least one, drawn by seed.

    Where ``share`` is less than one text, the end of the longest text is held out instead, as many tokens as the share of all.

    Raises:
        UsageError: There is only one conversation, or too little text.
    """
    starts, lengths, num = store.starts, store.lengths, len(store.lengths)
    none = Span(store, starts[:0], lengths[:0])
    if not share:
        return Span(store, starts, lengths), none
    if store.marks is None and share * num < 1:
        longest = int(lengths.argmax())
        tail = min(round(share * int(lengths.sum())), int(lengths[longest]) // 2)
        if tail < 2:
            raise UsageError(
                f"{share:g} of `{name}` is less than two tokens",
                where=where("data.validation"),
                hints=["`--set data.validation=FILE` with other text"],
            )
        kept = lengths.copy()
        kept[longest] -= tail
        return Span(store, starts, kept), Span(store, starts[[longest]] + kept[longest], np.array([tail], np.int64))
    if num < 2:
        raise UsageError(
            f"{share:g} of `{name}` cannot be held out: it has one conversation",
            where=where("data.validation"),
            hints=["`--set data.validation=FILE` with other conversations", "`--set data.validation=null` trains without"],
        )
    held = np.zeros(num, np.bool_)
    held[np.random.default_rng([seed, index]).choice(num, min(max(round(share * num), 1), num - 1), replace=False)] = True
    return Span(store, starts[~held], lengths[~held]), Span(store, starts[held], lengths[held])
