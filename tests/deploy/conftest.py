"""Owns the cluster that the manifests are tested on: set up as the guide says, our images in it, shared with nobody."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.deploy.image import daemon_image_tar
from tests.deploy.manifests import ACCOUNT, MANIFESTS, NAMESPACE
from tests.rig import Rig
from tests.rig.docker import agent_image_tar, proxy_image_tar
from tests.rig.k8s import Cluster
from tests.rig.k8s.plan import NODE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A cluster with the standing objects in it, and the references by digest of the images."""

    cluster: Cluster
    agent: str
    proxy: str
    place: Path

    def judge(self, *objects: dict[str, Any], user: str = "") -> str:
        """Have the API server judge objects as if it made them; what it says against them."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        acting = [f"--as={user}"] if user else []
        return self.cluster.kubectl("create", "--dry-run=server", "-f", "-", *acting, stdin=listed).stderr

    def judge_until(self, one: dict[str, Any], says: str) -> str:
        """Have one object judged until the answer is this (empty: let in), for a change takes a moment to be known."""
        said = self.judge(one)
        until = time.monotonic() + 10
        while (says not in said if says else said) and time.monotonic() < until:
            said = self.judge(one)
        return said

    def script(self, path: Path) -> str:
        """Run a script of ours that calls kubectl, as an administrator does; its output."""
        environment = {**self.cluster.environment, "KUBECONFIG": str(self.cluster.kubeconfig), "HOME": str(self.place)}
        done = subprocess.run(
            [*self.cluster.rig.enter, str(path)],
            env=environment,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Apply a file as the guide says it."""
        return self.cluster.kubectl("apply", "--server-side", "--validate=strict", *arguments, "-f", path)


@pytest.fixture(scope="session")
def deployed(k8s_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """One for the session."""
    del k8s_built
    place = tmp_path_factory.mktemp("deployed")
    with Rig() as rig, Cluster(rig, gvisor=False) as cluster:
        found = Deployed(
            cluster=cluster,
            agent=cluster.load(agent_image_tar(place / "agent.tar")),
            proxy=cluster.load(proxy_image_tar(place / "proxy.tar")),
            place=place,
        )
        for path in MANIFESTS[:2]:
            assert found.apply(path).returncode == 0
        cluster.kubectl("label", "node", NODE, "ringfence.gvisor=present", check=True)
        # Who the daemon is, without the daemon.
        assert found.apply(ACCOUNT).returncode == 0
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "early", "namespace": NAMESPACE},
            "spec": {"type": "NodePort", "ports": [{"port": 80}]},
        }
        # A policy of admission is in force a moment after it is there; quotas know nothing of it before that either.
        while "ValidatingAdmissionPolicy" not in found.judge(service):
            pass
        yield found


@pytest.fixture(scope="session")
def daemon_image(deployed: Deployed) -> str:
    """The daemon's image in the cluster, by digest. What it is built from comes from Debian's mirror the first time."""
    return deployed.cluster.load(daemon_image_tar(deployed.place / "daemon.tar"))
