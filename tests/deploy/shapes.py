"""Owns pods, jobs and policies that the namespace of sandboxes takes, and one change of each that it must refuse."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

from tests.deploy.manifests import NAMESPACE

Plain = dict[str, Any]

LABELS: Final = {
    "ringfence.owner": "host-1",
    "ringfence.run": "run-1",
    "ringfence.agent": "helper",
    "ringfence.expires": "4102444800",
}
_HARDENED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_WEB: Final = {"10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}


def labels(role: str) -> dict[str, str]:
    """Give the labels of one role."""
    return {**LABELS, "ringfence.role": role}


def container(name: str, image: str, *command: str) -> Plain:
    """Give a container that `restricted` lets in."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": copy.deepcopy(_HARDENED),
    }


def _pod_spec(role: str, first: list[Plain], containers: list[Plain]) -> Plain:
    return {
        "serviceAccountName": role,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": first,
        "containers": containers,
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Mi"}}],
    }


def agent(name: str, image: str = "x.invalid/agent:test", *command: str) -> Plain:
    """Give an agent's pod; its gate ends at once."""
    spec = _pod_spec("agent", [container("gate", image, "true")], [container("agent", image, *(command or ("true",)))])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels("agent")},
        "spec": {
            **spec,
            "runtimeClassName": "gvisor",
            "activeDeadlineSeconds": 600,
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["127.0.0.1"]},
        },
    }


def proxy(name: str, image: str = "x.invalid/proxy:test", *command: str) -> Plain:
    """Give a proxy's pod."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels("proxy")},
        "spec": _pod_spec("proxy", [], [container("proxy", image, *(command or ("true",)))]),
    }


def job(name: str) -> Plain:
    """Give the job that is a run's anchor."""
    pod = proxy(name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pod["metadata"],
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,
            "activeDeadlineSeconds": 600,
            "ttlSecondsAfterFinished": 300,
            "template": {"metadata": {"labels": labels("proxy")}, "spec": pod["spec"]},
        },
    }


def _ours(role: str) -> Plain:
    return {"podSelector": {"matchLabels": {"ringfence.run": LABELS["ringfence.run"], "ringfence.role": role}}}


def agent_policy(name: str) -> Plain:
    """Give an agent's policy."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels("agent")},
        "spec": {
            **_ours("agent"),
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"to": [_ours("proxy")], "ports": [{"protocol": "TCP", "port": 3128}]}],
        },
    }


def proxy_policy(name: str) -> Plain:
    """Give a proxy's policy."""
    dns = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels("proxy")},
        "spec": {
            **_ours("proxy"),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [_ours("agent")], "ports": [{"protocol": "TCP", "port": 3128}]}],
            "egress": [
                {"to": [dns], "ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]},
                {"to": [{"ipBlock": {"cidr": "192.0.2.53/32"}}], "ports": [{"protocol": "UDP", "port": 53}]},
                {
                    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": sorted(_WEB)}}],
                    "ports": [{"protocol": "TCP", "port": 443}],
                },
            ],
        },
    }


def service(name: str) -> Plain:
    """Give a service that nothing outside reaches."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"type": "ClusterIP", "selector": {"a": "b"}, "ports": [{"port": 80}]},
    }


MAKERS: Final = {
    "agent": agent,
    "proxy": proxy,
    "job": job,
    "agent-policy": agent_policy,
    "proxy-policy": proxy_policy,
    "service": service,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A change of one shape (paths of keys, numbers for list items, to a value; None takes it away) and who says no."""

    title: str
    shape: str
    change: dict[str, object]
    says: str

    def object(self, name: str) -> Plain:
        """Give the changed object."""
        made: Plain = MAKERS[self.shape](name)
        for path, value in self.change.items():
            *parents, last = path.split("/")
            where: Any = made
            for key in parents:
                where = where[int(key)] if isinstance(where, list) else where[key]
            if value is None:
                del where[last]
            elif last == "+":
                where.append(value)
            else:
                where[int(last) if isinstance(where, list) else last] = value
        return made


_SIDECAR: Final = container("sidecar", "x.invalid/mesh:test", "true")
_SECRET_ENV: Final = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
_POD, _JOB, _NET, _SERVICE = (f"ringfence-sandbox-{each}" for each in ("pods", "jobs", "network", "services"))
POD_SECURITY: Final = "PodSecurity"

REFUSALS: Final = (
    *(
        Refusal(f"a pod without the label {label}", "agent", {f"metadata/labels/{label}": None}, _POD)
        for label in labels("agent")
    ),
    Refusal("a pod of another role", "agent", {"metadata/labels/ringfence.role": "gate"}, _POD),
    Refusal("an agent with the proxy's account", "agent", {"spec/serviceAccountName": "proxy"}, _POD),
    Refusal("a proxy with the agent's account", "proxy", {"spec/serviceAccountName": "agent"}, _POD),
    Refusal("a pod with the default account", "agent", {"spec/serviceAccountName": "default"}, _POD),
    Refusal("a pod that mounts its token", "agent", {"spec/automountServiceAccountToken": True}, _POD),
    Refusal("a pod that says nothing of its token", "proxy", {"spec/automountServiceAccountToken": None}, _POD),
    Refusal("the host's network", "agent", {"spec/hostNetwork": True}, POD_SECURITY),
    Refusal("the host's processes", "agent", {"spec/hostPID": True}, POD_SECURITY),
    Refusal("the host's IPC", "proxy", {"spec/hostIPC": True}, POD_SECURITY),
    Refusal("one process namespace under gVisor", "agent", {"spec/shareProcessNamespace": True}, _POD),
    Refusal("one process namespace of a proxy", "proxy", {"spec/shareProcessNamespace": True}, _POD),
    Refusal("a path of the host", "agent", {"spec/volumes/+": {"name": "h", "hostPath": {"path": "/"}}}, POD_SECURITY),
    Refusal("a secret as a volume", "agent", {"spec/volumes/+": {"name": "s", "secret": {"secretName": "s"}}}, _POD),
    Refusal(
        "a token as a volume",
        "agent",
        {"spec/volumes/+": {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}},
        _POD,
    ),
    Refusal(
        "a claim as a volume",
        "proxy",
        {"spec/volumes/+": {"name": "c", "persistentVolumeClaim": {"claimName": "c"}}},
        _POD,
    ),
    Refusal("a secret as a variable", "agent", {"spec/containers/0/env": _SECRET_ENV}, _POD),
    Refusal("a secret as a variable of the gate", "agent", {"spec/initContainers/0/env": _SECRET_ENV}, _POD),
    Refusal(
        "all of a secret as variables", "proxy", {"spec/containers/0/envFrom": [{"secretRef": {"name": "s"}}]}, _POD
    ),
    Refusal("a writable root", "agent", {"spec/containers/0/securityContext/readOnlyRootFilesystem": False}, _POD),
    Refusal(
        "a writable root of the gate",
        "agent",
        {"spec/initContainers/0/securityContext/readOnlyRootFilesystem": None},
        _POD,
    ),
    Refusal("a sidecar beside an agent", "agent", {"spec/containers/+": _SIDECAR}, _POD),
    Refusal("a sidecar beside a proxy", "proxy", {"spec/containers/+": _SIDECAR}, _POD),
    Refusal(
        "a sidecar that comes first", "agent", {"spec/initContainers/+": {**_SIDECAR, "restartPolicy": "Always"}}, _POD
    ),
    Refusal("a gate that goes on", "agent", {"spec/initContainers/0/restartPolicy": "Always"}, _POD),
    Refusal("an agent without a gate", "agent", {"spec/initContainers": []}, _POD),
    Refusal("a gate that is another", "agent", {"spec/initContainers/0/name": "setup"}, _POD),
    Refusal("a proxy with something first", "proxy", {"spec/initContainers/+": _SIDECAR}, _POD),
    Refusal("a pod that starts again", "agent", {"spec/restartPolicy": "OnFailure"}, _POD),
    Refusal("addresses of services", "agent", {"spec/enableServiceLinks": True}, _POD),
    Refusal("names of hosts", "agent", {"spec/hostAliases": [{"ip": "10.0.0.1", "hostnames": ["metadata"]}]}, _POD),
    Refusal("an agent without a deadline", "agent", {"spec/activeDeadlineSeconds": None}, _POD),
    Refusal("an agent that asks the cluster's DNS", "agent", {"spec/dnsPolicy": "ClusterFirst"}, _POD),
    Refusal("an agent with a name server", "agent", {"spec/dnsConfig/nameservers": ["10.96.0.10"]}, _POD),
    Refusal("an agent under the node's own runtime", "agent", {"spec/runtimeClassName": None}, _POD),
    Refusal("an agent of another runtime class", "agent", {"spec/runtimeClassName": "other"}, "other"),
    Refusal(
        "a privileged container",
        "agent",
        {
            "spec/containers/0/securityContext/privileged": True,
            "spec/containers/0/securityContext/allowPrivilegeEscalation": True,
        },
        POD_SECURITY,
    ),
    Refusal("a capability", "agent", {"spec/containers/0/securityContext/capabilities/add": ["NET_RAW"]}, POD_SECURITY),
    Refusal("root", "agent", {"spec/containers/0/securityContext/runAsUser": 0}, POD_SECURITY),
    Refusal(
        "a port of the host",
        "proxy",
        {"spec/containers/0/ports": [{"containerPort": 3128, "hostPort": 3128}]},
        POD_SECURITY,
    ),
    Refusal(
        "no filter of system calls",
        "agent",
        {"spec/containers/0/securityContext/seccompProfile/type": "Unconfined"},
        POD_SECURITY,
    ),
    Refusal("a job of two at a time", "job", {"spec/parallelism": 2}, _JOB),
    Refusal("a job that tries again", "job", {"spec/backoffLimit": 1}, _JOB),
    Refusal("a job without a deadline", "job", {"spec/activeDeadlineSeconds": None}, _JOB),
    Refusal("a job that stays", "job", {"spec/ttlSecondsAfterFinished": None}, _JOB),
    Refusal("a job that is suspended", "job", {"spec/suspend": True}, _JOB),
    Refusal(
        "a job whose pods have other labels", "job", {"spec/template/metadata/labels/ringfence.run": "other"}, _JOB
    ),
    Refusal("a policy for every pod", "agent-policy", {"spec/podSelector": {}}, _NET),
    Refusal("a policy for every agent", "agent-policy", {"spec/podSelector/matchLabels/ringfence.run": None}, _NET),
    Refusal("a policy of no run", "agent-policy", {"metadata/labels/ringfence.run": None}, _NET),
    Refusal("a policy for another run", "agent-policy", {"metadata/labels/ringfence.run": "other"}, _NET),
    Refusal("a policy of one way", "agent-policy", {"spec/policyTypes": ["Egress"]}, _NET),
    Refusal(
        "an agent that is reached",
        "agent-policy",
        {"spec/ingress": [{"from": [_ours("proxy")], "ports": [{"port": 80}]}]},
        _NET,
    ),
    Refusal("an agent that reaches everything", "agent-policy", {"spec/egress": [{}]}, _NET),
    Refusal("an agent that reaches every port", "agent-policy", {"spec/egress/0/ports": []}, _NET),
    Refusal("an agent that reaches another port", "agent-policy", {"spec/egress/0/ports/0/port": 3129}, _NET),
    Refusal("an agent that reaches a range of ports", "agent-policy", {"spec/egress/0/ports/0/endPort": 4000}, _NET),
    Refusal("an agent that reaches UDP", "agent-policy", {"spec/egress/0/ports/0/protocol": "UDP"}, _NET),
    Refusal(
        "an agent that reaches addresses",
        "agent-policy",
        {"spec/egress/0/to/+": {"ipBlock": {"cidr": "0.0.0.0/0"}}},
        _NET,
    ),
    Refusal(
        "an agent that reaches other namespaces", "agent-policy", {"spec/egress/0/to/0/namespaceSelector": {}}, _NET
    ),
    Refusal("an agent that reaches every pod", "agent-policy", {"spec/egress/0/to/0/podSelector": {}}, _NET),
    Refusal(
        "an agent that reaches another run's proxy",
        "agent-policy",
        {"spec/egress/0/to/0/podSelector/matchLabels/ringfence.run": "other"},
        _NET,
    ),
    Refusal("a proxy that everything reaches", "proxy-policy", {"spec/ingress": [{}]}, _NET),
    Refusal("a proxy that is reached elsewhere", "proxy-policy", {"spec/ingress/0/ports/0/port": 3129}, _NET),
    Refusal("a proxy that reaches everything", "proxy-policy", {"spec/egress/+": {}}, _NET),
    Refusal(
        "a proxy that reaches the metadata service",
        "proxy-policy",
        {"spec/egress/2/to/0/ipBlock/except": sorted(_WEB - {"169.254.0.0/16"})},
        _NET,
    ),
    Refusal(
        "a proxy that reaches the cluster",
        "proxy-policy",
        {"spec/egress/2/to/0/ipBlock/except": sorted(_WEB - {"10.0.0.0/8"})},
        _NET,
    ),
    Refusal(
        "a proxy that reaches half of all addresses",
        "proxy-policy",
        {"spec/egress/2/to/0/ipBlock": {"cidr": "128.0.0.0/1"}},
        _NET,
    ),
    Refusal("a proxy that reaches all IPv6", "proxy-policy", {"spec/egress/2/to/0/ipBlock": {"cidr": "::/0"}}, _NET),
    Refusal(
        "a proxy that reaches other namespaces", "proxy-policy", {"spec/egress/0/to/0/namespaceSelector": {}}, _NET
    ),
    Refusal("a port of every node", "service", {"spec/type": "NodePort"}, _SERVICE),
    Refusal("a load balancer", "service", {"spec/type": "LoadBalancer"}, _SERVICE),
    Refusal("another name", "service", {"spec": {"type": "ExternalName", "externalName": "example.com"}}, _SERVICE),
    Refusal("addresses from outside", "service", {"spec/externalIPs": ["203.0.113.5"]}, _SERVICE),
)
"""What must be refused, and by whom: the name of the admission policy, or what Kubernetes' own check is called."""
