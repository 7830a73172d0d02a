"""A minute of new bytes for every parser in each test run, always the same ones, and all that was ever kept."""

from __future__ import annotations

import random

import pytest

from tests.proxy.fuzz.fuzzer import CORPUS, Fuzzer
from tests.proxy.fuzz.targets import TARGETS

SECONDS = 60
SEED = 9110


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_kept_parses_or_is_refused(name: str) -> None:
    kept = list((CORPUS / name).glob("*"))
    assert len(kept) >= 10
    for path in kept:
        TARGETS[name](path.read_bytes())


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
def test_new_bytes_parse_or_are_refused(name: str) -> None:
    # A test run says the same of the same tree; `python -m tests.proxy.fuzz` goes on with seeds of its own.
    fuzzer = Fuzzer(name, random.Random(SEED))
    fuzzer.run(SECONDS / len(TARGETS))
    assert fuzzer.tried > 500
