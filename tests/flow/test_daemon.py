"""Both pipelines side by side in one daemon: real directories, real signatures, real signals, fake backend."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from jsonschema import Draft202012Validator

from reconciler.core.policy import BackendName
from reconciler.core.schema import load_schema
from reconciler.daemon import Daemon, check, open_parts
from reconciler.state import StateFile
from tests.estate import PLATFORM, Estate, agent
from tests.flow.fake_backend import FakeBackend
from tests.flow.house import SUBMITTER, job, own, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from reconciler.backends.base import Backend
    from reconciler.host import Host

GRANTS = (
    {"document": "platform", "field": "/enabled", "value": True},
    {"document": "platform", "field": "/backend", "value": "bubblewrap"},
    {"document": "agents/helper", "field": "/minimum_isolation", "value": "namespace"},
    {"document": "agents/helper", "field": "/allow", "add": "api.vendor.com"},
    {"document": "agents/helper", "field": "/submitters", "add": SUBMITTER},
)
SUBMITTERS = json.dumps([SUBMITTER])


def helper(*allow: str) -> str:
    """The agent's document."""
    return agent(allow=allow, submitters=SUBMITTERS)


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    """A host with a policy that is signed, and no daemon yet."""
    settings = f"spool: {tmp_path}/spool\nruntime: {tmp_path}/runtime\nresolvers: ['192.0.2.53:53']\nstop_timeout: 1s\n"
    made = Estate(tmp_path, settings=settings)
    made.journal.close()
    made.write(platform=PLATFORM, helper=helper("api.vendor.com"))
    made.reason(1, *GRANTS, expires="never")
    (tmp_path / "world").mkdir()
    return made


class Running:
    """A daemon that runs in this process."""

    def __init__(self, estate: Estate, backend: FakeBackend) -> None:
        self.estate, self.backend = estate, backend

    def status(self) -> dict[str, Any]:
        """What it published last."""
        value: dict[str, Any] = json.loads(self.estate.host.status.read_bytes())
        return value

    def submit(self, name: str, data: bytes) -> None:
        """Drop a job."""
        directory = self.estate.host.spool / "in" / SUBMITTER
        path = directory / "tmp" / name
        path.write_bytes(data)
        own(path, SUBMITTER)
        path.rename(directory / "new" / name)

    async def result(self, stem: str) -> dict[str, Any]:
        """Wait for a job's result."""
        path = self.estate.host.spool / "done" / SUBMITTER / stem / "result.json"
        await until(path.exists)
        value: dict[str, Any] = json.loads(path.read_bytes())
        return value


@asynccontextmanager
async def running(estate: Estate) -> AsyncIterator[Running]:
    """A daemon that serves while the context lasts, and stops at SIGTERM."""
    found: list[FakeBackend] = []

    def backends(host: Host, owner: str) -> Mapping[BackendName, Backend]:
        found.append(FakeBackend(host.runtime.parent / "world", owner))
        return {BackendName.BUBBLEWRAP: found[0]}

    parts = open_parts(estate.host, backends)
    assert not isinstance(parts, str), parts
    with parts.closing:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Daemon(parts).serve)
            daemon = Running(estate, found[0])
            await until(lambda: estate.host.status.exists() and daemon.status()["state"] == "running")
            yield daemon
            os.kill(os.getpid(), signal.SIGTERM)
    assert daemon.status()["state"] == "stopped"


def assert_valid(status: dict[str, Any]) -> None:
    """A status as its schema says."""
    Draft202012Validator(load_schema("status").root).validate(status)


def test_from_a_signed_policy_and_a_job_file_to_a_result(estate: Estate) -> None:
    async def main() -> None:
        async with running(estate) as daemon:
            assert_valid(daemon.status())
            daemon.submit("a.yaml", job("connect api.vendor.com:443", "sleep 0.5", "exit 7"))
            await until(lambda: bool(daemon.status()["runs"]))
            status = daemon.status()
            assert_valid(status)
            assert (status["runs"][0]["job"], status["runs"][0]["agent"]) == ("a", "helper")
            result = await daemon.result("a")
            assert (result["code"], result["status"]) == ("exited", 7)
            assert result["revision"] == status["policy"]["revision"] == status["policy"]["seen"]
            assert result["reasons"] == ["CHG-1.1"]

    anyio.run(main)
    names = [str(row["event"]).removeprefix("agent_sandbox.") for row in estate.rows()]
    assert names[0] == "daemon.start"
    assert names[-1] == "daemon.stop"
    assert names.index("config.update") < names.index("launch") < names.index("egress.allow") < names.index("teardown")


def test_without_a_policy_every_job_is_refused(estate: Estate) -> None:
    estate.write(platform=None, helper=None)
    estate.unreason(1)

    async def main() -> None:
        async with running(estate) as daemon:
            # Root may submit whatever policy says, so its directory is always there.
            (estate.host.spool / "in" / "root" / "new" / "a.yaml").write_bytes(job("exit 7"))
            path = estate.host.spool / "done" / "root" / "a" / "result.json"
            await until(path.exists)
            assert json.loads(path.read_bytes())["refusal"]["code"] == "no_policy"
            assert daemon.status()["policy"]["revision"] is None
            assert daemon.backend.launched == []

    anyio.run(main)


def test_a_host_that_is_added_is_held_until_signed_and_then_reaches_the_live_proxy(estate: Estate) -> None:
    async def main() -> None:
        async with running(estate) as daemon:
            daemon.submit("a.yaml", job("sleep 10"))
            await until(lambda: bool(daemon.backend.started))
            estate.write(helper=helper("api.vendor.com", "new.vendor.com"))
            await until(lambda: bool(daemon.status()["policy"]["held"]))
            assert daemon.status()["policy"]["held"] == ['agents/helper /allow: add "new.vendor.com"']
            assert daemon.backend.updates == []
            grant = {"document": "agents/helper", "field": "/allow", "add": "new.vendor.com"}
            estate.reason(2, grant, by=["bob"], expires="never")
            with anyio.fail_after(2):
                await until(lambda: bool(daemon.backend.updates))
            assert [str(entry) for entry in daemon.backend.updates[0].allow] == ["api.vendor.com", "new.vendor.com"]
            await until(lambda: daemon.status()["policy"]["held"] == [])
            # Taking it away needs nobody's word.
            estate.write(helper=helper("new.vendor.com"))
            with anyio.fail_after(2):
                await until(lambda: len(daemon.backend.updates) == 2)
            assert [str(entry) for entry in daemon.backend.updates[1].allow] == ["new.vendor.com"]
            estate.write(helper=None)
            assert (await daemon.result("a"))["code"] == "policy_removed"

    anyio.run(main)
    (update,) = [row for row in estate.rows("config.update") if row["actor"] == "bob"]
    assert update["weakening"] is True


def test_status_says_a_bounded_part_of_what_there_is_to_say(estate: Estate) -> None:
    """It is written many times a second; a document may have more to say than anybody reads."""
    estate.write(helper=helper("api.vendor.com", *(f"host{number}.example.com" for number in range(1500))))

    async def main() -> None:
        async with running(estate) as daemon:
            held = daemon.status()["policy"]["held"]
            assert len(held) == 1001
            assert "ringfence plan" in held[-1]
            assert_valid(daemon.status())

    anyio.run(main)


def test_a_signed_reason_that_expires_lapses_on_a_live_run(estate: Estate) -> None:
    async def main() -> None:
        async with running(estate) as daemon:
            daemon.submit("a.yaml", job("sleep 10"))
            await until(lambda: bool(daemon.backend.started))
            estate.unreason(1)
            result = await daemon.result("a")
            assert result["code"] == "policy_removed"
            await until(lambda: daemon.status()["policy"]["enabled"] is False)

    anyio.run(main)


def test_a_revocation_that_cannot_be_stored_ends_live_runs(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        async with running(estate) as daemon:
            daemon.submit("a.yaml", job("sleep 10"))
            await until(lambda: bool(daemon.backend.started))
            monkeypatch.setattr(StateFile, "save", full)
            estate.trust("alice", "bob", revoked="id CHG-1.1\n")
            result = await daemon.result("a")
            assert result["code"] == "audit_failed"

    anyio.run(main)


def test_a_restart_goes_on_from_what_was_in_force(estate: Estate) -> None:
    async def main() -> None:
        for name in ("a", "b"):
            async with running(estate) as daemon:
                daemon.submit(f"{name}.yaml", job("exit 7"))
                assert (await daemon.result(name))["status"] == 7

    anyio.run(main)
    assert [row["event"] for row in estate.rows("daemon")].count("agent_sandbox.daemon.start") == 2
    assert len(estate.rows("config.update")) == len({str(row["object"]) for row in estate.rows("config.update")})


def test_sighup_is_a_hint(estate: Estate) -> None:
    async def main() -> None:
        async with running(estate) as daemon:
            os.kill(os.getpid(), signal.SIGHUP)
            await anyio.sleep(0.3)
            assert daemon.status()["state"] == "running"

    anyio.run(main)


def test_one_daemon_for_one_host(estate: Estate) -> None:
    first = open_parts(estate.host)
    assert not isinstance(first, str)
    with first.closing:
        assert "one daemon" in str(open_parts(estate.host))


def test_an_audit_log_that_was_tampered_with_keeps_the_daemon_from_starting(estate: Estate) -> None:
    async def main() -> None:
        async with running(estate):
            pass

    anyio.run(main)
    log = estate.host.audit / "audit.jsonl"
    log.write_bytes(log.read_bytes()[:-200])
    assert "does not hold" in str(open_parts(estate.host))


def test_a_state_that_cannot_be_read_keeps_the_daemon_from_starting(estate: Estate) -> None:
    (estate.root / "state" / "state.json").write_text("{")
    assert "state.json" in str(open_parts(estate.host))


def ringfenced(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    return subprocess.run(
        [sys.executable, "-c", "from reconciler.daemon import main; main()", *arguments],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def write_host(estate: Estate, **changes: str) -> Path:
    """A host.yaml that the program reads."""
    settings = {"proxy_user": "nobody", **changes}
    text = f"version: 1\nkind: host\nname: prod-1\npolicy: {estate.root}/policy\ntrust: {estate.root}/trust\n"
    path = estate.root / "host.yaml"
    more = "".join(f"{key}: {value}\n" for key, value in settings.items())
    path.write_text(f"{text}state: {estate.root}/state\n{estate.settings}{more}")
    return path


def test_check_says_fine(estate: Estate) -> None:
    done = ringfenced("--host-config", str(write_host(estate)), "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fine" in done.stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"proxy_user": "no-such-user"}, "no-such-user", id="a proxy user that does not exist"),
        pytest.param({"proxy_user": "root"}, "is root", id="a proxy that would be root"),
        pytest.param({"python": "/usr/bin/no-python"}, "no-python", id="an interpreter that is not there"),
        pytest.param({"nonsense": "1"}, "nonsense", id="a setting that we do not define"),
    ],
)
def test_check_says_what_is_wrong(estate: Estate, changes: dict[str, str], says: str) -> None:
    done = ringfenced("--host-config", str(write_host(estate, **changes)), "--check")
    assert done.returncode == 1
    assert says in done.stderr


def test_the_settings_are_those_that_the_variable_names(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_host(estate, proxy_user="no-such-user")
    monkeypatch.setenv("RINGFENCE_HOST_CONFIG", str(path))
    done = ringfenced("--check")
    assert (done.returncode, "no-such-user" in done.stderr) == (1, True)
    assert ringfenced("--check", "--host-config", str(write_host(estate))).returncode == 0, "the option goes first"


@pytest.mark.parametrize("user", ["no-such-user", "root"])
def test_it_does_not_start_with_a_proxy_user_that_it_cannot_use(estate: Estate, user: str) -> None:
    done = ringfenced("--host-config", str(write_host(estate, proxy_user=user)))
    assert (done.returncode, "proxy_user: " in done.stderr) == (1, True)


def test_check_reads_the_trust_files(estate: Estate) -> None:
    (estate.root / "trust" / "allowed_signers").write_text("* ssh-ed25519 AAAA\n")
    assert any("allowed_signers" in problem for problem in check(estate.host))


def test_a_wrong_call_exits_64(estate: Estate) -> None:
    del estate
    assert ringfenced("--no-such-option").returncode == 64


def test_a_missing_host_config_exits_1(tmp_path: Path) -> None:
    done = ringfenced("--host-config", str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert "host.yaml" in done.stderr
