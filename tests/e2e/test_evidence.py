"""What a host says afterwards: results, rows, reports, decisions and status are as their schemas say, and agree.

The audit log holds as it was written, and one changed byte in a copy of it is found and named.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from reconciler.core.policy import BackendName
from reconciler.core.schema import load_schema
from tests.e2e import documents

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.grounds import Place
    from tests.e2e.installation import Installation

pytestmark = pytest.mark.rig

SECRET = "swordfish-4711"  # noqa: S105 - looked for where it must not be
FETCH = {"attempt": "fetch", "do": "proxy_get", "host": "example.com"}
FLIPS = 200
VERSIONS = {
    BackendName.BUBBLEWRAP: {"bubblewrap", "kernel", "python"},
    BackendName.DOCKER: {"api", "engine", "kernel", "proxy_image", "runtime"},
}
"""What decides how well a sandbox isolates."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a host with some history says."""

    results: dict[str, dict[str, Any]]
    decisions: dict[str, list[dict[str, Any]]]
    rows: list[dict[str, Any]]
    statuses: dict[str, dict[str, Any]]
    audit: Path


@pytest.fixture(scope="module")
def evidence(bare: Installation) -> Evidence:
    """A host that refused, ran, stopped, held, applied and restarted."""
    statuses: dict[str, dict[str, Any]] = {}
    bare.start()
    statuses["without a policy"] = bare.status()
    bare.run("too-early", documents.job("/usr/bin/true"))
    bare.stop()
    statuses["stopped"] = bare.status()
    (bare.root / "secret").write_text(SECRET + "-of-the-host\n", "utf-8")
    (bare.root / "secret").chmod(0o600)
    fields: dict[str, Any] = {
        "env": {"allow": ["INVOICE_ID"]},
        "secrets": {"API_KEY": {"file": str(bare.root / "secret")}},
    }
    bare.adopt(
        {
            "platform": documents.platform(),
            "agents/helper": bare.agent(allow=["example.com"], **fields),
            "egress/org": documents.egress(default="allow"),
        }
    )
    everything = [
        FETCH,
        {"attempt": "tls", "do": "proxy_tls", "host": "example.com", "path": "/bytes/10?secret-query"},
        {"attempt": "denied", "do": "proxy_tls", "host": "evil.com"},
        {"attempt": "malformed", "do": "proxy_bytes", "send": "GET / HTTP/1.1\r\nHost : x\r\n\r\n"},
    ]
    job = documents.attempts(*everything, ca=bare.rig.ca.read_text("utf-8"))
    bare.run("work", {**job, "env": {"INVOICE_ID": SECRET}})
    bare.run("unknown", documents.job("/usr/bin/true", agent="somebody"))
    bare.run("missing", documents.job("/usr/bin/no-such-command"))
    bare.run("late", documents.job("/usr/bin/sleep", "30", timeout="1s"))
    bare.drop("long", documents.job("/usr/bin/sleep", "60"))
    bare.live("long")
    statuses["with a run alive"] = bare.status()
    bare.cancel("long")
    bare.write("agents/broken", "version: 1\nkind: agent\nname: broken\n")
    bare.write("agents/helper", bare.agent(allow=["example.com", "evil.com"], **fields))
    bare.sign("CHG-9", documents.statement("CHG-9", {"document": "agents/absent", "field": "/allow", "add": "a.com"}))
    bare.eventually(lambda: bool(bare.status()["policy"]["held"]), "a weakening is held")
    bare.eventually(lambda: bool(bare.status()["policy"]["unused"]), "a statement is unused")
    statuses["with problems, held and unused"] = bare.status()
    bare.stop()
    done = sorted((bare.spool / "done" / "root").iterdir())
    return Evidence(
        results={path.name: json.loads((path / "result.json").read_text("utf-8")) for path in done},
        decisions={path.name: bare.decisions(path.name) for path in done},
        rows=bare.rows(),
        statuses=statuses,
        audit=bare.state / "audit",
    )


def test_every_result_is_as_its_schema_says(evidence: Evidence) -> None:
    schema = load_schema("result")
    for result in evidence.results.values():
        schema.validator.validate(result)
    assert {name: result["code"] for name, result in evidence.results.items()} == {
        "cancel-long": "cancel_sent",
        "late": "timeout",
        "long": "cancelled",
        "missing": "command_not_found",
        "too-early": "refused",
        "unknown": "refused",
        "work": "exited",
    }


def test_every_gate_report_is_as_its_schema_says_and_in_result_and_launch_row(evidence: Evidence) -> None:
    schema = load_schema("gate-report")
    gated = {name: result["gate"] for name, result in evidence.results.items() if result["gate"] is not None}
    assert set(gated) == {"work", "missing", "late", "long"}
    launched = {row["run"]: row for row in evidence.rows if row["outcome"] == "launched"}
    for name, gate in gated.items():
        schema.validator.validate(gate)
        assert gate["passed"] is True
        assert launched[evidence.results[name]["run"]]["detail"]["gate"] == gate
        assert {target["verdict"] for target in gate["targets"] if target["alive"]} == {"denied"}
        assert len([target for target in gate["targets"] if target["alive"]]) >= 10


def test_every_audit_row_is_as_its_schema_says(evidence: Evidence) -> None:
    schema = load_schema("audit")
    for row in evidence.rows:
        schema.validator.validate(row)
    names = {row["event"].removeprefix("agent_sandbox.") for row in evidence.rows}
    assert names >= {
        *("launch", "refuse", "fail", "teardown", "egress.deny", "egress.allow", "config.update", "config.held"),
        *("reason.admitted", "trust.update", "daemon.start", "daemon.stop", "probe"),
    }


def test_every_decision_is_as_its_schema_says(evidence: Evidence) -> None:
    schema = load_schema("decision")
    for decisions in evidence.decisions.values():
        for decision in decisions:
            schema.validator.validate(decision)
    assert [(one["host"], one["code"]) for one in evidence.decisions["work"]] == [
        ("example.com", "allowed"),
        ("example.com", "allowed"),
        ("evil.com", "not_listed"),
        ("", "malformed"),
    ]


@pytest.mark.parametrize("when", ["without a policy", "stopped", "with a run alive", "with problems, held and unused"])
def test_the_status_is_as_its_schema_says(evidence: Evidence, when: str) -> None:
    load_schema("status").validator.validate(evidence.statuses[when])


def test_the_status_says_what_was_so(evidence: Evidence, place: Place) -> None:
    statuses = evidence.statuses
    assert statuses["without a policy"]["policy"]["enabled"] is False
    assert statuses["stopped"]["state"] == "stopped"
    (run,) = statuses["with a run alive"]["runs"]
    assert (run["job"], run["agent"], run["submitter"], run["backend"]) == ("long", "helper", "root", place.backend)
    assert run["run"] == evidence.results["long"]["run"]
    policy = statuses["with problems, held and unused"]["policy"]
    assert policy["held"] == ['agents/helper /allow: add "evil.com"']
    assert policy["unused"] == ["CHG-9.1"]
    assert [problem for problem in policy["problems"] if problem.startswith("agents/broken.yaml:1:1:")]


def test_a_result_names_its_revision_reasons_backend_and_times(evidence: Evidence, place: Place) -> None:
    result = evidence.results["work"]
    assert result["revision"].startswith("sha256:")
    assert result["reasons"] == ["CHG-1.1"]
    assert (result["backend"]["name"], result["backend"]["isolation"], result["image"]) == (
        *(place.backend, place.ground.isolation),
        place.image,
    )
    assert VERSIONS[place.backend] <= set(result["backend"]["versions"])
    assert result["backend"]["evidence"]
    assert [line for line in result["backend"]["why"] if line.startswith("k8s")]
    times = [result["times"][state] for state in ("claimed", "intent", "gated", "started", "exited", "reported")]
    assert times == sorted(times)


def test_a_result_points_at_its_own_rows_and_at_the_chain(evidence: Evidence) -> None:
    by_seq = {row["seq"]: row for row in evidence.rows}
    for result in evidence.results.values():
        place = result["audit"]
        if result["code"] == "cancel_sent":
            continue
        assert by_seq[place["first"]]["run"] == by_seq[place["last"]]["run"] == result["run"]
        assert by_seq[place["head"]]["hash"] == place["hash"]
        assert place["first"] <= place["last"] <= place["head"]


def test_a_result_points_at_the_rows_of_its_decisions(evidence: Evidence) -> None:
    by_seq = {row["seq"]: row for row in evidence.rows}
    result = evidence.results["work"]
    rows = [by_seq[seq] for first, last in result["decisions"]["rows"] for seq in range(first, last + 1)]
    assert {row["event"] for row in rows} == {"agent_sandbox.egress.allow", "agent_sandbox.egress.deny"}
    by_decision = {one["seq"]: one for one in evidence.decisions["work"]}
    for row in rows:
        decision = by_decision[row["detail"]["seq"]]
        assert (row["code"], row["outcome"], row["run"]) == (decision["code"], decision["verdict"], result["run"])
    denials = [one["seq"] for one in evidence.decisions["work"] if one["verdict"] == "deny"]
    assert set(denials) <= {row["detail"]["seq"] for row in rows}


def test_every_run_leaves_its_rows_in_their_order(evidence: Evidence) -> None:
    for name in ("work", "late", "long", "missing"):
        run = evidence.results[name]["run"]
        rows = [row for row in evidence.rows if row["run"] == run]
        outcomes = [(row["event"].removeprefix("agent_sandbox."), row["outcome"]) for row in rows]
        assert outcomes[:2] == [("launch", "intended"), ("launch", "launched")]
        assert outcomes[-1] == ("teardown", "done")
        assert (("fail", "failed") in outcomes) is (name != "work")


def test_the_row_of_a_start_names_the_daemon(evidence: Evidence) -> None:
    starts = [row for row in evidence.rows if row["event"] == "agent_sandbox.daemon.start"]
    stops = [row for row in evidence.rows if row["event"] == "agent_sandbox.daemon.stop"]
    assert len(starts) == len(stops) == 2
    assert {row["object"] for row in starts + stops} == {"hosts/prod-1"}


@pytest.mark.usefixtures("evidence")
def test_no_value_of_a_variable_or_secret_and_no_path_of_a_url_is_kept(bare: Installation) -> None:
    kept = [path for path in bare.root.rglob("*") if path.is_file() and path != bare.root / "secret"]
    assert {"audit.jsonl", "daemon.log", "decisions.jsonl", "result.json", "state.json"} <= {path.name for path in kept}
    for path in kept:
        data = path.read_bytes()
        assert SECRET.encode() not in data, path
        assert b"secret-query" not in data, path


@pytest.mark.usefixtures("evidence")
def test_results_are_closed_to_others(bare: Installation) -> None:
    for path in (bare.spool / "done" / "root").iterdir():
        assert path.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o400}
    assert bare.status_path().stat().st_mode & 0o777 == 0o644


# --- the chain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(evidence: Evidence, tmp_path: Path) -> Path:
    """A copy of the audit directory to damage."""
    return Path(shutil.copytree(evidence.audit, tmp_path / "audit"))


def verify(installation: Installation, log: Path, *more: str, expect: int) -> str:
    """Run `ringfence audit verify` on a log and give what it said."""
    done = installation.ringfence("audit", "verify", "--log", str(log), *more, expect=expect)
    return done.stdout + done.stderr


def test_the_log_holds_as_it_was_written(bare: Installation, evidence: Evidence, copy: Path) -> None:
    last = evidence.rows[-1]
    said = verify(bare, copy, expect=0)
    assert f"{len(evidence.rows)} rows, unchanged and in order" in said
    assert f"head {last['seq']}:{last['hash']}" in said
    verify(bare, copy, "--head", f"{evidence.rows[3]['seq']}:{evidence.rows[3]['hash']}", expect=0)


def flip(lines: list[bytes], row: int, random_bit: random.Random) -> list[bytes]:
    """Flip one bit of one byte of a row."""
    line = bytearray(lines[row])
    line[random_bit.randrange(len(line))] ^= 1 << random_bit.randrange(8)
    return [*lines[:row], bytes(line), *lines[row + 1 :]]


Damage: TypeAlias = "Callable[[list[bytes]], list[bytes]]"
DAMAGES: dict[str, Damage] = {
    "a bit of a row is flipped": lambda lines: flip(lines, 6, random.Random(1)),
    "an outcome is rewritten": lambda lines: [line.replace(b'"refused"', b'"allowed"', 1) for line in lines],
    "a row is cut out": lambda lines: lines[:4] + lines[5:],
    "two rows change places": lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]],
    "a row is repeated": lambda lines: [*lines[:5], lines[4], *lines[5:]],
    "the first row is gone": lambda lines: lines[1:],
    "the end is cut off": lambda lines: lines[:-3],
    "the last row is half there": lambda lines: [*lines[:-1], lines[-1][:-10]],
}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.usefixtures("evidence")
def test_a_damaged_log_is_found_and_the_row_named(bare: Installation, copy: Path, damage: Damage) -> None:
    log = copy / "audit.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    damaged = damage(list(lines))
    assert damaged != lines
    log.write_bytes(b"".join(damaged))
    differing = (at for at, (was, now) in enumerate(zip(lines, damaged, strict=False)) if was != now)
    expected = next(differing, len(damaged)) + 1
    assert f"the chain is broken at row {expected} (line {expected})" in verify(bare, copy, expect=1)


@pytest.mark.bubblewrap
def test_any_flipped_bit_is_found_and_its_row_named(
    evidence: Evidence, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample of bits over all rows, through the command's own code but without a process for each."""
    from reconciler import cli  # noqa: PLC0415 - only this test needs it

    log = copy / "audit.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    bits = random.Random(20261129)
    monkeypatch.setattr("sys.argv", ["ringfence", "audit", "verify", "--log", str(copy)])
    for number in range(FLIPS):
        row = number % len(lines)
        log.write_bytes(b"".join(flip(lines, row, bits)))
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr().err
        assert left.value.code == 1
        assert f"the chain is broken at row {evidence.rows[row]['seq']} (line {row + 1})" in said
    log.write_bytes(b"".join(lines))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0


@pytest.mark.bubblewrap
def test_a_log_that_was_rewritten_as_a_whole_does_not_fit_a_head_kept_elsewhere(
    bare: Installation, evidence: Evidence, copy: Path
) -> None:
    (copy / "head.json").unlink()
    log = copy / "audit.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    verify(bare, copy, expect=0)
    last = evidence.rows[-1]
    assert "cut off" in verify(bare, copy, "--head", f"{last['seq']}:{last['hash']}", expect=1)
    assert "rewritten" in verify(bare, copy, "--head", f"{evidence.rows[2]['seq']}:{'0' * 64}", expect=1)
