"""Owns attaching to a container: one request that turns its connection into the container's own streams.

The client library hides that connection under three layers, each of which may have read ahead; here no byte is lost.
"""

from __future__ import annotations

import re
import socket

ATTACH_S = 30.0
_LONGEST_HEAD = 16 * 1024
_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TAKEN_OVER = (b"101", b"200")


class NotAttachedError(OSError):
    """The engine did not hand the streams over."""


def attach(path: str, *, api: str, container: str, stdin: bool) -> socket.socket:
    """Attach to a container's outputs, and to its input; gives the connection, at the first byte of the streams.

    Args:
        path: the engine's Unix socket.
        api: the API version, such as `1.41`.
        container: its name or id.
        stdin: whether what is written goes to its input.

    Raises:
        OSError: the engine is not there, took too long, or refused.
        ValueError: that is no container's name.
    """
    if _NAME.fullmatch(container) is None:
        raise ValueError(f"{container!r} is not a container's name")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(ATTACH_S)
        channel.connect(path)
        query = f"stream=1&stdout=1&stderr=1&stdin={int(stdin)}"
        request = f"POST /v{api}/containers/{container}/attach?{query} HTTP/1.1\r\nHost: engine\r\n"
        request += "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        channel.sendall(request.encode("ascii"))
        head = _head(channel)
        status = _STATUS.match(head)
        taken_over = status is not None and status[1] in _TAKEN_OVER
    except BaseException:
        channel.close()
        raise
    if not taken_over:
        channel.close()
        raise NotAttachedError(f"attach to {container}: {head.splitlines()[0][:200]!r}")
    return channel


def _head(channel: socket.socket) -> bytes:
    """Read up to the blank line and not one byte further: what follows is the container's."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = channel.recv(1)
        if not byte or len(head) > _LONGEST_HEAD:
            raise NotAttachedError("attach: the engine closed the connection")
        head += byte
    return head
