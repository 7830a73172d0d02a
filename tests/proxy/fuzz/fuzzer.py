"""Owns making inputs: mutations of a corpus, kept where they reach a line after a line that none did before."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tests.proxy.examples import DATA
from tests.proxy.fuzz.targets import MODULES, TARGETS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from types import FrameType

CORPUS: Final = DATA / "corpus"
LARGEST: Final = 20_000
SLOWEST_S: Final = 0.5
"""Processor seconds that one input may take, traced, which is a hundred times more than any does."""

_WORDS: Final = (
    *(b"\r\n\r\n", b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"@", b"%", b"[", b"]", b".."),
    *(b"HTTP/1.1", b"HTTP/1.0", b"CONNECT ", b"GET ", b"http://", b"example.com", b"example.com:443", b"Host: "),
    *(b"Content-Length: 5", b"Connection: close", b"Transfer-Encoding: chunked", b"chunked", b"0x7f", b"127.0.0.1"),
    *(b"::1", b"0\r\n\r\n", b"5\r\nhello\r\n", b"\xc0\x0c", b"\x00\x01\x00\x01", b"\x00\x05\x00\x01"),
    *(b"\x00\x1c\x00\x01", b"\x16\x03\x01", b"\x01\x00", b"\xff\xff", b"\x00\x00"),
)


class Lines(Protocol):
    """What the interpreter calls for each line."""

    def __call__(self, frame: FrameType, event: str, arg: object, /) -> Lines | None: ...


class FoundError(Exception):
    """An input that breaks a promise; `data` is it."""

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(f"{name}: {data!r}")
        self.data = data


@dataclass(slots=True)
class Fuzzer:
    """One target's run. `corpus` grows by inputs that lead somewhere new."""

    name: str
    random: random.Random
    corpus: list[bytes] = field(default_factory=list)
    tried: int = 0
    _check: Callable[[bytes], None] = field(init=False)
    _seen: set[tuple[str, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._check = TARGETS[self.name]
        for path in sorted((CORPUS / self.name).glob("*")):
            self.consider(path.read_bytes())

    def run(self, seconds: float) -> None:
        """Try inputs for this long. Raises FoundError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(50):
                data = self._next()
                # tracing costs ten times the run: most inputs are only run
                if self.random.random() < 0.3:
                    self.consider(data)
                else:
                    self._try(data)

    def consider(self, data: bytes) -> None:
        """Run one input and keep it where it leads somewhere new. Raises FoundError."""
        new: set[tuple[str, int, int]] = set()

        def trace(frame: FrameType, event: str, _: object) -> Lines | None:
            path = Path(frame.f_code.co_filename)
            if event != "call" or path.parent.name != "proxy" or path.stem not in MODULES:
                return None
            last = 0

            def lines(frame: FrameType, event: str, _: object) -> Lines:
                nonlocal last
                if event == "line":
                    step = (frame.f_code.co_filename, last, frame.f_lineno)
                    last = frame.f_lineno
                    if step not in self._seen:
                        new.add(step)
                return lines

            return lines

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            self._try(data)
        finally:
            sys.settrace(before)
        if new:
            self._seen |= new
            self.corpus.append(data)

    def _try(self, data: bytes) -> None:
        self.tried += 1
        start = time.thread_time()
        try:
            self._check(data)
        except Exception as broken:
            raise FoundError(self.name, data) from broken
        if time.thread_time() - start > SLOWEST_S:
            raise FoundError(f"{self.name}, too slow", data)

    def _next(self) -> bytes:
        chance = self.random
        data = bytearray(chance.choice(self.corpus) if self.corpus else b"")
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randint(0, len(data))
            end = min(len(data), at + chance.choice((1, 1, 2, 4, 16, 200)))
            match chance.randrange(8):
                case 0:
                    data[at:at] = chance.choice(_WORDS)
                case 1:
                    data[at:end] = chance.choice(_WORDS)
                case 2:
                    del data[at:end]
                case 3:
                    data[at:at] = data[at:end] * chance.choice((1, 2, 50))
                case 4:
                    data[at:end] = chance.randbytes(end - at)
                case 5 if data:
                    data[at % len(data)] ^= 1 << chance.randrange(8)
                case 6 if self.corpus:
                    other = chance.choice(self.corpus)
                    data[at:] = other[chance.randint(0, len(other)) :]
                case _:
                    data[at:at] = chance.randbytes(chance.choice((1, 2, 8)))
        return bytes(data[:LARGEST])

    def save(self) -> int:
        """Write what was kept and is not there yet; how many that was."""
        place = CORPUS / self.name
        place.mkdir(parents=True, exist_ok=True)
        written = 0
        for data in self.corpus:
            path = place / hashlib.sha256(data).hexdigest()[:16]
            if not path.exists():
                path.write_bytes(data)
                written += 1
        return written
