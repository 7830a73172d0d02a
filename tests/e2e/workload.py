"""The untrusted workload: tries what a JSON job lists, prints a JSON line for each attempt; judges nothing.

One self-contained file for the Python 3.11 of a sandbox: it imports the standard library alone, hence its length.

    workload.py JOB        JOB: JSON text, or the path of a file that holds it (default job.json beside this file)
    {"attempts": [{"attempt": NAME, "do": KIND, ...}], "proxy": "http://127.0.0.1:3128", "ca": PEM, "timeout": 2.0}

A line is {"attempt", "outcome", "detail"}. Outcomes:
    reached   it worked: something answered, or the kernel did it
    denied    the proxy said no; detail has status, code and message
    silent    sent, and nothing came back
    failed    detail.error names the errno, or is `timeout`
    broken    the job is wrong: a test must never take this for a denial
`timeout` is seconds for each wait. The functions below say what each KIND takes. In an attempt `@proxy` stands for the
proxy's address, `@own` for this sandbox's own, `@gateway` and `@broadcast` for the first and the last of its eight.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import ipaddress
import json
import mmap
import os
import random
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Order = dict[str, Any]
Outcome = tuple[str, dict[str, Any]]
REACHED, DENIED, SILENT, FAILED, BROKEN = "reached", "denied", "silent", "failed", "broken"

CLONE = {
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
SO_BINDTODEVICE = 25
MSG_FASTOPEN = 0x20000000
SIOCADDRT, SIOCDELRT, SIOCSARP, SIOCDARP = 0x890B, 0x890C, 0x8955, 0x8953
ETH_P_IP, ETH_P_ARP = 0x0800, 0x0806
PLACES = r"@(proxy|own|gateway|broadcast)\b"


class Job(NamedTuple):
    """What holds for every attempt."""

    proxy: tuple[str, int]
    ca: str | None
    timeout: float
    shown: str = ""
    """The header line by which the proxy knows its own client, where another could reach its port."""


# --- over the proxy ---------------------------------------------------------------------------------------------------


def proxy_tls(job: Job, order: Order) -> Outcome:
    """CONNECT host:port, TLS with `sni` (default: the host), GET path."""
    host, port = order["host"], order.get("port", 443)
    with connect(job, *job.proxy) as tunnel:
        refused = open_tunnel(job, tunnel, host, port)
        if refused is not None:
            return refused
        context = ssl.create_default_context(cadata=job.ca)
        with context.wrap_socket(tunnel, server_hostname=order.get("sni", host)) as secure:
            secure.sendall(
                f"GET {order.get('path', '/')} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            )
            return answered(secure)


def proxy_get(job: Job, order: Order) -> Outcome:
    """GET http://host[:port]/path in absolute form, or another `method` with a `body`."""
    host, body = order["host"], order.get("body", "").encode()
    at = host if "port" not in order else f"{host}:{order['port']}"
    line = f"{order.get('method', 'GET')} http://{at}{order.get('path', '/')} HTTP/1.1\r\n"
    head = f"{line}Host: {at}\r\n{job.shown}Connection: close\r\n"
    with connect(job, *job.proxy) as through:
        through.sendall((head + (f"Content-Length: {len(body)}\r\n" if body else "") + "\r\n").encode() + body)
        return answered(through, from_proxy=True)


def proxy_raw(job: Job, order: Order) -> Outcome:
    """CONNECT host:port, send `send`, read what comes back."""
    with connect(job, *job.proxy) as tunnel:
        refused = open_tunnel(job, tunnel, order["host"], order["port"])
        if refused is not None:
            return refused
        return exchange(tunnel, order)


def proxy_bytes(job: Job, order: Order) -> Outcome:
    """Send bytes to the proxy as they are, read what comes back."""
    with connect(job, *job.proxy) as through:
        return exchange(through, order)


def open_tunnel(job: Job, tunnel: socket.socket, host: str, port: int) -> Outcome | None:
    """Ask for a tunnel; None when it is open, else what the proxy said."""
    tunnel.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{job.shown}\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows the head belongs to the tunnel
        data = tunnel.recv(1)
        if not data:
            return FAILED, {"error": "closed", "received": head.decode("latin-1")}
        head += data
    _version, status, code = head.decode("latin-1").split("\r\n")[0].split(" ", 2)
    if status == "200":
        return None
    body = receive(tunnel, 4096).decode("latin-1")
    return DENIED, {"status": int(status), "code": code, "message": body.strip()}


def answered(through: socket.socket, *, from_proxy: bool = False) -> Outcome:
    """Read one response; the body as JSON where it is."""
    response = HTTPResponse(through)
    response.begin()
    body = response.read(1 << 20).decode("latin-1")
    headers = {name.lower(): value for name, value in response.getheaders()}
    detail: dict[str, Any] = {"status": response.status, "code": response.reason, "headers": headers}
    if from_proxy and "proxy-status" in headers and response.status >= 400:
        return DENIED, {**detail, "message": body.strip()}
    try:
        return REACHED, {**detail, "json": json.loads(body)}
    except ValueError:
        return REACHED, {**detail, "body": body[:4096]}


# --- past the proxy ---------------------------------------------------------------------------------------------------


def tcp(job: Job, order: Order) -> Outcome:
    """Connect to address:port directly; with `send`, read what comes back."""
    with connect(job, order["address"], order["port"]) as connection:
        return exchange(connection, order)


def udp(job: Job, order: Order) -> Outcome:
    """Send one datagram to address:port and wait for an answer."""
    with socket.socket(family(order["address"]), socket.SOCK_DGRAM) as sending:
        sending.settimeout(job.timeout)
        sending.connect(target(order["address"], order["port"]))
        sending.send(payload(order) or b"hello")
        return heard(sending)


def dns_udp(job: Job, order: Order) -> Outcome:
    """Ask address:53 for a name over UDP."""
    return udp(job, {"port": 53, **order, "send_hex": query(order.get("name", "example.com")).hex()})


def dns_tcp(job: Job, order: Order) -> Outcome:
    """Ask address:53 for a name over TCP."""
    message = query(order.get("name", "example.com"))
    return tcp(job, {"port": 53, **order, "send_hex": (struct.pack("!H", len(message)) + message).hex()})


def resolve(_job: Job, order: Order) -> Outcome:
    """Ask the C library for a name, once."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    try:
        found = socket.getaddrinfo(order["name"], 443, type=socket.SOCK_STREAM)
    except socket.gaierror as refused:
        return FAILED, {"error": errno_name(refused, "gaierror"), "message": str(refused)}
    return REACHED, {"addresses": sorted({str(each[4][0]) for each in found})}


def query(name: str) -> bytes:
    """Encode an A query."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", random.randrange(65536), 0x100, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"


def icmp(job: Job, order: Order) -> Outcome:
    """Send an echo request to `address` that carries `send`, unprivileged (`raw` false) or by a raw socket."""
    six = family(order["address"]) == socket.AF_INET6
    raw = order.get("raw", False)
    protocol = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
    data = payload(order) or b"ringfence workload"
    body = struct.pack("!HH", os.getpid() & 0xFFFF, 1) + data + b"\0" * (len(data) % 2)
    message = bytes([128 if six else 8, 0]) + struct.pack("!H", 0 if six else checksum(b"\x08\0\0\0" + body)) + body
    with socket.socket(family(order["address"]), socket.SOCK_RAW if raw else socket.SOCK_DGRAM, protocol) as pinging:
        pinging.settimeout(job.timeout)
        pinging.sendto(message, target(order["address"], 0))
        end = time.monotonic() + job.timeout
        while time.monotonic() < end:
            try:
                data, peer = pinging.recvfrom(2048)
            except TimeoutError:
                break
            kind = data[0] if six or not raw else data[(data[0] & 0xF) * 4]
            if kind == (129 if six else 0):
                return REACHED, {"peer": peer[0]}
    return SILENT, {}


def checksum(data: bytes) -> int:
    """RFC 1071, for an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return int(~(total + (total >> 16)) & 0xFFFF)


def unix_abstract(job: Job, order: Order) -> Outcome:
    """Connect to the abstract unix socket `name`."""
    return unix(job, order, "\0" + order["name"])


def unix_path(job: Job, order: Order) -> Outcome:
    """Connect to the unix socket at `path`."""
    return unix(job, order, order["path"])


def unix(job: Job, order: Order, address: str) -> Outcome:
    """Connect to a stream socket, or with `datagram` send to a datagram one."""
    if order.get("datagram"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(payload(order) or b"hello", address)
            return REACHED, {"sent": True}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(job.timeout)
        connection.connect(address)
        return exchange(connection, order)


def packet(_job: Job, order: Order) -> Outcome:
    """Open AF_PACKET; with address and port broadcast an IPv4 UDP datagram in an Ethernet frame on every interface."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
        if "address" not in order:
            return REACHED, {"opened": True}
        data = payload(order) or b"hello"
        datagram = struct.pack("!HHHH", 40000, order["port"], 8 + len(data), 0) + data
        ends = socket.inet_aton(order.get("source", "192.0.2.1")) + socket.inet_aton(order["address"])
        rest = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(datagram), 1, 0, 64, socket.IPPROTO_UDP)
        header = rest + struct.pack("!H", checksum(rest + b"\0\0" + ends)) + ends
        sent: list[str] = []
        for name in interfaces():
            raw.bind((name, ETH_P_IP))
            raw.send(b"\xff" * 6 + b"\x02\0\0\0\0\1" + struct.pack("!H", ETH_P_IP) + header + datagram)
            sent.append(name)
        return (REACHED if sent else FAILED), {"sent": sent, "error": None if sent else "no interface"}


def raw_ip(job: Job, order: Order) -> Outcome:
    """Send a UDP datagram in an IPv4 packet that is made here: any `source` to address:port."""
    data = payload(order) or b"hello"
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(
            ipv4(order.get("source", own_address(job)), order["address"], order["port"], data), (order["address"], 0)
        )
    return REACHED, {"sent": True}


def ipv4(source: str, address: str, port: int, data: bytes) -> bytes:
    """Make an IPv4 packet with a UDP datagram from port 40000."""
    datagram = struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data
    ends = socket.inet_aton(source) + socket.inet_aton(address)
    rest = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(datagram), 1, 0, 64, socket.IPPROTO_UDP)
    return rest + struct.pack("!H", checksum(rest + b"\0\0" + ends)) + ends + datagram


def arp(job: Job, order: Order) -> Outcome:
    """Claim `address` by ARP on every interface, and ask who has it."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
        own, wanted = socket.inet_aton(own_address(job)), socket.inet_aton(order["address"])
        for name in interfaces():
            raw.bind((name, ETH_P_ARP))
            mac = raw.getsockname()[4]
            for operation, sender in ((1, own), (2, wanted)):
                body = struct.pack("!HHBBH", 1, ETH_P_IP, 6, 4, operation) + mac + sender + b"\xff" * 6 + wanted
                raw.send(b"\xff" * 6 + mac + struct.pack("!H", ETH_P_ARP) + body)
    return REACHED, {"sent": interfaces()}


def udp_bound(job: Job, order: Order) -> Outcome:
    """Send a datagram to address:port from a socket that is bound to each interface; `reached` when one is answered."""
    tries: dict[str, str] = {}
    for name in interfaces():
        with socket.socket(family(order["address"]), socket.SOCK_DGRAM) as sending:
            sending.settimeout(job.timeout)
            try:
                sending.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name.encode())
                sending.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sending.sendto(payload(order) or b"hello", target(order["address"], order["port"]))
                sending.recv(4096)
            except OSError as refused:
                tries[name] = errno_name(refused, "timeout")
                continue
            return REACHED, {"device": name}
    return FAILED, {"error": "; ".join(f"{name}: {what}" for name, what in tries.items()) or "no interface"}


def broadcast(job: Job, order: Order) -> Outcome:
    """Send a datagram to a broadcast or multicast address:port over every interface; `silent` when it was sent."""
    six = family(order["address"]) == socket.AF_INET6
    for name in interfaces():
        with socket.socket(family(order["address"]), socket.SOCK_DGRAM) as sending:
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            index = socket.if_nametoindex(name)
            if six:
                sending.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
            else:
                mine = struct.pack("4s4si", b"\0" * 4, socket.inet_aton(own_address(job)), index)
                sending.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, mine)
            sending.sendto(payload(order) or b"hello", (order["address"], order["port"]))
    return SILENT, {"sent": interfaces()}


def fast_open(job: Job, order: Order) -> Outcome:
    """Send `send` with the very first segment of a TCP connection to address:port."""
    with socket.socket(family(order["address"]), socket.SOCK_STREAM) as connection:
        connection.settimeout(job.timeout)
        connection.sendto(payload(order) or b"hello", MSG_FASTOPEN, target(order["address"], order["port"]))
        return heard(connection)


def scan(job: Job, order: Order) -> Outcome:
    """Connect to every address of `network` on `ports`, again and again for `seconds`; the own proxy's is left out."""
    found: set[str] = set()
    tried, end = 0, time.monotonic() + order["seconds"]
    while time.monotonic() < end:
        for address in ipaddress.ip_network(order["network"]).hosts():
            for port in order["ports"]:
                if (str(address), port) == job.proxy:
                    continue
                tried += 1
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
                    connection.settimeout(0.02)
                    if connection.connect_ex((str(address), port)) == 0:
                        found.add(f"{address}:{port}")
        if found:
            break
    return (REACHED if found else FAILED), {"found": sorted(found), "tried": tried, "error": "nobody answers"}


def vsock(job: Job, order: Order) -> Outcome:
    """Open AF_VSOCK; with `cid` connect to it. Cid 2 is the machine outside this one: nothing may go there."""
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as connection:
        if "cid" not in order:
            return REACHED, {"opened": True}
        connection.settimeout(job.timeout)
        connection.connect((order["cid"], order["port"]))
        return exchange(connection, order)


def bind_to_device(job: Job, order: Order) -> Outcome:
    """Bind a TCP socket to each interface (or `device`), so that every address counts as on its link, and connect."""
    tries: dict[str, str] = {}
    for name in [order["device"]] if "device" in order else interfaces():
        with socket.socket(family(order["address"]), socket.SOCK_STREAM) as connection:
            connection.settimeout(job.timeout)
            try:
                connection.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name.encode())
                connection.connect(target(order["address"], order["port"]))
            except OSError as refused:
                tries[name] = errno_name(refused, "timeout")
                continue
            return REACHED, {"device": name}
    return FAILED, {"error": "; ".join(f"{name}: {what}" for name, what in tries.items()) or "no interface"}


def link_local(job: Job, order: Order) -> Outcome:
    """Connect to a link-local IPv6 `address` over each interface."""
    tries: dict[str, str] = {}
    for name in interfaces():
        try:
            with connect(job, f"{order['address']}%{name}", order["port"]):
                return REACHED, {"device": name}
        except OSError as refused:
            tries[name] = errno_name(refused, "timeout")
    return FAILED, {"error": "; ".join(f"{name}: {what}" for name, what in tries.items()) or "no interface"}


def own_address(job: Job) -> str:
    """Say which IPv4 address of ours is towards the proxy."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(job.proxy)
        return str(asking.getsockname()[0])


def interfaces() -> list[str]:
    """Return every interface but loopback, and loopback where it is all there is."""
    # Not by netlink, which a fence need not have.
    lines = Path("/proc/self/net/dev").read_text("ascii").splitlines()[2:]
    names = [line.partition(":")[0].strip() for line in lines]
    return [name for name in names if name != "lo"] or names


def netlink(_job: Job, order: Order) -> Outcome:
    """Ask the kernel to change the network (`change`: address, route, link or neighbour), and undo what worked."""
    lo = socket.if_nametoindex("lo")
    place = b"\xc0\0\2\x4d"  # 192.0.2.77
    match order["change"]:
        case "address":
            new, old, body = 20, 21, struct.pack("BBBBI", 2, 32, 0, 0, lo) + attribute(1, place) + attribute(2, place)
        case "route":
            new, old = 24, 25
            body = struct.pack("BBBBBBBBI", 2, 32, 0, 0, 254, 4, 253, 1, 0) + attribute(1, place)
            body += attribute(4, struct.pack("I", lo))
        case "link":
            new, old = 16, 17
            body = struct.pack("BBHiII", 0, 0, 0, 0, 0, 0) + attribute(3, b"rfworkload\0")
            body += attribute(18, attribute(1, b"veth\0"))
        case "neighbour":
            new, old = 28, 29
            body = struct.pack("BBHiHBB", 2, 0, 0, socket.if_nametoindex(interfaces()[0]), 0x80, 0, 0)
            body += attribute(1, place) + attribute(2, b"\2\0\0\0\0\1")
        case other:
            return BROKEN, {"error": f"no such change: {other}"}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        code = ask_kernel(route, new, body, 0x600)  # NLM_F_EXCL | NLM_F_CREATE
        if code:
            return FAILED, {"error": errno.errorcode.get(code, str(code))}
        return REACHED, {"undone": ask_kernel(route, old, body, 0) == 0}


def attribute(kind: int, data: bytes) -> bytes:
    """Encode one rtnetlink attribute."""
    return struct.pack("HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def ask_kernel(route: socket.socket, kind: int, body: bytes, flags: int) -> int:
    """Send one rtnetlink request and return its acknowledgement's errno."""
    route.send(struct.pack("IHHII", 16 + len(body), kind, 0x5 | flags, 1, 0) + body)  # NLM_F_REQUEST | NLM_F_ACK
    (code,) = struct.unpack_from("i", route.recv(8192), 16)
    return -int(code)


def ioctl(_job: Job, order: Order) -> Outcome:
    """Ask for the same by the older way (`change`: route or neighbour), and undo what worked."""
    here, mask = (
        struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(each)) for each in ("192.0.2.77", "255.255.255.255")
    )
    device = interfaces()[0].encode()
    match order["change"]:
        case "route":
            name = ctypes.create_string_buffer(device)
            new, old = SIOCADDRT, SIOCDELRT
            there = socket.AF_INET.to_bytes(2, sys.byteorder) + bytes(14)
            where = (ctypes.addressof(name), 0, 0, 0)
            body = struct.pack("L16s16s16sHhLPhPLLH", 0, here, there, mask, 0x5, 0, 0, 0, 0, *where)
        case "neighbour":
            new, old = SIOCSARP, SIOCDARP
            body = here + struct.pack("H6s8x", 1, b"\2\0\0\0\0\1") + struct.pack("i16s16s", 0x6, mask, device)
        case other:
            return BROKEN, {"error": f"no such change: {other}"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, new, body)
        fcntl.ioctl(asking, old, body)
    return REACHED, {}


# --- around the sandbox -----------------------------------------------------------------------------------------------


def proc_net(_job: Job, _order: Order) -> Outcome:
    """Read what /proc/net shows: interfaces, routes, and how many sockets of whom."""
    names = ["tcp", "tcp6", "udp", "udp6", "unix", "route", "packet"]
    counts = {name: len(Path("/proc/net", name).read_text().splitlines()) - 1 for name in names}
    devices = [line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return REACHED, {"interfaces": devices, "rows": counts, "namespace": str(Path("/proc/self/ns/net").readlink())}


def ptrace(_job: Job, order: Order) -> Outcome:
    """Attach to process `pid`, or to a child of our own without one."""
    child = 0
    if "pid" not in order:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    pid = order.get("pid", child)
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    try:
        if library.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
            return FAILED, {"error": errno.errorcode[ctypes.get_errno()]}
        os.waitpid(pid, 0x40000000)  # __WALL
        library.ptrace(PTRACE_DETACH, pid, None, None)
        return REACHED, {"pid": pid}
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def unshare(_job: Job, order: Order) -> Outcome:
    """Make new namespaces (`namespaces`: list of names) in a child."""
    flags = sum(CLONE[name] for name in order["namespaces"])
    return in_child(lambda: must(ctypes.CDLL(None, use_errno=True).unshare(flags)))


def setns(_job: Job, order: Order) -> Outcome:
    """Join the namespace at `path` (default: the network of process 1) in a child."""

    def join() -> dict[str, Any]:
        with Path(order.get("path", "/proc/1/ns/net")).open("rb") as handle:
            must(ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0))
        return {"namespace": str(Path("/proc/self/ns/net").readlink())}

    return in_child(join)


def mount(_job: Job, _order: Order) -> Outcome:
    """Mount a tmpfs on a directory of our own, and unmount it where that worked."""

    def attempt() -> dict[str, Any]:
        library = ctypes.CDLL(None, use_errno=True)
        with tempfile.TemporaryDirectory() as place:
            must(library.mount(b"none", place.encode(), b"tmpfs", 0, None))
            must(library.umount2(place.encode(), 2))
        return {}

    return in_child(attempt)


def syscall(_job: Job, order: Order) -> Outcome:
    """Make system call `number` with `arguments` (integers) in a child."""
    arguments = [ctypes.c_long(each) for each in order.get("arguments", [])]
    return in_child(lambda: must(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(order["number"]), *arguments)))


def must(result: int) -> dict[str, Any]:
    """Raise the C library's errno for a negative result."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return {"result": result}


def in_child(attempt: Callable[[], dict[str, Any]]) -> Outcome:
    """Try in a forked child, so that what it changes of itself goes with it; a child that is killed is `failed`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome: Outcome = (REACHED, attempt())
        except OSError as refused:
            outcome = (FAILED, {"error": errno_name(refused, "OSError")})
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        data = answers.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not data:
        return FAILED, {"error": f"child ended with {status}", "status": status}
    word, detail = json.loads(data)
    return word, detail


def whoami(_job: Job, _order: Order) -> Outcome:
    """Say what this process is: ids, capabilities, filters, namespaces, descriptors, environment, mounts."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    descriptors: dict[str, str] = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            descriptors[path.name] = str(path.readlink())
        except OSError:
            continue  # the listing's own
    return REACHED, {
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "hostname": socket.gethostname(),
        "status": {name: status.get(name, "").strip() for name in wanted},
        "namespaces": {path.name: str(path.readlink()) for path in Path("/proc/self/ns").iterdir()},
        "descriptors": descriptors,
        "environment": dict(os.environ),
        "mounts": [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "processes": sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()),
    }


def read(_job: Job, order: Order) -> Outcome:
    """Read the file or directory at `path`."""
    path = Path(order["path"])
    if path.is_dir():
        return REACHED, {"names": sorted(each.name for each in path.iterdir())}
    with path.open("rb") as handle:
        return REACHED, {"text": handle.read(4096).decode("latin-1")}


def write(_job: Job, order: Order) -> Outcome:
    """Write `bytes` bytes (default 1) to the file at `path`."""
    size = order.get("bytes", 1)
    with Path(order["path"]).open("wb") as handle:
        handle.writelines(b"x" * min(1 << 20, size - start) for start in range(0, size, 1 << 20))
    return REACHED, {"bytes": size}


def open_for(_job: Job, order: Order) -> Outcome:
    """Open what is at `path` to write, or to read with `read`, and change nothing."""
    os.close(os.open(order["path"], os.O_RDONLY if order.get("read") else os.O_WRONLY))
    return REACHED, {}


def set_uid(_job: Job, order: Order) -> Outcome:
    """Run the set-uid `command`, as nobody where we are root; `reached` when it is root."""
    nobody = 65534 if os.getuid() == 0 else None
    with subprocess.Popen(
        order["command"],
        user=nobody,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        time.sleep(0.5)
        # Of what has ended meanwhile it tells, too: nobody has waited for it.
        status = Path(f"/proc/{running.pid}/status").read_text()
        running.kill()
    effective = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[2]
    return (REACHED, {"uid": 0}) if effective == "0" else (FAILED, {"error": f"uid {effective}"})


# --- limits and ends --------------------------------------------------------------------------------------------------


def memory(_job: Job, order: Order) -> Outcome:
    """Touch `bytes` of memory, in this process or with `child` in a child."""

    def hog() -> dict[str, Any]:
        with mmap.mmap(-1, order["bytes"]) as area:
            for at in range(0, order["bytes"], mmap.PAGESIZE):
                area[at] = 1
        return {"bytes": order["bytes"]}

    return in_child(hog) if order.get("child") else (REACHED, hog())


def forks(_job: Job, order: Order) -> Outcome:
    """Have up to `count` children at once; `reached` when all of them came to be."""
    reading, writing = os.pipe()
    children: list[int] = []
    error = None
    for _ in range(order["count"]):
        try:
            pid = os.fork()
        except OSError as refused:
            error = errno_name(refused, "OSError")
            break
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)  # ends when the parent closes its end, or dies
            os._exit(0)
        children.append(pid)
    os.close(reading)
    os.close(writing)
    for pid in children:
        os.waitpid(pid, 0)
    return (FAILED if error else REACHED), {"forked": len(children), "error": error}


def output(_job: Job, order: Order) -> Outcome:
    """Write `bytes` bytes of numbered lines to standard output or, with `stream` "stderr", to standard error."""
    handle = 2 if order.get("stream") == "stderr" else 1
    size, line = order["bytes"], 0
    sys.stdout.flush()
    while size > 0:
        block = b"".join(b"%015d\n" % each for each in range(line, line + 4096))[:size]
        line += 4096
        size -= len(block)
        while block:
            block = block[os.write(handle, block) :]
    return REACHED, {"bytes": order["bytes"]}


def sleep(_job: Job, order: Order) -> Outcome:
    """Sleep `seconds`; with `stubborn` SIGTERM is ignored from now on."""
    if order.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(order["seconds"])
    return REACHED, {}


def leave(_job: Job, order: Order) -> Outcome:
    """End here with exit status `status`, or by `signal`."""
    sys.stdout.flush()
    if "signal" in order:
        os.kill(os.getpid(), order["signal"])
        time.sleep(1)
    os._exit(order["status"])


# --- shared -----------------------------------------------------------------------------------------------------------


def family(address: str) -> socket.AddressFamily:
    """Return the family of an address literal."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def target(address: str, port: int) -> tuple[Any, ...]:
    """Return what connect wants, a scope included; looks nothing up."""
    found = socket.getaddrinfo(address, port, family(address), flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    return found[0][4]


def connect(job: Job, address: str, port: int) -> socket.socket:
    """Connect by TCP, for a `with`; raises OSError."""
    connection = socket.socket(family(address), socket.SOCK_STREAM)
    connection.settimeout(job.timeout)
    try:
        connection.connect(target(address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def payload(order: Order) -> bytes:
    """Return what the order wants sent: `send` or `send_hex`, and `pad` more bytes."""
    data = bytes.fromhex(order["send_hex"]) if "send_hex" in order else str(order.get("send", "")).encode()
    return data + b"x" * int(order.get("pad", 0))


def exchange(connection: socket.socket, order: Order) -> Outcome:
    """Send the order's bytes and report what comes back; being connected is enough where nothing is to be sent."""
    data = payload(order)
    if not data and not order.get("receive"):
        return REACHED, {"connected": True}
    connection.sendall(data)
    return heard(connection)


def heard(connection: socket.socket) -> Outcome:
    """Report the first answer."""
    try:
        data = connection.recv(65536)
    except TimeoutError:
        return SILENT, {}
    return (REACHED if data else SILENT), {"received": data.decode("latin-1")}


def receive(connection: socket.socket, limit: int) -> bytes:
    """Read to the end, or to `limit`, or until the peer is quiet."""
    data = b""
    try:
        while len(data) < limit and (more := connection.recv(limit - len(data))):
            data += more
    except OSError:
        return data
    return data


def errno_name(refused: OSError, otherwise: str) -> str:
    """Name an errno; an error that has none is called `otherwise`."""
    return errno.errorcode.get(refused.errno, otherwise) if refused.errno and refused.errno > 0 else otherwise


def kinds() -> Mapping[str, Callable[[Job, Order], Outcome]]:
    """Return every kind of attempt by the name a job uses."""
    proxied = (proxy_tls, proxy_get, proxy_raw, proxy_bytes)
    direct = (tcp, udp, dns_udp, dns_tcp, resolve, icmp, unix_abstract, unix_path)
    tunnels = (raw_ip, arp, udp_bound, broadcast, fast_open, scan)
    sneaky = (packet, vsock, bind_to_device, link_local, netlink, ioctl)
    around = (proc_net, ptrace, unshare, setns, mount, syscall, whoami, read, write, open_for, set_uid)
    ends = (memory, forks, output, sleep)
    return {**{each.__name__: each for each in (*proxied, *direct, *tunnels, *sneaky, *around, *ends)}, "exit": leave}


def attempt(job: Job, order: Order) -> Outcome:
    """Try one thing; whatever the environment raises becomes an outcome."""
    kind = kinds().get(str(order.get("do")))
    if kind is None:
        return BROKEN, {"error": f"no such attempt: {order.get('do')}"}
    try:
        return kind(job, placed(job, order))
    except ssl.SSLError as refused:
        return FAILED, {"error": type(refused).__name__, "message": str(refused)}
    except OSError as refused:
        return FAILED, {"error": errno_name(refused, "timeout" if isinstance(refused, TimeoutError) else "OSError")}
    except HTTPException as refused:
        return FAILED, {"error": type(refused).__name__}
    except MemoryError:
        return FAILED, {"error": "MemoryError"}
    except (KeyError, TypeError, ValueError) as wrong:
        return BROKEN, {"error": f"{type(wrong).__name__}: {wrong}"}


def placed(job: Job, order: Order) -> Order:
    """Put addresses in the place of the words that stand for them."""
    if not re.search(PLACES, json.dumps(order)):
        return order
    own = ipaddress.ip_address(own_address(job))
    around = ipaddress.ip_network(f"{own}/29", strict=False)
    words = {"@proxy": job.proxy[0], "@own": own, "@gateway": around[1], "@broadcast": around[-1]}
    text = re.sub(PLACES, lambda found: str(words[found[0]]), json.dumps(order))
    found: Order = json.loads(text)
    return found


def main(argv: list[str]) -> int:
    """Try every attempt of the job in order; exit 0 whatever came of them, 2 when the job cannot be read."""
    text = argv[1] if len(argv) > 1 else str(Path(__file__).with_name("job.json"))
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
    given = json.loads(text)
    url = given.get("proxy") or os.environ.get("HTTP_PROXY") or ""
    proxy = re.match(r"http://(?:([^/@]+)@)?([^:/@]+):([0-9]+)/?\Z", url)
    place = (proxy[2], int(proxy[3])) if proxy else ("127.0.0.1", 3128)
    known = base64.b64encode(proxy[1].encode()).decode() if proxy and proxy[1] else ""
    shown = f"Proxy-Authorization: Basic {known}\r\n" if known else ""
    job = Job(proxy=place, ca=given.get("ca"), timeout=float(given.get("timeout", 2.0)), shown=shown)
    for number, order in enumerate(given["attempts"]):
        outcome, detail = attempt(job, order)
        line = {"attempt": order.get("attempt", f"{number} {order.get('do')}"), "outcome": outcome, "detail": detail}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
