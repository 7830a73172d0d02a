"""Owns an egress proxy that is a pod: its policies in by a config map, its lines out by its log; does not create it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from reconciler.backends import k8s_objects, k8s_pods
from reconciler.backends.k8s_client import ClusterError, Kind
from reconciler.backends.k8s_place import CANARY_PORT, Role
from reconciler.backends.proxy_lines import ProxyLines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer
    from reconciler.backends.k8s_client import Cluster
    from reconciler.backends.k8s_objects import Plain
    from reconciler.backends.k8s_place import Where

_END_S = 8.0
_SAID = 2000


def in_cluster(
    policy: ProxyPolicy, *, where: Where, resolvers: Sequence[tuple[str, int]], addresses: Sequence[str]
) -> ProxyPolicy:
    """Give the policy as a proxy in a pod needs it.

    Args:
        policy: as the daemon made it; its resolvers are this host's, and a pod has others.
        where: the run's place.
        resolvers: the servers that the settings name; none means the pod's own.
        addresses: addresses of the nodes and of the API server, which the proxy must refuse.
    """
    return replace(
        policy,
        resolvers=tuple(resolvers),
        local_addresses=tuple(dict.fromkeys((*policy.local_addresses, *addresses))),
        canary=CANARY_PORT,
        client_secret=where.secret,
    )


class ProxyPod:
    """One live proxy. `policy` is what its network policy was made from; it changes where a list needs a new port."""

    def __init__(
        self,
        cluster: Cluster,
        where: Where,
        observer: Observer,
        *,
        adapt: Callable[[ProxyPolicy], ProxyPolicy],
        allowed: Callable[[ProxyPolicy], Plain],
        policies: dict[Role, Plain],
    ) -> None:
        self._cluster, self._where = cluster, where
        self._lines = ProxyLines(observer)
        self._adapt, self._allowed, self._policies = adapt, allowed, policies
        self._unusable = False
        self._said = b""
        self._pod: str | None = None
        self.ended = self._lines.ended

    @property
    def arrivals(self) -> tuple[str, ...]:
        """Who reached its canary."""
        return tuple(self._lines.canary_arrivals)

    @property
    def resolvers(self) -> tuple[tuple[str, int], ...]:
        """The DNS servers that it asks."""
        return self._lines.resolvers

    def take(self, data: bytes) -> None:
        """Take in what it wrote. What does not keep to its contract may be anything: it is stopped."""
        self._said = (self._said + data)[-_SAID:]
        if not self._lines.feed(data):
            self._unusable = True
            self._lines.end()

    async def listen(self, pod: str) -> None:
        """Hear its log until its end; runs beside everything else."""
        self._pod = pod
        await k8s_pods.hear(self._cluster, pod, Role.PROXY, self.take)
        self._lines.end()

    async def until_ready(self, limit: float) -> str | None:
        """Wait until it listens with its first policy; None when it does, else what is wrong."""
        if await self._lines.until_ready(limit):
            return None
        state = "ended" if self.ended.is_set() else f"did not become ready within {limit:g} s"
        return f"the proxy {state}: {self._said.decode('utf-8', 'replace').strip() or 'it said nothing'}"

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand over a newer generation; False when it is not acknowledged in time, or is not accepted."""
        return not self._unusable and await self._lines.update(policy, self._send)

    async def _send(self, policy: ProxyPolicy) -> bool:
        """Open the ports that it needs, replace its file, and have the kubelet look."""
        if self._pod is None:
            return False
        adapted = self._adapt(policy)
        allowed = self._allowed(policy)
        name = self._where.name("proxy")
        data = {k8s_objects.POLICY_FILE: adapted.to_json()}
        try:
            if allowed["spec"] != self._policies[Role.PROXY]["spec"]:
                await self._cluster.patch(Kind.POLICY, name, {"spec": allowed["spec"]})
                self._policies[Role.PROXY] = allowed
            await self._cluster.patch(Kind.CONFIG_MAP, self._where.name("policy"), {"data": data})
            await self._cluster.patch(Kind.POD, self._pod, k8s_objects.generation_patch(policy.generation))
        except ClusterError:
            return False
        return True

    async def end(self) -> None:
        """Have it drain and end, and take in its last lines."""
        if self._pod is None or self.ended.is_set():
            return
        try:
            await self._cluster.delete(Kind.POD, self._pod)
        except ClusterError:
            # The teardown asks again; what it did not tell by now shows as a gap.
            return
        with anyio.move_on_after(_END_S):
            await self.ended.wait()
