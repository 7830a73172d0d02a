"""Policies that come in a file, as a mounted config map does: replaced as a whole, each content once. Loopback only."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.proxy.test_process import DENIED, LISTEN, PROOF, policy, started, words

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.policy import ProxyPolicy


def mount(folder: Path, made: ProxyPolicy | bytes, *, name: str) -> None:
    """Replace the file as a kubelet does: a new directory, and one symlink that flips."""
    data = made if isinstance(made, bytes) else made.to_json().encode()
    (folder / name).mkdir()
    (folder / name / "policy.json").write_bytes(data)
    (folder / "..next").symlink_to(name)
    (folder / "..next").rename(folder / "..data")
    if not (folder / "policy.json").is_symlink():
        (folder / "policy.json").symlink_to("..data/policy.json")


def test_a_newer_file_counts_within_a_second_and_is_acknowledged_once(tmp_path: Path) -> None:
    mount(tmp_path, policy(generation=1), name="one")
    with started(*LISTEN, "--policy", str(tmp_path / "policy.json")) as running:
        port = running.port()
        assert running.ask(port, DENIED).startswith(b"HTTP/1.1 403 not_listed")
        assert running.line()["code"] == "not_listed"
        mount(tmp_path, policy(generation=2, deny=("evil.com",)), name="two")
        assert running.line(1.0) == {"kind": "policy", "generation": 2, "accepted": True}
        assert running.ask(port, DENIED).startswith(b"HTTP/1.1 403 denied")
        assert running.line()["generation"] == 2
        # The same content under another name says nothing new.
        mount(tmp_path, policy(generation=2, deny=("evil.com",)), name="three")
        mount(tmp_path, b"nonsense", name="four")
        refused = running.line(1.0)
        assert (refused["kind"], refused["accepted"]) == ("policy", False)
        assert running.ask(port, DENIED).startswith(b"HTTP/1.1 403 denied")


def test_a_file_that_goes_away_changes_nothing_and_a_signal_ends_it(tmp_path: Path) -> None:
    mount(tmp_path, policy(generation=1), name="one")
    with started(*LISTEN, "--policy", str(tmp_path / "policy.json")) as running:
        port = running.port()
        (tmp_path / "..data").unlink()
        time.sleep(0.3)
        assert running.ask(port, PROOF).startswith(b"HTTP/1.1 200")
        running.process.send_signal(signal.SIGTERM)
        assert running.line() == {"kind": "stopped", "code": "sigterm", "seq": 0}
        assert running.process.wait(8) == 0


def test_its_input_is_not_read_then(tmp_path: Path) -> None:
    mount(tmp_path, policy(generation=1), name="one")
    with started(*LISTEN, "--policy", str(tmp_path / "policy.json")) as running:
        running.stdin.close()
        assert running.ask(running.port(), PROOF).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        pytest.param("nameserver 10.96.0.10\nsearch svc\n", [["10.96.0.10", 53]], id="the file's server is asked"),
        pytest.param("nameserver fe80::1%eth0\nnameserver fd00::53\n", [["fd00::53", 53]], id="one with a zone is not"),
        pytest.param("nameserver nonsense\nnameserver\n", [], id="what is no address is none"),
    ],
)
def test_a_policy_without_resolvers_gets_those_of_the_named_file(
    tmp_path: Path, text: str, servers: list[object]
) -> None:
    mount(tmp_path, policy(generation=1), name="one")
    (tmp_path / "resolv.conf").write_text(text)
    named = ("--policy", str(tmp_path / "policy.json"), "--resolv-conf", str(tmp_path / "resolv.conf"))
    with started(*LISTEN, *named) as running:
        assert running.line()["resolvers"] == servers


def test_an_unusable_file_is_no_start(tmp_path: Path) -> None:
    mount(tmp_path, b"{}", name="one")
    with started(*LISTEN, "--policy", str(tmp_path / "policy.json")) as running:
        assert running.process.wait(8) == 2
        assert "unusable policy" in words(running)
