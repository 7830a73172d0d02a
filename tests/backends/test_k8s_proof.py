"""What an API server must show of a run: each change that somebody makes is named, what a cluster fills in is not."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.backends import k8s_proof
from reconciler.backends.k8s_place import Role
from tests.backends.test_k8s_objects import PLAIN, WHERE, everything, pods

if TYPE_CHECKING:
    from collections.abc import Callable

Plain = dict[str, Any]
LABELS = pods(WHERE)[Role.AGENT]["metadata"]["labels"]


def shown(role: Role, *, gvisor: bool = True) -> Plain:
    """A pod as an API server returns it: defaults filled in, what RuntimeClass and Job add."""
    pod: Plain = json.loads(json.dumps(pods(WHERE if gvisor else PLAIN)[role]))
    spec = pod["spec"]
    spec |= {
        "nodeName": "node",
        "schedulerName": "default-scheduler",
        "priority": 0,
        "preemptionPolicy": "PreemptLowerPriority",
        "serviceAccount": spec["serviceAccountName"],
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
    }
    if role is Role.AGENT and gvisor:
        spec |= {"overhead": {"memory": "64Mi"}, "nodeSelector": {"ringfence.gvisor": "present"}}
    if role is Role.PROXY:
        pod["metadata"]["labels"] |= {"job-name": "x", "batch.kubernetes.io/controller-uid": "y", "controller-uid": "y"}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container |= {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
        limits = container["resources"]["limits"]
        limits["memory"] = f"{int(limits['memory']) // 1024}Ki"
        if limits["cpu"] == "1":
            limits["cpu"] = "1000m"
    return pod


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("gvisor", [True, False], ids=["gvisor", "container"])
def test_a_pod_with_what_a_cluster_fills_in_is_as_asked_for(role: Role, gvisor: bool) -> None:
    asked = pods(WHERE if gvisor else PLAIN)[role]
    assert k8s_proof.pod(role, asked, shown(role, gvisor=gvisor)) == ()


def agent(pod: Plain) -> Plain:
    found: Plain = pod["spec"]["containers"][0]
    return found


CHANGES: dict[str, Callable[[Plain], object]] = {
    "a sidecar is injected": lambda pod: pod["spec"]["containers"].append({"name": "istio-proxy", "image": "x"}),
    "an init container is injected": lambda pod: pod["spec"]["initContainers"].insert(0, {"name": "istio-init"}),
    "somebody attaches an ephemeral container": lambda pod: pod["spec"].update(ephemeralContainers=[{"name": "debug"}]),
    "the gate is taken out": lambda pod: pod["spec"].pop("initContainers"),
    "it is in the host's network": lambda pod: pod["spec"].update(hostNetwork=True),
    "it sees the host's processes": lambda pod: pod["spec"].update(hostPID=True),
    "it has the host's IPC": lambda pod: pod["spec"].update(hostIPC=True),
    "it has names of hosts": lambda pod: pod["spec"].update(hostAliases=[{"ip": "10.0.0.1"}]),
    "it resolves names": lambda pod: pod["spec"].update(dnsPolicy="ClusterFirst"),
    "another resolver is added": lambda pod: pod["spec"]["dnsConfig"]["nameservers"].append("10.96.0.10"),
    "a token is mounted": lambda pod: pod["spec"].update(automountServiceAccountToken=True),
    "whether a token is mounted is left open": lambda pod: pod["spec"].pop("automountServiceAccountToken"),
    "it has another account": lambda pod: pod["spec"].update(serviceAccountName="default"),
    "it has another account by its old name": lambda pod: pod["spec"].update(serviceAccount="default"),
    "the RuntimeClass is taken out": lambda pod: pod["spec"].pop("runtimeClassName"),
    "it restarts": lambda pod: pod["spec"].update(restartPolicy="Always"),
    "its deadline is taken out": lambda pod: pod["spec"].pop("activeDeadlineSeconds"),
    "a volume is added": lambda pod: pod["spec"]["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "a volume is another": lambda pod: pod["spec"]["volumes"][2].update(name="job", configMap={"name": "other"}),
    "it is privileged": lambda pod: agent(pod)["securityContext"].update(privileged=True),
    "whether it gains rights is left open": lambda pod: agent(pod)["securityContext"].pop("allowPrivilegeEscalation"),
    "it has a capability": lambda pod: agent(pod)["securityContext"]["capabilities"].update(add=["NET_RAW"]),
    "no capability is dropped": lambda pod: agent(pod)["securityContext"].pop("capabilities"),
    "its root can be written": lambda pod: agent(pod)["securityContext"].update(readOnlyRootFilesystem=False),
    "it is another user": lambda pod: agent(pod)["securityContext"].update(runAsUser=0),
    "its system calls are free": lambda pod: agent(pod)["securityContext"].update(
        seccompProfile={"type": "Unconfined"}
    ),
    "its image is another": lambda pod: agent(pod).update(image="evil@sha256:" + "0" * 64),
    "its command is another": lambda pod: agent(pod).update(command=["sh"]),
    "it has arguments": lambda pod: agent(pod).update(args=["-c", "x"]),
    "a variable is added": lambda pod: agent(pod)["env"].append({"name": "LD_PRELOAD", "value": "/job/x"}),
    "a variable is another": lambda pod: agent(pod)["env"][0].update(value="/"),
    "it has more memory": lambda pod: agent(pod)["resources"]["limits"].update(memory="2Gi"),
    "it has a hook": lambda pod: agent(pod).update(lifecycle={"postStart": {"exec": {"command": ["x"]}}}),
    "it has a port": lambda pod: agent(pod).update(ports=[{"containerPort": 80}]),
    "a mount is added": lambda pod: agent(pod)["volumeMounts"].append({"name": "gate", "mountPath": "/x"}),
    "a mount can be written": lambda pod: agent(pod)["volumeMounts"][0].pop("readOnly"),
    "it has a label that a policy may select by": lambda pod: pod["metadata"]["labels"].update(app="web"),
    "its role is another": lambda pod: pod["metadata"]["labels"].update({"ringfence.role": "proxy"}),
    "it is being removed": lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-29T00:00:00Z"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_named(change: Callable[[Plain], object]) -> None:
    pod = shown(Role.AGENT)
    change(pod)
    assert k8s_proof.pod(Role.AGENT, pods(WHERE)[Role.AGENT], pod) != ()


def test_a_pod_that_is_gone_is_named() -> None:
    assert k8s_proof.pod(Role.AGENT, pods(WHERE)[Role.AGENT], None) == ("agent: the pod is gone",)


def test_a_node_that_was_asked_for_is_held() -> None:
    asked = pods(WHERE)[Role.AGENT]
    asked["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "a"}
    pod = shown(Role.AGENT)
    assert k8s_proof.pod(Role.AGENT, asked, pod) == ("agent pod: it is not kept to its node",)
    pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = "a"
    assert k8s_proof.pod(Role.AGENT, asked, pod) == ()


def test_secret_values_are_in_no_line() -> None:
    pod = shown(Role.AGENT)
    for each in agent(pod)["env"]:
        each["value"] = "swordfish-4711"
    agent(pod)["command"] = ["swordfish-4711"]
    lines = k8s_proof.pod(Role.AGENT, pods(WHERE)[Role.AGENT], pod)
    assert lines
    assert "swordfish" not in "".join(lines)


POLICY_CHANGES: dict[str, Callable[[Plain], object]] = {
    "a way in": lambda spec: spec.update(ingress=[{}]),
    "another way out": lambda spec: spec["egress"].append({}),
    "another port": lambda spec: spec["egress"][0]["ports"].append({"protocol": "TCP", "port": 3129}),
    "a range of ports": lambda spec: spec["egress"][0]["ports"][0].update(endPort=65535),
    "another peer": lambda spec: spec["egress"][0]["to"].append({"ipBlock": {"cidr": "0.0.0.0/0"}}),
    "every namespace's pods": lambda spec: spec["egress"][0]["to"][0].update(namespaceSelector={}),
    "no direction out": lambda spec: spec.update(policyTypes=["Ingress"]),
    "another selector": lambda spec: spec.update(podSelector={"matchLabels": {"x": "y"}}),
}


@pytest.mark.parametrize("change", POLICY_CHANGES.values(), ids=POLICY_CHANGES)
def test_a_changed_policy_is_named(change: Callable[[Plain], object]) -> None:
    asked = everything(WHERE)["agent-policy"]
    found = copy.deepcopy(asked)
    assert k8s_proof.policy("p", asked, found) == ()
    change(found["spec"])
    assert k8s_proof.policy("p", asked, found) != ()


def test_a_policy_that_is_gone_is_named() -> None:
    assert k8s_proof.policy("p", everything(WHERE)["agent-policy"], None) == ("policy p is gone",)


def stray(selector: Plain, **spec: Any) -> Plain:
    return {"metadata": {"name": "stray"}, "spec": {"podSelector": selector, **(spec or {"egress": [{}]})}}


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        pytest.param(stray({}), True, id="one that selects every pod"),
        pytest.param(stray({"matchLabels": {"ringfence.role": "agent"}}), True, id="one by a label of ours"),
        pytest.param(stray({"matchLabels": {"app": "web"}}), False, id="one by another label is another's"),
        pytest.param(
            stray({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}), True, id="one by what is missing"
        ),
        pytest.param(
            stray({"matchExpressions": [{"key": "app", "operator": "Exists"}]}), False, id="one by what is not there"
        ),
        pytest.param(
            stray({"matchExpressions": [{"key": "ringfence.role", "operator": "In", "values": ["agent", "x"]}]}),
            True,
            id="one by a set of values",
        ),
        pytest.param(
            stray({"matchExpressions": [{"key": "ringfence.role", "operator": "NotIn", "values": ["agent"]}]}),
            False,
            id="one that leaves us out",
        ),
        pytest.param(
            stray({"matchExpressions": [{"key": "x", "operator": "Perhaps"}]}), True, id="one that cannot be read"
        ),
        pytest.param(stray({}, ingress=[{}]), True, id="one that lets in"),
        pytest.param(stray({}, policyTypes=["Ingress", "Egress"]), False, id="one that allows nothing opens nothing"),
    ],
)
def test_every_policy_that_selects_a_pod_is_ours_or_named(policy: Plain, named: bool) -> None:
    ours = everything(WHERE)["agent-policy"]
    found = k8s_proof.selecting(LABELS, [ours, policy], [WHERE.name("agent")], who=Role.AGENT)
    assert bool(found) is named
    assert all("stray" in line for line in found)


@pytest.mark.parametrize(
    ("spec", "denies"),
    [
        pytest.param({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}, True, id="all pods, both ways"),
        pytest.param({"podSelector": {}, "policyTypes": ["Ingress"]}, False, id="one way is not enough"),
        pytest.param(
            {"podSelector": {"matchLabels": {"a": "b"}}, "policyTypes": ["Ingress", "Egress"]}, False, id="some pods"
        ),
        pytest.param(
            {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "egress": [{}]}, False, id="one that allows"
        ),
    ],
)
def test_a_default_that_denies(spec: Plain, denies: bool) -> None:
    assert k8s_proof.denies_by_default([{"metadata": {"name": "x"}, "spec": spec}]) is denies


@pytest.mark.parametrize(
    ("kernel", "gvisor", "holds"),
    [
        ("Linux version 4.19.0-gvisor #1 SMP", True, True),
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016", True, True),
        ("Linux version 6.1.0-18-amd64", True, False),
        (None, True, False),
        ("Linux version 6.1.0-18-amd64", False, True),
    ],
    ids=["a gVisor of 2026", "an older gVisor", "the node's own kernel under gVisor", "nothing", "a container's"],
)
def test_the_kernel_that_the_gate_saw(kernel: str | None, gvisor: bool, holds: bool) -> None:
    assert (k8s_proof.runtime(WHERE if gvisor else PLAIN, kernel) == ()) is holds
