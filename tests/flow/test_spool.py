"""What submitters may drop, and what the spool makes of everything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler import spool as spool_module
from reconciler.core.job import Refused
from reconciler.core.policy import Effective
from reconciler.host import Keep
from reconciler.quota import beyond
from reconciler.spool import Spool, Waiting, deliver, in_turn
from reconciler.submitter import Submitter, account
from tests.flow.house import SUBMITTER, House, agent, in_force, job, own, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A house whose submitters have their directories."""
    made = House(tmp_path)

    async def main() -> None:
        async with made.daemon(in_force()):
            pass

    anyio.run(main)
    return made


def run(house: House, done: Callable[[], bool]) -> None:
    """A daemon that serves until something is so."""

    async def main() -> None:
        async with house.daemon(in_force()):
            await until(done)

    anyio.run(main)


def settled(house: House) -> bool:
    """Whether nothing waits and nothing is claimed."""
    return not house.waiting() and not house.claimed()


def new(house: House) -> Path:
    """The submitter's `new`."""
    return house.host.spool / "in" / SUBMITTER / "new"


def plant_file(path: Path) -> None:
    path.write_bytes(job("print swordfish"))
    own(path, SUBMITTER)


def plant_other_owner(path: Path) -> None:
    path.write_bytes(job("print swordfish"))


def plant_hard_link(path: Path) -> None:
    other = path.parent.parent / "tmp" / "other"
    other.write_bytes(job("print swordfish"))
    own(other, SUBMITTER)
    path.hardlink_to(other)


def plant_link_to_secret(path: Path) -> None:
    secret = path.parents[4] / "secret"
    secret.write_text("swordfish")
    path.hardlink_to(secret)


def plant_symlink(path: Path) -> None:
    secret = path.parents[4] / "secret"
    secret.write_text("swordfish")
    path.symlink_to(secret)
    own(path, SUBMITTER)


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)
    own(path, SUBMITTER)


def plant_directory(path: Path) -> None:
    path.mkdir()
    (path / "swordfish").write_text("x")
    own(path, SUBMITTER)


def plant_device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 9))
    own(path, SUBMITTER)


def plant_large(path: Path) -> None:
    path.write_bytes(b"# swordfish\n" * 30_000)
    own(path, SUBMITTER)


@pytest.mark.parametrize(
    ("name", "plant", "code", "kept"),
    [
        pytest.param("a.yaml", plant_other_owner, "wrong_owner", True, id="root's own file"),
        pytest.param("a.yaml", plant_hard_link, "linked", True, id="a file with a second name"),
        pytest.param("a.yaml", plant_link_to_secret, "wrong_owner", True, id="a hard link to root's file"),
        pytest.param("a.yaml", plant_symlink, "not_a_file", True, id="a symbolic link to root's file"),
        pytest.param("a.yaml", plant_fifo, "not_a_file", True, id="a FIFO"),
        pytest.param("a.yaml", plant_directory, "not_a_file", True, id="a directory"),
        pytest.param("a.yaml", plant_device, "not_a_file", True, id="a device"),
        pytest.param("a.yaml", plant_large, "bad_job", False, id="a file that is too large"),
        pytest.param("A.yaml", plant_file, "bad_name", True, id="a name in capitals"),
        pytest.param(".a.yaml", plant_file, "bad_name", True, id="a hidden name"),
        pytest.param("a.yaml~", plant_file, "bad_name", True, id="an editor's backup"),
        pytest.param("a\n\x1b[31m.yaml", plant_file, "bad_name", True, id="a name that drives a terminal"),
        pytest.param("a\udcff.yaml", plant_file, "bad_name", True, id="a name that is no text"),
    ],
)
def test_what_is_no_job_is_refused_once_and_kept_aside(
    house: House, name: str, plant: Callable[[Path], None], code: str, *, kept: bool
) -> None:
    plant(new(house) / name)
    run(house, lambda: settled(house))
    (result,) = house.results()
    assert result["code"] == "refused"
    assert result["refusal"]["code"] == code
    assert "swordfish" not in str(result)
    assert "\x1b" not in str(house.rows())
    assert len(list((house.host.spool / "quarantine").iterdir())) == kept
    assert house.starts() == 0
    assert house.leftovers() == []
    (row,) = house.rows("refuse")
    assert row["code"] == code


def test_a_job_runs_beside_things_that_are_none(house: House) -> None:
    plant_fifo(new(house) / "fifo.yaml")
    plant_symlink(new(house) / "link.yaml")
    house.submit("good.yaml", job("exit 3"))
    run(house, lambda: settled(house))
    result = house.result("good")
    assert result is not None
    assert result["status"] == 3


def test_a_half_written_job_is_not_seen_until_it_is_renamed(house: House) -> None:
    whole = job("exit 3")
    path = new(house).parent / "tmp" / "a.yaml"

    async def main() -> None:
        async with house.daemon(in_force()):
            path.write_bytes(whole[:40])
            await anyio.sleep(0.5)
            assert house.results() == []
            path.write_bytes(whole)
            own(path, SUBMITTER)
            path.rename(new(house) / "a.yaml")
            assert (await house.wait_for("a"))["status"] == 3

    anyio.run(main)


def test_a_stem_is_used_once(house: House) -> None:
    house.submit("a.yaml", job("exit 3"))
    run(house, lambda: settled(house))
    house.submit("a.yml", job("exit 4"))
    run(house, lambda: settled(house))
    done = sorted(path.name for path in (house.host.spool / "done" / SUBMITTER).iterdir())
    assert done[0] == "a"
    assert done[1].startswith("a.")
    first, second = house.result("a"), house.result(done[1])
    assert first is not None
    assert second is not None
    assert first["status"] == 3
    assert second["refusal"]["code"] == "stem_used"
    assert house.starts() == 1


def test_a_stem_that_is_running_is_used_too(house: House) -> None:
    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            house.submit("a.yaml", job("sleep 0.5", "exit 3"))
            await until(lambda: bool(jobs.runs))
            house.submit("a.yaml", job("exit 4"))
            await until(lambda: len(house.results()) == 2 and settled(house))

    anyio.run(main)
    assert sorted(result["code"] for result in house.results()) == ["exited", "refused"]
    assert house.starts() == 1


def test_a_result_planted_by_its_submitter_changes_nothing(house: House) -> None:
    trap = house.root / "trap"
    trap.mkdir()
    (house.host.spool / "done" / SUBMITTER / "a").symlink_to(trap)
    house.submit("a.yaml", job("exit 3"))
    run(house, lambda: settled(house))
    assert list(trap.iterdir()) == []
    # The trap is a name that was used before, whatever it leads to.
    (done,) = (path for path in (house.host.spool / "done" / SUBMITTER).iterdir() if path.name != "a")
    assert b"stem_used" in (done / "result.json").read_bytes()


def test_a_new_that_is_a_link_is_passed_over(house: House) -> None:
    elsewhere = house.root / "elsewhere"
    elsewhere.mkdir()
    plant_file(elsewhere / "a.yaml")
    new(house).rmdir()
    new(house).symlink_to(elsewhere)

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            await anyio.sleep(0.6)
            assert jobs.unknown == (SUBMITTER,)

    anyio.run(main)
    assert (elsewhere / "a.yaml").exists()
    assert house.results() == []


def test_a_new_that_others_can_write_is_passed_over(house: House) -> None:
    new(house).chmod(0o777)
    house.submit("a.yaml", job("exit 3"))

    async def main() -> None:
        async with house.daemon(in_force()):
            await anyio.sleep(0.6)

    anyio.run(main)
    assert house.waiting() == ["a.yaml"]
    assert house.starts() == 0


def test_results_are_their_submitters_alone(house: House) -> None:
    house.submit("a.yaml", job("print x"))
    run(house, lambda: settled(house))
    user = account(SUBMITTER)
    assert user is not None
    done = house.host.spool / "done" / SUBMITTER
    for path, mode in ((done, 0o700), (done / "a", 0o700), *((file, 0o400) for file in (done / "a").iterdir())):
        facts = path.stat()
        assert (facts.st_uid, facts.st_mode & 0o777) == (user.uid, mode), path
    assert {file.name for file in (done / "a").iterdir()} == {"result.json", "output.log", "decisions.jsonl"}
    for name in ("claimed", "quarantine"):
        assert (house.host.spool / name).stat().st_mode & 0o777 == 0o700


def as_user(uid: int, directory: Path, command: str) -> str | None:
    """What a command says that a user runs in a directory, however it got there; None when it fails."""
    done = subprocess.run(
        ["/usr/bin/setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *command.split()],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def test_live_files_can_be_read_by_their_submitter_and_changed_by_nobody(house: House) -> None:
    user = account(SUBMITTER)
    assert user is not None

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            house.submit("a.yaml", job("print hello", "connect evil.com:443", "sleep 0.6"))
            await until(lambda: house.starts() == 1)
            (name,) = jobs.runs
            live = house.host.runtime / "runs" / name
            await until(lambda: (live / "output.log").read_bytes() == b"hello\n")
            # Root's: whoever could write here could fill /run, and stand in the way of the teardown.
            assert live.stat().st_uid == 0
            assert as_user(user.uid, live, "cat output.log") == "hello\n"
            for change in ("touch more", "rm -f output.log", "chmod 0700 .", "mkdir deep"):
                assert as_user(user.uid, live, change) is None
            assert as_user(user.uid - 1, live, "cat output.log") is None
            for file in (live / "output.log", live / "decisions.jsonl"):
                assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (0, 0o444)
            assert b"evil.com" in (live / "decisions.jsonl").read_bytes()
            await house.wait_for("a")
            assert not live.exists()

    anyio.run(main)


def test_one_daemon_for_one_spool(house: House) -> None:
    first = Spool.open(house.host.spool)
    assert isinstance(first, Spool)
    second = Spool.open(house.host.spool)
    assert isinstance(second, Refused)
    assert second.code == "locked"
    first.close()


def test_a_claim_has_one_winner(house: House) -> None:
    house.submit("a.yaml", job("exit 3"))
    spool = Spool.open(house.host.spool)
    assert isinstance(spool, Spool)
    (waiting,) = spool.waiting()
    winners = [spool.claim(waiting, f"20250101T000000-0000000{n}", "") for n in range(3)]
    assert [claim is not None for claim in winners] == [True, False, False]
    assert house.claimed() == ["20250101T000000-00000000"]
    spool.close()


@pytest.mark.parametrize("made", ["a link", "a file", "nothing"])
def test_a_new_that_is_swapped_before_the_claim_costs_nobody_else_anything(house: House, made: str) -> None:
    house.submit("a.yaml", job("exit 3"))
    spool = Spool.open(house.host.spool)
    assert isinstance(spool, Spool)
    (waiting,) = spool.waiting()
    new(house).rename(new(house).with_name("old"))
    if made == "a link":
        new(house).symlink_to("/etc")
    elif made == "a file":
        new(house).write_bytes(b"")
    assert spool.claim(waiting, "20250101T000000-00000000", "") is None
    assert house.claimed() == []
    spool.close()


def test_what_cannot_be_claimed_is_tried_once_in_a_look(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        house.submit(f"a{number}.yaml", job("exit 3"))
    tried = []

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            monkeypatch.setattr(Spool, "claim", lambda *_: tried.append(1))
            before = len(tried)
            await anyio.sleep(0.7)
            assert 0 < len(tried) - before < 10
            assert jobs.trouble == ""

    anyio.run(main)


LEASED = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.setgid(65534); os.setuid(65534)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
time.sleep(60)
"""


def test_a_job_under_a_lease_is_refused_and_holds_nothing_up(house: House) -> None:
    path = new(house).parent / "tmp" / "a.yaml"
    path.write_bytes(job("exit 3"))
    own(path, SUBMITTER)
    # The directories on the way may be closed to the submitter, so it is told the file by a descriptor of root's.
    folder = os.open(path.parent, os.O_RDONLY)
    name = f"/proc/self/fd/{folder}/{path.name}"
    with subprocess.Popen(
        [sys.executable, "-c", LEASED, name], stdout=subprocess.PIPE, text=True, pass_fds=[folder]
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "leased\n"
        path.rename(new(house) / "a.yaml")
        run(house, lambda: settled(house))
        holder.kill()
    os.close(folder)
    result = house.result("a")
    assert result is not None
    assert (result["code"], result["refusal"]["code"]) == ("refused", "bad_job")
    assert "lease" in result["message"]


def queue(name: str, *arrived: int) -> list[Waiting]:
    """What one submitter has waiting."""
    return [Waiting(time, Submitter(name, 1, 1), b"%d.yaml" % time) for time in arrived]


@pytest.mark.parametrize(
    ("running", "served", "order"),
    [
        pytest.param({}, {}, "a1 b4 a2 b5 a3 a6", id="in turn"),
        pytest.param({"a": 2}, {}, "b4 b5 a1 a2 a3 a6", id="fewest running first"),
        pytest.param({}, {"a": 7, "b": 3}, "b4 a1 b5 a2 a3 a6", id="whoever waited for a turn the longest"),
        pytest.param({}, {"a": 7}, "b4 a1 b5 a2 a3 a6", id="whoever had none"),
    ],
)
def test_a_long_queue_is_in_nobody_elses_way(running: dict[str, int], served: dict[str, int], order: str) -> None:
    found = [*queue("a", 6, 1, 3, 2), *queue("b", 5, 4)]
    turns = in_turn(found, running=running, served=served)
    assert " ".join(f"{one.submitter.name}{one.arrived}" for one in turns) == order


def test_one_slot_is_shared_between_submitters(house: House) -> None:
    policy = in_force(Effective(agent=agent(submitters=(SUBMITTER, "daemon")), layers=()), max_parallel_runs=1)
    for number in range(10, 30):
        house.submit(f"a{number}.yaml", job("sleep 0.1"))

    async def main() -> None:
        async with house.daemon(policy):
            await until(lambda: len(house.results()) > 0)
            house.submit("b.yaml", job("exit 0"), submitter="daemon")
            await until(lambda: house.result("b", submitter="daemon") is not None)

    anyio.run(main)
    assert len([one for one in house.results() if one["submitter"] == SUBMITTER]) < 10


def test_the_oldest_is_first_whatever_its_name_and_time_stamp(house: House) -> None:
    for name in ("c", "a", "b"):
        path = house.submit(f"{name}.yaml", job("exit 0"))
        os.utime(path, (0 if name == "b" else 2_000_000_000,) * 2)
        os.chmod(path, 0o600)  # noqa: PTH101 - what counts is the change time, and this sets it
    spool = Spool.open(house.host.spool)
    assert isinstance(spool, Spool)
    assert [waiting.name for waiting in spool.waiting()] == [b"c.yaml", b"a.yaml", b"b.yaml"]
    spool.close()


def test_nothing_is_claimed_without_room(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "FREE_BYTES", 1 << 62)
    house.submit("a.yaml", job("exit 3"))

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            await until(lambda: "MiB are free" in jobs.trouble)
            monkeypatch.setattr(spool_module, "FREE_BYTES", 1)
            assert (await house.wait_for("a"))["status"] == 3

    anyio.run(main)


def test_directories_are_made_for_submitters_that_are_users(house: House) -> None:
    spool = Spool.open(house.host.spool)
    assert isinstance(spool, Spool)
    assert spool.prepare(["daemon", "no-such-user", "../nobody", ""]) == ("", "../nobody", "no-such-user")
    user = account("daemon")
    assert user is not None
    for path in ("in/daemon", "in/daemon/new", "in/daemon/tmp", "done/daemon"):
        facts = (house.host.spool / path).stat()
        assert (facts.st_uid, facts.st_mode & 0o777) == (user.uid, 0o700)
    spool.close()


DELIVER = """
import os, sys
from pathlib import Path
from reconciler.spool import deliver
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("a.yaml", "a.yaml", "A.yaml"):
    print(deliver(Path(sys.argv[1]), submitter=sys.argv[2], name=name, data=b"x" * 300000))
"""


def test_a_submitter_delivers_whole_and_replaces_nothing(house: House) -> None:
    def deliver_as(submitter: str) -> list[str]:
        # The package may be in a directory that the submitter cannot read, so it is imported before root is given up.
        done = subprocess.run(
            [sys.executable, "-c", DELIVER, str(house.host.spool), submitter],
            check=True, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.stdout.splitlines()

    for parent in (house.root, *house.root.parents):
        if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(0o711)
    first, second, third = deliver_as(SUBMITTER)
    assert "a.yaml" in first
    assert "stem_used" in second
    assert "bad_name" in third
    assert (new(house) / "a.yaml").stat().st_size == 300_000
    assert (new(house) / "a.yaml").stat().st_nlink == 1
    assert all("not_a_submitter" in line or "bad_name" in line for line in deliver_as("root"))
    assert isinstance(deliver(house.host.spool, submitter="games", name="a.yaml", data=b""), Refused)


def waiting(*names: str) -> list[Waiting]:
    """Names as `submitter number`, in the order of their arrival."""
    found = []
    for arrived, name in enumerate(names):
        submitter, _, stem = name.partition(" ")
        found.append(Waiting(arrived, Submitter(submitter, 1, 1), stem.encode()))
    return found


@pytest.mark.parametrize(
    ("names", "running", "quota", "depth", "over"),
    [
        pytest.param(["a 1", "a 2"], {}, 2, 9, [], id="as many as may"),
        pytest.param(["a 1", "a 2", "a 3"], {}, 2, 9, ["a 3 over_quota"], id="one too many: the newest"),
        pytest.param(["a 1", "a 2"], {"a": 1}, 2, 9, ["a 2 over_quota"], id="what runs counts"),
        pytest.param(["a 1"], {"a": 5}, 2, 9, ["a 1 over_quota"], id="more run than may"),
        pytest.param(["a 1", "a 2", "a 3", "b 1"], {"b": 0}, 2, 9, ["a 3 over_quota"], id="another's is not touched"),
        pytest.param(["a 1", "a 2", "a 3", "b 1"], {}, 9, 3, ["a 3 spool_full"], id="too many: the longest queue"),
        pytest.param(
            ["a 1", "a 2", "a 3", "b 1", "b 2"], {}, 9, 2, ["a 2 spool_full", "a 3 spool_full", "b 2 spool_full"],
            id="both give up until there is room",
        ),
        pytest.param(["a 1", "b 1"], {}, 9, 0, ["a 1 spool_full", "b 1 spool_full"], id="none"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_quota_or_the_depth_is_the_newest_of_whoever_has_most(
    names: list[str], running: dict[str, int], quota: int, depth: int, over: list[str]
) -> None:
    kept, refused = beyond(waiting(*names), running=running, quota=quota, depth=depth)
    assert sorted(f"{one.submitter.name} {one.name.decode()} {why.code}" for one, why in refused) == over
    assert len(kept) + len(refused) == len(names)


def test_a_flood_is_refused_beyond_the_quota_with_results_and_others_go_on(tmp_path: Path) -> None:
    house = House(tmp_path, keep=Keep(quota=3))
    policy = in_force(Effective(agent=agent(submitters=(SUBMITTER, "daemon")), layers=()), max_parallel_runs=1)

    async def main() -> None:
        async with house.daemon(policy) as (jobs, _):
            house.submit("a0.yaml", job("sleep 30"))
            await until(lambda: house.starts() == 1)
            for number in range(1, 8):
                house.submit(f"a{number}.yaml", job("exit 0"))
            await until(lambda: len(house.waiting()) == 2 and len(house.results()) == 5)
            assert house.waiting() == ["a1.yaml", "a2.yaml"]
            assert {one["refusal"]["code"] for one in house.results()} == {"over_quota"}
            house.submit("b.yaml", job("exit 0"), submitter="daemon")
            (run,) = jobs.runs
            house.submit("z.yaml", json.dumps({"version": 1, "kind": "cancel", "run": run}).encode())
            assert (await house.wait_for("z"))["code"] == "cancel_sent"
            assert (await house.wait_for("b", submitter="daemon"))["code"] == "exited"
            assert (await house.wait_for("a1"))["code"] == "exited"

    anyio.run(main)
    assert [row["code"] for row in house.rows("refuse")] == ["over_quota"] * 5
