"""Owns the frozen values of policy, and what is effective for one agent; does not read, compare or hold documents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.entry import Entry, parse_deny
from proxy.policy import ProxyLayer, ProxyPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.load import Tree


HOST_IMAGE = "host"
"""The image that is the host's own /usr; only bubblewrap runs it, and it runs no other."""


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
    """JSON pointers of fields without a value in force until a signed reason names one: the agent does not launch."""
    reasons: tuple[str, ...] = ()
    """Ids of the signed reasons that something in force depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """Everything in force on this host after one pass."""

    revision: str
    generation: int
    platform: Platform
    agents: Mapping[str, Effective]
    to_come: tuple[Layer, ...] = ()
    """The layers of agents that no document names yet."""
    enabling_held: bool = False
    """Whether the platform document switches sandboxes on, and that waits for a signed reason."""


def in_force(
    tree: Tree,
    last: Mapping[str, Tree],
    *,
    revision: str,
    generation: int,
    previous: tuple[Tree, InForce] | None = None,
) -> InForce:
    """Give the frozen values of the tree that `reconcile` answers. KeyError or ValueError: no such tree.

    `last` is what documents say, as the memory of that answer has it: it decides nothing, and is told.
    `previous` is an earlier tree with what it gave: agents whose part of the tree is the same object are taken over.
    """
    known = {} if previous is None else previous[0]["agents"]
    # Agents share their layers: each content is read once. The tree keeps what the identities stand for alive.
    layers: dict[tuple[str, int], Layer] = {}
    agents = {}

    def applied(contents: Mapping[str, Tree]) -> tuple[Layer, ...]:
        for layer, content in contents.items():
            if (layer, id(content)) not in layers:
                layers[layer, id(content)] = _layer(layer, content)
        return tuple(layers[layer, id(content)] for layer, content in sorted(contents.items()))

    for name, value in tree["agents"].items():
        if previous is not None and known.get(name) is value:
            agents[name] = previous[1].agents[name]
            continue
        agents[name] = Effective(
            agent=_agent(value["own"]),
            layers=applied(value["layers"]),
            blocked=tuple(value["blocked"]),
            reasons=tuple(value["reasons"]),
        )
    return InForce(
        revision=revision,
        generation=generation,
        platform=_platform(tree["platform"]),
        agents=agents,
        to_come=applied(tree.get("to_come", {"layers": {}})["layers"]),
        enabling_held=not tree["platform"]["enabled"] and last.get("platform", {}).get("enabled") is True,
    )


def asked_for(effective: Effective, last: Mapping[str, Tree]) -> Effective:
    """Give an agent with its lists and layers as `last`, what documents say, has them: held or not. Decides nothing."""
    own = last.get(f"agents/{effective.agent.name}")
    agent = effective.agent
    if own is not None:
        agent = replace(agent, allow=_entries(own["allow"]), deny=_entries(own["deny"]))
    layers = tuple(
        _layer(one.name, last[f"egress/{one.name}"]) if f"egress/{one.name}" in last else one
        for one in effective.layers
    )
    return replace(effective, agent=agent, layers=layers)


def proxy_policy(
    effective: Effective,
    *,
    run: str,
    generation: int,
    revision: str,
    resolvers: tuple[tuple[str, int], ...],
    proof_key: bytes,
    expires_at: float,
    local_addresses: tuple[str, ...] = (),
    nat64_prefixes: tuple[str, ...] = (),
    canary: int | None = None,
    client_secret: str | None = None,
) -> ProxyPolicy:
    """Give the policy of the proxy of one run. `expires_at` is Unix seconds; see ProxyPolicy for the rest."""
    agent = effective.agent
    return ProxyPolicy(
        run=run,
        generation=generation,
        revision=revision,
        allow=agent.allow,
        deny=agent.deny,
        layers=tuple(
            ProxyLayer(
                name=f"egress/{layer.name}",
                default_allow=layer.default_allow,
                allow=layer.allow,
                deny=layer.deny,
                deny_ranges=layer.deny_ranges,
            )
            for layer in effective.layers
        ),
        resolvers=resolvers,
        local_addresses=local_addresses,
        nat64_prefixes=nat64_prefixes,
        connections=agent.limits.connections,
        canary=canary,
        proof_key=proof_key,
        client_secret=client_secret,
        expires_at=expires_at,
    )


def _platform(tree: Tree) -> Platform:
    return Platform(
        enabled=tree["enabled"],
        backend=BackendChoice(tree["backend"]),
        require_runtime_class=tree["require_runtime_class"],
        max_parallel_runs=tree["max_parallel_runs"],
        tolerate_icmp=tree["k8s"]["tolerate_icmp"],
    )


def _agent(tree: Tree) -> Agent:
    # A secret whose file has no value in force is left out here; `blocked` keeps the agent from launching without it.
    secrets = {name: secret["file"] for name, secret in tree["secrets"].items() if secret["file"] is not None}
    return Agent(
        name=tree["name"],
        description=tree["description"],
        image=tree["image"],
        minimum_isolation=Isolation(tree["minimum_isolation"]),
        user=tree["user"],
        allow=_entries(tree["allow"]),
        deny=_entries(tree["deny"]),
        submitters=tuple(tree["submitters"]),
        env_allow=tuple(tree["env"]["allow"]),
        secrets=secrets,
        limits=_limits(tree["limits"]),
    )


def _limits(tree: Tree) -> Limits:
    return Limits(
        cpus=tree["cpus"],
        memory=tree["memory"],
        pids=tree["pids"],
        timeout=tree["timeout"],
        output=tree["output"],
        connections=tree["connections"],
    )


def _layer(name: str, tree: Tree) -> Layer:
    return Layer(
        name=name,
        default_allow=tree["default"] == "allow",
        allow=_entries(tree["allow"]),
        deny=_entries(tree["deny"]),
        deny_ranges=tuple(tree["deny_ranges"]),
    )


def _entries(texts: list[str]) -> tuple[Entry, ...]:
    found = tuple(parse_deny(text) for text in texts)
    entries = tuple(entry for entry in found if isinstance(entry, Entry))
    if len(entries) != len(found):
        raise ValueError(f"{texts} in force are not all entries")
    return entries
