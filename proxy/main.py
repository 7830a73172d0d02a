"""Owns the proxy's process: its arguments, policies in, lines out, its end. Decides nothing."""

from __future__ import annotations

import proxy.lean  # before anything that would take OpenSSL along

# isort: split
import argparse
import asyncio
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.address import parse_address, text_of
from proxy.canary import Canary
from proxy.entry import parse_port
from proxy.feed import NoListener, PolicyFeed, PolicyFile, nameservers, receive_listener
from proxy.interfaces import Interfaces
from proxy.policy import BadPolicy, ProxyPolicy, parse
from proxy.privileges import drop
from proxy.server import SWEEP_S, Server
from proxy.sink import WINDOW_S, Decisions, LineSink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE = 64
UNUSABLE = 2
DRAIN_S = 5.0
FLUSH_S = 2.0
MAX_REPORTS = 20
STDIN, STDOUT = 0, 1


class Stopped(StrEnum):
    """Why the proxy ended, for its last line."""

    EXPIRED = "expired"
    EOF = "eof"
    SIGTERM = "sigterm"
    SINK_FAILED = "sink_failed"


class _EndedError(Exception):
    """Ends the task group and everything in it; never leaves `_run`."""


class Process:
    """One proxy process, from its first policy to its last line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Stopped] = self._loop.create_future()
        self._sink = LineSink(STDOUT, self._loop, lambda: self._stop(Stopped.SINK_FAILED))
        self._decisions = Decisions(self._sink, time.time)
        self._feed: PolicyFeed | PolicyFile = (
            PolicyFeed(STDIN, self._loop, lambda: self._stop(Stopped.EOF))
            if options.policy is None
            else PolicyFile(options.policy)
        )
        self._interfaces = Interfaces()
        self._server: Server | None = None
        self._failure: str | None = None
        self._swept = 0
        self._reports = 0

    async def run(self) -> int:
        """Serve until something ends it; the exit status is 0, or 2 when it never served."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, Stopped.SIGTERM)
        self._loop.set_exception_handler(self._caught)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve())
                await self._until_end()
        except* _EndedError:
            pass
        self._feed.close()
        self._interfaces.close()
        self._sink.close(FLUSH_S)
        if self._server is None:
            sys.stderr.write(f"ringfence-proxy: {self._failure or 'no policy came'}\n")
            return UNUSABLE
        return 1 if self._sink.broken else 0

    async def _serve(self) -> None:
        first = await self._policy()
        if isinstance(first, BadPolicy):
            self._fail(f"unusable policy: {first.message}")
            return
        if time.time() >= first.expires_at:
            self._fail("unusable policy: it has expired")
            return
        listener = await self._listener()
        if isinstance(listener, NoListener):
            self._fail(listener.message)
            return
        server = Server(first, self._decisions, self._interfaces, self._report)
        address = listener.getsockname()
        if first.canary is not None:
            canary = socket.create_server((address[0], first.canary), family=listener.family)
            await self._loop.create_server(lambda: Canary(self._arrived), sock=canary)
        server.listen(listener)
        self._server = server
        ready = {"kind": "ready", "listen": _shown(address), "generation": first.generation, "pid": os.getpid()}
        if self._options.resolv_conf is not None:
            # Nobody outside knows which servers this machine was given.
            ready["resolvers"] = [list(each) for each in first.resolvers]
        self._line(ready)
        self._sweep()
        while True:
            self._replace(server, await self._policy())

    async def _policy(self) -> ProxyPolicy | BadPolicy:
        """Wait for the next policy; one that names no DNS server is given those of this machine's own file."""
        policy = parse(await self._feed.line())
        if isinstance(policy, BadPolicy) or policy.resolvers or self._options.resolv_conf is None:
            return policy
        return replace(policy, resolvers=nameservers(self._options.resolv_conf))

    async def _listener(self) -> socket.socket | NoListener:
        if self._options.receive_listener is not None:
            return await receive_listener(self._options.receive_listener)
        host, port = self._options.listen
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as failed:
            return NoListener(f"cannot listen on {_shown((host, port))}: {failed.strerror}")

    def _replace(self, server: Server, policy: ProxyPolicy | BadPolicy) -> None:
        """Make a newer policy count, or say why it does not."""
        old = server.policy
        message = None
        if isinstance(policy, BadPolicy):
            message = policy.message
        elif policy.run != old.run:
            message = "it is another run's"
        elif policy.generation <= old.generation:
            message = f"generation {policy.generation} is not newer than {old.generation}"
        elif policy.canary != old.canary:
            message = "the canary port cannot change while the proxy runs"
        else:
            server.replace(policy)
            self._line({"kind": "policy", "generation": policy.generation, "accepted": True})
            return
        self._line({"kind": "policy", "accepted": False, "message": message})

    def _sweep(self) -> None:
        """Look at every deadline, the policy's own among them, and come back soon."""
        server = self._server
        if server is None or self._end.done():
            return
        if time.time() >= server.policy.expires_at:
            self._stop(Stopped.EXPIRED)
            return
        server.sweep()
        self._swept += 1
        if self._swept % round(WINDOW_S / SWEEP_S) == 0:
            self._decisions.flush()
        self._loop.call_later(SWEEP_S, self._sweep)

    async def _until_end(self) -> None:
        """Wait for the end, close everything, and raise `_EndedError`."""
        stopped = await self._end
        if self._server is not None:
            await self._close(self._server, stopped)
        raise _EndedError

    async def _close(self, server: Server, stopped: Stopped) -> None:
        if stopped is Stopped.SIGTERM:
            await server.drain(DRAIN_S)
        else:
            server.close()
        # what was closed just now is still to be told
        await asyncio.sleep(0)
        self._decisions.flush()
        self._line({"kind": "stopped", "code": stopped, "seq": self._decisions.last})

    def _caught(self, _: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        """Take what the loop caught. The connection that it happened on is closed by the loop."""
        broken = context.get("exception")
        self._report(broken if isinstance(broken, BaseException) else RuntimeError(context.get("message")))

    def _report(self, broken: BaseException) -> None:
        """Say on stderr where the proxy itself failed, but not for ever: nobody may be reading.

        The exception's own text is left out, because it may hold what came over the wire.
        """
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            traceback.print_tb(broken.__traceback__, file=sys.stderr)
            sys.stderr.write(f"ringfence-proxy: {type(broken).__name__}\n")

    def _arrived(self, peer: str) -> None:
        self._line({"kind": "canary", "peer": peer})

    def _line(self, fields: Mapping[str, object]) -> None:
        self._sink.put(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")

    def _fail(self, message: str) -> None:
        self._failure = message
        self._stop(Stopped.EOF)

    def _stop(self, code: Stopped) -> None:
        if not self._end.done():
            self._end.set_result(code)


def _shown(address: Sequence[object]) -> str:
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _endpoint(text: str) -> tuple[str, int]:
    """Read `ADDR:PORT`; port 0 is any free one. Raises ArgumentTypeError."""
    name, _, port_text = text.rpartition(":")
    bracketed = name.startswith("[") and name.endswith("]")
    address = parse_address(name[1:-1] if bracketed else name)
    port = 0 if port_text == "0" else parse_port(port_text)
    if address is None or port is None or bracketed != (":" in name):
        raise argparse.ArgumentTypeError("write an address and a port, such as 127.0.0.1:3128 or [::1]:3128")
    return text_of(address), port


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override] # ends the process like its parent, with our status
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="ringfence-proxy",
        allow_abbrev=False,
        description="One sandbox's egress proxy: policies on stdin or in a file, decisions on stdout, as JSON lines.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--listen", type=_endpoint, metavar="ADDR:PORT", help="listen here")
    source.add_argument("--receive-listener", type=int, metavar="FD", help="receive the listening socket over this one")
    parser.add_argument("--policy", metavar="FILE", help="read policies from this file, which is replaced for each")
    parser.add_argument("--resolv-conf", metavar="FILE", help="ask its DNS servers where a policy names none")
    parser.add_argument("--user", metavar="NAME_OR_UID", help="give up root and become this user first")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="which event loop")
    return parser.parse_args(arguments)


async def _run(options: argparse.Namespace) -> int:
    return await Process(options).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy: the console script `ringfence-proxy`. Status 0 after serving, 2 unusable input, 64 usage."""
    if getattr(proxy, "OWNER", None) != "ringfence":
        sys.stderr.write("ringfence-proxy: another package called 'proxy' is installed over ringfence's own\n")
        return UNUSABLE
    options = _options(arguments)
    factory = None
    if options.loop == "uvloop":
        try:
            # an extra, and imported before root is given up
            factory = importlib.import_module("uvloop").new_event_loop
            # it asks for this codec even for an address; without root the standard library may be out of reach
            importlib.import_module("encodings.idna")
        except ImportError:
            sys.stderr.write("ringfence-proxy: uvloop is not installed\n")
            return USAGE
    if options.user is not None:
        message = drop(options.user)
        if message is not None:
            sys.stderr.write(f"ringfence-proxy: {message}\n")
            return USAGE
    gc.freeze()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_run(options))
