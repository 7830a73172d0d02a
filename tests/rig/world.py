"""Owns the process that plays the internet: DNS server, origin, sniffer, control socket, and the end of the rig.

It ends when its standard input does, that is when its parent is gone in whatever way, and takes everything with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.rig import zone
from tests.rig.certificates import Authority
from tests.rig.dns_server import DnsServer
from tests.rig.network import Instance, remove
from tests.rig.origin import Mode, Origin
from tests.rig.sniffer import Sniffer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The services, and what the control socket may ask of them."""

    dns: DnsServer
    origin: Origin
    sniffer: Sniffer

    def obey(self, order: Mapping[str, object]) -> object:
        """Carry out one order, after all that had arrived before it; raises ValueError or its like on a bad one."""
        self.dns.drain()
        self.sniffer.drain()
        self.origin.drain()
        match order["do"]:
            case "queries":
                return self.dns.log
            case "arrivals":
                return self.origin.arrivals()
            case "packets":
                return self.sniffer.log
            case "names":
                return {name: answer.to_json() for name, answer in self.dns.zone.items()}
            case "set":
                answer = order["answer"]
                if not isinstance(answer, dict):
                    raise TypeError("answer is an object")
                self.dns.set(str(order["name"]), zone.from_json(answer))
            case "delete":
                del self.dns.zone[str(order["name"])]
            case "listen":
                self.origin.listen(int(str(order["port"])), Mode(str(order["mode"])))
            case "listen_udp":
                self.origin.listen_udp(int(str(order["port"])))
            case "clear":
                self._forget()
            case "reset":
                self.dns.reset()
                self.origin.reset()
                self._forget()
            case other:
                raise ValueError(f"no such order: {other}")
        return None

    def _forget(self) -> None:
        self.dns.forget()
        self.origin.forget()
        self.sniffer.log.clear()

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer orders, one JSON object a line, until the client leaves."""
        while line := await reader.readline():
            # Two turns of the loop: what the kernel had ready before this order is handled first.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            try:
                reply = {"ok": True, "value": self.obey(json.loads(line))}
            except (KeyError, TypeError, ValueError, OSError) as refused:
                reply = {"ok": False, "message": f"{type(refused).__name__}: {refused}"}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()


async def _until_parent_ends() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def run(directory: Path) -> None:
    """Serve until standard input ends; says `ready` on standard output once everything listens."""
    authority = Authority(directory)
    async with asyncio.TaskGroup() as group:
        dns = DnsServer()
        world = World(dns=dns, origin=Origin(group, authority, dns), sniffer=Sniffer())
        server = await asyncio.start_unix_server(world.control, directory / "control.sock", limit=2**20)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await _until_parent_ends()
        server.close()
        world.origin.close()
        dns.close()
        world.sniffer.close()
        raise SystemExit


def main() -> None:
    """Run the world of the instance that argv names, then remove the instance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("instance")
    instance = Instance(parser.parse_args().instance)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        with contextlib.suppress(SystemExit):
            asyncio.run(run(instance.directory))
    finally:
        os.chdir("/")
        remove(instance)


if __name__ == "__main__":
    main()
