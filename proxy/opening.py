"""Owns the way from an allowed name to a connected socket: a lookup, the decision on its addresses, a dial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.decision import Code, Deny, decide_addresses, decide_name
from proxy.dial import CONNECT_DEADLINE_S, Connected, Dialling
from proxy.dns_message import Failure
from proxy.resolver import TOTAL_DEADLINE_S

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from proxy.address import Address
    from proxy.judgement import Open
    from proxy.policy import ProxyPolicy
    from proxy.resolver import Found, Lookup
    from proxy.server import Server

_FAILURES = {
    Failure.NXDOMAIN: (Code.DNS_NXDOMAIN, "does not exist"),
    Failure.SERVFAIL: (Code.DNS_SERVFAIL, "could not be looked up: no resolver answers for it"),
    Failure.EMPTY: (Code.DNS_EMPTY, "has no address"),
    Failure.MALFORMED: (Code.DNS_MALFORMED, "has an answer that is not acceptable"),
    Failure.TIMEOUT: (Code.DNS_TIMEOUT, f"could not be looked up within {TOTAL_DEADLINE_S:g} s"),
}


@dataclass(frozen=True, slots=True)
class Reached:
    """A connected socket, the address at its other end, and the policy by which it was dialled."""

    sock: socket.socket
    address: Address
    policy: ProxyPolicy


class Opening:
    """One request's way to its target. `done` is told once what came of it, unless it is cancelled."""

    __slots__ = ("_dialling", "_done", "_lookup", "_policy", "_server", "deadline", "judged")

    def __init__(self, server: Server, judged: Open, done: Callable[[Opening, Reached | Deny], None]) -> None:
        self.judged = judged
        self.deadline = math.inf
        """When it has taken too long; a lookup knows its own deadline."""
        self._server = server
        self._policy = server.policy
        self._done = done
        self._lookup: Lookup | None = None
        self._dialling: Dialling | None = None

    def start(self) -> None:
        """Look the name up, or take what is still known of it."""
        resolver, host = self._server.resolver, self.judged.resolved.target.host
        known = resolver.known(host)
        if known is None:
            self._lookup = resolver.ask(host, self._found)
        else:
            self._found(known)

    def cancel(self) -> None:
        """Go no further, and tell nobody."""
        if self._lookup is not None:
            self._lookup.leave(self._found)
        if self._dialling is not None:
            self._dialling.cancel()

    def late(self) -> None:
        """Give up, because the target took too long."""
        if self._dialling is not None:
            self._dialling.late()

    def _found(self, found: Found) -> None:
        self._lookup = None
        try:
            deny = self._decide(found)
        except Exception as broken:  # noqa: BLE001 — one broken connection must not take the others with it
            deny = self._broken(broken)
        if deny is not None:
            self._tell(deny)

    def _decide(self, found: Found) -> Deny | None:
        server, resolved = self._server, self.judged.resolved
        if isinstance(found, Failure):
            code, what = _FAILURES[found]
            return Deny(code, f"{resolved.target.host} {what}")
        policy = server.policy
        if policy is not self._policy:
            # A newer generation came while the name was looked up.
            self._policy = policy
            again = decide_name(policy, resolved.target)
            if isinstance(again, Deny):
                return again
            resolved = again
        allowed = decide_addresses(policy, resolved, found, local=server.interfaces.addresses())
        if isinstance(allowed, Deny):
            return allowed
        self.deadline = server.now() + CONNECT_DEADLINE_S
        self._dialling = Dialling(server.poller, allowed, self._dialled)
        self._dialling.start()
        return None

    def _dialled(self, connected: Connected | Deny) -> None:
        self._dialling = None
        self._tell(connected if isinstance(connected, Deny) else Reached(*connected, self._policy))

    def _tell(self, reached: Reached | Deny) -> None:
        try:
            self._done(self, reached)
        except Exception as broken:  # noqa: BLE001 — the same
            self._done(self, self._broken(broken))

    def _broken(self, broken: Exception) -> Deny:
        self._server.report(broken)
        return Deny(Code.INTERNAL, f"the proxy failed: {type(broken).__name__}")
