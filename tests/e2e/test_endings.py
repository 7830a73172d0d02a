"""How a command ends is what its result says and what `ringfence run` exits with; output is bounded and streams."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.policy import BackendName
from tests.e2e import documents
from tests.e2e.documents import PYTHON, job, script
from tests.e2e.grounds import WHOLE

if TYPE_CHECKING:
    from tests.e2e.installation import Installation

pytestmark = pytest.mark.rig

MIB = 1024 * 1024
OUTPUT = 64 * 1024
"""The default of `limits.output`."""
TEN_MEGABYTES = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
for number in range(10_000_000 // 16):
    sys.stdout.write("%015d\\n" % number)
sys.stdout.flush()
signal.sigwait({signal.SIGTERM})
sys.stderr.write("the end\\n")
"""
"""Two pipes have no order between them: the second is written when somebody has seen all of the first."""
STREAM = """
import sys, time, urllib.error, urllib.request
print("first", flush=True)
try:
    urllib.request.urlopen("http://evil.com/", timeout=5)
except urllib.error.HTTPError as error:
    print(error.code, error.reason, file=sys.stderr, flush=True)
time.sleep(1.5)
print("last", flush=True)
sys.exit(7)
"""


CREATED = {
    BackendName.BUBBLEWRAP: {"uid", "cgroup", "process", "sandbox", "gate"},
    BackendName.DOCKER: {"guard", "network", "volume", "container", "canary"},
}
"""Kinds of what a run is made of."""


@pytest.fixture(scope="module")
def host(bare: Installation) -> Installation:
    """Sandboxes are on; runs have 128 MiB."""
    agent = bare.agent(allow=["example.com"], limits={"memory": "128MiB", "pids": 64, "timeout": "30s"})
    bare.adopt({"platform": documents.platform(), "agents/helper": agent})
    return bare


@dataclass(frozen=True, slots=True)
class Ending:
    """One job and how it must end: in its result, and as the exit status of `ringfence run`."""

    job: dict[str, object]
    code: str
    status: int | None
    exits: int
    oom: bool = False


def sh(text: str) -> dict[str, object]:
    """Give a job that is a shell's."""
    return job("/bin/sh", "-c", text)


ENDINGS = {
    "exit status 0": Ending(job("/usr/bin/true"), "exited", 0, 0),
    "exit status 7": Ending(sh("exit 7"), "exited", 7, 7),
    "exit status 255": Ending(sh("exit 255"), "exited", 255, 255),
    "killed by SIGSEGV": Ending(sh("kill -SEGV $$"), "exited", 139, 139),
    "a status that looks like ours": Ending(sh("exit 124"), "exited", 124, 124),
    "timeout": Ending(job("/usr/bin/sleep", "20", timeout="1s"), "timeout", None, 124),
    "memory limit": Ending(script(f"bytearray({400 * MIB})"), "oom", None, 137, oom=True),
    "memory limit of a child": Ending(
        script(
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'bytearray({400 * MIB})']); sys.exit(3)"
        ),
        *("exited", 3, 3),
        oom=True,
    ),
    "no such command in PATH": Ending(job("no-such-command"), "command_not_found", None, 127),
    "no such file": Ending(job("/no/such/file"), "command_not_found", None, 127),
    "a file that may not be executed": Ending(job("/etc/passwd"), "command_not_executable", None, 126),
    "a directory": Ending(job("/usr"), "command_not_executable", None, 126),
}


COMMON = (
    "exit status 7",
    "timeout",
    "memory limit",
    "memory limit of a child",
    "no such command in PATH",
    "a file that may not be executed",
)
"""What is shown on every host; the others where everything is."""


@pytest.fixture(scope="module")
def ended(host: Installation) -> dict[str, dict[str, Any]]:
    """Results of all of them, which run side by side as far as the platform lets them."""
    names = ENDINGS if host.on.ground in WHOLE else COMMON
    stems = {name: name.lower().replace(" ", "-") for name in names}
    for name, stem in stems.items():
        host.drop(stem, ENDINGS[name].job)
    return {name: host.result(stem) for name, stem in stems.items()}


@pytest.mark.parametrize("name", COMMON)
def test_how_a_command_ends_is_told_apart(ended: dict[str, dict[str, Any]], name: str) -> None:
    ended_so(ended[name], ENDINGS[name])


@pytest.mark.parametrize("name", [name for name in ENDINGS if name not in COMMON])
def test_how_a_command_ends_in_other_ways_is_told_apart(ended: dict[str, dict[str, Any]], name: str) -> None:
    ended_so(ended[name], ENDINGS[name])


def ended_so(result: dict[str, Any], ending: Ending) -> None:
    """Check one result."""
    expected = (ending.code, ending.status)
    if ending.oom and result["backend"]["isolation"] == "gvisor":
        # All memory is gVisor's own process's, and with that everything ends.
        expected = ("oom", None)
    seen = (result["code"], result["status"], result["oom_killed"])
    assert seen == (*expected, ending.oom), result["message"]
    assert result["refusal"] is None
    assert result["message"]


def run(host: Installation, job: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Run a job's command through `ringfence run`."""
    timeout = ["--timeout", job["timeout"]] if "timeout" in job else []
    files = []
    for name, text in job.get("input", {}).items():
        (host.root / name).write_text(text, "utf-8")
        files += ["--input", str(host.root / name)]
    return host.ringfence("run", *options, *timeout, *files, "helper", "--", *job["command"], expect=None)


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    "name",
    [
        "exit status 7",
        "killed by SIGSEGV",
        "timeout",
        "memory limit",
        "no such command in PATH",
        "a file that may not be executed",
    ],
)
def test_ringfence_run_exits_as_the_command_did(host: Installation, name: str) -> None:
    ending = ENDINGS[name]
    done = run(host, ending.job)
    assert done.returncode == ending.exits, done.stderr
    assert done.stdout == ""
    assert (ending.code in done.stderr) is (ending.code != "exited")


@pytest.mark.bubblewrap
def test_ringfence_run_exits_125_when_it_is_refused(host: Installation) -> None:
    done = host.ringfence("run", "nobody", "--", "/usr/bin/true", expect=125)
    assert "refused: unknown_agent: " in done.stderr


@pytest.mark.bubblewrap
def test_ringfence_run_as_json_tells_a_timeout_from_an_exit_status_124(host: Installation) -> None:
    timeout, own = (run(host, ENDINGS[name].job, "--json") for name in ("timeout", "a status that looks like ours"))
    assert timeout.returncode == own.returncode == 124
    assert [json.loads(done.stdout)["code"] for done in (timeout, own)] == ["timeout", "exited"]


def test_ten_megabytes_of_output_give_a_bounded_tail(host: Installation) -> None:
    host.drop("big", script(TEN_MEGABYTES))
    live = host.runtime / "runs" / host.live("big")["run"] / "output.log"
    host.eventually(lambda: live.stat().st_size == 10_000_000, "everything was written", timeout=20)
    result = host.cancel("big")
    output = host.output("big")
    assert result["output"]["bytes"] == 10_000_008
    assert result["output"]["truncated"] is True
    assert len(output) == OUTPUT
    assert b"%015d\n" % 624_999 in output
    assert b"the end\n" in output
    assert len(result["output"]["tail"]) <= 16 * 1024
    assert output.decode().endswith(result["output"]["tail"])
    assert sum(path.stat().st_size for path in host.done("big").iterdir()) < 200 * 1024


def test_the_live_output_of_a_chatterbox_does_not_fill_the_disk(host: Installation) -> None:
    host.drop(
        "chatter", script('import sys, time\nsys.stdout.write("x" * 30_000_000)\nsys.stdout.flush()\ntime.sleep(30)')
    )
    live = host.runtime / "runs" / host.live("chatter")["run"] / "output.log"
    host.eventually(lambda: live.stat().st_size == 30_000_000, "everything was written")
    assert live.stat().st_blocks * 512 < 6 * MIB
    assert host.cancel("chatter")["output"]["bytes"] == 30_000_000


def test_bytes_that_are_no_text_come_back_as_they_are(host: Installation) -> None:
    host.drop("bytes", script("import os\nos.write(1, bytes(range(256)))"))
    result = host.result("bytes")
    assert host.output("bytes") == bytes(range(256))
    assert result["output"]["tail"].encode("utf-8").startswith(bytes(range(128)))
    assert result["output"]["tail"].endswith("\\xfe\\xff")


def test_output_and_decisions_stream_while_the_command_runs(host: Installation) -> None:
    (host.root / "stream.py").write_text(STREAM, "utf-8")
    argv = host.command("run", "--input", str(host.root / "stream.py"), "helper", "--", PYTHON, "-I", "stream.py")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        seen = time.monotonic()
        assert process.stderr.readline().startswith(b"[deny] evil.com:80 not_listed by agent")
        assert process.stdout.readline() == b"403 not_listed\n"
        assert process.poll() is None
        assert process.stdout.readline() == b"last\n"
        assert time.monotonic() - seen > 1, "the first line came while the command was running"
        assert process.stdout.read() == b""
        assert process.wait(timeout=20) == 7


@pytest.mark.bubblewrap
def test_on_a_terminal_control_characters_are_escaped(host: Installation) -> None:
    ours, theirs = pty.openpty()
    argv = host.command("run", "helper", "--", "/usr/bin/printf", r"\033]0;owned\007plain\r\n")
    with subprocess.Popen(argv, stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        assert process.wait(timeout=30) == 0
    said = os.read(ours, 65536)
    os.close(ours)
    assert b"\x1b" not in said
    assert b"\x07" not in said
    assert rb"\x1b]0;owned\x07plain" in said


@dataclass(frozen=True, slots=True)
class Everything:
    """What a host holds, to see that a command changed nothing."""

    files: dict[str, int]
    rows: int
    traces: list[str]

    @classmethod
    def of(cls, host: Installation) -> Everything:
        """Look at everything but what the daemon rewrites by itself."""
        files = [path for path in host.root.rglob("*") if path.is_file() and "status.json" not in path.name]
        return cls({str(path): path.stat().st_mtime_ns for path in files}, len(host.rows()), host.traces())

    def changed(self, before: Everything) -> list[str]:
        """Name what is otherwise than before."""
        files = [path for path, when in {**before.files, **self.files}.items() if when != before.files.get(path)]
        gone = [path for path in before.files if path not in self.files]
        rows = [] if self.rows == before.rows else [f"{self.rows} rows, not {before.rows}"]
        return [*files, *gone, *rows, *(self.traces if self.traces != before.traces else ())]


def test_a_dry_run_says_what_would_be_created_and_creates_nothing(host: Installation) -> None:
    host.run("probed", job("/usr/bin/true"))
    before = Everything.of(host)
    host.rig.clear()
    said = host.ringfence("run", "--dry-run", "helper", "--", "/usr/bin/true", expect=0).stdout
    ground = host.on.ground
    assert said.startswith(f"backend {ground.backend}, which isolates by {ground.isolation}\n")
    assert "not k8s: missing" in said
    for thing in ("ringfence-proxy", "gate", *CREATED[ground.backend]):
        assert thing in said
    assert "allow example.com" in said
    plan = json.loads(host.ringfence("run", "--dry-run", "--json", "helper", "--", "/usr/bin/true", expect=0).stdout)
    assert (plan["backend"], plan["isolation"], plan["refused"]) == (ground.backend, ground.isolation, None)
    assert {one["kind"] for one in plan["creates"]} >= CREATED[ground.backend]
    assert Everything.of(host).changed(before) == []
    assert host.rig.packets() == []


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("agent", "options", "code"),
    [
        pytest.param("nobody", (), "unknown_agent", id="an agent that is not there"),
        pytest.param("helper", ("--env", "SOME=thing"), "env_refused", id="a variable that is not allowed"),
        pytest.param("helper", ("--timeout", "2h"), "timeout_too_long", id="too long a timeout"),
    ],
)
def test_a_dry_run_of_what_would_be_refused_exits_125_and_says_why(
    host: Installation, agent: str, options: tuple[str, ...], code: str
) -> None:
    before = Everything.of(host)
    said = host.ringfence("run", "--dry-run", *options, agent, "--", "/usr/bin/true", expect=125).stderr
    assert f"would be refused: {code}: " in said
    assert Everything.of(host).changed(before) == []


@pytest.mark.bubblewrap
def test_a_dry_run_before_any_probe_says_so(fresh: Installation) -> None:
    fresh.adopt({"platform": documents.platform(), "agents/helper": fresh.agent()})
    said = fresh.ringfence("run", "--dry-run", "helper", "--", "/usr/bin/true", expect=125).stderr
    assert "bubblewrap: not probed on this host (`ringfence probe`)" in said


def test_a_job_of_a_submitter_is_run_and_its_result_is_the_submitters(host: Installation) -> None:
    """By hand and as the user, as any program would: the product's own interpreter may be closed to it."""
    agent = host.agent("shared", submitters=["nobody"])
    host.write("agents/shared", agent)
    host.sign_missing("CHG-2")
    host.eventually((host.spool / "in" / "nobody" / "new").exists, "the submitter has a directory")
    text = json.dumps({"version": 1, "kind": "job", **job("/usr/bin/id", "-u", agent="shared")})
    deliver = f"umask 077; cd {host.spool}/in/nobody; cat > tmp/mine.yaml && mv tmp/mine.yaml new/"
    as_nobody = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", "/bin/sh", "-c"]
    subprocess.run([*as_nobody, deliver], input=text.encode(), check=True, timeout=20)
    done = host.spool / "done" / "nobody" / "mine"
    host.eventually((done / "result.json").exists, "the result", timeout=30)
    read = subprocess.run(
        [*as_nobody, f"cat {done}/output.log {done}/result.json"], capture_output=True, check=True, timeout=20
    ).stdout
    output, _, rest = read.partition(b"\n")
    assert output == b"65534"
    assert json.loads(rest)["submitter"] == "nobody"
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in done.iterdir()} == {(65534, 0o400)}
    other = ["/usr/bin/setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", "--", "/bin/cat"]
    for name in ("result.json", "output.log"):
        assert subprocess.run([*other, str(done / name)], capture_output=True, check=False, timeout=20).returncode == 1
    assert Path(f"{done}").stat().st_uid == 65534
