"""Owns the frozen values of policy, and what is effective for one agent; does not read, compare or hold documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.entry import Entry
from reconciler.core.choose import BackendName, Isolation


class BackendChoice(StrEnum):
    """What a platform document may say of the backend: one by name, or the strongest."""

    AUTO = "auto"
    K8S = BackendName.K8S
    FIRECRACKER = BackendName.FIRECRACKER
    DOCKER = BackendName.DOCKER
    BUBBLEWRAP = BackendName.BUBBLEWRAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one run. Units: cores, bytes, processes, seconds, bytes, connections."""

    cpus: float
    memory: int
    pids: int
    timeout: int
    output: int
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The one platform document."""

    enabled: bool
    backend: BackendChoice
    require_runtime_class: bool
    max_parallel_runs: int
    tolerate_icmp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One egress document as it applies to one agent; `name` is the document's, such as `org`."""

    name: str
    default_allow: bool
    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    deny_ranges: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One agent's own document. `secrets` maps a variable to the host file that holds its value."""

    name: str
    description: str
    image: str
    minimum_isolation: Isolation
    user: int
    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    submitters: tuple[str, ...]
    env_allow: tuple[str, ...]
    secrets: Mapping[str, str] = field(default_factory=dict)
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """What is in force for one agent: its own lists, the organisation's layers over it, and what is held."""

    agent: Agent
    layers: tuple[Layer, ...]
    blocked: tuple[str, ...] = ()
    """JSON pointers of fields that have no value in force until a signed reason names one: the agent does not launch."""
    reasons: tuple[str, ...] = ()
    """Ids of the signed reasons that something in force depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """Everything in force on this host after one pass."""

    revision: str
    generation: int
    platform: Platform
    agents: Mapping[str, Effective]
