"""The order of rows: every row once an epoch at any global batch, mixtures exact in the long run, nothing about world size."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import Order, split

sizes_st = st.lists(st.integers(1, 60), min_size=1, max_size=4)


def epoch(order: Order, number: int) -> list[int]:
    steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
    return [int(i) for step in steps for i in order.step_ids(step)]


@given(sizes=sizes_st, global_batch=st.integers(1, 70), seed=st.integers(0, 2**31), number=st.integers(0, 5))
def test_without_weights_every_row_comes_exactly_once_an_epoch(
    sizes: list[int], global_batch: int, seed: int, number: int
) -> None:
    order = Order(sizes, None, seed, global_batch)
    ids = epoch(order, number)
    assert len(ids) == order.steps_per_epoch * global_batch
    assert sorted(i for i in ids if i >= 0) == list(range(sum(sizes)))


@given(sizes=sizes_st, global_batch=st.integers(1, 70))
def test_only_the_last_step_of_an_epoch_is_ragged_and_its_gap_is_at_the_end(sizes: list[int], global_batch: int) -> None:
    ids = epoch(Order(sizes, None, 0, global_batch), 0)
    gap = -sum(sizes) % global_batch
    assert ids[len(ids) - gap :] == [-1] * gap
    assert -1 not in ids[: len(ids) - gap]


def test_a_step_does_not_depend_on_which_steps_were_asked_before() -> None:
    walked = Order([13, 7], [1, 2], 5, 4)
    for step in range(40):
        walked.step_ids(step)
    fresh = Order([13, 7], [1, 2], 5, 4)
    for step in (39, 3, 17, 0):
        assert np.array_equal(fresh.step_ids(step), walked.step_ids(step))


def test_epochs_and_seeds_give_different_orders() -> None:
    order = Order([100], None, 0, 10)
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(Order([100], None, 1, 10), 0)


def test_the_order_is_the_one_that_earlier_releases_gave() -> None:
    # A resumed run relies on it; numbers read off numpy 2.4.6 (PCG64 and its permutation).
    assert Order([10], None, 0, 5).step_ids(0).tolist() == GOLDEN_PLAIN
    assert Order([6, 4], [1, 3], 7, 5).step_ids(3).tolist() == GOLDEN_MIXED


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4), data=st.data())
@settings(deadline=None)
def test_with_weights_each_set_has_its_share_of_every_epoch_and_no_row_of_it_is_favoured(
    sizes: list[int], data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    order, epochs = Order(sizes, weights, 3, 8), 5
    seen = np.zeros(sum(sizes), int)
    for number in range(epochs):
        ids = [i for i in epoch(order, number) if i >= 0]
        assert len(ids) == sum(sizes)
        np.add.at(seen, ids, 1)
    starts = np.cumsum([0, *sizes])
    for i, size in enumerate(sizes):
        counts = seen[starts[i] : starts[i] + size]
        share = weights[i] / sum(weights) * sum(sizes)
        assert abs(counts.sum() - epochs * share) <= epochs
        assert counts.max() - counts.min() <= 1


@given(total=st.integers(0, 10**6), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_split_by_weight_is_whole_and_nowhere_one_off(total: int, weights: list[float]) -> None:
    counts = split(total, weights)
    assert sum(counts) == total
    assert all(abs(c - total * w / sum(weights)) < 1 + 1e-6 for c, w in zip(counts, weights, strict=True))


def test_the_room_of_data_is_imported_without_torch() -> None:
    code = "import shardwise.data, sys; raise SystemExit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_empty_set_is_our_bug_not_input() -> None:
    with pytest.raises(AssertionError, match="every set has rows"):
        Order([0], None, 0, 1)


GOLDEN_PLAIN = [2, 3, 1, 9, 6]
GOLDEN_MIXED = [9, 9, 8, 6, 6]
