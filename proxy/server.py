"""Owns what all connections of one proxy share: the policy of now, their number, the way to a target, the sweep.

Does not read requests, and does not decide: it carries values between those who do.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.client import UNWRITABLE, Client
from proxy.connection import Connection
from proxy.decision import Code, Deny, Target, decide_addresses, decide_name
from proxy.judgement import Judge
from proxy.poller import Listener, Poller
from proxy.resolver import Resolver

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from proxy.address import Address
    from proxy.interfaces import Interfaces
    from proxy.policy import ProxyPolicy
    from proxy.sink import Decisions

BACKLOG = 512
SWEEP_S = 0.5
MAX_TURNED_AWAY = 64
"""Connections over the cap that are told so; more than that are closed without a word."""

SPARE_DESCRIPTORS = 64
DESCRIPTORS_A_CONNECTION = 4
"""Client, target, and the two questions to a resolver."""


class Server:
    """One proxy. Everything happens on one loop."""

    def __init__(
        self,
        policy: ProxyPolicy,
        decisions: Decisions,
        interfaces: Interfaces,
        report: Callable[[BaseException], None],
    ) -> None:
        self.decisions = decisions
        self.report = report
        self.loop = asyncio.get_running_loop()
        self.now = time.monotonic
        self.via = b"rf-" + os.urandom(8).hex().encode("ascii")
        """This process's pseudonym in `Via`: random, so that it says nothing and nobody else has it."""
        self.draining = False
        self.interfaces = interfaces
        self.poller = Poller(self.loop, report)
        self.resolver = Resolver(self.poller)
        self._connections: set[Client] = set()
        self._turned_away: set[Client] = set()
        self._listeners: list[Listener] = []
        self._empty = asyncio.Event()
        self._descriptors = _raise_descriptors()
        self.replace(policy)

    def listen(self, sock: socket.socket) -> None:
        """Accept clients on a bound TCP socket."""
        sock.listen(BACKLOG)
        self._listeners.append(Listener(self.poller, sock, self._accepted))

    def _accepted(self, sock: socket.socket) -> None:
        Connection(self).connection_made(sock)

    def replace(self, policy: ProxyPolicy) -> None:
        """Make a newer generation the one that counts, and close what it allows no longer."""
        self.policy = policy
        self.judge = Judge(policy, self.via)
        self.decisions.configure(policy.run, policy.generation)
        self.resolver.configure(policy.resolvers)
        for connection in tuple(self._connections):
            connection.reconsider(policy)

    def admit(self, connection: Client) -> Deny | None:
        """Count a new connection in, or say why it is turned away."""
        cap = min(self.policy.connections, self._descriptors // DESCRIPTORS_A_CONNECTION)
        if not self.decisions.crowded and len(self._connections) < cap:
            self._connections.add(connection)
            self._empty.clear()
            return None
        if len(self._turned_away) >= MAX_TURNED_AWAY:
            connection.abort()
        self._turned_away.add(connection)
        if self.decisions.crowded:
            return UNWRITABLE
        return Deny(Code.TOO_MANY_CONNECTIONS, f"there are {cap} connections already, which is this sandbox's limit")

    def release(self, connection: Client) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._turned_away.discard(connection)
        if not self._connections:
            self._empty.set()

    def sweep(self) -> None:
        """Let every connection look at its deadline; to be called every `SWEEP_S`."""
        now = self.now()
        for connection in (*self._connections, *self._turned_away):
            connection.tick(now)

    def judge_open(self, policy: ProxyPolicy, target: Target, address: Address) -> Deny | None:
        """Judge a connection that exists already by another policy than the one that it was made by."""
        resolved = decide_name(policy, target)
        if isinstance(resolved, Deny):
            return resolved
        decided = decide_addresses(policy, resolved, [address], local=self.interfaces.addresses())
        return decided if isinstance(decided, Deny) else None

    async def drain(self, deadline_s: float) -> None:
        """Stop accepting, let what is running end until the deadline, then close it."""
        self.draining = True
        self.stop_accepting()
        for connection in tuple(self._connections):
            connection.retire()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), deadline_s)
        self.close()

    def stop_accepting(self) -> None:
        """Close the listener."""
        for listener in self._listeners:
            listener.close()

    def close(self) -> None:
        """Close everything now."""
        self.draining = True
        self.stop_accepting()
        for connection in (*self._connections, *self._turned_away):
            connection.abort()


def _raise_descriptors() -> int:
    """Raise the limit of descriptors as far as it goes, and say how many connections may use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(hard - SPARE_DESCRIPTORS, DESCRIPTORS_A_CONNECTION)
