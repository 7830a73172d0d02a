"""Owns a forwarder of DNS on the host's loopback, as dnsmasq is one; it caches and judges nothing.

forwarder.py ADDRESS    UDP from 127.0.0.1:53 to ADDRESS:53
"""

from __future__ import annotations

import selectors
import socket
import sys


def main() -> None:
    """Forward until killed: a socket to the resolver for each query, forgotten with its answer or 1000 later."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening.bind(("127.0.0.1", 53))
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    asked: dict[socket.socket, tuple[str, int]] = {}
    while True:
        for key, _events in selector.select():
            if key.fileobj is listening:
                query, peer = listening.recvfrom(4096)
                upstream = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                upstream.connect((sys.argv[1], 53))
                upstream.send(query)
                asked[upstream] = peer
                selector.register(upstream, selectors.EVENT_READ)
                done = next(iter(asked)) if len(asked) > 1000 else None
            else:
                (done,) = (each for each in asked if each is key.fileobj)
                listening.sendto(done.recv(4096), asked[done])
            if done is not None:
                selector.unregister(done)
                done.close()
                del asked[done]


if __name__ == "__main__":
    main()
