"""The state file: it comes back as it was, or it is said to be broken; it is never half of one."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from reconciler.state import State, StateBroken
from tests.estate import PLATFORM, Estate, agent

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    made = Estate(tmp_path)
    made.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com"]))
    made.reason(1, {"document": "agents/helper", "field": "/allow", "add": "api.vendor.com"})
    made.run()
    return made


def test_a_new_host_has_an_empty_state(tmp_path: Path) -> None:
    assert Estate(tmp_path)._file.load() == State()


def test_the_state_comes_back_as_it_was(estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    found = estate.run()
    assert estate._file.load() == found.state


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"{", b'{"version": 2}', b"\xff", b"[" * 100_000])
def test_a_state_that_cannot_be_read_is_not_an_empty_one(data: bytes, estate: Estate) -> None:
    (estate.root / "state" / "state.json").write_bytes(data)
    found = estate._file.load()
    assert isinstance(found, StateBroken)
    assert "move it away" in found.message


def test_a_crash_while_the_state_is_written_leaves_the_old_one(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    before = estate._file.load()
    assert isinstance(before, State)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            estate._file.save(State())
    assert estate._file.load() == before
    assert estate._file.path.stat().st_mode & 0o777 == 0o600
