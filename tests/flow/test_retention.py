"""What the spool keeps of results and quarantine, what goes, and what a submitter cannot make of that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler import retention
from reconciler.host import Keep
from reconciler.retention import Kept, due
from reconciler.settle import tidy
from tests.flow.house import SUBMITTER, House, in_force, job, own

if TYPE_CHECKING:
    from pathlib import Path

S = 10**9
HOUR = 3600 * S


def kept(*ages: int, owner: str = "a", size: int = 1) -> list[Kept]:
    """Results of these ages in hours, named by them."""
    return [Kept(owner, str(age), 1000 * HOUR - age * HOUR, size) for age in ages]


@pytest.mark.parametrize(
    ("found", "keep", "gone"),
    [
        pytest.param(kept(1, 2, 3), Keep(), [], id="nothing is old or many"),
        pytest.param(kept(1, 48, 49), Keep(age=2 * 86400), ["49"], id="what is too old"),
        pytest.param(kept(1, 2, 3), Keep(results=1), ["3", "2"], id="beyond the count, the oldest first"),
        pytest.param(kept(1, 2, 3, size=10), Keep(bytes=25), ["3"], id="beyond the bytes"),
        pytest.param(kept(1, 2) + kept(1, 2, owner="b"), Keep(results=2), [], id="each submitter has its own"),
        pytest.param(kept(0, 0, 0), Keep(results=1), [], id="not what is a moment old"),
    ],
)
def test_what_is_beyond_age_count_or_bytes_goes(found: list[Kept], keep: Keep, gone: list[str]) -> None:
    assert [one.name for one in due(found, keep, now_ns=1000 * HOUR)] == gone


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A house that keeps two results, and takes nothing for fresh."""
    monkeypatch.setattr(retention, "_FRESH_NS", 0)
    return House(tmp_path, keep=Keep(results=2))


def serve(house: House, *stems: str, spared: frozenset[tuple[str, str]] = frozenset(), rounds: int = 1) -> None:
    """Run jobs one after the other, then tidy up."""

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            for stem in stems:
                house.submit(f"{stem}.yaml", job("exit 0"))
                await house.wait_for(stem)
            for _ in range(rounds):
                await tidy(jobs._shell, jobs._spool, spared)

    anyio.run(main)


def done(house: House) -> list[str]:
    """What is in the submitter's directory of results."""
    return sorted(path.name for path in (house.host.spool / "done" / SUBMITTER).iterdir())


def removed(house: House) -> list[dict[str, Any]]:
    """Rows that tell of a removal."""
    return house.rows("spool.removed")


def test_the_oldest_results_go_and_a_row_says_which(house: House) -> None:
    serve(house, "a", "b", "c", "d")
    assert done(house) == ["c", "d"]
    (row,) = removed(house)
    assert (row["object"], row["detail"]["names"]) == (f"done/{SUBMITTER}", ["a", "b"])
    assert row["detail"]["bytes"] > 0


def test_nothing_of_a_live_run_goes(house: House) -> None:
    serve(house, "a", "b", "c", spared=frozenset({(SUBMITTER, "a")}))
    assert done(house) == ["a", "b", "c"]


def test_what_is_not_a_results_stays_and_nothing_is_followed(house: House, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "result.json").write_text("precious")

    async def main() -> None:
        async with house.daemon(in_force()):
            house.submit("a.yaml", job("exit 0"))
            await house.wait_for("a")

    anyio.run(main)
    mine = house.host.spool / "done" / SUBMITTER
    (mine / "a" / "more").mkdir()
    (mine / "link").symlink_to(victim)
    (mine / "planted").mkdir()
    (mine / "planted" / "output.log").symlink_to(victim / "result.json")
    (mine / "planted" / "result.json").write_text("{}")
    serve(house, "b", "c", "d", rounds=2)
    assert (victim / "result.json").read_text() == "precious"
    assert done(house) == ["a", "c", "d", "link"]
    assert [path.name for path in (mine / "a").iterdir()] == ["more"]
    assert len(removed(house)) == 1


def test_nothing_goes_that_cannot_be_audited(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            for stem in ("a", "b", "c"):
                house.submit(f"{stem}.yaml", job("exit 0"))
                await house.wait_for(stem)
            jobs._shell.audit._audit._failure = "broken"  # type: ignore[attr-defined]  # the journal
            await tidy(jobs._shell, jobs._spool, frozenset())
            assert done(house) == ["a", "b", "c"]

    del monkeypatch
    anyio.run(main)


def test_a_deep_tree_in_quarantine_goes_level_by_level(house: House, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    serve(house)
    aside = house.host.spool / "quarantine"
    here = aside / "20250101T000000-00000000"
    for _ in range(60):
        here = here / "d"
    here.mkdir(parents=True)
    (here / "link").symlink_to(outside)
    for number in range(3):
        (aside / f"20250101T000000-0000000{number + 1}").mkdir()
        (aside / f"20250101T000000-0000000{number + 1}" / "x.txt").write_text("x")
        own(aside / f"20250101T000000-0000000{number + 1}" / "x.txt", "daemon")
    os.utime(aside / "20250101T000000-00000000")
    house.keep = Keep(results=2, age=0)
    serve(house, rounds=130)
    assert list(aside.iterdir()) == []
    assert outside.read_text() == "precious"
