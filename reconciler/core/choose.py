"""Owns which backend a run gets; knows probe results as values and never asks a backend anything itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Isolation(StrEnum):
    """How far a sandbox is from the host's kernel, weakest first."""

    NAMESPACE = "namespace"
    CONTAINER = "container"
    GVISOR = "gvisor"
    MICROVM = "microvm"


class BackendName(StrEnum):
    """The backends, in the order that breaks ties between equal isolations."""

    K8S = "k8s"
    FIRECRACKER = "firecracker"
    DOCKER = "docker"
    BUBBLEWRAP = "bubblewrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """A backend whose canary run succeeded on this host: what it isolates with, and the evidence for it."""

    backend: BackendName
    isolation: Isolation
    versions: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A backend that this host does not have: `code` for machines, `message` says what to install or set."""

    backend: BackendName
    code: str
    message: str


Probe = Available | Missing
