"""Owns reading the manifests as plain data, and what of them a test puts in place of an operator's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
K3S: Final = ROOT / "deploy" / "k3s"
SANDBOX: Final = K3S / "sandbox"
ACCOUNT: Final = K3S / "daemon" / "account.yaml"
MANIFESTS: Final = (
    SANDBOX / "agent-sandbox.yaml",
    SANDBOX / "runtimeclass-gvisor.yaml",
    SANDBOX / "node-guard.yaml",
    ACCOUNT,
    K3S / "daemon" / "ringfenced.yaml",
)
DAEMON_IMAGE: Final = f"registry.example.com/ringfenced@sha256:{'0' * 64}"
GIT_SYNC_IMAGE: Final = f"registry.k8s.io/git-sync/git-sync@sha256:{'0' * 64}"
PROXY_IMAGE: Final = f"registry.example.com/ringfence-proxy@sha256:{'0' * 64}"
NAMESPACE: Final = "agent-sandbox"
DAEMON: Final = "system:serviceaccount:ringfence:ringfenced"

Plain = dict[str, Any]


def documents(path: Path) -> list[Plain]:
    """Read every document of a file."""
    return [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each is not None]


def found(kind: str, name: str) -> Plain:
    """Give the one object of this kind and name of all manifests."""
    (only,) = [
        each
        for path in MANIFESTS
        for each in documents(path)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return only


def pod_specs(document: Plain) -> Iterator[Plain]:
    """Give the pod that a workload describes."""
    if document["kind"] in {"Deployment", "DaemonSet"}:
        yield document["spec"]["template"]["spec"]


def containers(spec: Plain) -> list[Plain]:
    """Give every container of a pod, those that come first included."""
    return [*spec.get("initContainers", []), *spec["containers"]]


Right = tuple[str, str, str]
"""API group, resource (with its subresource), verb."""


def rights(kind: str, name: str) -> frozenset[Right]:
    """Give what a role allows, one by one."""
    return frozenset(
        (group, resource, verb)
        for rule in found(kind, name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )
