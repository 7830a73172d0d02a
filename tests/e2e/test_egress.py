"""What a sandbox reaches through its proxy, and what it is denied with which code, by a job that tries it all."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import documents
from tests.rig import addresses, answer
from tests.rig.k8s import PODS

if TYPE_CHECKING:
    from tests.e2e.grounds import Place
    from tests.e2e.installation import Installation
    from tests.rig import Rig
    from tests.rig.internet import Arrival, Packet
    from tests.rig.zone import Spec

pytestmark = pytest.mark.rig

HALF = "93.184.216.38"
"""The public half of the mixed answer: nothing else here has a reason to go to it."""
ZONE: dict[str, Spec] = {
    "mix.example.com": [HALF, "10.1.2.3"],
    "mix6.example.com": [HALF, "fd20:ce::254"],
    "own.example.com": [addresses.HOST_V4],
    "rebind.example.com": answer("rebinding", then=["10.1.2.3"]),
    "mapped.example.com": ["::ffff:169.254.169.254"],
    "shared.example.com": ["100.64.0.1"],
}
ALLOW = ("example.com", "*.example.com", "db.example.com:5432", "api.vendor.com", "files.pypi.org", "gone.example.net")
DENY = ("forbidden.example.com",)
ORG = ("example.com", "*.example.com", "db.example.com:5432", "files.pypi.org", "gone.example.net")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one job saw, and what the world saw of it."""

    lines: dict[str, dict[str, Any]]
    result: dict[str, Any]
    decisions: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    asked: list[str]
    arrivals: list[Arrival]
    packets: list[Packet]

    def decided(self, host: str, port: int) -> list[tuple[str, str | None]]:
        """Codes and layers of the decisions about one target."""
        return [(one["code"], one["layer"]) for one in self.decisions if (one["host"], one["port"]) == (host, port)]


@dataclass(frozen=True, slots=True)
class Denied:
    """One attempt that must be denied."""

    do: str
    host: str
    code: str
    port: int
    layer: str | None = None
    asked: bool = False
    """Whether the name may be looked up: never, where a list has already said no."""
    status: int = 403
    addresses: tuple[str, ...] = field(default=())
    """Addresses at which nothing may arrive."""

    @property
    def order(self) -> dict[str, object]:
        """The workload's attempt."""
        return {"attempt": f"{self.do} {self.host}:{self.port}", "do": self.do, "host": self.host, "port": self.port}


def case(sentence: str, *values: Any, **named: Any) -> Any:
    """Give one row of the table of denials."""
    return pytest.param(Denied(*values, **named), id=sentence)


AGENT = "agent"
DENIALS = [
    case("a host not listed, by CONNECT", "proxy_tls", "evil.com", "not_listed", 443, AGENT, addresses=addresses.EVIL),
    case("a host not listed, by plain HTTP", "proxy_get", "evil.net", "not_listed", 80, AGENT),
    case("a host that the agent itself denies", "proxy_tls", "forbidden.example.com", "denied", 443, AGENT),
    case("the apex that only a wildcard lists", "proxy_tls", "example.net", "not_listed", 443, AGENT),
    case("port 22 of a listed host", "proxy_raw", "ssh.example.com", "port", 22, AGENT),
    case("port 5432 of a host listed without it", "proxy_raw", "postgres.example.com", "port", 5432, AGENT),
    case("port 8443 of a listed host", "proxy_tls", "alternative.example.com", "port", 8443, AGENT),
    case("a listed host that the organisation does not list", "proxy_tls", "api.vendor.com", "org_denied", 443,
         "egress/org", addresses=addresses.VENDOR),
    case("a listed host that another document of the organisation denies", "proxy_get", "files.pypi.org",
         "org_denied", 80, "egress/team", addresses=addresses.FILES),
    case("a public address instead of a name", "proxy_tls", "93.184.216.34", "ip_literal", 443),
    case("the metadata address instead of a name", "proxy_get", addresses.METADATA, "ip_literal", 80,
         addresses=(addresses.METADATA,)),
    case("a name in 10.0.0.0/8", "proxy_tls", "private.example.com", "address_private", 443, asked=True,
         addresses=("10.1.2.3",)),
    case("a name on loopback", "proxy_get", "loopback.example.com", "address_private", 80, asked=True),
    case("a name of the metadata service", "proxy_get", "metadata.example.com", "address_private", 80, asked=True,
         addresses=(addresses.METADATA,)),
    case("a name of the metadata service over IPv6", "proxy_get", "metadata6.example.com", "address_private", 80,
         asked=True, addresses=(addresses.METADATA_V6,)),
    case("the metadata address in an IPv4-mapped answer", "proxy_get", "mapped.example.com", "address_private", 80,
         asked=True, addresses=(addresses.METADATA,)),
    case("a name in the carrier's shared range", "proxy_get", "shared.example.com", "address_private", 80, asked=True,
         addresses=("100.64.0.1",)),
    case("a public and a private address in one answer", "proxy_tls", "mix.example.com", "mixed_answer", 443,
         asked=True, addresses=(HALF, "10.1.2.3")),
    case("a public address and a private one of IPv6 in one answer", "proxy_tls", "mix6.example.com", "mixed_answer",
         443, asked=True, addresses=(HALF, "fd20:ce::254")),
    case("a name of the host's private address", "proxy_get", "host.example.com", "address_private", 80, asked=True,
         addresses=(addresses.HOST_PRIVATE,)),
    case("a name of the host's public address", "proxy_get", "own.example.com", "address_local", 80, asked=True,
         addresses=(addresses.HOST_V4,)),
    case("a listed name that does not exist", "proxy_tls", "gone.example.net", "dns_nxdomain", 443, asked=True,
         status=502),
]  # fmt: skip

ALLOWED = (
    {"attempt": "tls", "do": "proxy_tls", "host": "example.com", "path": "/over-tls"},
    {"attempt": "get", "do": "proxy_get", "host": "www.example.com", "path": "/plain"},
    {"attempt": "post", "do": "proxy_get", "host": "www.example.com", "path": "/post", "method": "POST", "body": "x=1"},
    {"attempt": "db", "do": "proxy_raw", "host": "db.example.com", "port": 5432, "send": "SELECT 1"},
    {"attempt": "first", "do": "proxy_get", "host": "rebind.example.com"},
    {"attempt": "second", "do": "proxy_get", "host": "rebind.example.com"},
    {"attempt": "fronted", "do": "proxy_tls", "host": "front.example.com", "sni": "evil.com"},
)


@pytest.fixture(scope="module")
def seen(bare: Installation) -> Seen:
    """Everything is tried by one job, so that the logs show what belongs to it and nothing else."""
    rig: Rig = bare.rig
    for name, spec in ZONE.items():
        rig.names[name] = spec
    bare.adopt(
        {
            "platform": documents.platform(),
            "agents/helper": bare.agent(allow=ALLOW, deny=DENY),
            "egress/org": documents.egress(allow=ORG),
            "egress/team": documents.egress("team", default="allow", deny=["*.pypi.org"]),
        }
    )
    orders = [*ALLOWED, *(parameter.values[0].order for parameter in DENIALS)]
    rig.clear()
    result = bare.run("everything", documents.attempts(*orders, ca=rig.ca.read_text("utf-8"), wait_s=5))
    assert (result["code"], result["status"]) == ("exited", 0), result
    return Seen(
        lines=documents.lines(bare, "everything"),
        result=result,
        decisions=bare.decisions("everything"),
        rows=bare.rows(run=result["run"]),
        asked=rig.asked(),
        arrivals=rig.arrivals(),
        packets=rig.packets(),
    )


def test_an_allowed_host_is_reached_over_connect_and_tls(seen: Seen, place: Place) -> None:
    line = seen.lines["tls"]
    assert line["outcome"] == "reached", line
    assert line["detail"]["status"] == 200
    assert (line["detail"]["json"]["target"], line["detail"]["json"]["sni"]) == ("/over-tls", "example.com")
    (arrival,) = [each for each in seen.arrivals if each.sni == "example.com"]
    assert (arrival.port, arrival.address in addresses.EXAMPLE) == (443, True)
    if place.cluster is None:
        assert arrival.peer in addresses.HOST_ADDRESSES, "the proxy dials from the host's network, not the sandbox's"
    else:
        # Nothing is masqueraded there: it is the proxy's own pod.
        assert ip_address(arrival.peer) in ip_network(PODS)
    assert seen.decided("example.com", 443) == [("allowed", None)]


def test_an_allowed_host_is_reached_over_plain_http(seen: Seen) -> None:
    for attempt, method, body in (("get", "GET", ""), ("post", "POST", "x=1")):
        line = seen.lines[attempt]
        assert (line["outcome"], line["detail"]["status"]) == ("reached", 200), line
        assert (line["detail"]["json"]["method"], line["detail"]["json"]["body"]) == (method, body)
        assert ["Host", "www.example.com"] in line["detail"]["json"]["headers"]
    assert seen.decided("www.example.com", 80) == [("allowed", None)] * 2


def test_a_port_that_its_entry_names_is_a_raw_tunnel(seen: Seen) -> None:
    assert seen.lines["db"]["outcome"] == "reached", seen.lines["db"]
    assert seen.lines["db"]["detail"]["received"] == "SELECT 1"
    assert [(each.port, each.first) for each in seen.arrivals if each.address in addresses.DATABASE] == [
        (5432, b"SELECT 1")
    ]
    assert seen.decided("db.example.com", 5432) == [("allowed", None)]


@pytest.mark.parametrize("denied", DENIALS)
def test_denied(seen: Seen, denied: Denied) -> None:
    line = seen.lines[str(denied.order["attempt"])]
    assert line["outcome"] == "denied", line
    assert (line["detail"]["status"], line["detail"]["code"]) == (denied.status, denied.code)
    assert seen.decided(denied.host, denied.port) == [(denied.code, denied.layer)]
    assert (denied.host in seen.asked) is denied.asked
    assert [packet for packet in seen.packets if packet.address in denied.addresses] == []


@pytest.mark.parametrize("denied", DENIALS)
def test_each_denial_is_an_audit_row_that_names_who_said_no(seen: Seen, denied: Denied) -> None:
    target = f"{denied.host}:{denied.port}"
    (row,) = [row for row in seen.rows if row["object"] == target]
    assert (row["event"], row["outcome"], row["code"]) == ("agent_sandbox.egress.deny", "deny", denied.code)
    assert (row["detail"]["layer"], row["detail"]["address"]) == (denied.layer, None)
    assert row["actor"] == "agents/helper"


def test_the_proxy_tells_the_workload_which_document_said_no(seen: Seen) -> None:
    assert "egress/org" in seen.lines["proxy_tls api.vendor.com:443"]["detail"]["message"]
    assert "egress/team" in seen.lines["proxy_get files.pypi.org:80"]["detail"]["message"]


def test_a_name_that_turns_private_is_denied_at_its_next_use(seen: Seen) -> None:
    assert seen.lines["first"]["outcome"] == "reached", seen.lines["first"]
    assert seen.lines["second"]["outcome"] == "denied", seen.lines["second"]
    assert seen.decided("rebind.example.com", 80) == [("allowed", None), ("address_private", None)]


def test_a_tunnel_whose_server_name_is_another_host_carries_nothing(seen: Seen) -> None:
    assert seen.lines["fronted"]["outcome"] == "failed", seen.lines["fronted"]
    assert seen.decided("front.example.com", 443)[-1] == ("sni_mismatch", None)
    assert [each for each in seen.arrivals if each.sni == "evil.com"] == []


def test_the_first_connection_to_each_allowed_target_is_an_audit_row(seen: Seen) -> None:
    allowed = [row["object"] for row in seen.rows if row["event"] == "agent_sandbox.egress.allow"]
    assert len(allowed) == len(set(allowed))
    assert {"example.com:443", "www.example.com:80", "db.example.com:5432"} <= set(allowed)
    assert not any(target.startswith(("evil", "private", "mix")) for target in allowed)


def test_the_result_counts_what_was_decided(seen: Seen) -> None:
    allowed = sum(one["count"] for one in seen.decisions if one["verdict"] == "allow")
    denied = sum(one["count"] for one in seen.decisions if one["verdict"] == "deny")
    assert (seen.result["decisions"]["allowed"], seen.result["decisions"]["denied"]) == (allowed, denied)
    assert denied == len(DENIALS) + 2  # the name that turned, and the tunnel with another name in it
    assert seen.result["decisions"]["missing"] == seen.result["decisions"]["coalesced"] == 0
    assert [one["seq"] for one in seen.decisions] == list(range(1, len(seen.decisions) + 1))


def test_no_name_was_looked_up_but_those_that_a_decision_names(seen: Seen) -> None:
    passed = {
        one["host"] for one in seen.decisions if one["code"] not in {"not_listed", "denied", "org_denied", "port"}
    }
    assert set(seen.asked) <= passed
