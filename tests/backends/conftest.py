"""Owns the backends that the contract tests run against, each in the rig's host namespace with a runtime of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.core.choose import Missing
from tests.backends import k8s_world
from tests.backends.docker_world import OWNER, Engines, Kind, beside, docker_engines
from tests.backends.k8s_world import Backends, K8sKind, k8s_backends
from tests.backends.world import host, inside
from tests.rig.docker import Firewall, Runtime, Which
from tests.rig.docker.fixtures import Setup
from tests.rig.k8s import Netpol
from tests.rig.k8s.fixtures import Setup as ClusterSetup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

    from reconciler.backends.base import Backend
    from tests.backends.docker_world import DockerOnRig
    from tests.backends.k8s_world import K8sOnRig
    from tests.rig import Rig

__all__ = ["docker_engines", "k8s_backends"]
_SETUPS = (
    Setup(),
    Setup(firewall=Firewall.NFTABLES, rp_filter=2),
    Setup(which=Which.DEBIAN),
)
KINDS = tuple(Kind(setup=setup, runtime=runtime) for setup in _SETUPS for runtime in Runtime)
"""Both engines, both firewalls, both runtimes: on each, what a fence is has to hold."""
ENGINES = tuple(kind for kind in KINDS if kind.setup.firewall is Firewall.IPTABLES)
"""Both engines, both runtimes: how a command starts, ends and is bounded is the same behind either firewall."""


K8S_KINDS = tuple(
    K8sKind(setup=ClusterSetup(netpol=netpol), gvisor=gvisor)
    for netpol in (Netpol.KUBE_ROUTER, Netpol.KNP)
    for gvisor in (True, False)
)
"""Both enforcers, with the RuntimeClass of gVisor and without."""


def _bounding(kinds: tuple[Kind, ...]) -> list[ParameterSet]:
    return [
        pytest.param("bubblewrap", id="bubblewrap", marks=[pytest.mark.bubblewrap, pytest.mark.rig]),
        *(pytest.param(kind, id=str(kind), marks=[pytest.mark.docker, pytest.mark.rig]) for kind in kinds),
    ]


_CLUSTERED = [pytest.param(kind, id=str(kind), marks=[pytest.mark.k8s, pytest.mark.rig]) for kind in K8S_KINDS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the contract on each backend; one that is marked `firewalls` behind each firewall of Docker too."""
    kinds = KINDS if metafunc.definition.get_closest_marker("firewalls") else ENGINES
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", [*_bounding(kinds), *_CLUSTERED], indirect=True)
    if "bounding" in metafunc.fixturenames:
        metafunc.parametrize("bounding", _bounding(kinds), indirect=True)


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


@pytest.fixture
def docker(
    request: pytest.FixtureRequest, docker_engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DockerOnRig]:
    """A probed docker backend of the kind that the test names (`mutations.on`)."""
    kind: Kind = request.param
    with beside(docker_engines.engine(kind.setup), monkeypatch):
        yield docker_engines.backend(kind, OWNER)


@pytest.fixture
def k8s_backend(
    request: pytest.FixtureRequest, k8s_backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> Iterator[K8sOnRig]:
    """A probed k8s backend of the kind that the test names."""
    kind: K8sKind = request.param
    with k8s_world.beside(k8s_backends.standing(kind.setup).cluster, monkeypatch):
        yield k8s_backends.backend(kind)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Each backend that keeps the contract; a new one adds its name and a fixture of that name."""
    yield from _stand(request, monkeypatch)


@pytest.fixture
def bounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Each that bounds a sandbox's processes, open files and kernel sockets; in a cluster the node's settings do."""
    yield from _stand(request, monkeypatch)


def _stand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    match request.param:
        case Kind() as kind:
            engines: Engines = request.getfixturevalue("docker_engines")
            with beside(engines.engine(kind.setup), monkeypatch):
                yield engines.backend(kind, OWNER)
        case K8sKind() as kind:
            backends: Backends = request.getfixturevalue("k8s_backends")
            with k8s_world.beside(backends.standing(kind.setup).cluster, monkeypatch):
                yield backends.backend(kind)
        case name:
            yield request.getfixturevalue(name)
