"""Owns what is different where several workers run the tests (`pytest -n 2 --dist loadfile`): their order, the census.

A file stays with one worker, and with it what its tests share: an engine, an installation, a rig.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.rig import leaks
from tests.rig.fixtures import SETTLE_S

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin, where there are workers, with what takes longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    """Engines and clusters first, then what needs the rig, then all the rest; within each as they were collected."""
    marks = {mark.name for mark in item.iter_markers()}
    return 0 if marks & {"docker", "k8s"} else 1 if "rig" in marks else 2


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Look, where there were workers, at what all of them left: each of them knows only what is surely its own."""
    yield
    before = session.config.stash.get(_BEFORE, None)
    if before is None:
        return
    presence, census = before
    alone = presence.leave()
    end = time.monotonic() + SETTLE_S
    while left := leaks.take(leaks.mark()).since(census, alone=alone):
        if time.monotonic() > end:
            _tell(session, left)
            break
        time.sleep(0.05)


_BEFORE = pytest.StashKey[tuple[leaks.Presence, leaks.Census]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at what there is before the first worker starts."""
    if session.config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.stash[_BEFORE] = (leaks.Presence(), leaks.take(leaks.mark()))


def _tell(session: pytest.Session, left: Iterable[str]) -> None:
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("left behind after the session:\n  " + "\n  ".join(left), red=True)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
