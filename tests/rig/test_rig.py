"""The rig itself: what it serves, what it records, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rig import Mode, Rig, addresses, answer, network
from tests.rig.rig import ROOT
from tests.rig.test_zone import AAAA, A, flags, query

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.rig, pytest.mark.skipif(os.geteuid() != 0, reason="the rig needs root")]

GET = b"GET /path HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"


def conversation(connection: socket.socket, data: bytes) -> bytes:
    with connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def ask(rig: Rig, name: str, kind: int = A, *, server: str = addresses.RESOLVER_V4, timeout_s: float = 5) -> bytes:
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with rig.socket(family, socket.SOCK_DGRAM, timeout_s=timeout_s) as asking:
        asking.connect((server, 53))
        asking.send(query(name, kind))
        return asking.recv(4096)


def ask_tcp(rig: Rig, name: str) -> bytes:
    message = query(name)
    return conversation(rig.connect(addresses.RESOLVER_V4, 53), struct.pack("!H", len(message)) + message)[2:]


def down_links(namespace: str) -> list[str]:
    shown = subprocess.run(
        [network.program("ip"), "-n", namespace, "-br", "link"], capture_output=True, text=True, check=True, timeout=10
    )
    return sorted(line.split()[0].partition("@")[0] for line in shown.stdout.splitlines() if " UP " in line)


def test_neither_namespace_has_an_uplink(rig: Rig) -> None:
    assert down_links(rig.host) == [addresses.HOST_LINK]
    assert down_links(rig.internet) == [addresses.INTERNET_LINK]
    host = (network.NETNS / rig.host).stat().st_ino
    assert host != Path("/proc/self/ns/net").stat().st_ino


@pytest.mark.parametrize("address", [*addresses.ORIGINS, *addresses.FORBIDDEN])
def test_plain_http_echoes_the_request_from_every_address(rig: Rig, address: str) -> None:
    head, _, body = conversation(rig.connect(address, 80), GET).partition(b"\r\n\r\n")
    echo = json.loads(body)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert (echo["method"], echo["target"], echo["address"]) == ("GET", "/path", address)
    assert echo["headers"] == [["Host", "example.com"], ["Connection", "close"]]
    assert [(each.address, each.port, each.first) for each in rig.arrivals()] == [(address, 80, GET)]


@pytest.mark.parametrize("name", ["api.vendor.com", "deep.example.com", "files.pypi.org"])
def test_tls_has_a_certificate_for_whatever_name_is_asked(rig: Rig, name: str) -> None:
    context = ssl.create_default_context(cafile=str(rig.ca))
    with context.wrap_socket(rig.connect(addresses.VENDOR[0], 443), server_hostname=name) as tunnel:
        tunnel.sendall(GET)
        assert tunnel.recv(4096).startswith(b"HTTP/1.1 200 OK")
    (arrival,) = rig.arrivals()
    assert arrival.sni == name
    assert arrival.plain == GET
    assert arrival.first.startswith(b"\x16\x03\x01")


def test_bytes_that_are_not_tls_are_recorded_on_443(rig: Rig) -> None:
    conversation(rig.connect(addresses.EXAMPLE[0], 443), b"SSH-2.0-x\r\n")
    assert [each.first for each in rig.arrivals()] == [b"SSH-2.0-x\r\n"]


@pytest.mark.parametrize("port", addresses.ECHO_PORTS)
@pytest.mark.parametrize("address", addresses.DATABASE)
def test_raw_ports_echo(rig: Rig, address: str, port: int) -> None:
    assert conversation(rig.connect(address, port), b"EARLY") == b"EARLY"
    (arrival,) = rig.arrivals(address=address, port=port)
    assert (arrival.kind, arrival.first, arrival.ended) == ("tcp", b"EARLY", "eof")


def test_port_25_speaks_first(rig: Rig) -> None:
    with rig.connect(addresses.EXAMPLE[0], 25) as connection:
        assert connection.recv(100).startswith(b"220 ")


@pytest.mark.parametrize("address", [addresses.EXAMPLE[0], addresses.EXAMPLE[1], addresses.METADATA])
def test_udp_echoes_from_the_address_that_was_asked(rig: Rig, address: str) -> None:
    with rig.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"ping", (address, 443))
        data, peer = sending.recvfrom(100)
    assert (data, peer[0]) == (b"ping", address)
    assert [(each.kind, each.address, each.first) for each in rig.arrivals()] == [("udp", address, b"ping")]


def test_a_port_may_be_opened_or_changed_until_reset(rig: Rig) -> None:
    rig.listen(9000, Mode.BANNER)
    rig.listen(5432, Mode.RESET)
    with rig.connect(addresses.EXAMPLE[0], 9000) as connection:
        assert connection.recv(100).startswith(b"220 ")
    # The reset may come before connecting has returned.
    with pytest.raises(ConnectionResetError), rig.connect(addresses.EXAMPLE[0], 5432) as connection:
        connection.recv(1)
    rig.reset()
    with pytest.raises(ConnectionRefusedError):
        rig.connect(addresses.EXAMPLE[0], 9000)
    assert conversation(rig.connect(addresses.EXAMPLE[0], 5432), b"x") == b"x"


def test_the_black_hole_never_answers(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        rig.connect(addresses.BLACK_HOLE, 443, timeout_s=0.3)
    assert [each.kind for each in rig.packets(address=addresses.BLACK_HOLE)] == ["tcp"]


@pytest.mark.parametrize(
    ("path", "size"), [("/bytes/200000", 200000), ("/until-close/70000", 70000), ("/drop/5000", 5000)]
)
def test_bodies_by_path_are_as_long_as_they_say(rig: Rig, path: str, size: int) -> None:
    request = GET.replace(b"/path", path.encode())
    body = conversation(rig.connect(addresses.EXAMPLE[0], 80), request).partition(b"\r\n\r\n")[2]
    assert len(body) == size
    assert body.startswith(b"0000000\n0000001\n")


def test_packets_record_flows_to_ports_where_nothing_listens(rig: Rig) -> None:
    with pytest.raises(ConnectionRefusedError):
        rig.connect(addresses.EVIL[0], 4444)
    with pytest.raises(ConnectionRefusedError):
        rig.connect(addresses.EVIL[1], 4444)
    with rig.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"into the dark", (addresses.EVIL[0], 4445))
    seen = [(each.kind, each.address, each.port, each.first) for each in rig.packets()]
    assert seen == [
        ("tcp", addresses.EVIL[0], 4444, b""),
        ("tcp", addresses.EVIL[1], 4444, b""),
        ("udp", addresses.EVIL[0], 4445, b"into the dark"),
    ]
    assert rig.arrivals() == []


def test_icmp_crosses_and_is_recorded(rig: Rig) -> None:
    with rig.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as pinging:
        pinging.sendto(b"\x08\0\0\0\0\0\0\1canary", (addresses.EVIL[0], 0))
        assert pinging.recv(100).endswith(b"canary")
    assert [(each.kind, each.address) for each in rig.packets()] == [("icmp", addresses.EVIL[0])]


@pytest.mark.parametrize("server", [addresses.RESOLVER_V4, addresses.RESOLVER_V6, "8.8.8.8"])
def test_the_dns_server_answers_and_logs(rig: Rig, server: str) -> None:
    assert ask(rig, "EXAMPLE.com", server=server).endswith(b"\x5d\xb8\xd8\x22")
    assert ask(rig, "example.com", AAAA, server=server).endswith(b"\x02\x20" + b"\0" * 9 + b"\x34")
    seen = [(each.name, each.type, each.transport, each.server) for each in rig.queries()]
    assert seen == [("example.com", "A", "udp", server), ("example.com", "AAAA", "udp", server)]


def test_dns_over_tcp_answers_and_is_logged(rig: Rig) -> None:
    rig.names["long.test"] = "truncated_then_tcp"
    assert ask(rig, "long.test")[2] & 2
    assert flags(ask_tcp(rig, "long.test")) == (7, 0, 1)
    assert [each.transport for each in rig.queries("long.test")] == ["udp", "tcp"]


def test_names_change_live_and_come_back(rig: Rig) -> None:
    rig.names["example.com"] = ["10.9.9.9"]
    assert ask(rig, "example.com").endswith(b"\x0a\x09\x09\x09")
    del rig.names["example.com"]
    assert flags(ask(rig, "example.com")) == (7, 3, 0)
    assert "example.com" not in rig.names
    rig.reset()
    assert flags(ask(rig, "example.com")) == (7, 0, 1)


def test_rebinding_starts_anew_when_it_is_set(rig: Rig) -> None:
    for _ in range(2):
        rig.names["turn.test"] = answer("rebinding", then=["10.1.2.3"])
        assert ask(rig, "turn.test").endswith(b"\x5d\xb8\xd8\x22")
        assert ask(rig, "turn.test").endswith(b"\x0a\x01\x02\x03")


@pytest.mark.parametrize("word", ["silence", "wrong_source"])
def test_a_connected_resolver_hears_nothing(rig: Rig, word: str) -> None:
    rig.names["quiet.test"] = word
    with pytest.raises(TimeoutError):
        ask(rig, "quiet.test", timeout_s=0.2)
    assert rig.asked() == ["quiet.test"]


def test_an_answer_may_be_late(rig: Rig) -> None:
    rig.names["late.test"] = answer("public", delay_s=0.2)
    before = time.monotonic()
    assert flags(ask(rig, "late.test")) == (7, 0, 1)
    assert time.monotonic() - before > 0.19


def test_a_bad_order_is_refused_and_the_rig_lives_on(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="no such order"):
        rig._order("dance")
    assert rig.queries() == []


def test_a_program_of_the_host_namespace_is_ended_with_the_rig() -> None:
    rig = Rig()
    with rig:
        process = rig.spawn(["/bin/sleep", "60"])
        assert rig.until(lambda: process.pid in network.inside(rig.host))
    assert process.returncode == -signal.SIGTERM
    assert rig.stragglers == ()
    gone(rig)


def test_a_straggler_is_named_and_killed() -> None:
    rig = Rig()
    with rig:
        done = rig.run(["/bin/sh", "-c", "sleep 61 >/dev/null 2>&1 & echo $!"])
        pid = int(done.stdout)
    assert rig.stragglers == (f"{pid} sleep 61",)
    wait_for(lambda: network.namespace_of(pid) is None)
    gone(rig)


def gone(rig: Rig) -> None:
    assert not (network.NETNS / rig.host).exists()
    assert not (network.NETNS / rig.internet).exists()
    assert not rig.directory.exists()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def up() -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rig", "up"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    described: dict[str, str] = json.loads(process.stdout.readline())
    return process, described


def end_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param(lambda process: process.send_signal(signal.SIGTERM), 0, id="SIGTERM"),
        pytest.param(lambda process: process.send_signal(signal.SIGINT), 0, id="SIGINT"),
        pytest.param(lambda process: process.kill(), -9, id="kill -9 of the owner"),
        pytest.param(end_input, 0, id="the end of standard input"),
    ],
)
def test_up_leaves_nothing_after(end: Callable[[subprocess.Popen[bytes]], None], status: int) -> None:
    process, described = up()
    with process:
        sleeping = subprocess.Popen([*described["enter"], "/bin/sleep", "62"])
        assert Path(described["ca"]).exists()
        end(process)
        assert process.wait(timeout=10) == status
        assert sleeping.wait(timeout=10) == -signal.SIGKILL
    paths = [network.NETNS / described["host"], network.NETNS / described["internet"], Path(described["directory"])]
    wait_for(lambda: not any(path.exists() for path in paths))


def test_down_removes_what_a_rig_left_whose_every_process_was_killed() -> None:
    process, described = up()
    with process:
        for pid in network.inside(described["internet"]):  # the world first, so that it cannot clean up
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert (network.NETNS / described["host"]).exists()
    down = subprocess.run(
        [sys.executable, "-m", "tests.rig", "down"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    assert described["instance"] in down.stdout.splitlines()
    assert not (network.NETNS / described["host"]).exists()
    assert not Path(described["directory"]).exists()


def test_down_leaves_a_live_rig_alone(rig: Rig) -> None:
    subprocess.run([sys.executable, "-m", "tests.rig", "down"], cwd=ROOT, check=True, timeout=20)
    assert conversation(rig.connect(addresses.EXAMPLE[0], 22), b"still here") == b"still here"


def test_run_gives_the_command_the_rig_and_returns_its_status() -> None:
    program = (
        "import os, socket, sys; from tests.rig import attached; internet = attached(os.environ);"
        "socket.create_connection(('93.184.216.34', 22), 5).close();"
        "sys.exit(7 if [each.port for each in internet.arrivals()] == [22] else 1)"
    )
    argv = [sys.executable, "-m", "tests.rig", "run", "--", sys.executable, "-c", program]
    assert subprocess.run(argv, cwd=ROOT, check=False, timeout=30).returncode == 7


def test_a_world_that_died_is_an_error_and_leaves_nothing() -> None:
    rig = Rig()
    rig.start()
    for pid in network.inside(rig.internet):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="internet broke"):
        rig.stop()
    gone(rig)
