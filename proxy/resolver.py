"""Owns looking names up: a stub resolver against the servers of the policy; decides nothing about what they answer.

Absolute names only: no search list, no hosts file, no environment, no thread. Each question has an id of its own; the
questions for a name's two families share a socket, and so a random port, connected to the one server that may answer.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from proxy.dns_message import Answer, Failure, RecordType
from proxy.question import Asking, Question, exchange

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.address import Address
    from proxy.poller import Poller
    from proxy.question import Server

TOTAL_DEADLINE_S = 4.5
ATTEMPT_S = 1.5
OTHER_FAMILY_S = 1.0
"""How long the other family is waited for once one has addresses."""

MAX_TTL_S = 60
MAX_CACHED = 512
_WORST_FIRST = (Failure.NXDOMAIN, Failure.SERVFAIL, Failure.MALFORMED, Failure.TIMEOUT, Failure.EMPTY)
_BOTH = (RecordType.AAAA, RecordType.A)

Found = tuple["Address", ...] | Failure
"""Every address of both families, in the order in which they are to be preferred."""


class Resolver:
    """Looks names up for one proxy. Lookups of the same name at the same time are one."""

    __slots__ = ("_cache", "_running", "good", "poller", "servers")

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.servers: tuple[Server, ...] = ()
        self.good = 0
        """Which server answered last."""
        self._cache: dict[str, tuple[float, tuple[Address, ...]]] = {}
        self._running: dict[str, Lookup] = {}

    def configure(self, servers: tuple[Server, ...]) -> None:
        """Take the servers of a new generation and forget every answer: none outlives a generation."""
        self.servers = servers
        self.good = 0
        self._cache = {}
        self._running = {}

    def known(self, host: str) -> tuple[Address, ...] | None:
        """Give what was answered a while ago and still counts."""
        cached = self._cache.get(host)
        return cached[1] if cached is not None and monotonic() < cached[0] else None

    def ask(self, host: str, waiting: Callable[[Found], None]) -> Lookup:
        """Look a name up; `waiting` is told what was found."""
        lookup = self._running.get(host)
        if lookup is None:
            lookup = self._running[host] = Lookup(self, host, self._cache, self._running)
            lookup.join(waiting)
            lookup.start()
        else:
            lookup.join(waiting)
        return lookup


class Lookup:
    """One name that is being looked up; `cache` and `running` are those of the generation that it began in."""

    __slots__ = (
        *("_cache", "_end", "_failures", "_found", "_host", "_questions", "_resolver", "_running", "_servers"),
        *("_streams", "_timer", "_waiting"),
    )

    def __init__(
        self,
        resolver: Resolver,
        host: str,
        cache: dict[str, tuple[float, tuple[Address, ...]]],
        running: dict[str, Lookup],
    ) -> None:
        self._resolver = resolver
        self._host = host
        self._cache = cache
        self._running = running
        self._servers = resolver.servers
        self._end = monotonic() + TOTAL_DEADLINE_S
        self._waiting: list[Callable[[Found], None]] = []
        self._questions: list[Question] = []
        self._streams: list[asyncio.Task[None]] = []
        self._found: dict[RecordType, Answer | Failure] = {}
        self._failures: dict[RecordType, Failure] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, waiting: Callable[[Found], None]) -> None:
        """Tell one more of what is found."""
        self._waiting.append(waiting)

    def leave(self, waiting: Callable[[Found], None]) -> None:
        """Tell one less; nothing more is asked for nobody."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            if not self._waiting:
                self._stop()

    def start(self) -> None:
        """Ask for both families."""
        if self._servers:
            self._ask(_BOTH, 0)
        else:
            self._found = dict.fromkeys(_BOTH, Failure.SERVFAIL)
            self._resolver.poller.loop.call_soon(self._finish)

    def _ask(self, kinds: tuple[RecordType, ...], attempt: int) -> None:
        """Ask one server after the other, each for a while; a server that fails is not the last word."""
        poller = self._resolver.poller
        left = min(ATTEMPT_S, self._end - monotonic())
        if left <= 0 or attempt >= max(len(self._servers), int(TOTAL_DEADLINE_S / ATTEMPT_S)):
            for kind in kinds:
                self._settle(kind, self._failures.get(kind, Failure.TIMEOUT))
            return
        server = self._servers[(self._resolver.good + attempt) % len(self._servers)]
        asking = Asking(poller=poller, server=server, host=self._host, kinds=kinds, limit_s=left)
        question = Question(self, asking, attempt)
        self._questions.append(question)
        question.start()

    def ended(self, question: Question) -> None:
        """Forget a question that is closed."""
        self._questions.remove(question)

    def timed_out(self, kinds: tuple[RecordType, ...], attempt: int) -> None:
        """Go on with the next server."""
        self._ask(kinds, attempt + 1)

    def answered(self, kind: RecordType, result: Answer | Failure, server: Server, attempt: int) -> None:
        """Take what one server says."""
        if isinstance(result, Answer) or result in (Failure.NXDOMAIN, Failure.EMPTY):
            if self._servers is self._resolver.servers:
                self._resolver.good = self._servers.index(server)
            self._settle(kind, result)
            return
        if result is not Failure.TIMEOUT:
            self._failures[kind] = result
            if attempt + 1 >= len(self._servers):
                self._settle(kind, result)
                return
        self._ask((kind,), attempt + 1)

    def truncated(self, kind: RecordType, server: Server, attempt: int, limit_s: float) -> None:
        """Ask the same server over TCP."""
        asking = self._by_stream(kind, server, attempt, limit_s)
        self._streams.append(self._resolver.poller.loop.create_task(asking))

    async def _by_stream(self, kind: RecordType, server: Server, attempt: int, limit_s: float) -> None:
        result: Answer | Failure
        try:
            async with asyncio.timeout(limit_s):
                result = await exchange(self._resolver.poller, server, self._host, kind)
        except TimeoutError:
            result = Failure.TIMEOUT
        except OSError:
            result = Failure.SERVFAIL
        self.answered(kind, result, server, attempt)

    def _settle(self, kind: RecordType, result: Answer | Failure) -> None:
        self._found[kind] = result
        if len(self._found) == len(_BOTH):
            self._finish()
        elif isinstance(result, Answer):
            self._timer = self._resolver.poller.loop.call_later(OTHER_FAMILY_S, self._finish)

    def _finish(self) -> None:
        self._stop()
        found = self._result()
        while self._waiting:
            self._waiting.pop(0)(found)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for question in tuple(self._questions):
            question.close()
        for stream in self._streams:
            stream.cancel()
        if self._running.get(self._host) is self:
            del self._running[self._host]

    def _result(self) -> Found:
        answers = [self._found.get(kind, Failure.TIMEOUT) for kind in _BOTH]
        good = [answer for answer in answers if isinstance(answer, Answer)]
        if not good:
            return next(failure for failure in _WORST_FIRST if failure in answers)
        addresses = tuple(address for answer in good for address in answer.addresses)
        ttl = min(MAX_TTL_S, *(answer.ttl for answer in good))
        if ttl > 0:
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            # it may be a forgotten generation's by now, and then this is forgotten too
            self._cache[self._host] = monotonic() + ttl, addresses
        return addresses
