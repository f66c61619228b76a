"""The architecture page draws the floors that the structure tests hold."""

from __future__ import annotations

import re
from pathlib import Path

from tests.structure.test_floor_plan import FLOORS

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")


def test_the_floors_drawn_are_the_floors_tested():
    drawing = re.search(r"## Floors.*?```\n(.*?)```", PAGE, re.S)
    assert drawing, "the page draws the floors"
    drawn = [sorted(re.split(r" {2,}", re.split(r" {8,}", line)[0].strip())) for line in drawing[1].splitlines()]
    assert drawn == [sorted(floor) for floor in reversed(FLOORS) if floor != ["__main__"]]
