"""The process: its start, its policies, its lines, its end. Everything here stays on the loopback interface."""

from __future__ import annotations

import json
import os
import pwd
import select
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.proxy import examples
from tests.proxy.harness import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.policy import ProxyPolicy

LISTEN = ("--listen", "127.0.0.1:0")
PROOF = b"GET http://gate.ringfence.invalid/00112233445566778899 HTTP/1.1\r\nHost: x\r\n\r\n"
DENIED = b"CONNECT evil.com:443 HTTP/1.1\r\nHost: evil.com\r\n\r\n"
NOBODY = pwd.getpwnam("nobody")


def policy(**fields: Any) -> ProxyPolicy:
    """Make a policy without resolvers: nothing here may send a packet anywhere but to loopback."""
    return examples.policy(resolvers=(), **fields)


class Running:
    """One proxy process on loopback."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    def write(self, *policies: ProxyPolicy | bytes) -> None:
        for one in policies:
            self.stdin.write((one if isinstance(one, bytes) else one.to_json().encode()) + b"\n")
        self.stdin.flush()

    def line(self, timeout_s: float = 8.0) -> dict[str, Any]:
        assert select.select([self.stdout], [], [], timeout_s)[0], "no line came"
        line: dict[str, Any] = json.loads(self.stdout.readline())
        return line

    def port(self) -> int:
        ready = self.line()
        assert ready["kind"] == "ready", ready
        return int(ready["listen"].rpartition(":")[2])

    def ask(self, port: int, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(1 << 16), b""))

    def end(self) -> list[dict[str, Any]]:
        """End its input; the lines that were left."""
        self.stdin.close()
        rest = [json.loads(line) for line in self.stdout]
        self.process.wait(8)
        return rest


@contextmanager
def started(*arguments: str, pass_fds: Sequence[int] = (), stdout: int = subprocess.PIPE) -> Iterator[Running]:
    process = subprocess.Popen(
        [PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        pass_fds=tuple(pass_fds),
        bufsize=0,
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def words(running: Running) -> str:
    assert running.process.stderr is not None
    return running.process.stderr.read().decode()


def test_the_first_line_says_where_it_listens_and_the_last_why_it_ended() -> None:
    with started(*LISTEN) as running:
        running.write(policy(generation=7))
        ready = running.line()
        assert ready == {"kind": "ready", "listen": ready["listen"], "generation": 7, "pid": running.process.pid}
        assert running.end() == [{"kind": "stopped", "code": "eof", "seq": 0}]
        assert running.process.returncode == 0
        assert words(running) == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{}", "the policy has no"),
        (b"nonsense", "not one JSON object"),
        (policy(expires_at=1.0).to_json().encode(), "expired"),
        (b'{"allow":"' + b"a" * (9 << 20) + b'"}', "not one JSON object"),
    ],
    ids=["an empty object", "no JSON", "an expired policy", "nine megabytes"],
)
def test_without_a_usable_first_policy_it_does_not_start(line: bytes, says: str) -> None:
    with started(*LISTEN) as running:
        running.write(line)
        assert running.process.wait(8) == 2
        assert says in words(running)
        assert running.stdout.read() == b""


def test_an_input_that_ends_before_a_policy_is_no_start() -> None:
    with started(*LISTEN) as running:
        running.stdin.close()
        assert running.process.wait(8) == 2
        assert "no policy" in words(running)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--listen", "localhost:3128"),
        ("--listen", "127.0.0.1"),
        ("--listen", "127.0.0.1:+1"),
        ("--listen", "::1:3128"),
        (*LISTEN, "--receive-listener", "5"),
        (*LISTEN, "--metrics"),
        (*LISTEN, "--user", "root"),
        (*LISTEN, "--user", "0"),
        (*LISTEN, "--user", "no-such-user"),
    ],
    ids=" ".join,
)
def test_unusable_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with started(*arguments) as running:
        assert running.process.wait(8) == 64
        assert words(running)


def test_a_newer_generation_counts_from_its_acknowledgement_on_and_nothing_else_does() -> None:
    with started(*LISTEN) as running:
        first = policy(generation=3, allow=["example.com"])
        running.write(first)
        port = running.port()
        assert b"403 not_listed" in running.ask(port, DENIED)
        assert running.line()["generation"] == 3
        for bad in (
            first,
            replace(first, generation=2),
            replace(first, generation=9, run="another"),
            replace(first, generation=9, canary=3129),
            b"{}",
        ):
            running.write(bad)
            answer = running.line()
            assert answer["kind"] == "policy"
            assert answer["accepted"] is False
            assert answer["message"]
        running.write(replace(first, generation=4, deny=policy(deny=["evil.com"]).deny))
        assert running.line() == {"kind": "policy", "generation": 4, "accepted": True}
        assert b"403 denied" in running.ask(port, DENIED)
        record = running.line()
        assert (record["generation"], record["seq"], record["code"]) == (4, 2, "denied")


def test_past_its_expiry_it_closes_everything_and_ends() -> None:
    with started(*LISTEN) as running:
        running.write(policy(expires_at=time.time() + 3))
        port = running.port()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as idle:
            assert running.line() == {"kind": "stopped", "code": "expired", "seq": 0}
            assert running.process.wait(8) == 0
            with pytest.raises(ConnectionResetError):
                idle.recv(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_what_was_decided_is_told(number: signal.Signals) -> None:
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()
        for _ in range(5):
            running.ask(port, DENIED)
        running.process.send_signal(number)
        assert running.process.wait(8) == 0
        lines = [json.loads(line) for line in running.stdout]
        assert sum(line["count"] for line in lines if line["kind"] == "decision") == 5
        assert lines[-1] == {"kind": "stopped", "code": "sigterm", "seq": lines[-2]["seq"]}


def test_identical_denials_are_told_once_at_once_and_then_as_a_count() -> None:
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()
        for _ in range(50):
            running.ask(port, DENIED)
        first = running.line(1)
        assert (first["count"], first["seq"]) == (1, 1)
        total = 1
        while total < 50:
            record = running.line(3)
            assert record["count"] > 1
            total += record["count"]
        assert total == 50


def test_a_reader_of_lines_that_stalls_stops_what_is_allowed_and_never_the_loop() -> None:
    """Nothing is read from the pipe while thousands of different denials fill it and the queue behind it."""
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()

        def flood(part: int) -> None:
            for at in range(1600):
                name = f"{'x' * 60}.{'y' * 60}.{'z' * 60}.{part}-{at}.com"
                running.ask(port, f"CONNECT {name}:443 HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())

        threads = [threading.Thread(target=flood, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = running.ask(port, b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 sink_failed")
        numbers: list[int] = []
        while not numbers or select.select([running.stdout], [], [], 1)[0]:
            numbers.append(running.line()["seq"])
        assert numbers == sorted(set(numbers))
        # once it is read again, all is well
        assert b"403 not_listed" in running.ask(port, DENIED)
        seq = running.line()["seq"]
        assert seq > len(numbers), "a line that was lost has a number that is missing"


def test_a_closed_output_ends_the_proxy() -> None:
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()
        running.stdout.close()
        running.ask(port, DENIED)
        assert running.process.wait(8) == 1


def test_the_canary_answers_nothing_and_reports_arrivals() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with started(*LISTEN) as running:
        running.write(policy(canary=free))
        running.port()
        with socket.create_connection(("127.0.0.1", free), timeout=5) as arrival:
            assert arrival.recv(1) == b""
        assert running.line() == {"kind": "canary", "peer": "127.0.0.1"}


def hand_over(sender: socket.socket, *sent: socket.socket) -> None:
    socket.send_fds(sender, [b"x"], [one.fileno() for one in sent])


@pytest.mark.parametrize("policy_first", [True, False], ids=["policy first", "listener first"])
def test_a_listener_is_received_over_an_inherited_socket(policy_first: bool) -> None:
    near, far = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(near)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with started("--receive-listener", str(far.fileno()), pass_fds=[far.fileno()]) as running:
            far.close()
            if policy_first:
                running.write(policy())
                time.sleep(0.3)
            hand_over(near, listener)
            if not policy_first:
                time.sleep(0.3)
                running.write(policy())
            port = listener.getsockname()[1]
            listener.close()
            assert running.port() == port
            assert near.recv(1) == b""  # it closed its end
            assert running.ask(port, PROOF).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("kind", ["nothing", "two", "not listening", "datagram", "a pipe"])
def test_what_is_not_exactly_one_listener_is_refused(kind: str) -> None:
    near, far = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(near)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        idle = stack.enter_context(socket.socket())
        datagram = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        running = stack.enter_context(started("--receive-listener", str(far.fileno()), pass_fds=[far.fileno()]))
        far.close()
        running.write(policy())
        match kind:
            case "nothing":
                near.close()
            case "two":
                hand_over(near, listener, listener)
            case "not listening":
                hand_over(near, idle)
            case "datagram":
                hand_over(near, datagram)
            case _:
                read, write = os.pipe()
                socket.send_fds(near, [b"x"], [read])
                os.close(read)
                os.close(write)
        assert running.process.wait(8) == 2
        assert "listen" in words(running)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", ["nobody", str(NOBODY.pw_uid), "54321"])
def test_root_is_given_up_for_good_before_anything_is_read(user: str) -> None:
    with started(*LISTEN, "--user", user) as running:
        uid = "54321" if user == "54321" else str(NOBODY.pw_uid)
        end = time.monotonic() + 10
        # nothing is written before its policy comes, so that only this shows that it has started
        while (status := status_of(running.process.pid))["Uid"].split() != [uid] * 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert status["Uid"].split() == [uid] * 4
        assert "0" not in status["Gid"].split()
        assert status["Groups"].strip() == ""
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        running.write(policy())
        assert running.ask(running.port(), PROOF).startswith(b"HTTP/1.1 200 OK")


def test_a_head_that_never_ends_is_answered_at_its_deadline_however_slowly_it_comes() -> None:
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()
        with socket.create_connection(("127.0.0.1", port), timeout=15) as slow:
            start = time.monotonic()
            for at in range(12):
                slow.sendall(b"CONNECT a"[at : at + 1] or b"b")
                if select.select([slow], [], [], 1)[0]:
                    break
            answer = slow.recv(1000)
            assert answer.startswith(b"HTTP/1.1 408 head_timeout")
            assert 9.5 < time.monotonic() - start < 12


def test_slow_heads_do_not_delay_a_good_client() -> None:
    with started(*LISTEN) as running:
        running.write(policy())
        port = running.port()
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for one in slow:
            one.sendall(b"CONNECT exam")
        start = time.monotonic()
        assert running.ask(port, PROOF).startswith(b"HTTP/1.1 200 OK")
        assert time.monotonic() - start < 0.5
        for one in slow:
            one.close()
