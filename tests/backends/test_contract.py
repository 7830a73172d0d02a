"""What every backend promises, whichever it is; each command is one that a Debian image has."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proxy.record import Verdict
from reconciler.backends.base import Exit, ExitCode, Stream
from reconciler.core.choose import Available
from reconciler.core.policy import BackendName, Isolation
from reconciler.core.schema import load_schema
from tests.backends.world import LIMITS, MIB, Recorder, built, launch, refused, run, running_with

if TYPE_CHECKING:
    from reconciler.backends.base import Backend


def outcome(backend: Backend, *command: str, recorder: Recorder | None = None, **given: object) -> Exit:
    """Run one command to its end and check that its teardown undid everything."""
    watching = recorder or Recorder()

    async def main() -> Exit:
        async with backend.launch(launch(*command, **given), watching) as sandbox:  # type: ignore[arg-type]  # handed on
            return await run(sandbox)

    end = anyio.run(main)
    assert watching.undone == []
    return end


def is_apart(backend: Backend) -> bool:
    """Say whether both outputs come apart; a cluster hands out one log, in the order in which it was written."""
    return backend.name is not BackendName.K8S


def is_gvisor(backend: Backend) -> bool:
    """Say what isolates the sandboxes of a backend that was probed."""
    found = anyio.run(backend.probe)
    return isinstance(found, Available) and found.isolation is Isolation.GVISOR


@pytest.mark.firewalls
def test_probe_says_available_with_evidence_and_remembers(backend: Backend) -> None:
    async def main() -> None:
        first = await backend.probe()
        assert isinstance(first, Available)
        assert first.evidence
        assert first.versions
        with anyio.fail_after(0.5):
            assert await backend.probe() is first

    anyio.run(main)


def test_plan_names_what_a_launch_creates_and_creates_nothing(backend: Backend) -> None:
    planned = backend.plan(launch("true", run="planned-only"))
    assert [thing.kind for thing in planned]
    assert anyio.run(backend.reap, frozenset()) == ()


# Statuses 0 to 5 come back in tests below.
@pytest.mark.parametrize("status", [7, 255], ids=lambda status: f"status {status} comes back as {status}")
def test_exit_status(backend: Backend, status: int) -> None:
    assert outcome(backend, "sh", "-c", f"exit {status}") == Exit(code=ExitCode.EXITED, status=status)


def test_a_command_that_is_killed_by_a_signal_has_128_and_the_signal_as_status(backend: Backend) -> None:
    assert outcome(backend, "sh", "-c", "kill -SEGV $$") == Exit(code=ExitCode.EXITED, status=128 + signal.SIGSEGV)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("no-such-command", ExitCode.NOT_FOUND, id="a name that PATH does not hold is not found"),
        pytest.param("/no/such/file", ExitCode.NOT_FOUND, id="a path that does not exist is not found"),
        pytest.param("/etc/passwd", ExitCode.NOT_EXECUTABLE, id="a file without the right is not executable"),
        pytest.param("/usr", ExitCode.NOT_EXECUTABLE, id="a directory is not executable"),
    ],
)
def test_a_command_that_cannot_be_executed(backend: Backend, command: str, code: ExitCode) -> None:
    assert outcome(backend, command) == Exit(code=code, status=None)


def test_both_outputs_come_whole_and_apart(backend: Backend) -> None:
    recorder = Recorder()
    outcome(backend, "sh", "-c", "echo to stdout; echo to stderr >&2; echo opened > /dev/stderr", recorder=recorder)
    if is_apart(backend):
        assert recorder.stdout == "to stdout\n"
        assert recorder.stderr == "to stderr\nopened\n"
    else:
        assert sorted(recorder.said.splitlines()) == ["opened", "to stderr", "to stdout"]


def test_nothing_of_the_command_runs_before_start(backend: Backend) -> None:
    recorder = Recorder()

    async def main() -> None:
        async with backend.launch(launch("sh", "-c", "echo ran"), recorder) as sandbox:
            assert built(sandbox).report.passed
            await anyio.sleep(0.3)

    anyio.run(main)
    assert recorder.sizes.total() == 0
    assert recorder.undone == []


@pytest.mark.firewalls
def test_the_gate_report_is_as_its_schema_says_and_every_target_is_judged(backend: Backend) -> None:
    async def main() -> None:
        async with backend.launch(launch("true"), Recorder()) as sandbox:
            live = built(sandbox)
            report = live.report
            load_schema("gate-report").validator.validate(report.to_object())
            assert report.passed
            assert report.arrivals == report.failures == ()
            kinds = {target.kind for target in report.targets}
            assert {"tcp", "dns-tcp", "dns-udp", "icmp", "packet", "vsock"} <= kinds
            assert [target.name for target in report.targets if target.alive and target.verdict != "denied"] == []
            assert any(target.alive for target in report.targets)
            assert live.evidence

    anyio.run(main)


def test_stop_lets_a_command_end_itself_and_answers_with_the_code(backend: Backend) -> None:
    recorder = Recorder()

    async def main() -> Exit:
        async with backend.launch(
            launch("sh", "-c", "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"), recorder
        ) as sandbox:
            live = built(sandbox)
            await live.start()
            await recorder.wrote.wait()
            with anyio.fail_after(4):
                await live.stop(ExitCode.TIMEOUT)
            await live.stop(ExitCode.STOPPED)
            return await live.wait()

    assert anyio.run(main) == Exit(code=ExitCode.TIMEOUT, status=None)
    assert recorder.stdout == "ready\nbye\n"


def test_stop_kills_what_does_not_listen_after_the_grace_period(backend: Backend) -> None:
    recorder = Recorder()

    async def main() -> Exit:
        command = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
        async with backend.launch(launch(*command), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            await recorder.wrote.wait()
            with anyio.fail_after(9):
                await live.stop(ExitCode.TIMEOUT)
            return await live.wait()

    assert anyio.run(main) == Exit(code=ExitCode.TIMEOUT, status=None)


def test_more_memory_than_allowed_is_oom(backend: Backend) -> None:
    end = outcome(backend, "python3", "-c", "b = bytearray(400 << 20)")
    assert end == Exit(code=ExitCode.OOM, status=None, oom_killed=True)


def test_memory_of_a_child_that_is_killed_is_told_beside_the_status(backend: Backend) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'bytearray(400 << 20)']); sys.exit(4)"
    # Under gVisor all memory is the sandbox's own process's: the kernel kills that, and everything with it.
    whole = Exit(code=ExitCode.OOM, status=None, oom_killed=True)
    child = Exit(code=ExitCode.EXITED, status=4, oom_killed=True)
    assert outcome(backend, "python3", "-c", code) == (whole if is_gvisor(backend) else child)


def test_a_file_system_in_memory_cannot_outgrow_the_limit(backend: Backend) -> None:
    recorder = Recorder()
    end = outcome(
        backend, "sh", "-c", "head -c 400M /dev/zero > /tmp/x; head -c 400M /dev/zero > /dev/shm/x", recorder=recorder
    )
    if is_gvisor(backend) and not is_apart(backend):
        # gVisor's shim for containerd gives /dev/shm no bound of its own: the sandbox's memory is its bound.
        assert (end.code, recorder.said.count("No space left on device")) == (ExitCode.OOM, 1)
        return
    assert end.status == 1
    assert not end.oom_killed
    assert recorder.said.count("No space left on device") == 2


def test_processes_are_bounded(bounding: Backend) -> None:
    code = """
import os, time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except BlockingIOError:
    print(made)
"""
    recorder = Recorder()
    end = outcome(bounding, "python3", "-c", code, recorder=recorder, limits=dataclasses.replace(LIMITS, pids=20))
    if is_gvisor(bounding):
        # Its processes are threads and memory of gVisor's own; whoever takes too many of either ends the sandbox.
        assert end.code in (ExitCode.SANDBOX_CRASHED, ExitCode.OOM)
        assert recorder.stdout == ""
        return
    assert 10 <= int(recorder.stdout) <= 20


def test_a_status_of_the_commands_own_is_not_taken_for_a_crash(backend: Backend) -> None:
    """A status of 2 is also what gVisor's own crash ends with."""
    assert outcome(backend, "sh", "-c", "exit 2") == Exit(code=ExitCode.EXITED, status=2)


def test_open_files_are_bounded_and_the_bound_cannot_be_raised(bounding: Backend) -> None:
    recorder = Recorder()
    outcome(bounding, "sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -Hn 8192 2>/dev/null || echo no", recorder=recorder)
    assert recorder.stdout == "1024\n4096\nno\n"


@pytest.mark.firewalls
def test_no_socket_holds_memory_of_the_hosts_that_nobody_is_charged_for(bounding: Backend) -> None:
    """Those of netlink do, but for gVisor's, whose memory is the sandbox's own."""
    code = """
import socket
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
except OSError as error:
    print("denied")
print([line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]])
"""
    recorder = Recorder()
    assert outcome(bounding, "python3", "-c", code, recorder=recorder).status == 0
    denied, interfaces = "denied" in recorder.stdout, recorder.stdout.splitlines()[-1]
    assert denied is not is_gvisor(bounding)
    assert "'lo'" in interfaces


def test_ten_megabytes_of_output_do_not_grow_the_daemon(backend: Backend) -> None:
    recorder = Recorder()
    before = resident()
    end = outcome(backend, "sh", "-c", "head -c 10485760 /dev/zero | tr '\\0' x; echo end >&2", recorder=recorder)
    assert end.status == 0
    assert recorder.sizes.total() == 10 * MIB + 4
    assert not is_apart(backend) or recorder.sizes[Stream.STDERR] == 4
    assert resident() - before < 4 * MIB


def resident() -> int:
    """Bytes of memory that this process holds."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_what_a_command_leaves_behind_ends_with_it(backend: Backend) -> None:
    mark = "leave-me-running-4711"
    end = outcome(backend, "sh", "-c", f"(exec sleep 300 {mark} & setsid sleep 301 {mark} &) ; exit 0")
    assert end == Exit(code=ExitCode.EXITED, status=0)
    assert running_with(mark, "cmdline") == []


def test_the_environment_is_the_jobs_and_the_proxys_and_nothing_of_the_daemons(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAEMON_SECRET", "not-for-agents")
    recorder = Recorder()
    given = {"INVOICE_ID": "42", "HTTP_PROXY": "http://elsewhere:1"}
    outcome(backend, "env", recorder=recorder, environment=given)
    seen = dict(line.split("=", 1) for line in recorder.stdout.splitlines())
    assert seen["INVOICE_ID"] == "42"
    assert seen["HTTP_PROXY"] == seen["https_proxy"] == seen["ALL_PROXY"]
    assert seen["HTTP_PROXY"].endswith(":3128")
    assert seen["NO_PROXY"] == ""
    assert "DAEMON_SECRET" not in seen


def test_values_of_the_environment_are_in_no_command_line(backend: Backend) -> None:
    async def main() -> list[int]:
        job = launch("sleep", "30", environment={"TOKEN": "swordfish-4711"})
        async with backend.launch(job, Recorder()) as sandbox:
            await built(sandbox).start()
            return running_with("swordfish-4711", "cmdline")

    assert anyio.run(main) == []


def test_input_files_are_readable_in_the_working_directory_and_not_writable(backend: Backend) -> None:
    recorder = Recorder()
    command = "pwd; cat job.py deep/er.txt; touch new; echo x >> job.py"
    end = outcome(
        backend, "sh", "-c", command, recorder=recorder, files={"job.py": b"print(1)\n", "deep/er.txt": b"two\n"}
    )
    lines = recorder.said.splitlines()
    assert [line for line in lines if "cannot" not in line] == ["/job", "print(1)", "two"]
    assert end.status != 0
    assert len(lines) == 5


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "", "a//b", "a\nb"], ids=ascii)
def test_an_input_name_that_leads_elsewhere_is_refused(backend: Backend, name: str) -> None:
    async def main() -> str:
        async with backend.launch(launch("true", files={name: b""}), Recorder()) as sandbox:
            return refused(sandbox).code

    assert anyio.run(main) == "bad_input"


@pytest.mark.firewalls
def test_every_decision_reaches_the_observer(backend: Backend) -> None:
    code = """
import urllib.request, urllib.error
for _ in range(2):
    try:
        urllib.request.urlopen("http://not-listed.example.org/")
    except urllib.error.HTTPError as error:
        print(error.code, error.reason)
"""
    recorder = Recorder()
    outcome(backend, "python3", "-c", code, recorder=recorder)
    assert recorder.stdout == "403 not_listed\n" * 2
    assert sum(record.count for record in recorder.decisions) == 2
    assert {(record.verdict, record.code, record.host) for record in recorder.decisions} == {
        (Verdict.DENY, "not_listed", "not-listed.example.org")
    }
    assert recorder.ends == [recorder.decisions[-1].seq]


@pytest.mark.firewalls
def test_a_live_proxy_takes_a_newer_generation_and_refuses_an_older(backend: Backend) -> None:
    async def main() -> None:
        job = launch("true")
        async with backend.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            newer = dataclasses.replace(job.proxy, generation=5)
            assert await live.update(newer)
            assert not await live.update(dataclasses.replace(newer, generation=3))
            assert not await live.update(newer)
            assert await live.update(dataclasses.replace(newer, generation=6))

    anyio.run(main)


@pytest.mark.firewalls
def test_a_fence_that_is_as_it_was_proven_shows_no_drift(backend: Backend) -> None:
    async def main() -> None:
        async with backend.launch(launch("sh", "-c", "sleep 20 & sleep 20"), Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            await anyio.sleep(0.1)
            assert await live.drift() == ()

    anyio.run(main)


@pytest.mark.firewalls
def test_two_sandboxes_live_side_by_side(backend: Backend) -> None:
    half = dataclasses.replace(LIMITS, cpus=0.5)

    async def main() -> None:
        first, second = Recorder(), Recorder()
        async with (
            backend.launch(launch("sh", "-c", "sleep 0.2; exit 1", limits=half), first) as one,
            backend.launch(launch("sh", "-c", "exit 2", limits=half), second) as other,
        ):
            assert (await run(other)).status == 2
            assert (await run(one)).status == 1

    anyio.run(main)


@pytest.mark.firewalls
def test_a_cancelled_launch_leaves_nothing(backend: Backend) -> None:
    async def main() -> None:
        for after in (0.0, 0.03, 0.06, 0.1, 0.2, 0.4):
            recorder = Recorder()
            with anyio.move_on_after(after):
                async with backend.launch(launch("sleep", "60"), recorder) as sandbox:
                    await built(sandbox).start()
                    await built(sandbox).wait()
            assert recorder.undone == []
            assert await backend.reap(frozenset()) == ()

    anyio.run(main)


def test_an_exception_of_the_caller_comes_out_as_it_is(backend: Backend) -> None:
    async def main() -> None:
        async with backend.launch(launch("sleep", "60"), Recorder()):
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        anyio.run(main)
    assert anyio.run(backend.reap, frozenset()) == ()


def test_the_reaper_leaves_a_live_run_alone(backend: Backend) -> None:
    async def main() -> Exit:
        async with backend.launch(launch("sh", "-c", "sleep 0.3; exit 5"), Recorder()) as sandbox:
            await built(sandbox).start()
            assert await backend.reap(frozenset()) == ()
            return await built(sandbox).wait()

    assert anyio.run(main).status == 5
