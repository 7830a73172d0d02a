"""The workload and the listeners in the open, beside the fence: there every attempt must succeed and be seen.

What cannot succeed here could not fail behind the fence either, and a test that says it did would be worth nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import workload
from tests.e2e.listeners import Listeners
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

pytestmark = pytest.mark.rig

SCRIPT = Path(workload.__file__)
PYTHON = "/usr/bin/python3"  # what a sandbox has, without our packages


def tries(rig: Rig, *attempts: dict[str, Any], status: int = 0, **given: Any) -> list[dict[str, Any]]:
    job = json.dumps({"attempts": attempts, "timeout": 2, **given})
    done = rig.run([PYTHON, "-I", str(SCRIPT), job], env={"PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stderr) == (status, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def only(rig: Rig, **attempt: Any) -> tuple[str, dict[str, Any]]:
    (line,) = tries(rig, attempt)
    return line["outcome"], line["detail"]


@pytest.fixture(scope="module")
def listeners_of_module(rig_session: Rig) -> Iterator[Listeners]:
    with Listeners(rig_session) as listeners:
        yield listeners


@pytest.fixture
def listeners(listeners_of_module: Listeners) -> Listeners:
    listeners_of_module.clear()
    return listeners_of_module


def test_every_listener_of_the_host_is_reached_and_records_it(rig: Rig, listeners: Listeners) -> None:
    assert {target.kind for target in listeners.targets} == {"tcp", "udp", "icmp", "unix_abstract", "unix_path"}
    for target in listeners.targets:
        listeners.clear()
        (line,) = tries(rig, target.attempt())
        assert (line["attempt"], line["outcome"]) == (target.name, "reached"), line
        arrivals = listeners.arrivals()
        assert [arrival.kind for arrival in arrivals] == [target.kind], target
        if target.kind != "icmp":
            assert arrivals[0].first == b"from the workload"


def test_proving_leaves_the_counters_empty(listeners: Listeners) -> None:
    listeners.prove()
    assert listeners.arrivals() == []


def test_a_listener_that_is_dead_is_named(rig: Rig) -> None:
    with Listeners(rig) as listeners:
        (path,) = (target.address for target in listeners.targets if target.kind == "unix_path")
        Path(path).unlink()
        with pytest.raises(RuntimeError, match="unix socket of the host at a path"):
            listeners.prove()


@pytest.mark.parametrize("address", [addresses.EXAMPLE[0], addresses.EXAMPLE[1], *addresses.FORBIDDEN])
def test_addresses_of_the_internet_are_reached_directly(rig: Rig, address: str) -> None:
    get = "GET / HTTP/1.0\r\n\r\n"
    lines = tries(
        rig,
        {"do": "tcp", "address": address, "port": 80, "send": get},
        {"do": "tcp", "address": address, "port": 5432},
        {"do": "udp", "address": address, "port": 443, "send": "ping"},
        {"do": "dns_udp", "address": address},
        {"do": "dns_tcp", "address": address},
        {"do": "icmp", "address": address},
        {"do": "icmp", "address": address, "raw": True},
    )
    assert [line["outcome"] for line in lines] == ["reached"] * len(lines), lines
    assert {packet.kind for packet in rig.packets(address=address)} == {"tcp", "udp", "icmp"}
    assert [(query.name, query.transport) for query in rig.queries()] == [
        ("example.com", "udp"),
        ("example.com", "tcp"),
    ]


def test_a_frame_of_a_packet_socket_crosses_the_link(rig: Rig) -> None:
    outcome, detail = only(rig, do="packet", address=addresses.EVIL[0], port=9, send="frame")
    assert (outcome, detail["sent"]) == ("reached", [addresses.HOST_LINK])
    assert [(packet.kind, packet.first) for packet in rig.packets(address=addresses.EVIL[0])] == [("udp", b"frame")]


def test_a_socket_bound_to_the_device_reaches_the_origin(rig: Rig) -> None:
    assert only(rig, do="bind_to_device", address=addresses.INTERNET_V4, port=80)[0] == "reached"


def test_the_other_end_is_reached_by_its_link_local_address(rig: Rig) -> None:
    assert only(rig, do="link_local", address=addresses.INTERNET_LINK_LOCAL, port=80) == (
        "reached",
        {"device": addresses.HOST_LINK},
    )
    assert [packet.port for packet in rig.packets(address=addresses.INTERNET_LINK_LOCAL)] == [80]


@pytest.mark.parametrize("change", ["address", "route", "link"])
def test_the_kernel_takes_network_changes_from_root_and_their_undoing(rig: Rig, change: str) -> None:
    assert only(rig, do="netlink", change=change) == ("reached", {"undone": True})


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param({"do": "proc_net"}, id="proc net is readable"),
        pytest.param({"do": "ptrace"}, id="a child may be traced"),
        pytest.param({"do": "unshare", "namespaces": ["user", "net"]}, id="namespaces may be made"),
        pytest.param({"do": "setns", "path": f"/proc/{os.getpid()}/ns/net"}, id="a network may be joined"),
        pytest.param({"do": "mount"}, id="a tmpfs may be mounted"),
        pytest.param({"do": "syscall", "number": 39}, id="getpid"),
        pytest.param({"do": "packet"}, id="a packet socket may be opened"),
        pytest.param({"do": "memory", "bytes": 64 << 20, "child": True}, id="64 MiB may be touched"),
        pytest.param({"do": "forks", "count": 50}, id="50 children may live at once"),
        pytest.param({"do": "read", "path": "/etc"}, id="etc may be listed"),
        pytest.param({"do": "whoami"}, id="the process may look at itself"),
    ],
)
def test_what_root_may_do_in_the_open(rig: Rig, attempt: dict[str, Any]) -> None:
    outcome, detail = only(rig, **attempt)
    assert outcome == "reached", detail


def test_another_process_may_be_traced(rig: Rig) -> None:
    sleeping = rig.spawn(["/bin/sleep", "60"])
    assert only(rig, do="ptrace", pid=sleeping.pid) == ("reached", {"pid": sleeping.pid})
    sleeping.kill()


def test_a_vsock_may_be_opened_where_the_kernel_has_it(rig: Rig) -> None:
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError:
        pytest.skip("the kernel has no AF_VSOCK")
    assert only(rig, do="vsock") == ("reached", {"opened": True})


def test_names_are_resolved_by_whatever_the_machine_has(rig: Rig) -> None:
    assert only(rig, do="resolve", name="localhost")[0] == "reached"


def test_a_file_may_be_written(rig: Rig, tmp_path: Path) -> None:
    assert only(rig, do="write", path=str(tmp_path / "file"), bytes=3 << 20)[0] == "reached"
    assert (tmp_path / "file").stat().st_size == 3 << 20


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        pytest.param({"do": "tcp", "address": addresses.EVIL[0], "port": 4444}, "ECONNREFUSED", id="nobody listens"),
        pytest.param({"do": "tcp", "address": addresses.BLACK_HOLE, "port": 80}, "timeout", id="nobody answers"),
        pytest.param({"do": "unix_path", "path": "/nowhere.sock"}, "ENOENT", id="no such socket"),
        pytest.param({"do": "unix_abstract", "name": "nobody"}, "ECONNREFUSED", id="no such abstract socket"),
        pytest.param({"do": "syscall", "number": 9999}, "ENOSYS", id="no such system call"),
    ],
)
def test_a_failure_is_named(rig: Rig, attempt: dict[str, Any], error: str) -> None:
    (line,) = tries(rig, attempt, timeout=0.3)
    assert (line["outcome"], line["detail"]["error"]) == ("failed", error)


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param({"do": "tpc", "address": "127.0.0.1", "port": 1}, id="an unknown kind"),
        pytest.param({"do": "tcp", "adress": "127.0.0.1", "port": 1}, id="a missing field"),
        pytest.param({"do": "netlink", "change": "weather"}, id="an unknown change"),
    ],
)
def test_a_wrong_attempt_is_broken_never_a_failure(rig: Rig, attempt: dict[str, Any]) -> None:
    assert only(rig, **attempt)[0] == "broken"


def test_udp_without_an_answer_is_silent(rig: Rig) -> None:
    (line,) = tries(rig, {"do": "udp", "address": addresses.BLACK_HOLE, "port": 9}, timeout=0.2)
    assert line["outcome"] == "silent"


@pytest.mark.parametrize(
    ("attempt", "status"),
    [
        pytest.param({"do": "exit", "status": 7}, 7, id="an exit status"),
        pytest.param({"do": "exit", "signal": 9}, -9, id="a signal"),
    ],
)
def test_the_workload_ends_as_it_is_told(rig: Rig, attempt: dict[str, Any], status: int) -> None:
    assert tries(rig, {"do": "whoami"}, attempt, {"do": "whoami"}, status=status)[1:] == []


def test_output_is_as_big_as_it_is_told() -> None:
    job = json.dumps(
        {"attempts": [{"do": "output", "bytes": 10_000_000}, {"do": "output", "bytes": 5, "stream": "stderr"}]}
    )
    done = subprocess.run([PYTHON, "-I", str(SCRIPT), job], capture_output=True, check=True, timeout=30)
    assert done.stdout[:10_000_000].endswith(b"%015d\n" % 624_999)
    assert len(done.stdout[10_000_000:].splitlines()) == 2
    assert done.stderr == b"00000"


def test_a_job_may_be_a_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "workload.py").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "job.json").write_text('{"attempts": [{"do": "sleep", "seconds": 0, "attempt": "nap"}]}')
    done = subprocess.run([PYTHON, "-I", "workload.py"], cwd=tmp_path, capture_output=True, check=True, timeout=30)
    assert json.loads(done.stdout) == {"attempt": "nap", "outcome": "reached", "detail": {}}


def test_the_script_imports_the_standard_library_alone() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import workload; print('tests' in sys.modules)"
    argv = [PYTHON, "-I", "-S", "-c", program, str(SCRIPT.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30, env=dict(os.environ))
    assert done.stdout == "False\n"
    assert sys.executable != PYTHON
