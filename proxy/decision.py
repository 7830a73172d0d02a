"""Owns what the proxy decides about a target: by its name, then by the addresses it has; does no lookup and no dial.

Only a `Resolve` lets anything be looked up and only a `Dial` lets anything be dialled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.address import Address, Kind, classify, text_of, unwrap

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from proxy.entry import EntryIndex
    from proxy.policy import ProxyPolicy

AGENT = "agent"
"""The layer that the sandbox's own lists are."""


class Code(StrEnum):
    """Why the proxy answered as it did. Which status each one has on the wire is settled in one table beside it."""

    ALLOWED = "allowed"
    NOT_LISTED = "not_listed"
    DENIED = "denied"
    ORG_DENIED = "org_denied"
    PORT = "port"
    IP_LITERAL = "ip_literal"
    ADDRESS_PRIVATE = "address_private"
    ADDRESS_LOCAL = "address_local"
    MIXED_ANSWER = "mixed_answer"
    ADDRESS_DENIED = "address_denied"
    DNS_NXDOMAIN = "dns_nxdomain"
    DNS_SERVFAIL = "dns_servfail"
    DNS_EMPTY = "dns_empty"
    DNS_TIMEOUT = "dns_timeout"
    DNS_MALFORMED = "dns_malformed"
    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    PEER_MISMATCH = "peer_mismatch"
    SNI_MISMATCH = "sni_mismatch"
    SNI_MISSING = "sni_missing"
    NOT_TLS = "not_tls"
    MALFORMED = "malformed"
    HOST_MISMATCH = "host_mismatch"
    METHOD = "method"
    VERSION = "version"
    TARGET_TOO_LONG = "target_too_long"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TIMEOUT = "head_timeout"
    UNKNOWN_CODING = "unknown_coding"
    CLIENT_SECRET = "client_secret"  # noqa: S105 — the name of a check, not a secret
    LOOP = "loop"
    BAD_RESPONSE = "bad_response"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    POLICY_CHANGED = "policy_changed"
    SINK_FAILED = "sink_failed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: a canonical host (lower case, no trailing dot, no address) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Deny:
    """Refused: `layer` is `agent`, an organisation document such as `egress/org`, or None where no list was asked."""

    code: Code
    message: str
    layer: str | None = None


@dataclass(frozen=True, slots=True)
class Resolve:
    """Every list allows the name and port: it may be looked up, and nothing more."""

    target: Target


@dataclass(frozen=True, slots=True)
class Dial:
    """Every address of the answer is public: these may be dialled, and only these. Never empty."""

    target: Target
    addresses: tuple[Address, ...]


def decide_name(policy: ProxyPolicy, target: Target) -> Deny | Resolve:
    """Decide before any lookup: the sandbox's own lists, then every organisation layer."""
    host, port = target.host, target.port
    if policy.deny_index.matches(host, port):
        return Deny(Code.DENIED, f"{target} is on the agent's own deny list", AGENT)
    refused = _not_allowed(policy.allow_index, target)
    if refused is not None:
        code, message = refused
        return Deny(code, f"{message} the agent's allow list", AGENT)
    for layer in policy.layers:
        if layer.deny_index.matches(host, port):
            return Deny(Code.ORG_DENIED, f"{target} is on the deny list of {layer.name}", layer.name)
        refused = None if layer.default_allow else _not_allowed(layer.allow_index, target)
        if refused is not None:
            return Deny(Code.ORG_DENIED, f"{refused[1]} the allow list of {layer.name}", layer.name)
    return Resolve(target)


def _not_allowed(allow: EntryIndex, target: Target) -> tuple[Code, str] | None:
    if allow.matches(target.host, target.port):
        return None
    if allow.matches_host(target.host):
        return Code.PORT, f"{target.host} is listed but port {target.port} is not, in"
    return Code.NOT_LISTED, f"{target} is not on"


def decide_addresses(
    policy: ProxyPolicy, resolved: Resolve, addresses: Sequence[Address], *, local: Container[Address]
) -> Deny | Dial:
    """Decide on a whole answer: one address that may not be dialled refuses all of them.

    `local` is what leads to this host itself, read now; the policy's own local addresses are added.
    """
    target = resolved.target
    if not addresses:
        return Deny(Code.DNS_EMPTY, f"{target.host} has no address")
    reached = [unwrap(address, policy.nat64) for address in addresses]
    for layer in policy.layers:
        for address, inner in zip(addresses, reached, strict=True):
            if any(address in denied or inner in denied for denied in layer.ranges):
                text = text_of(address)
                return Deny(Code.ADDRESS_DENIED, f"{target.host} is at {text}, which {layer.name} denies", layer.name)
    bad: list[tuple[Code, str]] = []
    for address, inner in zip(addresses, reached, strict=True):
        kind = classify(address, policy.nat64)
        if kind is not Kind.PUBLIC:
            bad.append((Code.ADDRESS_PRIVATE, f"{text_of(address)} ({kind})"))
        elif inner in local or address in local or inner in policy.local or address in policy.local:
            bad.append((Code.ADDRESS_LOCAL, f"{text_of(address)} (an address of this host)"))
    if not bad:
        # An IPv4-mapped address is dialled as the IPv4 address it is, so that the peer's address compares equal.
        return Dial(target, tuple(unwrap(address) for address in addresses))
    code, text = bad[0]
    if len(bad) < len(addresses):
        return Deny(Code.MIXED_ANSWER, f"{target.host} has public addresses and also {text}")
    return Deny(code, f"{target.host} is at {text}, which is not public")
