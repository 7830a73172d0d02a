"""Owns looking names up: a stub resolver against the servers of the policy; decides nothing about what they answer.

Absolute names only: no search list, no hosts file, no environment, no thread. Each question has an id, a socket and so
a port of its own, connected to the one server that may answer it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from proxy.dns_message import Answer, Failure, NotOurs, RecordType, Truncated, parse, query

if TYPE_CHECKING:
    from proxy.address import Address
    from proxy.decision import Resolve
    from proxy.stream import Poller

TOTAL_DEADLINE_S = 4.5
ATTEMPT_S = 1.5
OTHER_FAMILY_S = 1.0
"""How long the other family is waited for once one has addresses."""

MAX_TTL_S = 60
MAX_CACHED = 512
_MAX_STRAY = 64
_MAX_DATAGRAM = 4096
_WORST_FIRST = (Failure.NXDOMAIN, Failure.SERVFAIL, Failure.MALFORMED, Failure.TIMEOUT, Failure.EMPTY)

Server = tuple[str, int]


class Resolver:
    """Looks names up for one proxy. Lookups of the same name at the same time are one."""

    __slots__ = ("_cache", "_good", "_poller", "_running", "_servers", "_tasks")

    def __init__(self, tasks: asyncio.TaskGroup, poller: Poller) -> None:
        self._tasks = tasks
        self._poller = poller
        self._servers: tuple[Server, ...] = ()
        self._good = 0
        self._cache: dict[str, tuple[float, tuple[Address, ...]]] = {}
        self._running: dict[str, asyncio.Task[tuple[Address, ...] | Failure]] = {}

    def configure(self, servers: tuple[Server, ...]) -> None:
        """Take the servers of a new generation and forget every answer: none outlives a generation."""
        self._servers = servers
        self._good = 0
        self._cache = {}
        self._running = {}

    async def lookup(self, allowed: Resolve) -> tuple[Address, ...] | Failure:
        """Look a name up: every address of both families, in the order in which they are to be preferred."""
        host = allowed.target.host
        cached = self._cache.get(host)
        if cached is not None and self._poller.loop.time() < cached[0]:
            return cached[1]
        task = self._running.get(host)
        if task is None:
            task = self._running[host] = self._tasks.create_task(self._run(host))
        # One asker that leaves must not take the answer from the others.
        return await asyncio.shield(task)

    async def _run(self, host: str) -> tuple[Address, ...] | Failure:
        cache, running = self._cache, self._running
        try:
            answers = await self._both(host)
        finally:
            running.pop(host, None)
        found = [answer for answer in answers if isinstance(answer, Answer)]
        if not found:
            return next(failure for failure in _WORST_FIRST if failure in answers)
        addresses = tuple(address for answer in found for address in answer.addresses)
        ttl = min(MAX_TTL_S, *(answer.ttl for answer in found))
        if ttl > 0:
            if len(cache) >= MAX_CACHED:
                del cache[next(iter(cache))]
            # `cache` may be a forgotten generation's by now, and then this is forgotten too
            cache[host] = self._poller.loop.time() + ttl, addresses
        return addresses

    async def _both(self, host: str) -> list[Answer | Failure]:
        """Ask for both families side by side; each keeps the total deadline."""
        create = self._poller.loop.create_task
        asked = [create(self._ask(host, kind)) for kind in (RecordType.AAAA, RecordType.A)]
        try:
            done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                has_some = any(isinstance(task.result(), Answer) for task in done)
                await asyncio.wait(asked, timeout=OTHER_FAMILY_S if has_some else None)
            return [task.result() if task.done() else Failure.TIMEOUT for task in asked]
        finally:
            for task in asked:
                task.cancel()

    async def _ask(self, host: str, kind: RecordType) -> Answer | Failure:
        """Ask one server after the other, each for a while; a server that fails is not the last word."""
        failure = Failure.TIMEOUT
        servers = self._servers
        if not servers:
            return Failure.SERVFAIL
        now = self._poller.loop.time
        end = now() + TOTAL_DEADLINE_S
        for attempt in range(max(len(servers), int(TOTAL_DEADLINE_S / ATTEMPT_S))):
            left = min(ATTEMPT_S, end - now())
            if left <= 0:
                break
            at = (self._good + attempt) % len(servers)
            result = await self._exchange(servers[at], host, kind, left)
            if isinstance(result, Answer) or result in (Failure.NXDOMAIN, Failure.EMPTY):
                if servers is self._servers:
                    self._good = at
                return result
            if result is not Failure.TIMEOUT:
                failure = result
                if attempt + 1 >= len(servers):
                    break
        return failure

    async def _exchange(self, server: Server, host: str, kind: RecordType, limit_s: float) -> Answer | Failure:
        identity = int.from_bytes(os.urandom(2), "big")
        try:
            result = await _by_datagram(self._poller, server, identity, host, kind, limit_s=limit_s)
            if isinstance(result, Truncated):
                async with asyncio.timeout(limit_s):
                    return await _by_stream(self._poller, server, identity, host, kind)
        except TimeoutError:
            return Failure.TIMEOUT
        except OSError:
            return Failure.SERVFAIL
        return result


def _socket(server: Server, kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


async def _by_datagram(
    poller: Poller, server: Server, identity: int, host: str, kind: RecordType, *, limit_s: float
) -> Answer | Failure | Truncated:
    """Ask over UDP. Raises OSError where the server's host refuses."""
    end = poller.loop.time() + limit_s
    with _socket(server, socket.SOCK_DGRAM) as sock:
        sock.connect(server)
        sock.send(query(identity, host, kind))
        for _ in range(_MAX_STRAY):
            data = await poller.receive(sock, _MAX_DATAGRAM, end - poller.loop.time())
            if data is None:
                return Failure.TIMEOUT
            result = parse(data, identity, host, kind)
            if not isinstance(result, NotOurs):
                return result
    return Failure.MALFORMED


async def _by_stream(poller: Poller, server: Server, identity: int, host: str, kind: RecordType) -> Answer | Failure:
    """Ask over TCP (RFC 7766): each message has its length before it. Raises OSError where the connection breaks."""
    question = query(identity, host, kind)
    with _socket(server, socket.SOCK_STREAM) as sock:
        await poller.connect(sock, server, ATTEMPT_S)
        # it always fits into an empty send buffer
        sock.send(len(question).to_bytes(2, "big") + question)
        data = await _read_exactly(poller, sock, int.from_bytes(await _read_exactly(poller, sock, 2), "big"))
    result = parse(data, identity, host, kind)
    return Failure.MALFORMED if isinstance(result, NotOurs | Truncated) else result


async def _read_exactly(poller: Poller, sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises ConnectionError where the stream ends before."""
    data = b""
    while len(data) < size:
        more = await poller.receive(sock, size - len(data), ATTEMPT_S)
        if not more:
            raise ConnectionError("the server closed the stream in the middle of an answer")
        data += more
    return data
