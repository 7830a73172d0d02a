"""Owns connecting to addresses that were decided on; chooses among them by who answers first and decides nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from proxy.address import IPV4_LENGTH, Address, parse_address, text_of
from proxy.decision import Code, Deny

if TYPE_CHECKING:
    from proxy.decision import Dial
    from proxy.stream import Poller

CONNECT_DEADLINE_S = 10.0
ATTEMPT_DELAY_S = 0.25
"""How long one address is waited for before the next is tried beside it (RFC 8305 section 5)."""


Connected = tuple[socket.socket, Address]
"""A connected, non-blocking socket and the address at its other end; whoever gets it owns it."""

_Attempted = tuple[socket.socket, Address, Address | None]
"""The same, with the address that the kernel says is at the other end."""


async def dial(poller: Poller, allowed: Dial) -> Connected | Deny:
    """Connect to one of the allowed addresses, never to a name, and make sure of who answered."""
    target = allowed.target
    if len(allowed.addresses) == 1:
        connected = await _attempt(poller, allowed.addresses[0], target.port)
    else:
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                connected = await _race(poller, _interleaved(allowed.addresses), target.port)
        except TimeoutError as late:
            connected = late
    if isinstance(connected, TimeoutError):
        return Deny(Code.CONNECT_TIMEOUT, f"{target} did not answer within {CONNECT_DEADLINE_S:g} s")
    if isinstance(connected, OSError):
        why = os.strerror(connected.errno) if connected.errno else type(connected).__name__
        return Deny(Code.CONNECT_FAILED, f"{target} could not be reached: {why}")
    sock, address, peer = connected
    if peer != address:
        sock.close()
        return Deny(Code.PEER_MISMATCH, f"{target} was dialled at {text_of(address)}, and something else answered")
    return sock, address


def _interleaved(addresses: tuple[Address, ...]) -> list[Address]:
    """Order the addresses: IPv6 first, then the families in turn, each in the answer's order (RFC 8305 section 4)."""
    six = [address for address in addresses if len(address) != IPV4_LENGTH]
    four = [address for address in addresses if len(address) == IPV4_LENGTH]
    ordered = []
    for at in range(max(len(six), len(four))):
        ordered += six[at : at + 1] + four[at : at + 1]
    return ordered


async def _attempt(poller: Poller, address: Address, port: int) -> _Attempted | OSError:
    try:
        family = socket.AF_INET if len(address) == IPV4_LENGTH else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as broken:
        return broken
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = await poller.connect(sock, (text_of(address), port), CONNECT_DEADLINE_S)
    except OSError as failed:
        sock.close()
        return failed
    except BaseException:
        sock.close()
        raise
    return sock, address, parse_address(peer)


async def _race(poller: Poller, addresses: list[Address], port: int) -> _Attempted | OSError:
    attempts: list[asyncio.Task[_Attempted | OSError]] = []
    winner: _Attempted | None = None
    last: OSError = OSError()
    try:
        async with asyncio.TaskGroup() as group:
            waiting = iter(addresses)
            pending: set[asyncio.Task[_Attempted | OSError]] = set()
            while winner is None:
                address = next(waiting, None)
                if address is not None:
                    attempts.append(group.create_task(_attempt(poller, address, port)))
                    pending.add(attempts[-1])
                elif not pending:
                    break
                done, pending = await asyncio.wait(
                    pending,
                    timeout=None if address is None else ATTEMPT_DELAY_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for attempt in done:
                    result = attempt.result()
                    if isinstance(result, OSError):
                        last = result
                    else:
                        winner = winner or result
            for attempt in pending:
                attempt.cancel()
    finally:
        _close_losers(attempts, winner)
    return last if winner is None else winner


def _close_losers(attempts: list[asyncio.Task[_Attempted | OSError]], winner: _Attempted | None) -> None:
    for attempt in attempts:
        if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
            result = attempt.result()
            if not isinstance(result, OSError) and result is not winner:
                result[0].close()
