"""Owns what the rig's web servers answer: an echo of the request as JSON, and a few shapes of body by path."""

from __future__ import annotations

import asyncio
import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBER: Final = re.compile(r"/(bytes|chunked|until-close|drop|status|wait-ms)/([0-9]{1,9})\Z")
_CHUNK: Final = 65536


class Recording:
    """A stream reader that hands every byte it reads to `keep`, in order."""

    def __init__(self, reader: asyncio.StreamReader, keep: Callable[[bytes], None]) -> None:
        """Wrap `reader`."""
        self._reader = reader
        self._keep = keep

    async def until(self, separator: bytes) -> bytes:
        """Read up to and including `separator`; raises IncompleteReadError, LimitOverrunError."""
        data = await self._reader.readuntil(separator)
        self._keep(data)
        return data

    async def exactly(self, size: int) -> bytes:
        """Read `size` bytes; raises IncompleteReadError."""
        data = await self._reader.readexactly(size)
        self._keep(data)
        return data


async def serve(reader: Recording, writer: asyncio.StreamWriter, about: dict[str, object]) -> None:
    """Answer requests until the connection ends; `about` (address, port, sni) goes into each echo.

    Paths: `/bytes/N`, `/chunked/N`, `/until-close/N` (bodies of N bytes), `/drop/N` (promises twice
    as much as it sends), `/status/N`, `/wait-ms/N`, `/redirect`; every other path answers the echo alone.
    """
    while True:
        try:
            head = await reader.until(b"\r\n\r\n")
        except asyncio.IncompleteReadError as broken:
            if broken.partial:
                writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return
        line, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        headers = [[name, value.strip()] for name, _, value in (each.partition(":") for each in rest)]
        lower = {name.lower(): value for name, value in headers}
        body = await _body(reader, lower)
        method, target, version = (*line.split(" "), "", "")[:3]
        echo = {"method": method, "target": target, "version": version, "headers": headers, **about}
        echo |= {"body": body[:4096].decode("latin-1"), "body_size": len(body)}
        close = lower.get("connection", "").lower() == "close" or version != "HTTP/1.1"
        close |= await _respond(writer, method, target.partition("?")[0], json.dumps(echo).encode(), close=close)
        await writer.drain()
        if close:
            return


async def _body(reader: Recording, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        whole = bytearray()
        while size := int((await reader.until(b"\r\n")).partition(b";")[0], 16):
            whole += await reader.exactly(size)
            await reader.exactly(2)
        while (await reader.until(b"\r\n")) != b"\r\n":
            continue
        return bytes(whole)
    return await reader.exactly(int(headers.get("content-length", "0")))


async def _respond(writer: asyncio.StreamWriter, method: str, path: str, echo: bytes, *, close: bool) -> bool:
    """Write one response; True when the connection must end after it."""
    numbered = _NUMBER.match(path)
    kind, size = (numbered[1], int(numbered[2])) if numbered else (path, 0)
    end = "Connection: close\r\n" if close else ""
    if kind == "wait-ms":
        await asyncio.sleep(size / 1000)
    match kind:
        case "bytes" | "drop":
            promised = size if kind == "bytes" else 2 * size
            writer.write(f"HTTP/1.1 200 OK\r\n{end}Content-Length: {promised}\r\n\r\n".encode())
            await _pattern(writer, size)
            return kind == "drop"
        case "chunked":
            writer.write(f"HTTP/1.1 200 OK\r\n{end}Transfer-Encoding: chunked\r\n\r\n".encode())
            for start in range(0, size, _CHUNK):
                piece = _piece(start, min(_CHUNK, size - start))
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        case "until-close":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            await _pattern(writer, size)
            return True
        case "/redirect":
            writer.write(f"HTTP/1.1 302 Found\r\n{end}Location: http://evil.com/\r\nContent-Length: 0\r\n\r\n".encode())
        case _:
            status = HTTPStatus(size) if kind == "status" else HTTPStatus.OK
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{end}Content-Type: application/json\r\n"
            bodiless = status.value in {204, 304} or status.value < HTTPStatus.OK
            length = "" if bodiless else f"Content-Length: {len(echo)}\r\n"
            writer.write(f"{head}{length}\r\n".encode() + (b"" if bodiless or method == "HEAD" else echo))
    return False


def _piece(start: int, size: int) -> bytes:
    """Return `size` bytes of the pattern from `start` on: a position can be told from its neighbours."""
    first = start // 8
    return b"".join(b"%07x\n" % (n & 0xFFFFFFF) for n in range(first, first + size // 8 + 2))[start % 8 :][:size]


async def _pattern(writer: asyncio.StreamWriter, size: int) -> None:
    for start in range(0, size, _CHUNK):
        writer.write(_piece(start, min(_CHUNK, size - start)))
        await writer.drain()
