"""The neighbour: one self-contained file for the Python of a sandbox, that lives beside the attacker and is attacked.

    neighbour.py NAME PORT...    listens at the abstract unix socket NAME, and by TCP and UDP on each PORT
It prints a line for all that arrives there, which is nothing, and a line for each answer that it got through its proxy.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
import urllib.error
import urllib.request


def main(name: str, *ports: str) -> None:
    """Live until it is killed."""
    selector = selectors.DefaultSelector()
    for each in listeners(name, *map(int, ports)):
        selector.register(each, selectors.EVENT_READ)
    due = 0.0
    print("listening", flush=True)  # noqa: T201 - its output is its record
    while True:
        for key, _ in selector.select(0.1):
            arrived(key.fileobj)
        if "HTTP_PROXY" in os.environ and time.monotonic() > due:
            due = time.monotonic() + 0.5
            print("answer", ask(), flush=True)  # noqa: T201


def listeners(name: str, *ports: int) -> list[socket.socket]:
    """Open all of them."""
    opened = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
    opened[0].bind("\0" + name)
    for port in ports:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            opened.append(socket.socket(socket.AF_INET, kind))
            opened[-1].bind(("0.0.0.0", port))
    for each in opened:
        if each.type == socket.SOCK_STREAM:
            each.listen(64)
    return opened


def arrived(each: object) -> None:
    """Tell of one connection or datagram, and answer it."""
    assert isinstance(each, socket.socket)
    if each.type == socket.SOCK_DGRAM:
        data, peer = each.recvfrom(4096)
        each.sendto(b"neighbour\n", peer)
        print("arrival udp", peer, data, flush=True)  # noqa: T201
        return
    connection, peer = each.accept()
    with connection:
        connection.send(b"neighbour\n")
    print("arrival", each.family.name, peer, flush=True)  # noqa: T201


def ask() -> str:
    """Ask the one host that it may reach."""
    try:
        return str(urllib.request.urlopen("http://api.vendor.com/neighbour", timeout=5).status)
    except urllib.error.URLError as refused:
        return str(refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
