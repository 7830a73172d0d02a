"""Owns what a fenced pod tries: the outside from its first instruction on, then all the rest. Standard library alone.

attacker.py ORDER    ORDER: JSON, `outside` and `allowed` as HOST:PORT, `targets` by name; answers with one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time

BEGAN = time.monotonic()
_RACE_S, _SETTLED_S = 3.0, 6.0


def connect(target: str, timeout_s: float) -> socket.socket:
    """Open a TCP connection to HOST:PORT, with a scope or without."""
    host, _colon, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def ping(host: str) -> None:
    """Send one echo request and read its reply; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.settimeout(2)
        body = struct.pack(">BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 1)
        total = sum(struct.unpack(">4H", body))
        total = (total & 0xFFFF) + (total >> 16)
        raw.sendto(body[:2] + struct.pack(">H", ~total & 0xFFFF) + body[4:], (host, 0))
        until = time.monotonic() + 2
        while time.monotonic() < until:
            packet, (source, _port) = raw.recvfrom(2048)
            if source == host and packet[20] == 0:
                return
        raise TimeoutError


def reached(target: str) -> bool:
    """Try one `tcp:`, `udp:` or `icmp:` target."""
    kind, _colon, where = target.partition(":")
    try:
        if kind == "tcp":
            connect(where, 2).close()
        elif kind == "udp":
            host, _colon, port = where.rpartition(":")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                asked.settimeout(2)
                asked.connect((host, int(port)))
                asked.send(
                    struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"\x07example\x03com\0" + struct.pack(">2H", 1, 1)
                )
                asked.recv(2048)
        else:
            ping(where)
    except OSError:
        return False
    return True


def race(outside: str, leaks: list[int], kept: list[socket.socket]) -> None:
    """Connect again and again, one attempt each 20 ms; the first that succeeds is kept open."""

    def once() -> None:
        with contextlib.suppress(OSError):
            opened = connect(outside, 0.5)
            leaks.append(int((time.monotonic() - BEGAN) * 1000))
            if kept:
                opened.close()
            else:
                kept.append(opened)

    attempts = []
    while time.monotonic() - BEGAN < _RACE_S:
        attempts.append(threading.Thread(target=once))
        attempts[-1].start()
        time.sleep(0.02)
    for attempt in attempts:
        attempt.join()


def main() -> None:
    """Attack, and tell."""
    order = json.loads(sys.argv[1])
    leaks: list[int] = []
    kept: list[socket.socket] = []
    racing = threading.Thread(target=race, args=(order["outside"], leaks, kept))
    racing.start()
    allowed = None
    while allowed is None and time.monotonic() - BEGAN < 2 * _SETTLED_S:
        with contextlib.suppress(OSError):
            connect(order["allowed"], 0.5).close()
            allowed = int((time.monotonic() - BEGAN) * 1000)
        time.sleep(0.02)
    racing.join()
    time.sleep(max(0.0, BEGAN + _SETTLED_S - time.monotonic()))
    held = False
    for connection in kept:
        with contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.sendall(b"still there")
            held = connection.recv(64) == b"still there"
    answers: dict[str, bool] = {}
    attempts = [
        threading.Thread(target=lambda name=name, target=target: answers.update({name: reached(target)}))
        for name, target in order["targets"].items()
    ]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join()
    settled = sorted(name for name, answer in answers.items() if answer)
    sys.stdout.write(json.dumps({"leaks": sorted(leaks), "held": held, "allowed": allowed, "settled": settled}) + "\n")


if __name__ == "__main__":
    main()
