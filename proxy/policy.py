"""Owns the frozen policy of one proxy, read from its canonical JSON; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLayer:
    """One organisation layer: an AND with the sandbox's own lists. `name` is the document, such as `egress/org`."""

    name: str
    default_allow: bool
    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    deny_ranges: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPolicy:
    """What one sandbox may reach. Keys and secrets are kept out of `repr`. schema/proxy-policy.v1.json."""

    run: str
    generation: int
    revision: str
    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    layers: tuple[ProxyLayer, ...]
    resolvers: tuple[tuple[str, int], ...]
    local_addresses: tuple[str, ...] = ()
    nat64_prefixes: tuple[str, ...] = ()
    connections: int = 256
    canary: int | None = None
    proof_key: bytes = field(repr=False)
    client_secret: str | None = field(default=None, repr=False)
    expires_at: float
    """Unix seconds past which the proxy closes everything and exits."""
