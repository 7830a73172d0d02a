"""Owns what is known of one live proxy from the lines that it writes, wherever it runs; reads from no pipe itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio

from proxy.record import Record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer

ACKNOWLEDGE_S = 5.0
"""How long a live proxy may take to acknowledge a newer generation."""
LONGEST_LINE = 64 * 1024


class ProxyLines:
    """One proxy's side of the conversation. Whoever reads its output gives each line to `take`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._last: int | None = None
        self._news = anyio.Event()
        self._accepted = -1
        self._refused: str | None = None
        self._kept = b""
        self.ready = False
        self.ended = anyio.Event()
        """Set by `end`, once nothing more will come."""
        self.canary_arrivals: list[str] = []
        self.resolvers: tuple[tuple[str, int], ...] = ()
        """The DNS servers that it found by itself, where its policy named none."""

    def feed(self, data: bytes) -> bool:
        """Take in bytes as they come; False when what they hold is nothing that a proxy may write."""
        *lines, self._kept = (self._kept + data).split(b"\n")
        return len(self._kept) <= LONGEST_LINE and all(self.take(line) for line in lines)

    def take(self, line: bytes) -> bool:
        """Take in one line; False when it is none that a proxy may write."""
        try:
            said = json.loads(line)
        except ValueError:
            return False
        match said:
            case {"kind": "decision"}:
                record = Record.parse(said)
                if record is None:
                    return False
                self._observer.decision(record)
            case {"kind": "ready", "generation": int(generation)}:
                self._accepted = generation
                self.ready = True
                self.resolvers = _endpoints(said.get("resolvers"))
            case {"kind": "policy", "accepted": True, "generation": int(generation)}:
                self._accepted = max(self._accepted, generation)
            case {"kind": "policy", "accepted": False}:
                self._refused = str(said.get("message"))
            case {"kind": "canary", "peer": str(peer)}:
                self.canary_arrivals.append(peer)
            case {"kind": "stopped", "seq": int(last)}:
                self._last = last
            case _:
                return False
        self._wake()
        return True

    def end(self) -> None:
        """Note that nothing more will come."""
        if not self.ended.is_set():
            self._observer.decisions_end(self._last)
        self.ended.set()
        self._wake()

    async def until_ready(self, limit: float) -> bool:
        """Wait until it listens with its first policy; False when it ended or took more than `limit` seconds."""
        with anyio.move_on_after(limit):
            while not (self.ready or self.ended.is_set()):
                await self._news.wait()
        return self.ready

    async def update(self, policy: ProxyPolicy, send: Callable[[ProxyPolicy], Awaitable[bool]]) -> bool:
        """Hand over a newer generation by `send`; False when it is not acknowledged in time, or is not accepted."""
        if policy.generation <= self._accepted:
            return False
        self._refused = None
        with anyio.move_on_after(ACKNOWLEDGE_S):
            if not await send(policy):
                return False
            while self._is_silent_about(policy.generation):
                await self._news.wait()
        return self._accepted >= policy.generation

    def _is_silent_about(self, generation: int) -> bool:
        return self._accepted < generation and self._refused is None and not self.ended.is_set()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()


def _endpoints(said: object) -> tuple[tuple[str, int], ...]:
    """Read `[["10.96.0.10", 53], ...]`; whatever else is there is left out."""
    found = []
    for each in said if isinstance(said, list) else ():
        match each:
            case [str(address), int(port)]:
                found.append((address, port))
            case _:
                continue
    return tuple(found)
