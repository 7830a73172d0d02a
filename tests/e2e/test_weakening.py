"""A host joins a list only once somebody signed why, and leaves it at once; a live sandbox sees both."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.schema import load_schema
from tests.e2e import documents
from tests.e2e.installation import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

VENDOR, TUNNEL = "api.vendor.com", "api.vendor.com:5432"
FEW, MANY = ["example.com"], ["example.com", VENDOR, TUNNEL]
POLLER = """
import socket, time, urllib.error, urllib.request

def get():
    try:
        return urllib.request.urlopen("http://api.vendor.com/poll", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)

def opened():
    tunnel = socket.create_connection(("127.0.0.1", 3128), 5)
    tunnel.sendall(b"CONNECT api.vendor.com:5432 HTTP/1.1\\r\\nHost: api.vendor.com:5432\\r\\n\\r\\n")
    head = tunnel.recv(4096)
    return tunnel if head.startswith(b"HTTP/1.1 200") else None

def ping(tunnel):
    try:
        tunnel.sendall(b"x")
        return tunnel.recv(1) == b"x"
    except OSError:
        return False

tunnel = None
while True:
    word = "open"
    if tunnel is None:
        tunnel = opened()
        word = "refused" if tunnel is None else "opened"
    elif not ping(tunnel):
        tunnel, word = None, "closed"
    print(get(), word, flush=True)
    time.sleep(0.05)
"""
GRANTS = [{"document": "agents/helper", "field": "/allow", "add": host} for host in (VENDOR, TUNNEL)]


@dataclass(frozen=True, slots=True)
class Poller:
    """One job that asks for the vendor again and again, and what it sees."""

    installation: Installation
    run: str

    def words(self) -> list[str]:
        """Every line so far: the status of a GET, and what became of the tunnel."""
        path = self.installation.runtime / "runs" / self.run / "output.log"
        return path.read_text("utf-8").splitlines()

    def sees(self, what: str, *, since: int, within_s: float = 2.0) -> float:
        """Wait until a line after the first `since` is `what`, a pattern; gives the seconds that it took."""
        return self.installation.eventually(
            lambda: any(re.fullmatch(what, word) for word in self.words()[since:]),
            f"the job sees {what}, it saw {self.words()[-3:]}",
            timeout=within_s,
        )


@pytest.fixture
def host(fresh: Installation) -> Installation:
    """Sandboxes are on, and one agent may reach one host; the organisation would let it reach more."""
    fresh.adopt(
        {
            "platform": documents.platform(),
            "agents/helper": documents.agent(allow=FEW),
            "egress/org": documents.egress(default="allow"),
        }
    )
    return fresh


@pytest.fixture
def poller(host: Installation) -> Iterator[Poller]:
    """A job that polls."""
    host.drop("poller", documents.script(POLLER))
    live = Poller(host, host.live("poller")["run"])
    host.eventually(lambda: len(live.words()) > 2, "the job polls")
    yield live
    assert host.cancel("poller")["code"] == "cancelled"


def signature(installation: Installation, statement: Path, *, key: str, namespace: str = NAMESPACE) -> bytes:
    """Sign a statement with ssh-keygen itself."""
    argv = ["/usr/bin/ssh-keygen", "-Y", "sign", "-q", "-f", str(installation.keys / key), "-n", namespace]
    return subprocess.run(argv, input=statement.read_bytes(), capture_output=True, check=True, timeout=20).stdout


def in_force(installation: Installation) -> list[str]:
    """The agent's list as it is in force."""
    effective: dict[str, Any] = json.loads(installation.ringfence("effective", "helper", "--json").stdout)
    return sorted(effective["allow"])


def hold(installation: Installation) -> None:
    """Add the vendor without a signature and wait until it is held."""
    installation.change("agents/helper", documents.agent(allow=MANY))
    installation.eventually(lambda: bool(installation.status()["policy"]["held"]), "the weakening is held", timeout=2)


def place(installation: Installation, identity: str, statement: str, armor: Callable[[Path], bytes]) -> None:
    """Put a statement into the policy directory, then its signature in one rename: that moment is when it is signed."""
    installation.write(f"reasons/{identity}", statement)
    path = installation.policy / "reasons" / f"{identity}.yaml"
    partial = path.with_name(f".{identity}.tmp")
    partial.write_bytes(armor(path))
    partial.rename(path.with_suffix(".alice.sig"))


def test_a_host_that_nobody_signed_for_is_held(host: Installation, poller: Poller) -> None:
    generation = host.status()["policy"]["generation"]
    hold(host)
    policy = host.status()["policy"]
    assert policy["held"] == [
        f'agents/helper /allow: add "{VENDOR}"',
        f'agents/helper /allow: add "{TUNNEL}"',
    ]
    assert policy["generation"] == generation
    assert in_force(host) == FEW

    (row,) = host.rows("config.held")
    assert (row["outcome"], row["weakening"], row["actor"]) == ("held", True, "unsigned")
    assert (row["before"], sorted(row["after"])) == (FEW, sorted(MANY))
    assert VENDOR in row["message"]

    since = len(poller.words())
    host.eventually(lambda: len(poller.words()) > since + 5, "the job polls on")
    assert set(poller.words()) == {"403 refused"}
    assert {packet.address for packet in host.rig.packets(kind="tcp")} == set()


def test_plan_exits_3_and_prints_the_statement_to_sign(host: Installation) -> None:
    hold(host)
    said = host.ringfence("plan", expect=3).stdout
    assert f"now reachable: {VENDOR}:443" in said
    assert f"now reachable: {TUNNEL}" in said
    statement = said.partition("the statement to sign")[2].partition("\n\n")[2]
    for line in ("kind: signed-reason", "audience: [prod-1]", "expires: ", "ticket: ", "reason: ", "grants:"):
        assert line in statement
    assert f"{{document: agents/helper, field: /allow, add: {VENDOR}}}" in statement

    plan = json.loads(host.ringfence("plan", "--json", expect=3).stdout)
    assert plan["exit_code"] == 3
    assert plan["missing"] == GRANTS
    assert plan["changes"] == []


def test_signed_it_is_in_force_within_two_seconds_and_a_live_job_reaches_the_host(
    host: Installation, poller: Poller
) -> None:
    hold(host)
    generation = host.status()["policy"]["generation"]
    statement = host.root / "CHG-2.yaml"
    why = "helper needs the vendor for the invoice sync"
    host.ringfence("plan", "--emit-reason", str(statement), "--reason", why, expect=3)
    since = len(poller.words())
    place(host, "CHG-2", statement.read_text("utf-8"), lambda path: signature(host, path, key="alice"))

    took = host.eventually(lambda: host.status()["policy"]["generation"] > generation, "it is in force", timeout=2)
    took += poller.sees("200 open", since=since, within_s=2)
    assert took < 2
    assert host.status()["policy"]["held"] == []
    assert in_force(host) == sorted(MANY)
    (live,) = host.status()["runs"]
    assert live["generation"] == host.status()["policy"]["generation"] == generation + 1

    (row,) = [row for row in host.rows("config.update") if row["object"] == "agents/helper#/allow" and row["before"]]
    load_schema("audit").validator.validate(row)
    assert (row["weakening"], row["actor"], row["outcome"]) == (True, "alice", "applied")
    assert (row["before"], sorted(row["after"])) == (FEW, sorted(MANY))
    assert (row["detail"]["tickets"], row["detail"]["reasons"]) == (["CHG-2"], ["CHG-2.1"])
    assert row["revision"] == host.status()["policy"]["revision"]
    admitted = [row for row in host.rows("reason.admitted") if row["object"] == "CHG-2.1"]
    assert [(row["actor"], row["message"]) for row in admitted] == [("alice", why)]
    host.ringfence("plan", expect=0)


def loosened(host: Installation, poller: Poller) -> None:
    """Sign for the vendor and wait until the job reaches it and holds a tunnel."""
    hold(host)
    place(host, "CHG-2", documents.statement("CHG-2", *GRANTS), lambda path: signature(host, path, key="alice"))
    poller.sees("200 open", since=0, within_s=5)


def remove_host(host: Installation) -> None:
    """Take the vendor off the agent's list."""
    host.write("agents/helper", documents.agent(allow=FEW))


def remove_statement(host: Installation) -> None:
    """Delete the signed reason."""
    (host.policy / "reasons" / "CHG-2.yaml").unlink()


def revoke_id(host: Installation) -> None:
    """Revoke the signed reason by its id."""
    (host.trust / "revoked").write_text("id CHG-2.1\n", "utf-8")


def narrow_org(host: Installation) -> None:
    """Have the organisation deny the vendor."""
    host.write("egress/org", documents.egress(default="allow", deny=[VENDOR]))


@pytest.mark.parametrize(
    ("tighten", "row", "codes"),
    [
        pytest.param(remove_host, "config.update", {"not_listed"}, id="the host is removed"),
        pytest.param(remove_statement, "reason.lapsed", {"not_listed"}, id="the signed reason is deleted"),
        pytest.param(revoke_id, "reason.lapsed", {"not_listed"}, id="the signed reason is revoked"),
        pytest.param(narrow_org, "config.update", {"org_denied"}, id="the organisation denies the host"),
    ],
)
def test_a_tightening_applies_at_once_and_closes_what_is_open(
    host: Installation, poller: Poller, tighten: Callable[[Installation], None], row: str, codes: set[str]
) -> None:
    loosened(host, poller)
    since, rows = len(poller.words()), len(host.rows())
    tighten(host)
    took = poller.sees("403 .*", since=since)
    took += poller.sees(".* closed", since=since)
    took += poller.sees("403 refused", since=since)
    assert took < 2
    later = host.rows()[rows:]
    assert [one for one in later if one["event"] == f"agent_sandbox.{row}"]
    updates = [one for one in later if one["event"] == "agent_sandbox.config.update"]
    assert updates
    assert not any(one["weakening"] for one in updates)
    denials = [one for one in later if one["event"] == "agent_sandbox.egress.deny"]
    assert {one["code"] for one in denials} >= {"policy_changed", *codes}
    (closed, *_) = [one for one in denials if one["code"] == "policy_changed"]
    assert (closed["object"], closed["run"]) == (TUNNEL, poller.run)

    host.eventually(lambda: len(poller.words()) > since + 20, "the job polls on")
    host.rig.clear()
    since = len(poller.words())
    host.eventually(lambda: len(poller.words()) > since + 3, "the job polls on")
    assert host.rig.packets() == []


def altered(host: Installation, path: Path) -> bytes:
    """Sign, then change a word of the statement."""
    armor = signature(host, path, key="alice")
    path.write_text(path.read_text("utf-8").replace("invoice", "payroll"), "utf-8")
    return armor


def stranger(host: Installation, path: Path) -> bytes:
    """Sign with a key that nobody trusts."""
    argv = ["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.keys / "mallory")]
    subprocess.run(argv, check=True, timeout=20)
    return signature(host, path, key="mallory")


def other_namespace(host: Installation, path: Path) -> bytes:
    """Sign for something else."""
    return signature(host, path, key="alice", namespace="file")


@pytest.mark.parametrize(
    ("armor", "fields"),
    [
        pytest.param(altered, {}, id="altered after it was signed"),
        pytest.param(stranger, {}, id="signed with a key that is not trusted"),
        pytest.param(other_namespace, {}, id="signed in another namespace"),
        pytest.param(
            lambda host, path: signature(host, path, key="alice"),
            {"expires": "2020-01-01T00:00:00Z"},
            id="expired",
        ),
        pytest.param(
            lambda host, path: signature(host, path, key="alice"), {"audience": ["staging-*"]}, id="for other hosts"
        ),
    ],
)
def test_a_statement_that_does_not_count_leaves_the_host_held(
    host: Installation, armor: Callable[[Installation, Path], bytes], fields: dict[str, Any]
) -> None:
    hold(host)
    seen = host.status()["policy"]["seen"]
    place(host, "CHG-2", documents.statement("CHG-2", *GRANTS, **fields), lambda path: armor(host, path))
    host.eventually(lambda: host.status()["policy"]["seen"] != seen, "the daemon has seen the signature")
    host.ringfence("plan", expect=3)
    assert host.ringfence("reason", "verify", *verify(host), expect=1).stderr
    assert in_force(host) == FEW
    assert [row for row in host.rows("reason.admitted") if row["object"] == "CHG-2.1"] == []
    assert len(host.status()["policy"]["held"]) == 2


def verify(host: Installation) -> list[str]:
    """Arguments of `reason verify` for the statement."""
    return [str(host.policy / "reasons" / "CHG-2.yaml"), "--host-config", str(host.host_config)]
