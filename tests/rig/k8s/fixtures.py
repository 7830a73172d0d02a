"""Owns the pytest fixtures of the Kubernetes rig; starts and ends clusters, tests nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.requirements import required
from tests.rig import Rig
from tests.rig.docker import agent_image_tar, proxy_image_tar
from tests.rig.docker import cache as docker_cache
from tests.rig.k8s import Cluster, Netpol, cache

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which cluster a test wants; the value of the fixture `k8s_cluster`'s parameter."""

    netpol: Netpol = Netpol.KUBE_ROUTER
    ipv6: bool = True
    gvisor: bool = True

    def __str__(self) -> str:
        """Read as a test's id."""
        return self.netpol + ("" if self.ipv6 else ", no IPv6") + ("" if self.gvisor else ", no RuntimeClass")


ENFORCED = (Setup(), Setup(netpol=Netpol.KNP))
"""Both enforcers: what a test of the fence of pods has to hold on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A cluster that is up, and the references by digest of the images in it."""

    cluster: Cluster
    agent: str
    proxy: str


class Clusters:
    """Clusters with both images loaded, started when the first test asks for one, each in a rig of its own."""

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self._place, self._stack = place, stack
        self._up: dict[Setup, Standing] = {}

    def standing(self, setup: Setup) -> Standing:
        """Give the cluster of this setup."""
        if setup not in self._up:
            rig = self._stack.enter_context(Rig())
            cluster = Cluster(rig, netpol=setup.netpol, ipv6=setup.ipv6, gvisor=setup.gvisor)
            self._stack.enter_context(cluster)
            agent, proxy = agent_image_tar(self._place / "agent.tar"), proxy_image_tar(self._place / "proxy.tar")
            self._up[setup] = Standing(cluster=cluster, agent=cluster.load(agent), proxy=cluster.load(proxy))
        return self._up[setup]

    @property
    def up(self) -> tuple[Cluster, ...]:
        """Those that were started."""
        return tuple(each.cluster for each in self._up.values())


@pytest.fixture(scope="session")
def k8s_built() -> None:
    """Skip where nothing was built; build it where REQUIRE_BACKENDS names k8s."""
    if os.geteuid() != 0:
        pytest.skip("the Kubernetes rig needs root")
    if not cache.built():
        if "k8s" not in required():
            pytest.skip(
                "the Kubernetes rig is not built: `python -m tests.rig.k8s build` (about 20 minutes of two cores)"
            )
        docker_cache.build(*cache.everything())


@pytest.fixture(scope="session")
def k8s_clusters(k8s_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Clusters, for the whole session."""
    del k8s_built
    with contextlib.ExitStack() as stack:
        clusters = Clusters(tmp_path_factory.mktemp("images"), stack)
        yield clusters
    left = [text for cluster in clusters.up for text in cluster.rig.stragglers]
    if left:
        pytest.fail("still running in a rig's host namespace:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(params=ENFORCED, ids=str)
def k8s(request: pytest.FixtureRequest, k8s_clusters: Clusters) -> Standing:
    """A cluster with both images loaded, its rig's logs empty; narrow it by `parametrize(indirect=True)`."""
    standing = k8s_clusters.standing(request.param)
    standing.cluster.rig.reset()
    return standing


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failed test what the parts of the clusters that are up wrote last."""
    report = yield
    clusters: Clusters | None = getattr(item, "funcargs", {}).get("k8s_clusters")
    if report.failed and clusters is not None:
        for cluster in clusters.up:
            events = cluster.kubectl("get", "events,pods", "--all-namespaces", "--output=wide").stdout
            report.sections.append((f"cluster with {cluster.netpol}", f"{events}\n{cluster.logs(30)}"))
    return report
