"""Packing: each token of each document stands exactly once, no row is longer than seq_len, equal input gives equal rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.pack import best_fit, cut_chats, cut_texts

lengths_st = st.lists(st.integers(1, 50), min_size=1, max_size=80).map(lambda values: np.array(values, np.int64))


def starts_of(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


@given(lengths=lengths_st, seq_len=st.integers(2, 20))
def test_pieces_of_texts_hold_each_token_exactly_once_and_none_is_longer_than_a_row(lengths: np.ndarray, seq_len: int) -> None:
    pieces = cut_texts(starts_of(lengths), lengths, seq_len)
    held = np.concatenate([np.arange(a, a + n) for a, n in zip(pieces.starts, pieces.lengths, strict=True)])
    assert held.tolist() == list(range(lengths.sum()))
    assert pieces.lengths.max() <= seq_len and pieces.lost == 0


@given(lengths=lengths_st, seq_len=st.integers(2, 20))
def test_every_token_of_a_text_but_its_first_is_a_target_exactly_once(lengths: np.ndarray, seq_len: int) -> None:
    pieces = cut_texts(starts_of(lengths), lengths, seq_len)
    targets = [
        t for a, n, more in zip(pieces.starts, pieces.lengths, pieces.follows, strict=True) for t in range(a + 1, a + n + more)
    ]
    assert sorted(targets) == sorted(set(range(lengths.sum())) - set(starts_of(lengths).tolist()))


@given(lengths=lengths_st, seq_len=st.integers(2, 20), long=st.sampled_from(["truncate", "drop"]))
def test_what_conversations_lose_is_counted(lengths: np.ndarray, seq_len: int, long: str) -> None:
    pieces = cut_chats(starts_of(lengths), lengths, seq_len, long)
    too_long = int((lengths > seq_len).sum())
    assert pieces.lengths.sum() + pieces.lost == lengths.sum()
    assert (pieces.truncated_documents, pieces.dropped_documents) == ((too_long, 0) if long == "truncate" else (0, too_long))
    assert not pieces.follows.any()


@given(lengths=st.lists(st.integers(1, 30), max_size=200), window=st.integers(1, 50))
def test_no_row_is_overfull_no_row_is_empty_and_at_most_one_row_of_a_window_is_less_than_half_full(
    lengths: list[int], window: int
) -> None:
    rows = best_fit(np.array(lengths, np.int64), 30, window)
    filled = np.bincount(rows, weights=lengths) if lengths else np.zeros(0)
    assert (filled <= 30).all() and (filled > 0).all()
    for begin in range(0, len(lengths), window):
        own = np.unique(rows[begin : begin + window])
        assert (filled[own] <= 15).sum() <= 1


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=200))
def test_equal_input_gives_equal_rows_and_windows_do_not_share_rows(lengths: list[int]) -> None:
    first, again = best_fit(np.array(lengths), 30, 16), best_fit(np.array(lengths), 30, 16)
    assert (first == again).all()
    assert not set(first[:16].tolist()) & set(first[16:].tolist())


def test_the_longest_go_first_into_the_fullest_row_with_room() -> None:
    assert best_fit(np.array([3, 7, 5, 2, 3]), 10).tolist() == [0, 0, 1, 1, 1]


def test_real_lengths_fill_rows_to_the_brim() -> None:
    lengths = np.random.default_rng(0).gamma(2.0, 200.0, 20_000).astype(np.int64).clip(1, 2048)
    rows = best_fit(lengths, 2048)
    assert lengths.sum() / (2048 * (rows.max() + 1)) > 0.999
