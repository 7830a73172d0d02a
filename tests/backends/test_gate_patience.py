"""The gate on a host that is slow or starved: what can be reached is seen as reached, or nothing is proven."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import proxy
from reconciler.backends import gate_targets
from reconciler.core.gate_report import Target, TargetKind
from tests.backends.world import inside
from tests.rig import network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.rig
GATE = Path(proxy.__file__).parent / "gate.py"
KEY, CHALLENGE = b"k" * 32, "00" * 16
HERE = "127.0.0.1"
NEAR_S = 0.02
HOLE = "10.9.9.9"
LAST = b"last"


@pytest.fixture
def alone() -> Iterator[None]:
    """Be in a network namespace of this test's own, with a loopback and with a link on which nobody answers."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    holder = subprocess.Popen([network.program("unshare"), "--net", "sleep", "120"])
    try:
        while Path(f"/proc/{holder.pid}/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
            time.sleep(0.01)
        with inside(Path(f"/proc/{holder.pid}/ns/net")):
            for line in (
                "link set lo up",
                "link add hole type veth peer name beyond",
                "address add 10.9.9.1/24 dev hole",
                "link set hole up",
                "link set beyond up",
            ):
                subprocess.run([network.program("ip"), *line.split()], check=True)
            yield
    finally:
        holder.kill()
        holder.wait()


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None], kind: int = socket.SOCK_STREAM) -> Iterator[int]:
    """Serve on a port of the loopback until the end of the context; a connection each, or a datagram socket."""
    with socket.socket(socket.AF_INET, kind) as listener:
        listener.bind((HERE, 0))
        if kind == socket.SOCK_STREAM:
            listener.listen(16)

        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    if kind == socket.SOCK_DGRAM:
                        if listener.recv(512, socket.MSG_PEEK) == LAST:
                            return
                        serve(listener)
                        continue
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection)

        thread = threading.Thread(target=loop)
        thread.start()
        yield listener.getsockname()[1]
        if kind == socket.SOCK_STREAM:
            listener.shutdown(socket.SHUT_RDWR)
        else:
            with socket.socket(socket.AF_INET, kind) as last:
                last.sendto(LAST, listener.getsockname())
        thread.join()


def as_proxy(connection: socket.socket) -> None:
    """Answer the challenge as the proxy does."""
    if connection.recv(4096):
        body = gate_targets.answer(KEY, CHALLENGE).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n" + body)


class Gate:
    """One gate in the calling thread's namespace."""

    def __init__(self, port: int, *targets: Target, control: str | None, budget: float = 5.0) -> None:
        """Start it; it waits for its question."""
        self.question = gate_targets.Question(
            proxy=f"{HERE}:{port}",
            challenge=CHALLENGE,
            answer=gate_targets.answer(KEY, CHALLENGE),
            targets=targets,
            rounds=2,
            interval=0.01,
            budget=budget,
            interfaces=("lo", "hole", "beyond"),
            near=NEAR_S,
            control=control,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GATE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}
        )

    def ask(self) -> dict[str, Any]:
        """Ask it; its report, without what it found of this machine's own."""
        text = json.dumps(self.question.to_object()).encode()
        said, _ = self.process.communicate(text, timeout=30)
        report: dict[str, Any] = json.loads(said)
        report["failures"] = [name for name in report["failures"] if not name.startswith(("socket:", "more than"))]
        return report


def near(kind: TargetKind, port: int, *, alive: bool = True, address: str = HERE) -> Target:
    """A target on this very host."""
    return Target(name="target", kind=kind, address=address, port=port, alive=alive, near=True)


def seen(report: dict[str, Any]) -> str:
    """What was seen at the one target."""
    (found,) = (row["seen"] for row in report["targets"] if row["name"] == "target")
    return str(found)


def test_silence_is_not_taken_for_a_denial_where_the_way_there_is_slow(alone: None) -> None:
    del alone
    slow = "qdisc add dev lo root tbf rate 16kbit burst 500 latency 20s"

    def answer(listener: socket.socket) -> None:
        _, peer = listener.recvfrom(512)
        # After the control has its answer, or nearly, and so much that it takes a fifth of a second.
        time.sleep(0.1)
        listener.sendto(bytes(400), peer)

    with listening(as_proxy) as port, listening(answer, socket.SOCK_DGRAM) as open_port:
        gate = Gate(port, near(TargetKind.UDP, open_port), control=f"{HERE}:1")
        subprocess.run([network.program("tc"), *slow.split()], check=True)
        report = gate.ask()
    assert report["anchor"]["verdict"] == "reached"
    assert seen(report) == "answered"


@pytest.mark.parametrize("others", [0, 200], ids=["while it listens", "before it has listened to anybody"])
@pytest.mark.parametrize("control", [f"{HERE}:1", None], ids=["with a control", "without one"])
def test_what_answers_while_the_gate_is_not_let_run_is_reached(alone: None, others: int, control: str | None) -> None:
    del alone
    gates: list[Gate] = []

    def answer(listener: socket.socket) -> None:
        _, peer = listener.recvfrom(512)
        gates[0].process.send_signal(signal.SIGSTOP)
        listener.sendto(b"here", peer)
        time.sleep(0.7)
        gates[0].process.send_signal(signal.SIGCONT)

    with listening(as_proxy) as port, listening(answer, socket.SOCK_DGRAM) as open_port:
        # Where nobody answers, and tried after it.
        holes = [
            Target(name=f"hole {number}", kind=TargetKind.UDP, address=HOLE, port=number, alive=True, near=True)
            for number in range(1, others + 1)
        ]
        gates.append(Gate(port, near(TargetKind.UDP, open_port), *holes, control=control))
        report = gates[0].ask()
    assert seen(report) == "answered"


def test_an_answer_from_afar_may_take_longer_than_one_of_this_host(alone: None) -> None:
    del alone

    def answer(listener: socket.socket) -> None:
        query, peer = listener.recvfrom(512)
        time.sleep(0.25)
        listener.sendto(query, peer)

    with listening(as_proxy) as port, listening(answer, socket.SOCK_DGRAM) as resolver:
        relay = Target(name="target", kind=TargetKind.DNS_RELAY, address=HERE, port=resolver, alive=False)
        report = Gate(port, relay, control=f"{HERE}:1").ask()
    assert seen(report) == "answered"


def test_silence_counts_only_when_the_control_was_answered(alone: None) -> None:
    del alone
    hole = near(TargetKind.TCP, 443, address=HOLE)
    with listening(as_proxy) as port:
        report = Gate(port, hole, control=f"{HERE}:1").ask()
        assert (report["failures"], report["rounds"], seen(report)) == ([], 2, "silence")
        report = Gate(port, hole, control=f"{HOLE}:1", budget=1.0).ask()
    assert (report["failures"], report["rounds"], seen(report)) == (["rounds"], 0, "silence")
    assert not report["passed"]


def test_a_gate_without_a_proxy_still_names_what_it_reached(alone: None) -> None:
    del alone
    with listening(lambda _: None) as open_port:
        report = Gate(9, near(TargetKind.TCP, open_port), control=f"{HERE}:9", budget=1.0).ask()
    assert report["failures"] == ["anchor", "target"]
