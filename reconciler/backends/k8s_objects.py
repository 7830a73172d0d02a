"""Owns what one run is made of in a cluster, as the plain data that its API takes; creates nothing.

Pure. What must be seen of it afterwards is judged elsewhere, from the same data.
"""

from __future__ import annotations

import base64
import ipaddress
from typing import TYPE_CHECKING, Any

from proxy.address import NON_PUBLIC_IPV4
from proxy.entry import WEB_PORTS
from reconciler.backends.k8s_place import (
    AGENT_ACCOUNT,
    GENERATION,
    PROXY_ACCOUNT,
    START,
    Role,
)
from reconciler.backends.nft import PROXY_PORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Launch
    from reconciler.backends.k8s_place import Where

Plain = dict[str, Any]

WORKING_DIRECTORY = "/job"
PROXY_PROGRAM, GATE_PROGRAM = "/usr/bin/ringfence-proxy", "/usr/bin/ringfence-gate"
PROXY_USER = 65532
"""The image's own unprivileged user."""
POLICY_FILE, GATE_FILE, START_FILE = "policy.json", "gate.json", "start"
POLICY_FOLDER, GATE_FOLDER, START_FOLDER = "/ringfence/policy", "/ringfence/gate", "/ringfence/start"
GRACE_S = 5
"""How long a stopped command has between SIGTERM and SIGKILL."""
_PROXY_GRACE_S = 8
"""The proxy drains for five seconds, and then tells what it decided."""
_DNS_PORT = 53
_DNS_PODS = {"k8s-app": "kube-dns"}
_DNS_NAMESPACE = {"kubernetes.io/metadata.name": "kube-system"}
_NO_MESH = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
"""What tells the meshes that add containers to leave a pod alone."""
_GVISOR_MEMORY = 64 * 1024 * 1024
"""What gVisor itself takes of the limit."""
_PROXY_MEMORY = 256 * 1024 * 1024
_MOST_DISK, _LEAST_DISK = "256Mi", "0"
"""Nothing inside can write a disk: what is on one are the logs, which the kubelet turns over, so none is reserved."""
_HARDENED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def anchor(where: Where, *, lasts: int, lingers: int) -> Plain:
    """Give the Job that is the proxy, and that owns everything else: at its end the cluster removes all of it.

    Args:
        where: the run's place.
        lasts: seconds after which the cluster ends it, whoever is still there to ask for that.
        lingers: seconds after its end at which the cluster removes it and everything that it owns.
    """
    labels = where.labels(Role.PROXY)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": where.name("proxy"), "namespace": where.namespace, "labels": labels},
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,
            "activeDeadlineSeconds": lasts,
            "ttlSecondsAfterFinished": lingers,
            "suspend": False,
            "template": {
                "metadata": {"labels": {**labels, **_NO_MESH}, "annotations": dict(_NO_MESH)},
                "spec": proxy_pod_spec(where),
            },
        },
    }


def proxy_pod_spec(where: Where) -> Plain:
    """Give the proxy's pod: it reads its policy from a file, and its decisions are its log."""
    container = {
        "name": Role.PROXY,
        "image": where.proxy_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [PROXY_PROGRAM],
        "args": [
            "--listen",
            f"$(POD_IP):{PROXY_PORT}",
            "--policy",
            f"{POLICY_FOLDER}/{POLICY_FILE}",
            "--resolv-conf",
            "/etc/resolv.conf",
        ],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}],
        "resources": {
            "limits": {"cpu": "1", "memory": str(_PROXY_MEMORY), "ephemeral-storage": _MOST_DISK},
            "requests": {"cpu": "50m", "memory": str(64 * 1024 * 1024), "ephemeral-storage": _LEAST_DISK},
        },
        "securityContext": _security(PROXY_USER),
        "volumeMounts": [{"name": "policy", "mountPath": POLICY_FOLDER, "readOnly": True}],
    }
    return {
        **_pod_spec(where, account=PROXY_ACCOUNT, grace=_PROXY_GRACE_S, user=PROXY_USER),
        "dnsPolicy": "ClusterFirst",
        "containers": [container],
        "volumes": [_config_volume("policy", where.name("policy"), ((POLICY_FILE, POLICY_FILE),))],
    }


def agent_pod(where: Where, launch: Launch, *, owner: Plain, proxy: str, lasts: int) -> Plain:
    """Give the agent's pod: the gate from our own image in the same place first, then the command.

    Args:
        where: the run's place.
        launch: the run.
        owner: a reference to the anchor.
        proxy: the address of the proxy's pod.
        lasts: seconds after which the kubelet ends it.
    """
    bounds = _bounds(where, launch)
    gate = {
        "name": "gate",
        "image": where.proxy_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [GATE_PROGRAM, f"{GATE_FOLDER}/{GATE_FILE}"],
        "resources": bounds,
        "securityContext": _security(launch.user),
        "volumeMounts": [
            {"name": "gate", "mountPath": GATE_FOLDER, "readOnly": True},
            {"name": "start", "mountPath": START_FOLDER, "readOnly": True},
        ],
    }
    agent = {
        "name": Role.AGENT,
        "image": launch.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [literal(word) for word in launch.command],
        "env": [
            {"name": name, "value": literal(value)}
            for name, value in environment(where, proxy, launch.environment).items()
        ],
        "workingDir": WORKING_DIRECTORY,
        "resources": bounds,
        "securityContext": _security(launch.user),
        "volumeMounts": [
            {"name": "job", "mountPath": WORKING_DIRECTORY, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the sandbox's own
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - as above
        ],
    }
    start = {"path": START_FILE, "fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{START}']"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_metadata(where, Role.AGENT, where.name("agent"), owner),
            "labels": {**where.labels(Role.AGENT), **_NO_MESH},
            "annotations": dict(_NO_MESH),
        },
        "spec": {
            **_pod_spec(where, account=AGENT_ACCOUNT, grace=GRACE_S, user=launch.user),
            **({"runtimeClassName": where.runtime_class} if where.runtime_class else {}),
            # The runtime's own process is the first one then: a command that is the first ignores signals (runc).
            **({} if where.gvisor else {"shareProcessNamespace": True}),
            "activeDeadlineSeconds": lasts,
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["127.0.0.1"]},
            "hostname": "sandbox",
            "initContainers": [gate],
            "containers": [agent],
            "volumes": [
                _config_volume("gate", where.name("gate"), ((GATE_FILE, GATE_FILE),)),
                {"name": "start", "downwardAPI": {"defaultMode": 0o444, "items": [start]}},
                _config_volume("job", where.name("job"), _input_items(launch.input)),
                # Both are of the sandbox's memory: together they leave it some.
                _in_memory("tmp", launch.limits.memory // 2),
                _in_memory("shm", launch.limits.memory // 4),
            ],
        },
    }


def literal(text: str) -> str:
    """Give a text that a cluster does not expand: it takes `$(NAME)` in commands and values for a reference."""
    return text.replace("$", "$$")


def environment(where: Where, proxy: str, given: Mapping[str, str]) -> dict[str, str]:
    """Give what the agent gets over its image's environment: what finds the proxy, over the job's, over defaults."""
    url = f"http://run:{where.secret}@{proxy}:{PROXY_PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own
        **given,
        **{variant: url for name in names for variant in (name, name.lower())},
        "NO_PROXY": "",
        "no_proxy": "",
        "NODE_USE_ENV_PROXY": "1",
    }


def agent_policy(where: Where, owner: Plain) -> Plain:
    """Give the agent's policy: nothing in; out only to this run's proxy, at its one port. No DNS."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(where, Role.AGENT, where.name("agent"), owner),
        "spec": {
            "podSelector": {"matchLabels": where.selector(Role.AGENT)},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [
                {
                    "to": [{"podSelector": {"matchLabels": where.selector(Role.PROXY)}}],
                    "ports": [{"protocol": "TCP", "port": PROXY_PORT}],
                }
            ],
        },
    }


def proxy_policy(
    where: Where, owner: Plain, *, resolvers: Sequence[tuple[str, int]], forbidden: Iterable[str], ports: Iterable[int]
) -> Plain:
    """Give the proxy's policy: in only from this run's agent; out to DNS, and to public addresses at these ports.

    Args:
        where: the run's place.
        owner: a reference to the anchor.
        resolvers: the DNS servers that the settings name; none means the cluster's own.
        forbidden: addresses of nodes and of the API server, which may be public ones.
        ports: what the lists need.
    """
    dns_ports = [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]
    dns = [
        {
            "to": [
                {
                    "namespaceSelector": {"matchLabels": dict(_DNS_NAMESPACE)},
                    "podSelector": {"matchLabels": dict(_DNS_PODS)},
                }
            ],
            "ports": dns_ports,
        }
    ]
    if resolvers:
        dns = [
            {
                "to": [{"ipBlock": {"cidr": f"{address}/{ipaddress.ip_address(address).max_prefixlen}"}}],
                "ports": [{"protocol": protocol, "port": port} for protocol in ("UDP", "TCP")],
            }
            for address, port in resolvers
        ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(where, Role.PROXY, where.name("proxy"), owner),
        "spec": {
            "podSelector": {"matchLabels": where.selector(Role.PROXY)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": where.selector(Role.AGENT)}}],
                    "ports": [{"protocol": "TCP", "port": PROXY_PORT}],
                }
            ],
            "egress": [
                *dns,
                {
                    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": except_ranges(forbidden)}}],
                    "ports": [{"protocol": "TCP", "port": port} for port in sorted(set(ports))],
                },
            ],
        },
    }


def except_ranges(forbidden: Iterable[str]) -> list[str]:
    """Give the ranges that are never dialled, and each of these addresses that none of them holds; IPv4 alone."""
    known = [ipaddress.IPv4Network(text) for text in NON_PUBLIC_IPV4]
    addresses = {ipaddress.ip_address(text) for text in forbidden}
    own = sorted(
        address
        for address in addresses
        if isinstance(address, ipaddress.IPv4Address) and not any(address in network for network in known)
    )
    return [*NON_PUBLIC_IPV4, *(f"{address}/32" for address in own)]


def ports(policy: ProxyPolicy) -> tuple[int, ...]:
    """Give the ports at which the sandbox's own list lets anything be reached; the layers can only narrow that."""
    found = {entry.port for entry in policy.allow if entry.port is not None}
    return tuple(sorted(found | WEB_PORTS))


def policy_map(where: Where, owner: Plain, policy: ProxyPolicy) -> Plain:
    """Give the config map that only the proxy mounts. It holds the proof key."""
    return _config_map(where, Role.PROXY, "policy", owner, {"data": {POLICY_FILE: policy.to_json()}})


def gate_map(where: Where, owner: Plain, question: str) -> Plain:
    """Give the config map of what the gate is asked, as JSON."""
    return _config_map(where, Role.AGENT, "gate", owner, {"data": {GATE_FILE: question}})


def job_map(where: Where, owner: Plain, files: Mapping[str, bytes]) -> Plain:
    """Give the config map of the job's files."""
    data = {_key(at): base64.b64encode(files[name]).decode("ascii") for at, name in enumerate(sorted(files))}
    return _config_map(where, Role.AGENT, "job", owner, {"binaryData": data} if data else {})


def owner_reference(where: Where, uid: str) -> Plain:
    """Give the reference to the anchor that everything else carries."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": where.name("proxy"), "uid": uid}


def generation_patch(generation: int) -> Plain:
    """Give the change to the proxy's pod that has its volumes looked at."""
    return {"metadata": {"annotations": {GENERATION: str(generation)}}}


def start_patch(where: Where) -> Plain:
    """Give the change to the agent's pod that lets the command start."""
    return {"metadata": {"annotations": {START: where.start}}}


def _input_items(files: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    return tuple((_key(at), name) for at, name in enumerate(sorted(files)))


def _key(at: int) -> str:
    """Name a file in its config map: the map's own names may not hold what a path may."""
    return f"f{at}"


def _config_map(where: Where, role: Role, what: str, owner: Plain, data: Plain) -> Plain:
    metadata = _metadata(where, role, where.name(what), owner)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **data}


def _config_volume(name: str, source: str, items: Iterable[tuple[str, str]]) -> Plain:
    listed = [{"key": key, "path": path} for key, path in items]
    return {"name": name, "configMap": {"name": source, "defaultMode": 0o444, **({"items": listed} if listed else {})}}


def _in_memory(name: str, size: int) -> Plain:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}


def _metadata(where: Where, role: Role, name: str, owner: Plain) -> Plain:
    return {
        "name": name,
        "namespace": where.namespace,
        "labels": where.labels(role),
        "ownerReferences": [owner],
    }


def _security(user: int) -> Plain:
    return {**_HARDENED, "runAsUser": user, "runAsGroup": user}


def _bounds(where: Where, launch: Launch) -> Plain:
    """Give limits of memory and cores that are requests too: what was promised is there, and nothing beyond it."""
    memory = launch.limits.memory + (_GVISOR_MEMORY if where.gvisor else 0)
    bounds = {"cpu": f"{max(1, round(launch.limits.cpus * 1000))}m", "memory": str(memory)}
    return {
        "limits": {**bounds, "ephemeral-storage": _MOST_DISK},
        "requests": {**bounds, "ephemeral-storage": _LEAST_DISK},
    }


def _pod_spec(where: Where, *, account: str, grace: int, user: int) -> Plain:
    """Give what both pods have in common; every choice that a cluster would make by itself is made here."""
    return {
        "restartPolicy": "Never",
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace,
        **({"nodeSelector": {"kubernetes.io/hostname": where.node}} if where.node else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
