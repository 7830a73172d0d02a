"""Owns the pytest fixtures of the rig and the check that a session leaves nothing; builds no namespace itself."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.rig import Rig, leaks

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLE_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail the session when a namespace, process, cgroup or file of ours is still there after it."""
    presence = leaks.Presence()
    value = leaks.mark()
    os.environ[leaks.MARK] = value
    before = leaks.take(value)
    yield
    alone = presence.leave()
    end = time.monotonic() + SETTLE_S
    while left := leaks.take(value).since(before, alone=alone):
        if time.monotonic() > end:
            pytest.fail("left behind after the session:\n  " + "\n  ".join(left), pytrace=False)
        time.sleep(0.05)
    del os.environ[leaks.MARK]


@pytest.fixture(scope="session")
def rig_session() -> Iterator[Rig]:
    """One rig for the whole session; fails at its end when something still runs in its host namespace."""
    if os.geteuid() != 0:
        pytest.skip("the rig needs root")
    with Rig() as rig:
        yield rig
    if rig.stragglers:
        pytest.fail("still running in the rig's host namespace:\n  " + "\n  ".join(rig.stragglers), pytrace=False)


@pytest.fixture
def rig(rig_session: Rig) -> Rig:
    """The session's rig with empty logs and a fresh zone."""
    rig_session.reset()
    return rig_session
