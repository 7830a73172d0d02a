"""Owns what an installation stands on: a rig with bubblewrap, with a Docker engine and a runtime of its, or a cluster.

Says which tests run on which; tests nothing and starts no daemon of ours.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reconciler.core.policy import BackendName, Isolation
from tests.backends import k8s_world
from tests.backends.k8s_world import K8sKind
from tests.rig import Rig
from tests.rig.docker import Engine, Firewall, Runtime, Which
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.rig.docker.fixtures import Images
    from tests.rig.k8s import Cluster
    from tests.rig.k8s.fixtures import Clusters, Standing

CHECKOUT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Ground:
    """One backend as tests want it: bubblewrap, an engine of this setup under a runtime, or a cluster of this kind."""

    setup: Setup | None = None
    runtime: Runtime | None = None
    cluster: K8sKind | None = None

    @property
    def backend(self) -> BackendName:
        """What builds its sandboxes."""
        if self.cluster is not None:
            return BackendName.K8S
        return BackendName.BUBBLEWRAP if self.setup is None else BackendName.DOCKER

    @property
    def isolation(self) -> Isolation:
        """What isolates them."""
        if self.cluster is not None:
            return Isolation.GVISOR if self.cluster.gvisor else Isolation.CONTAINER
        match self.runtime:
            case None:
                return Isolation.NAMESPACE
            case Runtime.RUNC:
                return Isolation.CONTAINER
            case Runtime.RUNSC:
                return Isolation.GVISOR

    def __str__(self) -> str:
        """Read as a test's id, and as a column's head."""
        if self.cluster is not None:
            return str(self.cluster)
        if self.setup is None:
            return "bubblewrap"
        version = {Which.CURRENT: "29.8", Which.DEBIAN: "20.10"}[self.setup.which]
        return f"docker {version}, {self.setup.firewall}, {self.runtime}"


BUBBLEWRAP: Final = Ground()
_SETUPS: Final = (
    # The kernel's own rp_filter hides least; the other is what systemd sets.
    Setup(firewall=Firewall.NFTABLES),
    Setup(firewall=Firewall.IPTABLES, rp_filter=2),
    Setup(which=Which.DEBIAN),
)
GROUNDS: Final = (
    BUBBLEWRAP,
    *(Ground(setup, runtime) for setup in _SETUPS for runtime in (Runtime.RUNSC, Runtime.RUNC)),
    *(Ground(cluster=K8sKind(gvisor=gvisor)) for gvisor in (True, False)),
)
"""Every backend, both engines, both firewalls, both runtimes, kube-router."""

_MAIN: Final = GROUNDS[1]
"""The Docker host on which everything is shown: the current engine with nftables, under gVisor."""
_WHOLE: Final = frozenset(
    {"test_egress", "test_endings", "test_evidence", "test_weakening", "test_crash", "test_attacks"}
)
_SHORT: Final = frozenset(
    {
        "test_attacks",
        "test_egress",
        "test_endings.test_how_a_command_ends_is_told_apart",
        "test_weakening.test_signed_it_is_in_force_within_two_seconds_and_a_live_job_reaches_the_host",
        "test_crash.test_kill_9_of_the_running_daemon_stops_what_is_sent_before_anybody_cleans_up",
        "test_crash.test_dockerd_killed_and_started_again_leaves_one_result_and_nothing_else",
    }
)
WHOLE: Final = frozenset({BUBBLEWRAP, _MAIN})
"""Where everything is shown that there is to show."""
_CLUSTERED: Final = frozenset({"test_egress"})
LISTS: Final[Mapping[Ground, frozenset[str]]] = {
    **{ground: _WHOLE if ground == _MAIN else _SHORT for ground in GROUNDS if ground.setup is not None},
    **{ground: _CLUSTERED for ground in GROUNDS if ground.cluster is not None},
}
"""For each Docker host and cluster the modules, or single tests, that run on it; bubblewrap runs all of them."""


def wanted(ground: Ground, module: str, test: str, marks: frozenset[str]) -> bool:
    """Say whether a test runs on a ground.

    Args:
        ground: the ground.
        module: the last part of its module's name.
        test: its function's name.
        marks: its own marks and its module's; one that names a backend binds it to that one.
    """
    named = marks & set(BackendName)
    if named and ground.backend not in named:
        return False
    return ground == BUBBLEWRAP or bool(LISTS[ground] & {module, f"{module}.{test}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A ground that is up. `enter` and `environment` start a program where its daemon lives; `settings`: of host.yaml.

    `image`: what an agent's document says. `parent`: where an installation's directory may be, seen from there too.
    """

    ground: Ground
    rig: Rig
    enter: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    image: str = "host"
    # Every parent of the policy directory must be root's.
    parent: Path = Path("/run")
    engine: Engine | None = None
    cluster: Cluster | None = None

    @property
    def backend(self) -> BackendName:
        """What builds its sandboxes."""
        return self.ground.backend

    @property
    def gvisor(self) -> bool:
        """Whether gVisor isolates them."""
        return self.ground.isolation is Isolation.GVISOR


def bubblewrap(rig: Rig) -> Place:
    """Stand on a rig that is up."""
    return Place(ground=BUBBLEWRAP, rig=rig, enter=rig.enter)


def docker(ground: Ground, engine: Engine, images: Images) -> Place:
    """Stand on an engine that is up and has both images."""
    return Place(
        ground=ground,
        rig=engine.rig,
        # Pids of containers are those of the engine's pid namespace, and its /run is a private one.
        enter=engine.enter,
        environment={**os.environ, **engine._environment(), "PYTHONPATH": str(CHECKOUT)},
        settings={
            "docker": {
                "socket": str(engine.socket),
                "proxy_image": images.proxy.pinned(engine.store),
                "gvisor_runtime": "runsc" if ground.runtime is Runtime.RUNSC else None,
            }
        },
        image=images.agent.pinned(engine.store),
        parent=Path("/tmp"),  # noqa: S108 - root's and sticky
        engine=engine,
    )


def k8s(ground: Ground, standing: Standing) -> Place:
    """Stand on the node of a cluster that is up, has both images, and what must stand in one."""
    cluster = standing.cluster
    gvisor = ground.cluster is not None and ground.cluster.gvisor
    return Place(
        ground=ground,
        rig=cluster.rig,
        enter=cluster.rig.enter,
        environment={**os.environ, **cluster.environment, "PYTHONPATH": str(CHECKOUT)},
        settings={
            "k8s": {
                "kubeconfig": str(cluster.kubeconfig),
                "namespace": k8s_world.NAMESPACE,
                "proxy_image": standing.proxy,
                "runtime_class": "gvisor" if gvisor else None,
            }
        },
        image=standing.agent,
        cluster=cluster,
    )


class Places:
    """Gives one place at a time: an engine stays up until another is wanted."""

    def __init__(
        self, rig: Callable[[], Rig], images: Callable[[], Images], clusters: Callable[[], Clusters] | None = None
    ) -> None:
        """Start nothing yet; the rig of bubblewrap, the images and clusters come when they are needed."""
        self._rig, self._images, self._clusters = rig, images, clusters
        self._up: tuple[Setup, Engine] | None = None
        self._stack = contextlib.ExitStack()
        self.rigs: list[Rig] = []

    def stand(self, ground: Ground) -> Place:
        """Give a place."""
        if ground.cluster is not None:
            if self._clusters is None:
                raise ValueError(f"{ground}: there are no clusters here")
            standing = self._clusters().standing(ground.cluster.setup)
            k8s_world.prepare(standing.cluster)
            return k8s(ground, standing)
        if ground.setup is None:
            return bubblewrap(self._rig())
        return docker(ground, self._engine(ground.setup), self._images())

    def _engine(self, setup: Setup) -> Engine:
        if self._up is not None and self._up[0] == setup:
            return self._up[1]
        self.close()
        images = self._images()
        rig = self._stack.enter_context(Rig())
        self.rigs.append(rig)
        made = Engine(rig, which=setup.which, firewall=setup.firewall, store=setup.store, rp_filter=setup.rp_filter)
        self._stack.enter_context(made)
        for image in (images.agent, images.proxy):
            made.load(image.archive)
        self._up = (setup, made)
        return made

    def close(self) -> None:
        """End the engine that is up."""
        self._up = None
        self._stack.close()

    @property
    def stragglers(self) -> list[str]:
        """What was still running in the namespace of an engine's host when it ended."""
        return [text for rig in self.rigs for text in rig.stragglers]
