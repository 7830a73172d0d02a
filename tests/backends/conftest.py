"""Owns the backends that the contract tests run against, each in the rig's host namespace with a runtime of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.core.choose import Missing
from tests.backends.world import host, inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.backends.base import Backend
    from tests.rig import Rig

OWNER = f"tests-{os.getpid()}"


@pytest.fixture(scope="session")
def rig_runtime() -> Iterator[Path]:
    """A runtime directory through which a sandbox's uid may pass, as /run/ringfence is one."""
    folder = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def in_rig(rig: Rig) -> Iterator[Rig]:
    """The rig, with this test's own thread inside its host namespace: the daemon's place."""
    with inside(Path("/run/netns", rig.host)):
        yield rig


@pytest.fixture(scope="session")
def bubblewrap_session(rig_session: Rig, rig_runtime: Path) -> Bubblewrap:
    """The bubblewrap backend, probed once; skips where the host does not have it."""
    backend = Bubblewrap(host(rig_runtime), OWNER)
    with inside(Path("/run/netns", rig_session.host)):
        found = anyio.run(backend.probe)
    if isinstance(found, Missing):
        pytest.skip(f"bubblewrap: {found.code}: {found.message}")
    return backend


@pytest.fixture
def bubblewrap(bubblewrap_session: Bubblewrap, in_rig: Rig) -> Bubblewrap:
    """The bubblewrap backend in the rig."""
    del in_rig
    return bubblewrap_session


@pytest.fixture(params=[pytest.param("bubblewrap", marks=[pytest.mark.bubblewrap, pytest.mark.rig])])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that keeps the contract; a new one adds its name and a fixture of that name."""
    found: Backend = request.getfixturevalue(request.param)
    return found
