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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
ATTEMPT_S = 0.5
"""How long a forbidden target may stay silent before silence is what was seen, where its answer may come from afar."""
TIMES_AS_LONG = 20
"""How often over silence must last what the control took: whatever holds one back holds the others back as well."""
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
    near: bool = False
    """Whether only this very host could answer there."""


class Waits(NamedTuple):
    """How long silence must last, in seconds, before it counts.

    `near`: at targets on this very host, and at least TIMES_AS_LONG what the control took: an attempt at `control`, an
    address that is known to answer, made after all others. `far`: at all others, and without a control.
    """

    near: float
    far: float
    control: Target | None


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
    targets: list[Target], waits: Waits, deadline: float, *, rounds: int = 1, interval: float = 0.0
) -> tuple[list[list[str]], int]:
    """Try all targets side by side, a round every `interval` seconds: for each round and target what was seen.

    A later round does not wait for the silence of an earlier one; no round begins after the deadline (monotonic). Gives
    also how many rounds count: none when by then the control was not answered or silence was shorter than it must be.
    """
    hearing = Hearing(targets, waits, rounds)
    width, done = len(targets), 0
    try:
        for number in range(rounds):
            if time.monotonic() > deadline:
                break
            hearing.begin_round(number)
            done += 1
            if number + 1 < rounds:
                following = hearing.last + interval
                hearing.hear(lambda: following)  # noqa: B023 - called within this turn
                time.sleep(max(0.0, following - time.monotonic()))
        hearing.begin_control()
        hearing.hear(lambda: min(deadline, hearing.silent_until()))
        counts = hearing.silent_until() <= deadline
    finally:
        hearing.close()
    said = [ANSWERED if ANSWERED in found else ",".join(sorted(found)) or NOT_TRIED for found in hearing.seen]
    return [said[number * width : (number + 1) * width] for number in range(done)], done if counts else 0


class Hearing:
    """The attempts that were begun, and what has come of them: round by round in their order, then the control."""

    def __init__(self, targets: list[Target], waits: Waits, rounds: int) -> None:
        """Begin nothing yet."""
        self.seen: list[set[str]] = [set() for _ in range(rounds * len(targets) + 1)]
        self.last = time.monotonic()
        self._targets, self._waits = targets, waits
        self._waiting: dict[int, Attempt] = {}
        self._poller = select.poll()
        self._control = len(self.seen) - 1
        self._asked = self._answered = self.last

    def begin_round(self, number: int) -> None:
        """Set one round's attempts going."""
        self.last = time.monotonic()
        for place, target in enumerate(self._targets, number * len(self._targets)):
            self._begin(place, target)

    def begin_control(self) -> None:
        """Set the control going, where there is one and somebody is silent."""
        if self._waits.control is not None and self._waiting:
            self._asked = time.monotonic()
            self._begin(self._control, self._waits.control)

    def _begin(self, place: int, target: Target) -> None:
        for started in _start(place, target):
            if isinstance(started, str):
                self._note(place, started)
            else:
                self._waiting[started.sock.fileno()] = started
                self._poller.register(started.sock, started.events)

    def hear(self, until: Callable[[], float]) -> None:
        """Take in what comes until a time (monotonic, asked for anew each time), or until nobody is waited for.

        Only an empty look after that time ends it: what came while this process was not let run is seen all the same.
        """
        while self._waiting:
            left = max(0.0, until() - time.monotonic())
            events = self._poller.poll(left * 1000)
            if not events and not left:
                return
            for descriptor, _ in events:
                attempt = self._waiting[descriptor]
                result = _finish(attempt, self._target(attempt.number))
                if result is not None:
                    self._note(attempt.number, result)
                    self._poller.unregister(descriptor)
                    del self._waiting[descriptor]
                    attempt.sock.close()

    def silent_until(self) -> float:
        """Say how long those who are silent must stay so (monotonic); for ever while the control was not answered."""
        silent = {attempt.number for attempt in self._waiting.values()}
        if not silent:
            return self.last
        far = self.last + self._waits.far
        if self._waits.control is None:
            return far
        if not self.seen[self._control] & {ANSWERED, "ECONNREFUSED"}:
            return float("inf")
        near = self._answered + max(self._waits.near, TIMES_AS_LONG * (self._answered - self._asked))
        return near if all(self._target(number).near for number in silent) else max(near, far)

    def close(self) -> None:
        """Give up who is still silent: that is what was seen of them."""
        for attempt in self._waiting.values():
            self.seen[attempt.number].add("silence")
            attempt.sock.close()

    def _target(self, place: int) -> Target:
        control = self._waits.control
        return control if control is not None and place == self._control else self._targets[place % len(self._targets)]

    def _note(self, place: int, result: str) -> None:
        self.seen[place].add(result)
        if place == self._control:
            self._answered = time.monotonic()


def settle(targets: list[Target], waits: Waits, deadline: float) -> int:
    """Try these until none answers in one round, or until the deadline (monotonic); milliseconds that it took.

    Where policy reaches a new address only after a while, everything is open until then. Whether it holds is judged
    afterwards, by rounds that start anew: what was seen here counts for nothing.
    """
    began = time.monotonic()
    while targets and time.monotonic() < deadline:
        rows, _ = try_targets(targets, waits._replace(control=None), deadline)
        if rows and ANSWERED not in rows[0]:
            break
        time.sleep(0.02)
    return int((time.monotonic() - began) * 1000)


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


def found_inside() -> list[tuple[str, str]]:
    """List what came in: descriptors, path sockets, interfaces, as kind and text."""
    rows = [("descriptor", text) for text in found_descriptors()]
    rows += [("socket", text) for text in found_sockets()]
    return rows + [("interface", name) for name in found_interfaces()]


def _came_in(kind: str, text: str) -> dict[str, Any]:
    """Report as reached what should not be there."""
    return {
        "name": f"{kind}:{text}",
        "kind": kind,
        "address": text,
        "port": None,
        "alive": True,
        "verdict": "reached",
        "seen": "present",
    }


def probe(given: dict[str, Any], inside: list[tuple[str, str]]) -> dict[str, Any]:
    """Ask the anchor, try every target for all rounds; the whole report, with what was found inside."""
    began = time.monotonic()
    deadline = began + float(given["budget_s"])
    rounds = int(given["rounds"])
    targets = [
        Target(t["name"], t["kind"], t["address"], t["port"], bool(t["alive"]), bool(t.get("near")))
        for t in given["targets"]
    ]
    # At most half of the time: a fence without a proxy may leak all the same, and that is to be named too.
    anchor = ask_anchor(
        given["proxy"],
        given["challenge"],
        given["answer_sha256"],
        (began + deadline) / 2,
        authorization=given.get("authorization", ""),
    )
    waits = _waits(given, anchored=anchor["verdict"] == "reached")
    settling = set(given.get("settle", ()))
    settled = settle([target for target in targets if target.name in settling], waits, (began + deadline) / 2)
    strong = [target for target in targets if target.kind not in WEAK_KINDS]
    weak = [target for target in targets if target.kind in WEAK_KINDS]
    seen: dict[str, set[str]] = {target.name: set() for target in targets}
    strongly, done = try_targets(strong, waits, deadline, rounds=rounds, interval=float(given["interval_s"]))
    reached = any(ANSWERED in found for found in strongly)
    weakly, heard = ([], 1) if reached or not weak else try_targets(weak, waits, deadline)
    for tried, rows in ((strong, strongly), (weak, weakly)):
        for found in rows:
            for target, result in zip(tried, found):  # noqa: B905 - `strict` is newer than 3.8
                seen[target.name].add(result)
    done = done if heard else 0
    reported = []
    for target in targets:
        results = ",".join(sorted(seen[target.name])) or NOT_TRIED
        row = {name: value for name, value in target._asdict().items() if name != "near"}
        reported.append({**row, "verdict": verdict(target.kind, target.alive, results), "seen": results})
    allowed = [("interface", name) for name in given["interfaces"]]
    reported += [_came_in(*row) for row in inside if row not in allowed]
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


def _waits(given: dict[str, Any], *, anchored: bool) -> Waits:
    """Read how long silence must last; without the proxy its address answers nobody, so there is no control then."""
    where = given.get("control") if anchored else None
    host, _, port = (where or "").rpartition(":")
    control = Target("control", "tcp", host.strip("[]"), int(port), True) if where else None
    return Waits(float(given.get("near_s", ATTEMPT_S)), float(given.get("attempt_s", ATTEMPT_S)), control)


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
        # Before the question has come: who asks may still be on the way.
        inside = found_inside()
        with open(sys.argv[1] if len(sys.argv) > 1 else 0, "rb") as file:  # noqa: PTH123 - descriptor 0 has no path
            given = json.loads(file.read(1 << 20))
        waiting = given.get("hold")
        report = probe(given, inside)
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
