"""Sizes, counts and times as a person reads them: one spelling each, and what is written back is understood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.units import GIB, bytes_text, count_text, duration_text, gib


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (290_769_100, "277.3 MiB"),
        (44_882_408_243, "41.8 GiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_has_a_whole(num_bytes, text):
    assert bytes_text(num_bytes) == text


def test_gib_are_of_1024_not_of_1000():
    assert gib(2**30) == 1.0


@pytest.mark.parametrize(
    ("count", "text"), [(8_030_261_248, "8.03 B"), (134_515_008, "135 M"), (2048, "2,048"), (1.5e12, "1.5 T"), (0, "0")]
)
def test_counts_have_decimal_suffixes(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (42.2, "42 s"), (59.7, "1 min 00 s"), (110, "1 min 50 s"), (4080, "1 h 08 min")]
)
def test_times_are_told_in_two_units_at_most(seconds, text):
    assert duration_text(seconds) == text


@given(st.integers(0, 2**60))
def test_the_text_of_bytes_is_within_one_part_in_twenty_of_them(num_bytes):
    number, unit = bytes_text(num_bytes).split()
    size = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * size - num_bytes) <= 0.05 * size + 1e-9
