"""The tables of hazards name tests that there are, and leave no hazard out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DECISIONS = HERE.parents[1] / "docs" / "decisions"
TABLES = {
    "0015-docker-hazards-and-their-tests.md": [f"D{n}" for n in range(1, 25)],
    "0020-kubernetes-hazards-and-their-tests.md": [f"K{n}" for n in range(1, 10)],
}


@pytest.mark.parametrize("table", TABLES)
def test_every_test_that_a_table_names_is_there(table: str) -> None:
    modules = {path.stem: path.read_text("utf-8") for path in HERE.glob("test_*.py")}
    there = set(modules) | {name for text in modules.values() for name in re.findall(r"def (test_\w+)\(", text)}
    text = (DECISIONS / table).read_text("utf-8")
    assert set(re.findall(r"test_[a-z0-9_]+", text)) - there == set()


@pytest.mark.parametrize(("table", "hazards"), TABLES.items(), ids=TABLES)
def test_every_hazard_has_a_row(table: str, hazards: list[str]) -> None:
    text = (DECISIONS / table).read_text("utf-8")
    assert re.findall(r"^\| ([DK][0-9]+) ", text, re.MULTILINE) == hazards
