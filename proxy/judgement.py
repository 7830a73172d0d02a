"""Owns the order of checks on one request, from its head to the word that it may be looked up; makes none of them.

Nothing after a failed check runs. Lookup, addresses and dialling come after, and only for an `Open`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.answer import GATE_HOST, credentials, proof, shows
from proxy.decision import Code, Deny, Resolve, Target, decide_name
from proxy.head import Malformed, RequestHead, parse_request
from proxy.request import forward_request
from proxy.target import HTTP_PORT, asked, asked_inside, host_shown, names, port_shown, target_of

if TYPE_CHECKING:
    from proxy.policy import ProxyPolicy


MAX_KNOWN = 1024
MAX_KNOWN_HEADS = 256
"""Clients ask for tunnels to the same hosts with the same bytes again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What a request asks for as far as it could be read: evidence, not yet fit to be written. No path, no userinfo."""

    method: str = ""
    host: str = ""
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request goes no further."""

    deny: Deny
    asking: Asking


@dataclass(frozen=True, slots=True)
class Proof:
    """The gate's question, answered by the proxy itself: the whole response."""

    response: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Allowed by name. `forward` is the head to send on, None for a tunnel."""

    resolved: Resolve
    head: RequestHead
    forward: bytes | None

    @property
    def asking(self) -> Asking:
        """What to write down."""
        target = self.resolved.target
        return Asking(method=self.head.method, host=target.host, port=target.port)


class Judge:
    """Judges by one policy, and knows what it said of heads that came before: the same bytes are judged the same."""

    __slots__ = ("_known", "_policy", "_via")

    def __init__(self, policy: ProxyPolicy, via: bytes) -> None:
        self._policy = policy
        self._via = via
        self._known: dict[bytes, Open] = {}

    def judge(self, data: bytes, inside: Target | None) -> Refused | Proof | Open:
        """Judge one whole request head, as `judge` does."""
        if inside is not None:
            return judge(data, self._policy, inside=inside, via=self._via)
        known = self._known.get(data)
        if known is not None:
            return known
        judged = judge(data, self._policy, inside=None, via=self._via)
        if isinstance(judged, Open) and judged.forward is None and len(data) <= MAX_KNOWN:
            if len(self._known) >= MAX_KNOWN_HEADS:
                self._known.clear()
            self._known[data] = judged
        return judged


def judge(data: bytes, policy: ProxyPolicy, *, inside: Target | None, via: bytes) -> Refused | Proof | Open:
    """Judge one whole request head. `inside` is the target of the tunnel to port 80 that it came through, if any."""
    head = parse_request(data)
    if isinstance(head, Malformed):
        return Refused(Deny(head.code, head.message), Asking())
    if inside is not None:
        return _judge_inside(head, policy, inside, via)
    wanted = asked(head)
    if isinstance(wanted, Malformed):
        return Refused(Deny(wanted.code, wanted.message), Asking(method=head.method))
    expected = credentials(policy.client_secret)
    if expected is not None:
        shown = [value for name, _, value in head.fields if name == b"proxy-authorization"]
        if not shows(expected, shown):
            message = "this proxy wants the credentials that its own client was given"
            return Refused(Deny(Code.CLIENT_SECRET, message), Asking(method=head.method))
    target = target_of(wanted, head)
    if isinstance(target, Malformed):
        asking = Asking(method=head.method, host=host_shown(wanted), port=port_shown(wanted))
        return Refused(Deny(target.code, target.message), asking)
    if target == Target(GATE_HOST, HTTP_PORT) and head.method == "GET":
        answer = proof(wanted.origin, policy.proof_key)
        if answer is not None:
            return Proof(answer)
    return _judge_name(head, policy, target, origin=None if wanted.connect else wanted.origin, via=via)


def _judge_inside(head: RequestHead, policy: ProxyPolicy, inside: Target, via: bytes) -> Refused | Open:
    """Judge a request in a tunnel to port 80: it may ask for nothing but the tunnel's own target."""
    asking = Asking(method=head.method, host=inside.host, port=inside.port)
    malformed = asked_inside(head)
    if malformed is not None:
        return Refused(Deny(malformed.code, malformed.message), asking)
    if head.host is None or not names(head.host, inside, default=HTTP_PORT):
        message = "the Host field inside the tunnel names another host than CONNECT did"
        return Refused(Deny(Code.HOST_MISMATCH, message), asking)
    return _judge_name(head, policy, inside, origin=head.target, via=via)


def _judge_name(
    head: RequestHead, policy: ProxyPolicy, target: Target, *, origin: str | None, via: bytes
) -> Refused | Open:
    asking = Asking(method=head.method, host=target.host, port=target.port)
    decided = decide_name(policy, target)
    if isinstance(decided, Deny):
        return Refused(decided, asking)
    forward = None if origin is None else forward_request(head, target, origin, via=via)
    if isinstance(forward, Malformed):
        return Refused(Deny(forward.code, forward.message), asking)
    return Open(resolved=decided, head=head, forward=forward)
