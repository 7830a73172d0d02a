"""Owns an egress proxy that is a container: its policies in, its lines out, its end; does not create it."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from reconciler.backends.base import Stream
from reconciler.backends.proxy_lines import ProxyLines

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer
    from reconciler.backends.docker_process import Streams

_END_S = 5.0
_KEPT_DIAGNOSTICS = 2000


@dataclass(frozen=True, slots=True)
class NoResolver:
    """Every resolver that the proxy was given is on the host's own loopback, where no container reaches it."""

    message: str


def reachable(
    policy: ProxyPolicy, *, upstreams: Sequence[tuple[str, int]], addresses: Sequence[str]
) -> ProxyPolicy | NoResolver:
    """Give the policy as a proxy in a container needs it.

    A stub on the host's loopback is replaced by the servers that it asks, and the host's own addresses, which a
    container cannot see, are told: the proxy refuses them.

    Args:
        policy: as the daemon made it.
        upstreams: resolvers that this host uses.
        addresses: every address of the host; zones are dropped.
    """
    resolvers = [where for where in policy.resolvers if not _is_loopback(where[0])]
    if len(resolvers) < len(policy.resolvers):
        resolvers += [where for where in upstreams if not _is_loopback(where[0])]
    if not resolvers:
        return NoResolver(
            "every resolver of this host is a stub on its loopback, which a container cannot reach: name the servers"
            " behind it in `resolvers` of host.yaml"
        )
    own = dict.fromkeys((*policy.local_addresses, *(address.partition("%")[0] for address in addresses)))
    return replace(policy, resolvers=tuple(dict.fromkeys(resolvers)), local_addresses=tuple(own))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class ProxyContainer:
    """One live proxy. Its streams are attached by `bind` before it starts."""

    def __init__(self, observer: Observer, adapt: Callable[[ProxyPolicy], ProxyPolicy | NoResolver]) -> None:
        self._lines = ProxyLines(observer)
        self._adapt = adapt
        self._streams: Streams | None = None
        self._diagnostics = b""
        self._settled = anyio.Event()
        self.ended = self._lines.ended

    @contextlib.contextmanager
    def coming_up(self) -> Iterator[None]:
        """At the end of this context it is known whether it listens."""
        try:
            yield
        finally:
            self._settled.set()

    async def settled(self) -> bool:
        """Wait until it is known whether it listens; True when it does."""
        await self._settled.wait()
        return self._lines.ready

    @property
    def diagnostics(self) -> str:
        """What it wrote to stderr, cut."""
        return self._diagnostics.decode("utf-8", "replace").strip()

    def output(self, stream: Stream, data: bytes) -> None:
        """Take in what it wrote. What does not keep to its contract may be anything: it loses its input."""
        if stream is Stream.STDERR:
            self._diagnostics = (self._diagnostics + data)[-_KEPT_DIAGNOSTICS:]
            return
        if not self._lines.feed(data):
            self._diagnostics = (self._diagnostics + b"unusable line on stdout\n")[-_KEPT_DIAGNOSTICS:]
            if self._streams is not None:
                self._streams.close_input()

    def bind(self, streams: Streams) -> Callable[[], Coroutine[None, None, None]]:
        """Know its streams; gives what notes their end, to be run beside everything else."""
        self._streams = streams

        async def watch() -> None:
            with anyio.CancelScope(shield=True):
                await streams.ended.wait()
            self._lines.end()

        return watch

    async def until_ready(self, limit: float) -> str | None:
        """Wait until it listens with its first policy; None when it does, else what is wrong."""
        if await self._lines.until_ready(limit):
            return None
        state = "ended" if self.ended.is_set() else f"did not become ready within {limit:g} s"
        return f"the proxy {state}: {self.diagnostics or 'it said nothing'}"

    async def send(self, policy: ProxyPolicy) -> bool:
        """Write a policy to its input, as a container needs it; False when it does not read any more."""
        adapted = self._adapt(policy)
        if isinstance(adapted, NoResolver) or self._streams is None:
            return False
        return await self._streams.write(adapted.to_json().encode("ascii") + b"\n")

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand over a newer generation; False when it is not acknowledged in time, or is not accepted."""
        return await self._lines.update(policy, self.send)

    async def end(self) -> None:
        """End its input, which closes everything, and take in its last lines."""
        if self._streams is not None:
            self._streams.close_input()
            with anyio.move_on_after(_END_S):
                await self.ended.wait()
