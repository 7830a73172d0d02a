"""Owns the canaries: listeners of the daemon's own that no sandbox may reach, proven alive, with arrivals counted.

Does not run the gate that tries them and does not judge.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reconciler.core.gate_report import Target, TargetKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_ANY_PORT = 0
_ALIVE_S = 0.5
"""How long all of the daemon's own connections together may take; they never leave the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """Open listeners. What arrives waits in the kernel until it is counted, so that no task has to accept."""

    targets: tuple[Target, ...]
    """One for each address at which a listener can be met; `alive` when the daemon itself met it there."""
    listeners: Mapping[socket.socket, str]
    """With what to call an arrival that does not say itself where it was going."""

    def arrivals(self) -> frozenset[str]:
        """Name the targets at which something arrived since the last call."""
        return frozenset(name for listener, fallback in self.listeners.items() for name in _arrived(listener, fallback))


@contextlib.contextmanager
def open_canaries(folder: Path, addresses: Sequence[str], *, ports: Sequence[int] = (_ANY_PORT,)) -> Iterator[Canaries]:
    """Listen on TCP and UDP at 0.0.0.0 and ::, on an abstract socket and on `folder`/canary.sock; connect to each once.

    Args:
        folder: a directory of the run's own; sandboxes may pass through it, for the fence alone must keep them out.
        addresses: every local address of this network namespace.
        ports: which to try, in this order, until one is free; 0 is any.

    Raises:
        OSError: a listener could not be opened.
    """
    with contextlib.ExitStack() as stack:
        families = {socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses}
        network = [
            stack.enter_context(listen_everywhere(family, kind, ports))
            for family in sorted(families)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        ]
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        abstract_name = f"ringfence-canary-{secrets.token_hex(8)}"
        abstract.bind("\0" + abstract_name)
        path = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # Through the directory's descriptor: an address holds 107 bytes, a path may be longer.
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        path.bind(f"/proc/self/fd/{descriptor}/canary.sock")
        stack.callback((folder / "canary.sock").unlink, missing_ok=True)
        # Were it bound into a sandbox by mistake, nothing but the fence would keep the sandbox's uid from connecting.
        (folder / "canary.sock").chmod(0o666)
        for listener in (abstract, path):
            listener.listen(16)
            listener.setblocking(False)
        planned = [
            (listener, _network_target(listener, address))
            for listener in network
            for address in addresses
            if (":" in address) == (listener.family == socket.AF_INET6)
        ]
        planned.append((abstract, _target(TargetKind.UNIX_ABSTRACT, f"@{abstract_name}", None)))
        planned.append((path, _target(TargetKind.UNIX_PATH, str(folder / "canary.sock"), None)))
        # The last target of a listener names it: for the Unix ones, the only one.
        listeners = {listener: target.name for listener, target in planned}
        yield Canaries(targets=_meet(planned, listeners), listeners=listeners)


def listen_everywhere(
    family: int, kind: int, ports: Sequence[int] = (_ANY_PORT,), *, backlog: int = 64
) -> socket.socket:
    """Listen at every address of a family, at the first of these ports that is free.

    Raises:
        OSError: none of them is.
    """
    made = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Everywhere on purpose: whichever of the host's addresses a sandbox can reach, it meets this.
        _bind(made, "::" if family == socket.AF_INET6 else "0.0.0.0", ports)  # noqa: S104
        if kind == socket.SOCK_STREAM:
            made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _bind(made: socket.socket, address: str, ports: Sequence[int]) -> None:
    for last, port in enumerate(ports, 1 - len(ports)):
        try:
            made.bind((address, port))
        except OSError as error:
            if last == 0 or error.errno != errno.EADDRINUSE:
                raise
        else:
            return


def _network_target(listener: socket.socket, address: str) -> Target:
    kind = TargetKind.TCP if listener.type == socket.SOCK_STREAM else TargetKind.UDP
    return _target(kind, address, listener.getsockname()[1])


def _target(kind: TargetKind, address: str, port: int | None, *, alive: bool = False) -> Target:
    return Target(name=_name(kind, address, port), kind=kind, address=address, port=port, alive=alive, near=True)


def _name(kind: TargetKind, address: str, port: int | None) -> str:
    if port is None:
        return f"canary {kind}:{address}"
    return f"canary {kind}:[{address}]:{port}" if ":" in address else f"canary {kind}:{address}:{port}"


def _meet(
    planned: Sequence[tuple[socket.socket, Target]], listeners: Mapping[socket.socket, str]
) -> tuple[Target, ...]:
    """Connect (or send) to each target once and see it arrive; the targets, with `alive` as it turned out."""
    deadline = time.monotonic() + _ALIVE_S
    with contextlib.ExitStack() as stack:
        expected = set()
        for listener, target in planned:
            visitor = stack.enter_context(socket.socket(listener.family, listener.type))
            visitor.setblocking(False)
            with contextlib.suppress(OSError):
                if visitor.connect_ex(_socket_address(listener, target)) in (0, errno.EINPROGRESS):
                    if target.kind is TargetKind.UDP:
                        visitor.send(target.name.encode())
                    expected.add(target.name)
        poller = select.poll()
        for listener in listeners:
            poller.register(listener, select.POLLIN)
        met: set[str] = set()
        while not expected <= met and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            for listener, name in listeners.items():
                met.update(_arrived(listener, name, named_datagrams=True))
    return tuple(replace(target, alive=target.name in met) for _, target in planned)


def _socket_address(
    listener: socket.socket, target: Target
) -> tuple[str, int] | tuple[str, int, int, int] | str | bytes:
    if target.kind in (TargetKind.UNIX_ABSTRACT, TargetKind.UNIX_PATH):
        return listener.getsockname()  # type: ignore[no-any-return]  # a string or bytes, as it was bound
    address, _, zone = target.address.partition("%")
    if ":" not in address:
        return address, target.port or 0
    return address, target.port or 0, 0, socket.if_nametoindex(zone) if zone else 0


def _arrived(listener: socket.socket, name: str, *, named_datagrams: bool = False) -> Iterator[str]:
    """Take in what waits at a listener; the name of the target at which each piece arrived."""
    while True:
        try:
            if listener.type == socket.SOCK_DGRAM:
                data, peer = listener.recvfrom(256)
                # A datagram does not say which of the host's addresses it was sent to; the daemon's own carry it.
                yield data.decode("ascii", "replace") if named_datagrams else f"{name} from {peer[0]}"
                continue
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionAbortedError:
            continue
        with connection:
            yield name if connection.family == socket.AF_UNIX else _tcp_name(connection.getsockname())


def _tcp_name(local: tuple[str, int] | tuple[str, int, int, int]) -> str:
    address = local[0].partition("%")[0]
    zone = local[3] if len(local) > 2 else 0  # noqa: PLR2004 - IPv6 addresses are four values
    return _name(TargetKind.TCP, f"{address}%{_link(zone)}" if zone else address, local[1])


def _link(index: int) -> str:
    """Name a link; by its number where it is gone since, as those of other sandboxes may be."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return str(index)
