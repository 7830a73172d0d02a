"""The table of Docker's hazards names tests that there are, and leaves no hazard out."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "decisions" / "0015-docker-hazards-and-their-tests.md"


def test_every_test_that_the_table_names_is_there() -> None:
    modules = {path.stem: path.read_text("utf-8") for path in HERE.glob("test_*.py")}
    there = set(modules) | {name for text in modules.values() for name in re.findall(r"def (test_\w+)\(", text)}
    assert set(re.findall(r"test_[a-z0-9_]+", TABLE.read_text("utf-8"))) - there == set()


def test_every_hazard_has_a_row() -> None:
    assert re.findall(r"^\| (D[0-9]+) ", TABLE.read_text("utf-8"), re.MULTILINE) == [f"D{n}" for n in range(1, 25)]
