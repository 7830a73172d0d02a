"""Owns the settings of this host, read once from host.yaml; decides nothing that a policy document decides."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconciler.core.load import Bounds, Problem, load
from reconciler.core.resolve import resolve
from reconciler.core.schema import load_schema
from reconciler.directory import Unsafe, open_file

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PATH = Path("/etc/ringfence/host.yaml")
PATH_VARIABLE = "RINGFENCE_HOST_CONFIG"
"""The environment variable that names another; unset and empty are the same."""
_BOUNDS = Bounds(bytes=64 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """What the docker backend uses of this host. schema/host.v1.json describes each field."""

    socket: Path = Path("/run/docker.sock")
    proxy_image: str | None = None
    pool: str = "10.202.0.0/16"
    gvisor_runtime: str | None = "runsc"


@dataclass(frozen=True, slots=True, kw_only=True)
class K8sSettings:
    """What the k8s backend uses. schema/host.v1.json describes each field."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str = "agent-sandbox"
    proxy_image: str | None = None
    runtime_class: str | None = "gvisor"
    linger: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How much may wait in the spool, and how much of what was is kept. schema/host.v1.json describes each field."""

    quota: int = 100
    depth: int = 1000
    age: int = 30 * 86400
    results: int = 1000
    bytes: int = 256 * 2**20
    audit_file: int = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Settings of one host. Durations in seconds, sizes in bytes. schema/host.v1.json describes each field."""

    name: str
    policy: Path
    trust: Path
    state: Path
    spool: Path
    runtime: Path
    policy_owner: str
    proxy_user: str
    resolvers: tuple[str, ...]
    nat64_prefixes: tuple[str, ...]
    required_egress: tuple[str, ...]
    ticket_pattern: str
    max_age: int | None
    uid_first: int
    uid_count: int
    scan_interval: float
    stop_timeout: float
    python: str
    max_files: int
    max_bytes: int
    docker: DockerSettings = field(default_factory=DockerSettings)
    k8s: K8sSettings = field(default_factory=K8sSettings)
    keep: Keep = field(default_factory=Keep)

    @property
    def status(self) -> Path:
        """Where the daemon publishes what it does."""
        return self.runtime / "status.json"

    @property
    def audit(self) -> Path:
        """The directory of the audit log."""
        return self.state / "audit"


def load_host(path: Path) -> Host | tuple[Problem, ...]:
    """Read and check `path`; every setting that is unknown or unusable is a problem."""
    # Whoever can write these settings names the trust directory, and so decides who may loosen policy.
    descriptor = open_file(path, frozenset({0, os.geteuid()}))
    if isinstance(descriptor, Unsafe):
        advice = "see examples/host.yaml, or name another with --host-config"
        return (Problem(str(path), 1, 1, "", f"cannot be used: {descriptor.message} ({advice})"),)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_BOUNDS.bytes + 1)
    return parse_host(str(path), data)


def parse_host(name: str, data: bytes) -> Host | tuple[Problem, ...]:
    """Check the bytes of a host.yaml; `name` is what problems call the file."""
    document = load(name, data, bounds=_BOUNDS)
    if isinstance(document, tuple):
        return document
    resolved = resolve(document, load_schema("host"))
    if isinstance(resolved, tuple):
        return resolved
    value = resolved.value
    return Host(
        name=value["name"],
        policy=Path(value["policy"]),
        trust=Path(value["trust"]),
        state=Path(value["state"]),
        spool=Path(value["spool"]),
        runtime=Path(value["runtime"]),
        policy_owner=value["policy_owner"],
        proxy_user=value["proxy_user"],
        resolvers=tuple(value["resolvers"]),
        nat64_prefixes=tuple(value["nat64_prefixes"]),
        required_egress=tuple(value["required_egress"]),
        ticket_pattern=value["ticket_pattern"],
        max_age=value["max_age"],
        uid_first=value["uid_first"],
        uid_count=value["uid_count"],
        scan_interval=value["scan_interval"],
        stop_timeout=value["stop_timeout"],
        python=value["python"],
        max_files=value["max_files"],
        max_bytes=value["max_bytes"],
        docker=_docker(value["docker"]),
        keep=Keep(**value["keep"]),
        k8s=_k8s(value["k8s"]),
    )


def _docker(value: Mapping[str, Any]) -> DockerSettings:
    return DockerSettings(
        socket=Path(value["socket"]),
        proxy_image=value["proxy_image"],
        pool=value["pool"],
        gvisor_runtime=value["gvisor_runtime"],
    )


def _k8s(value: Mapping[str, Any]) -> K8sSettings:
    return K8sSettings(
        kubeconfig=None if value["kubeconfig"] is None else Path(value["kubeconfig"]),
        context=value["context"],
        namespace=value["namespace"],
        proxy_image=value["proxy_image"],
        runtime_class=value["runtime_class"],
        linger=int(value["linger"]),
    )
