"""Owns the rig's DNS server: its zone, its log, UDP and TCP on port 53; does not encode answers."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter

from tests.rig import addresses
from tests.rig.datagrams import Datagram, DatagramSocket
from tests.rig.dns_wire import Question, parse, reply
from tests.rig.zone import DEFAULT, Answer, Shape, lookup


class DnsServer:
    """Answers on every address of the namespace; each query is logged before it is answered."""

    def __init__(self) -> None:
        """Bind UDP at once; TCP connections come through `serve`."""
        self.zone: dict[str, Answer] = dict(DEFAULT)
        self.log: list[dict[str, object]] = []
        self._asked: Counter[tuple[str, str]] = Counter()
        self._sockets = [DatagramSocket(family, 53, self._datagram) for family in (socket.AF_INET, socket.AF_INET6)]

    def reset(self) -> None:
        """Forget every change of the zone, and what was asked."""
        self.zone = dict(DEFAULT)
        self.forget()

    def forget(self) -> None:
        """Clear the log and the counters of rebinding."""
        self.drain()
        self.log.clear()
        self._asked.clear()

    def set(self, name: str, answer: Answer) -> None:
        """Change one name, live; its rebinding starts anew."""
        self.zone[name] = answer
        for key in [key for key in self._asked if key[0] == name]:
            del self._asked[key]

    def drain(self) -> None:
        """Read and log all that has arrived by now."""
        for each in self._sockets:
            each.drain()

    def close(self) -> None:
        """Close the UDP sockets."""
        for each in self._sockets:
            each.close()

    def _datagram(self, through: DatagramSocket, datagram: Datagram) -> None:
        question = parse(datagram.data)
        answer = self._logged(question, datagram.data, "udp", server=datagram.address, peer=datagram.peer)
        if question is None:
            return
        data = reply(question, answer, nth=self._nth(question), tcp=False)
        if data is None:
            return
        other = {4: addresses.EVIL[0], 6: addresses.EVIL[1]}[6 if ":" in datagram.address else 4]
        source = other if answer.shape is Shape.WRONG_SOURCE else None
        if answer.delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(answer.delay_s, lambda: through.answer(datagram, data, source=source))
        else:
            through.answer(datagram, data, source=source)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: str, peer: str) -> None:
        """Answer the queries of one TCP connection until it ends (RFC 7766)."""
        while True:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
            message = await reader.readexactly(size)
            question = parse(message)
            answer = self._logged(question, message, "tcp", server=server, peer=peer)
            data = None if question is None else reply(question, answer, nth=self._nth(question), tcp=True)
            if data is None:
                continue
            await asyncio.sleep(answer.delay_s)
            writer.write(struct.pack("!H", len(data)) + data)
            await writer.drain()

    def _logged(self, question: Question | None, data: bytes, transport: str, *, server: str, peer: str) -> Answer:
        name = question.name if question else ""
        kind = question.type if question else "malformed"
        row = {"name": name, "type": kind, "transport": transport, "server": server, "peer": peer}
        self.log.append({**row, "time": time.time(), "raw": data.hex()})
        return lookup(self.zone, name)

    def _nth(self, question: Question) -> int:
        self._asked[question.name, question.type] += 1
        return self._asked[question.name, question.type] - 1
