"""What a gate does where nobody stands between it and the command: it settles, shows a secret, and waits for a word.

Loopback only, with a real proxy.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import proxy
from proxy.gate import hold
from reconciler.backends import gate_targets
from reconciler.backends.gate_targets import Hold, Question
from reconciler.core.gate_report import Target, TargetKind
from tests.proxy.test_process import LISTEN, policy, started

if TYPE_CHECKING:
    from collections.abc import Iterator

GATE = Path(proxy.__file__).parent / "gate.py"
KEY, SECRET = bytes(range(32)), "swordfish"


@contextmanager
def asking(**fields: Any) -> Iterator[Question]:
    """A question about a live proxy that wants to be shown a secret."""
    with started(*LISTEN) as running:
        running.write(policy(client_secret=SECRET))
        challenge = secrets.token_hex(16)
        yield replace(
            Question(
                proxy=f"127.0.0.1:{running.port()}",
                challenge=challenge,
                answer=gate_targets.answer(KEY, challenge),
                targets=(),
                rounds=2,
                interval=0.1,
                budget=4.0,
                interfaces=tuple(name for _, name in socket.if_nameindex()),
                attempt=0.1,
                authorization="Basic " + base64.b64encode(f"run:{SECRET}".encode()).decode(),
            ),
            **fields,
        )


def gate(question: Question) -> subprocess.Popen[bytes]:
    """Start the gate as a file of ours under any interpreter."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GATE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(question.to_object()).encode())
    process.stdin.close()
    return process


def report_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    report: dict[str, Any] = json.loads(process.stdout.readline())
    return report


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(10)
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        pytest.param(None, "reached", id="who shows the secret is answered"),
        pytest.param("", "denied", id="who shows nothing is not"),
        pytest.param("Basic cnVuOm90aGVy", "denied", id="who shows another is not"),
    ],
)
def test_a_proxy_that_wants_a_secret_answers_whoever_shows_it(shown: str | None, verdict: str) -> None:
    with asking() as question:
        process = gate(question if shown is None else replace(question, authorization=shown))
        assert report_of(process)["anchor"]["verdict"] == verdict
        ended(process)


def test_a_target_that_closes_late_is_waited_for_and_then_judged_by_whole_rounds() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    late = Target(name="late", kind=TargetKind.TCP, address="127.0.0.1", port=port, alive=False)

    def close_once_reached() -> None:
        with listener:
            listener.accept()[0].close()

    closing = threading.Thread(target=close_once_reached)
    closing.start()
    with asking(targets=(late,), settle=("late",)) as question:
        process = gate(question)
        report = report_of(process)
        ended(process)
    closing.join(5)
    (row,) = [row for row in report["targets"] if row["name"] == "late"]
    assert row["seen"] == "ECONNREFUSED"
    assert report["rounds"] == 2
    assert report["runtime"]["settled_ms"] > 0


def test_a_target_that_never_closes_is_reached_and_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        stays = Target(name="stays", kind=TargetKind.TCP, address="127.0.0.1", port=port, alive=False)
        with asking(targets=(stays,), settle=("stays",)) as question:
            process = gate(question)
            report = report_of(process)
            assert ended(process) == 1
    assert "stays" in report["failures"]


def test_it_waits_for_the_whole_word_and_nothing_else(tmp_path: Path) -> None:
    """Its report is never good where no fence is: that it waits after one is seen in a cluster."""
    word = tmp_path / "start"
    word.write_text("")
    heard: list[bool] = []
    wanted = {"file": str(word), "text": "go-4711", "until": time.time() + 30}
    waiting = threading.Thread(target=lambda: heard.append(hold(wanted)))
    waiting.start()
    for other in ("another", "go-47", "go-4711 and more"):
        word.write_text(other)
        waiting.join(0.15)
        assert heard == []
    word.write_text("go-4711\n")
    waiting.join(5)
    assert heard == [True]


@pytest.mark.parametrize("written", [None, "another", "\xff"], ids=["no file", "another word", "no text"])
def test_a_word_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "start").write_text(written, "latin-1")
    assert not hold({"file": str(tmp_path / "start"), "text": "go", "until": time.time() + 0.2})


def test_a_bad_report_waits_for_nothing(tmp_path: Path) -> None:
    word = tmp_path / "start"
    word.write_text("go")
    hold = Hold(file=str(word), text="go", until=time.time() + 30)
    with asking(hold=hold, authorization="") as question:
        process = gate(question)
        assert not report_of(process)["passed"]
        assert ended(process) == 1
