"""Owns an origin that says exactly the bytes that the request's path spells in hexadecimal; judges nothing."""

from __future__ import annotations

import asyncio
import sys

PORT = 8888
BIG = "/big/"
_LIMIT = 1 << 17


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode("ascii")
        if path.startswith(BIG):
            writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"a" * int(path.removeprefix(BIG)) + b"\r\n\r\n")
        else:
            writer.write(bytes.fromhex(path.removeprefix("/raw/")))
        await writer.drain()
        writer.write_eof()
        # closing on bytes that were not read would take the answer with it
        await reader.read(_LIMIT)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main() -> None:
    """Serve until standard input ends; says `ready` once it listens."""
    await asyncio.start_server(_serve, "0.0.0.0", PORT, limit=_LIMIT)
    await asyncio.start_server(_serve, "::", PORT, limit=_LIMIT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(main())
