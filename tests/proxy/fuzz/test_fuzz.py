"""A minute of new bytes for every parser in each test run, from a seed of that run, and all that was ever kept."""

from __future__ import annotations

import random
import secrets

import pytest

from tests.proxy.fuzz.fuzzer import CORPUS, Fuzzer
from tests.proxy.fuzz.targets import TARGETS

SECONDS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_kept_parses_or_is_refused(name: str) -> None:
    kept = list((CORPUS / name).glob("*"))
    assert len(kept) >= 10
    for path in kept:
        TARGETS[name](path.read_bytes())


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
def test_new_bytes_parse_or_are_refused(name: str) -> None:
    seed = secrets.randbits(32)
    fuzzer = Fuzzer(name, random.Random(seed))
    # the exception holds the input, and the seed makes it again
    fuzzer.run(SECONDS / len(TARGETS))
    assert fuzzer.tried > 500, seed
