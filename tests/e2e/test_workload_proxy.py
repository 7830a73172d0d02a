"""The workload's attempts over the proxy, with the real proxy in the rig's host namespace and no fence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import workload
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

pytestmark = pytest.mark.rig

SCRIPT = Path(workload.__file__)
LISTEN = "127.0.0.1:3128"


def policy(rig: Rig) -> bytes:
    body = {
        "version": 1,
        "kind": "proxy-policy",
        "run": "20260101T000000-0123abcd",
        "generation": 1,
        "revision": "sha256:" + "0" * 64,
        "allow": ["*.example.com", "db.example.com:5432", "example.com"],
        "deny": [],
        "layers": [],
        "resolvers": [rig.resolver],
        "local_addresses": [],
        "nat64_prefixes": [],
        "limits": {"connections": 256},
        "canary": None,
        "proof_key": "ab" * 32,
        "client_secret": None,
        "expires_at": int(time.time()) + 120,
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def proxied(rig: Rig) -> Iterator[Rig]:
    program = Path(sys.executable).with_name("ringfence-proxy")
    argv = [str(program), "--listen", LISTEN, "--user", "nobody"]
    process = rig.spawn(argv, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(policy(rig))
    process.stdin.flush()
    ready = json.loads(process.stdout.readline())
    assert (ready["kind"], ready["listen"]) == ("ready", LISTEN)
    yield rig
    process.stdin.close()
    assert process.wait(timeout=10) == 0


def only(rig: Rig, **attempt: Any) -> tuple[str, dict[str, Any]]:
    job = {"attempts": [attempt], "timeout": 5, "ca": rig.ca.read_text(), "proxy": f"http://{LISTEN}"}
    done = rig.run(["/usr/bin/python3", "-I", str(SCRIPT), json.dumps(job)], env={"PATH": "/usr/bin:/bin"})
    line = json.loads(done.stdout)
    return line["outcome"], line["detail"]


def test_tls_through_a_tunnel_reaches_the_origin(proxied: Rig) -> None:
    outcome, detail = only(proxied, do="proxy_tls", host="example.com", path="/tls")
    assert outcome == "reached", detail
    assert (detail["status"], detail["json"]["target"], detail["json"]["sni"]) == (200, "/tls", "example.com")


def test_plain_http_reaches_the_origin(proxied: Rig) -> None:
    outcome, detail = only(proxied, do="proxy_get", host="example.com", path="/plain")
    assert outcome == "reached", detail
    assert (detail["status"], detail["json"]["target"]) == (200, "/plain")
    assert ["Host", "example.com"] in detail["json"]["headers"]


def test_a_listed_port_is_a_raw_tunnel(proxied: Rig) -> None:
    outcome, detail = only(proxied, do="proxy_raw", host="db.example.com", port=5432, send="EARLY")
    assert (outcome, detail.get("received")) == ("reached", "EARLY"), detail
    assert [arrival.first for arrival in proxied.arrivals(address=addresses.DATABASE)] == [b"EARLY"]


@pytest.mark.parametrize(
    ("attempt", "code", "asked"),
    [
        pytest.param({"do": "proxy_tls", "host": "evil.com"}, "not_listed", [], id="CONNECT to a host not listed"),
        pytest.param({"do": "proxy_get", "host": "evil.com"}, "not_listed", [], id="GET of a host not listed"),
        pytest.param({"do": "proxy_raw", "host": "example.com", "port": 22}, "port", [], id="a port not listed"),
        pytest.param(
            {"do": "proxy_tls", "host": "metadata.example.com"},
            "address_private",
            ["metadata.example.com"],
            id="the metadata address",
        ),
        pytest.param(
            {"do": "proxy_get", "host": "mixed.example.com"}, "mixed_answer", ["mixed.example.com"], id="a mixed answer"
        ),
    ],
)
def test_a_denial_is_told_with_its_code(proxied: Rig, attempt: dict[str, Any], code: str, asked: list[str]) -> None:
    outcome, detail = only(proxied, **attempt)
    assert (outcome, detail.get("status"), detail.get("code")) == ("denied", 403, code), detail
    assert proxied.asked() == asked
    assert proxied.arrivals() == []


def test_bytes_go_to_the_proxy_as_they_are(proxied: Rig) -> None:
    outcome, detail = only(
        proxied, do="proxy_bytes", send="TRACE http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n"
    )
    assert outcome == "reached"
    assert detail["received"].startswith("HTTP/1.1 405 ")
