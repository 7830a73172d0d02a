"""Owns the k8s backends that tests run against: clusters that stay up for the session, and a backend on each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.k8s import K8s
from reconciler.core.choose import Missing
from reconciler.core.policy import HOST_IMAGE
from reconciler.host import K8sSettings
from tests.backends.world import host, inside
from tests.rig.k8s import NODE
from tests.rig.k8s.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from reconciler.backends.base import Launch, LaunchRefused, Observer, Planned, Sandbox
    from reconciler.host import Host
    from tests.rig.k8s import Cluster
    from tests.rig.k8s.fixtures import Clusters, Standing

NAMESPACE = "agent-sandbox"
MANIFEST = Path(__file__).parents[2] / "deploy/k3s/sandbox/agent-sandbox.yaml"
OWNER = f"tests-{os.getpid()}"


class K8sOnRig(K8s):
    """The k8s backend, for launches that name no image: they get the rig's agent image."""

    def __init__(self, settings: Host, owner: str, cluster: Cluster, image: str) -> None:
        super().__init__(settings, owner)
        self.cluster = cluster
        self.image = image

    def launch(  # type: ignore[override]  # the same context manager, by its public name
        self, launch: Launch, observer: Observer
    ) -> AbstractAsyncContextManager[Sandbox | LaunchRefused]:
        """Launch with the agent image."""
        return super().launch(self._imaged(launch), observer)

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Plan with the agent image."""
        return super().plan(self._imaged(launch))

    def _imaged(self, launch: Launch) -> Launch:
        return dataclasses.replace(launch, image=self.image) if launch.image == HOST_IMAGE else launch


@dataclass(frozen=True, slots=True, kw_only=True)
class K8sKind:
    """One cluster, and whether sandboxes on it have the RuntimeClass of gVisor."""

    setup: Setup = dataclasses.field(default_factory=Setup)
    gvisor: bool = True

    def __str__(self) -> str:
        """Read as a test's id."""
        return f"k8s: {self.setup}, {'gvisor' if self.gvisor else 'runc'}"


class Backends:
    """Backends on clusters that have what must stand in one, each probed once."""

    def __init__(self, clusters: Clusters, runtime: Path) -> None:
        self._clusters, self._runtime = clusters, runtime
        self._ready: set[Setup] = set()
        self._made: dict[K8sKind, K8sOnRig] = {}

    def standing(self, setup: Setup) -> Standing:
        """Give a cluster with the namespace of sandboxes in it."""
        found = self._clusters.standing(setup)
        if setup not in self._ready:
            prepare(found.cluster)
            self._ready.add(setup)
        return found

    def settings(self, kind: K8sKind) -> Host:
        """Give the settings of a host that drives this cluster."""
        found = self.standing(kind.setup)
        k8s = K8sSettings(
            kubeconfig=found.cluster.kubeconfig,
            namespace=NAMESPACE,
            proxy_image=found.proxy,
            runtime_class="gvisor" if kind.gvisor else None,
            linger=5,
        )
        return dataclasses.replace(host(self._runtime), k8s=k8s)

    def unprobed(self, kind: K8sKind, owner: str = OWNER) -> K8sOnRig:
        """Give a new backend."""
        found = self.standing(kind.setup)
        return K8sOnRig(self.settings(kind), owner, found.cluster, found.agent)

    def backend(self, kind: K8sKind) -> K8sOnRig:
        """Give a probed backend; the caller is in its rig's namespace. Fails when the probe says Missing."""
        if kind not in self._made:
            made = self.unprobed(kind)
            found = anyio.run(made.probe)
            if isinstance(found, Missing):
                pytest.fail(f"k8s is missing where a cluster runs: {found.code}: {found.message}", pytrace=False)
            self._made[kind] = made
        return self._made[kind]


def prepare(cluster: Cluster) -> None:
    """Apply what stands before any run, and let sandboxes have the node's own runtime too."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={MANIFEST}", check=True)
    allowed = "ringfence.runtime-classes=gvisor,none"
    cluster.kubectl("annotate", "--overwrite", "namespace", NAMESPACE, allowed, check=True)
    cluster.kubectl("label", "--overwrite", "node", NODE, "ringfence.gvisor=present", check=True)


@contextlib.contextmanager
def beside(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Be on a cluster's node, with the rig's nft in PATH: where the daemon of a test lives."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    with inside(Path("/run/netns", cluster.rig.host)):
        yield cluster


def objects(cluster: Cluster) -> list[str]:
    """Name everything of runs that is in the namespace of sandboxes."""
    kinds = "pods,jobs,networkpolicies,configmaps"
    found = cluster.kubectl("get", kinds, f"--namespace={NAMESPACE}", "--output=name", check=True).stdout.split()
    standing = {"configmap/kube-root-ca.crt", "networkpolicy.networking.k8s.io/default-deny"}
    return sorted(set(found) - standing)


@pytest.fixture(scope="session")
def k8s_backends(k8s_clusters: Clusters, rig_runtime: Path) -> Backends:
    """Backends, for the whole session."""
    return Backends(k8s_clusters, rig_runtime)
