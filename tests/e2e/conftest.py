"""Owns what every end-to-end test stands on: a host whose backend was proven, and an installation for each module."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.grounds import GROUNDS, Ground, Place, Places, wanted
from tests.e2e.installation import Installation

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_LOG = 8000
"""Bytes of a daemon's log that a failure shows: the last ones."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the daemon said to whoever reads of a failure: its directory will be gone."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, Installation) and value.log.exists():
                said = value.log.read_bytes()[-_LOG:].decode("utf-8", "replace")
                section = (f"ringfenced in {value.root}", said)
                report.sections += [section] if section not in report.sections else []
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each ground whose list has it."""
    if "place" not in metafunc.fixturenames:
        return
    module = metafunc.module.__name__.rpartition(".")[2]
    marks = frozenset(mark.name for mark in metafunc.definition.iter_markers())
    grounds = [ground for ground in GROUNDS if wanted(ground, module, metafunc.definition.originalname, marks)]
    values = [
        pytest.param(ground, id=str(ground), marks=[getattr(pytest.mark, ground.backend.value), pytest.mark.rig])
        for ground in grounds
    ]
    metafunc.parametrize("place", values, indirect=True, scope="session")


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    """Places, one at a time; what they need is made when a test wants it."""
    found = Places(
        lambda: request.getfixturevalue("rig_session"),
        lambda: request.getfixturevalue("docker_images"),
        lambda: request.getfixturevalue("k8s_clusters"),
    )
    with contextlib.closing(found):
        yield found
    if found.stragglers:
        pytest.fail("still running in a rig's host namespace:\n  " + "\n  ".join(found.stragglers), pytrace=False)


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest, places: Places) -> Place:
    """Where a test's daemon lives; skips with the probe's own words where the machine lacks bubblewrap.

    Where an engine or a cluster is, a sandbox has to be: agents ask for the isolation of their ground, and are refused
    any less.
    """
    ground: Ground = request.param
    standing = places.stand(ground)
    if standing.engine is not None or standing.cluster is not None:
        return standing
    with Installation(standing) as installation:
        found = json.loads(installation.ringfence("probe", "--json").stdout)["backends"]
    (backend,) = [one for one in found if one["name"] == ground.backend]
    if backend["state"] != "available":
        said = f"{ground}: {backend['code']}: {backend['message']}"
        # A machine may lack bubblewrap; one on which a fence is built and does not hold has found a bug.
        if backend["code"] in {"gate_failed", "canary_failed", "proxy_failed"}:
            pytest.fail(said)
        pytest.skip(said)
    return standing


@pytest.fixture(scope="module")
def bare(place: Place) -> Iterator[Installation]:
    """A host without a policy and without a daemon, for one module; nothing of a run may be left at its end."""
    place.rig.reset()
    with Installation(place) as installation:
        yield installation
        installation.stop()
        assert installation.traces() == []


@pytest.fixture
def fresh(place: Place) -> Iterator[Installation]:
    """A host without a policy and without a daemon, for one test; nothing of a run may be left at its end."""
    place.rig.reset()
    with Installation(place) as installation:
        yield installation
        installation.stop()
        assert installation.traces() == []
