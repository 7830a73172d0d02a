"""Owns the cluster's DNS: forwards every query, UDP and TCP, to the rig's resolver; it caches and judges nothing.

dns.py ADDRESS    from port 53 of its pod to ADDRESS:53. Standard library alone: the pod gets this text as an argument.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading


class Datagram(socketserver.BaseRequestHandler):
    """One query, one answer; silence when the resolver is silent."""

    def handle(self) -> None:
        """Ask as the client asked."""
        query, answering = self.request
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as upstream:
            upstream.settimeout(10)
            upstream.connect((sys.argv[1], 53))
            upstream.send(query)
            answering.sendto(upstream.recv(65535), self.client_address)


class Stream(socketserver.StreamRequestHandler):
    """Queries one after the other, each with its length before it (RFC 1035, 4.2.2)."""

    def handle(self) -> None:
        """Carry messages until the client leaves. The kubelet's probe sends none: then nothing is asked."""
        upstream: socket.socket | None = None
        while size := self.rfile.read(2):
            upstream = upstream or socket.create_connection((sys.argv[1], 53), timeout=10)
            upstream.sendall(size + self.rfile.read(int.from_bytes(size, "big")))
            size = upstream.recv(2, socket.MSG_WAITALL)
            self.wfile.write(size + upstream.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))


def main() -> None:
    """Serve until killed."""
    datagrams = socketserver.ThreadingUDPServer(("", 53), Datagram)
    streams = socketserver.ThreadingTCPServer(("", 53), Stream)
    streams.daemon_threads = datagrams.daemon_threads = True
    threading.Thread(target=streams.serve_forever, daemon=True).start()
    datagrams.serve_forever()


if __name__ == "__main__":
    main()
