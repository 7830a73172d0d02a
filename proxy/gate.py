"""Owns the attempts made from inside a fence before its command starts, and what they saw; builds and stops nothing.

One file, standard library only, kept to what Python 3.8 can run: it is executed by whatever interpreter stands behind
the fence (`python3 -I -S gate.py < input.json > report.json`). It exits 0 only when everything holds, 1 when something
does not, 2 when its input is unusable. The report has the shape of schema/gate-report.v1.json.
Where nobody stands between it and the command (an init container) it is told what to wait for after its report.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import select
import socket
import stat
import struct
import sys
import time
from typing import Any, NamedTuple

VERSION = 1
ATTEMPT_S = 0.5
"""How long one forbidden target may stay silent before silence is what was seen."""
MAX_ENTRIES = 20_000
"""How many directory entries are looked at for sockets; a root of ours holds far fewer outside /usr."""
UNWALKED = frozenset({"/proc", "/sys", "/usr"})
WEAK_KINDS = frozenset({"udp", "udp-bound", "dns-udp", "dns-relay", "icmp", "icmp-raw"})
"""Tried only after the others were denied in every round: a datagram that slips out leaves state to ride on."""
NO_SUCH_SOCKET = frozenset({"EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "ENODEV"})
SOCKET_KINDS = frozenset({"icmp", "icmp-raw", "packet", "vsock"})
"""Kinds whose socket itself can be denied; then no address need be alive to prove it."""
DENIALS = frozenset(
    {
        *NO_SUCH_SOCKET,
        "EADDRNOTAVAIL",
        "ECONNREFUSED",
        "ECONNRESET",
        "EHOSTUNREACH",
        "ENETUNREACH",
        "ENOENT",
        "ENXIO",
        "ETIMEDOUT",
        "silence",
    }
)
"""What counts as denied at a target that was alive; anything else (no memory, no descriptors) says nothing."""
BOUND_KINDS = frozenset({"tcp-bound", "udp-bound"})
"""Tried from a socket that is bound to a link: every address then counts as being on it, whatever the routes say."""
NOT_RELAYED = {2: "SERVFAIL", 4: "NOTIMP", 5: "REFUSED"}
"""Response codes (RFC 1035, 4.1.1) of a resolver inside the fence that asked nobody."""
ANSWERED = "answered"
NOT_TRIED = "not_tried"


class Target(NamedTuple):
    """One forbidden target. `address` is a literal, a path, or `@name` for an abstract socket."""

    name: str
    kind: str
    address: str
    port: int | None
    alive: bool


class Attempt(NamedTuple):
    """One socket that was set going for target number `number` and waits for `events`."""

    number: int
    sock: socket.socket
    events: int


def errno_name(error: OSError) -> str:
    """Name what went wrong, such as `ENETUNREACH`; an address that means nothing here counts as unreachable."""
    if isinstance(error, socket.gaierror):
        return "EADDRNOTAVAIL"
    if isinstance(error, socket.timeout):
        return "silence"
    return errno.errorcode.get(error.errno or 0, "EOTHER")


def verdict(kind: str, alive: bool, seen: str) -> str:
    """Judge what was seen in all rounds (comma-separated): `reached`, `denied` or `unproven`."""
    parts = seen.split(",")
    if ANSWERED in parts:
        return "reached"
    if kind in SOCKET_KINDS and all(part in NO_SUCH_SOCKET for part in parts):
        return "denied"
    if alive and all(part in DENIALS for part in parts):
        return "denied"
    return "unproven"


def ask_anchor(
    proxy: str, challenge: str, expected: str, deadline: float, *, authorization: str = ""
) -> dict[str, Any]:
    """Ask the proxy the challenge until it answers or the deadline (monotonic) passes; only the right answer counts."""
    host, _, port = proxy.rpartition(":")
    host = host.strip("[]")
    anchor: dict[str, Any] = {"address": proxy, "answer": None, "verdict": "denied", "seen": NOT_TRIED}
    while time.monotonic() < deadline:
        try:
            body = _anchor_body((host, int(port)), challenge, deadline, authorization)
        except OSError as error:
            anchor["seen"] = errno_name(error)
            time.sleep(0.05)
            continue
        anchor["seen"] = ANSWERED
        anchor["answer"] = body[:128].decode("ascii", "replace")
        if hashlib.sha256(body).hexdigest() == expected:
            anchor["verdict"] = "reached"
        return anchor
    return anchor


def _anchor_body(address: tuple[str, int], challenge: str, deadline: float, authorization: str) -> bytes:
    host = "gate.ringfence.invalid"
    shown = f"Proxy-Authorization: {authorization}\r\n" if authorization else ""
    request = f"GET http://{host}/{challenge} HTTP/1.1\r\nHost: {host}\r\n{shown}Connection: close\r\n\r\n"
    with socket.create_connection(address, timeout=max(0.05, deadline - time.monotonic())) as sock:
        sock.sendall(request.encode("ascii"))
        data = b""
        while len(data) < 8192:  # noqa: PLR2004 - far more than the answer's head and 64 hex digits
            sock.settimeout(max(0.05, deadline - time.monotonic()))
            chunk = sock.recv(4096)
            head, blank, body = (data + chunk).partition(b"\r\n\r\n")
            data += chunk
            if not chunk or (blank and len(body) >= hashlib.sha256().digest_size * 2):
                return body.strip() if head.split(b"\r\n", 1)[0].split(b" ")[1:2] == [b"200"] else head[:64]
    return b""


def try_targets(
    targets: list[Target], wait: float, deadline: float, *, rounds: int = 1, interval: float = 0.0
) -> list[list[str]]:
    """Try all targets side by side, a round every `interval` seconds; for each round and target, what was seen.

    An attempt is given up `wait` seconds after the last round began, so that each has at least that long: a later
    round does not wait for the silence of an earlier one. No round begins after the deadline (monotonic).
    """
    done = 0
    seen: list[set[str]] = [set() for _ in range(rounds * len(targets))]
    waiting: dict[int, Attempt] = {}
    poller = select.poll()
    try:
        for number in range(rounds):
            began = time.monotonic()
            if began > deadline:
                break
            done += 1
            for place, target in enumerate(targets, number * len(targets)):
                for started in _start(place, target):
                    if isinstance(started, str):
                        seen[place].add(started)
                    else:
                        waiting[started.sock.fileno()] = started
                        poller.register(started.sock, started.events)
            _hear(poller, waiting, targets, seen, began + (interval if number + 1 < rounds else wait))
            if number + 1 < rounds:
                time.sleep(max(0.0, began + interval - time.monotonic()))
    finally:
        for attempt in waiting.values():
            seen[attempt.number].add("silence")
            attempt.sock.close()
    said = [ANSWERED if ANSWERED in found else ",".join(sorted(found)) or NOT_TRIED for found in seen]
    return [said[number * len(targets) : (number + 1) * len(targets)] for number in range(done)]


def settle(targets: list[Target], wait: float, deadline: float) -> int:
    """Try these until none answers in one round, or until the deadline (monotonic); milliseconds that it took.

    Where policy reaches a new address only after a while, everything is open until then. Whether it holds is judged
    afterwards, by rounds that start anew: what was seen here counts for nothing.
    """
    began = time.monotonic()
    while targets and time.monotonic() < deadline:
        rows = try_targets(targets, wait, deadline)
        if rows and ANSWERED not in rows[0]:
            break
        time.sleep(0.02)
    return int((time.monotonic() - began) * 1000)


def _hear(
    poller: Any, waiting: dict[int, Attempt], targets: list[Target], seen: list[set[str]], deadline: float
) -> None:
    """Take in what comes of the attempts until the deadline (monotonic), or until none is left waiting."""
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000):
            attempt = waiting[descriptor]
            result = _finish(attempt, targets[attempt.number % len(targets)])
            if result is not None:
                seen[attempt.number].add(result)
                poller.unregister(descriptor)
                del waiting[descriptor]
                attempt.sock.close()


def _start(index: int, target: Target) -> list[Attempt | str]:
    """Set one target's attempts going: a link-local address is tried on each interface, its zone being another's."""
    try:
        return [_start_one(index, target, address) for address in _addresses(target)]
    except OSError as error:
        return [errno_name(error)]


def _addresses(target: Target) -> list[Any]:
    if target.kind in ("packet", "vsock"):
        return [None]
    if target.kind == "unix-path":
        return [_short(target.address)]
    if target.kind == "unix-abstract":
        return ["\0" + target.address[1:]]
    address, zone, _ = target.address.partition("%")
    if ":" not in address:
        return [(address, target.port or 0)]
    if not zone:
        return [(address, target.port or 0, 0, 0)]
    indices = [socket.if_nametoindex(name) for name in found_interfaces() if name != "lo"] or [1]
    return [(address, target.port or 0, 0, number) for number in indices]


def _short(path: str) -> str:
    """Give a name of at most 107 bytes for a socket's path, the most that an address holds (unix(7))."""
    if len(os.fsencode(path)) <= 107:  # noqa: PLR2004 - as above
        return path
    folder, _, name = path.rpartition("/")
    # Left open until this program ends: the name goes through it.
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/{name}"


def _start_one(index: int, target: Target, address: Any) -> Attempt | str:
    try:
        sock = socket.socket(*_socket_kind(target))
    except OSError as error:
        return errno_name(error)
    try:
        sock.setblocking(False)
        if target.kind in BOUND_KINDS:
            links = [name for name in found_interfaces() if name != "lo"] or ["lo"]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, links[0].encode())
        if target.kind in ("packet", "vsock"):
            # To have such a socket is the leak; whom it could reach is beyond any namespace.
            sock.close()
            return ANSWERED
        result = sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            sock.close()
            # On a Unix socket EAGAIN is a full queue: somebody listens.
            listening = result == errno.EAGAIN and target.kind.startswith("unix-")
            return ANSWERED if listening else errno.errorcode.get(result, "EOTHER")
        if target.kind in WEAK_KINDS:
            sock.send(_datagram(target))
            return Attempt(index, sock, select.POLLIN)
    except OSError as error:
        sock.close()
        return errno_name(error)
    return Attempt(index, sock, select.POLLOUT)


def _socket_kind(target: Target) -> tuple[int, int, int]:
    v6 = ":" in target.address
    family = socket.AF_INET6 if v6 else socket.AF_INET
    if target.kind.startswith("unix-"):
        return socket.AF_UNIX, socket.SOCK_STREAM, 0
    if target.kind == "packet":
        return socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)
    if target.kind == "vsock":
        return socket.AF_VSOCK, socket.SOCK_STREAM, 0
    if target.kind.startswith("icmp"):
        protocol = socket.IPPROTO_ICMPV6 if v6 else socket.IPPROTO_ICMP
        return family, socket.SOCK_RAW if target.kind == "icmp-raw" else socket.SOCK_DGRAM, protocol
    return family, socket.SOCK_DGRAM if target.kind in WEAK_KINDS else socket.SOCK_STREAM, 0


def _datagram(target: Target) -> bytes:
    if target.kind in ("dns-udp", "dns-relay"):
        question = b"\x04gate\x09ringfence\x07invalid\x00\x00\x01\x00\x01"
        return struct.pack("!6H", 0x5246, 0x0100, 1, 0, 0, 0) + question
    if target.kind in ("udp", "udp-bound"):
        return b"ringfence-gate"
    if ":" in target.address:
        return struct.pack("!BBHHH", 128, 0, 0, 0x5246, 1)
    # RFC 1071 over type 8, code 0, identifier, sequence 1; the kernel fills it in only for datagram sockets.
    return struct.pack("!BBHHH", 8, 0, 0xFFFF - (0x0800 + 0x5246 + 1), 0x5246, 1)


def _finish(attempt: Attempt, target: Target) -> str | None:
    """Read off what came of an attempt; None when what came was not an answer."""
    error = attempt.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return errno.errorcode.get(error, "EOTHER")
    try:
        if target.kind in WEAK_KINDS:
            data = attempt.sock.recv(2048)
            if target.kind == "dns-relay":
                return NOT_RELAYED.get(data[3] & 15 if len(data) > 3 else 0, ANSWERED)  # noqa: PLR2004 - byte 3 holds it
            # A raw socket on loopback also hears the request itself (types 8 and 128).
            at = (data[0] & 15) * 4 if target.kind == "icmp-raw" and ":" not in target.address else 0
            return None if target.kind == "icmp-raw" and data[at : at + 1] in (b"\x08", b"\x80") else ANSWERED
        # A connect to an unused port of one's own range may meet itself (RFC 9293, simultaneous open): nobody is there.
        met_itself = attempt.sock.getsockname() == attempt.sock.getpeername() and target.kind in (
            "tcp",
            "tcp-bound",
            "dns-tcp",
        )
    except OSError as failure:
        return errno_name(failure)
    return "ECONNREFUSED" if met_itself else ANSWERED


def found_descriptors() -> list[str]:
    """List what is open beside stdin, stdout and stderr: nothing but those three is meant to come in."""
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):  # noqa: PTH208 - pathlib is 5 ms of start-up
        # The listing's own descriptor is gone again: OSError.
        if int(name) > 2:  # noqa: PLR2004 - 0, 1 and 2
            with contextlib.suppress(OSError):
                target = os.readlink("/proc/self/fd/" + name)  # noqa: PTH115 - as above
                found.append(f"{name} -> {target}")
    return found


def found_sockets() -> list[str]:
    """List path sockets that can be seen: before the command has started, none of them can be its own."""
    found, waiting, entries = [], ["/"], 0
    while waiting:
        folder = waiting.pop()
        try:
            listing = list(os.scandir(folder))
        except OSError:
            continue
        for entry in listing:
            entries += 1
            if entry.path in UNWALKED:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            else:
                # Not by the listing's own word: of a socket that is bound over a plain file, that says "plain file".
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                        found.append(entry.path)
        if entries > MAX_ENTRIES:
            return [*found, f"more than {MAX_ENTRIES} files to look at"]
    return sorted(found)


def found_interfaces() -> list[str]:
    """List the network interfaces, not by netlink: a fence has no such sockets."""
    with open("/proc/self/net/dev", encoding="ascii") as file:  # noqa: PTH123 - pathlib is 5 ms of start-up
        # Two lines of heading (proc_pid_net(5)); no name holds a colon.
        return [line.partition(":")[0].strip() for line in file.read().splitlines()[2:]]


def found_inside(interfaces: list[str]) -> list[dict[str, Any]]:
    """Report as reached whatever came in that should not be there: descriptors, path sockets, interfaces."""
    rows = [("descriptor", text) for text in found_descriptors()]
    rows += [("socket", text) for text in found_sockets()]
    rows += [("interface", name) for name in found_interfaces() if name not in interfaces]
    return [
        {
            "name": f"{kind}:{text}",
            "kind": kind,
            "address": text,
            "port": None,
            "alive": True,
            "verdict": "reached",
            "seen": "present",
        }
        for kind, text in rows
    ]


def probe(given: dict[str, Any]) -> dict[str, Any]:
    """Ask the anchor, try every target for all rounds, look around; the whole report."""
    began = time.monotonic()
    deadline = began + float(given["budget_s"])
    rounds, wait = int(given["rounds"]), float(given.get("attempt_s", ATTEMPT_S))
    targets = [Target(t["name"], t["kind"], t["address"], t["port"], bool(t["alive"])) for t in given["targets"]]
    # At most half of the time: a fence without a proxy may leak all the same, and that is to be named too.
    anchor = ask_anchor(
        given["proxy"],
        given["challenge"],
        given["answer_sha256"],
        (began + deadline) / 2,
        authorization=given.get("authorization", ""),
    )
    settling = set(given.get("settle", ()))
    settled = settle([target for target in targets if target.name in settling], wait, (began + deadline) / 2)
    strong = [target for target in targets if target.kind not in WEAK_KINDS]
    weak = [target for target in targets if target.kind in WEAK_KINDS]
    seen: dict[str, set[str]] = {target.name: set() for target in targets}
    strongly = try_targets(strong, wait, deadline, rounds=rounds, interval=float(given["interval_s"]))
    reached = any(ANSWERED in found for found in strongly)
    weakly = [] if reached else try_targets(weak, wait, deadline)
    for tried, rows in ((strong, strongly), (weak, weakly)):
        for found in rows:
            for target, result in zip(tried, found):  # noqa: B905 - `strict` is newer than 3.8
                seen[target.name].add(result)
    done = len(strongly)
    reported = []
    for target in targets:
        results = ",".join(sorted(seen[target.name])) or NOT_TRIED
        reported.append({**target._asdict(), "verdict": verdict(target.kind, target.alive, results), "seen": results})
    reported += found_inside(given["interfaces"])
    failures = [] if anchor["verdict"] == "reached" else ["anchor"]
    failures += [t["name"] for t in reported if t["verdict"] == "reached" or (t["alive"] and t["verdict"] != "denied")]
    failures += ["rounds"] if done < rounds or (not failures and any(t["seen"] == NOT_TRIED for t in reported)) else []
    return {
        "version": VERSION,
        "kind": "gate-report",
        "passed": not failures,
        "challenge": given["challenge"],
        "anchor": anchor,
        "targets": reported,
        "rounds": done,
        "runtime": {**_runtime(), "settled_ms": settled},
        "arrivals": [],
        "failures": failures,
        "elapsed_ms": int((time.monotonic() - began) * 1000),
    }


def _runtime() -> dict[str, Any]:
    with open("/proc/version", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - pathlib is 5 ms of start-up
        kernel = file.read(256).strip()
    return {
        "kernel": kernel,
        "uid": os.getuid(),
        "interfaces": sorted(found_interfaces()),
        "python": sys.version.split()[0],
    }


def hold(given: dict[str, Any]) -> bool:
    """Wait until the named file holds the named text; False when that did not come before `until` (Unix seconds)."""
    while time.time() < float(given["until"]):
        try:
            with open(given["file"], encoding="ascii") as file:  # noqa: PTH123 - pathlib is 5 ms of start-up
                if file.read(256).strip() == given["text"]:
                    return True
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    return False


def main() -> int:
    """Read the input (stdin, or the file named by the one argument), probe, print the report, exit as it says."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write("usage: ringfence-gate [INPUT.json]\n\nTry, from inside a fence, what must not work there.\n")
        return 0
    try:
        # All attempts of all rounds may be open at once.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with open(sys.argv[1] if len(sys.argv) > 1 else 0, "rb") as file:  # noqa: PTH123 - descriptor 0 has no path
            given = json.loads(file.read(1 << 20))
        waiting = given.get("hold")
        report = probe(given)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"ringfence-gate: unusable input or surroundings: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - its diagnostics
        return 2
    sys.stdout.write(json.dumps(report, sort_keys=True, separators=(",", ":")) + "\n")
    sys.stdout.flush()
    if not report["passed"]:
        return 1
    return 0 if waiting is None or hold(waiting) else 1


if __name__ == "__main__":
    sys.exit(main())
