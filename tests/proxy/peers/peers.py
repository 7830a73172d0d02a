"""Owns how ours and the proxies that it is compared with are started, each as a careful operator would set it up.

Judges and measures nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final, Self, assert_never

from tests.proxy.examples import WIRE_ALLOW, policy
from tests.proxy.peers import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS_PROGRAM: Final = str(Path(sys.executable).with_name("ringfence-proxy"))
ADDRESS: Final = "127.0.0.1"
_PRIVATE: Final = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.168.0.0/16 224.0.0.0/4 240.0.0.0/4"
    " ::/128 ::1/128 fc00::/7 fe80::/10 ff00::/8"
)
"""What Squid's and others' documentation tells an operator to refuse."""


class Peer(StrEnum):
    """Who is run."""

    ASYNCIO = "ours (asyncio)"
    UVLOOP = "ours (uvloop)"
    SMOKESCREEN = "smokescreen"
    SQUID = "Squid"
    TINYPROXY = "tinyproxy"
    HAPROXY = "HAProxy"

    @property
    def ours(self) -> bool:
        """Say whether this is ringfence."""
        return self in (Peer.ASYNCIO, Peer.UVLOOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a proxy runs: a namespace (`enter`), a directory of its own, a DNS server, perhaps one core."""

    enter: tuple[str, ...]
    directory: Path
    resolver: str
    core: int | None = None
    dns_ttl_s: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to start, as in `Place`, and what to write to its input."""

    argv: tuple[str, ...]
    feed: bytes = b""


def build() -> None:
    """Build what is not in the cache. Raises CalledProcessError."""
    from tests.rig.docker.cache import build as make  # noqa: PLC0415 — only who builds needs it

    make(parts.debian(), parts.smokescreen(), parts.load())


def program(peer: Peer, place: Place, port: int, *, allow: Sequence[str] = WIRE_ALLOW, cap: int = 4096) -> Program:
    """Write the peer's settings into the place, and say what to start. `cap` is ours: connections at a time."""
    place.directory.mkdir(exist_ok=True)
    place.directory.chmod(0o777)  # they drop root before they write their logs
    debian = parts.debian().path
    libraries = ("/usr/bin/env", f"LD_LIBRARY_PATH={debian}/usr/lib/x86_64-linux-gnu")
    pinned = () if place.core is None else ("/usr/bin/taskset", "-c", str(place.core))
    feed = b""
    match peer:
        case Peer.ASYNCIO | Peer.UVLOOP:
            loop = "asyncio" if peer is Peer.ASYNCIO else "uvloop"
            argv: tuple[str, ...] = (OURS_PROGRAM, "--listen", f"{ADDRESS}:{port}", "--loop", loop)
            address, _, number = place.resolver.rpartition(":")
            chosen = policy(allow=allow, connections=cap, resolvers=[(address, int(number))])
            feed = chosen.to_json().encode() + b"\n"
        case Peer.SMOKESCREEN:
            config = _smokescreen(place, port, allow)
            argv = (str(parts.smokescreen().path / "bin" / "smokescreen"), "--config-file", str(config))
        case Peer.SQUID:
            argv = (*libraries, f"{debian}/usr/sbin/squid", "-N", "-f", str(_squid(place, port, allow, debian)))
        case Peer.TINYPROXY:
            resolv = place.directory / "resolv.conf"
            resolv.write_text(f"nameserver {place.resolver.rpartition(':')[0]}\n")
            own = f'mount --bind {resolv} /etc/resolv.conf && exec "$@"'
            private = ("/usr/bin/unshare", "--mount", "/bin/sh", "-euc", own, "sh")
            argv = (
                *private,
                *libraries,
                f"{debian}/usr/bin/tinyproxy",
                "-d",
                "-c",
                str(_tinyproxy(place, port, allow)),
            )
        case Peer.HAPROXY:
            argv = (*libraries, f"{debian}/usr/sbin/haproxy", "-db", "-f", str(_haproxy(place, port)))
        case _:
            assert_never(peer)
    return Program(argv=(*place.enter, *pinned, *argv), feed=feed)


def _split(allow: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split entries into hosts of ports 80 and 443, and (host, port)."""
    plain = [entry for entry in allow if ":" not in entry]
    ported = [entry.rpartition(":") for entry in allow if ":" in entry]
    return plain, [(host, port) for host, _, port in ported]


def _smokescreen(place: Place, port: int, allow: Sequence[str]) -> Path:
    plain, ported = _split(allow)
    # it knows no ports in its lists; its own lists of forbidden addresses are on by default
    domains = "".join(f'    - "{host}"\n' for host in dict.fromkeys([*plain, *(host for host, _ in ported)]))
    acl = place.directory / "acl.yaml"
    acl.write_text(
        f"version: v1\nservices: []\ndefault:\n  project: sandbox\n  action: enforce\n  allowed_domains:\n{domains}"
    )
    config = place.directory / "smokescreen.yaml"
    config.write_text(
        f"ip: {ADDRESS}\nport: {port}\nacl_file: {acl}\nallow_missing_role: true\n"
        f'resolver_addresses: ["{place.resolver}"]\n'
    )
    return config


def _squid(place: Place, port: int, allow: Sequence[str], debian: Path) -> Path:
    plain, ported = _split(allow)
    share = debian / "usr" / "share" / "squid"
    wild = [entry.removeprefix("*") for entry in plain if entry.startswith("*")]
    hosts = [entry for entry in plain if not entry.startswith("*") and f".{entry}" not in wild]
    listed = place.directory / "allowed"
    listed.write_text("\n".join([*wild, *hosts]) + "\n")
    config = place.directory / "squid.conf"
    lines = [
        f"http_port {ADDRESS}:{port}",
        # -n: no reverse lookup of an address that somebody asks for
        f'acl allowed dstdomain -n "{listed}"',
        "acl web port 80 443",
        f"acl private dst {_PRIVATE}",
        *[f"acl host{at} dstdomain -n {host}\nacl port{at} port {number}" for at, (host, number) in enumerate(ported)],
        "http_access deny manager",
        # names first, so that what is not listed is not looked up
        *[
            f"http_access deny host{at} port{at} private\nhttp_access allow host{at} port{at}"
            for at in range(len(ported))
        ],
        "http_access deny !allowed",
        "http_access deny !web",
        "http_access deny private",
        "http_access allow allowed",
        "http_access deny all",
        f"dns_nameservers {place.resolver.rpartition(':')[0]}",
        f"positive_dns_ttl {place.dns_ttl_s} seconds",
        "negative_dns_ttl 1 seconds",
        "cache deny all",
        "cache_mem 8 MB",
        "forwarded_for delete",
        "pinger_enable off",
        f"unlinkd_program {debian}/usr/lib/squid/unlinkd",
        f"logfile_daemon {debian}/usr/lib/squid/log_file_daemon",
        "max_filedescriptors 8192",
        "shutdown_lifetime 0 seconds",
        f"visible_hostname {gethostname() or 'squid'}",
        f"mime_table {share}/mime.conf",
        f"icon_directory {share}/icons",
        f"error_directory {share}/errors/templates",
        f"access_log stdio:{place.directory}/access.log",
        f"cache_log {place.directory}/cache.log",
        f"coredump_dir {place.directory}",
        f"pid_filename {place.directory}/squid.pid",
    ]
    config.write_text("\n".join(lines) + "\n")
    return config


def _tinyproxy(place: Place, port: int, allow: Sequence[str]) -> Path:
    plain, ported = _split(allow)
    wanted = dict.fromkeys([*plain, *(host for host, _ in ported)])
    allowed = place.directory / "filter"
    allowed.write_text("".join("^" + host.replace(".", "\\.").replace("*", ".*") + "$\n" for host in wanted))
    config = place.directory / "tinyproxy.conf"
    ports = "".join(
        f"ConnectPort {number}\n" for number in dict.fromkeys(["80", "443", *(number for _, number in ported)])
    )
    config.write_text(
        f"User nobody\nPort {port}\nListen {ADDRESS}\nTimeout 600\nMaxClients 4096\n"
        f'LogFile "{place.directory}/tinyproxy.log"\nLogLevel Connect\n'
        f'Filter "{allowed}"\nFilterExtended On\nFilterDefaultDeny Yes\n{ports}'
    )
    return config


def _haproxy(place: Place, port: int) -> Path:
    config = place.directory / "haproxy.cfg"
    config.write_text(
        "global\n  nbthread 1\n  maxconn 4096\n"
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
        f"listen all\n  bind {ADDRESS}:{port}\n  server origin 93.184.216.34:443\n"
    )
    return config


class Running:
    """One proxy, started; leaving the context ends it. `log` is what it wrote to its output and error output."""

    def __init__(self, peer: Peer, place: Place, port: int, program: Program) -> None:
        self.peer = peer
        self.port = port
        self.log = place.directory / f"{peer.name.lower()}.output"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                program.argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        if program.feed and self.process.stdin is not None:
            self.process.stdin.write(program.feed)
            self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process: whatever leads to it execs."""
        return self.process.pid

    def stop(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        if not self.peer.ours:
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used, all threads, to the nanosecond (clock_getcpuclockid(3))."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def resident(self) -> int:
        """Bytes of memory that it holds (`Rss`)."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
