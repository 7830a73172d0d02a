"""The census of leftovers sees what it is there to see."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.rig import Rig, leaks
from tests.rig.test_rig import wait_for

MARKED = "test-of-the-census"


def started(argv: list[str]) -> int:
    """Start a marked program that outlives its parent, and return its pid."""
    environment = {"PATH": os.environ["PATH"], leaks.MARK: MARKED}
    script = ["/bin/sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *argv]
    done = subprocess.run(script, env=environment, capture_output=True, check=True, timeout=10)
    return int(done.stdout)


@pytest.fixture
def orphan() -> Iterator[int]:
    pid = started(["/bin/sleep", "60"])
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_a_marked_process_is_ours_whoever_else_tests(orphan: int) -> None:
    empty = leaks.Census(things={}, attributed=frozenset())
    wait_for(lambda: Path(f"/proc/{orphan}/cmdline").read_bytes().startswith(b"/bin/sleep"))
    for alone in (True, False):
        assert f"process {orphan} /bin/sleep 60" in leaks.take(MARKED).since(empty, alone=alone)


def test_what_was_there_before_is_no_leak(orphan: int) -> None:
    wait_for(lambda: Path(f"/proc/{orphan}/cmdline").read_bytes().startswith(b"/bin/sleep"))
    before = leaks.take(MARKED)
    assert not [line for line in leaks.take(MARKED).since(before, alone=True) if str(orphan) in line]


def test_a_file_of_ours_is_seen_when_we_are_alone() -> None:
    before = leaks.take(MARKED)
    with tempfile.TemporaryDirectory(prefix="ringfence-") as place:
        now = leaks.take(MARKED)
        assert place in now.since(before, alone=True)
        assert place not in now.since(before, alone=False)


@pytest.mark.rig
@pytest.mark.skipif(os.geteuid() != 0, reason="the rig needs root")
def test_a_rig_that_was_not_stopped_is_ours() -> None:
    before = leaks.take(MARKED)
    with Rig() as rig:
        left = leaks.take(MARKED).since(before, alone=False)
        assert f"rig {rig.instance.name}" in left
    assert f"rig {rig.instance.name}" not in leaks.take(MARKED).since(before, alone=True)


def test_two_sessions_see_that_they_are_not_alone() -> None:
    first, second = leaks.Presence(), leaks.Presence()
    assert not second.alone
    assert not second.leave()
    first.leave()
