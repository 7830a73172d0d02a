"""Owns where the objects of one run are in a cluster: their names, their labels, the ports; decides nothing.

Pure. What the objects are made of is said elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from reconciler.backends.labels import AGENT, EXPIRES, OWNER, PREFIX, ROLE, RUN

CANARY_PORT = 3129
"""Where the proxy listens too, and where no policy lets anyone."""
START = f"{PREFIX}start"
"""Annotation of the agent's pod whose value lets the command start."""
GENERATION = f"{PREFIX}generation"
"""Annotation of the proxy's pod: changing it has the kubelet look at the pod's volumes at once."""
AGENT_ACCOUNT, PROXY_ACCOUNT = "agent", "proxy"
"""Service accounts without any right, whose tokens are mounted nowhere."""


class Role(StrEnum):
    """The part that a pod, a policy or a config map plays in a run."""

    AGENT = "agent"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """One run's place. `runtime_class`: the RuntimeClass of the agent's pod, None for the node's own runtime."""

    namespace: str
    run: str
    owner: str
    agent: str
    expires: int
    runtime_class: str | None
    proxy_image: str
    node: str | None = None
    """The node on which both pods must run; None lets the cluster choose."""
    secret: str = field(repr=False)
    """What the proxy wants to be shown: another pod could reach its port while a policy is late."""
    start: str = field(repr=False)
    """What the annotation says when the command may start."""

    @property
    def gvisor(self) -> bool:
        """Whether the agent's kernel is gVisor's."""
        return self.runtime_class is not None

    def name(self, what: str) -> str:
        """Name one object; names are lower-case in a cluster."""
        return f"ringfence-{self.run.lower()}-{what}"

    def labels(self, role: Role) -> dict[str, str]:
        """Give the labels of one object."""
        return {OWNER: self.owner, RUN: self.run, ROLE: role, AGENT: self.agent, EXPIRES: str(self.expires)}

    def selector(self, role: Role) -> dict[str, str]:
        """Give the labels by which policies select this run's pod, and no other run's."""
        return {RUN: self.run, ROLE: role}
