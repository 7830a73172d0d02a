"""Owns the client side of the rig's control socket; does not start or stop a rig."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.rig import zone
from tests.rig.origin import Mode
from tests.rig.zone import Answer, Spec

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One DNS query: `name` lower-case without the trailing dot, `transport` udp or tcp, `time` in Unix seconds."""

    name: str
    type: str
    transport: str
    server: str
    peer: str
    time: float
    raw: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One connection or datagram at a listener.

    `first`: up to 16 KiB as it came on the wire (of TLS: what the first read saw); `plain`: what was inside TLS.
    `sni` as sent; `ended`: None while open, `eof`, or the name of what broke it.
    """

    kind: str
    address: str
    port: int
    peer: str
    peer_port: int
    time: float
    first: bytes
    plain: bytes
    sni: str | None
    ended: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A flow's first packet that crossed the link, whether anything listened or not: tcp (SYN), udp, icmp, ip-N."""

    kind: str
    source: str
    source_port: int | None
    address: str
    port: int | None
    time: float
    first: bytes


class Names(MutableMapping[str, Answer]):
    """The DNS server's zone, live. `names["a.com"] = "nxdomain"`, `= ["10.1.2.3"]`, `= answer("public", ttl=1)`."""

    def __init__(self, order: Callable[..., Any]) -> None:
        """Speak through `order`."""
        self._order = order

    def _all(self) -> dict[str, Answer]:
        return {name: zone.from_json(value) for name, value in self._order("names").items()}

    def __getitem__(self, name: str) -> Answer:
        """Return the line for exactly this name."""
        return self._all()[name]

    def __setitem__(self, name: str, spec: Spec) -> None:
        """Answer so from now on."""
        self._order("set", name=name.rstrip(".").lower(), answer=zone.answer(spec).to_json())

    def __delitem__(self, name: str) -> None:
        """Forget the name: NXDOMAIN, unless a wildcard has it."""
        if name not in self._all():
            raise KeyError(name)
        self._order("delete", name=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class Internet:
    """What a test may ask of a running rig's internet; every call sees all that arrived before it."""

    def __init__(self, control: Path) -> None:
        """Speak to the control socket at this path."""
        self._control = control
        self.names = Names(self._order)

    def _order(self, do: str, /, **details: object) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(str(self._control))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps({"do": do, **details}).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        if not line:
            raise RuntimeError(f"the rig's internet died during {do}")
        reply = json.loads(line)
        if not reply["ok"]:
            raise RuntimeError(f"the rig refused {do}: {reply['message']}")
        return reply["value"]

    def queries(self, name: str | None = None) -> list[Query]:
        """Return the DNS queries so far, of one name or of all."""
        rows = (Query(**{**row, "raw": bytes.fromhex(row["raw"])}) for row in self._order("queries"))
        return [row for row in rows if name is None or row.name == name]

    def asked(self) -> list[str]:
        """Return the names asked so far, each once, in order."""
        return list(dict.fromkeys(query.name for query in self.queries()))

    def arrivals(self, *, address: str | Iterable[str] | None = None, port: int | None = None) -> list[Arrival]:
        """Return what arrived at listeners so far, at an address or one of several, at a port, or at all."""
        wanted = {address} if isinstance(address, str) else None if address is None else set(address)
        rows = (
            Arrival(**{**row, "first": bytes.fromhex(row["first"]), "plain": bytes.fromhex(row["plain"])})
            for row in self._order("arrivals")
        )
        return [row for row in rows if (wanted is None or row.address in wanted) and port in {None, row.port}]

    def packets(self, *, address: str | None = None, kind: str | None = None) -> list[Packet]:
        """Return every flow that crossed the link so far: the evidence for `nothing arrived`."""
        rows = (Packet(**{**row, "first": bytes.fromhex(row["first"])}) for row in self._order("packets"))
        return [row for row in rows if address in {None, row.address} and kind in {None, row.kind}]

    def listen(self, port: int, mode: Mode = Mode.ECHO) -> None:
        """Open a TCP port on every address of the internet, or change what it does, until `reset`."""
        self._order("listen", port=port, mode=mode.value)

    def listen_udp(self, port: int) -> None:
        """Open a UDP echo on every address of the internet."""
        self._order("listen_udp", port=port)

    def clear(self) -> None:
        """Forget queries, arrivals and packets; the zone stays."""
        self._order("clear")

    def reset(self) -> None:
        """Forget queries, arrivals and packets, and bring zone and listeners back to how a fresh rig has them."""
        self._order("reset")

    def until(self, what: Callable[[], bool], *, timeout_s: float = 5.0) -> bool:
        """Wait until `what` is true of the logs; False when it is not within the timeout."""
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True
