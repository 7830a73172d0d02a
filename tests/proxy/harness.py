"""Owns a real proxy process in the rig's host namespace, and a client that speaks bytes; judges neither."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from proxy.record import Record
from tests.proxy.examples import policy

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from proxy.policy import ProxyPolicy
    from tests.rig import Rig

PROGRAM = str(Path(sys.executable).with_name("ringfence-proxy"))
ADDRESS = "127.0.0.1"
LOOPS = ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)
"""The event loops that are installed: what holds on one must hold on the other."""

QUIET_S = 0.15
"""How long nothing more must come for what was read to be all."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response as the client saw it; header names in lower case."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What the rig's origin says it received."""
        return json.loads(self.body)


@dataclass(slots=True)
class Client:
    """One connection to the proxy."""

    sock: socket.socket
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send everything."""
        self.sock.sendall(data)

    def more(self, timeout_s: float = 5.0) -> bool:
        """Wait for more bytes or the end; False when neither came. A reset counts as the end."""
        self.sock.settimeout(timeout_s)
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionError:
            data = b""
        self.data += data
        self.ended = self.ended or not data
        return True

    def until(self, wanted: Callable[[bytes], bool], timeout_s: float = 5.0) -> bytes:
        """Read until what came is as wanted, it ends, or the time is over; what came."""
        end = time.monotonic() + timeout_s
        while not self.ended and not wanted(bytes(self.data)) and (left := end - time.monotonic()) > 0:
            self.more(left)
        return bytes(self.data)

    def head(self, timeout_s: float = 5.0) -> Response:
        """Read one head, and leave what follows it in `data`."""
        self.until(lambda data: b"\r\n\r\n" in data, timeout_s)
        head, found, rest = bytes(self.data).partition(b"\r\n\r\n")
        assert found, f"no whole head came, but {bytes(self.data)!r}"
        self.data[:] = rest
        line, *fields = head.decode("latin-1").split("\r\n")
        _, status, reason = line.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in fields)}
        return Response(int(status), reason, headers, b"")

    def response(self, timeout_s: float = 5.0) -> Response:
        """Read one response whose body has a length."""
        head = self.head(timeout_s)
        size = int(head.headers.get("content-length", "0"))
        self.until(lambda data: len(data) >= size, timeout_s)
        body = bytes(self.data[:size])
        del self.data[:size]
        return replace(head, body=body)

    def closes(self, timeout_s: float = 3.0) -> bool:
        """Say whether the proxy closes, sending nothing more."""
        self.until(lambda _: False, timeout_s)
        return self.ended and not self.data


class Proxy:
    """A running proxy; leaving the context ends its input and checks that it ends well."""

    def __init__(
        self,
        rig: Rig,
        first: ProxyPolicy | None = None,
        *,
        arguments: Sequence[str] = (),
        before: Sequence[str] = (),
        program: Sequence[str] = (PROGRAM,),
        port: int = 3128,
    ) -> None:
        self.rig = rig
        self.port = port
        self.policy = first or policy()
        self.process = rig.spawn(
            [*before, *program, "--listen", f"{ADDRESS}:{port}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        self.write(self.policy.to_json())
        self.line("ready", timeout_s=30)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join()
        words = self.process.stderr.read().decode()
        self.process.stderr.close()
        if kind is None:
            assert (status, words) == (0, "")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._changed:
                    self._lines.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def write(self, line: str) -> None:
        """Write one line to the proxy's input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def replace(self, **changes: Any) -> dict[str, Any]:
        """Send the next generation with these fields, and wait for its line."""
        self.policy = replace(self.policy, generation=self.policy.generation + 1, **changes)
        at = len(self.lines("policy"))
        self.write(self.policy.to_json())
        return self.line("policy", at)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Every line of this kind so far."""
        with self._changed:
            return [line for line in self._lines if line["kind"] == kind]

    def line(self, kind: str, at: int = 0, timeout_s: float = 8.0) -> dict[str, Any]:
        """Wait for a line of this kind: the first, or the one at this place."""
        with self._changed:
            done = self._changed.wait_for(lambda: sum(line["kind"] == kind for line in self._lines) > at, timeout_s)
        assert done, f"no {kind} line number {at} came"
        return self.lines(kind)[at]

    def decisions(self) -> list[Record]:
        """Every decision so far by the generation that was sent last."""
        parsed = [Record.parse(line) for line in self.lines("decision")]
        return [record for record in parsed if record is not None and record.generation == self.policy.generation]

    def decided(self, code: str, timeout_s: float = 8.0) -> Record:
        """Wait for a decision with this code; the last such."""

        def found() -> list[Record]:
            return [record for record in self.decisions() if record.code == code]

        end = time.monotonic() + timeout_s
        while not found() and time.monotonic() < end:
            time.sleep(0.01)
        assert found(), f"no decision {code}, but {[record.code for record in self.decisions()]}"
        return found()[-1]

    def connect(self) -> Client:
        """Open a connection to the proxy."""
        return Client(self.rig.connect(ADDRESS, self.port))

    def ask(self, data: bytes, timeout_s: float = 8.0) -> Response:
        """Send a request on a connection of its own; its response."""
        with self.connect() as client:
            client.send(data)
            return client.response(timeout_s)

    def tunnel(self, target: str) -> tuple[Client, Response]:
        """Ask for a tunnel; the connection and the answer."""
        client = self.connect()
        client.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        return client, client.head()

    def get(self, url: str, timeout_s: float = 8.0) -> Response:
        """Ask for a URL on a connection of its own; its response."""
        return self.ask(f"GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), timeout_s)
