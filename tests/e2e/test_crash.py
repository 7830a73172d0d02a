"""Whatever is killed, and whenever: a job has exactly one result, ran at most once, and nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.policy import BackendName
from reconciler.core.schema import load_schema
from tests.e2e import documents, traces
from tests.e2e.dying_daemon import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.installation import Installation

pytestmark = pytest.mark.rig

ONCE = """
import sys, urllib.request
print(urllib.request.urlopen("http://example.com/" + sys.argv[1], timeout=5).status, flush=True)
sys.exit(7)
"""
FOR_EVER = """
import subprocess, urllib.request
subprocess.Popen(["/usr/bin/sleep", "300"], start_new_session=True)
while True:
    urllib.request.urlopen("http://example.com/again", timeout=5).read()
    print("sent", flush=True)
"""
AFTER_EXIT = {"drain", "undo sandbox", "undo agent container"}
"""From these moments on it is on disk how the command ended."""
SETTING_UP = "sandbox"
DELAYS = (0.02, 0.15, 0.45)


@pytest.fixture(scope="module")
def adopted(bare: Installation) -> Installation:
    """A policy in force, and no daemon."""
    bare.adopt({"platform": documents.platform(), "agents/helper": bare.agent(allow=["example.com"])})
    bare.stop()
    return bare


def once(stem: str) -> dict[str, object]:
    """A job whose run is seen at the origin, and that ends with status 7."""
    return {**documents.script(ONCE), "command": [documents.PYTHON, "-I", "job.py", stem]}


def starts(installation: Installation, stem: str) -> int:
    """How often a job's command got as far as the origin."""
    heads = [arrival.first.split(b" ")[1] for arrival in installation.rig.arrivals(port=80)]
    return heads.count(f"/{stem}".encode())


def results(installation: Installation, stem: str) -> list[dict[str, Any]]:
    """Every result that there is of a job: a second one would be in STEM.RUN."""
    done = installation.spool / "done" / "root"
    found = [*done.glob(f"{stem}/result.json"), *done.glob(f"{stem}.*/result.json")]
    return [json.loads(path.read_text("utf-8")) for path in found]


def died(installation: Installation, moment: str) -> None:
    """Wait for the daemon to die by SIGKILL, and for what dies with it, before anybody cleans up.

    Sandboxes die with their daemon, and proxies when their input ends. Only a bwrap that is killed in the middle of its
    own set-up can leave a child that waits for its parent for ever: nothing runs in it, and the next daemon removes it.
    """
    daemon = installation.daemon
    assert daemon is not None
    assert daemon.wait(timeout=30) == -signal.SIGKILL
    installation.daemon = None
    if installation.on.engine is not None:
        # An engine keeps what it has. What the proxy has is the daemon's end of its input: with that it ends.
        installation.eventually(lambda: not traces.proxies(installation), "no proxy is left", timeout=10)
    elif moment == SETTING_UP:
        installation.eventually(lambda: not traces.proxies(installation), "no proxy is left", timeout=5)
    else:
        installation.gone_processes()


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What the next daemon made of a job during whose run the one before was killed."""

    results: list[dict[str, Any]]
    traces: list[str]
    starts: int
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def killed(adopted: Installation) -> dict[str, Aftermath]:
    """One daemon after the other, each killed at another moment of its job, each cleaning up after the one before."""
    adopted.rig.clear()
    moments = MOMENTS[adopted.on.backend]
    found: dict[str, Aftermath] = {}
    stems = {moment: moment.replace(" ", "-") for moment in moments}
    before = None
    for moment in moments:
        adopted.start([sys.executable, "-m", "tests.e2e.dying_daemon", moment])
        if before is not None:
            found[before] = aftermath(adopted, stems[before])
        adopted.drop(stems[moment], once(stems[moment]))
        died(adopted, moment)
        before = moment
    adopted.start()
    found[moments[-1]] = aftermath(adopted, stems[moments[-1]])
    adopted.stop()
    return found


def aftermath(installation: Installation, stem: str) -> Aftermath:
    """Look at what there is of a job once a daemon has started again."""
    whole = results(installation, stem)
    return Aftermath(
        results=whole,
        traces=installation.traces(),
        starts=starts(installation, stem),
        rows=[row for one in whole for row in installation.rows(run=one["run"])],
    )


@pytest.mark.bubblewrap
@pytest.mark.parametrize("moment", MOMENTS[BackendName.BUBBLEWRAP])
def test_kill_9_of_the_daemon_leaves_one_result_and_nothing_else(killed: dict[str, Aftermath], moment: str) -> None:
    one_result_and_nothing_else(killed[moment], moment)


@pytest.mark.docker
@pytest.mark.parametrize("moment", MOMENTS[BackendName.DOCKER])
def test_kill_9_of_the_daemon_leaves_one_result_and_nothing_on_the_engine(
    killed: dict[str, Aftermath], moment: str
) -> None:
    one_result_and_nothing_else(killed[moment], moment)


def one_result_and_nothing_else(after: Aftermath, moment: str) -> None:
    """Check what is promised of a job whose daemon was killed."""
    assert after.traces == []
    (result,) = after.results
    load_schema("result").validator.validate(result)
    expected = ("exited", 7) if moment in AFTER_EXIT else ("interrupted", None)
    assert (result["code"], result["status"]) == expected
    assert after.starts == (1 if moment in AFTER_EXIT | {"exit"} else after.starts)
    assert after.starts <= 1
    assert (after.rows[-1]["event"], after.rows[-1]["outcome"]) == ("agent_sandbox.teardown", "recovered")
    failed = [row for row in after.rows if row["event"] == "agent_sandbox.fail"]
    assert [row["code"] for row in failed] == ([] if moment in AFTER_EXIT else ["interrupted"])


def test_the_audit_log_holds_after_all_of_that(adopted: Installation, killed: dict[str, Aftermath]) -> None:
    said = adopted.ringfence("audit", "verify", "--log", str(adopted.state / "audit")).stdout
    assert f"{len(adopted.rows())} rows, unchanged and in order" in said
    runs = [after.results[0]["run"] for after in killed.values()]
    assert len(set(runs)) == len(killed) == len(MOMENTS[adopted.on.backend])
    for row in adopted.rows():
        load_schema("audit").validator.validate(row)


def test_what_a_job_did_before_the_crash_is_in_its_result(killed: dict[str, Aftermath]) -> None:
    (result,) = killed["exit"].results
    assert result["output"]["tail"] == "200\n"
    assert (result["decisions"]["allowed"], result["decisions"]["denied"]) == (1, 0)
    assert result["gate"]["passed"] is True


@pytest.fixture
def running(adopted: Installation) -> Iterator[Installation]:
    """The daemon itself, as it is installed; whoever killed it has it started again."""
    adopted.rig.reset()
    adopted.start()
    yield adopted
    adopted.stop()


@pytest.fixture
def work(running: Installation) -> str:
    """A job that sends for ever, and has a child that wants to outlive it; gives its name."""
    stem = f"work-{secrets.token_hex(4)}"
    running.drop(stem, documents.script(FOR_EVER))
    output = running.runtime / "runs" / running.live(stem)["run"] / "output.log"
    running.eventually(lambda: output.read_bytes().count(b"sent") > 3, "the job sends")
    return stem


def silent(installation: Installation) -> None:
    """Nothing leaves the machine any more."""
    installation.rig.clear()
    time.sleep(0.5)
    assert installation.rig.packets() == []


def test_kill_9_of_the_running_daemon_stops_what_is_sent_before_anybody_cleans_up(
    running: Installation, work: str
) -> None:
    assert traces.sandboxes(running)
    assert len(traces.proxies(running)) == 1
    running.kill()
    if running.on.engine is None:
        running.gone_processes()
    else:
        # The container may live on, as an engine's do, behind a fence without a proxy.
        running.eventually(lambda: not traces.proxies(running), "the proxy is gone", timeout=5)
    silent(running)
    assert results(running, work) == []
    running.start()
    assert running.traces() == []
    (result,) = results(running, work)
    assert (result["code"], result["status"]) == ("interrupted", None)
    assert result["output"]["tail"].startswith("sent\n")
    time.sleep(0.3)
    assert len(results(running, work)) == 1


def test_kill_9_of_the_proxy_stops_the_run_and_nothing_leaves(running: Installation, work: str) -> None:
    (proxy,) = traces.proxies(running)
    kill(running, proxy)
    # from here on, while the job goes on trying and until nothing is left
    running.rig.clear()
    result = running.result(work)
    running.settled(result["run"])
    assert running.rig.packets() == []
    assert (result["code"], result["status"]) == ("proxy_died", None)
    assert running.traces() == []
    silent(running)
    cut, row = running.rows("fail", run=result["run"])
    assert (cut["code"], cut["outcome"]) == ("decisions_cut", "gap")
    assert (row["code"], row["outcome"]) == ("proxy_died", "failed")
    (after,) = running.rows("teardown", run=result["run"])
    assert (after["outcome"], after["detail"]["undone"]) == ("done", [])


@pytest.mark.bubblewrap
def test_kill_9_of_the_sandbox_is_told_apart_and_its_proxy_ends_with_it(running: Installation, work: str) -> None:
    # bwrap's outer process is the one whose parent is the daemon.
    assert running.daemon is not None
    (outer,) = [pid for pid in traces.sandboxes(running) if parent(pid) == running.daemon.pid]
    os.kill(outer, signal.SIGKILL)
    result = running.result(work)
    running.settled(result["run"])
    assert (result["code"], result["status"]) == ("sandbox_crashed", None)
    assert running.traces() == []
    silent(running)


@pytest.mark.docker
def test_a_container_that_somebody_removes_has_one_result_and_nothing_is_left(running: Installation, work: str) -> None:
    (name,) = traces.containers(running, "agent")
    assert running.on.engine is not None
    running.on.engine.docker("rm", "--force", name, check=True)
    result = running.result(work)
    running.settled(result["run"])
    # It is killed first: whoever is quick sees that it was.
    assert (result["code"], result["status"]) in {("sandbox_crashed", None), ("exited", 128 + signal.SIGKILL)}
    assert len(results(running, work)) == 1
    assert running.traces() == []
    silent(running)


@pytest.mark.docker
def test_dockerd_killed_and_started_again_leaves_one_result_and_nothing_else(running: Installation, work: str) -> None:
    engine = running.on.engine
    assert engine is not None
    engine.kill_daemon("dockerd")
    time.sleep(1)
    engine.start_daemon("dockerd")
    result = running.result(work)
    running.settled(result["run"])
    running.gone("nothing is left", timeout=70)
    assert [one["run"] for one in results(running, work)] == [result["run"]]
    assert result["code"] in {"sandbox_crashed", "proxy_died"}
    silent(running)
    # The host is as good as before.
    running.rig.clear()
    after = f"after-{work}"
    assert running.run(after, once(after))["status"] == 7
    assert starts(running, after) == 1


def kill(installation: Installation, process: int) -> None:
    """Kill a process of a run by its pid, as the daemon's surroundings number it."""
    subprocess.run([*installation.on.enter, "/bin/kill", "-KILL", str(process)], check=True, timeout=20)


def parent(pid: int) -> int:
    """Parent of a process."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - one line of proc
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.bubblewrap
@pytest.mark.parametrize("delay", DELAYS, ids=lambda delay: f"{delay * 1000:.0f} ms after the job came")
def test_kill_9_at_any_time_leaves_one_result(running: Installation, delay: float) -> None:
    stem = f"any-{delay * 1000:.0f}"
    running.drop(stem, once(stem))
    time.sleep(delay)
    running.kill()
    running.start()
    running.result(stem)
    running.gone("nothing is left")
    (result,) = results(running, stem)
    # Killed before it was decided on, it is run by the next daemon; after that it never is.
    assert (result["code"], result["status"]) in {("exited", 7), ("interrupted", None)}
    assert starts(running, stem) <= 1
    if result["code"] == "exited":
        assert starts(running, stem) == 1


def test_sigterm_ends_runs_within_the_hosts_patience_and_leaves_nothing(adopted: Installation) -> None:
    settings = json.loads(adopted.host_config.read_text("utf-8"))
    adopted.write_host({**settings, "stop_timeout": "1s"})
    adopted.start()
    adopted.drop("stopping", documents.script(FOR_EVER))
    adopted.live("stopping")
    adopted.stop()
    (result,) = results(adopted, "stopping")
    assert (result["code"], result["status"]) == ("stopping", None)
    assert adopted.traces() == []
    assert adopted.rows()[-1]["event"] == "agent_sandbox.daemon.stop"
    adopted.write_host(settings)
