"""Each hazard of a cluster, with its remedy taken out: the launch is refused, or the run is stopped, and it says why.

A remedy whose absence nobody notices is no remedy. What the gate can see, the gate must name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import k8s_gate, k8s_node, k8s_objects
from reconciler.backends.k8s_client import Cluster as Client
from reconciler.backends.k8s_client import Kind
from reconciler.backends.k8s_sandbox import K8sSandbox
from reconciler.core.choose import Available, Missing
from reconciler.core.gate_report import TargetKind
from reconciler.core.policy import Isolation
from tests.backends import k8s_world
from tests.backends.k8s_world import NAMESPACE, K8sKind, objects
from tests.backends.world import LIMITS, MIB, Recorder, built, launch, refused, run
from tests.rig.k8s import NODE_ADDRESS, Netpol
from tests.rig.k8s.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.backends.base import LaunchRefused
    from reconciler.backends.gate_targets import Question
    from tests.backends.k8s_world import Backends, K8sOnRig

pytestmark = [pytest.mark.k8s, pytest.mark.rig, pytest.mark.timeout(300)]

ROUTED = K8sKind(setup=Setup(), gvisor=False)
SHUT = K8sKind(setup=Setup(), gvisor=True)
UNENFORCED = K8sKind(setup=Setup(netpol=Netpol.NONE), gvisor=False)
SMALL = dataclasses.replace(LIMITS, cpus=0.1, memory=64 * MIB)


def on(*kinds: K8sKind) -> pytest.MarkDecorator:
    """Run a test on these clusters and runtimes."""
    return pytest.mark.parametrize("k8s_backend", kinds, indirect=True, ids=str)


def try_launch(backend: K8sOnRig) -> LaunchRefused:
    """Launch, and expect the refusal; nothing is left of it."""
    recorder = Recorder()

    async def main() -> LaunchRefused:
        async with backend.launch(launch("true", limits=SMALL), recorder) as sandbox:
            return refused(sandbox)

    found = anyio.run(main)
    assert recorder.undone == []
    assert objects(backend.cluster) == []
    return found


def reached(found: LaunchRefused) -> set[str]:
    """Name what the gate of a refused launch reached, and where something arrived."""
    assert found.code == "gate_failed", found
    assert found.report is not None
    return {target.name for target in found.report.targets if target.verdict == "reached"} | {*found.report.arrivals}


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the daemon take itself to be on no node: no guard, no listeners of its own; the gate is left."""
    monkeypatch.setattr(k8s_node, "standing_on", lambda _nodes: None)


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the node guard out; the daemon's listeners on the node stay."""

    async def nothing(_self: object, *, agent: str, proxy: str, lasts: int) -> tuple[str, ...]:
        del agent, proxy, lasts
        return ()

    monkeypatch.setattr(k8s_node.Fence, "put", nothing)


# --- K1: policies that nobody enforces


@pytest.fixture
def unenforced(k8s_backends: Backends, monkeypatch: pytest.MonkeyPatch) -> Iterator[K8sOnRig]:
    """A backend, not probed, on a cluster that takes policies without a word and enforces none."""
    with k8s_world.beside(k8s_backends.standing(UNENFORCED.setup).cluster, monkeypatch):
        yield k8s_backends.unprobed(UNENFORCED)


def test_policies_that_nobody_enforces_are_seen_by_the_canary_of_the_probe(
    unenforced: K8sOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    found = anyio.run(unenforced.probe)
    assert isinstance(found, Missing)
    assert found.code == "gate_failed"
    assert "canary tcp:" in found.message
    assert objects(unenforced.cluster) == []


# --- K3, K4, K5: the node's own processes, link-local addresses, echoes


@on(ROUTED, SHUT)
def test_without_the_node_guard_the_nodes_ports_and_link_local_addresses_are_reached(
    k8s_backend: K8sOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unguarded(monkeypatch)
    names = reached(try_launch(k8s_backend))
    assert [name for name in names if f"tcp:{NODE_ADDRESS}:3" in name], "a process of the node at a node port"
    assert [name for name in names if "[fe80::" in name], "the node, by its link-local address"


def only_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the gate about echoes alone: what else is open would hide that they are."""
    real = k8s_gate.question

    def asked(*given: Any, **named: Any) -> Question:
        question = real(*given, **named)
        kept = tuple(each for each in question.targets if each.kind in (TargetKind.ICMP, TargetKind.ICMP_RAW))
        return dataclasses.replace(question, targets=kept, settle=())

    monkeypatch.setattr(k8s_gate, "question", asked)


def test_echoes_of_the_node_are_seen_and_the_node_guard_closes_them(
    unenforced: K8sOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_echoes(monkeypatch)
    with monkeypatch.context() as patch:
        elsewhere(patch)
        found = anyio.run(unenforced.probe)
    assert isinstance(found, Missing)
    assert f"echo icmp:{NODE_ADDRESS}" in found.message
    assert isinstance(anyio.run(unenforced.probe), Available)


# --- K6: the order of the teardown, and what stands without it


@on(ROUTED)
def test_the_agents_pod_is_gone_before_its_policies_go(k8s_backend: K8sOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[tuple[str, bool]] = []
    real = Client.delete

    async def watched(self: Client, kind: Kind, name: str, *, grace: int | None = None) -> bool:
        if kind is Kind.POLICY:
            agent = name.rpartition("-")[0] + "-agent"
            there.append((name, await self.get(Kind.POD, agent) is not None))
        return await real(self, kind, name, grace=grace)

    monkeypatch.setattr(Client, "delete", watched)
    recorder = Recorder()

    async def main() -> None:
        async with k8s_backend.launch(launch("sleep", "60", limits=SMALL), recorder) as sandbox:
            await built(sandbox).start()

    anyio.run(main)
    assert len(there) == 2
    assert [name for name, pod in there if pod] == []


@on(ROUTED)
def test_without_a_policy_that_denies_by_default_there_is_no_backend(
    k8s_backend: K8sOnRig, k8s_backends: Backends
) -> None:
    cluster = k8s_backend.cluster
    cluster.kubectl("delete", "networkpolicy", "default-deny", f"--namespace={NAMESPACE}", check=True)
    try:
        found = anyio.run(k8s_backends.unprobed(ROUTED).probe)
        assert isinstance(found, Missing)
        assert (found.code, "kubectl apply" in found.message) == ("no_default_deny", True)
        assert try_launch(k8s_backend).code == "fence_failed"
    finally:
        k8s_world.prepare(cluster)


# --- K7: policies add up


def stray(run_: str) -> dict[str, object]:
    """A policy that is not ours and selects this run's agent, written so that the API server takes it."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"stray-{run_}", "namespace": NAMESPACE, "labels": {"ringfence.run": run_}},
        "spec": {
            "podSelector": {"matchLabels": {"ringfence.run": run_, "ringfence.role": "agent"}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [
                {
                    "to": [{"podSelector": {"matchLabels": {"ringfence.run": run_, "ringfence.role": "proxy"}}}],
                    "ports": [{"protocol": "TCP", "port": 3128}],
                }
            ],
        },
    }


@contextlib.contextmanager
def planted(backend: K8sOnRig, run_: str) -> Iterator[None]:
    """Have such a policy for a while."""
    backend.cluster.apply(stray(run_))
    try:
        yield
    finally:
        name = f"stray-{run_}"
        backend.cluster.kubectl("delete", "networkpolicy", name, f"--namespace={NAMESPACE}", check=True)


@on(ROUTED)
def test_a_policy_that_selects_the_sandbox_and_is_not_ours_refuses_the_launch(k8s_backend: K8sOnRig) -> None:
    job = launch("true", limits=SMALL)

    async def main() -> LaunchRefused:
        async with k8s_backend.launch(job, Recorder()) as sandbox:
            return refused(sandbox)

    with planted(k8s_backend, job.run):
        found = anyio.run(main)
    assert found.code == "fence_failed"
    assert f"policy stray-{job.run} selects the agent's pod" in found.message


@on(ROUTED)
def test_a_policy_that_comes_during_the_run_is_drift_and_so_is_each_change_of_ours(k8s_backend: K8sOnRig) -> None:
    job = launch("sleep", "120", limits=SMALL)
    name = f"ringfence-{job.run}"

    async def main() -> None:
        async with k8s_backend.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            assert await live.drift() == ()
            with planted(k8s_backend, job.run):
                assert any("stray" in line for line in await live.drift())
            assert await live.drift() == ()
            changed = json.dumps([{"op": "replace", "path": "/spec/egress/0/ports/0/port", "value": 443}])
            policy = ("networkpolicy", f"{name}-proxy", f"--namespace={NAMESPACE}")
            k8s_backend.cluster.kubectl("patch", *policy, "--type=json", f"--patch={changed}", check=True)
            assert any(f"policy {name}-proxy" in line for line in await live.drift())
            k8s_backend.cluster.kubectl("delete", *policy, check=True)
            assert any(f"policy {name}-proxy is gone" in line for line in await live.drift())

    anyio.run(main)


# --- K8: a RuntimeClass whose handler no node has


@on(ROUTED)
def test_a_runtime_class_without_a_handler_is_named_by_the_clusters_own_words(
    k8s_backend: K8sOnRig, k8s_backends: Backends
) -> None:
    cluster = k8s_backend.cluster
    made = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "hollow"},
        "handler": "no-such-handler",
    }
    allowed = "ringfence.runtime-classes=gvisor,none,hollow"
    cluster.apply(made)
    cluster.kubectl("annotate", "--overwrite", "namespace", NAMESPACE, allowed, check=True)
    try:
        backend = k8s_backends.unprobed(SHUT)
        k8s = dataclasses.replace(backend._host.k8s, runtime_class="hollow")
        backend._host = dataclasses.replace(backend._host, k8s=k8s)
        found = anyio.run(backend.probe)
        assert isinstance(found, Available)
        assert found.isolation is Isolation.CONTAINER
        (why,) = [line for line in found.evidence if line.startswith("hollow: ")]
        assert "no_runtime_handler" in why
        assert "no-such-handler" in why
    finally:
        cluster.kubectl("delete", "runtimeclass", "hollow", check=True)
        k8s_world.prepare(cluster)


@on(ROUTED)
def test_a_runtime_class_that_the_cluster_does_not_have_is_said_with_advice(
    k8s_backend: K8sOnRig, k8s_backends: Backends
) -> None:
    backend = k8s_backends.unprobed(SHUT)
    k8s = dataclasses.replace(backend._host.k8s, runtime_class="nowhere")
    backend._host = dataclasses.replace(backend._host, k8s=k8s)
    found = anyio.run(backend.probe)
    assert isinstance(found, Available)
    assert found.isolation is Isolation.CONTAINER
    assert any("no RuntimeClass nowhere" in line and "kubectl apply" in line for line in found.evidence)
    assert k8s_backend.name == found.backend


# --- K9: a config map's way into a pod


@on(ROUTED)
def test_a_policy_is_acknowledged_in_five_seconds_because_the_pod_is_annotated(
    k8s_backend: K8sOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch("sleep", "120", limits=SMALL)

    async def main() -> None:
        async with k8s_backend.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            began = time.monotonic()
            assert await live.update(dataclasses.replace(job.proxy, generation=2))
            assert time.monotonic() - began < 5
            monkeypatch.setattr(k8s_objects, "generation_patch", lambda _generation: {})
            assert not await live.update(dataclasses.replace(job.proxy, generation=3))

    anyio.run(main)


@on(ROUTED)
def test_a_run_ends_with_its_proxy(k8s_backend: K8sOnRig) -> None:
    job = launch("sleep", "600", limits=SMALL)

    async def main() -> object:
        async with k8s_backend.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            selector = f"ringfence.run={job.run},ringfence.role=proxy"
            found = ("pod", f"--selector={selector}", f"--namespace={NAMESPACE}", "--wait=false")
            await anyio.to_thread.run_sync(lambda: k8s_backend.cluster.kubectl("delete", *found, check=True))
            with anyio.fail_after(60):
                return (await live.wait()).code

    assert anyio.run(main) == "proxy_died"


@on(SHUT)
def test_calls_of_the_api_are_few(k8s_backend: K8sOnRig) -> None:
    async def main() -> int:
        async with k8s_backend.launch(launch("true", limits=SMALL), Recorder()) as sandbox:
            await run(sandbox)
            assert isinstance(sandbox, K8sSandbox)
            return sandbox._standing.cluster.made

    assert anyio.run(main) < 150
