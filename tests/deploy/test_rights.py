"""The daemon's account has exactly the rights that its backend uses: what it lacks and what is spare is named."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import anyio
import pytest

from proxy.entry import Entry, parse
from reconciler.backends.k8s import K8s
from reconciler.core.choose import Available, Missing
from reconciler.host import K8sSettings
from tests.backends.world import Recorder, built, host, inside, launch
from tests.deploy.manifests import DAEMON, K3S, NAMESPACE, Right, rights
from tests.rig import network

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.deploy.conftest import Deployed
    from tests.rig.k8s.cluster import Request

GROUP = re.compile(r"/apis/(?P<group>[^/]+)/")
ALLOWED = rights("Role", "ringfenced") | rights("ClusterRole", "ringfenced")


def right(request: Request) -> Right | None:
    """Name the right that a request needs; None where it is one that everybody has."""
    if not request.resource:
        return None
    found = GROUP.match(request.uri)
    return ("" if found is None else found["group"]), request.resource, request.verb


def compare(requests: Iterable[Request], allowed: frozenset[Right]) -> tuple[set[Right], set[Right]]:
    """Give the rights that were asked for in vain, and those that nobody asked for."""
    asked = [(found, request.status) for request in requests if (found := right(request)) is not None]
    lacking = {found for found, status in asked if status == 403 or found not in allowed}
    return lacking, set(allowed) - {found for found, _ in asked}


@dataclasses.dataclass(frozen=True)
class Said:
    """A row of an audit log, as far as it is looked at."""

    uri: str
    resource: str
    verb: str
    status: int = 200


def test_a_verb_that_is_missing_and_one_that_is_spare_are_both_found() -> None:
    allowed = frozenset({("", "pods", "get"), ("batch", "jobs", "list")})
    rows = [
        Said("/api/v1/namespaces/a/pods/b", "pods", "get"),
        Said("/api/v1/namespaces/a/pods/b", "pods", "delete", 403),
        Said("/version", "", "get"),
    ]
    assert compare(rows, allowed) == ({("", "pods", "delete")}, {("batch", "jobs", "list")})  # type: ignore[arg-type]  # the same attributes


def entry(text: str) -> Entry:
    found = parse(text)
    assert isinstance(found, Entry)
    return found


@pytest.mark.k8s
@pytest.mark.rig
@pytest.mark.timeout(400)
def test_the_backend_works_with_its_accounts_rights_and_needs_each_of_them(deployed: Deployed, tmp_path: Path) -> None:
    cluster = deployed.cluster
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(deployed.script(K3S / "daemon" / "kubeconfig.sh"))
    kubeconfig.chmod(0o600)
    settings = K8sSettings(
        kubeconfig=kubeconfig, proxy_image=deployed.proxy, runtime_class="gvisor", namespace=NAMESPACE
    )
    backend = K8s(dataclasses.replace(host(tmp_path), k8s=settings), "tests-1")
    with inside(network.NETNS / cluster.rig.host):
        anyio.run(_everything, backend, deployed)
    lacking, spare = compare(cluster.requests(user=DAEMON), ALLOWED)
    assert lacking == set(), "the Role lacks these"
    assert spare == set(), "the Role has these to spare"


async def _everything(backend: K8s, deployed: Deployed) -> None:
    """Do all that a daemon does: probe, run, widen a policy while it runs, look for drift, be refused, clean up."""
    probed = await backend.probe()
    assert isinstance(probed, Available), probed
    recorder = Recorder()
    wanted = dataclasses.replace(launch("sh", "-c", "sleep 8; echo done"), image=deployed.agent, owner="tests-1")
    async with backend.launch(wanted, recorder) as sandbox:
        live = built(sandbox)
        await live.start()
        wider = dataclasses.replace(wanted.proxy, generation=2, allow=(entry("db.example.com:5432"),))
        assert await live.update(wider)
        assert await live.drift() == ()
        await live.wait()
        await live.drain()
    assert recorder.undone == []
    assert "done" in recorder.stdout
    # A proxy's image that is nowhere keeps the anchor from starting, and the cluster's events say why.
    nowhere = dataclasses.replace(backend._host.k8s, proxy_image=f"x.invalid/none@sha256:{'1' * 64}")
    lost = K8s(dataclasses.replace(backend._host, k8s=nowhere), "tests-1")
    found = await lost.probe()
    assert isinstance(found, Missing)
    assert "x.invalid/none" in found.message
    # What another life of this daemon left.
    left = K8s(backend._host, "tests-1")
    async with left.launch(dataclasses.replace(wanted, run="left-1"), Recorder()) as sandbox:
        built(sandbox)
        assert await backend.reap(frozenset()) != ()
    assert await backend.reap(frozenset()) == ()
