"""Every command's exit status is part of its contract, and what it says of an error says what to do."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pytest

from reconciler import cli
from tests.e2e import documents
from tests.e2e.installation import BIN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

KEY = "keys/alice"


@dataclass(frozen=True, slots=True)
class Done:
    """How one command ended, and what it said."""

    status: int
    out: str
    err: str


Call: TypeAlias = "Callable[[Installation, str], Done]"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command line of `ringfence`, through its own code but without a process for each.

    Only for commands that open no socket and build no fence. `HOST` stands for the installation's host.yaml; relative
    paths are below the installation's directory.
    """

    def run(host: Installation, line: str) -> Done:
        monkeypatch.chdir(host.root)
        monkeypatch.setattr("sys.argv", ["ringfence", *split(host, line)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return Done(left.value.code, said.out, said.err)

    return run


def spawn(host: Installation, line: str, *, program: str = "ringfence") -> Done:
    """Run a program of ours as a process, in the host's network namespace."""
    argv = [*host.rig.enter, str(BIN / program), *split(host, line)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=60, cwd=host.root, stdin=subprocess.DEVNULL
    )
    return Done(done.returncode, done.stdout, done.stderr)


def split(host: Installation, line: str) -> list[str]:
    """Split a command line at blanks."""
    return [str(host.host_config) if word == "HOST" else word for word in line.split()]


# --- called wrongly: 64, whatever the command -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("", "Usage: ringfence", id="no command"),
        pytest.param("nonsense", "No such command 'nonsense'", id="an unknown command"),
        pytest.param("reason", "Usage: ringfence reason", id="a group without its command"),
        pytest.param("reason nonsense", "No such command 'nonsense'", id="an unknown command of a group"),
        pytest.param("audit", "Usage: ringfence audit", id="audit without its command"),
        pytest.param("check", "Missing argument 'DIR'", id="check without a directory"),
        pytest.param("check a b", "unexpected extra argument", id="check with two directories"),
        pytest.param("plan --nonsense", "No such option: --nonsense", id="plan with an unknown option"),
        pytest.param("plan --emit-reason", "--emit-reason", id="an option without its value"),
        pytest.param("effective", "Missing argument 'agent'", id="effective without an agent"),
        pytest.param("reason sign x.yaml", "Missing option '--key'", id="reason sign without a key"),
        pytest.param(
            "reason sign x.yaml --key k --signer a/b", "--signer", id="reason sign with a signer that is no name"
        ),
        pytest.param("reason new", "Missing argument", id="reason new without a file"),
        pytest.param("submit", "Missing argument 'JOB.yaml'", id="submit without a job"),
        pytest.param("run", "Missing argument 'agent'", id="run without an agent"),
        pytest.param("run helper", "Missing argument '-- COMMAND...'", id="run without a command"),
        pytest.param("run --host-config HOST --env X helper -- true", "NAME=VALUE", id="run with a broken --env"),
        pytest.param("run --host-config HOST --input no helper -- true", "--input", id="run with no such input file"),
        pytest.param("status --verbose", "No such option: --verbose", id="status with an unknown option"),
        pytest.param("probe everything", "unexpected extra argument", id="probe with an argument"),
        pytest.param("reap now", "unexpected extra argument", id="reap with an argument"),
        pytest.param("audit tail --log . -n 0", "'-n' / '--rows'", id="audit tail with no rows"),
        pytest.param("audit tail --log . -n many", "'-n' / '--rows'", id="audit tail with rows that are no number"),
        pytest.param(
            "audit verify --log state/audit --head 7", "a head is SEQ:HASH", id="audit verify with half a head"
        ),
    ],
)
def test_a_usage_error_exits_64_and_says_what_is_wrong(call: Call, bare: Installation, line: str, said: str) -> None:
    (bare.state / "audit").mkdir(parents=True, exist_ok=True)
    (bare.state / "audit" / "audit.jsonl").touch()
    done = call(bare, line)
    assert (done.status, done.out) == (64, "")
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("program", "line"),
    [("ringfenced", "--nonsense"), ("ringfenced", "extra"), ("ringfence-proxy", ""), ("ringfence-proxy", "--listen x")],
)
def test_the_other_programs_exit_64_too(bare: Installation, program: str, line: str) -> None:
    done = spawn(bare, line, program=program)
    assert (done.status, done.out) == (64, "")
    assert f"usage: {program}" in done.err


@pytest.mark.parametrize("line", ["--help", "run --help", "reason sign --help", "plan --help"])
def test_help_exits_0(call: Call, bare: Installation, line: str) -> None:
    done = call(bare, line)
    assert (done.status, done.err) == (0, "")
    assert "Usage: ringfence" in done.out


# --- host settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "effective helper", "probe", "reap", "status", "submit x.yaml"])
def test_every_command_says_what_is_wrong_with_the_hosts_settings(call: Call, bare: Installation, command: str) -> None:
    (bare.root / "bad.yaml").write_text("version: 1\nkind: host\nname: x\nrezolvers: []\n", "utf-8")
    done = call(bare, f"{command} --host-config bad.yaml")
    assert (done.status, done.out) == (1, "")
    assert "bad.yaml:4:1: /rezolvers:" in done.err
    missing = call(bare, f"{command} --host-config missing.yaml")
    assert missing.status == 1
    assert "missing.yaml" in missing.err
    assert "--host-config" in missing.err


def test_ringfenced_check_says_what_the_host_does_not_bear_out(bare: Installation) -> None:
    fine = spawn(bare, "--host-config HOST --check", program="ringfenced")
    assert (fine.status, fine.out) == (0, f"{bare.host_config}: fine\n")
    settings = json.loads(bare.host_config.read_text("utf-8"))
    (bare.root / "odd.yaml").write_text(
        json.dumps({**settings, "proxy_user": "root", "policy_owner": "no-such-user", "trust": str(bare.root / "no")})
    )
    done = spawn(bare, "--host-config odd.yaml --check", program="ringfenced")
    assert done.status == 1
    assert "proxy_user: is root" in done.err
    assert "policy_owner: there is no user no-such-user" in done.err
    assert f"{bare.root}/no does not exist" in done.err


# --- the policy side --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(bare: Installation) -> Installation:
    """A policy that nobody signed, and no daemon; beside it one with two problems."""
    bare.write("platform", documents.platform())
    bare.write("agents/helper", documents.agent(allow=["example.com"]))
    bad = bare.root / "bad" / "agents"
    bad.mkdir(parents=True)
    (bad / "helper.yaml").write_text(
        'version: 1\nkind: agent\nname: helper\nimage: host\nallow: ["*"]\nuser: 0\n', "utf-8"
    )
    (bad / "other.yaml").write_text("version: 1\nkind: agent\nname: helper\nimage: host\n", "utf-8")
    (bare.root / "empty").mkdir()
    return bare


def test_check(call: Call, policy: Installation) -> None:
    done = call(policy, "check policy")
    assert (done.status, done.out, done.err) == (0, "2 documents, no problems\n", "")

    bad = call(policy, "check bad")
    assert (bad.status, bad.out) == (1, "")
    problems = bad.err.splitlines()
    assert problems == sorted(problems)
    for place in (
        "agents/helper.yaml:5:9: /allow/0:",
        "agents/helper.yaml:6:7: /user:",
        "agents/other.yaml:3:7: /name:",
    ):
        assert [line for line in problems if line.startswith(place)], problems

    found = json.loads(call(policy, "check bad --json").out)["problems"]
    assert len(found) == len(problems)
    assert set(found[0]) == {"file", "line", "column", "where", "message"}


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        pytest.param("nowhere", "nowhere", id="a directory that is not there"),
        pytest.param("empty", "platform.yaml", id="an empty directory"),
        pytest.param("host.yaml", "host.yaml", id="a file"),
    ],
)
def test_check_of_what_is_no_policy_exits_1(call: Call, policy: Installation, directory: str, said: str) -> None:
    done = call(policy, f"check {directory}")
    assert (done.status, done.out) == (1, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_plan_against_a_fresh_host(call: Call, policy: Installation) -> None:
    done = call(policy, "plan --host-config HOST")
    assert done.status == 3
    assert "the statement to sign" in done.out
    assert call(policy, "plan bad --host-config HOST").status == 1
    assert call(policy, "plan --against policy --host-config HOST").status in {0, 3}
    assert call(policy, "plan --against nowhere --host-config HOST").status == 1


def test_effective_without_a_policy_in_force_exits_1(call: Call, policy: Installation) -> None:
    done = call(policy, "effective helper --host-config HOST")
    assert (done.status, done.out) == (1, "")
    assert "no policy was ever accepted" in done.err


def test_reason_new_sign_and_verify(call: Call, policy: Installation) -> None:
    made = call(policy, "reason new made.yaml --ticket CHG-7")
    assert made.status == 0
    assert "reason sign made.yaml" in made.out
    again = call(policy, "reason new made.yaml")
    assert (again.status, "is there already" in again.err) == (1, True)
    unfilled = call(policy, f"reason sign made.yaml --key {KEY} --signer alice")
    assert unfilled.status == 1
    assert "made.yaml:" in unfilled.err
    assert not (policy.root / "made.alice.sig").exists()

    grant = {"document": "agents/helper", "field": "/allow", "add": "example.com"}
    (policy.root / "CHG-7.yaml").write_text(documents.statement("CHG-7", grant), "utf-8")
    unsigned = call(policy, "reason verify CHG-7.yaml --host-config HOST")
    assert unsigned.status == 1
    assert "no_signature" in unsigned.err
    signed = call(policy, f"reason sign CHG-7.yaml --key {KEY} --signer alice")
    assert signed.status == 0
    assert "agents/helper /allow add: example.com" in signed.out
    verified = call(policy, "reason verify CHG-7.yaml --host-config HOST")
    assert (verified.status, verified.err) == (0, "")
    assert "signed by alice with SHA256:" in verified.out


@pytest.mark.parametrize(
    "line", [f"reason sign nowhere.yaml --key {KEY}", "reason verify nowhere.yaml --host-config HOST"]
)
def test_a_statement_that_is_not_there_exits_1(call: Call, policy: Installation, line: str) -> None:
    done = call(policy, line)
    assert done.status == 1
    assert "nowhere.yaml:1:1: " in done.err


def test_signing_with_a_key_that_is_not_there_exits_1(call: Call, policy: Installation) -> None:
    (policy.root / "CHG-8.yaml").write_text(
        documents.statement("CHG-8", {"document": "platform", "field": "/enabled", "value": True}), "utf-8"
    )
    done = call(policy, "reason sign CHG-8.yaml --key keys/nobody --signer alice")
    assert done.status == 1
    assert "CHG-8.yaml" in done.err
    assert not (policy.root / "CHG-8.alice.sig").exists()


# --- the job side, without a daemon and with one ----------------------------------------------------------------------


def write_job(host: Installation, name: str, text: str) -> None:
    """Write a job file."""
    (host.root / name).write_text(text, "utf-8")


def test_without_a_daemon_commands_say_so(call: Call, policy: Installation) -> None:
    for line, status in (("status", 1), ("run helper -- true", 125)):
        command, _, rest = line.partition(" ")
        done = call(policy, f"{command} --host-config HOST {rest}")
        assert (done.status, done.out) == (status, "")
        assert "ringfenced" in done.err
    write_job(policy, "job.yaml", "version: 1\nkind: job\nagent: helper\ncommand: [/usr/bin/true]\n")
    done = call(policy, "submit job.yaml --host-config HOST")
    assert done.status == 1
    assert "ringfenced makes it" in done.err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        pytest.param("nowhere.yaml", None, "cannot be read", id="no such file"),
        pytest.param("twice.yaml", "version: 1\nversion: 1\n", "twice.yaml:2:1:", id="a duplicate key"),
        pytest.param("half.yaml", "version: 1\nkind: job\nagent: helper\n", "/command", id="without a command"),
        pytest.param(
            "extra.yaml",
            "version: 1\nkind: job\nagent: helper\ncommand: [x]\nprivileged: true\n",
            "extra.yaml:5:1: /privileged:",
            id="an unknown field",
        ),
        pytest.param(
            "Name.yaml", "version: 1\nkind: job\nagent: helper\ncommand: [x]\n", "[a-z0-9]", id="a name with capitals"
        ),
    ],
)
def test_submit_checks_before_it_delivers(
    call: Call, policy: Installation, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        write_job(policy, name, text)
    done = call(policy, f"submit {name} --host-config HOST")
    assert (done.status, done.out) == (1, "")
    assert said in done.err


def test_probe_says_what_the_host_really_has(policy: Installation) -> None:
    done = spawn(policy, "probe --host-config HOST")
    assert (done.status, done.err) == (0, "")
    for text in ("bubblewrap", "available", "namespace", "k8s", "missing", "evidence for bubblewrap", "gate passed"):
        assert text in done.out
    assert policy.traces() == []


@pytest.fixture(scope="module")
def running(policy: Installation) -> Installation:
    """The same host, signed and with its daemon."""
    policy.adopt({})
    return policy


def test_with_a_daemon_they_do_their_work(call: Call, running: Installation) -> None:
    status = call(running, "status --host-config HOST")
    assert (status.status, status.err) == (0, "")
    assert "sandboxes are on; agents: helper" in status.out
    assert json.loads(call(running, "status --host-config HOST --json").out)["running"] is True
    assert call(running, "plan --host-config HOST").status == 0
    effective = call(running, "effective helper --host-config HOST")
    assert effective.status == 0
    assert "allow example.com" in effective.out
    write_job(running, "good.yaml", "version: 1\nkind: job\nagent: helper\ncommand: [/usr/bin/true]\n")
    submitted = call(running, "submit good.yaml --host-config HOST")
    assert (submitted.status, submitted.err) == (0, "")
    assert running.result("good")["code"] == "exited"
    tail = call(running, "audit tail --host-config HOST -n 2")
    assert (tail.status, len(tail.out.splitlines())) == (0, 2)
    rows = call(running, "audit tail --host-config HOST --event launch --json").out.splitlines()
    assert {json.loads(row)["event"] for row in rows} == {"agent_sandbox.launch"}
    assert call(running, "audit verify --host-config HOST").status == 0


def test_a_change_that_only_tightens_makes_plan_exit_2(call: Call, running: Installation) -> None:
    directory = running.root / "tighter"
    (directory / "agents").mkdir(parents=True)
    (directory / "platform.yaml").write_text(documents.platform(), "utf-8")
    (directory / "agents" / "helper.yaml").write_text(documents.agent(allow=[]), "utf-8")
    copy_reasons(running, directory)
    done = call(running, "plan tighter --host-config HOST")
    assert done.status == 2
    assert "agents/helper /allow: -example.com" in done.out


def copy_reasons(host: Installation, directory: Path) -> None:
    """Take the signed reasons along into another policy directory."""
    (directory / "reasons").mkdir()
    for path in (host.policy / "reasons").iterdir():
        (directory / "reasons" / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(
            "effective nobody --host-config HOST", "agents in force: helper", id="effective of an unknown agent"
        ),
        pytest.param("reap --host-config HOST", "one daemon for one spool", id="reap while the daemon runs"),
    ],
)
def test_what_cannot_be_done_now_exits_1(call: Call, running: Installation, line: str, said: str) -> None:
    done = call(running, line)
    assert (done.status, done.out) == (1, "")
    assert said in done.err


def test_a_second_daemon_on_the_same_spool_exits_1(running: Installation) -> None:
    done = spawn(running, "--host-config HOST", program="ringfenced")
    assert done.status == 1
    assert "one daemon for one spool" in done.err
    assert running.alive()


def test_a_stopped_daemon_is_said_to_be_stopped_and_reap_then_works(call: Call, running: Installation) -> None:
    running.stop()
    try:
        status = call(running, "status --host-config HOST")
        assert status.status == 1
        assert "not running" in status.out
        reaped = spawn(running, "reap --host-config HOST")
        assert (reaped.status, reaped.out) == (0, "nothing of an earlier daemon is left\n")
    finally:
        running.start()


@pytest.mark.parametrize(
    ("start", "line", "said"),
    [
        pytest.param("from reconciler.daemon import main", "", "must run as root", id="ringfenced"),
        pytest.param(
            "from reconciler.cli import main, application; application()", "probe", "run it as root", id="probe"
        ),
        pytest.param(
            "from reconciler.cli import main, application; application()", "reap", "run it as root", id="reap"
        ),
    ],
)
def test_who_is_not_root_is_told(policy: Installation, start: str, line: str, said: str) -> None:
    """Rights are given up once all is imported, for the interpreter's files may be closed to other users."""
    script = f"{start}; import os, zoneinfo; os.setgid(65534); os.setuid(65534); main()"
    argv = [str(BIN / "python"), "-c", script, *line.split(), "--host-config", str(policy.host_config)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert said in done.stderr
