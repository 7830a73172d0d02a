"""Owns policies, names and addresses that tests of the proxy share; asserts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hypothesis import strategies as st

from proxy.entry import Entry, parse, parse_deny
from proxy.policy import ProxyLayer, ProxyPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

DATA = Path(__file__).parents[1] / "data"
WIRE_ALLOW = ("example.com", "*.example.com", "db.example.com:5432")


def cases(name: str) -> Any:
    """Read one table of cases."""
    return yaml.load((DATA / f"{name}.yaml").read_bytes(), Loader=yaml.CSafeLoader)  # noqa: TID251 — our own table, a safe loader


def entries(texts: Iterable[str]) -> tuple[Entry, ...]:
    """Parse entries of an allow list that are right."""
    return tuple(entry for entry in map(parse, texts) if isinstance(entry, Entry))


def denied(texts: Iterable[str]) -> tuple[Entry, ...]:
    """Parse entries of a deny list that are right."""
    return tuple(entry for entry in map(parse_deny, texts) if isinstance(entry, Entry))


def layer(
    name: str = "egress/org",
    *,
    default_allow: bool = False,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    deny_ranges: Iterable[str] = (),
) -> ProxyLayer:
    """Make one organisation layer."""
    return ProxyLayer(
        name=name,
        default_allow=default_allow,
        allow=entries(allow),
        deny=denied(deny),
        deny_ranges=tuple(deny_ranges),
    )


def policy(
    *,
    allow: Iterable[str] = WIRE_ALLOW,
    deny: Iterable[str] = (),
    layers: Iterable[ProxyLayer] = (),
    resolvers: Iterable[tuple[str, int]] = (("93.184.216.53", 53),),
    generation: int = 1,
    local_addresses: Iterable[str] = (),
    nat64_prefixes: Iterable[str] = (),
    connections: int = 256,
    canary: int | None = None,
    client_secret: str | None = None,
    expires_at: float = 4e9,
    run: str = "20250101T000000-00000000",
) -> ProxyPolicy:
    """Make a policy; what is left out is the table of wire cases' own."""
    return ProxyPolicy(
        run=run,
        generation=generation,
        revision="sha256:00",
        allow=entries(allow),
        deny=denied(deny),
        layers=tuple(layers),
        resolvers=tuple(resolvers),
        local_addresses=tuple(local_addresses),
        nat64_prefixes=tuple(nat64_prefixes),
        connections=connections,
        canary=canary,
        proof_key=bytes(range(32)),
        client_secret=client_secret,
        expires_at=expires_at,
    )


LABELS = st.sampled_from(["a", "b", "api", "x-1", "_d"])
HOSTS = st.lists(LABELS, min_size=1, max_size=3).map(lambda labels: ".".join([*labels, "com"]))
PORTS = st.sampled_from([22, 80, 443, 5432])
ENTRIES = st.builds(Entry, HOSTS, st.booleans(), st.none() | PORTS)
LAYERS = st.builds(
    ProxyLayer,
    name=st.sampled_from(["egress/org", "egress/team"]),
    default_allow=st.booleans(),
    allow=st.lists(ENTRIES, max_size=4).map(tuple),
    deny=st.lists(ENTRIES, max_size=2).map(tuple),
    deny_ranges=st.lists(st.sampled_from(["93.184.0.0/16", "2606:4700::/32", "8.8.8.8"]), max_size=2).map(tuple),
)
POLICIES = st.builds(
    ProxyPolicy,
    run=st.just("r"),
    generation=st.integers(1, 99),
    revision=st.just("sha256:00"),
    allow=st.lists(ENTRIES, max_size=6).map(tuple),
    deny=st.lists(ENTRIES, max_size=3).map(tuple),
    layers=st.lists(LAYERS, max_size=2).map(tuple),
    resolvers=st.lists(st.sampled_from([("93.184.216.53", 53), ("2606:2800:220::53", 5353)]), max_size=2).map(tuple),
    local_addresses=st.lists(st.sampled_from(["93.184.216.77", "2606:4700::77"]), max_size=2).map(tuple),
    nat64_prefixes=st.lists(st.sampled_from(["64:ff9b::/96", "2001:470:64::/96"]), max_size=1).map(tuple),
    connections=st.integers(1, 256),
    canary=st.none() | st.integers(1, 65535),
    proof_key=st.binary(min_size=16, max_size=32),
    client_secret=st.none() | st.sampled_from(["abc", "a-B_9:x"]),
    expires_at=st.floats(1, 4e9),
)
ADDRESSES = (
    st.binary(min_size=4, max_size=4)
    | st.binary(min_size=16, max_size=16)
    | st.sampled_from([b"\x5d\xb8\xd8\x22", b"\x08\x08\x08\x08", b"\x5d\xb8\xd8\x4d"])
    | st.binary(min_size=4, max_size=4).map(lambda four: bytes(10) + b"\xff\xff" + four)
    | st.binary(min_size=4, max_size=4).map(lambda four: bytes.fromhex("0064ff9b") + bytes(8) + four)
    | st.binary(min_size=14, max_size=14).map(lambda rest: b"\x26\x06" + rest)
)
