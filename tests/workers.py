"""Owns how tests are shared out where several processes run them (`pytest -n 2 --dist loadgroup`), and what is left.

What shares an engine, or a module's own installation, stays with one worker. Engines take longest, so they come first.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.grounds import Ground
from tests.rig import leaks
from tests.rig.docker.fixtures import Setup
from tests.rig.fixtures import SETTLE_S

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping


def _setup(parameters: Mapping[str, object]) -> Setup | None:
    """Give the engine that a test runs on, as its parameters say."""
    for value in parameters.values():
        found = value if isinstance(value, Setup) else getattr(value, "setup", None)
        if isinstance(found, Setup):
            return found
    return None


def group(item: pytest.Item) -> str:
    """Say what a test has to stay together with."""
    parts = item.path.relative_to(item.config.rootpath).parts
    module = "/".join(parts)
    if item.get_closest_marker("docker") is None:
        return module
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    setup = _setup(parameters)
    ground = next((value for value in parameters.values() if isinstance(value, Ground)), None)
    if ground is not None:
        # One engine is up at a time there, and comes up anew for each group.
        return f"{parts[1]} on {ground}"
    return f"{module} on {setup}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name each test's group; where there are workers, what takes longest is begun with."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    """Engines first, then what needs the rig, then all the rest; within each as they were collected."""
    marks = {mark.name for mark in item.iter_markers()}
    return 0 if "docker" in marks else 1 if "rig" in marks else 2


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
