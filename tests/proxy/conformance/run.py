"""Owns sending one case through one proxy and what can be seen of it, and the judgement on that; starts no proxy."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.proxy.conformance.table import expand
from tests.proxy.harness import Client
from tests.proxy.test_client_hello import built, hello, host_name, records, sni
from tests.rig import Mode, addresses, answer, network
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.proxy.conformance.table import Case
    from tests.rig import Rig

LIMIT_S: Final = 4.0
QUIET_S: Final = 0.3
CLOSE_S: Final = 1.0
"""How long after a refusal a connection may still be open."""

DNS_PORT: Final = 53


@dataclass(slots=True)
class Seen:
    """What a case led to: `statuses` of the answers in order (0 for an end without one, -1 for none in time)."""

    statuses: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    closed: bool = False
    took_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    flows: list[str] = field(default_factory=list)
    reached: bytes = b""
    hello: bytes = b""
    """The first ClientHello, where a second one comes after it."""


def client_hello(row: dict[str, Any]) -> bytes:
    """Write the ClientHello that a row asks for."""
    name = row["hello"]
    usual = name is None or (name.replace(".", "").replace("-", "").isalnum() and name.isascii())
    if "size" in row or not usual or (name is not None and (name.endswith(".") or name[0].isdigit())):
        # what OpenSSL does not write: an odd name, a large key share (here an extension that nobody knows)
        extra = bytes(row.get("size", 4))
        unknown = b"\xfe\x0d" + len(extra).to_bytes(2, "big") + extra
        data = built(sni(host_name(name.encode("latin-1"))) + unknown)
    else:
        data = hello(name)
    if row.get("records", 1) > 1:
        message = data[5:]
        data = records(message, len(message) // row["records"] + 1)
    return data


def send(rig: Rig, port: int, case: Case) -> Seen:
    """Carry one case out and look at what came of it, everywhere."""
    row, seen = case.row, Seen()
    data = bytes.fromhex(row["send_hex"]) if "send_hex" in row else expand(row["send"])
    limit = float(row.get("within_s", LIMIT_S))
    with contextlib.ExitStack() as stack:
        for _ in range(row.get("occupied", 0)):
            stack.enter_context(Client(rig.connect("127.0.0.1", port)))
        if row.get("occupied"):
            time.sleep(0.1)
        if row.get("twice"):
            with Client(rig.connect("127.0.0.1", port)) as before:
                before.send(data)
                _answer(before, Seen(), limit)
        client = stack.enter_context(Client(rig.connect("127.0.0.1", port)))
        start = time.monotonic()
        _converse(client, case, data, seen, limit)
        seen.took_s = time.monotonic() - start
        seen.asked = rig.asked()
        seen.flows = [f"{one.address}:{one.port}" for one in rig.packets() if one.port not in (None, DNS_PORT)]
        seen.reached = b"".join(one.first for one in rig.arrivals() if one.port != DNS_PORT and one.kind == "tcp")
    return seen


def _converse(client: Client, case: Case, data: bytes, seen: Seen, limit: float) -> None:
    row = case.row
    is_tunnel = data.startswith(b"CONNECT") and "statuses" not in row
    then = [expand(part) for part in row.get("then", [])]
    if "hello" in row:
        whole = client_hello(row)
        if row.get("early"):
            data += whole
        elif "second" in row:
            seen.hello = whole
            then = [whole, client_hello({"hello": row["second"]})]
        else:
            size = row.get("pieces", len(whole))
            then = [whole[at : at + size] for at in range(0, len(whole), size)]
    data += expand(row.get("early_bytes", ""))
    client.send(data)
    if row.get("answers_after_then"):
        _send_all(client, then, row.get("pause_s", 0.0))
        then = []
    count = max(len(case.statuses), 1)
    while len(seen.statuses) < count and _answer(client, seen, limit, tunnel=is_tunnel):
        continue
    if not is_tunnel or seen.statuses[-1:] != [200]:
        if row.get("closes") or not case.accept:
            client.until(lambda _: False, CLOSE_S)
        seen.closed, seen.rest = client.ended, bytes(client.data)
        return
    _send_all(client, then, row.get("pause_s", 0.0))
    if row.get("half_close"):
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
    wanted = expand(row["answer"]) if isinstance(row.get("answer"), str) else b""
    if case.accept:
        hears = wanted or expand(row.get("hears", ""))
        expected = (lambda got: hears in got) if hears else bool
        client.until(expected, 3.0 if hears or row.get("reaches") else QUIET_S)
        if "second" in row:
            client.until(lambda _: False, QUIET_S)
    else:
        client.until(lambda _: False, max(limit, 3.0) if case.slow else CLOSE_S)
    seen.closed, seen.rest = client.ended, bytes(client.data)


def _send_all(client: Client, parts: list[bytes], pause_s: float) -> None:
    for at, part in enumerate(parts):
        if pause_s or (at and len(parts) < 10):
            time.sleep(pause_s or 0.1)
        with contextlib.suppress(OSError):
            client.send(part)


def _answer(client: Client, seen: Seen, limit: float, *, tunnel: bool = False) -> bool:
    """Read one response; False when none came, which is put down as 0 or -1."""
    got = client.until(lambda data: b"\r\n\r\n" in data, limit)
    head, whole, rest = got.partition(b"\r\n\r\n")
    if not whole or not head.startswith(b"HTTP/1."):
        seen.statuses.append(0 if client.ended else -1)
        return False
    client.data[:] = rest
    line, *lines = head.decode("latin-1").split("\r\n")
    words = [*line.split(" ", 2), "", ""]
    fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    seen.statuses.append(int(words[1]))
    seen.reasons.append(words[2])
    seen.heads.append(fields)
    body = b""
    if not (tunnel and words[1] == "200") and int(words[1]) >= 200 and int(words[1]) not in (204, 304):
        body = _body(client, fields)
    seen.bodies.append(body)
    return True


def _body(client: Client, fields: dict[str, str]) -> bytes:
    if fields.get("transfer-encoding") == "chunked":
        content = b""
        while True:
            client.until(lambda data: b"\r\n" in data, 2.0)
            size, found, _ = bytes(client.data).partition(b"\r\n")
            try:
                length = int(size, 16) if found else 0
            except ValueError:
                return content
            need = len(size) + length + 4
            while len(client.data) < need and not client.ended and client.more(2.0):
                continue
            content += bytes(client.data[len(size) + 2 :][:length])
            del client.data[: len(size) + length + 4]
            if not length:
                return content
    if "content-length" not in fields:
        client.until(lambda _: False, 1.0)
        content, client.data[:] = bytes(client.data), b""
        return content
    length = int(fields["content-length"]) if fields["content-length"].isdecimal() else 0
    client.until(lambda data: len(data) >= length, 2.0)
    content = bytes(client.data[:length])
    del client.data[:length]
    return content


def judge(case: Case, seen: Seen, *, strict: bool) -> list[str]:
    """Say what is not as it must be. Strict: the very status; else whether it was served or refused, and how far."""
    row = case.row
    wrong = []
    last = seen.statuses[-1] if seen.statuses else -1
    if last == -1:
        wrong.append("hang")
    if (strict and case.statuses and seen.statuses != case.statuses) or (
        strict and "statuses_any" in row and last not in row["statuses_any"]
    ):
        wrong.append(f"status {seen.statuses}")
    if seen.took_s > float(row.get("within_s", LIMIT_S)) + 1:
        wrong.append(f"{seen.took_s:.1f} s")
    wrong += _judge_served(case, seen) if case.accept else _judge_refused(case, seen)
    wrong += _judge_upstream(row.get("upstream", {}), seen) if last == 200 else []
    wrong += _judge_client(row.get("client", {}), seen)
    if row.get("closes") and not seen.closed:
        wrong.append("left open")
    return wrong


def _judge_served(case: Case, seen: Seen) -> list[str]:
    row, wrong = case.row, []
    expected = case.statuses
    if expected and [status < 400 for status in expected] != [0 < status < 400 for status in seen.statuses]:
        wrong.append(f"refused: {seen.statuses}")
    if "dns" in row and len(seen.asked) != row["dns"]:
        wrong.append(f"{len(seen.asked)} names asked")
    if "targets" in row:
        got = [json.loads(body)["target"] if body.startswith(b"{") else "" for body in seen.bodies]
        wrong += [] if got == row["targets"] else [f"answers for {got}"]
    for key in ("answer", "hears"):
        if key in row and expand(row[key]) not in seen.rest:
            wrong.append(f"heard {seen.rest[:20]!r}")
    reaches = row.get("reaches")
    if isinstance(reaches, str) and seen.reached != expand(reaches):
        wrong.append(f"reached with {seen.reached[:20]!r}")
    if reaches is True and "hello" in row and not seen.rest.startswith(b"\x16") and not seen.reached:
        wrong.append("nothing arrived")
    if "second" in row and not seen.reached.removeprefix(seen.hello):
        wrong.append("the second did not arrive")
    return wrong


def _judge_refused(case: Case, seen: Seen) -> list[str]:
    row, wrong = case.row, []
    last = seen.statuses[-1] if seen.statuses else -1
    in_tunnel = "tunnel" in row and last == 200
    if in_tunnel:
        if not seen.closed:
            wrong.append("tunnel stays open")
        beyond = len(seen.reached.removeprefix(seen.hello))
        if beyond:
            wrong.append(f"{beyond} bytes reached the target")
    elif 0 < last < 400 or (row.get("statuses") and len(seen.statuses) < len(row["statuses"])):
        wrong.append(f"served: {seen.statuses}")
    if "tunnel" not in row:
        dns = row.get("dns", 0)
        if len(seen.asked) > dns:
            wrong.append(f"{len(seen.asked)} names asked")
        if row.get("connects", 0) == 0 and seen.flows:
            wrong.append(f"dialled {seen.flows[0]}")
    if "reaches_not" in row and expand(row["reaches_not"]) in seen.reached:
        wrong.append("the body reached the target")
    return wrong


def _judge_upstream(wanted: dict[str, Any], seen: Seen) -> list[str]:
    if not wanted:
        return []
    body = seen.bodies[-1]
    if not body.startswith(b"{"):
        return ["no echo"]
    echo = json.loads(body)
    headers = {name.lower() for name, _ in echo["headers"]}
    wrong = [f"{name} went on" for name in wanted.get("lacks", []) if name in headers]
    wrong += [f"no {name}" for name in wanted.get("names", []) if name not in headers]
    wrong += [f"no {one}" for one in wanted.get("has", []) if one not in echo["headers"]]
    if "host" in wanted and ["Host", wanted["host"]] not in echo["headers"]:
        wrong.append("another Host went on")
    wrong += [
        f"{key} {echo[key]!r}" for key in ("method", "target", "body") if key in wanted and echo[key] != wanted[key]
    ]
    if wanted.get("lacks_bytes", "\0").encode() in seen.reached:
        wrong.append(f"{wanted['lacks_bytes']} went on")
    return wrong


def _judge_client(wanted: dict[str, Any], seen: Seen) -> list[str]:
    if not wanted or not seen.heads:
        return []
    head = seen.heads[-1]
    wrong = [f"{name} came back" for name in wanted.get("lacks", []) if name in head]
    wrong += [f"{name} is {head.get(name)}" for name, value in wanted.get("has", {}).items() if head.get(name) != value]
    if "body" in wanted and seen.bodies[-1] != wanted["body"].encode():
        wrong.append(f"body {seen.bodies[-1][:20]!r}")
    return wrong


@contextlib.contextmanager
def prepared(rig: Rig, case: Case) -> Iterator[None]:
    """Set the names that a case is about, and make every address in them one that answers, where that can be."""
    added = []
    if "second" in case.row:
        rig.listen(443, Mode.SAYS_RETRY)
    for name, value in case.row.get("names", {}).items():
        shaped = isinstance(value, dict)
        rig.names[name] = (
            answer(value["shape"]) if shaped else answer(value, ttl=0) if isinstance(value, list) else value
        )
        for one in value if isinstance(value, list) else []:
            text = one if isinstance(one, str) else next(iter(one.values()))
            if text.replace(":", "").replace(".", "").isalnum() and text not in _CARRIED and _add(rig, text):
                added.append(text)
    try:
        yield
    finally:
        if "second" in case.row:
            rig.listen(443, Mode.TLS)
        for text in added:
            _ip(rig, "del", text)


_CARRIED = frozenset({*addresses.ORIGINS, *addresses.FORBIDDEN, *addresses.HOST_ADDRESSES})


def _add(rig: Rig, text: str) -> bool:
    return (text.count(".") == 3 or ":" in text) and _ip(rig, "add", text)


def _ip(rig: Rig, verb: str, text: str) -> bool:
    length = "128" if ":" in text else "32"
    command = [network.program("ip"), "-n", rig.internet, "addr", verb, f"{text}/{length}", "dev", "lo"]
    command += ["nodad"] if verb == "add" and ":" in text else []
    # the kernel takes no multicast address or loopback's own for an interface: then nothing answers there, for anybody
    return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0


@contextlib.contextmanager
def scripted(rig: Rig) -> Iterator[None]:
    """Run the origin that says what it is told to."""
    argv = [*rig.instance.enter(rig.internet), sys.executable, "-m", "tests.proxy.conformance.scripted"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the scripted origin did not start")
            yield
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(10)
