"""The commands of the policy side on a real host: plan in every form, effective, explain, status, init."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import pytest

from proxy.record import Record, Verdict
from reconciler.cli import UsageError, application
from reconciler.core.load import Document, load
from reconciler.core.reference import PAGE, weakenings
from reconciler.core.schema import DIRECTORY
from tests.estate import PLATFORM, Estate, agent
from tests.signing import make_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ringfence = Callable[..., tuple[int, str, str]]
    Publish = Callable[..., None]

ENABLE = {"document": "platform", "field": "/enabled", "value": True}
GRANTS = (
    ENABLE,
    {"document": "platform", "field": "/backend", "value": "bubblewrap"},
    {"document": "agents/helper", "field": "/minimum_isolation", "value": "namespace"},
    {"document": "agents/helper", "field": "/allow", "add": "*.vendor.com"},
)
ORG = "version: 1\nkind: egress\nname: org\nagents: ['*']\ndefault: allow\ndeny:\n  - files.vendor.com\n"


@pytest.fixture
def ringfence(capsys: pytest.CaptureFixture[str], estate: Estate, monkeypatch: pytest.MonkeyPatch) -> Ringfence:
    """Run the command in this process, on the estate's host."""
    config = estate.root / "host.yaml"
    host = f"version: 1\nkind: host\nname: prod-1\npolicy: {estate.root}/policy\ntrust: {estate.root}/trust\n"
    places = "".join(f"{name}: {estate.root}/{name}\n" for name in ("state", "spool", "runtime"))
    config.write_text(host + places)
    monkeypatch.setenv("RINGFENCE_HOST_CONFIG", str(config))
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = application()(list(arguments), standalone_mode=False)
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return run


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    made = Estate(tmp_path)
    (tmp_path / "policy" / "egress").mkdir()
    (tmp_path / "policy" / "egress" / "org.yaml").write_text(ORG)
    made.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com"]))
    made.reason(1, *GRANTS, {"document": "egress/org", "field": "/default", "value": "allow"}, expires="never")
    made.run()
    return made


def test_a_plan_of_what_is_in_force_has_nothing_to_do(ringfence: Ringfence) -> None:
    code, out, _ = ringfence("plan")
    assert code == 0
    assert out.startswith("revision sha256:")


def test_a_plan_shows_what_is_held_and_writes_the_statement(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "*.pypi.org"], limits="{memory: 1GiB}"))
    statement = estate.root / "CHG-2.yaml"
    code, out, _ = ringfence("plan", "--emit-reason", str(statement), "--reason", "helper installs from pypi")
    assert code == 3
    assert "now reachable: x.pypi.org:443" in out
    assert "512MiB -> 1GiB" in out
    assert '{document: agents/helper, field: /limits/memory, value: "1GiB"}' in statement.read_text()
    key = estate.keys["bob"].private
    shutil.copy(statement, estate.root / "policy" / "reasons" / "CHG-2.yaml")
    code, out, _ = ringfence(
        "reason", "sign", str(estate.root / "policy/reasons/CHG-2.yaml"), "--key", str(key), "--signer", "bob"
    )
    assert code == 0
    assert "agents/helper /limits/memory value: 1GiB" in out
    code, out, _ = ringfence("plan")
    assert code == 2
    assert "licensed by CHG-2.1 (bob)" in out


def test_a_plan_for_ci_needs_no_host(ringfence: Ringfence, estate: Estate, tmp_path: Path) -> None:
    os.environ["RINGFENCE_HOST_CONFIG"] = str(tmp_path / "no-such-file")
    signers = str(estate.root / "trust" / "allowed_signers")
    arguments = ("plan", str(estate.root / "policy"), "--trust", signers, "--as-host", "prod-7", "--json")
    code, out, _ = ringfence(*arguments)
    assert code == 2
    assert {one["document"] for one in json.loads(out)["changes"]} == {"platform", "agents/helper", "egress/org"}
    code, out, _ = ringfence(*(word.replace("prod-7", "test-7") for word in arguments))
    assert code == 3, "a host that the audience does not name gets nothing of it"
    estate.trust("alice", revoked="id CHG-1.1\n")
    code, _, _ = ringfence(*arguments)
    assert code == 3, "the file beside the signers revokes here too"


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgSign=false")
    subprocess.run(
        ["/usr/bin/git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, timeout=20
    )


def test_a_plan_against_a_git_revision_runs_nothing_of_the_repository(ringfence: Ringfence, estate: Estate) -> None:
    work, ran = estate.root, estate.root / "ran"
    git(work, "init", "-q", "-b", "main")
    git(work, "add", "policy")
    git(work, "commit", "-q", "-m", "one")
    estate.write(helper=agent(allow=[]))
    git(work, "commit", "-q", "-a", "-m", "two")
    script = work / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {ran}\n")
    script.chmod(0o755)
    for setting in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "diff.external",
        "filter.x.smudge",
        "uploadpack",
    ):
        git(work, "config", setting if "." in setting else f"remote.origin.{setting}", str(script))
    (work / ".git" / "info" / "attributes").write_text("* filter=x diff=x\n")
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        shutil.copy(script, work / ".git" / "hooks" / hook)
    policy = str(estate.root / "policy")
    for revision in ("HEAD~1", "main^"):
        code, out, _ = ringfence("plan", policy, "--against", revision, "--json")
        assert code == 2
        (change,) = json.loads(out)["changes"]
        assert (change["field"], change["before"], change["after"]) == ("/allow", ["api.vendor.com"], [])
    assert ringfence("plan", policy, "--against", "HEAD")[0] == 0
    assert not ran.exists()
    git(work, "pack-refs", "--all")
    git(work, "gc", "-q")
    ran.unlink(missing_ok=True)
    assert ringfence("plan", policy, "--against", "main~1")[0] == 2
    assert not ran.exists()
    code, _, err = ringfence("plan", policy, "--against", "--upload-pack=x")
    assert code == 1
    assert "no revision" in err


def test_a_checkout_that_its_group_can_write_to_is_planned_and_checked(ringfence: Ringfence, estate: Estate) -> None:
    checkout = estate.root / "checkout"
    shutil.copytree(estate.root / "policy", checkout)
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)
    assert ringfence("check", str(checkout))[0] == 0
    assert ringfence("plan", str(checkout))[0] == 0
    (estate.root / "policy").chmod(0o775)
    code, _, err = ringfence("plan")
    assert code == 1, "what a host goes by is another matter"
    assert "chmod go-w" in err


def test_a_plan_without_a_signer_shows_what_lapses(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "a.pypi.org"]))
    estate.reason(2, {"document": "agents/helper", "field": "/allow", "add": "a.pypi.org"}, by=["bob"], expires="never")
    estate.run()
    code, out, _ = ringfence("plan", "--without-signer", "bob", "--json")
    assert code == 3
    (change,) = json.loads(out)["changes"]
    assert (change["before"], change["after"]) == (["api.vendor.com", "a.pypi.org"], ["api.vendor.com"])
    assert ringfence("plan")[0] == 0, "nothing was revoked"


def test_a_plan_replays_what_past_runs_asked_for(ringfence: Ringfence, estate: Estate) -> None:
    done = estate.root / "spool" / "done" / "root" / "job"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps({"agent": "helper"}))

    def record(seq: int, host: str, verdict: Verdict, code: str, count: int = 1) -> bytes:
        return Record(
            seq=seq,
            time=1.0,
            run="r",
            generation=1,
            verdict=verdict,
            code=code,
            layer=None if verdict is Verdict.ALLOW else "agent",
            method="CONNECT",
            host=host,
            port=443,
            address=None,
            message="",
            count=count,
        ).to_line()

    lines = (
        record(1, "api.vendor.com", Verdict.ALLOW, "allowed", 14),
        record(2, "new.vendor.com", Verdict.DENY, "not_listed", 3),
        record(3, "api.vendor.com", Verdict.DENY, "address_private"),
        b"{}\nnot json\n",
    )
    (done / "decisions.jsonl").write_bytes(b"".join(lines))
    assert "replayed" not in ringfence("plan")[1]
    estate.write(helper=agent(allow=["new.vendor.com"]))
    code, out, _ = ringfence("plan")
    assert code == 2
    assert "replayed would have denied 14 connections of helper to api.vendor.com:443 (agent)" in out
    assert "replayed newly allows 3 connections of helper to new.vendor.com:443 that were denied (agent)" in out


def test_effective_says_where_each_entry_comes_from(ringfence: Ringfence, estate: Estate) -> None:
    code, out, _ = ringfence("effective", "helper", "--origin", "--json")
    assert code == 0
    told = {(one["document"], one["field"], one["entry"]): one for one in json.loads(out)["origins"]}
    allow = told["agents/helper", "allow", "api.vendor.com"]
    assert (allow["where"], allow["reasons"]) == ("agents/helper.yaml:6", ["CHG-1.1"])
    assert told["egress/org", "deny", "files.vendor.com"]["where"] == "egress/org.yaml:7"
    (estate.root / "policy" / "egress" / "org.yaml").write_text(ORG.partition("deny:")[0])
    estate.run()
    out = ringfence("effective", "helper", "--origin")[1]
    assert "egress/org /deny files.vendor.com: kept from an earlier revision" in out


def test_a_layer_that_a_document_stopped_to_be_is_told_with_the_grant_that_lifts_it(
    ringfence: Ringfence, estate: Estate
) -> None:
    org = estate.root / "policy" / "egress" / "org.yaml"
    out = ringfence("effective", "*")[1]
    assert "1 egress documents limit whoever joins" in out
    assert "and egress/org:" in out
    assert "kept" not in out
    told = json.loads(ringfence("effective", "helper", "--origin", "--json")[1])
    scopes = [one["where"] for one in told["origins"] if one["field"] == "agents"]
    assert (scopes, told["kept"]) == (["egress/org.yaml:4"], [])
    org.write_text(ORG.replace("['*']", "[other]"))
    code, out, _ = ringfence("plan")
    assert code == 3
    assert "held     egress/org /agents (for helper and those to come): -* -helper" in out
    assert '- {document: egress/org, field: /agents, remove: "*"}' in out
    estate.run()
    out = ringfence("effective", "*")[1]
    assert "egress/org does not select every agent any more and is kept: a signed reason that grants {document" in out
    assert json.loads(ringfence("effective", "*", "--json")[1])["kept"] == ["org"]
    out = ringfence("effective", "helper", "--origin")[1]
    assert "egress/org does not select helper any more and is kept" in out
    assert "egress/org /agents helper: kept from an earlier revision" in out
    assert "egress/org /deny files.vendor.com: kept from an earlier revision" in out, "its line is another agent's now"
    estate.write(helper=agent(allow=["api.vendor.com", "files.vendor.com"]))
    estate.run()
    code, out, _ = ringfence("explain", "helper", "files.vendor.com")
    assert code == 1
    assert 'remove: "helper"} lifts it' in out


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("api.vendor.com", 0, "passes"),
        ("API.vendor.com.:443", 0, "passes"),
        ("api.vendor.com:22", 1, "[port] by agent"),
        ("other.example.com", 1, "[not_listed] by agent"),
        ("files.vendor.com", 1, "[org_denied] by egress/org"),
    ],
)
def test_explain_says_which_list_says_no(
    target: str, code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "files.vendor.com"]))
    estate.run()
    found, out, _ = ringfence("explain", "helper", target)
    assert (found, says in out) == (code, True), out


REVISION = f"sha256:{'a' * 64}"


@pytest.fixture
def publish(estate: Estate) -> Publish:
    """Write the status of a daemon: this process, with one run whose proxy acknowledged `generation` of 2."""
    runtime = estate.root / "runtime"
    runtime.mkdir()

    def write(revision: str, generation: int = 2, unknown: tuple[str, ...] = (), **found: list[str]) -> None:
        policy = {"revision": revision, "generation": 2, "enabled": True, "agents": []}
        lists: dict[str, list[str]] = {name: [] for name in ("problems", "bad", "held", "refused", "ignored", "unused")}
        run = {"run": "r", "agent": "a", "submitter": "s", "state": "started", "since": "now", "generation": generation}
        status = {
            "host": "prod-1",
            "pid": os.getpid(),
            "updated": "now",
            "state": "running",
            "policy": {**policy, **lists, **found},
            "backends": [],
            "runs": [run],
            "spool": {"waiting": 0, "claiming": True, "message": "", "unknown": list(unknown)},
            "audit": {"seq": 0, "hash": ""},
        }
        path = runtime / "new.json"
        path.write_text(json.dumps(status))
        path.rename(runtime / "status.json")

    return write


def test_status_waits_for_a_digest(ringfence: Ringfence, publish: Publish) -> None:
    publish("sha256:" + "b" * 64)
    assert ringfence("status", "--wait", REVISION, "--timeout", "0.2")[0] == 124
    publish(REVISION, 1)
    assert ringfence("status", "--wait", REVISION, "--timeout", "0.2")[0] == 124, "a live proxy has not taken it"

    def later() -> None:
        time.sleep(0.3)
        publish(REVISION)

    thread = threading.Thread(target=later)
    thread.start()
    assert ringfence("status", "--wait", "a" * 12, "--timeout", "20")[0] == 0
    thread.join()


BAD = {"problems": ["agents/helper.yaml:3:1: /allow: no"], "bad": ["agents/helper"]}
HELD = {"held": ['agents/a /allow: add "x.example.com"'] * 4}


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        pytest.param({}, 0, "in force of it: all", id="all of it is in force"),
        pytest.param(HELD, 3, "in force of it: all but 4 held", id="a weakening is held"),
        pytest.param(BAD, 1, "in force of it: all but 1 document with problems", id="a document has problems"),
        pytest.param(
            {**BAD, **HELD}, 1, "all but 1 document with problems and 4 held", id="problems count before what is held"
        ),
        pytest.param(
            {"problems": ["[unsafe_mode] x"]}, 1, "not all: see the problems", id="the directory has problems"
        ),
    ],
)
def test_waiting_for_a_revision_tells_how_much_of_it_is_in_force(
    found: dict[str, list[str]], code: int, says: str, ringfence: Ringfence, publish: Publish
) -> None:
    publish(REVISION, **found)
    exit_code, out, err = ringfence("status", "--wait", REVISION, "--timeout", "5")
    assert exit_code == code
    assert f"revision {REVISION} is settled; in force of it: " in err
    assert says == "in force of it: all" or says in err
    assert err.splitlines()[0].endswith(": all") == (not found)
    assert ("agents/helper: has problems, so the document of the revision before stays" in err) == ("bad" in found)
    for line in (*found.get("problems", ()), *found.get("held", ())):
        assert line in out


def test_status_tells_what_does_not_count_and_who_cannot_submit(ringfence: Ringfence, publish: Publish) -> None:
    publish(REVISION, unknown=("svc-helper",), refused=["reasons/CHG-2.yaml: [expired] has expired"])
    code, out, _ = ringfence("status")
    assert code == 0
    assert "refused: reasons/CHG-2.yaml: [expired] has expired\n" in out
    assert "0 jobs wait; claiming\nsubmitters that are no users of this host: svc-helper\n" in out


def test_the_page_of_weakenings_is_that_of_the_schemas(ringfence: Ringfence) -> None:
    assert ringfence("explain", "--weakenings")[1] == weakenings()
    assert (DIRECTORY.parent / PAGE).read_text("utf-8") == weakenings(), (
        f"write it again: ringfence explain --weakenings > {PAGE}"
    )


def test_a_host_begins_with_init_and_one_signature(
    ringfence: Ringfence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "fresh"
    root.mkdir()
    key = make_key(root, "alice")
    config = root / "host.yaml"
    lines = [f"{name}: {root}/{name}" for name in ("policy", "trust", "state", "spool", "runtime")]
    config.write_text("\n".join(["version: 1", "kind: host", "name: lab-1", *lines, ""]))
    monkeypatch.setenv("RINGFENCE_HOST_CONFIG", str(config))
    arguments = ("init", "--signer", "alice", "--key", f"{key.private}.pub")
    code, out, _ = ringfence(*arguments)
    assert code == 0
    statement = root / "policy" / "reasons" / "FIRST-1.yaml"
    assert ringfence("plan")[0] == 3
    assert ringfence("reason", "sign", str(statement), "--key", str(key.private), "--signer", "alice")[0] == 0
    assert ringfence("reason", "verify", str(statement))[0] == 0
    assert ringfence("plan")[0] == 2
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    code, out, _ = ringfence(*arguments)
    assert code == 0
    assert "wrote" not in out
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


WIDER = agent(allow=["api.vendor.com", "*.pypi.org"])


def _there_already(policy: Path) -> Path:
    return policy / "reasons" / "CHG-1.yaml"


def _nowhere(policy: Path) -> Path:
    return policy / "none" / "CHG-9.yaml"


def _a_file_as_directory(policy: Path) -> Path:
    return policy / "platform.yaml" / "CHG-9.yaml"


@pytest.mark.parametrize("command", ["plan", "reason new"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        pytest.param(_there_already, "is overwritten: name another file, such as", id="a statement that is live"),
        pytest.param(_nowhere, "there is no directory", id="a directory that is missing"),
        pytest.param(_a_file_as_directory, "Not a directory", id="a file where the directory should be"),
    ],
)
def test_a_statement_is_written_only_where_none_is(
    command: str, place: Callable[[Path], Path], says: str, ringfence: Ringfence, estate: Estate
) -> None:
    estate.write(helper=WIDER)
    live = _there_already(estate.root / "policy").read_bytes()
    path = str(place(estate.root / "policy"))
    code, _, err = ringfence(*(("plan", "--emit-reason", path) if command == "plan" else ("reason", "new", path)))
    assert (code, says in err) == (1, True), err
    assert _there_already(estate.root / "policy").read_bytes() == live


def test_a_statement_that_is_written_has_an_id_of_its_own(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=WIDER)
    policy = estate.root / "policy"
    err = ringfence("plan", "--emit-reason", str(policy / "reasons" / "CHG-1.yaml"))[2]
    assert f"such as {policy}/reasons/CHG-1-2.yaml" in err
    path = policy / "reasons" / "CHG-1-2.yaml"
    assert ringfence("plan", "--emit-reason", str(path), "--ticket", "CHG-1")[0] == 3
    assert "id: CHG-1.2\n" in path.read_text()


def test_a_policy_directory_without_reasons_gets_that_folder(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=WIDER)
    shutil.rmtree(estate.root / "policy" / "reasons")
    path = estate.root / "policy" / "reasons" / "CHG-9.yaml"
    assert ringfence("plan", "--emit-reason", str(path))[0] == 3
    assert path.is_file()


@pytest.mark.parametrize(
    ("helper", "code", "says"),
    [
        pytest.param("nonsense: 1\n", 1, "nothing written: mend the problems first", id="problems"),
        pytest.param(agent(allow=["api.vendor.com"]), 0, "nothing written: nothing waits", id="nothing to do"),
    ],
)
def test_no_statement_is_written_where_none_is_missing(
    helper: str, code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    estate.write(helper=helper)
    path = estate.root / "CHG-9.yaml"
    found, _, err = ringfence("plan", "--emit-reason", str(path))
    assert (found, says in err) == (code, True), err
    assert not path.exists()


@pytest.mark.parametrize("word", ["it's #1: a reason: with {signs}", "no", '"'])
def test_a_new_statement_says_what_it_was_given(word: str, ringfence: Ringfence, tmp_path: Path) -> None:
    path = tmp_path / "CHG-8.yaml"
    assert ringfence("reason", "new", str(path), "--reason", word, "--ticket", word)[0] == 0
    document = load(path.name, path.read_bytes().replace(b"grants:", b"grants: []"))
    assert isinstance(document, Document), document
    assert (document.value["reason"], document.value["ticket"]) == (word, word)


def test_init_names_the_line_of_a_signer_who_is_not_there_yet(
    ringfence: Ringfence, estate: Estate, tmp_path: Path
) -> None:
    key = make_key(tmp_path, "carol")
    before = (estate.root / "trust" / "allowed_signers").read_bytes()
    code, _, err = ringfence("init", "--signer", "carol", "--key", f"{key.private}.pub")
    assert code == 1
    assert "carol with that key is not in it: append this line:" in err
    assert (estate.root / "trust" / "allowed_signers").read_bytes() == before
    assert not (estate.root / "policy" / "reasons" / "FIRST-1.yaml").exists(), "nothing is written for who cannot sign"
    with (estate.root / "trust" / "allowed_signers").open("a") as file:
        file.write(err.splitlines()[-1] + "\n")
    assert ringfence("init", "--signer", "carol", "--key", f"{key.private}.pub")[0] == 0


STATEMENT = """\
version: 1
kind: signed-reason
id: CHG-2.1
audience: [prod-1]
expires: never
ticket: CHG-2
reason: helper installs from pypi
grants:
  - {document: agents/helper, field: /allow, add: "*.pypi.org"}
"""


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        pytest.param({}, 0, "3 documents, 1 statement, no problems", id="nothing is wrong"),
        pytest.param(
            {"egress/org.yaml": None, "agents/helper.yaml": None}, 0, "1 document, 1 statement", id="one each"
        ),
        pytest.param({"reasons/CHG-1.yaml": None}, 0, "3 documents, no problems", id="no statement"),
        pytest.param({"egress/b.yml": ORG}, 1, "egress/b.yml:1:1: /: is not read: rename it egress/b.yaml", id="yml"),
        pytest.param({"egress/org.YAML": ORG}, 1, "egress/org.yaml is; delete one of the two", id="two of one name"),
        pytest.param({"Platform.yml": ""}, 1, "platform.yaml is; delete one of the two", id="platform.yml"),
        pytest.param(
            {"org.yaml": ORG}, 1, "is not read: move it into agents/, egress/ or reasons/", id="in the wrong place"
        ),
        pytest.param({"reasons/CHG-2.yml": STATEMENT}, 1, "rename it reasons/CHG-2.yaml", id="a statement as yml"),
        pytest.param({"README.md": "", ".lint.yml": ""}, 0, "ignored: README.md is no document of ours", id="a README"),
        pytest.param({"reasons/CHG-2.yaml": STATEMENT}, 0, "3 documents, 2 statements, no problems", id="unsigned"),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.replace("never", '"2020-01-01T00:00:00Z"')},
            0,
            "expired: reasons/CHG-2.yaml grants nothing any more",
            id="a statement of the past",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.replace("/allow", "/alow")},
            1,
            "reasons/CHG-2.yaml:9:38: /grants/0/field: is no field of agent documents",
            id="a grant of no field",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.replace("CHG-2.1", "CHG-1.1")},
            1,
            "/id: is that of reasons/CHG-1.yaml: neither counts",
            id="an id twice",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.replace("helper installs from pypi", "FILL IN")},
            1,
            "/reason: is still FILL IN; say in at least ten characters why",
            id="a reason that is not filled in",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.replace("helper installs from pypi", "pypi")},
            1,
            "/reason: is too short; the least length is 10",
            id="a reason that is too short",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.partition("  - {")[0]},
            1,
            "/grants: is empty; list at least one grant",
            id="no grant",
        ),
        pytest.param(
            {"reasons/CHG-2.yaml": STATEMENT.partition("\n  - {")[0] + " []\n"},
            1,
            "/grants: is empty; list at least one grant",
            id="an empty list of grants",
        ),
    ],
)
def test_check_looks_at_every_file(
    files: dict[str, str | None], code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    policy = estate.root / "policy"
    for name, text in files.items():
        if text is None:
            (policy / name).unlink()
        else:
            (policy / name).write_text(text)
    found, out, err = ringfence("check", str(policy))
    assert (found, says in out + err) == (code, True), out + err
    told = json.loads(ringfence("check", str(policy), "--json")[1])
    assert bool(told["problems"]) == bool(code)


def test_check_tells_of_a_file_that_is_not_read(ringfence: Ringfence, estate: Estate) -> None:
    policy = estate.root / "policy"
    (policy / "agents" / "b.yaml").symlink_to(policy / "agents" / "helper.yaml")
    code, _, err = ringfence("check", str(policy))
    assert (code, "agents/b.yaml:1:1: /: [not_a_file] is a symbolic link" in err) == (1, True), err


@pytest.mark.parametrize(
    ("name", "code"), [pytest.param("egress/b.yml", 1, id="a document"), pytest.param("README.md", 0, id="a README")]
)
def test_a_plan_tells_of_names_that_are_not_ours(name: str, code: int, ringfence: Ringfence, estate: Estate) -> None:
    (estate.root / "policy" / name).write_text(ORG)
    found, out, _ = ringfence("plan")
    assert (found, f"ignored  {name}" in out) == (code, True), out
    assert json.loads(ringfence("plan", "--json")[1])["ignored"] == [name]
    assert not estate.run().problems, "a daemon reports such a name, and goes on"


@pytest.mark.parametrize(
    ("text", "says", "another"),
    [
        pytest.param(STATEMENT, "unsigned reasons/CHG-2.yaml: sign it: ringfence reason sign /", False, id="it covers"),
        pytest.param(STATEMENT.replace("*.pypi", "a.pypi"), "unsigned reasons/CHG-2.yaml: sign it", True, id="other"),
        pytest.param(STATEMENT.replace("/allow", "/alow"), "/grants/0/field: is no field", True, id="malformed"),
        pytest.param(
            STATEMENT.replace("never", '"2020-01-01T00:00:00Z"'),
            "unsigned reasons/CHG-2.yaml: has expired: set a later expires and a new id, then sign",
            True,
            id="expired",
        ),
        pytest.param(
            STATEMENT.replace("prod-1", "test-*"),
            "unsigned reasons/CHG-2.yaml: its audience test-* does not have this host, prod-1: add prod-1 and sign",
            True,
            id="for other hosts",
        ),
    ],
)
def test_a_plan_says_what_an_unsigned_statement_lacks(
    text: str, says: str, another: bool, ringfence: Ringfence, estate: Estate
) -> None:
    estate.write(helper=WIDER)
    (estate.root / "policy" / "reasons" / "CHG-2.yaml").write_text(text)
    code, out, _ = ringfence("plan")
    assert (code, says in out) == (3, True), out
    assert ("the statement to sign" in out) is another
    assert "no_signature" not in out


def test_a_plan_says_that_a_signed_statement_is_for_other_hosts(ringfence: Ringfence, estate: Estate) -> None:
    statement = estate.root / "policy" / "reasons" / "CHG-2.yaml"
    statement.write_text(STATEMENT.replace("prod-1", "test-*"))
    statement.with_suffix(".bob.sig").write_bytes(estate.keys["bob"].sign(statement.read_bytes()))
    says = "its audience test-* does not have this host, prod-1: add prod-1 and sign again"
    assert f"not here reasons/CHG-2.yaml: {says}" in ringfence("plan")[1]


def test_a_plan_replays_nothing_that_is_in_force_already(ringfence: Ringfence, estate: Estate) -> None:
    done = estate.root / "spool" / "done" / "root" / "job"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps({"agent": "helper"}))
    (done / "decisions.jsonl").write_bytes(denied("api.vendor.com"))
    assert "replayed" not in ringfence("plan")[1]
    (done / "decisions.jsonl").write_bytes(denied("new.vendor.com"))
    estate.write(helper=agent(allow=["new.vendor.com"]))
    assert "newly allows 1 connection of helper to new.vendor.com:443" in ringfence("plan")[1]
    assert "newly allows" in ringfence("plan", "--against", "floor")[1]


@pytest.mark.parametrize(
    ("signer", "key", "code", "says"),
    [
        pytest.param("alice", "alice", 0, "signed as alice in", id="her own key"),
        pytest.param("alice", "bob", 1, "is bob's; alice's is SHA256:", id="somebody else's key"),
        pytest.param("alice", "mallory", 1, "is no signer's; alice's is SHA256:", id="a key that is no signer's"),
        pytest.param(
            "carol", "alice", 1, "is alice's; carol has no line in allowed_signers", id="a name without a line"
        ),
        pytest.param("alice", "none", 1, "was not signed with", id="a key that is not there"),
    ],
)
def test_a_statement_is_signed_only_with_the_signers_own_key(
    *, signer: str, key: str, code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    make_key(estate.root, "mallory")
    statement = estate.root / "policy" / "reasons" / "CHG-2.yaml"
    statement.write_text(STATEMENT)
    found, out, err = ringfence("reason", "sign", str(statement), "--key", str(estate.root / key), "--signer", signer)
    assert (found, says in out + err) == (code, True), out + err
    assert statement.with_name(f"CHG-2.{signer}.sig").exists() == (code == 0)


def test_a_revoked_key_signs_nothing(ringfence: Ringfence, estate: Estate) -> None:
    estate.trust("alice", "bob", revoked=f"key {estate.keys['bob'].fingerprint}\n")
    statement = estate.root / "CHG-2.yaml"
    statement.write_text(STATEMENT)
    code, _, err = ringfence("reason", "sign", str(statement), "--key", str(estate.root / "bob"), "--signer", "bob")
    assert (code, "is signed with the revoked key" in err) == (1, True), err


def test_a_signature_is_replaced_only_when_that_is_asked_for(ringfence: Ringfence, estate: Estate) -> None:
    statement = estate.root / "policy" / "reasons" / "CHG-1.yaml"
    signature = statement.with_name("CHG-1.alice.sig")
    signature.write_text("old")
    arguments = ("reason", "sign", str(statement), "--key", str(estate.root / "alice"), "--signer", "alice")
    code, _, err = ringfence(*arguments)
    assert (code, "may be live: --force replaces it" in err, signature.read_text()) == (1, True, "old")
    wrong = (*arguments[:4], str(estate.root / "bob"), *arguments[5:], "--force")
    assert (ringfence(*wrong)[0], signature.read_text()) == (1, "old")
    assert ringfence(*arguments, "--force")[0] == 0
    assert ringfence("reason", "verify", str(statement))[0] == 0


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        pytest.param(
            STATEMENT.replace("never", '"2020-01-01T00:00:00Z"'),
            1,
            "has expired: set a later expires and a new id, then sign",
            id="expired",
        ),
        pytest.param(
            STATEMENT.replace("prod-1", "test-*"), 0, "it licenses nothing here: its audience", id="elsewhere"
        ),
        pytest.param(STATEMENT.partition("  - {")[0], 1, "/grants: is empty; list at least one grant", id="no grant"),
    ],
)
def test_signing_says_what_a_signature_would_not_mend(
    text: str, code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    statement = estate.root / "CHG-2.yaml"
    statement.write_text(text)
    arguments = ("reason", "sign", str(statement), "--key", str(estate.root / "bob"), "--signer", "bob")
    found, _, err = ringfence(*arguments)
    assert (found, says in err) == (code, True), err


def test_who_signs_elsewhere_needs_no_host(
    ringfence: Ringfence, estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = estate.root / "CHG-2.yaml"
    statement.write_text(STATEMENT)
    monkeypatch.setenv("RINGFENCE_HOST_CONFIG", str(estate.root / "none"))
    arguments = ("reason", "sign", str(statement), "--key", str(estate.root / "bob"), "--signer", "zoe")
    code, _, err = ringfence(*arguments)
    assert (code, "were not looked at" in err) == (0, True), err
    (estate.root / "sub").mkdir()
    statement.with_name(".CHG-2.zoe.sig.tmp").mkdir()
    code, _, err = ringfence(*arguments, "--force")
    assert (code, "cannot be written: Is a directory" in err) == (1, True), err


def _signed(estate: Estate, place: Path, *, by: str, text: str = STATEMENT) -> Path:
    place.write_text(text)
    if by:
        place.with_suffix(f".{by}.sig").write_bytes(estate.keys[by].sign(place.read_bytes()))
    return place


@pytest.mark.parametrize(
    ("place", "by", "text", "code", "says"),
    [
        pytest.param("policy/reasons", "bob", STATEMENT, 0, "CHG-2.1 (CHG-2) counts on prod-1", id="where it counts"),
        pytest.param(".", "bob", STATEMENT, 0, "would count on prod-1 once it is in ", id="not yet where it counts"),
        pytest.param(
            ".",
            "bob",
            STATEMENT.replace("prod-1", "test-*"),
            1,
            "its audience test-* does not have this host, prod-1: add prod-1 and sign again",
            id="for other hosts",
        ),
        pytest.param(
            ".",
            "bob",
            STATEMENT.replace("never", '"2020-01-01T00:00:00Z"'),
            1,
            "set a later expires and a new id, then sign",
            id="expired",
        ),
        pytest.param(".", "mallory", STATEMENT, 1, "no signer's: sign with a signer's key; only if", id="a stranger"),
        pytest.param(".", "", STATEMENT, 1, "[no_signature]", id="unsigned"),
        pytest.param(
            ".", "", STATEMENT.replace("helper installs from pypi", "FILL IN"), 1, "is still FILL IN", id="unfilled"
        ),
    ],
)
def test_verify_says_what_counts_and_what_mends_it(
    *, place: str, by: str, text: str, code: int, says: str, ringfence: Ringfence, estate: Estate
) -> None:
    estate.keys["mallory"] = make_key(estate.root, "mallory")
    statement = _signed(estate, estate.root / place / "CHG-2.yaml", by=by, text=text)
    found, out, err = ringfence("reason", "verify", str(statement))
    assert (found, says in out + err) == (code, True), out + err


def test_verify_exits_0_where_a_statement_counts_although_a_second_signature_is_bad(
    ringfence: Ringfence, estate: Estate
) -> None:
    statement = _signed(estate, estate.root / "CHG-2.yaml", by="bob")
    statement.with_suffix(".alice.sig").write_bytes(estate.keys["alice"].sign(b"other"))
    code, out, err = ringfence("reason", "verify", str(statement))
    assert (code, "would count on prod-1" in out, "[bad_signature]" in err) == (0, True, True)


def test_what_the_document_lists_and_is_held_is_told_so(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=WIDER)
    estate.run()
    held = "the document lists it; held: waits for a signed reason"
    code, out, _ = ringfence("explain", "helper", "a.pypi.org")
    assert (code, held in out) == (1, True), out
    assert "held" not in ringfence("explain", "helper", "other.example.com")[1]
    assert f"allow *.pypi.org: {held}" in ringfence("effective", "helper")[1]
    assert json.loads(ringfence("effective", "helper", "--json")[1])["held_allow"] == ["*.pypi.org"]


def test_what_an_egress_document_stopped_to_deny_and_is_held_is_told_so(ringfence: Ringfence, estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "files.vendor.com"]))
    estate.run()
    assert "held" not in ringfence("explain", "helper", "files.vendor.com")[1]
    (estate.root / "policy" / "egress" / "org.yaml").write_text(ORG.partition("deny:")[0])
    estate.run()
    code, out, _ = ringfence("explain", "helper", "files.vendor.com")
    assert (code, "the documents let it pass; held: waits for a signed reason" in out) == (1, True), out


def test_explain_says_where_no_egress_document_is_over_an_agent(ringfence: Ringfence, tmp_path: Path) -> None:
    bare = Estate(tmp_path / "bare")
    bare.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com"]))
    bare.reason(1, *GRANTS, expires="never")
    bare.run()
    config = tmp_path / "bare" / "host.yaml"
    config.write_text((tmp_path / "host.yaml").read_text().replace(f"{tmp_path}/", f"{tmp_path}/bare/"))
    out = ringfence("explain", "helper", "api.vendor.com", "--host-config", str(config))[1]
    assert "passes the agent's own lists; no egress document is over it; then" in out


def test_explain_takes_a_host_and_no_url(ringfence: Ringfence) -> None:
    with pytest.raises(UsageError, match="is a URL, not a host"):
        ringfence("explain", "helper", "https://api.vendor.com")


def test_switching_on_that_is_held_is_what_a_refused_job_is_told(estate: Estate) -> None:
    estate.unreason(1)
    estate.run()
    assert estate.config.in_force is not None
    assert estate.config.in_force.enabling_held
    estate.write(platform=PLATFORM.replace("true", "false"))
    estate.run()
    assert not estate.config.in_force.enabling_held


@pytest.mark.parametrize(
    ("uid", "state", "told"),
    [
        pytest.param(65534, True, True, id="a user who may not read it"),
        pytest.param(0, True, False, id="root"),
        pytest.param(0, False, False, id="nothing in force yet"),
    ],
)
def test_a_plan_says_when_it_is_not_compared_with_what_is_in_force(
    *, uid: int, state: bool, told: bool, ringfence: Ringfence, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as name:  # the test's own directory is below one that only root may pass
        place = pathlib.Path(name)
        place.chmod(0o755)
        estate = Estate(place)
        estate.write(platform=PLATFORM, helper=agent())
        if state:
            estate.run()
        config = place / "host.yaml"
        config.write_text((tmp_path / "host.yaml").read_text().replace(f"{tmp_path}/", f"{place}/"))
        os.seteuid(uid)
        try:
            out = ringfence("plan", "--host-config", str(config))[1]
        finally:
            os.seteuid(0)
    assert out.startswith("compared with the floor: what is in force can be read by root only\n") == told, out


def denied(host: str) -> bytes:
    """One record of a connection that no list had."""
    return Record(
        seq=1,
        time=1.0,
        run="r",
        generation=1,
        verdict=Verdict.DENY,
        code="not_listed",
        layer="agent",
        method="CONNECT",
        host=host,
        port=443,
        address=None,
        message="",
        count=1,
    ).to_line()


LONG = "x" * 300


@pytest.mark.parametrize("place", ["none/none", "host.yaml/none", LONG, "policy", "loop", "host.yaml"])
@pytest.mark.parametrize(
    "line",
    [
        "check PLACE",
        "plan PLACE",
        "plan --against PLACE",
        "plan ROOT/policy --as-host prod-1 --trust PLACE",
        "plan --emit-reason PLACE",
        "plan --host-config PLACE",
        "reason new PLACE",
        "reason sign PLACE --key ROOT/alice --signer alice",
        "reason sign ROOT/policy/reasons/CHG-1.yaml --key PLACE --signer alice --force",
        "reason sign ROOT/policy/reasons/CHG-1.yaml --key ROOT/alice --signer alice --force --host-config PLACE",
        "reason verify PLACE",
        "audit verify --log PLACE",
        "audit tail --log PLACE",
        "submit PLACE",
        "run helper --input PLACE -- true",
    ],
)
def test_no_path_that_a_user_names_makes_a_command_fail_otherwise_than_in_words(
    line: str, place: str, ringfence: Ringfence, estate: Estate
) -> None:
    (estate.root / "loop").symlink_to("loop")
    estate.write(helper=WIDER)
    words = [word.replace("ROOT", str(estate.root)) for word in line.split()]
    words = [word.replace("PLACE", str(estate.root / place)) for word in words]
    with contextlib.suppress(UsageError):
        code, out, err = ringfence(*words)
        assert code in {0, 1, 2, 3, 125}
        assert out + err
