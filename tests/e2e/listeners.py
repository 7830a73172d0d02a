"""Owns listeners that are really there in the rig's host namespace, proven alive, and what arrived at them.

Without them "the workload could not reach the host" would prove nothing. It does not judge what may arrive.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import selectors
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.rig import addresses
from tests.rig.rig import ROOT, end

if TYPE_CHECKING:
    import subprocess
    from types import TracebackType

    from tests.rig import Rig

ANSWER: Final = b"ringfence listener\n"
_ANY: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way to reach a listener: `kind` and `address` as an attempt of the workload takes them."""

    name: str
    kind: str
    address: str
    port: int | None

    def attempt(self) -> dict[str, object]:
        """Return the workload's attempt that tries this target."""
        base: dict[str, object] = {"attempt": self.name, "send": "from the workload"}
        match self.kind:
            case "unix_abstract":
                return {**base, "do": self.kind, "name": self.address}
            case "unix_path":
                return {**base, "do": self.kind, "path": self.address}
            case "icmp":
                return {**base, "do": "icmp", "address": self.address}
            case _:
                return {**base, "do": self.kind, "address": self.address, "port": self.port}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What came to a listener: at `address` (and port) where the protocol has them, with its first bytes."""

    kind: str
    address: str
    port: int | None
    peer: str
    first: bytes


class Listeners:
    """A context manager: inside it a process of its own listens in the rig's host namespace, every listener proven."""

    def __init__(self, rig: Rig) -> None:
        """Nothing listens before `with`."""
        self._rig = rig
        self._process: subprocess.Popen[bytes] | None = None
        self.targets: tuple[Target, ...] = ()

    def __enter__(self) -> Self:
        path = self._rig.directory / f"listener-{os.urandom(4).hex()}.sock"
        argv = [sys.executable, "-m", "tests.e2e.listeners", str(path)]
        self._process = self._rig.spawn(argv, cwd=ROOT, stdin=-1)
        try:
            self.targets = tuple(_targets(self._read(), path))
            self.prove()
        except BaseException:
            end(self._process)
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            end(self._process)

    def arrivals(self) -> list[Arrival]:
        """Return everything that has arrived by now since the last `clear`."""
        return [Arrival(**{**row, "first": base64.b64decode(row["first"])}) for row in self._order("arrivals")]

    def clear(self) -> None:
        """Forget what arrived."""
        self._order("clear")

    def prove(self) -> None:
        """Reach every target from the host namespace, see each arrive, then forget; raises RuntimeError for the dead.

        Call it again after the last attempt: what was alive before and after was alive between.
        """
        dead = [target.name for target in self.targets if not self._alive(target)]
        self.clear()
        if dead:
            raise RuntimeError(f"these listeners are not alive, so nothing is proven: {', '.join(dead)}")

    def _alive(self, target: Target) -> bool:
        self.clear()
        with contextlib.suppress(OSError):
            self._touch(target)
        return any(arrival.kind == target.kind for arrival in self.arrivals())

    def _touch(self, target: Target) -> None:
        six = ":" in target.address
        match target.kind:
            case "tcp" | "udp" | "icmp":
                kind = socket.SOCK_STREAM if target.kind == "tcp" else socket.SOCK_DGRAM
                protocols = {"icmp": socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP}
                family = socket.AF_INET6 if six else socket.AF_INET
                with self._rig.socket(family, kind, protocols.get(target.kind, 0), timeout_s=2) as touching:
                    touching.connect((target.address, target.port or 0))
                    touching.send(bytes([128 if six else 8]) + b"\0" * 7 if target.kind == "icmp" else b"proof")
                    touching.recv(100)
            case _:
                name = target.address if target.kind == "unix_path" else f"\0{target.address}"
                with self._rig.socket(socket.AF_UNIX, timeout_s=2) as touching:
                    touching.connect(name)
                    touching.recv(100)

    def _order(self, do: str) -> Any:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the listeners are not running")
        self._process.stdin.write(do.encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the listeners are not running")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the listeners died")
        return json.loads(line)


def _targets(opened: dict[str, Any], path: Path) -> list[Target]:
    found = [
        Target(name="abstract unix socket of the host", kind="unix_abstract", address=opened["abstract"], port=None),
        Target(name="unix socket of the host at a path", kind="unix_path", address=str(path), port=None),
    ]
    for address in addresses.HOST_ADDRESSES:
        found.extend(
            Target(name=f"{kind} to the host at {address}", kind=kind, address=address, port=opened[kind])
            for kind in ("tcp", "udp")
        )
        found.append(Target(name=f"ping of the host at {address}", kind="icmp", address=address, port=None))
    return found


# --- the process in the host namespace --------------------------------------------------------------------------------


class _Server:
    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._rows: list[dict[str, Any]] = []
        self.abstract = f"ringfence-rig-{os.getpid()}-{os.urandom(4).hex()}"
        self.ports = {"tcp": 0, "udp": 0}
        for family in (socket.AF_INET6, socket.AF_INET):
            self._internet(family)
        for kind, name in (("unix_abstract", "\0" + self.abstract), ("unix_path", str(path))):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(name)
            listener.listen(64)
            self._watch(listener, kind, name.lstrip("\0"))
        path.chmod(0o777)  # as open as a socket can be: what keeps the workload out must be the fence

    def _internet(self, family: socket.AddressFamily) -> None:
        for kind, number in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
            each = socket.socket(family, number)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((_ANY[family], self.ports[kind]))
            self.ports[kind] = each.getsockname()[1]
            if kind == "tcp":
                each.listen(64)
            self._watch(each, kind, _ANY[family])
        protocol = socket.IPPROTO_ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
        self._watch(socket.socket(family, socket.SOCK_RAW, protocol), "icmp", _ANY[family])

    def _watch(self, each: socket.socket, kind: str, about: str | dict[str, Any]) -> None:
        """Read `each`; `about` is a listener's address, or the row of a connection that is open."""
        each.setblocking(False)
        self._selector.register(each, selectors.EVENT_READ, (kind, about))

    def serve(self) -> None:
        """Record arrivals until standard input ends; an order is answered after all that arrived before it."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, ("order", ""))
        while True:
            ready = [key for key, _events in self._selector.select()]
            self._settle(ready)
            if any(key.data[0] == "order" for key in ready):
                # One read is one order: the next comes only after this one's answer.
                order = os.read(sys.stdin.fileno(), 4096).decode().strip()
                if not order:
                    return
                self._obey(order)

    def _settle(self, ready: list[selectors.SelectorKey]) -> None:
        while arrived := [key for key in ready if key.data[0] != "order"]:
            for key in arrived:
                self._handle(key)
            ready = [key for key, _events in self._selector.select(0)]

    def _obey(self, order: str) -> None:
        if order == "clear":
            self._rows.clear()
        say(self._rows if order == "arrivals" else None)

    def _handle(self, key: selectors.SelectorKey) -> None:
        kind, name = key.data[0], key.data[1]
        each = key.fileobj
        if not isinstance(each, socket.socket):
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            match kind:
                case "open":
                    self._first_bytes(each, name)
                case "udp" | "icmp":
                    self._datagram(each, kind, name)
                case _:
                    connection, peer = each.accept()
                    internet = kind == "tcp"
                    at = connection.getsockname() if internet else (name, None)
                    row = self._record(kind, at[0], at[1], peer[0] if internet else "", b"")
                    connection.send(ANSWER)
                    self._watch(connection, "open", row)

    def _first_bytes(self, connection: socket.socket, row: dict[str, Any]) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = connection.recv(4096)
        row["first"] = base64.b64encode(data).decode()
        self._selector.unregister(connection)
        connection.close()

    def _datagram(self, each: socket.socket, kind: str, name: str) -> None:
        data, peer = each.recvfrom(65536)
        if kind == "udp":
            each.sendto(ANSWER, peer)
        else:
            header = 0 if each.family == socket.AF_INET6 else (data[0] & 0xF) * 4
            if data[header] not in {8, 128}:  # only echo requests: the kernel's own talk is no arrival
                return
        self._record(kind, name, self.ports.get(kind), peer[0], data)

    def _record(self, kind: str, address: str, port: int | None, peer: str, first: bytes) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": kind, "address": address, "port": port, "peer": peer}
        row["first"] = base64.b64encode(first).decode()
        self._rows.append(row)
        return row


def say(value: object) -> None:
    """Write one JSON line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Listen, say where, and obey `arrivals` and `clear`, one a line, until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    server = _Server(parser.parse_args().path)
    say({**server.ports, "abstract": server.abstract})
    server.serve()


if __name__ == "__main__":
    main()
