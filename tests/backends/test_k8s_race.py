"""A command that attacks from its first millisecond on: twenty of them, behind the gate and, planted, without it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends import k8s_node
from tests.backends.k8s_world import K8sKind
from tests.backends.world import LIMITS, MIB, Recorder, launch, run
from tests.rig import addresses
from tests.rig.k8s import Netpol
from tests.rig.k8s.fixtures import Setup

if TYPE_CHECKING:
    from tests.backends.k8s_world import K8sOnRig
    from tests.rig.k8s import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.rig, pytest.mark.timeout(1200)]
RUNS, AT_ONCE = 20, 5
TARGET, PORT = addresses.INTERNET_V4, 4711
ATTACK = f"""
import socket, time
until = time.monotonic() + 1.5
while time.monotonic() < until:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as sock:
            sock.setblocking(False)
            try:
                sock.connect_ex(("{TARGET}", {PORT}))
                sock.send(b"out")
            except OSError:
                pass
    time.sleep(0.005)
"""
SMALL = dataclasses.replace(LIMITS, cpus=0.2, memory=64 * MIB)
KINDS = [
    K8sKind(setup=Setup(netpol=netpol), gvisor=gvisor)
    for netpol, gvisor in ((Netpol.KUBE_ROUTER, False), (Netpol.KUBE_ROUTER, True), (Netpol.KNP, False))
]
UNGATED = "ungated"
"""A namespace where pods may be without a gate."""


def got_out(cluster: Cluster) -> set[str]:
    """Whose packets came to where nothing but the attacks sends anything."""
    return {packet.source for packet in cluster.rig.packets(address=TARGET)}


@pytest.mark.parametrize("k8s_backend", KINDS, indirect=True, ids=str)
def test_behind_the_gate_no_command_gets_a_packet_out(k8s_backend: K8sOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The node guard would shut them too: here the gate is alone.
    monkeypatch.setattr(k8s_node, "standing_on", lambda _nodes: None)
    cluster = k8s_backend.cluster
    cluster.rig.reset()
    ends: list[int | None] = []

    async def one() -> None:
        job = launch("python3", "-I", "-S", "-c", ATTACK, limits=SMALL)
        async with k8s_backend.launch(job, Recorder()) as sandbox:
            ends.append((await run(sandbox)).status)

    async def main() -> None:
        for _ in range(RUNS // AT_ONCE):
            async with anyio.create_task_group() as tasks:
                for _ in range(AT_ONCE):
                    tasks.start_soon(one)

    anyio.run(main)
    assert ends == [0] * RUNS
    assert got_out(cluster) == set()


@pytest.mark.parametrize("k8s_backend", KINDS[:1], indirect=True, ids=str)
def test_without_it_they_do(k8s_backend: K8sOnRig) -> None:
    """Else the test above could not fail. The same policy, from before the pods were there."""
    cluster = k8s_backend.cluster
    cluster.rig.reset()
    labels = {"role": "agent"}
    meta = {"namespace": UNGATED}
    both = ["Ingress", "Egress"]
    to_nobody = [{"to": [{"podSelector": {"matchLabels": {"role": "nobody"}}}], "ports": [{"port": 3128}]}]
    policy = {"podSelector": {"matchLabels": labels}, "policyTypes": both, "egress": to_nobody}
    container = {"name": "agent", "image": k8s_backend.image, "command": ["python3", "-I", "-S", "-c", ATTACK]}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": UNGATED}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "default-deny", **meta},
            "spec": {"podSelector": {}, "policyTypes": both},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "agent", **meta},
            "spec": policy,
        },
    )
    try:
        time.sleep(3)
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"agent-{number}", "labels": labels, **meta},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 0,
                    "containers": [container],
                },
            }
            for number in range(RUNS)
        ]
        # As on a node that is too busy for it; on a quiet one it takes up to a second by itself.
        with cluster.paused("kube-router"):
            cluster.apply(*pods)
            cluster.rig.until(lambda: bool(got_out(cluster)), timeout_s=60)
        phase = "--output=jsonpath={.items[*].status.phase}"
        until = time.monotonic() + 240
        found: list[str] = []
        while time.monotonic() < until:
            found = cluster.kubectl("get", "pods", f"--namespace={UNGATED}", phase, check=True).stdout.split()
            if found == ["Succeeded"] * RUNS:
                break
            time.sleep(1)
        assert found == ["Succeeded"] * RUNS
        assert len(got_out(cluster)) > 0
    finally:
        cluster.kubectl("delete", "namespace", UNGATED, "--wait=true", check=True, timeout_s=120)
