"""A host joins a list only once somebody signed why, and leaves it at once; a live sandbox sees both."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.clock import SystemClock
from reconciler.core.schema import load_schema
from tests.e2e import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.installation import Installation

pytestmark = pytest.mark.rig

VENDOR, TUNNEL = "api.vendor.com", "api.vendor.com:5432"
FEW, MANY = ["example.com"], ["example.com", VENDOR, TUNNEL]
POLLER = """
import os, socket, time, urllib.error, urllib.request

proxy = os.environ["HTTP_PROXY"].removeprefix("http://").split(":")

def get():
    try:
        return urllib.request.urlopen("http://api.vendor.com/poll", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)

def opened():
    tunnel = socket.create_connection((proxy[0], int(proxy[1])), 5)
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
CASES = 20
_LASTS_S = 12
"""Seconds that a signed reason counts which a test waits for the end of."""
_SKEW_S = 0.05
"""A file is replaced before the test has read the clock; a row has its time in milliseconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test's own agent on the shared host; `identity` is the ticket of the signed reason that is about it."""

    host: Installation
    agent: str
    identity: str

    @property
    def document(self) -> str:
        """Its document."""
        return f"agents/{self.agent}"

    @property
    def grants(self) -> list[dict[str, object]]:
        """What somebody has to sign."""
        return [{"document": self.document, "field": "/allow", "add": host} for host in (VENDOR, TUNNEL)]

    def held(self) -> list[str]:
        """What of the agent is held."""
        return [line for line in self.host.status()["policy"]["held"] if line.startswith(f"{self.document} ")]

    def rows(self, event: str, *, after: int = 0) -> list[dict[str, Any]]:
        """Audit rows of one event about the agent, its list or its signed reason."""
        about = {self.document, f"{self.document}#/allow", f"{self.identity}.1"}
        return [row for row in self.host.rows(event) if row["object"] in about and row["seq"] > after]

    def in_force(self) -> list[str]:
        """The agent's list as it is in force."""
        effective: dict[str, Any] = json.loads(self.host.ringfence("effective", self.agent, "--json").stdout)
        return sorted(effective["allow"])

    def hold(self) -> None:
        """Add the vendor without a signature and wait until it is held."""
        self.host.change(self.document, self.host.agent(self.agent, MANY))
        self.host.eventually(lambda: bool(self.held()), "the weakening is held", timeout=2)

    def place(self, statement: str, armor: Callable[[Path], bytes]) -> None:
        """Put a statement into the policy directory, then its signature in one rename: with that it is signed."""
        self.host.write(f"reasons/{self.identity}", statement)
        path = self.host.policy / "reasons" / f"{self.identity}.yaml"
        self.host.place(path.with_suffix(".alice.sig"), armor(path))

    def sign(self, signer: str = "alice", **fields: object) -> None:
        """Sign for the vendor."""
        statement = documents.statement(self.identity, *self.grants, **fields)
        self.place(statement, lambda path: self.host.signature(path, signer))

    def by_alice(self, path: Path) -> bytes:
        """Give alice's signature."""
        return self.host.signature(path, "alice")

    def closed(self, run: str, *, after: int) -> dict[str, Any]:
        """Wait for the row that says that the run's open tunnel was closed."""

        def found() -> list[dict[str, Any]]:
            rows = self.host.rows("egress.deny", run=run)
            return [row for row in rows if row["seq"] > after and row["code"] == "policy_changed"]

        self.host.eventually(lambda: bool(found()), "the tunnel is closed")
        return found()[0]


@dataclass(frozen=True, slots=True)
class Poller:
    """One job that asks for the vendor again and again, and what it sees."""

    host: Installation
    run: str

    def words(self) -> list[str]:
        """Every line so far: the status of a GET, and what became of the tunnel."""
        return (self.host.runtime / "runs" / self.run / "output.log").read_text("utf-8").splitlines()

    def sees(self, what: str, *, since: int, within_s: float = 2.0) -> float:
        """Wait until a line after the first `since` is `what`, a pattern; gives the seconds that it took."""
        return self.host.eventually(
            lambda: any(re.fullmatch(what, word) for word in self.words()[since:]),
            f"the job sees {what}",
            timeout=within_s,
        )

    def polls_on(self, times: int) -> int:
        """Wait until the job has polled so often again; gives how many lines there were before."""
        since = len(self.words())
        self.host.eventually(lambda: len(self.words()) > since + times, "the job polls on")
        return since


@pytest.fixture(scope="module")
def shared(bare: Installation) -> Installation:
    """Sandboxes are on; each agent may reach one host, and the organisation would let it reach more."""
    names = [f"helper-{number}" for number in range(CASES)]
    bare.adopt(
        {
            "platform": documents.platform(),
            **{f"agents/{name}": bare.agent(name, FEW) for name in names},
            "egress/org": documents.egress(default="allow"),
        }
    )
    return bare


@pytest.fixture(scope="module")
def numbers(shared: Installation) -> Iterator[int]:
    """Number the tests of this module on one host."""
    del shared
    return itertools.count()


@pytest.fixture
def case(shared: Installation, numbers: Iterator[int]) -> Iterator[Case]:
    """An agent that no other test has; afterwards it is as it was."""
    shared.rig.reset()
    number = next(numbers)
    mine = Case(shared, f"helper-{number}", f"CHG-{100 + number}")
    yield mine
    shared.write(mine.document, shared.agent(mine.agent, FEW))
    for path in (shared.policy / "reasons").glob(f"{mine.identity}.*"):
        path.unlink()
    shared.eventually(lambda: not mine.held(), "nothing of this test is held")


@pytest.fixture
def poller(case: Case) -> Iterator[Poller]:
    """A job of this test's agent that polls."""
    host = case.host
    host.drop(case.agent, documents.script(POLLER, agent=case.agent))
    live = Poller(host, host.live(case.agent)["run"])
    live.polls_on(2)
    yield live
    assert host.cancel(case.agent)["code"] == "cancelled"


def test_a_host_that_nobody_signed_for_is_held(case: Case, poller: Poller) -> None:
    generation = case.host.status()["policy"]["generation"]
    case.hold()
    assert case.held() == [f'{case.document} /allow: add "{VENDOR}"', f'{case.document} /allow: add "{TUNNEL}"']
    assert case.host.status()["policy"]["generation"] == generation
    assert case.in_force() == FEW

    (row,) = case.rows("config.held")
    assert (row["outcome"], row["weakening"], row["actor"]) == ("held", True, "unsigned")
    assert (row["before"], sorted(row["after"])) == (FEW, sorted(MANY))
    assert VENDOR in row["message"]

    poller.polls_on(5)
    assert set(poller.words()) == {"403 refused"}
    assert case.host.rig.packets() == []


def test_plan_exits_3_and_prints_the_statement_to_sign(case: Case) -> None:
    case.hold()
    said = case.host.ringfence("plan", expect=3).stdout
    assert f"now reachable: {VENDOR}:443" in said
    assert f"now reachable: {TUNNEL}" in said
    statement = said.partition("the statement to sign")[2].partition("\n\n")[2]
    for line in ("kind: signed-reason", "audience: [prod-1]", "expires: ", "ticket: ", "reason: ", "grants:"):
        assert line in statement
    assert f"{{document: {case.document}, field: /allow, add: {VENDOR}}}" in statement

    plan = json.loads(case.host.ringfence("plan", "--json", expect=3).stdout)
    assert (plan["exit_code"], plan["missing"], plan["changes"]) == (3, case.grants, [])


def test_signed_it_is_in_force_within_two_seconds_and_a_live_job_reaches_the_host(case: Case, poller: Poller) -> None:
    host = case.host
    case.hold()
    generation = host.status()["policy"]["generation"]
    statement = host.root / f"{case.identity}.yaml"
    why = "helper needs the vendor for the invoice sync"
    host.ringfence("plan", "--emit-reason", str(statement), "--reason", why, expect=3)
    since = len(poller.words())
    case.place(statement.read_text("utf-8"), case.by_alice)

    took = host.eventually(lambda: host.status()["policy"]["generation"] > generation, "it is in force", timeout=2)
    took += poller.sees("200 open", since=since)
    assert took < 2
    assert case.held() == []
    assert case.in_force() == sorted(MANY)
    (live,) = host.status()["runs"]
    assert live["generation"] == host.status()["policy"]["generation"] == generation + 1

    (row,) = [row for row in case.rows("config.update") if row["weakening"] and row["before"]]
    load_schema("audit").validator.validate(row)
    assert (row["object"], row["actor"], row["outcome"]) == (f"{case.document}#/allow", "alice", "applied")
    assert (row["before"], sorted(row["after"])) == (FEW, sorted(MANY))
    assert (row["detail"]["tickets"], row["detail"]["reasons"]) == ([case.identity], [f"{case.identity}.1"])
    assert row["revision"] == host.status()["policy"]["revision"]
    (admitted,) = case.rows("reason.admitted")
    assert (admitted["actor"], admitted["message"]) == ("alice", why)
    host.ringfence("plan", expect=0)


def remove_host(case: Case) -> None:
    """Take the vendor off the agent's list."""
    case.host.write(case.document, case.host.agent(case.agent, FEW))


def remove_statement(case: Case) -> None:
    """Delete the signed reason."""
    (case.host.policy / "reasons" / f"{case.identity}.yaml").unlink()


def revoke_id(case: Case) -> None:
    """Revoke the signed reason by its id."""
    (case.host.trust / "revoked").write_text(f"id {case.identity}.1\n", "utf-8")


def narrow_organisation(case: Case) -> None:
    """Have a document of the organisation deny the vendor to this agent."""
    case.host.write("egress/narrow", documents.egress("narrow", agents=[case.agent], default="allow", deny=[VENDOR]))


@pytest.mark.parametrize(
    ("tighten", "event", "code"),
    [
        pytest.param(remove_host, "config.update", "not_listed", id="the host is removed"),
        pytest.param(remove_statement, "reason.lapsed", "not_listed", id="the signed reason is deleted"),
        pytest.param(revoke_id, "reason.lapsed", "not_listed", id="the signed reason is revoked"),
        pytest.param(narrow_organisation, "config.update", "org_denied", id="the organisation denies the host"),
    ],
)
def test_a_tightening_applies_at_once_and_closes_what_is_open(
    case: Case, poller: Poller, tighten: Callable[[Case], None], event: str, code: str
) -> None:
    case.hold()
    case.sign()
    poller.sees("200 open", since=0, within_s=5)
    since, last = len(poller.words()), case.host.rows()[-1]["seq"]
    tighten(case)
    took = poller.sees("403 .*", since=since) + poller.sees(".* closed", since=since)
    took += poller.sees("403 refused", since=since)
    assert took < 2

    later = [row for row in case.host.rows() if row["seq"] > last]
    assert [row for row in later if row["event"] == f"agent_sandbox.{event}"]
    updates = [row for row in later if row["event"] == "agent_sandbox.config.update"]
    assert updates
    assert not any(row["weakening"] for row in updates)
    denials = [row for row in later if row["event"] == "agent_sandbox.egress.deny"]
    assert {row["code"] for row in denials} >= {"policy_changed", code}
    (closed, *_) = [row for row in denials if row["code"] == "policy_changed"]
    assert (closed["object"], closed["run"]) == (TUNNEL, poller.run)

    poller.polls_on(5)
    case.host.rig.clear()
    poller.polls_on(5)
    assert case.host.rig.packets() == []


def expire(case: Case) -> datetime:
    """Wait for the end that the signed reason has."""
    statement = json.loads((case.host.policy / "reasons" / f"{case.identity}.yaml").read_text("utf-8"))
    end = datetime.fromisoformat(statement["expires"])
    time.sleep(max(0.0, (end - SystemClock().now()).total_seconds()))
    return end


def revoke_key(case: Case) -> datetime:
    """Revoke the key that signed."""
    command = ["/usr/bin/ssh-keygen", "-lf", str(case.host.keys / "carol.pub")]
    fingerprint = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[1]
    (case.host.trust / "revoked").write_text(f"key {fingerprint}\n", "utf-8")
    return SystemClock().now()


def remove_signer(case: Case) -> datetime:
    """Take whoever signed off the list of signers."""
    signers = case.host.trust / "allowed_signers"
    kept = [line for line in signers.read_text("utf-8").splitlines(keepends=True) if not line.startswith("carol ")]
    case.host.place(signers, "".join(kept).encode())
    return SystemClock().now()


def tighten_list(case: Case) -> datetime:
    """Take the vendor off the agent's list."""
    remove_host(case)
    return SystemClock().now()


@pytest.mark.parametrize(
    ("end", "lapsed"),
    [
        pytest.param(tighten_list, None, id="a tightening"),
        pytest.param(expire, "expired", id="expiry"),
        pytest.param(revoke_key, "key_revoked", id="revocation of the key"),
        pytest.param(remove_signer, "unknown_key", id="removal of the signer"),
    ],
)
def test_what_ends_a_permission_closes_an_open_tunnel_within_a_second(
    case: Case, poller: Poller, end: Callable[[Case], datetime], lapsed: str | None
) -> None:
    host = case.host
    (host.trust / "revoked").write_text("", "utf-8")
    for old in host.keys.glob("carol*"):
        old.unlink()
    host.add_signer("carol")
    case.hold()
    expires = (SystemClock().now() + timedelta(seconds=_LASTS_S)).strftime("%Y-%m-%dT%H:%M:%SZ")
    case.sign("carol", expires=expires)
    poller.sees("200 open", since=0, within_s=_LASTS_S / 2)
    last = host.rows()[-1]["seq"]
    ended = end(case)
    closed = case.closed(poller.run, after=last)
    assert closed["object"] == TUNNEL
    assert 0 <= (datetime.fromisoformat(closed["time"]) - ended).total_seconds() + _SKEW_S <= 1 + _SKEW_S
    codes = [row["code"] for row in case.rows("reason.lapsed", after=last)]
    assert codes == ([] if lapsed is None else [lapsed])


def altered(case: Case, path: Path) -> bytes:
    """Sign, then change a word of the statement."""
    armor = case.by_alice(path)
    path.write_text(path.read_text("utf-8").replace("invoice", "payroll"), "utf-8")
    return armor


def stranger(case: Case, path: Path) -> bytes:
    """Sign with a key that nobody trusts."""
    argv = ["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(case.host.keys / "mallory")]
    subprocess.run(argv, check=True, timeout=20)
    return case.host.signature(path, "mallory")


def other_namespace(case: Case, path: Path) -> bytes:
    """Sign for something else."""
    return case.host.signature(path, "alice", namespace="file")


@pytest.mark.parametrize(
    ("armor", "fields"),
    [
        pytest.param(altered, {}, id="altered after it was signed"),
        pytest.param(stranger, {}, id="signed with a key that is not trusted"),
        pytest.param(other_namespace, {}, id="signed in another namespace"),
        pytest.param(Case.by_alice, {"expires": "2020-01-01T00:00:00Z"}, id="expired"),
        pytest.param(Case.by_alice, {"audience": ["staging-*"]}, id="for other hosts"),
        pytest.param(Case.by_alice, {"ticket": "soon"}, id="without a ticket of the host's pattern"),
    ],
)
def test_a_statement_that_does_not_count_leaves_the_host_held(
    case: Case, armor: Callable[[Case, Path], bytes], fields: dict[str, Any]
) -> None:
    host = case.host
    case.hold()
    seen, last = host.status()["policy"]["seen"], host.rows()[-1]["seq"]
    case.place(documents.statement(case.identity, *case.grants, **fields), lambda path: armor(case, path))
    host.eventually(lambda: host.status()["policy"]["seen"] != seen, "the daemon has seen the statement")
    # What `reason verify` finds is what the daemon finds, and by now it has had the time to look at the signature too.
    statement = host.policy / "reasons" / f"{case.identity}.yaml"
    assert host.ringfence("reason", "verify", str(statement), "--host-config", str(host.host_config), expect=1).stderr
    assert case.rows("reason.admitted") == case.rows("config.update", after=last) == []
    assert len(case.held()) == 2
