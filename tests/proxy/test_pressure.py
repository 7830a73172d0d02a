"""What many, slow, stalled and hostile clients do to the good ones: nothing that they could see, and no memory."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.proxy.examples import policy
from tests.proxy.harness import LOOPS, Client, Proxy
from tests.rig import answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

pytestmark = pytest.mark.rig
GIGABYTE = 999_999_999


@pytest.fixture(scope="module", params=LOOPS)
def running(rig_session: Rig, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with Proxy(rig_session, policy(connections=1024), arguments=["--loop", request.param]) as proxy:
        yield proxy


@pytest.fixture
def fresh(rig: Rig, running: Proxy) -> Proxy:
    assert running.replace(connections=1024)["accepted"]
    rig.clear()
    return running


def knocked(proxy: Proxy, stack: ExitStack, count: int) -> list[Client]:
    """Open this many connections; some are reset before they are open, which is an answer too."""
    found = []
    for _ in range(count):
        with suppress(ConnectionResetError):
            found.append(stack.enter_context(proxy.connect()))
    return found


def resident(proxy: Proxy) -> int:
    return int(Path(f"/proc/{proxy.process.pid}/statm").read_text().split()[1]) * 4096


def test_good_clients_are_served_beside_500_slow_heads_and_20_hung_names(rig: Rig, fresh: Proxy) -> None:
    rig.names["slow.example.com"] = answer("silence")
    with ExitStack() as stack:
        slow = [stack.enter_context(fresh.connect()) for _ in range(500)]
        for one in slow:
            one.send(b"CONNECT exam")
        for at in range(20):
            rig.names[f"hung{at}.example.com"] = "silence"
            hung = stack.enter_context(fresh.connect())
            hung.send(f"CONNECT hung{at}.example.com:443 HTTP/1.1\r\nHost: hung{at}.example.com\r\n\r\n".encode())
        assert rig.until(lambda: len(set(rig.asked())) == 20)
        before = resident(fresh)
        for _ in range(20):
            assert fresh.get("http://example.com/").status == 200
        assert resident(fresh) - before < 1 << 20


@pytest.mark.parametrize("tunnel", [False, True], ids=["by URL", "through a tunnel"])
def test_a_gigabyte_that_nobody_reads_stays_with_its_sender(fresh: Proxy, tunnel: bool) -> None:
    head = "CONNECT example.com:80 HTTP/1.1\r\nHost: example.com\r\n\r\n" if tunnel else ""
    url = f"/bytes/{GIGABYTE}" if tunnel else f"http://example.com/bytes/{GIGABYTE}"
    with fresh.connect() as client:
        before = resident(fresh)
        client.send(f"{head}GET {url} HTTP/1.1\r\nHost: example.com\r\n\r\n".encode())
        time.sleep(1.5)
        stalled = resident(fresh)
        assert stalled - before < 4 << 20
        # it was only waiting
        got = 0
        while got < 8 << 20:
            got += len(client.sock.recv(1 << 18))
        assert resident(fresh) - before < 4 << 20


def test_a_flood_to_the_cap_leaves_those_who_are_in_alone_and_ends_with_it(rig: Rig, fresh: Proxy) -> None:
    fresh.replace(connections=40)
    tunnel, head = fresh.tunnel("db.example.com:5432")
    with tunnel, ExitStack() as stack:
        assert head.status == 200
        flood = knocked(fresh, stack, 300)
        told = [one for one in flood if one.more(0.02) and b"503 too_many_connections" in one.data]
        assert told
        tunnel.send(b"still here")
        assert tunnel.until(lambda data: len(data) >= 10) == b"still here"
        assert fresh.decided("too_many_connections").verdict == "deny"
    # the places are free again
    assert rig.until(lambda: fresh.get("http://example.com/").status == 200)


@pytest.mark.parametrize("loop", LOOPS)
def test_when_descriptors_run_out_who_is_in_is_served_and_who_is_not_waits_or_is_told(rig: Rig, loop: str) -> None:
    """128 descriptors: a hundred clients are more than there is room for, and the proxy must neither stop nor spin."""
    before = ["/usr/bin/prlimit", "--nofile=128:128"]
    with Proxy(rig, policy(connections=1024), arguments=["--loop", loop], before=before, port=3160) as proxy:
        tunnel, head = proxy.tunnel("db.example.com:5432")
        with tunnel, ExitStack() as stack:
            assert head.status == 200
            knocked(proxy, stack, 200)
            start = cpu(proxy)
            time.sleep(1)
            assert cpu(proxy) - start < 0.5
            tunnel.send(b"still here")
            assert tunnel.until(lambda data: len(data) >= 10) == b"still here"
        assert rig.until(lambda: proxy.get("http://example.com/").status == 200)


def cpu(proxy: Proxy) -> float:
    return time.clock_gettime((~proxy.process.pid << 3) | 2)


def test_a_descriptor_limit_that_is_met_only_stops_accepting_for_a_while(rig: Rig) -> None:
    """No cap of ours helps where the process's own limit is lowered while it runs."""
    with Proxy(rig, port=3161) as proxy:
        rig.run(["prlimit", f"--pid={proxy.process.pid}", "--nofile=24:24"])
        with ExitStack() as stack:
            knocked(proxy, stack, 60)
            start = cpu(proxy)
            time.sleep(1)
            assert cpu(proxy) - start < 0.5
        assert rig.until(lambda: proxy.get("http://example.com/").status == 200)


def test_a_range_that_is_routed_to_the_host_itself_is_the_hosts(rig: Rig, fresh: Proxy) -> None:
    """AnyIP: no interface has the address, and a packet to it arrives here all the same."""
    rig.names["example.com"] = answer(["93.184.216.34"], ttl=300)
    assert fresh.get("http://example.com/").status == 200
    assert rig.run(["ip", "route", "add", "local", "93.184.216.32/28", "dev", "lo"]).returncode == 0
    try:
        refused = fresh.get("http://example.com/")
    finally:
        assert rig.run(["ip", "route", "del", "local", "93.184.216.32/28", "dev", "lo"]).returncode == 0
    assert (refused.status, refused.reason) == (403, "address_local")
    assert fresh.get("http://example.com/").status == 200


def test_a_local_route_that_does_not_count_for_the_proxy_changes_nothing(rig: Rig, fresh: Proxy) -> None:
    """Transparent proxies keep `local default` in a table that only marked packets see."""
    rig.names["example.com"] = ["93.184.216.34"]
    assert rig.run(["ip", "route", "add", "local", "default", "dev", "lo", "table", "2004"]).returncode == 0
    try:
        assert fresh.get("http://example.com/").status == 200
    finally:
        assert rig.run(["ip", "route", "del", "local", "default", "dev", "lo", "table", "2004"]).returncode == 0


def test_a_widened_policy_leaves_a_tunnel_untouched_and_a_narrowed_one_closes_it_within_a_second(fresh: Proxy) -> None:
    tunnel, _ = fresh.tunnel("db.example.com:5432")
    with tunnel:
        fresh.replace(allow=policy(allow=["*.example.com", "db.example.com:5432", "pypi.org"]).allow)
        tunnel.send(b"wider")
        assert tunnel.until(lambda data: len(data) >= 5) == b"wider"
        tunnel.data.clear()
        assert not [one for one in fresh.decisions() if one.code == "policy_changed"]
        start = time.monotonic()
        fresh.replace(allow=policy(allow=["pypi.org"]).allow)
        assert tunnel.closes(1)
        assert time.monotonic() - start < 1
    closed = fresh.decided("policy_changed")
    assert (closed.host, closed.port, closed.address is not None) == ("db.example.com", 5432, True)
    fresh.replace(allow=policy().allow)
