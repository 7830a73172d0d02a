"""Owns the frozen policy of one proxy, read from its canonical JSON; decides nothing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

from proxy.address import Address, Network, parse_address, parse_nat64_prefix, parse_network, text_of
from proxy.entry import BadEntry, Entry, EntryIndex, parse_deny, parse_port
from proxy.entry import parse as parse_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

VERSION = 1
KIND = "proxy-policy"
MAX_PORT = 65535
MAX_CONNECTIONS = 65536
MIN_PROOF_KEY = 16
_END_OF_TIME = 2.0**53
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")
_LAYER_KEYS = frozenset({"name", "default", "allow", "deny", "deny_ranges"})
_POLICY_KEYS = frozenset(
    {
        "version",
        "kind",
        "run",
        "generation",
        "revision",
        "allow",
        "deny",
        "layers",
        "resolvers",
        "local_addresses",
        "nat64_prefixes",
        "limits",
        "canary",
        "proof_key",
        "client_secret",
        "expires_at",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLayer:
    """One organisation layer: an AND with the sandbox's own lists. `name` is the document, such as `egress/org`.

    Raises ValueError when a deny range is not a range.
    """

    name: str
    default_allow: bool
    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    deny_ranges: tuple[str, ...]
    allow_index: EntryIndex = field(init=False, repr=False, compare=False)
    deny_index: EntryIndex = field(init=False, repr=False, compare=False)
    ranges: tuple[Network, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_index", EntryIndex(allow=self.allow))
        object.__setattr__(self, "deny_index", EntryIndex(deny=self.deny))
        object.__setattr__(self, "ranges", tuple(_usable(parse_network, text, "range") for text in self.deny_ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPolicy:
    """What one sandbox may reach. Keys and secrets are kept out of `repr`. schema/proxy-policy.v1.json.

    Raises ValueError when an address or a prefix is not one.
    """

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
    allow_index: EntryIndex = field(init=False, repr=False, compare=False)
    deny_index: EntryIndex = field(init=False, repr=False, compare=False)
    local: frozenset[Address] = field(init=False, repr=False, compare=False)
    nat64: tuple[Network, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_index", EntryIndex(allow=self.allow))
        object.__setattr__(self, "deny_index", EntryIndex(deny=self.deny))
        local = frozenset(_usable(parse_address, text, "address") for text in self.local_addresses)
        object.__setattr__(self, "local", local)
        nat64 = tuple(_usable(parse_nat64_prefix, text, "NAT64 prefix") for text in self.nat64_prefixes)
        object.__setattr__(self, "nat64", nat64)

    def to_json(self) -> str:
        """Write the canonical form: one line of compact JSON with sorted keys. It holds secrets."""
        document = {
            "version": VERSION,
            "kind": KIND,
            "run": self.run,
            "generation": self.generation,
            "revision": self.revision,
            "allow": [str(entry) for entry in self.allow],
            "deny": [str(entry) for entry in self.deny],
            "layers": [
                {
                    "name": layer.name,
                    "default": "allow" if layer.default_allow else "deny",
                    "allow": [str(entry) for entry in layer.allow],
                    "deny": [str(entry) for entry in layer.deny],
                    "deny_ranges": list(layer.deny_ranges),
                }
                for layer in self.layers
            ],
            "resolvers": [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.resolvers],
            "local_addresses": list(self.local_addresses),
            "nat64_prefixes": list(self.nat64_prefixes),
            "limits": {"connections": self.connections},
            "canary": self.canary,
            "proof_key": self.proof_key.hex(),
            "client_secret": self.client_secret,
            "expires_at": self.expires_at,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class BadPolicy:
    """A line that is not a usable policy; `message` names the field and never holds a value of it."""

    message: str


def parse(line: bytes) -> ProxyPolicy | BadPolicy:
    """Read one policy. Anything missing, unknown, twice there, or of another type makes the whole line unusable."""
    try:
        document = json.loads(line.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        return _policy(document)
    except _UnusableError as unusable:
        return BadPolicy(str(unusable))
    except (ValueError, RecursionError):
        return BadPolicy("the policy is not one JSON object in UTF-8")


class _UnusableError(Exception):
    """Carries the message from where a field is read to `parse`; never leaves this module."""


def _policy(document: object) -> ProxyPolicy:
    fields = _object("the policy", document, _POLICY_KEYS)
    if fields["version"] != VERSION or type(fields["version"]) is not int or fields["kind"] != KIND:
        raise _UnusableError(f"the policy is not a {KIND} of version {VERSION}")
    limits = _object("limits", fields["limits"], frozenset({"connections"}))
    return ProxyPolicy(
        run=_text("run", fields["run"]),
        generation=_whole("generation", fields["generation"], least=1),
        revision=_text("revision", fields["revision"]),
        allow=_entries("allow", fields["allow"], parse_entry),
        deny=_entries("deny", fields["deny"], parse_deny),
        layers=tuple(_layer(at, layer) for at, layer in enumerate(_list("layers", fields["layers"]))),
        resolvers=tuple(_resolver(text) for text in _texts("resolvers", fields["resolvers"])),
        local_addresses=_checked("local_addresses", fields["local_addresses"], parse_address),
        nat64_prefixes=_checked("nat64_prefixes", fields["nat64_prefixes"], parse_nat64_prefix),
        connections=_whole("limits.connections", limits["connections"], least=1, most=MAX_CONNECTIONS),
        canary=None if fields["canary"] is None else _whole("canary", fields["canary"], least=1, most=MAX_PORT),
        proof_key=_key(fields["proof_key"]),
        client_secret=None if fields["client_secret"] is None else _secret(fields["client_secret"]),
        expires_at=_expiry(fields["expires_at"]),
    )


def _layer(at: int, value: object) -> ProxyLayer:
    where = f"layers[{at}]"
    fields = _object(where, value, _LAYER_KEYS)
    if fields["default"] not in ("allow", "deny"):
        raise _UnusableError(f"{where}.default is neither allow nor deny")
    return ProxyLayer(
        name=_text(f"{where}.name", fields["name"]),
        default_allow=fields["default"] == "allow",
        allow=_entries(f"{where}.allow", fields["allow"], parse_entry),
        deny=_entries(f"{where}.deny", fields["deny"], parse_deny),
        deny_ranges=_checked(f"{where}.deny_ranges", fields["deny_ranges"], parse_network),
    )


def _object(where: str, value: object, keys: frozenset[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _UnusableError(f"{where} is not an object")
    if unknown := sorted(value.keys() - keys):
        raise _UnusableError(f"{where} has a field that this proxy does not know: {unknown[0]!a}")
    if missing := sorted(keys - value.keys()):
        raise _UnusableError(f"{where} has no {missing[0]}")
    return value


def _list(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise _UnusableError(f"{where} is not a list")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _UnusableError(f"{where} is not a text with something in it")
    return value


def _texts(where: str, value: object) -> tuple[str, ...]:
    return tuple(_text(f"{where}[{at}]", item) for at, item in enumerate(_list(where, value)))


def _whole(where: str, value: object, *, least: int, most: int | None = None) -> int:
    # bool is an int in Python, and True is not a number in JSON
    if type(value) is not int or value < least or (most is not None and value > most):
        raise _UnusableError(f"{where} is not a whole number from {least}" + ("" if most is None else f" to {most}"))
    return value


def _entries(where: str, value: object, read: Callable[[str], Entry | BadEntry]) -> tuple[Entry, ...]:
    found = []
    for text in _texts(where, value):
        entry = read(text)
        if isinstance(entry, BadEntry):
            raise _UnusableError(f"{where}: {entry.message}")
        found.append(entry)
    return tuple(found)


def _checked(where: str, value: object, read: Callable[[str], object]) -> tuple[str, ...]:
    texts = _texts(where, value)
    for at, text in enumerate(texts):
        if read(text) is None:
            raise _UnusableError(f"{where}[{at}] is not usable")
    return texts


def _resolver(text: str) -> tuple[str, int]:
    name, _, port_text = text.rpartition(":")
    if name.startswith("[") and name.endswith("]"):
        address = parse_address(name[1:-1])
        address = None if address is None or ":" not in name else address
    else:
        address = None if ":" in name else parse_address(name)
    port = parse_port(port_text)
    if address is None or port is None:
        raise _UnusableError("resolvers: write each as '192.0.2.53:53' or '[2001:db8::53]:53'")
    return text_of(address), port


def _key(value: object) -> bytes:
    # bytes.fromhex alone would take spaces between the digits
    if not isinstance(value, str) or _HEX.fullmatch(value) is None or len(value) < 2 * MIN_PROOF_KEY:
        raise _UnusableError(f"proof_key is not at least {2 * MIN_PROOF_KEY} hexadecimal digits")
    return bytes.fromhex(value)


def _secret(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable() or " " in value:
        raise _UnusableError("client_secret is not a text of printable ASCII without spaces")
    return value


def _expiry(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _END_OF_TIME:
        raise _UnusableError("expires_at is not a number of Unix seconds")
    return float(value)


def _usable(read: Callable[[str], T | None], text: str, what: str) -> T:
    value = read(text)
    if value is None:
        raise ValueError(f"not a usable {what}: {text!a}")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _UnusableError("an object of the policy has a field twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _UnusableError(f"{name} is not a number in JSON")
