"""Names and their answers against a real resolver: every row of the table, and where the answers may come from."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.proxy.examples import cases, layer, policy
from tests.proxy.harness import Proxy
from tests.rig import Mode, answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.rig import Packet, Rig

pytestmark = pytest.mark.rig
ROWS = cases("dns")
DNS = 53
REQUEST = b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n"


@pytest.fixture(scope="module")
def running(rig_session: Rig) -> Iterator[Proxy]:
    with Proxy(rig_session) as proxy:
        yield proxy


@pytest.fixture
def fresh(rig: Rig, running: Proxy) -> Proxy:
    """The module's proxy with an empty cache and the table's policy."""
    plain = policy()
    changes = {name: getattr(plain, name) for name in ("allow", "deny", "layers", "resolvers", "local_addresses")}
    assert running.replace(**changes)["accepted"]
    rig.clear()
    return running


def dialled(rig: Rig) -> list[Packet]:
    """Every connection that left the host, but to the resolver."""
    return [packet for packet in rig.packets(kind="tcp") if packet.port != DNS]


@pytest.mark.parametrize("row", [row for row in ROWS if {"others", "to"} & row.keys()], ids=lambda row: row["id"])
def test_an_answer_is_treated_as_the_table_says_where_a_single_case_cannot_show_it(
    rig: Rig, fresh: Proxy, row: dict[str, Any]
) -> None:
    if "answer" in row:
        rig.names["example.com"] = row["answer"]
    with ExitStack() as stack:
        for at in range(20 if "others" in row else 0):
            rig.names[f"hung{at}.example.com"] = "silence"
            client = stack.enter_context(fresh.connect())
            client.send(f"CONNECT hung{at}.example.com:443 HTTP/1.1\r\nHost: hung{at}.example.com\r\n\r\n".encode())
        if "others" in row:
            assert rig.until(lambda: len(set(rig.asked())) == 20)
        client = stack.enter_context(fresh.connect())
        start = time.monotonic()
        client.send(REQUEST)
        head = client.head(8)
        took = time.monotonic() - start
        connections = dialled(rig)
    assert head.status == row["status"]
    assert took < row.get("within_s", 6)
    if "connects" in row:
        assert len(connections) == row["connects"]
    if row.get("to") == "first":
        assert connections[0].address in ("93.184.216.34", "2606:2800:220::34")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if {"resolv_conf", "hosts"} & row.keys()], ids=lambda row: row["id"]
)
def test_files_of_the_host_change_nothing(rig: Rig, tmp_path: Path, row: dict[str, Any]) -> None:
    mounts = []
    for name, path in (("resolv_conf", "/etc/resolv.conf"), ("hosts", "/etc/hosts")):
        if name in row:
            (tmp_path / name).write_text(row[name] + "\n")
            mounts.append(f"mount --bind {tmp_path / name} {path}")
    before = ["/usr/bin/unshare", "--mount", "/bin/sh", "-ec", " && ".join([*mounts, 'exec "$@"']), "sh"]
    rig.names["example.com"] = row["answer"]
    with Proxy(rig, before=before, port=3150) as proxy, proxy.connect() as client:
        client.send(REQUEST)
        assert client.head().status == row["status"]
        if "asked" in row:
            assert [f"{name}." for name in rig.asked()] == row["asked"]
        if "connects" in row:
            assert len(dialled(rig)) == row["connects"]
            assert dialled(rig)[0].address != "10.0.0.5"


@pytest.mark.parametrize("name", ["metadata", "metadata6", "private", "loopback", "mixed", "host"])
def test_a_listed_name_at_an_address_that_is_not_public_is_denied_and_nothing_arrives(
    rig: Rig, fresh: Proxy, name: str
) -> None:
    refused = fresh.get(f"http://{name}.example.com/")
    assert refused.status == 403
    assert refused.reason == ("mixed_answer" if name == "mixed" else "address_private")
    assert dialled(rig) == []
    assert rig.arrivals(port=80) == []


def test_an_address_that_the_host_gets_while_the_proxy_runs_is_refused_from_then_on(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = ["93.184.216.35"]
    assert fresh.get("http://example.com/").status == 200
    assert rig.run(["ip", "address", "add", "93.184.216.35/32", "dev", "lo"]).returncode == 0
    try:
        refused = fresh.get("http://example.com/")
    finally:
        assert rig.run(["ip", "address", "del", "93.184.216.35/32", "dev", "lo"]).returncode == 0
    assert (refused.status, refused.reason) == (403, "address_local")
    assert fresh.get("http://example.com/").status == 200


def test_local_addresses_and_denied_ranges_of_the_policy_are_refused_too(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = ["93.184.216.34"]
    fresh.replace(local_addresses=("93.184.216.34",))
    assert fresh.get("http://example.com/").reason == "address_local"
    ranges = layer(default_allow=True, deny_ranges=["93.184.216.0/24"])
    fresh.replace(local_addresses=(), layers=(ranges,))
    refused = fresh.get("http://example.com/")
    assert refused.reason == "address_denied"
    assert b"egress/org" in refused.body
    assert dialled(rig) == []


def test_both_families_are_asked_with_ids_of_their_own_and_each_name_from_a_port_of_its_own(
    rig: Rig, fresh: Proxy
) -> None:
    for at in range(8):
        fresh.get(f"http://n{at}.example.com/")
    queries = rig.queries()
    assert {query.type for query in queries} == {"A", "AAAA"}
    assert len(queries) == 16
    assert len({query.raw[:2] for query in queries}) > 12
    ports = {packet.source_port for packet in rig.packets(kind="udp") if packet.port == DNS}
    assert len(ports) > 6


def test_nothing_more_is_asked_for_a_client_that_has_left(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = "silence"
    client = fresh.connect()
    client.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
    assert rig.until(lambda: len(rig.queries("example.com")) == 2)
    client.sock.close()
    # the next attempt would come after 1.5 s
    time.sleep(1.8)
    assert len(rig.queries("example.com")) == 2


def test_an_answer_is_kept_for_its_ttl_and_never_beyond_a_generation(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = answer(["93.184.216.34"], ttl=300)
    for _ in range(3):
        assert fresh.get("http://example.com/").status == 200
    assert len(rig.queries("example.com")) == 2
    fresh.replace()
    assert fresh.get("http://example.com/").status == 200
    assert len(rig.queries("example.com")) == 4
    rig.names["a.example.com"] = answer(["93.184.216.34"], ttl=0)
    for _ in range(2):
        assert fresh.get("http://a.example.com/").status == 200
    assert len(rig.queries("a.example.com")) == 4


def test_a_kept_answer_is_checked_again_at_each_use(rig: Rig, fresh: Proxy) -> None:
    """Keeping an answer keeps addresses, never the decision on them."""
    rig.names["example.com"] = answer(["93.184.216.36"], ttl=300)
    assert fresh.get("http://example.com/").status == 200
    assert rig.run(["ip", "address", "add", "93.184.216.36/32", "dev", "lo"]).returncode == 0
    try:
        assert fresh.get("http://example.com/").reason == "address_local"
    finally:
        assert rig.run(["ip", "address", "del", "93.184.216.36/32", "dev", "lo"]).returncode == 0
    assert len(rig.queries("example.com")) == 2


def test_the_same_name_asked_for_at_the_same_time_is_one_lookup(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = answer(["93.184.216.34"], ttl=0, delay_s=0.5)
    with ExitStack() as stack:
        clients = [stack.enter_context(fresh.connect()) for _ in range(5)]
        for client in clients:
            client.send(REQUEST)
        assert [client.head().status for client in clients] == [200] * 5
    assert len(rig.queries("example.com")) == 2


@pytest.mark.parametrize("shape", ["wrong_question", "wrong_source", "garbage", "pointer_loop"])
def test_an_answer_that_is_not_one_leads_nowhere(rig: Rig, fresh: Proxy, shape: str) -> None:
    rig.names["example.com"] = shape
    refused = fresh.ask(REQUEST)
    assert refused.status in (502, 504)
    assert refused.reason in ("dns_timeout", "dns_malformed")
    assert dialled(rig) == []


def test_the_next_resolver_is_asked_when_the_first_is_not_there(rig: Rig, fresh: Proxy) -> None:
    address, _, port = rig.resolver.rpartition(":")
    fresh.replace(resolvers=(("93.184.216.34", 54), (address, int(port))))
    rig.names["example.com"] = answer(["93.184.216.34"], ttl=0)
    start = time.monotonic()
    assert fresh.get("http://example.com/").status == 200
    assert time.monotonic() - start < 1
    fresh.replace(resolvers=())
    assert fresh.get("http://example.com/").reason == "dns_servfail"


def test_a_resolver_with_an_ipv6_address_is_asked_too(rig: Rig, fresh: Proxy) -> None:
    address, _, port = rig.resolver_v6.rpartition(":")
    fresh.replace(resolvers=((address.strip("[]"), int(port)),))
    assert fresh.get("http://example.com/").status == 200


def test_a_family_that_cannot_be_reached_is_passed_over(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = ["3ffe::1", "93.184.216.34"]
    start = time.monotonic()
    assert fresh.get("http://example.com/").status == 200
    assert time.monotonic() - start < 2


def test_a_port_that_refuses_is_a_502_and_an_address_that_is_silent_a_504(rig: Rig, fresh: Proxy) -> None:
    fresh.replace(allow=policy(allow=["example.com:9", "blackhole.example.com"]).allow)
    rig.names["example.com"] = ["93.184.216.34"]
    refused = fresh.ask(b"CONNECT example.com:9 HTTP/1.1\r\nHost: example.com:9\r\n\r\n")
    assert (refused.status, refused.reason) == (502, "connect_failed")
    start = time.monotonic()
    refused = fresh.ask(b"CONNECT blackhole.example.com:443 HTTP/1.1\r\nHost: blackhole.example.com\r\n\r\n", 15)
    assert (refused.status, refused.reason) == (504, "connect_timeout")
    assert time.monotonic() - start < 12


def test_variables_of_the_environment_change_nothing(rig: Rig) -> None:
    rig.listen(9999, Mode.SILENT)
    variables = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"), "http://93.184.216.34:9999")
    settings = [f"{name}={value}" for name, value in variables.items()]
    with Proxy(
        rig, before=["/usr/bin/env", *settings, "LOCALDOMAIN=corp.internal", "RES_OPTIONS=ndots:5"], port=3151
    ) as one:
        assert one.get("http://example.com/").status == 200
    assert rig.asked() == ["example.com"]
    assert rig.arrivals(port=9999) == []
    assert "HTTP_PROXY" not in os.environ
