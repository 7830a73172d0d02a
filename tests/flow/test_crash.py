"""A crash anywhere leaves a job with exactly one result, run at most once, and nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler import durable
from reconciler import run as run_module
from reconciler.claim import Claim
from reconciler.core.audit import Verified, verify
from reconciler.core.job import RECOVERY, TRANSITIONS, Recovery, State
from reconciler.journal_files import LOG
from tests.flow.fake_backend import Crash
from tests.flow.house import House, in_force, job, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reconciler.core.policy import InForce

WORK = job("print hello", "connect api.vendor.com:443", "connect evil.com:443", "exit 7")


def serve(house: House, policy: InForce | None, until: str) -> None:
    """A daemon that serves until a job has its result."""

    async def main() -> None:
        async with house.daemon(policy):
            await house.wait_for(until)

    anyio.run(main)


def prepare(root: Path, data: bytes) -> House:
    """A house in which one job waits."""
    house = House(root)

    async def main() -> None:
        async with house.daemon(in_force()):
            pass

    anyio.run(main)
    house.submit("a.yaml", data)
    return house


def crash_of(action: Callable[[], None]) -> BaseException | None:
    """What an action ended in; None when it came to its end."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the crash comes in whatever groups it passed through
        return error
    return None


def crashed(error: BaseException) -> bool:
    """Whether what came out is the crash and nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(crashed(one) for one in error.exceptions)
    return isinstance(error, Crash)


def assert_settled(house: House) -> dict[str, object]:
    """One result, at most one start, nothing left, and an audit log that holds."""
    (result,) = house.results()
    assert house.leftovers() == []
    assert house.waiting() == []
    assert house.starts() <= 1
    if result["code"] == "exited":
        assert result["status"] == 7
        assert house.starts() == 1
    else:
        assert result["code"] in {"interrupted", "refused"}
    assert isinstance(verify((house.host.audit / LOG).read_bytes().splitlines(keepends=True), None), Verified)
    return result


def cut(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Counter[str]:
    """Make the `at`-th durable operation of the spool the last one; `after` lets it happen first."""
    count: Counter[str] = Counter()

    def wrap(name: str) -> Callable[..., object]:
        real = getattr(durable, name)

        def wrapped(*args: object, **options: object) -> object:
            count["calls"] += 1
            if count["calls"] < at:
                return real(*args, **options)
            if after and count["calls"] == at:
                real(*args, **options)
            raise Crash

        return wrapped

    for name in ("write", "sync", "rename_new", "replace"):
        monkeypatch.setattr(durable, name, wrap(name))
    return count


@pytest.mark.parametrize("after", [False, True], ids=["before the operation", "after the operation"])
@pytest.mark.parametrize(
    ("data", "policy"),
    [
        pytest.param(WORK, in_force(), id="a job that runs"),
        pytest.param(job("exit 7", agent="unknown"), in_force(), id="a job that is refused"),
    ],
)
def test_a_crash_at_any_durable_operation_leaves_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, policy: InForce, *, after: bool
) -> None:
    codes: Counter[object] = Counter()
    at = 0
    while True:
        at += 1
        root = tmp_path / f"{at}"
        root.mkdir()
        house = prepare(root, data)
        with monkeypatch.context() as patch:
            count = cut(patch, at, after=after)
            crash = crash_of(partial(serve, house, policy, "a"))
        assert crash is None or crashed(crash), crash
        if count["calls"] < at:
            break
        serve(house, policy, "a")
        codes[assert_settled(house)["code"]] += 1
    assert at > 10
    assert codes["refused" if data is not WORK else "exited"] >= 2


STEPS = (
    ("before network", State.INTENT),
    ("network", State.INTENT),
    ("gate", State.CREATED),
    ("start", State.STARTED),
    ("started", State.STARTED),
    ("exit", State.STARTED),
    ("drain", State.EXITED),
    ("drift", State.EXITED),
    ("undo", State.REPORTED),
)

EXPECTED = {
    Recovery.INTERRUPT: ("interrupted", None),
    Recovery.REPORT: ("exited", 7),
    Recovery.FINISH: ("exited", 7),
}


@pytest.mark.parametrize(("step", "state"), STEPS, ids=[f"at {step}" for step, _ in STEPS])
def test_kill_9_at_each_step_leaves_one_result_and_nothing_else(tmp_path: Path, step: str, state: State) -> None:
    house = prepare(tmp_path, WORK)
    died = subprocess.run(
        [sys.executable, "-m", "tests.flow.killed", str(tmp_path), step], timeout=60, check=False, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert len(house.claimed()) == 1
    serve(house, in_force(), "a")
    result = assert_settled(house)
    assert (result["code"], result["status"]) == EXPECTED[RECOVERY[state]]
    assert [row["outcome"] for row in house.rows("teardown")][-1] == "recovered"


def test_the_backend_that_dies_under_a_run_is_told_apart(tmp_path: Path) -> None:
    house = prepare(tmp_path, job("sandbox_crashed"))
    serve(house, in_force(), "a")
    (result,) = house.results()
    assert (result["code"], result["status"]) == ("sandbox_crashed", None)
    assert house.leftovers() == []


def test_every_state_has_a_way_to_the_end_and_a_recovery() -> None:
    assert set(TRANSITIONS) == set(RECOVERY) == set(State)
    reached = {State.CLAIMED}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS[state]}
    assert reached == set(State)
    order = tuple(State)
    assert all(order.index(after) > order.index(state) for state in State for after in TRANSITIONS[state])


def test_a_claim_without_intent_goes_back_and_runs(tmp_path: Path) -> None:
    house = prepare(tmp_path, WORK)
    claimed = house.host.spool / "claimed" / "20250101T000000-00000001" / "nobody"
    claimed.mkdir(parents=True)
    (house.host.spool / "in" / "nobody" / "new" / "a.yaml").rename(claimed / "a.yaml")
    serve(house, in_force(), "a")
    assert assert_settled(house)["code"] == "exited"


def test_a_claim_whose_name_is_taken_again_is_interrupted_and_the_new_one_runs(tmp_path: Path) -> None:
    house = prepare(tmp_path, WORK)
    claimed = house.host.spool / "claimed" / "20250101T000000-00000001" / "nobody"
    claimed.mkdir(parents=True)
    (house.host.spool / "in" / "nobody" / "new" / "a.yaml").rename(claimed / "a.yaml")
    house.submit("a.yaml", WORK)

    async def main() -> None:
        async with house.daemon(in_force()):
            await until(lambda: len(house.results()) == 2 and not house.claimed())

    anyio.run(main)
    # The stem is used: what came later under it is refused, and the earlier one was never run.
    codes = sorted((result["code"], (result["refusal"] or {}).get("code")) for result in house.results())
    assert codes == [("interrupted", None), ("refused", "stem_used")]
    assert house.starts() == 0


def test_a_tree_that_was_delivered_as_a_job_is_put_aside_whole(tmp_path: Path) -> None:
    house = prepare(tmp_path, WORK)
    claimed = house.host.spool / "claimed" / "20250101T000000-00000001" / "nobody"
    (claimed / "a.yaml" / "deep").mkdir(parents=True)

    async def main() -> None:
        async with house.daemon(in_force()):
            await until(lambda: len(house.results()) == 2 and not house.claimed())

    anyio.run(main)
    assert (house.host.spool / "quarantine" / "20250101T000000-00000001" / "a.yaml" / "deep").is_dir()


def test_a_record_that_cannot_be_read_is_never_run_again(tmp_path: Path) -> None:
    house = prepare(tmp_path, WORK)
    claim = house.host.spool / "claimed" / "20250101T000000-00000001"
    (claim / "nobody").mkdir(parents=True)
    (house.host.spool / "in" / "nobody" / "new" / "a.yaml").rename(claim / "nobody" / "a.yaml")
    (claim / ".record.json").write_bytes(b'{"state": "int')
    serve(house, in_force(), "a")
    assert assert_settled(house)["code"] == "interrupted"
    assert house.starts() == 0


@pytest.mark.parametrize("made", ["a link", "a file", "nothing"])
def test_a_claim_that_cannot_go_back_is_interrupted_and_keeps_no_daemon_from_starting(
    tmp_path: Path, made: str
) -> None:
    house = prepare(tmp_path, WORK)
    claimed = house.host.spool / "claimed" / "20250101T000000-00000001" / "nobody"
    claimed.mkdir(parents=True)
    new = house.host.spool / "in" / "nobody" / "new"
    (new / "a.yaml").rename(claimed / "a.yaml")
    new.rename(new.with_name("old"))
    if made == "a link":
        new.symlink_to("/etc")
    elif made == "a file":
        new.write_bytes(b"")
    serve(house, in_force(), "a")
    (result,) = house.results()
    assert result["code"] == "interrupted"
    assert house.leftovers() == []
    assert house.starts() == 0


def test_a_claim_that_cannot_be_ended_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = prepare(tmp_path, WORK)
    for run, name in (("20250101T000000-00000001", "b.yaml"), ("20250101T000000-00000002", "a.yaml")):
        claimed = house.host.spool / "claimed" / run / "nobody"
        claimed.mkdir(parents=True)
        if name == "a.yaml":
            (house.host.spool / "in" / "nobody" / "new" / name).rename(claimed / name)
        else:
            (claimed / name).write_bytes(WORK)
    real = Claim.read

    def read(root: Path, run: str) -> Claim | None:
        if run.endswith("1"):
            raise ValueError("whatever a submitter managed to leave there")
        return real(root, run)

    monkeypatch.setattr(Claim, "read", read)

    async def main() -> None:
        async with house.daemon(in_force()):
            await until(lambda: house.result("a") is not None)

    anyio.run(main)
    result = house.result("a")
    assert result is not None
    assert result["code"] == "exited"
    assert "20250101T000000-00000001" in house.claimed()


def test_a_run_whose_teardown_breaks_keeps_its_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = prepare(tmp_path, job("exit 7"))

    def broken(_: Path) -> None:
        raise RecursionError

    monkeypatch.setattr(run_module, "forget", broken)

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            await until(lambda: house.result("a") is not None and not jobs.runs)

    anyio.run(main)
    serve(house, in_force(), "a")
    assert assert_settled(house)["code"] == "exited"


@pytest.mark.parametrize("line", [b"not json\n", b"\0" * 64 + b"\n", b"[" * 100_000 + b"\n"])
def test_decisions_that_a_power_cut_left_unreadable_are_passed_over(tmp_path: Path, line: bytes) -> None:
    house = prepare(tmp_path, WORK)
    subprocess.run(
        [sys.executable, "-m", "tests.flow.killed", str(tmp_path), "exit"], timeout=60, check=False, capture_output=True
    )
    (live,) = (tmp_path / "runtime" / "runs").iterdir()
    whole = (live / "decisions.jsonl").read_bytes()
    (live / "decisions.jsonl").write_bytes(line + whole)
    serve(house, in_force(), "a")
    result = assert_settled(house)
    assert isinstance(result["decisions"], dict)
    assert (result["decisions"]["allowed"], result["decisions"]["denied"]) == (1, 1)


def test_a_submitter_cannot_have_another_file_read_as_its_output(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    house = prepare(tmp_path, WORK)
    died = subprocess.run(
        [sys.executable, "-m", "tests.flow.killed", str(tmp_path), "exit"], timeout=60, check=False, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL
    (live,) = (tmp_path / "runtime" / "runs").iterdir()
    (live / "output.log").unlink()
    (live / "output.log").symlink_to(secret)
    (live / "decisions.jsonl").unlink()
    (live / "decisions.jsonl").hardlink_to(secret)
    serve(house, in_force(), "a")
    done = house.host.spool / "done" / "nobody" / "a"
    assert assert_settled(house)["code"] == "interrupted"
    assert (done / "output.log").read_bytes() == (done / "decisions.jsonl").read_bytes() == b""
    assert b"not for you" not in (done / "result.json").read_bytes()


def test_what_was_seen_before_a_crash_is_in_the_result(tmp_path: Path) -> None:
    house = prepare(tmp_path, WORK)
    subprocess.run(
        [sys.executable, "-m", "tests.flow.killed", str(tmp_path), "exit"], timeout=60, check=False, capture_output=True
    )
    serve(house, in_force(), "a")
    result = house.result("a")
    assert result is not None
    assert result["output"]["tail"] == "hello\n"
    assert (result["decisions"]["allowed"], result["decisions"]["denied"]) == (1, 1)
    lines = (house.host.spool / "done" / "nobody" / "a" / "decisions.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["host"] for line in lines] == ["api.vendor.com", "evil.com"]
