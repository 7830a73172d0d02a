"""Hints: every change gives one, whatever happens to the directory or to the watcher; the timed scan goes on."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.watch import HintKind, Watch, watching

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEVER = 3600.0
SOON = 3.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "policy"
    (made / "agents").mkdir(parents=True)
    (made / "platform.yaml").write_text("x")
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watcher look up more often than a daemon needs, so that the tests are quick."""
    monkeypatch.setattr("reconciler.watch._RUST_TIMEOUT_MS", 200)
    monkeypatch.setattr("reconciler.watch._REBUILD_S", 0.3)


async def settle(watch: Watch) -> None:
    """Take the hints of the start: at once, and when the watcher is on."""
    with anyio.move_on_after(0.8):
        async for _ in watch:
            pass


async def hinted(watch: Watch) -> HintKind:
    with anyio.fail_after(SOON):
        return (await anext(watch)).kind


def check(root: Path, act: Callable[[], object], *, kinds: set[HintKind] | None = None) -> None:
    """Assert that `act` gives a hint."""

    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            act()
            assert await hinted(watch) in (kinds or set(HintKind))

    anyio.run(main)


def test_the_first_hint_comes_at_once_and_another_when_the_watcher_is_on(root: Path) -> None:
    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            assert await hinted(watch) is HintKind.START
            assert await hinted(watch) is HintKind.WATCHING
            assert not list(watch.troubles)

    anyio.run(main)


@pytest.mark.parametrize(
    "path",
    ["platform.yaml", "agents/new.yaml", "node_modules/x.yaml", ".git/HEAD", ".git/index.lock", "a/b/c.yaml"],
)
def test_a_file_anywhere_gives_a_hint_where_the_librarys_own_filter_would_drop_it(path: str, root: Path) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    check(root, lambda: (root / path).write_text("y"), kinds={HintKind.EVENT})


def test_gits_object_store_gives_none(root: Path) -> None:
    (root / ".git" / "objects" / "aa").mkdir(parents=True)

    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            (root / ".git" / "objects" / "aa" / "blob").write_text("y")
            with pytest.raises(TimeoutError):
                await hinted(watch)

    anyio.run(main)


def test_many_changes_are_few_hints(root: Path) -> None:
    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            for number in range(500):
                (root / "agents" / f"a{number}.yaml").write_text("x")
            hints = 0
            with anyio.move_on_after(1):
                async for _ in watch:
                    hints += 1
            assert 1 <= hints <= 10

    anyio.run(main)


def test_a_symlinked_root_that_flips_gives_a_hint_and_is_followed(root: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(root, second)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "current"
    link.symlink_to(root)

    async def main() -> None:
        async with watching([link], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            link.with_name("next").symlink_to(second)
            link.with_name("next").rename(link)
            await hinted(watch)
            await settle(watch)
            (second / "platform.yaml").write_text("z")
            assert await hinted(watch) is HintKind.EVENT

    anyio.run(main)


def test_a_root_that_is_replaced_gives_a_hint_and_the_new_one_is_watched(root: Path) -> None:
    def replace() -> None:
        root.rename(root.with_name("old"))
        root.mkdir()

    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            replace()
            await hinted(watch)
            await settle(watch)
            (root / "platform.yaml").write_text("z")
            assert await hinted(watch) is HintKind.EVENT

    anyio.run(main)


def test_a_parents_parent_that_is_replaced_gives_a_hint(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "policy"
    root.mkdir(parents=True)

    def replace() -> None:
        (tmp_path / "a").rename(tmp_path / "old")
        root.mkdir(parents=True)

    check(root, replace)


def test_a_root_that_is_missing_is_said_and_found_when_it_comes(tmp_path: Path) -> None:
    root = tmp_path / "policy"

    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            assert "does not exist" in "".join(watch.troubles)
            root.mkdir()
            await hinted(watch)
            await settle(watch)
            assert not list(watch.troubles)
            (root / "platform.yaml").write_text("z")
            assert await hinted(watch) is HintKind.EVENT

    anyio.run(main)


def test_a_name_that_ends_the_librarys_loop_is_a_hint_and_the_watcher_comes_back(root: Path) -> None:
    async def main() -> None:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            (root / os.fsdecode(b"\xff.yaml")).touch()
            assert await hinted(watch) is HintKind.LOST
            assert "events were lost" in "".join(watch.troubles)
            await settle(watch)
            await settle(watch)
            assert not list(watch.troubles)
            (root / "platform.yaml").write_text("z")
            assert await hinted(watch) is HintKind.EVENT

    anyio.run(main)


def test_the_timed_scan_goes_on_without_any_event(root: Path) -> None:
    async def main() -> None:
        async with watching([root], owner="root", scan_interval=0.2) as watch:
            await settle(watch)
            assert await hinted(watch) is HintKind.SCAN
            assert await hinted(watch) is HintKind.SCAN

    anyio.run(main)


def test_two_roots_are_watched_and_the_hint_says_which(root: Path, tmp_path: Path) -> None:
    trust = tmp_path / "trust"
    trust.mkdir()

    async def main() -> None:
        async with watching([root, trust], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            (trust / "revoked").write_text("")
            with anyio.fail_after(SOON):
                assert (await anext(watch)).root == trust

    anyio.run(main)


def test_leaving_ends_every_thread_quickly(root: Path) -> None:
    async def main() -> float:
        async with watching([root], owner="root", scan_interval=NEVER) as watch:
            await settle(watch)
            started = time.monotonic()
        return time.monotonic() - started

    assert anyio.run(main) < 0.5
