"""Owns the way out for decisions: sequence numbers, coalescing, a bounded queue of lines; decides nothing.

Writing never blocks the loop. A line that finds no room is lost, and its sequence number shows that.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, NamedTuple

from proxy.decision import Code
from proxy.record import Form, Verdict, printable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.decision import Deny, Target

MAX_QUEUED = 1 << 20
"""Bytes of lines that may wait for the reader."""

RESERVED = 1 << 16
"""Bytes below the bound from which on nothing more is allowed, so that there is room to say what is refused."""

WINDOW_S = 1.0
MAX_COALESCED = 1024
MAX_WRITE = 1 << 16


class _Told(NamedTuple):
    """What makes two decisions the same."""

    verdict: Verdict
    code: Code
    layer: str | None
    method: str
    host: str
    port: int | None
    message: str


class LineSink:
    """Lines into a descriptor, in order, gathered so that one turn of the loop costs one write."""

    __slots__ = ("_fd", "_loop", "_on_broken", "_queue", "_scheduled", "_waiting", "broken")

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, on_broken: Callable[[], None]) -> None:
        self._fd = fd
        self._loop = loop
        self._on_broken = on_broken
        self._queue = bytearray()
        self._scheduled = False
        self._waiting = False
        self.broken = False
        os.set_blocking(fd, False)

    @property
    def crowded(self) -> bool:
        """Say whether too much waits for anything more to be allowed."""
        return self.broken or len(self._queue) > MAX_QUEUED - RESERVED

    def put(self, line: bytes) -> None:
        """Queue one line; it is lost where there is no room."""
        if self.broken or len(self._queue) + len(line) > MAX_QUEUED:
            return
        self._queue += line
        if not self._scheduled and not self._waiting:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._write():
            if not self._waiting:
                self._waiting = True
                self._loop.add_writer(self._fd, self._flush)
        elif self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._fd)

    def _write(self) -> bool:
        """Write what the reader takes; True when nothing is left to wait for."""
        try:
            while self._queue:
                del self._queue[: os.write(self._fd, self._queue[:MAX_WRITE])]
        except BlockingIOError:
            return False
        except OSError:
            self.broken = True
            self._queue.clear()
            self._on_broken()
        return True

    def close(self, deadline_s: float) -> None:
        """Write the rest, waiting at most this long for the reader; no loop runs any more."""
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._fd)
        while not self._write() and select.select([], [self._fd], [], deadline_s)[1]:
            pass
        os.set_blocking(self._fd, True)


class Decisions:
    """Every decision of one proxy, numbered, as lines. Identical denials: the first at once, then a count a window."""

    __slots__ = ("_clock", "_forms", "_generation", "_repeated", "_run", "_seq", "_sink")

    def __init__(self, sink: LineSink, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._run = ""
        self._generation = 0
        self._seq = 0
        self._repeated: dict[_Told, int] = {}
        self._forms: dict[_Told, Form] = {}
        """What was said in this generation, written but for what differs each time."""

    def configure(self, run: str, generation: int) -> None:
        """Take a new generation; what was counted belongs to the old one."""
        self.flush()
        self._run = run
        self._generation = generation
        self._forms = {}

    @property
    def crowded(self) -> bool:
        """Say whether there is no room for the evidence of another allow."""
        return self._sink.crowded

    @property
    def last(self) -> int:
        """The number of the last decision, written or lost; 0 before the first."""
        return self._seq

    def allow(self, target: Target, *, method: str, address: str) -> None:
        """Write an allow."""
        self._write(_Told(Verdict.ALLOW, Code.ALLOWED, None, method, target.host, target.port, ""), address)

    def deny(self, deny: Deny, *, method: str, host: str, port: int | None, address: str | None = None) -> None:
        """Write a denial, or count it where the same one was just written."""
        told = _Told(Verdict.DENY, deny.code, deny.layer, method, host, port, deny.message)
        count = self._repeated.get(told)
        if count is not None:
            self._repeated[told] = count + 1
            return
        if len(self._repeated) < MAX_COALESCED:
            self._repeated[told] = 0
        self._write(told, address)

    def flush(self) -> None:
        """End the window: write how often each denial was repeated within it."""
        repeated, self._repeated = self._repeated, {}
        for told, count in repeated.items():
            if count:
                self._write(told, None, count)

    def _write(self, told: _Told, address: str | None, count: int = 1) -> None:
        self._seq += 1
        form = self._forms.get(told)
        if form is None:
            form = Form(
                run=self._run,
                generation=self._generation,
                verdict=told.verdict,
                code=told.code,
                layer=told.layer,
                method=printable(told.method),
                host=printable(told.host),
                port=told.port,
                message=printable(told.message),
            )
            if len(self._forms) < MAX_COALESCED:
                self._forms[told] = form
        self._sink.put(form.line(seq=self._seq, time=round(self._clock(), 3), address=address, count=count))
