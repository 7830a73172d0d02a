"""The audit log on disk: acknowledged rows survive, a torn line is repaired, tampering is not, failure is learnt of."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.clock import SystemClock
from reconciler.core.audit import Broken, Event, EventName, Head, Verified, read_row, verify
from reconciler.journal import Journal, JournalFailed
from reconciler.journal_files import HEAD, LOG, Log, all_full, full, read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FUTURE = datetime(2099, 1, 1, tzinfo=UTC)


def event(number: int = 1) -> Event:
    return Event(name=EventName.LAUNCH, actor="helper", object=f"run {number}", outcome="launched")


def opened(directory: Path) -> Journal:
    journal = Journal.open(directory, SystemClock())
    assert isinstance(journal, Journal)
    return journal


def fill(directory: Path, count: int) -> Head:
    journal = opened(directory)

    async def main() -> None:
        for number in range(count):
            assert await journal.append(event(number)) == number + 1

    anyio.run(main)
    journal.close()
    return journal.head


def checked(directory: Path) -> Verified | Broken:
    log = read(directory)
    assert not isinstance(log, Broken)
    return verify(log.lines(), log.head)


def test_rows_are_on_disk_and_hold_when_append_returns(tmp_path: Path) -> None:
    head = fill(tmp_path / "audit", 3)
    assert checked(tmp_path / "audit") == Verified(3, head, 0)
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "audit" / LOG).stat().st_mode & 0o777 == 0o600


def test_the_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    journal = opened(tmp_path)
    assert anyio.run(journal.append, event(), event()) == 4
    journal.close()
    assert checked(tmp_path) == Verified(4, journal.head, 0)


def test_events_of_one_call_are_next_to_each_other_and_callers_share_batches(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    ends: list[int] = []

    async def one() -> None:
        ends.append(await journal.append(event(1), event(2)))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(one)

    anyio.run(main)
    journal.close()
    assert sorted(ends) == list(range(2, 201, 2))
    log = read(tmp_path)
    assert not isinstance(log, Broken)
    rows = list(log.rows())
    assert [row["object"] for row in rows] == ["run 1", "run 2"] * 100
    assert len({row["time"] for row in rows}) < 50, "a hundred callers shared a few batches"


def test_a_caller_who_is_cancelled_does_not_take_the_rows_of_others_along(tmp_path: Path) -> None:
    journal = opened(tmp_path)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(0):
                await journal.append(event(1))
            tasks.start_soon(journal.append, event(2))

    anyio.run(main)
    journal.close()
    assert isinstance(checked(tmp_path), Verified)
    log = read(tmp_path)
    assert not isinstance(log, Broken)
    assert "run 2" in [row["object"] for row in log.rows()]


@pytest.mark.parametrize("torn", [b"{", b'{"actor":"helper","after":null', b"\0" * 4096])
def test_a_torn_last_line_is_repaired_with_a_row_that_says_so(tmp_path: Path, torn: bytes) -> None:
    fill(tmp_path, 2)
    with (tmp_path / LOG).open("ab") as file:
        file.write(torn)
    journal = opened(tmp_path)
    journal.close()
    assert checked(tmp_path) == Verified(3, journal.head, 0)
    log = read(tmp_path)
    assert not isinstance(log, Broken)
    row = list(log.rows())[-1]
    assert (row["event"], row["code"]) == ("agent_sandbox.audit.repair", "torn_line")
    assert isinstance(row["detail"], dict)
    assert row["detail"]["bytes"] == len(torn)


def test_rows_beyond_the_head_are_kept_when_the_crash_came_before_the_head_was_written(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    head = (tmp_path / HEAD).read_bytes()
    journal = opened(tmp_path)
    anyio.run(journal.append, event(3))
    journal.close()
    (tmp_path / HEAD).write_bytes(head)
    assert checked(tmp_path) == Verified(3, journal.head, 1)
    again = opened(tmp_path)
    again.close()
    assert again.head == journal.head


def test_a_missing_head_beside_rows_that_hold_is_repaired_with_a_row_that_says_so(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    (tmp_path / HEAD).unlink()
    journal = opened(tmp_path)
    journal.close()
    assert journal.head.seq == 3
    assert isinstance(checked(tmp_path), Verified)


def _last_line_cut(directory: Path) -> None:
    lines = (directory / LOG).read_bytes().splitlines(keepends=True)
    (directory / LOG).write_bytes(b"".join(lines[:-1]))


def _last_line_torn(directory: Path) -> None:
    (directory / LOG).write_bytes((directory / LOG).read_bytes()[:-5])


def _last_row_changed(directory: Path) -> None:
    (directory / LOG).write_bytes((directory / LOG).read_bytes().replace(b"run 2", b"run 9"))


def _bad_row_beyond(directory: Path) -> None:
    with (directory / LOG).open("ab") as file:
        file.write(b"{}\n")


def _head_garbled(directory: Path) -> None:
    (directory / HEAD).write_bytes(b"{}")


def _log_removed(directory: Path) -> None:
    (directory / LOG).unlink()


@pytest.mark.parametrize(
    "tamper",
    [_last_line_cut, _last_line_torn, _last_row_changed, _bad_row_beyond, _head_garbled, _log_removed],
    ids=lambda function: function.__name__.strip("_").replace("_", " "),
)
def test_what_no_crash_can_have_done_is_not_repaired(tmp_path: Path, tamper: object) -> None:
    fill(tmp_path, 3)
    assert callable(tamper)
    tamper(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert isinstance(Journal.open(tmp_path, SystemClock()), Broken)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after == {**before, LOG: before.get(LOG, b"")}


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(JournalFailed, match="held by another"):
        Journal.open(tmp_path, SystemClock())
    journal.close()
    opened(tmp_path).close()


def test_a_write_that_fails_is_learnt_of_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    anyio.run(journal.append, event(1))
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        real(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("reconciler.durable.os.write", full)
        with pytest.raises(JournalFailed, match="No space left"):
            anyio.run(journal.append, event(2))
    assert journal.failure is None
    assert anyio.run(journal.append, event(3)) == 2, "there is space again"
    journal.close()
    assert checked(tmp_path) == Verified(2, journal.head, 0)


def test_after_a_failed_fsync_nothing_is_promised_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("reconciler.journal.os.fsync", broken)
        with pytest.raises(JournalFailed):
            anyio.run(journal.append, event(1))
    with pytest.raises(JournalFailed, match="could not be made durable"):
        anyio.run(journal.append, event(2))
    assert journal.failure is not None
    journal.close()


def test_a_full_file_system_is_learnt_of(tmp_path: Path) -> None:
    """A real limit on the file's size, in a process of its own."""
    script = (
        "import resource, signal, sys, pathlib, anyio\n"
        "from reconciler.clock import SystemClock\n"
        "from reconciler.core.audit import Event, EventName\n"
        "from reconciler.journal import Journal, JournalFailed\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
        "journal = Journal.open(pathlib.Path(sys.argv[1]), SystemClock())\n"
        "event = Event(name=EventName.LAUNCH, actor='a', object='o', outcome='x')\n"
        "async def main():\n"
        "    for _ in range(20):\n"
        "        await journal.append(event)\n"
        "        print(journal.head.seq, flush=True)\n"
        "try:\n"
        "    anyio.run(main)\n"
        "except JournalFailed as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    *acknowledged, last = done.stdout.splitlines()
    assert "File too large" in last
    found = checked(tmp_path)
    assert isinstance(found, Verified)
    assert found.rows == len(acknowledged)


def test_an_event_that_is_no_json_fails_its_caller_only(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    bad = Event(name=EventName.PROBE, actor="a", object="o", outcome="x", detail={"what": object()})
    with pytest.raises(TypeError):
        anyio.run(journal.append, bad)
    assert anyio.run(journal.append, event()) == 1
    journal.close()


def test_time_does_not_go_back_with_the_clock(tmp_path: Path) -> None:
    ahead = Journal.open(tmp_path, SystemClock(FUTURE))
    assert isinstance(ahead, Journal)
    anyio.run(ahead.append, event())
    ahead.close()
    row = read_row((tmp_path / LOG).read_bytes())
    assert isinstance(row, dict)
    assert row["time"] == "2099-01-01T00:00:00.000000Z"


def test_an_empty_append_writes_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert anyio.run(journal.append) == 0
    journal.close()
    assert (tmp_path / LOG).read_bytes() == b""


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    head = fill(tmp_path, 2)
    whole = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(whole[:-20])

    def finish() -> None:
        with (tmp_path / LOG).open("ab") as file:
            file.write(whole[-20:])

    timer = threading.Timer(0.03, finish)
    timer.start()
    assert checked(tmp_path) == Verified(2, head, 0)
    timer.join()


WRITER = (
    "import sys, pathlib, anyio\n"
    "from reconciler.clock import SystemClock\n"
    "from reconciler.core.audit import Event, EventName\n"
    "from reconciler.journal import Journal\n"
    "journal = Journal.open(pathlib.Path(sys.argv[1]), SystemClock())\n"
    "event = Event(name=EventName.LAUNCH, actor='a', object='o' * 200, outcome='x')\n"
    "async def one():\n"
    "    while True:\n"
    "        print(await journal.append(event), flush=True)\n"
    "async def main():\n"
    "    async with anyio.create_task_group() as tasks:\n"
    "        for _ in range(4):\n"
    "            tasks.start_soon(one)\n"
    "anyio.run(main)\n"
)


def test_kill_9_at_any_moment_loses_no_row_that_was_acknowledged(tmp_path: Path) -> None:
    seen = 0
    for attempt in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(random.Random(attempt).uniform(0.01, 0.1))
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read()
        whole = [line for line in (first + rest).split(b"\n")[:-1] if line]
        seen = max([seen, *map(int, whole)])
        found = checked(tmp_path)
        if isinstance(found, Broken):
            assert "cut off" in found.message or "not JSON" in found.message
        journal = opened(tmp_path)
        journal.close()
        after = checked(tmp_path)
        assert isinstance(after, Verified)
        assert after.head.seq >= seen
    assert seen > 0


SMALL = 2000
"""Bytes after which the log of these tests goes on in a new file: a handful of rows."""


def small(directory: Path) -> Journal:
    journal = Journal.open(directory, SystemClock(), most=SMALL)
    assert isinstance(journal, Journal)
    return journal


def rotated(directory: Path, count: int = 30) -> Head:
    journal = small(directory)

    async def main() -> None:
        for number in range(count):
            await journal.append(event(number))

    anyio.run(main)
    journal.close()
    return journal.head


def test_the_chain_is_carried_over_from_file_to_file(tmp_path: Path) -> None:
    rotated(tmp_path)
    head = rotated(tmp_path)
    files = all_full(tmp_path)
    assert len(files) > 5
    assert all(path.stat().st_size < SMALL + 1000 for path in [*files, tmp_path / LOG])
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert checked(tmp_path) == Verified(60, head, 0)
    log = read(tmp_path)
    assert isinstance(log, Log)
    assert [row["seq"] for row in log.rows()] == list(range(1, 61))


def test_a_log_that_goes_on_in_a_new_file_still_has_one_writer(tmp_path: Path) -> None:
    journal = small(tmp_path)

    async def main() -> None:
        for number in range(30):
            await journal.append(event(number))

    anyio.run(main)
    with pytest.raises(JournalFailed, match="only one may write"):
        Journal.open(tmp_path, SystemClock())
    journal.close()


@pytest.mark.parametrize("broken", [LOG, ".audit.jsonl.next", f".{HEAD}.tmp"])
def test_a_change_of_files_that_is_cut_off_anywhere_loses_no_row(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, rename, cut = small(tmp_path), os.rename, False

    def cut_off(source: str, target: str, **more: int) -> None:
        if cut and source == broken:
            raise OSError(errno.EIO, "cut off")
        rename(source, target, **more)

    monkeypatch.setattr(os, "rename", cut_off)
    written = 0

    async def main() -> None:
        nonlocal written, cut
        while (tmp_path / LOG).stat().st_size < SMALL:
            written = await journal.append(event())
        cut = True
        with pytest.raises(JournalFailed):
            await journal.append(event())

    anyio.run(main)
    journal.close()
    cut = False
    after = small(tmp_path)
    assert after.head.seq == written
    assert anyio.run(after.append, event()) == written + 1
    after.close()
    assert checked(tmp_path) == Verified(written + 1, after.head, 0)


def test_a_disk_that_is_full_when_the_file_is_full_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated(tmp_path)
    journal = small(tmp_path)

    async def main() -> None:
        while (tmp_path / LOG).stat().st_size < SMALL:
            await journal.append(event())
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", None)
            patch.setattr("reconciler.journal.os.open", _full)
            with pytest.raises(JournalFailed):
                await journal.append(event())
        await journal.append(event())

    anyio.run(main)
    journal.close()
    assert isinstance(checked(tmp_path), Verified)


def _full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _delete(path: Path) -> None:
    path.unlink()


def _change_a_row(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"helper", b"hulper", 1))


def _cut_off(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def _give_another_number(path: Path) -> None:
    path.rename(path.with_name(full(99)))


@pytest.mark.parametrize("done", [_delete, _change_a_row, _cut_off, _give_another_number])
def test_a_file_that_is_full_is_part_of_the_proof(done: Callable[[Path], None], tmp_path: Path) -> None:
    rotated(tmp_path)
    done(all_full(tmp_path)[1])
    assert isinstance(checked(tmp_path), Broken)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_log_whose_last_full_file_is_gone_is_left_as_evidence(emptied: bool, tmp_path: Path) -> None:
    rotated(tmp_path)
    if emptied:
        (tmp_path / LOG).write_bytes(b"")
        assert isinstance(Journal.open(tmp_path, SystemClock()), Broken)
    all_full(tmp_path)[-1].unlink()
    assert isinstance(checked(tmp_path), Broken)
